"""`engine_options`: the options of Penstock's engine for the arguments of `Llama`."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from penstock.compat.errors import refuse, refuse_all, unexpected
from penstock.compat.llama_cpp.llama_speculative import LlamaPromptLookupDecoding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from penstock import EngineOptions

__all__ = ["check_others", "engine_options", "with_hints"]

P = ParamSpec("P")
R = TypeVar("R")

#: Arguments that have no effect on results, there or here.
WITHOUT_EFFECT = {
    *("flash_attn", "logits_all", "n_threads_batch", "n_ubatch", "no_perf", "numa", "offload_kqv"),
    *("op_offload", "split_mode", "swa_full", "tensor_split", "use_mlock", "use_mmap", "verbose"),
}

_ROPE = "the model's rotary embedding is that of its file; penstock.Engine(config_overrides=...) changes it"
_CACHE_TYPE = "choose the type of the KV cache with penstock.Engine(kv_cache_dtype=...)"
_LORA = "an adapter is applied as it is trained, to the weights of the model"

#: Arguments with the only value that is accepted, and the reason.
UNSUPPORTED: Mapping[str, tuple[Any, str]] = {
    "attention_type": (-1, "attention is that of the model"),
    "chat_handler": (None, "images are not supported yet; chats are rendered by templates"),
    "kv_overrides": (None, "metadata is that of the file; penstock.Engine(config_overrides=...) changes it"),
    "last_n_tokens_size": (64, "penalties count all tokens, of any number"),
    "lora_base": (None, _LORA),
    "lora_scale": (1.0, _LORA),
    "rope_freq_base": (0.0, _ROPE),
    "rope_freq_scale": (0.0, _ROPE),
    "rope_scaling_type": (-1, _ROPE),
    "spm_infill": (False, "the prompt of an infill is written by the caller"),
    "tokenizer": (None, "the model's own is used; penstock.Engine(tokenizer=...) reads another one"),
    "type_k": (None, _CACHE_TYPE),
    "type_v": (None, _CACHE_TYPE),
    "yarn_attn_factor": (1.0, _ROPE),
    "yarn_beta_fast": (32.0, _ROPE),
    "yarn_beta_slow": (1.0, _ROPE),
    "yarn_ext_factor": (-1.0, _ROPE),
    "yarn_orig_ctx": (0, _ROPE),
}


def names_of(function: Callable[..., Any]) -> list[str]:
    """The names of a function's arguments that a call can name."""
    kinds = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = inspect.signature(function).parameters.values()
    return [found.name for found in parameters if found.kind in kinds and found.name != "self"]


def with_hints(method: Callable[P, R]) -> Callable[P, R]:
    """The method with the nearest name in its error for an unknown argument."""
    names = names_of(method)

    @functools.wraps(method)
    def call(*arguments: P.args, **keywords: P.kwargs) -> R:
        for name in keywords:
            if name not in names:
                raise unexpected(method.__qualname__, name, names)
        return method(*arguments, **keywords)

    return call


def check_others(others: Mapping[str, Any], names: Iterable[str]) -> None:
    """Check the arguments without a meaning here; `names` are those with one.

    Raises `UnsupportedError` for a value that would change results, `TypeError` for an unknown argument.
    """
    refuse_all(others, UNSUPPORTED)
    for name in others:
        if name not in UNSUPPORTED and name not in WITHOUT_EFFECT:
            raise unexpected("Llama", name, [*names, *UNSUPPORTED, *WITHOUT_EFFECT])


def engine_options(
    *,
    n_ctx: int,
    n_threads: int | None,
    n_gpu_layers: int,
    main_gpu: int,
    has_adapter: bool,
    draft_model: object,
) -> EngineOptions:
    """The keywords of `penstock.Engine`."""
    options: EngineOptions = {"device": "cpu" if n_gpu_layers == 0 else None}
    if n_gpu_layers != 0 and main_gpu:
        options["device"] = f"cuda:{main_gpu}"
    if n_ctx:
        options["max_model_len"] = n_ctx
    if n_threads:
        options["threads"] = n_threads
    if has_adapter:
        options["max_adapters"] = 1
    if isinstance(draft_model, LlamaPromptLookupDecoding):
        options["speculation"] = "ngram"
        options["num_speculative_tokens"] = draft_model.num_pred_tokens
    elif draft_model is not None:
        refuse("draft_model", draft_model, "use LlamaPromptLookupDecoding; the output is the same")
    return options
