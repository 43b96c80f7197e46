"""`Sampling`: the sampling arguments of a request, and the parameters of Penstock for them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from penstock.compat.errors import invalid, refuse
from penstock.compat.llama_cpp.llama_grammar import LlamaGrammar
from penstock.compat.llama_cpp.processors import with_arrays

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from penstock import SamplingOptions
    from penstock.compat.llama_cpp.processors import LogitsProcessor, StoppingCriteria

__all__ = ["Sampling"]

_MIROSTAT = "the filters are top_k, top_p, min_p and typical_p"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """Arguments that completions, chats and `generate` share."""

    temperature: float
    top_p: float
    min_p: float
    typical_p: float
    top_k: int
    frequency_penalty: float
    presence_penalty: float
    repeat_penalty: float
    mirostat_mode: int
    seed: int
    stop: str | Iterable[str] | None = None
    logit_bias: Mapping[int, float] | Mapping[str, float] | None = None
    logits_processor: Iterable[LogitsProcessor] | None = None
    stopping_criteria: Iterable[StoppingCriteria] | None = None
    grammar: LlamaGrammar | None = None

    def options(self, *, max_tokens: int, end: int | None) -> SamplingOptions:
        """The keywords of `penstock.SamplingParams`; `end` is the model's end token.

        None of them is left to the model's `generation_config.json`, except for the end tokens.
        """
        if self.mirostat_mode:
            refuse("mirostat_mode", self.mirostat_mode, _MIROSTAT)
        stop: Any = () if self.stop is None else self.stop
        values: SamplingOptions = {
            "max_tokens": max_tokens,
            "temperature": self.temperature,
            "top_k": 1 if self.top_p <= 0 else max(self.top_k, 0),
            "top_p": self.top_p if 0 < self.top_p < 1 else 1.0,
            "min_p": max(self.min_p, 0.0),
            "typical_p": min(self.typical_p, 1.0),
            "epsilon_cutoff": 0.0,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "repetition_penalty": self.repeat_penalty,
            "no_repeat_ngram_size": 0,
            "seed": self.seed % 2**64,
            "stop": stop,
        }
        if self.temperature < 0:  # the distribution of the model, without filters
            values |= {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}
        if self.logit_bias:
            values["logit_bias"] = self.logit_bias
        processors = with_arrays(self.logits_processor, self.stopping_criteria, end)
        if processors:
            values["logits_processors"] = processors
        if self.grammar is not None:
            if not isinstance(self.grammar, LlamaGrammar):
                raise invalid("grammar", self.grammar, "a LlamaGrammar")
            values |= self.grammar.options()
        return values
