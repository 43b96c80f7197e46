"""`options`: the sampling parameters of Penstock for a `GenerationConfig`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from penstock._shown import shown
from penstock.compat.lmdeploy.checks import refuse
from penstock.compat.lmdeploy.errors import UnsupportedError
from penstock.compat.lmdeploy.logits_processors import NgramStop, with_tensors

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock import SamplingOptions
    from penstock.compat.lmdeploy.generation_config import GenerationConfig
    from penstock.compat.lmdeploy.tokenizer import Tokenizer

__all__ = ["options"]

#: Texts of a list of words. Each is tokenised.
_MAX_TEXTS = 1024

logger = logging.getLogger("penstock.lmdeploy")

_UNSUPPORTED = {
    "return_ppl": "get_ppl(token_ids) returns it",
    "with_cache": "requests are not migrated between engines",
    "preserve_cache": "requests are not migrated between engines",
    "migration_request": "requests are not migrated between engines",
    "return_routed_experts": "experts are not reported",
}


def options(
    config: GenerationConfig,
    *,
    max_tokens: int,
    tokenizer: Tokenizer,
    template_stop_words: Sequence[str] | None = None,
    seed: int,
) -> SamplingOptions:
    """The keywords of `penstock.SamplingParams` for a generation configuration.

    None of them is left to the model's `generation_config.json`, except for the end tokens. `max_tokens` is
    the number of tokens that the session has left, at most `config.max_new_tokens`. `seed` is used if the
    request samples. The keywords are those of one request: `repetition_ngram_size` keeps a state.

    Raises `UnsupportedError` for a value that is not supported, `ArgumentError` for one that is invalid.
    """
    config.check()
    for name, reason in _UNSUPPORTED.items():
        if getattr(config, name):
            message = f"{name} is {shown(getattr(config, name))}; it is not supported: {reason}"
            raise UnsupportedError(message)
    if config.n > 1:
        logger.warning("n is %s; streams and sessions have one choice", config.n)
    is_greedy = config.is_greedy
    values: SamplingOptions = {
        "max_tokens": max_tokens,
        "min_tokens": min(config.min_new_tokens or 0, max_tokens),
        "include_stop_str_in_output": config.include_stop_str_in_output,
        "ignore_eos": config.ignore_eos,
        "temperature": 0.0 if is_greedy else config.temperature,
        "top_k": config.resolved_top_k,
        "top_p": config.top_p or 1.0,
        "min_p": config.min_p,
        "typical_p": 1.0,
        "epsilon_cutoff": 0.0,
        "seed": int(seed) % 2**64,
        "repetition_penalty": config.repetition_penalty,
        "no_repeat_ngram_size": 0,
        "skip_special_tokens": config.skip_special_tokens,
    }
    if not config.skip_special_tokens:
        values["spaces_between_special_tokens"] = config.spaces_between_special_tokens
    if config.logprobs is not None:
        values |= {"logprobs": True, "top_logprobs": config.logprobs}
    if config.output_logits is not None:
        values["output_logits"] = config.output_logits
    if config.output_last_hidden_state is not None:
        values["output_hidden_states"] = config.output_last_hidden_state
    _add_format(values, config.response_format)
    _add_stop_words(values, config, tokenizer, template_stop_words)
    _add_bad_words(values, config, tokenizer)
    processors = [with_tensors(processor) for processor in config.logits_processors or ()]
    if config.repetition_ngram_size and config.repetition_ngram_threshold:
        processors.append(_ngram_stop(values, config, tokenizer))
    if processors:
        values["logits_processors"] = processors
    return values


def _add_format(values: SamplingOptions, response_format: Mapping[str, Any] | None) -> None:
    """Add `response_format` or `regex`."""
    kind = None if response_format is None else response_format["type"]
    if response_format is None or kind == "text":
        return
    if kind == "regex_schema":
        values["regex"] = response_format["regex_schema"]
    elif kind == "json_object":
        values["response_format"] = {"type": "json_object"}
    else:
        values["response_format"] = {"type": "json_schema", "json_schema": response_format["json_schema"]}


def _add_stop_words(
    values: SamplingOptions,
    config: GenerationConfig,
    tokenizer: Tokenizer,
    template_stop_words: Sequence[str] | None,
) -> None:
    """Add stop strings, stop token ids, and token sequences for words with special tokens."""
    words = _Words("stop_words", config.stop_words, tokenizer)
    if template_stop_words and not config.ignore_eos:
        words.add(template_stop_words)
    values["stop"] = list(words.texts)
    values["stop_token_ids"] = list(dict.fromkeys([*(config.stop_token_ids or ()), *words.ids]))
    if words.sequences:
        values["stop_token_sequences"] = words.sequences


def _add_bad_words(values: SamplingOptions, config: GenerationConfig, tokenizer: Tokenizer) -> None:
    """Add what forbids words: a grammar of all texts without them, where there is no other format."""
    words = _Words("bad_words", config.bad_words, tokenizer)
    bad_ids = [*(config.bad_token_ids or ()), *words.ids]
    ends = tokenizer.model.eos_token_ids
    if words.texts and (not ends or "regex" in values or "response_format" in values):
        values["bad_words"] = list(words.texts)
    elif words.texts:
        values["grammar"] = _grammar_without(words.texts, tokenizer)
        if config.ignore_eos:  # a grammar needs end tokens: they are never generated, unless asked for
            values["ignore_eos"] = False
            kept = {*(values["stop_token_ids"] or ()), *(ends[:1] if config.repetition_ngram_size else ())}
            bad_ids += [token for token in ends if token not in kept]
    if bad_ids:
        values["bad_token_ids"] = bad_ids
    if words.sequences:
        values["bad_token_sequences"] = words.sequences


def _grammar_without(words: Iterable[str], tokenizer: Tokenizer) -> str:
    """The grammar of the texts that contain none of these words; special tokens can be between texts."""
    alternatives = "|".join(map(_pattern, words))
    text = rf"TEXT: /(?s:.+)/ & ~/(?s:.*)({alternatives})(?s:.*)/"
    special = tokenizer.special_token_ids
    if not special:
        return f"start: TEXT?\n{text}"
    return f"start: TEXT? (special+ TEXT?)*\nspecial: <[{_ranges(special)}]>\n{text}"


def _pattern(word: str) -> str:
    """A regular expression of a word."""
    return "".join(
        character if character.isalnum() or not character.isascii() else rf"\x{ord(character):02x}"
        for character in word
    )


def _ranges(ids: Iterable[int]) -> str:
    """Ascending token ids as ranges, such as `0-3,17-17`."""
    ranges: dict[int, list[int]] = {}
    for position, token in zip(count(), ids):
        ranges.setdefault(token - position, []).append(token)
    return ",".join(f"{tokens[0]}-{tokens[-1]}" for tokens in ranges.values())


def _ngram_stop(values: SamplingOptions, config: GenerationConfig, tokenizer: Tokenizer) -> NgramStop:
    """The processor that ends a repetitive output, by an end token."""
    if "regex" in values or "response_format" in values:
        message = (
            f"repetition_ngram_size is {config.repetition_ngram_size}; it is not supported beside "
            "response_format, which requires a complete output"
        )
        raise UnsupportedError(message)
    ends = [*tokenizer.model.eos_token_ids, *(values["stop_token_ids"] or ())]
    if not ends:
        message = "repetition_ngram_size needs an end token; the model has none: set stop_token_ids"
        raise UnsupportedError(message)
    if config.ignore_eos:
        values["stop_token_ids"] = [*(values["stop_token_ids"] or ()), ends[0]]
    return NgramStop(
        size=config.repetition_ngram_size,
        threshold=config.repetition_ngram_threshold,
        min_tokens=values["min_tokens"] or 0,
        end=ends[0],
        forbids_end=config.ignore_eos,
    )


class _Words:
    """Words by kind: texts, single special tokens, and token sequences with special tokens."""

    def __init__(self, field: str, words: Sequence[str] | Sequence[int] | None, tokenizer: Tokenizer) -> None:
        self._field = field
        self._tokenizer = tokenizer
        self.texts: dict[str, None] = {}
        self.ids: dict[int, None] = {}
        self.sequences: list[list[int]] = []
        if words is not None:
            self.add(words)

    def add(self, words: Sequence[str] | Sequence[int]) -> None:
        if isinstance(words, str) or not isinstance(words, Sequence):
            refuse(self._field, words, "a list of texts")
        if (number := sum(isinstance(word, str) for word in words)) > _MAX_TEXTS:
            refuse(self._field, f"a list of {number} texts", f"a list of at most {_MAX_TEXTS}")
        for word in words:
            if isinstance(word, int):  # of an `EngineGenerationConfig`
                self.ids[word] = None
                continue
            if not isinstance(word, str) or not word:
                refuse(f"a word of {self._field}", word, "a text of at least one character")
            self._add_text(word)

    def _add_text(self, word: str) -> None:
        ids = self._tokenizer.model.encode(word, add_special_tokens=False)
        if not any(map(self._tokenizer.is_special, ids)):
            self.texts[word] = None
        elif len(ids) == 1:
            self.ids[ids[0]] = None
        else:
            self.sequences.append(ids)
