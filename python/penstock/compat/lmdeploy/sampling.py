"""`options`: the sampling parameters of Penstock for a `GenerationConfig`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock import SamplingOptions
    from penstock.compat.lmdeploy.generation_config import GenerationConfig
    from penstock.compat.lmdeploy.tokenizer import Tokenizer

__all__ = ["options"]


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
    request samples. Raises `ArgumentError` for a value that is not supported.
    """
    stop, stop_token_ids = _stops(config, tokenizer, template_stop_words)
    values: SamplingOptions = {
        "max_tokens": max_tokens,
        "min_tokens": min(config.min_new_tokens or 0, max_tokens),
        "stop": stop,
        "stop_token_ids": stop_token_ids,
        "include_stop_str_in_output": config.include_stop_str_in_output,
        "ignore_eos": config.ignore_eos,
        "temperature": 0.0 if config.is_greedy else config.temperature,
        "top_k": config.resolved_top_k,
        "top_p": config.top_p or 1.0,
        "min_p": config.min_p,
        "typical_p": 1.0,
        "seed": seed,
        "repetition_penalty": config.repetition_penalty,
        "no_repeat_ngram_size": 0,
        "skip_special_tokens": config.skip_special_tokens,
    }
    if not config.skip_special_tokens:
        values["spaces_between_special_tokens"] = config.spaces_between_special_tokens
    if config.bad_token_ids:
        values["bad_token_ids"] = config.bad_token_ids
    if config.bad_words:
        values["bad_words"] = config.bad_words
    if config.logprobs is not None:
        values |= {"logprobs": True, "top_logprobs": config.logprobs}
    if config.output_logits is not None:
        values["output_logits"] = config.output_logits
    if config.output_last_hidden_state is not None:
        values["output_hidden_states"] = config.output_last_hidden_state
    return values


def _stops(
    config: GenerationConfig, tokenizer: Tokenizer, template_stop_words: Sequence[str] | None
) -> tuple[list[str], list[int]]:
    """The stop strings and the stop token ids. A word that is a special token is a token id."""
    words = list(config.stop_words or ())
    if not config.ignore_eos:
        words += template_stop_words or ()
    ids = dict.fromkeys(config.stop_token_ids or ())
    strings: dict[str, None] = {}
    for word in words:
        token = tokenizer.special_token_id(word)
        if token is None:
            strings[word] = None
        else:
            ids[token] = None
    return list(strings), list(ids)
