"""`GenerationConfig`: the parameters of a request."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from penstock.compat.lmdeploy.checks import check_choice, check_flags, check_integer, check_number, refuse

if TYPE_CHECKING:
    from penstock.compat.lmdeploy.tokenizer import Tokenizer

__all__ = ["EngineGenerationConfig", "GenerationConfig", "LogitsProcessor"]

logger = logging.getLogger("penstock.lmdeploy")

#: Called with the token ids so far and the logits of the next token, two tensors of torch; returns logits.
LogitsProcessor = Callable[[Any, Any], Any]
#: `top_k` if it is not set and `do_sample` is.
_SAMPLING_TOP_K = 50
_MAX_LOGPROBS = 1024
#: That of `penstock.SamplingParams`.
_MAX_CHOICES = 128
_FLAGS = (
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "return_ppl",
    "with_cache",
    "preserve_cache",
    "return_routed_experts",
)


@dataclasses.dataclass
class GenerationConfig:
    """The parameters of a request; docs/lmdeploy.md describes each of them.

    Raises `ArgumentError`, which is an `AssertionError` and a `ValueError`, for a value of the wrong type or
    out of range.
    """

    n: int = 1
    max_new_tokens: int | None = 512
    top_p: float = 1.0
    top_k: int | None = None
    temperature: float = 0.8
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    random_seed: int | None = None
    stop_words: list[str] | None = None
    bad_words: list[str] | None = None
    # The fields above have the order of LMDeploy's first version.
    do_sample: bool | None = None
    min_p: float = 0.0
    stop_token_ids: list[int] | None = None
    bad_token_ids: list[int] | None = None
    min_new_tokens: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logprobs: int | None = None
    response_format: Mapping[str, Any] | None = None
    logits_processors: list[LogitsProcessor] | None = None
    output_logits: Literal["all", "generation"] | None = None
    output_last_hidden_state: Literal["all", "generation"] | None = None
    include_stop_str_in_output: bool = False
    return_ppl: bool = False
    with_cache: bool = False
    preserve_cache: bool = False
    migration_request: object = None
    return_routed_experts: bool = False
    repetition_ngram_size: int = 0
    repetition_ngram_threshold: int = 0

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raise `ArgumentError` for a value that is not valid; requests check values that were changed."""
        check_integer(self, "n", low=1, high=_MAX_CHOICES)
        check_integer(self, "max_new_tokens", "min_new_tokens", optional=True)
        check_number(self, "top_p", "min_p", low=0, high=1)
        check_integer(self, "top_k", optional=True)
        check_number(self, "temperature", low=0, high=2)
        check_number(self, "repetition_penalty", low=0, above_low=True)
        check_integer(self, "random_seed", low=-(2**63), high=2**64 - 1, optional=True)
        check_integer(self, "logprobs", high=_MAX_LOGPROBS, optional=True)
        check_integer(self, "repetition_ngram_size", "repetition_ngram_threshold", low=-(2**63))
        check_flags(self, *_FLAGS, is_strict=True)
        if self.do_sample is not None:
            check_flags(self, "do_sample", is_strict=True)
        for name in ("output_logits", "output_last_hidden_state"):
            check_choice(self, name, (None, "all", "generation"))
        if self.repetition_ngram_size <= 0 or self.repetition_ngram_threshold <= 0:
            self.repetition_ngram_size = self.repetition_ngram_threshold = 0
        _check_contents(self)

    def update_from_hf_gen_cfg(
        self, generation_config: Mapping[str, Any], tokenizer_eos_token_id: int | None
    ) -> None:
        """Add end tokens to `stop_token_ids`: the tokenizer's, and those of a `generation_config.json`.

        Requests need no call of it: the model's end tokens end an output in any case.
        """
        ends = generation_config.get("eos_token_id")
        given = ends if isinstance(ends, (list, tuple)) else [ends]
        ids = [*(self.stop_token_ids or ()), tokenizer_eos_token_id, *given]
        self.stop_token_ids = list(dict.fromkeys(token for token in ids if token is not None))

    @property
    def lacks_sampling(self) -> bool:
        """Whether parameters of sampling have no effect because `do_sample` and `top_k` are not set."""
        is_unset = self.do_sample is None and self.top_k is None
        is_changed = (self.temperature, self.top_p, self.min_p) != (0.8, 1.0, 0.0)
        return is_unset and is_changed and bool(self.temperature and self.top_p)

    @property
    def is_greedy(self) -> bool:
        """Whether each token is the most likely one."""
        if self.do_sample is False or not self.temperature or not self.top_p:
            return True
        return self.resolved_top_k == 1

    @property
    def resolved_top_k(self) -> int:
        """`top_k`, or its default: 50 with `do_sample=True`, else 1."""
        if self.top_k is None:
            return _SAMPLING_TOP_K if self.do_sample else 1
        return self.top_k


@dataclasses.dataclass
class EngineGenerationConfig(GenerationConfig):
    """A `GenerationConfig` with token ids as stop words and bad words."""

    stop_words: list[int] | None = None  # type: ignore[assignment]
    bad_words: list[int] | None = None  # type: ignore[assignment]

    @staticmethod
    def From(gen_config: GenerationConfig, tokenizer: Tokenizer) -> EngineGenerationConfig:  # noqa: N802
        """The configuration with the token ids of its words.

        A list with a word of several tokens is dropped with a warning: a `GenerationConfig` with the words
        themselves stops at them and forbids them.
        """
        values = {field.name: getattr(gen_config, field.name) for field in dataclasses.fields(gen_config)}
        for name in ("stop_words", "bad_words"):
            values[name] = _token_ids(name, values[name], tokenizer)
        return EngineGenerationConfig(**values)


_FORMATS = ("json_schema", "regex_schema", "json_object", "text")


def _check_contents(config: GenerationConfig) -> None:
    """Check the items of lists and the type of `response_format`."""
    if isinstance(config, EngineGenerationConfig):
        words, limit = _is_token_id, "token ids"
    else:
        words, limit = _is_word, "texts of at least one character"
    for name in ("stop_words", "bad_words"):
        _check_list(config, name, words, limit)
    for name in ("stop_token_ids", "bad_token_ids"):
        _check_list(config, name, _is_token_id, "token ids")
    _check_list(config, "logits_processors", callable, "callables")
    value = config.response_format
    if value is None:
        return
    if not isinstance(value, Mapping):
        refuse("response_format", value, "a mapping with type")
    if value.get("type") not in _FORMATS:
        names = ", ".join(map(repr, _FORMATS))
        refuse("the type of response_format", value.get("type"), f"one of {names}")
    if value["type"] == "json_schema" and not isinstance(value.get("json_schema"), Mapping):
        refuse("json_schema of response_format", value.get("json_schema"), "a mapping")
    if value["type"] == "regex_schema" and not _is_word(value.get("regex_schema")):
        refuse("regex_schema of response_format", value.get("regex_schema"), "a regular expression")


def _check_list(config: GenerationConfig, name: str, is_valid: Callable[[Any], bool], limit: str) -> None:
    values = getattr(config, name)
    if values is None:
        return
    if not isinstance(values, (list, tuple)):
        refuse(name, values, f"None or a list of {limit}")
    for index, value in enumerate(values):
        if not is_valid(value):
            refuse(f"{name}[{index}]", value, f"one of a list of {limit}")


def _is_word(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _token_ids(name: str, words: list[str] | None, tokenizer: Tokenizer) -> list[int] | None:
    if words is None:
        return None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        refuse(name, words, "a list of texts")
    encoded = [tokenizer.model.encode(word, add_special_tokens=False) for word in words]
    if any(len(ids) != 1 for ids in encoded):
        logger.warning("%s has a word of several tokens and is dropped: %r", name, words)
        return None
    return [ids[0] for ids in encoded]
