"""The names of llama-cpp-python that are not provided, with the alternative or the reason."""

from __future__ import annotations

__all__ = ["NOT_PROVIDED", "not_provided"]

_CACHE = "prefixes of prompts are cached without it: Engine(prefix_cache=...)"
NOT_PROVIDED = {
    "LlamaCache": _CACHE,
    "LlamaDiskCache": _CACHE,
    "LlamaRAMCache": _CACHE,
    "LlamaState": "prefixes of prompts are cached, so a prompt is continued without saving a state",
    "LlamaTokenizer": "use Llama.tokenize and Llama.detokenize",
    "llama_chat_format": "chats are rendered by the model's template; images are not supported yet",
    "llama_tokenizer": "use Llama.tokenize and Llama.detokenize, or penstock.Tokenizer",
    "llama_types": "requests and responses are dicts; the package openai has their types",
    "server": "`penstock serve MODEL` is the server",
}


def not_provided(name: str) -> ImportError:
    """The error for one of these names."""
    message = f"llama_cpp.{name} is not provided: {NOT_PROVIDED[name]}"
    return ImportError(message, name="penstock.compat.llama_cpp")
