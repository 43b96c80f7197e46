"""The files and batches of a server. A client's batches run one after another, beside those of others."""

from __future__ import annotations

import logging
import math
import time
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

import penstock
from penstock._client import TurnLimiter, client
from penstock._renderer import renderer
from penstock._system import lock_file
from penstock.server.batch.attempts import Attempts
from penstock.server.batch.lines import (
    Answer,
    FileCheck,
    Line,
    LineReader,
    Problem,
    Requester,
    unanswered,
)
from penstock.server.batch.results import Results
from penstock.server.batch.runner import concurrency, run_lines
from penstock.server.batch.store import Batch, Folder
from penstock.server.errors import ApiError, api_error
from penstock.server.keys import client_number
from penstock.server.logs import request_id
from penstock.server.threads import Threads

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence

    from anyio.abc import TaskGroup, TaskStatus

    from penstock.server.models import Models
    from penstock.server.settings import ServerSettings
    from penstock.server.templates import TemplateProcess

__all__ = ["Batches"]

logger = logging.getLogger("penstock.server")

#: The least priority value of the requests of batches: other requests are served before them.
_PRIORITY = 1000
#: The number of processes that may end while a request runs.
_MAX_INTERRUPTED = 3
#: Seconds between two looks for an open model.
_MODEL_INTERVAL = 0.2
#: The folder of the clients of a server without keys.
_SHARED = "shared"
#: Hexadecimal digits of the hash of a key that name the folder of its client.
_DIGITS = 32


class _Client:
    """The folder of a client, and the task that runs its batches."""

    def __init__(self, key: bytes, folder: Folder) -> None:
        self.requester = Requester(key, client_number(key), _PRIORITY)
        self.folder = folder
        self.is_active = False
        #: The scope that cancels the batch that runs, by its id.
        self.scopes: dict[str, anyio.CancelScope] = {}


class Batches:
    """The files and batches of all clients, while `run` runs."""

    def __init__(
        self,
        root: str,
        settings: ServerSettings,
        keys: Collection[bytes],
        models: Models,
        templates: TemplateProcess,
        answer: Callable[[Line, Requester], Awaitable[Answer]],
    ) -> None:
        """`keys` are the hashes of the clients' keys; `answer` computes the response to a line."""
        self._root = Path(root)
        self._settings = settings
        self._keys = keys
        self._models = models
        self._templates = templates
        self._compute = answer
        self._clients: dict[bytes, _Client] = {}
        self._group: TaskGroup | None = None
        #: Threads that write, and those that read.
        self.write_threads, self.read_threads = Threads(1), Threads(1)
        #: Of the requests that ran when two earlier processes ended, one runs at a time.
        self._alone = TurnLimiter(1)

    # ---- the routes

    def folder(self, key: bytes) -> Folder:
        """The folder of the client with this key."""
        if self._group is None:
            raise ApiError(503, "the files are not available now", code="unavailable", retry_after=5)
        return self._clients[key].folder

    async def add(self, key: bytes, fields: dict[str, Any]) -> Batch:
        """Add a batch with these fields."""
        found = self._clients[key]
        batch = found.folder.add(fields)
        try:
            await self._save(found.folder, batch)
        except Exception:
            del found.folder.batches[batch.id]
            raise
        self._start(found)
        return batch

    async def cancel(self, key: bytes, batch: Batch) -> None:
        """Cancel a batch. One that runs has the status `cancelling` until its requests have ended."""
        if batch.status not in ("validating", "in_progress"):
            message = f"a batch with the status {batch.status!r} cannot be cancelled"
            raise ApiError(400, message, param="batch_id")
        found = self._clients[key]
        batch.set_status("cancelling")
        if (scope := found.scopes.get(batch.id)) is not None:
            scope.cancel()
            await self._save(found.folder, batch)
        else:
            await self._finish(found.folder, batch, "cancelled")

    # ---- the tasks

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Run batches until the task is cancelled; those that have not ended continue in the next run.

        Raises `ConfigError` if the folder cannot be used or another process uses it.
        """
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            with (self._root / "lock").open("ab") as lock:
                lock_file(lock.fileno())
                folders = await self.read_threads.run(self._open)
                self._clients = {key: _Client(key, folder) for key, folder in folders.items()}
                await self._run(task_status)
        except (OSError, msgspec.DecodeError) as error:
            limit = "a folder that this server can write and no other process uses"
            message = f"files_dir={str(self._root)!r} is not allowed: it must be {limit}: {error}"
            raise penstock.ConfigError(message, "files_dir", str(self._root), limit) from error

    def _open(self) -> dict[bytes, Folder]:
        """The folders of the clients by key."""
        names = {key: key.hex()[:_DIGITS] or _SHARED for key in self._keys}
        return {key: Folder(self._root / name, self._settings) for key, name in names.items()}

    async def _run(self, task_status: TaskStatus[None]) -> None:
        try:
            async with anyio.create_task_group() as self._group:
                for found in self._clients.values():
                    for batch in found.folder.batches.values():
                        if batch.status == "cancelling":
                            await self._finish(found.folder, batch, "cancelled")
                    self._start(found)
                task_status.started()
                await anyio.sleep_forever()
        finally:
            self._group = None

    def _start(self, found: _Client) -> None:
        if not found.is_active and self._group is not None:
            found.is_active = True
            self._group.start_soon(self._run_client, found)

    async def _run_client(self, found: _Client) -> None:
        """Run the batches of a client until all have ended."""
        request_id.set("")
        client.set(found.requester.client)
        renderer.set(self._templates.template)
        while batch := found.folder.next_batch():
            end = "failed"
            found.scopes = {batch.id: anyio.CancelScope()}
            try:
                end = await self._run_batch(found, batch, found.scopes[batch.id])
            except Exception as error:  # noqa: BLE001 - the boundary of the batch
                details = api_error(error).body()["error"]
                code = details["code"] or "invalid_request"
                batch.fail([Problem(code, details["message"])])
            await self._finish(found.folder, batch, end)
        found.is_active = False

    async def _run_batch(self, found: _Client, batch: Batch, scope: anyio.CancelScope) -> str:
        """Answer the requests of a batch; returns its last status."""
        is_answered = batch.status == "finalizing"
        rest = math.inf if is_answered else max(batch.fields["expires_at"] - time.time(), 0)
        with scope, anyio.move_on_after(rest) as window:
            if batch.status == "validating" and not await self._check(found.folder, batch):
                return "failed"
            await self._answer(found, batch)
        if scope.cancelled_caught:
            return "cancelled"
        if window.cancelled_caught:
            if batch.status != "validating":  # else its lines were not checked
                await self._expire(found.folder, batch)
            return "expired"
        batch.set_status("finalizing")
        await self._save(found.folder, batch)
        return "completed"

    async def _check(self, folder: Folder, batch: Batch) -> bool:
        """Check the lines of the input; returns whether they can be answered."""
        checked = FileCheck(
            folder.path_of(batch.fields["input_file_id"]),
            endpoint=batch.fields["endpoint"],
            max_lines=self._settings.max_batch_requests,
        )
        await self._finish_reading(checked.advance)
        if checked.problems:
            batch.fail(checked.problems)
            return False
        batch.longest = checked.longest
        batch.fields["request_counts"]["total"] = len(checked.custom_ids)
        batch.set_status("in_progress")
        await self._save(folder, batch)
        return True

    async def _answer(self, found: _Client, batch: Batch) -> None:
        """Answer the requests that have no line in the output.

        Those that ran when an earlier process ended run after the others, because one can be the cause; those
        that ran when two have ended run last, and one at a time.
        """
        folder = found.folder
        limit = await self._concurrency(batch.longest)
        async with self._results(folder, batch) as results, self._attempts(folder, batch) as attempts:
            num_left = 0

            async def add(line: Line, answer: Answer) -> None:
                folder.take_bytes(batch.file_of(answer), len(answer.text))
                with anyio.CancelScope(shield=True):  # its bytes are counted, so it is written
                    await self.write_threads.run(results.add, line.custom_id, answer)
                _count(batch, results)

            async def run(line: Line) -> None:
                await self.write_threads.run(attempts.begin, line.custom_id)
                try:
                    answer = await self._compute(line, found.requester)
                except BaseException:
                    with anyio.CancelScope(shield=True):
                        await self.write_threads.run(attempts.withdraw, line.custom_id)
                    raise
                await add(line, answer)

            async def run_round(number: int, line: Line) -> None:
                nonlocal num_left
                if line.custom_id in results.custom_ids:
                    return
                if attempts.num_interrupted(line.custom_id) > number:
                    num_left += 1
                else:
                    await run(line)

            async def run_alone(line: Line) -> None:
                if line.custom_id in results.custom_ids:
                    return
                if attempts.num_interrupted(line.custom_id) >= _MAX_INTERRUPTED:
                    message = f"the server ended {_MAX_INTERRUPTED} times while this request ran"
                    await add(line, unanswered(line, "server_error", message))
                    return
                async with self._alone:
                    await run(line)

            _count(batch, results)
            for number in range(_MAX_INTERRUPTED - 1):
                num_left = 0
                await run_lines(self._reader(folder, batch), limit, partial(run_round, number))
                if num_left == 0:
                    return
            await run_lines(self._reader(folder, batch), 1, run_alone)

    def _reader(self, folder: Folder, batch: Batch) -> Callable[[], Awaitable[list[Line] | None]]:
        """Reads the next requests of a batch in the thread."""
        return partial(self.read_threads.run, LineReader(folder.path_of(batch.fields["input_file_id"])).read)

    async def _finish_reading(self, advance: Callable[[], bool]) -> None:
        """Read a file piece by piece: the files of other clients have turns."""
        while await self.read_threads.run(advance):
            pass

    @asynccontextmanager
    async def _results(self, folder: Folder, batch: Batch) -> AsyncIterator[Results]:
        paths = folder.path_of(batch.output_id), folder.path_of(batch.error_id)
        results = await self.read_threads.run(Results, *paths)
        try:
            await self._finish_reading(results.advance)
            await self.read_threads.run(results.resume)
            yield results
        finally:
            with anyio.CancelScope(shield=True):
                await self.read_threads.run(results.close)

    @asynccontextmanager
    async def _attempts(self, folder: Folder, batch: Batch) -> AsyncIterator[Attempts]:
        attempts = await self.read_threads.run(Attempts, folder.attempts_path(batch))
        try:
            yield attempts
        finally:
            attempts.close()

    async def _concurrency(self, longest: int) -> int:
        """The number of requests of a batch that are unfinished, once a model is open."""
        while True:
            models = self._models.selected(None)
            infos = [model.engine.info for model in models if model.max_model_len is not None]
            if infos:
                return max(concurrency(info, longest) for info in infos)
            await anyio.sleep(_MODEL_INTERVAL)

    async def _expire(self, folder: Folder, batch: Batch) -> None:
        """Write errors for the requests that were not answered."""
        async with self._results(folder, batch) as results:
            read = self._reader(folder, batch)
            while (lines := await read()) is not None:
                lines = [line for line in lines if line.custom_id not in results.custom_ids]
                answers = await self.read_threads.run(_expired, lines)
                folder.take_bytes(batch.error_id, sum(len(answer.text) for answer in answers))
                await self.write_threads.run(_add_all, results, lines, answers)
            _count(batch, results)

    async def _finish(self, folder: Folder, batch: Batch, status: str) -> None:
        """Publish the files of a batch, and set its last status. After an error that is `failed`.

        The next run finds the former status if the last one could not be written, and repeats this.
        """
        try:
            await self.write_threads.run(folder.publish_results, batch)
            batch.set_status(status)
            await self._save(folder, batch)
        except Exception:
            logger.exception("batch %s: its files cannot be written", batch.id)
            batch.set_status("failed")
        logger.info("batch %s: %s", batch.id, batch.status)

    async def _save(self, folder: Folder, batch: Batch) -> None:
        with folder.saving(batch):
            await self.write_threads.run(folder.save, batch)


def _expired(lines: Sequence[Line]) -> list[Answer]:
    message = "the request was not answered within the completion window"
    return [unanswered(line, "batch_expired", message) for line in lines]


def _add_all(results: Results, lines: Sequence[Line], answers: Sequence[Answer]) -> None:
    for line, answer in zip(lines, answers, strict=True):
        results.add(line.custom_id, answer)


def _count(batch: Batch, results: Results) -> None:
    counts = {"completed": results.num_completed, "failed": results.num_failed}
    batch.fields["request_counts"] |= counts
