"""The threads of a download.

Each thread holds one buffer. Files begin in their order; parts of a file that has begun go before other
files. The thread that completes the last part of a file verifies and publishes it.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, TypeVar

from penstock.runtime.downloader.errors import DownloadCancelledError
from penstock.runtime.downloader.retries import FileChangedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.runtime.downloader.jobs import Job
    from penstock.runtime.downloader.progress import Counts
    from penstock.runtime.downloader.transport import Session

__all__ = ["Pool", "Workers"]

T = TypeVar("T")
_CHECK_INTERVAL = 0.2
#: The time that threads have to end. Those that open a connection end later, and write nothing.
_END_TIMEOUT = 1.0


class Workers:
    """Runs functions in threads, while the calling thread watches for the cancellation."""

    def __init__(self, session: Session, cancelled: threading.Event) -> None:
        self.session = session
        self._cancelled = cancelled

    def call(self, function: Callable[[], T]) -> T:
        """The result of a function."""
        results: list[T] = []
        self.run([lambda: results.append(function())], lambda: None)
        return results[0]

    def run(self, functions: Sequence[Callable[[], object]], watch: Callable[[], object]) -> None:
        """Run all functions, and call `watch` a few times per second; the first error ends all."""
        changed = threading.Condition()
        errors: list[BaseException] = []
        num_running = len(functions)

        def run(function: Callable[[], object]) -> None:
            nonlocal num_running
            error = None
            try:
                function()
            except BaseException as raised:  # noqa: BLE001 - raised by the calling thread
                error = raised
            with changed:
                num_running -= 1
                if error is not None:
                    errors.append(error)
                changed.notify_all()

        threads = [
            threading.Thread(target=run, args=(function,), name="penstock download", daemon=True)
            for function in functions
        ]
        for thread in threads:
            thread.start()
        try:
            while num_running and not errors and not self._cancelled.is_set():
                with changed:
                    changed.wait_for(lambda: errors or not num_running, _CHECK_INTERVAL)
                self.session.end_late()
                watch()
        finally:
            if num_running:
                self._end(threads)
        if errors or num_running:
            raise errors[0] if errors else DownloadCancelledError("the download is cancelled")

    def _end(self, threads: Sequence[threading.Thread]) -> None:
        self.session.abort()
        deadline = time.monotonic() + _END_TIMEOUT
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))


class Pool:
    """The files that are left, and those that have begun."""

    def __init__(self, jobs: Sequence[Job], counts: Counts, *, is_fresh: bool) -> None:
        self._waiting = list(reversed(jobs))
        self._open: list[Job] = []
        self._counts = counts
        self._is_fresh = is_fresh
        self._changed = threading.Condition()

    def work(self) -> None:
        """Download until no file is left."""
        try:
            while (task := self._take()) is not None:
                self._run(*task)
        except BaseException:
            with self._changed:
                self._waiting, self._open = [], []
                self._changed.notify_all()
            raise

    def _take(self) -> tuple[Job, int | None] | None:
        """A part of a file that has begun, or else a file."""
        with self._changed:
            while True:
                for job in self._open:
                    if job.pending:
                        job.num_running += 1
                        return job, job.pending.pop(0)
                if self._waiting:
                    job = self._waiting.pop()
                    job.num_running += 1
                    self._open.append(job)
                    return job, None
                if not self._open:
                    return None
                self._changed.wait()

    def _run(self, job: Job, part: int | None) -> None:
        reason: FileChangedError | None = None
        try:
            if part is None:
                parts = job.begin(is_fresh=self._is_fresh)
                part = parts[0] if parts else None
                with self._changed:
                    job.pending = parts[1:]
                    self._changed.notify_all()
            if part is not None:
                job.fetch(part)
        except FileChangedError as error:
            reason = error
        with self._changed:
            if reason is not None:
                job.pending, job.changed = [], reason
            job.num_running -= 1
            if job.num_running or job.pending:
                return
        is_complete = job.finish()
        with self._changed:
            if job in self._open:
                self._open.remove(job)
                if not is_complete:
                    self._waiting.append(job)
            self._changed.notify_all()
        if is_complete:
            self._counts.add_file()
