"""vLLM's `sampling_params`: the parameters of a request, and those of Penstock for them."""

from __future__ import annotations

import copy
import dataclasses
from enum import Enum
from typing import TYPE_CHECKING, Any

import penstock
from penstock._json import MAX_SCHEMA, loads
from penstock.compat.errors import invalid, refuse_all, renamed

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

    from penstock import SamplingOptions

__all__ = ["BeamSearchParams", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]

_SCORES = "logprobs has the most likely tokens, and penstock.Engine.generate(output_logits=...) all logits"
_SCHEMA = "the grammar of a JSON schema allows whitespace where JSON does"

#: Fields of `SamplingParams` with the only value that is accepted, and the reason.
UNSUPPORTED: Mapping[str, tuple[Any, str]] = {
    "extra_args": (None, "there are no plugins that read it"),
    "flat_logprobs": (False, "logprobs are lists of dicts"),
    "logprob_token_ids": (None, _SCORES),
    "prompt_logprob_start": (None, _SCORES),
    "prompt_logprob_token_ids": (None, _SCORES),
    "repetition_detection": (None, "use a penalty or penstock.Engine.generate(no_repeat_ngram_size=...)"),
    "routed_experts_prompt_start": (0, "models have no experts"),
    "thinking_token_budget": (None, "reasoning has no limit of its own"),
    "trace_decode_token_ids": (None, "use penstock.Engine.score for given tokens"),
    "watermarking": (None, "there is no watermark"),
}
#: Fields without an effect on results, there or here.
WITHOUT_EFFECT = {
    "output_text_buffer_length",
    "skip_clone",
    "spaces_between_special_tokens",
    "stream_interval",
}

UNSUPPORTED_FORMATS: Mapping[str, tuple[Any, str]] = {
    "disable_any_whitespace": (False, _SCHEMA),
    "structural_tag": (None, "use grammar, with references to special tokens"),
    "whitespace_pattern": (None, _SCHEMA),
}
UNSUPPORTED_OF_BEAMS: Mapping[str, tuple[Any, str]] = {
    "allowed_token_ids": (None, "a beam search has no allowed tokens"),
    "structured_outputs": (None, "a beam search has no format"),
    "watermarking": (None, "there is no watermark"),
}


class RequestOutputKind(Enum):
    """The outputs of `AsyncLLM.generate`: all output so far, the new one, or only the complete one."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclasses.dataclass
class StructuredOutputsParams:
    """The format of an output: one of `json` (a JSON schema), `regex`, `choice`, `grammar`, `json_object`.

    Raises `ValueError` unless it is exactly one.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None

    def __post_init__(self) -> None:
        refuse_all(vars(self), UNSUPPORTED_FORMATS)
        formats = (self.json, self.regex, self.choice, self.grammar, self.json_object)
        num_given = sum(value is not None for value in formats)
        if num_given != 1:
            message = f"{num_given} of json, regex, choice, grammar and json_object are given; it must be one"
            raise ValueError(message)

    def options(self) -> SamplingOptions:
        """The keywords of `penstock.SamplingParams`."""
        if self.json is not None:
            if isinstance(self.json, str) and len(self.json) > MAX_SCHEMA:
                message = f"json has {len(self.json)} characters; the limit is {MAX_SCHEMA}"
                raise ValueError(message)
            schema = loads(self.json) if isinstance(self.json, str) else self.json
            holder = {"schema": schema, "strict": self.disable_additional_properties}
            return {"response_format": {"type": "json_schema", "json_schema": holder}}
        if self.regex is not None:
            return {"regex": self.regex}
        if self.choice is not None:
            return {"choice": self.choice}
        if self.grammar is not None:
            return {"grammar": self.grammar}
        return {"response_format": {"type": "json_object"}} if self.json_object else {}


@dataclasses.dataclass
class SamplingParams:
    """The parameters of a request, with vLLM's defaults; docs/vllm.md lists their effects.

    Fields can be changed until a request uses them. Raises `UnsupportedError`, which is a `ValueError`, for a
    value that is not supported, `penstock.InvalidRequestError`, which is one too, for an invalid one.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    watermarking: bool | None = None
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprob_token_ids: Any = None
    prompt_logprob_start: int | None = None
    logprob_token_ids: list[int] | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None
    skip_clone: bool = False
    output_text_buffer_length: int = 0
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None
    bad_words: list[str] | None = None
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: Any = None
    routed_experts_prompt_start: int = 0
    trace_decode_token_ids: list[int] | None = None

    def __post_init__(self) -> None:
        self.stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        self.stop_token_ids = self.stop_token_ids or []
        self.bad_words = self.bad_words or []
        if self.seed == -1:
            self.seed = None
        if self.thinking_token_budget == -1:
            self.thinking_token_budget = None
        self.options()

    @staticmethod
    def from_optional(**fields: Any) -> SamplingParams:
        """The parameters; `None` is the default, except for `max_tokens`."""
        given = {name: value for name, value in fields.items() if value is not None or name == "max_tokens"}
        return SamplingParams(**given)

    def clone(self) -> Self:
        """A copy."""
        return copy.deepcopy(self)

    def options(self) -> SamplingOptions:
        """The keywords of `penstock.SamplingParams`, without those that depend on the model.

        None of the model's defaults applies, except for the end tokens.
        """
        refuse_all(vars(self), UNSUPPORTED)
        values: SamplingOptions = {
            "n": self.n,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "typical_p": 1.0,
            "epsilon_cutoff": 0.0,
            "no_repeat_ngram_size": 0,
            "seed": self.seed,
            "stop": self.stop,
            "stop_token_ids": self.stop_token_ids,
            "ignore_eos": self.ignore_eos,
            "max_tokens": self.max_tokens,
            "min_tokens": self.min_tokens,
            "skip_special_tokens": self.skip_special_tokens,
            "include_stop_str_in_output": self.include_stop_str_in_output,
            "logit_bias": self.logit_bias,
            "allowed_token_ids": self.allowed_token_ids,
            "bad_words": self.bad_words,
            "use_prefix_cache": not self.skip_reading_prefix_cache,
        }
        if self.structured_outputs is not None:
            if not isinstance(self.structured_outputs, StructuredOutputsParams):
                raise invalid("structured_outputs", self.structured_outputs, "StructuredOutputsParams")
            values |= self.structured_outputs.options()
        penstock.SamplingParams(**values)
        return values


@dataclasses.dataclass
class BeamSearchParams:
    """The parameters of `LLM.beam_search`. Raises as `SamplingParams` does."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    skip_special_tokens: bool = True
    watermarking: bool | None = None
    allowed_token_ids: list[int] | None = None

    def __post_init__(self) -> None:
        self.options()

    def options(self) -> SamplingOptions:
        """The keywords of `penstock.SamplingParams`, without log probabilities."""
        refuse_all(vars(self), UNSUPPORTED_OF_BEAMS)
        try:
            penstock.SamplingParams(num_beams=self.beam_width)
        except penstock.InvalidRequestError as error:
            raise renamed(error, {"num_beams": "beam_width"}) from None
        values: SamplingOptions = {
            "n": self.beam_width,
            "num_beams": self.beam_width,
            "max_tokens": self.max_tokens,
            "ignore_eos": self.ignore_eos,
            "repetition_penalty": 1.0,
            "no_repeat_ngram_size": 0,
        }
        if self.beam_width == 1:
            values["temperature"] = 0.0
        else:
            values["length_penalty"] = self.length_penalty
        penstock.SamplingParams(**values)
        return values
