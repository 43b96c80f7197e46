"""`ResultQueue`, the output of a request, and `GeneratedElements`, a part of it."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from penstock import PenstockError
from penstock.compat.dashinfer.allspark.enums import AsStatus, GenerateRequestStatus
from penstock.compat.dashinfer.allspark.errors import AsError
from penstock.compat.dashinfer.allspark.statistics import request_stat_info
from penstock.compat.dashinfer.allspark.step_tensors import tensors_of

if TYPE_CHECKING:
    from penstock import BlockingRequest, Chunk

__all__ = ["GeneratedElements", "ResultQueue"]

logger = logging.getLogger("penstock.dashinfer")

#: The status of a request that has not ended, by its number of tokens.
_PROGRESS = (
    GenerateRequestStatus.Init,
    GenerateRequestStatus.ContextFinished,
    GenerateRequestStatus.Generating,
)
#: Finish reasons of a request that did not end by itself or by `stop_request`.
_INTERRUPTIONS = ("interrupted", "error")


class GeneratedElements:
    """The tokens generated since the previous call of a `Get` method, and their details."""

    __slots__ = (
        "_request",
        "ids_from_generate",
        "log_probs_list",
        "tensors_from_model_inference",
        "token_logprobs_list",
    )

    ids_from_generate: list[int]
    """The tokens; an end token is one of them."""
    log_probs_list: list[list[tuple[int, float]]]
    """For each token, (id, log probability) of the most likely ones; empty unless requested."""
    token_logprobs_list: list[float]
    """The natural logarithm of the probability of each token; empty unless requested."""
    tensors_from_model_inference: list[dict[str, Any]]
    """For each token, DLPack capsules of float32 tensors on the CPU; empty unless requested.

    The keys are `inputs_embedding`, the decoder's input, and `hidden_states`, its last hidden states. Each
    tensor has the positions that were computed for the token, in the shape `(positions, hidden_size)`: all
    positions of the prompt for the first token, one position for a later one.
    """

    def __init__(self, request: BlockingRequest, chunk: Chunk) -> None:
        self._request = request
        self.ids_from_generate = list(chunk.token_ids)
        if chunk.logprobs is None:
            self.token_logprobs_list, self.log_probs_list = [], []
        else:
            self.token_logprobs_list = list(chunk.logprobs)
            rows = chunk.top_logprobs or [()] * len(chunk.logprobs)
            self.log_probs_list = [list(row) for row in rows]
        self.tensors_from_model_inference = tensors_of(chunk)

    @property
    def prefix_cache_len(self) -> int:
        """Prompt tokens that the prefix cache had."""
        return self._request.usage.cached_tokens

    @property
    def prefix_len_gpu(self) -> int:
        """Those of `prefix_cache_len` that were in the KV cache of the device."""
        usage = self._request.usage
        return usage.cached_tokens - usage.cached_host_tokens

    @property
    def prefix_len_cpu(self) -> int:
        """Those of `prefix_cache_len` that were in the host tier (`CPU_CACHE_RATIO`)."""
        return self._request.usage.cached_host_tokens

    def __repr__(self) -> str:
        return f"<GeneratedElements of {len(self.ids_from_generate)} tokens>"


class ResultQueue:
    """The output of a request. It can be read after the request and the model were released.

        while True:
            elements = queue.Get()
            if elements is not None:
                generated_ids += elements.ids_from_generate
            status = queue.GenerateStatus()
            if status in (GenerateRequestStatus.GenerateFinished, GenerateRequestStatus.GenerateInterrupted):
                break

    Each token is returned once. All methods can be called from any thread; if several threads read, each gets
    a part of the tokens. Ctrl-C interrupts a wait in the main thread.
    """

    def __init__(self, request: BlockingRequest, arrival: float) -> None:
        self._request = request
        self._arrival = arrival  # in seconds of the monotonic clock
        self._num_read = 0
        self._has_failed = False
        self._reading = threading.Lock()
        self._informed: set[int] = set()  # threads that the end is reported to before all is read

    def Get(self) -> GeneratedElements | None:  # noqa: N802 - DashInfer's names
        """Wait for new tokens, and return all of them; `None` if the request has ended and all are read."""
        with self._reading:
            return self._read(None)

    def GetWithTimeout(self, timeout_ms: float) -> GeneratedElements | None:  # noqa: N802
        """The same as `Get`, for at most `timeout_ms` milliseconds; 0 and less wait without a limit.

        Returns `None` if no token came in time. Raises `AsError` unless `timeout_ms` is a number.
        """
        is_number = isinstance(timeout_ms, (int, float)) and not isinstance(timeout_ms, bool)
        if not is_number or timeout_ms != timeout_ms:  # noqa: PLR0124 - not a number
            reason = f"timeout_ms is {timeout_ms!r}; it must be a number of milliseconds"
            raise AsError(AsStatus.ALLSPARK_PARAM_ERROR, reason)
        if timeout_ms <= 0:
            return self.Get()
        seconds = min(timeout_ms / 1000, threading.TIMEOUT_MAX)
        deadline = time.monotonic() + seconds
        if not self._reading.acquire(timeout=seconds):
            return None
        try:
            return self._read(deadline)
        finally:
            self._reading.release()

    def GetNoWait(self) -> GeneratedElements | None:  # noqa: N802
        """The tokens that have arrived; `None` if there are none, or while another thread waits for them."""
        if not self._reading.acquire(blocking=False):
            return None
        try:
            return self._read(0.0)
        finally:
            self._reading.release()

    def GenerateStatus(self) -> GenerateRequestStatus:  # noqa: N802
        """The current status; never waits.

        `GenerateFinished` or `GenerateInterrupted` is reported once all tokens are read. While some are not,
        it is reported to a thread at its second call in a row, so that a loop of `Get` and `GenerateStatus`
        reads all tokens and a loop of `GenerateStatus` ends; and after `sync_request` in the same thread.
        """
        request = self._request
        reason = request.finish_reason
        num_read = self._num_read
        if reason is None:
            num_tokens = num_read if num_read > 1 else request.usage.completion_tokens
            return _PROGRESS[min(num_tokens, 2)]
        num_tokens = request.usage.completion_tokens
        if num_tokens > num_read:
            thread = threading.get_ident()
            if thread not in self._informed:
                self._informed.add(thread)
                return _PROGRESS[min(num_tokens, 2)]
        if reason in _INTERRUPTIONS:
            return GenerateRequestStatus.GenerateInterrupted
        return GenerateRequestStatus.GenerateFinished

    def GeneratedLength(self) -> int:  # noqa: N802
        """The number of tokens generated so far, whether they are read or not."""
        return self._request.usage.completion_tokens

    def RequestStatInfo(self) -> dict[str, int]:  # noqa: N802
        """Times, durations, lengths and rates of the request.

        The keys are `arrival_time`, `first_token_time`, `last_token_time`, `finished_time` (milliseconds of
        the monotonic clock), `time_to_first_token`, `time_in_queue` (milliseconds), `context_token_length`,
        `generated_token_length`, `context_cached_length` (tokens), `context_tps` and `generate_tps` (tokens
        per second). `last_token_time` and `finished_time` are 0 until the end.
        """
        request = self._request
        has_ended = request.finish_reason is not None
        return request_stat_info(self._arrival, request.usage, request.timings, has_ended=has_ended)

    @property
    def error(self) -> str | None:
        """The reason for which the request failed; `None` if it did not. Failed requests are interrupted."""
        if self._request.finish_reason != "error":
            return None
        try:
            self._request.result()
        except PenstockError as error:
            return str(error)
        return None

    def wait(self) -> bool:
        """Wait for the end of the request without reading; false if it failed."""
        try:
            self._request.result()
        except PenstockError as error:
            self._log(error)
            return False
        return True

    def report_end(self) -> None:
        """Let `GenerateStatus` report the end to this thread while tokens are unread."""
        self._informed.add(threading.get_ident())

    def _read(self, deadline: float | None) -> GeneratedElements | None:
        """The new tokens; the caller holds the lock. With a deadline in the past, those that have arrived."""
        request = self._request
        try:
            while True:
                if deadline is None:
                    chunk = request.read()
                elif (left := deadline - time.monotonic()) > 0:
                    chunk = request.read(left)
                else:
                    chunk = request.poll()
                if chunk is None:
                    return None
                if chunk.token_ids:  # else it completes a text, or is the last one
                    break
        except TimeoutError:
            return None
        except PenstockError as error:
            self._log(error)
            return None
        elements = GeneratedElements(request, chunk)
        self._num_read += len(elements.ids_from_generate)
        return elements

    def _log(self, error: PenstockError) -> None:
        """Log the failure of the request once."""
        if not self._has_failed:
            self._has_failed = True
            logger.error("request %s failed: %s", self._request.id, error)

    def __repr__(self) -> str:
        return f"<ResultQueue of {self._request!r}>"
