"""`ArgumentError`, `ErrorCode`, and the names of LMDeploy's fields in Penstock's messages."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock import PenstockError

__all__ = ["ArgumentError", "ErrorCode", "UnsupportedError", "message_of", "not_provided"]

#: The fields of LMDeploy's API that Penstock's options are made of.
_FIELDS = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "random_seed",
    "stop": "stop_words",
    "top_logprobs": "logprobs",
    "max_model_len": "session_len",
    "max_num_seqs": "max_batch_size",
    "max_num_batched_tokens": "max_prefill_token_num",
    "kv_cache_ratio": "cache_max_entry_count",
    "config_overrides": "hf_overrides",
    "regex": "regex_schema",
    "output_hidden_states": "output_last_hidden_state",
}
_OPTION = re.compile(rf"(?<![\w.-])({'|'.join(_FIELDS)})(?= is | must |[=,;\[]|$)")


class ErrorCode(StrEnum):
    """The `error_code` of a request that failed."""

    INVALID_REQUEST = "invalid_request"
    REQUEST_CONFLICT = "request_conflict"
    SESSION_NOT_EXIST = "session_not_exist"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    UNSUPPORTED_FEATURE = "unsupported_feature"
    PREPROCESS_FAILED = "preprocess_failed"
    ENGINE_UNAVAILABLE = "engine_unavailable"
    INTERNAL_ERROR = "internal_error"


class ArgumentError(AssertionError, ValueError):
    """A value that is refused. The message names the field, the value and the limit.

    LMDeploy raises an `AssertionError` for some fields and a `ValueError` for others; this class is both.
    """


class UnsupportedError(ArgumentError):
    """A value that Penstock does not support. The message names the field, the value and the reason."""


def message_of(error: PenstockError) -> str:
    """The message of an error of Penstock, with LMDeploy's names of the fields."""
    return _OPTION.sub(lambda match: _FIELDS[match[0]], str(error))


def not_provided(module: str, alternatives: Mapping[str, str]) -> Callable[[str], NoReturn]:
    """The `__getattr__` of a module that lacks names of LMDeploy: an `ImportError` with the alternative."""

    def find(name: str) -> NoReturn:
        if name in alternatives:
            message = f"{module}.{name} is not provided: {alternatives[name]}"
            raise ImportError(message, name=module)
        message = f"module {module!r} has no attribute {name!r}"
        raise AttributeError(message, name=name)

    return find
