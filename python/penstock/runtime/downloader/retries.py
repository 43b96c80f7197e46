"""Attempts after temporary failures: exponential back-off with jitter, and the server's Retry-After."""

from __future__ import annotations

import logging
import random
import threading
import time
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Protocol

from penstock.runtime.downloader.errors import DownloadCancelledError, TransferError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "Attempts",
    "Clock",
    "FileChangedError",
    "Pacer",
    "Rate",
    "SystemClock",
    "TemporaryError",
    "seconds_of",
]

logger = logging.getLogger("penstock.runtime.downloader")

MAX_FAILURES = 8
BASE_DELAY, MAX_DELAY = 0.25, 20.0
MAX_RETRY_AFTER = 300.0
_CHECK_INTERVAL = 0.2


class TemporaryError(TransferError):
    """A failure after which another attempt can succeed; `retry_after` is in seconds."""

    def __init__(self, message: str, *, retry_after: float | None = None, is_throttled: bool = False) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.is_throttled = is_throttled


class FileChangedError(TransferError):
    """The remote file is another one than at the beginning of its download, which begins again."""


class Clock(Protocol):
    """The time, and waiting."""

    def now(self) -> float:
        """Seconds."""

    def wait(self, seconds: float) -> None:
        """Wait; raises `DownloadCancelledError`."""


class SystemClock:
    """The time of the system. Any of the events ends the waiting."""

    def __init__(self, *events: threading.Event) -> None:
        self._events = events

    def now(self) -> float:
        """Seconds."""
        return time.monotonic()

    def wait(self, seconds: float) -> None:
        """Wait; raises `DownloadCancelledError`."""
        end = self.now() + seconds
        while not any(event.is_set() for event in self._events):
            rest = end - self.now()
            if rest <= 0:
                return
            self._events[0].wait(min(rest, _CHECK_INTERVAL))
        raise DownloadCancelledError("the download is cancelled")


class Pacer:
    """Delays the requests of all threads while a server throttles."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._not_before = 0.0
        self._lock = threading.Lock()

    def pass_request(self) -> None:
        """Wait until a request may be sent."""
        while (delay := self._not_before - self.clock.now()) > 0:
            self.clock.wait(delay)

    def hold(self, seconds: float) -> None:
        """Send no request for this time."""
        with self._lock:
            self._not_before = max(self._not_before, self.clock.now() + seconds)


class Rate:
    """The bytes of a response per minute, from its first read on."""

    def __init__(self, clock: Clock, least: int) -> None:
        self._clock, self._least = clock, least
        self._start: float | None = None
        self._num_bytes = 0

    def add(self, size: int) -> None:
        """Bytes have arrived."""
        self._num_bytes += size

    def is_too_low(self) -> bool:
        """Whether a minute or more has passed with less than the rate; called before each read."""
        now = self._clock.now()
        minutes = 0.0 if self._start is None else (now - self._start) / 60
        is_too_low = minutes >= 1 and self._num_bytes < self._least * minutes
        if self._start is None or minutes >= 1:
            self._start, self._num_bytes = now, 0
        return is_too_low


class Attempts:
    """The attempts of one request, or of one part of a file."""

    def __init__(self, pacer: Pacer, jitter: Callable[[], float] = random.random) -> None:
        self._pacer = pacer
        self._jitter = jitter
        self._failures = 0

    def failed(self, error: TemporaryError, *, has_progressed: bool = False) -> None:
        """Wait before the next attempt, or raise `error` if there were too many without progress."""
        self._failures = 1 if has_progressed else self._failures + 1
        if self._failures > MAX_FAILURES or (error.retry_after or 0) > MAX_RETRY_AFTER:
            raise error
        limit = min(MAX_DELAY, BASE_DELAY * 2**self._failures)
        delay = max(limit * (0.5 + self._jitter() / 2), error.retry_after or 0)
        logger.info("%s; attempt %d of %d in %.1f s", error, self._failures + 1, MAX_FAILURES + 1, delay)
        if error.is_throttled:
            self._pacer.hold(delay)
        self._pacer.clock.wait(delay)


def seconds_of(retry_after: str | None, now: Callable[[], float] = time.time) -> float | None:
    """The value of a Retry-After header: seconds, or a date."""
    if retry_after is None:
        return None
    if retry_after.strip().isdecimal():
        return float(retry_after)
    try:
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - now())
    except (ValueError, OverflowError):
        return None
