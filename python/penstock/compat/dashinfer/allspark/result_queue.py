"""`ResultQueue`, the output of a request, and `GeneratedElements`, a part of it."""

from __future__ import annotations

import logging
import math
import numbers
import os
import threading
import time
from typing import TYPE_CHECKING, Any

from penstock import PenstockError
from penstock.compat.dashinfer.allspark.enums import AsStatus, GenerateRequestStatus
from penstock.compat.dashinfer.allspark.errors import AsError, as_error, check_process
from penstock.compat.dashinfer.allspark.statistics import request_stat_info
from penstock.compat.dashinfer.allspark.step_tensors import tensors_of

if TYPE_CHECKING:
    from penstock import BlockingRequest, Chunk, Usage

__all__ = ["GeneratedElements", "ResultQueue"]

logger = logging.getLogger("penstock.dashinfer")

#: Seconds without a read after which a program no longer reads, and only polls the status.
_READING_PAUSE = 1.0
_clock = time.monotonic
#: Finish reasons of a request that did not end by itself or by `stop_request`.
_INTERRUPTIONS = ("interrupted", "error")
_CLOSED = "the model was closed before the request ended"


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
        return _usage(self._request).cached_tokens

    @property
    def prefix_len_gpu(self) -> int:
        """Those of `prefix_cache_len` that were in the KV cache of the device."""
        usage = _usage(self._request)
        return usage.cached_tokens - usage.cached_host_tokens

    @property
    def prefix_len_cpu(self) -> int:
        """Those of `prefix_cache_len` that were in the host tier (`CPU_CACHE_RATIO`)."""
        return _usage(self._request).cached_host_tokens

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
    a part of the tokens. Ctrl-C interrupts a wait in the main thread. In the child of a fork, all methods
    raise `AsError`.
    """

    def __init__(self, request: BlockingRequest, arrival: float) -> None:
        self._request = request
        self._arrival = arrival  # in seconds of the monotonic clock
        self._num_read = 0
        self._is_drained = False  # the request has ended, and all is read
        self._is_cancelled = False
        self._is_failure_logged = False
        self._process = os.getpid()
        self._lock = threading.Lock()  # guards `_num_read`
        self._unread_since: float | None = None  # the first status call after the end
        self._thread = threading.local()  # whether this thread polled after the end, or called sync_request

    def Get(self) -> GeneratedElements | None:  # noqa: N802 - DashInfer's names
        """Wait for new tokens, and return all of them; `None` if the request has ended and all are read."""
        check_process(self._process)
        return self._read(None)

    def GetWithTimeout(self, timeout_ms: float) -> GeneratedElements | None:  # noqa: N802
        """The same as `Get`, for at most `timeout_ms` milliseconds; 0 and less wait without a limit.

        Returns `None` if no token came in time. Raises `AsError` unless `timeout_ms` is a number.
        """
        seconds = min(_milliseconds(timeout_ms) / 1000, threading.TIMEOUT_MAX)
        if seconds <= 0:
            return self.Get()
        check_process(self._process)
        return self._read(time.monotonic() + seconds)

    def GetNoWait(self) -> GeneratedElements | None:  # noqa: N802
        """The tokens that have arrived; `None` if there are none."""
        check_process(self._process)
        return self._read(0.0)

    def GenerateStatus(self) -> GenerateRequestStatus:  # noqa: N802
        """The current status; never waits. It is `Generating` from the first token on.

        Once a token was read, `GenerateFinished` or `GenerateInterrupted` is reported when all tokens are, so
        that a loop of `Get` and `GenerateStatus` reads all of them. While none was read, it is reported to
        each thread at its second call after the end, so that a loop of `GenerateStatus` alone ends. To a
        thread that called `sync_request` it is reported at once; to every thread, if no token was read for a
        second since the first call after the end.
        """
        request = self._request
        try:
            reason, num_read = request.finish_reason, self._num_read
            num_tokens = num_read if reason is None and num_read else request.usage.completion_tokens
        except PenstockError as error:
            raise as_error(error) from error
        is_unread = num_tokens > num_read and not self._is_drained
        if reason is None or (is_unread and not self._may_skip_tokens(num_read)):
            return GenerateRequestStatus.Generating if num_tokens else GenerateRequestStatus.Init
        if reason in _INTERRUPTIONS or self._was_closed(reason):
            return GenerateRequestStatus.GenerateInterrupted
        return GenerateRequestStatus.GenerateFinished

    def GeneratedLength(self) -> int:  # noqa: N802
        """The number of tokens generated so far, whether they are read or not."""
        return _usage(self._request).completion_tokens

    def RequestStatInfo(self) -> dict[str, int]:  # noqa: N802
        """Times, durations, lengths and rates of the request.

        The keys are `arrival_time`, `first_token_time`, `last_token_time`, `finished_time` (milliseconds of
        the monotonic clock), `time_to_first_token`, `time_in_queue` (milliseconds), `context_token_length`,
        `generated_token_length`, `context_cached_length` (tokens), `context_tps` and `generate_tps` (tokens
        per second). `last_token_time` and `finished_time` are 0 until the end.
        """
        request, has_ended = self._request, self._end() is not None
        return request_stat_info(self._arrival, _usage(request), request.timings, has_ended=has_ended)

    @property
    def error(self) -> str | None:
        """The reason for which the request failed; `None` if it did not. Failed requests are interrupted."""
        reason = self._end()
        if self._was_closed(reason):
            return _CLOSED
        if reason != "error":
            return None
        try:
            self._request.result()
        except PenstockError as error:
            return str(error)
        return None

    def cancel(self) -> None:
        """Cancel the request; never waits."""
        if self._request.finish_reason is None:
            self._is_cancelled = True
            self._request.cancel()

    def wait(self) -> bool:
        """Wait for the end of the request without reading; false if it failed."""
        check_process(self._process)
        reason = self._request.finish_reason
        if reason is None or reason == "error":
            try:
                self._request.result()
            except PenstockError as error:
                self._log(error)
                return False
        if self._was_closed(self._request.finish_reason):
            self._log(_CLOSED)
            return False
        return True

    def report_end(self) -> None:
        """Let `GenerateStatus` report the end to this thread while tokens are unread."""
        self._thread.has_synced = True

    def _may_skip_tokens(self, num_read: int) -> bool:
        """Whether to report the end to this thread while tokens are unread; called after the end."""
        thread, now = self._thread, _clock()
        if hasattr(thread, "has_synced") or (num_read == 0 and hasattr(thread, "has_polled")):
            return True
        thread.has_polled = True
        since = self._unread_since
        if since is None:
            self._unread_since = now
            return False
        return now - since >= _READING_PAUSE

    def _end(self) -> str | None:
        """The finish reason of the request. Raises `AsError` in the child of a fork."""
        try:
            return self._request.finish_reason
        except PenstockError as error:
            raise as_error(error) from error

    def _was_closed(self, reason: str | None) -> bool:
        """Whether the request was cancelled by neither `stop_request` nor `release_request`."""
        return reason == "cancelled" and not self._is_cancelled

    def _read(self, deadline: float | None) -> GeneratedElements | None:
        """The new tokens. With a deadline in the past, those that have arrived."""
        request = self._request
        if deadline is not None and request.finish_reason is not None:
            deadline = None  # nothing to wait for
        try:
            while True:
                if deadline is None:
                    chunk = request.read()
                elif (left := deadline - time.monotonic()) > 0:
                    chunk = request.read(left)
                else:
                    chunk = request.poll()
                if chunk is None:
                    self._is_drained = deadline is None
                    return None
                if chunk.token_ids:  # else it completes a text, or is the last one
                    break
        except TimeoutError:
            return None
        except PenstockError as error:
            self._is_drained = True
            self._log(error)
            return None
        elements = GeneratedElements(request, chunk)
        with self._lock:
            self._num_read += len(elements.ids_from_generate)
        return elements

    def _log(self, error: PenstockError | str) -> None:
        """Log the failure of the request once."""
        if not self._is_failure_logged:
            self._is_failure_logged = True
            logger.error("request %s failed: %s", self._request.id, error)

    def __repr__(self) -> str:
        return f"<ResultQueue of {self._request!r}>"


def _usage(request: BlockingRequest) -> Usage:
    """The token counts of a request. Raises `AsError` in the child of a fork."""
    try:
        return request.usage
    except PenstockError as error:
        raise as_error(error) from error


def _milliseconds(value: object) -> float:
    """A time that may be infinite. Raises `AsError`."""
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        try:
            milliseconds = float(value)
        except OverflowError:
            return math.inf
        if not math.isnan(milliseconds):
            return milliseconds
    reason = f"timeout_ms is {value!r}; it must be a number of milliseconds"
    raise AsError(AsStatus.ALLSPARK_PARAM_ERROR, reason)
