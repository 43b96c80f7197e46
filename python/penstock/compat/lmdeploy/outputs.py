"""The outputs of a request: chunks without stop tokens and parts of characters, and tensors of torch."""

from __future__ import annotations

import codecs
import importlib
from typing import TYPE_CHECKING, Any

import penstock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.compat.lmdeploy.messages import GenerationConfig
    from penstock.compat.lmdeploy.serve.async_engine import AsyncEngine

__all__ = ["Reader", "to_torch", "torch"]


class Reader:
    """Makes LMDeploy's outputs of chunks: without the stop token and without a part of a character."""

    def __init__(
        self, engine: AsyncEngine, config: GenerationConfig, params: penstock.SamplingParams
    ) -> None:
        self._native = engine.engine
        self._keeps_stop = config.include_stop_str_in_output
        self._skips_special = params.skip_special_tokens
        self._has_stop_strings = bool(params.stop or params.stop_token_sequences) and not self._keeps_stop
        self._has_tensors = params.output_logits is not None or params.output_hidden_states is not None
        self._held: list[int] = []  # ids whose text may belong to a stop string
        self._held_logprobs: list[dict[int, float]] = []
        self._num_chars = 0
        #: Whether a chunk that is not the last one is an item as it is.
        self.is_plain = not (self._has_stop_strings or self._has_tensors or params.logprobs)

    def read(self, chunk: penstock.Chunk) -> tuple[str, list[int], Any, Any, Any]:
        """Text, ids, log probabilities, logits and hidden states of a chunk that is not the last one."""
        ids, logprobs = [*self._held, *chunk.token_ids], _logprobs(chunk)
        if logprobs is not None:
            logprobs = [*self._held_logprobs, *logprobs]
        self._held, self._held_logprobs = [], []
        if self._has_stop_strings:
            self._num_chars += len(chunk.text)
            if not chunk.text:
                self._held, self._held_logprobs, ids = ids, logprobs or [], []
                logprobs = None if logprobs is None else []
        return chunk.text, ids, logprobs, _rows(chunk.logits, 0), _rows(chunk.hidden_states, 0)

    def read_last(
        self, chunk: penstock.Chunk | penstock.Result, before: list[int]
    ) -> tuple[str, list[int], Any, Any, Any]:
        """The same for the last chunk or a complete result; `before` are the ids that were returned."""
        text, stop = chunk.text, chunk.stop_reason
        ids, logprobs = [*self._held, *chunk.token_ids], _logprobs(chunk)
        if logprobs is not None:
            logprobs = [*self._held_logprobs, *logprobs]
        num_ids = len(ids)
        if isinstance(stop, (int, tuple)) and not self._keeps_stop:
            num_stop = 1 if isinstance(stop, int) else len(stop)
            del ids[max(len(ids) - num_stop, 0) :]
        elif isinstance(stop, str) and not self._keeps_stop:
            num_chars = self._num_chars + len(text)
            while ids and len(self._decode([*before, *ids[:-1]])) >= num_chars:
                del ids[-1]
        dropped = num_ids - len(ids)
        if text.endswith("\ufffd") and self._is_partial([*before[-4:], *ids]):
            text = text[:-1]
        if logprobs is not None:
            del logprobs[len(ids) :]
        return text, ids, logprobs, _rows(chunk.logits, dropped), _rows(chunk.hidden_states, dropped)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._native.decode(ids, skip_special_tokens=self._skips_special)

    def _is_partial(self, ids: Sequence[int]) -> bool:
        """Whether the bytes of these tokens end within a character."""
        try:
            data = b"".join(self._native.token_bytes(ids[-4:]))
        except penstock.InvalidRequestError:  # tokens are words, not bytes
            return False
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(data)
        return bool(decoder.getstate()[0])


def _logprobs(chunk: penstock.Chunk | penstock.Result) -> list[dict[int, float]] | None:
    """For each token the log probabilities of the most likely ones and its own."""
    if chunk.logprobs is None:
        return None
    most = chunk.top_logprobs or ((),) * len(chunk.logprobs)
    return [
        {**dict(top), token: logprob}
        for token, logprob, top in zip(chunk.token_ids, chunk.logprobs, most, strict=True)
    ]


def _rows(tensor: penstock.Tensor | None, dropped: int) -> Any:
    """The rows as a tensor of torch, without the last ones."""
    if tensor is None:
        return None
    rows = to_torch(tensor)
    return rows[: len(rows) - dropped] if dropped else rows


def to_torch(tensor: penstock.Tensor) -> Any:
    """The values as a float32 tensor of torch, which has memory of its own."""
    return torch().from_dlpack(_Copied(tensor))


class _Copied:
    """A tensor that is exported as a copy, which can be written to."""

    def __init__(self, tensor: penstock.Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **_: object) -> Any:
        return self._tensor.__dlpack__(copy=True)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._tensor.__dlpack_device__()


def torch() -> Any:
    """The package torch; raises `ImportError` with the command that installs it."""
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        message = "logits and hidden states are tensors of torch; pip install 'penstock[lmdeploy]'"
        raise ImportError(message) from error
