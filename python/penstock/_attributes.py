"""Errors for unknown attributes: names the right one, also for former names and those of other engines."""

from __future__ import annotations

from opcode import opmap
from types import FrameType, ModuleType
from typing import TYPE_CHECKING

from penstock import _keywords

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import NoReturn

__all__ = ["Hinted", "missing", "missing_field", "missing_name"]

MODULE_HINTS = {
    **{name: f"import it: `from penstock import {name}`" for name in ("chat", "cli")},
    **dict.fromkeys(
        ("AsyncEngine", "AsyncLLM", "AsyncLLMEngine", "LLM", "LLMEngine", "Llama", "pipeline"), "use Engine"
    ),
    **dict.fromkeys(
        ("AsyncEngineArgs", "EngineArgs", "PytorchEngineConfig", "ServerArgs", "TurbomindEngineConfig"),
        "use EngineConfig, or keyword arguments of Engine",
    ),
    **dict.fromkeys(
        ("AutoModel", "AutoModelForCausalLM"), "use Engine(model), where model is a path or an id on the hub"
    ),
    **dict.fromkeys(("CrossEncoder", "FlagReranker"), "open an Engine, and call its rerank()"),
    "SentenceTransformer": "open an Engine, and call its embed()",
    "BeamSearchParams": "use SamplingParams(num_beams=...)",
    "CompletionOutput": "use Choice",
    "EngineStopped": "use EngineStoppedError",
    "GenerationConfig": "use SamplingParams",
    "GuidedDecodingParams": "use SamplingParams with response_format, regex, choice or grammar",
    "InvalidRequest": "use InvalidRequestError",
    "OutOfMemory": "use OutOfMemoryError",
    "Overloaded": "use OverloadedError",
    **dict.fromkeys(("count_tokens", "embed", "rerank"), "it is a method of an Engine"),
    "from_pretrained": "use Engine(model)",
    "num_tokens": "it is Tokenizer(model).count_tokens(prompt)",
    **dict.fromkeys(("AutoTokenizer", "PreTrainedTokenizerFast"), "use Tokenizer"),
    "LoRARequest": "load it with await engine.load_adapter(name, path), and use adapter=name",
    "RequestOutput": "use Result",
    "StructuredOutputsParams": "use SamplingParams with response_format, regex, choice or grammar",
}
#: For both `Engine` and `Blocking`, which share these methods.
_REQUEST_METHOD_HINTS = {
    **dict.fromkeys(
        ("cancel", "cancel_request", "abort_request"), "use abort(request.id), or the request's cancel()"
    ),
    "from_pretrained": "use Engine(model)",
    **dict.fromkeys(("add_request", "submit"), "use start_request()"),
    **dict.fromkeys(("async_generate", "complete", "create_completion", "generate_async"), "use generate()"),
    **dict.fromkeys(("chat", "create_chat_completion"), "pass messages to generate() or stream()"),
    **dict.fromkeys(("batch_generate", "batch_infer", "generate_batch"), "use generate_many()"),
    **dict.fromkeys(("generate_stream", "stream_generate", "stream_infer"), "use stream()"),
    **dict.fromkeys(("add_lora", "load_lora", "load_lora_adapter"), "use load_adapter()"),
    **dict.fromkeys(("remove_lora", "unload_lora", "unload_lora_adapter"), "use unload_adapter()"),
    **dict.fromkeys(("list_loras", "loras"), "use adapters"),
    "beam_search": "use generate(num_beams=...)",
    **dict.fromkeys(("create_embedding", "create_embeddings", "embeddings"), "use embed()"),
    **dict.fromkeys(("compute_score", "predict", "rank"), "use rerank()"),
    **dict.fromkeys(
        ("load_state", "save_state"),
        "pass the token ids so far as the prompt; the prefix cache has their blocks",
    ),
    "eval": "use score(), or generate(max_tokens=1) with output_logits",
    "get_ppl": "use score()",
    "reset": "requests share no state",
    "sample": "use generate()",
    "set_cache": "prompts are cached already; see the engine's prefix_cache and host_cache_bytes",
}
ENGINE_HINTS = {
    **_REQUEST_METHOD_HINTS,
    **dict.fromkeys(("clear_prefix_cache", "flush_cache", "flush_prefix_cache"), "use reset_prefix_cache()"),
    **dict.fromkeys(("get_metrics", "metrics"), "use stats()"),
    "check_health": "use health()",
    "is_sleeping": "use health().state",
    "wake_up": "use wake()",
    **dict.fromkeys(
        ("get_tokenizer", "tokenizer"),
        "use encode(), decode() and apply_chat_template(), or Tokenizer(model)",
    ),
    **dict.fromkeys(("shutdown", "stop"), "use aclose(), or close() without an event loop"),
    "detokenize": "use decode()",
    **dict.fromkeys(("get_num_tokens", "num_tokens", "token_count"), "use count_tokens()"),
    **dict.fromkeys(("metadata", "model_config"), "use info"),
    "n_ctx": "use info.max_model_len",
    "n_embd": "use info.hidden_size",
    "n_vocab": "use info.vocabulary_size",
    "token_bos": "encode() adds it if the model has one",
    "token_eos": "use info.eos_token_ids",
    "render_chat": "use apply_chat_template()",
    **dict.fromkeys(("convert_ids_to_tokens", "id_to_token"), "use token_names()"),
    "tokenize": "use encode()",
}
BLOCKING_HINTS = {
    **_REQUEST_METHOD_HINTS,
    **dict.fromkeys(("aclose", "shutdown", "stop"), "use close()"),
    "wake_up": "use wake()",
    "detokenize": "use engine.decode",
    "tokenize": "use engine.encode",
    **{
        name: f"use engine.{name}"
        for name in (
            "abort",
            "apply_chat_template",
            "config",
            "count_tokens",
            "decode",
            "encode",
            "health",
            "info",
            "profile",
            "reset_prefix_cache",
            "stats",
            "token_bytes",
            "token_names",
        )
    },
}
TOKENIZER_HINTS = {
    **dict.fromkeys(("convert_ids_to_tokens", "id_to_token"), "use token_names()"),
    **dict.fromkeys(("eos_token_id", "token_eos"), "use eos_token_ids"),
    **dict.fromkeys(("n_vocab", "vocab_size"), "use vocabulary_size"),
    "batch_decode": "call decode() for each sequence",
    "detokenize": "use decode()",
    **dict.fromkeys(("get_num_tokens", "num_tokens", "token_count"), "use count_tokens()"),
    "from_pretrained": "use Tokenizer(model)",
    "tokenize": "use encode()",
}
REQUEST_HINTS = {
    **dict.fromkeys(("abort", "aclose", "close"), "use cancel()"),
    **dict.fromkeys(
        ("choices", "content", "outputs", "stop_reason", "text", "token_ids", "tool_calls"),
        "it belongs to result()",
    ),
    **dict.fromkeys(("get", "recv", "receive"), "iterate over the request, or use poll()"),
    "get_nowait": "use poll()",
    "request_id": "use id",
}

_TEXT_HINTS = {
    **dict.fromkeys(("delta", "generated_text", "output_text", "response"), "use text"),
    "message": "use content, reasoning and tool_calls",
    "output_ids": "use token_ids",
    "reasoning_content": "use reasoning",
}
_CHOICE_HINTS = _TEXT_HINTS | {
    "cumulative_logprobs": "use cumulative_logprob",
    "last_hidden_state": "use hidden_states",
}
#: For value classes, by name.
FIELD_HINTS: dict[str, Mapping[str, str]] = {
    "Chunk": _TEXT_HINTS,
    "Choice": _CHOICE_HINTS,
    "EngineConfig": {
        **{name: f"use {field}" for name, field in _keywords.ENGINE_SYNONYMS.items()},
        **_keywords.ENGINE_HINTS,
    },
    "Result": {
        **_CHOICE_HINTS,
        **dict.fromkeys(("generate_token_len", "num_output_tokens"), "use usage.completion_tokens"),
        **dict.fromkeys(("input_token_len", "num_prompt_tokens"), "use usage.prompt_tokens"),
        "metrics": "use timings and usage",
        "outputs": "use choices",
    },
    "SamplingParams": {
        **{name: f"use {field}" for name, field in _keywords.REQUEST_SYNONYMS.items()},
        **_keywords.REQUEST_HINTS,
    },
    "Usage": {
        **dict.fromkeys(("generated_tokens", "generation_tokens", "output_tokens"), "use completion_tokens"),
        "input_tokens": "use prompt_tokens",
    },
}


class Hinted(type):
    """The class of classes of which users of other engines look for constructors."""

    if not TYPE_CHECKING:

        def __getattr__(cls, name: str) -> NoReturn:
            raise missing(cls, name, {"from_pretrained": f"use {cls.__name__}(model)"})


def missing(owner: object, name: str, hints: Mapping[str, str]) -> AttributeError:
    """The error for an attribute that `owner`, an object, a class or a module, does not have."""
    if isinstance(owner, ModuleType):
        what = f"module {owner.__name__!r}"
    elif isinstance(owner, type):
        what = f"class {owner.__name__!r}"
    else:
        what = f"{type(owner).__name__!r} object"
    message = f"{what} has no attribute {name!r}"
    if name in hints:
        return AttributeError(f"{message}; {hints[name]}")
    return AttributeError(message, name=name, obj=owner)  # Python suggests similar names itself


def missing_name(module: ModuleType, name: str, importer: FrameType) -> Exception:
    """The error for a name that `module` does not have, where `importer` is the frame that asks for it.

    An import statement replaces an `AttributeError` by an error without the hint: it gets an `ImportError`.
    """
    error = missing(module, name, MODULE_HINTS)
    if name in MODULE_HINTS and importer.f_code.co_code[importer.f_lasti] == opmap["IMPORT_FROM"]:
        return ImportError(str(error), name=module.__name__)
    return error


def missing_field(owner: object, name: str) -> AttributeError:
    """The error for a field that a value object does not have."""
    return missing(owner, name, FIELD_HINTS.get(type(owner).__name__, {}))
