"""Reads the prompts of requests."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from penstock import PenstockError
from penstock.compat.dashinfer.allspark import dlpack
from penstock.compat.dashinfer.allspark.enums import AsStatus
from penstock.compat.dashinfer.allspark.errors import AsError, as_error
from penstock.compat.dashinfer.allspark.llm import ModelSerializerException
from penstock.compat.dashinfer.allspark.tokenizer import LoaderTokenizer
from penstock.compat.prompts import PromptTooLongError, encode_prompt

__all__ = ["encode", "text_of", "token_ids_of", "token_ids_of_inputs"]


def token_ids_of(value: Any) -> list[int]:
    """The ids of a list, array or tensor. Raises `ValueError`."""
    try:
        if isinstance(value, (list, tuple, range)):
            return [operator.index(item) for item in value]
        return dlpack.integers(value)
    except (TypeError, BufferError, OverflowError) as error:
        message = "input_ids must be a list of token ids, or an array of shape (n,) or (1, n)"
        raise ValueError(f"{message}: {error}") from error


def token_ids_of_inputs(inputs: object) -> list[int]:
    """The ids of a mapping of tensors. Raises `AsError`."""
    if not isinstance(inputs, Mapping) or "input_ids" not in inputs:
        raise AsError(AsStatus.ALLSPARK_PARAM_ERROR, "inputs must be a mapping with input_ids")
    try:
        return token_ids_of(inputs["input_ids"])
    except ValueError as error:
        raise AsError(AsStatus.ALLSPARK_PARAM_ERROR, str(error)) from error


def text_of(value: object) -> str:
    """The text of a request. Raises `AsError`."""
    if isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    if not isinstance(value, str):
        kind = f"{len(value)} items" if isinstance(value, (list, tuple)) else type(value).__name__
        reason = f"input_str_or_array has {kind}; it must be one text: one request per call"
        raise AsError(AsStatus.ALLSPARK_PARAM_ERROR, reason)
    return value


def encode(loader: Any, text: str, longest: int) -> list[int]:
    """The token ids of a text, by the tokenizer of a loader. Raises `AsError`."""
    if not hasattr(loader, "init_tokenizer"):
        reason = f"model is of the type {type(loader).__name__}; it must be a loader with a tokenizer"
        raise AsError(AsStatus.ALLSPARK_PARAM_ERROR, reason)
    try:
        tokenizer = loader.init_tokenizer().get_tokenizer()
        if not isinstance(tokenizer, LoaderTokenizer):  # that of a loader of the program
            token_ids: list[int] = tokenizer.encode(text)
            return token_ids
        return encode_prompt(tokenizer.encode, text, longest, name="engine_max_length")
    except ModelSerializerException as error:
        raise AsError(AsStatus.ALLSPARK_IO_ERROR, str(error)) from error
    except PromptTooLongError as error:
        raise AsError(AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR, str(error)) from error
    except PenstockError as error:
        raise as_error(error) from error
