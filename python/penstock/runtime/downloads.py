"""Downloads of models in the background: `/v1/model/download` and `/v1/model/list`."""

from __future__ import annotations

import logging
import os
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import msgspec

from penstock.runtime.artifacts import download_error, options_for
from penstock.runtime.downloader import (
    DownloadError,
    InvalidArgumentError,
    Options,
    Progress,
    model_directory,
    model_state,
    resolve,
    run,
)
from penstock.runtime.errors import ApiError
from penstock.server.paths import within

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from anyio.abc import TaskGroup

    from penstock.runtime.bodies import Download
    from penstock.runtime.settings import RuntimeSettings

__all__ = ["Downloads"]

logger = logging.getLogger("penstock.runtime")

#: Time for which the request that starts a download waits for its first file, or for an error.
_FIRST_ANSWER = 10.0
#: Downloads that are remembered after their end.
_MAX_JOBS = 1000
#: Bounds of a list.
_MAX_DEPTH = 4
_MAX_FOLDERS = 10_000
_STATUSES = {
    "absent": "not_exist",
    "complete": "downloaded",
    "downloading": "downloading",
    "partial": "no_operation",
    "unknown": "unknown",
}


@dataclass
class _Job:
    """A download; the last one to its folder."""

    name: str
    #: The URI and the options that select files.
    origin: tuple[object, ...]
    #: The folder that the request named.
    root: Path
    source: str
    is_forced: bool = False
    #: Whether a request has got the answer that it has succeeded.
    is_reported: bool = False
    progress: Progress = field(default_factory=Progress)
    error: ApiError | None = None
    #: That of the download to the same folder before.
    last_error: ApiError | None = None
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    #: Set when the first file is being downloaded, or the download has ended.
    has_begun: anyio.Event = field(default_factory=anyio.Event)
    has_ended: anyio.Event = field(default_factory=anyio.Event)

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return not self.has_ended.is_set()

    def answers(self, origin: tuple[object, ...], options: Options) -> bool:
        """Whether its success answers a request. A forced download is repeated after this answer."""
        if self.is_running or self.error is not None or self.origin != origin:
            return False
        return not options.force_download or (self.is_forced and not self.is_reported)

    def card(self, status: str) -> dict[str, Any]:
        """The object of the responses."""
        error = self.error or self.last_error
        return {
            **_card(self.name, self.root, self.source, status),
            "progress": asdict(self.progress),
            "last_error": None if error is None else {"type": error.kind, "message": str(error)},
        }


def _card(name: str, root: Path, source: str, status: str) -> dict[str, Any]:
    path = str(root / name)
    return {"model_name": name, "model_root_path": path, "source": source, "model_status": status}


class Downloads:
    """The downloads of models; each folder has one at a time."""

    def __init__(self, settings: RuntimeSettings) -> None:
        self._settings = settings
        #: Of downloads of models at the same time.
        self._slots = anyio.CapacityLimiter(settings.max_downloads)
        #: Of those of adapters, which do not wait for models.
        self.adapter_slots = anyio.CapacityLimiter(settings.max_downloads)
        #: Runs the downloads while the application runs.
        self.group: TaskGroup | None = None
        self._jobs: dict[Path, _Job] = {}

    async def start(self, body: Download) -> dict[str, Any]:
        """Start a download unless it runs or is complete; returns its card."""
        try:
            extra = body.download_extra_config or {}
            options = options_for(body.model_uri, extra, self._settings)
            if self._settings.strict_compat:
                options = msgspec.structs.replace(options, allow_empty=True)
            source = resolve(body.model_uri, options)
            root = self._root(body.local_dir)
            name = body.model_name or source.model_name
            directory = model_directory(root, name)
        except DownloadError as error:
            raise download_error(error) from error
        origin = options.origin(body.model_uri)
        job = self._jobs.get(directory)
        if job is None or not job.is_running:
            state, _ = await anyio.to_thread.run_sync(model_state, directory)
            if job is not None and state == "complete" and job.answers(origin, options):
                job.is_reported = True
                return job.card("downloaded")
            job = self._jobs.get(directory)  # another request may have started it meanwhile
        if job is not None and job.is_running and job.origin != origin:
            message = f"another model, or other files of it, are being downloaded to the folder of {name!r}"
            raise ApiError(409, "ConflictError", message, param="model_name")
        if job is None or not job.is_running:
            last_error = None if job is None else job.error
            job = _Job(
                name, origin, root, source.kind, is_forced=options.force_download, last_error=last_error
            )
            self._begin(body.model_uri, directory, options, job)
        with anyio.move_on_after(_FIRST_ANSWER):
            await job.has_begun.wait()
        if job.error is not None:
            raise job.error
        job.is_reported = not job.is_running
        return job.card("downloading" if job.is_running else "downloaded")

    def num_running(self) -> int:
        """Downloads that have a slot."""
        return self._slots.borrowed_tokens + self.adapter_slots.borrowed_tokens

    async def fetch(
        self,
        uri: str,
        directory: Path,
        options: Options,
        progress: Callable[[Progress], object] | None = None,
        slots: anyio.CapacityLimiter | None = None,
    ) -> Path:
        """Download to a directory, within the time and the number of downloads of the settings.

        The time begins when the download does.
        """
        seconds = self._settings.download_timeout
        try:
            async with slots or self._slots:
                with anyio.fail_after(seconds):
                    return await run(uri, directory, options, progress)
        except TimeoutError:
            message = f"the download took longer than {seconds:g} seconds; the same request resumes it"
            raise ApiError(408, "TimeoutError", message) from None

    async def cancel(self, name: str, local_dir: str | None) -> dict[str, Any]:
        """End the download to a folder, of which the next request resumes; returns its card."""
        try:
            directory = model_directory(self._root(local_dir), name)
        except DownloadError as error:
            raise download_error(error) from error
        job = self._jobs.get(directory)
        if job is None or not job.is_running:
            message = f"the model {name!r:.130} is not being downloaded"
            raise ApiError(404, "NotFoundError", message, param="model_name")
        job.scope.cancel()
        await job.has_ended.wait()
        return job.card("no_operation" if job.error is not None else "downloaded")

    def _root(self, local_dir: str | None) -> Path:
        root = within(local_dir or self._settings.model_dir, self._settings.roots)
        if root is None:
            message = f"local_dir={local_dir!r} is not below --model-dir, --adapter-dir or an --allowed-root"
            raise InvalidArgumentError(message, "local_dir")
        return root

    def _begin(self, uri: str, directory: Path, options: Options, job: _Job) -> None:
        if self.group is None:
            raise ApiError(503, "UnavailableError", "the runtime is stopping")
        if sum(found.is_running for found in self._jobs.values()) >= self._settings.max_downloads:
            limit = self._settings.max_downloads
            raise ApiError(429, "OverloadedError", f"too many downloads: the limit is {limit}")
        for old in [path for path, found in self._jobs.items() if not found.is_running]:
            if len(self._jobs) < _MAX_JOBS:
                break
            del self._jobs[old]
        self._jobs.pop(directory, None)  # the newest ones are the last
        self._jobs[directory] = job
        self.group.start_soon(self._run, uri, directory, options, job)

    async def _run(self, uri: str, directory: Path, options: Options, job: _Job) -> None:
        def show(progress: Progress) -> None:
            job.progress = progress
            if progress.phase == "downloading":
                job.has_begun.set()

        try:
            with job.scope:
                await self.fetch(uri, directory, options, show)
            if job.scope.cancelled_caught:
                job.error = ApiError(409, "DownloadCancelledError", "the download was cancelled")
        except DownloadError as error:
            job.error = download_error(error)
        except ApiError as error:
            job.error = error
        except Exception:
            job.error = ApiError(500, "InternalError", "internal error")
            logger.exception("the download of %s failed", job.name)
        except anyio.get_cancelled_exc_class():
            job.error = ApiError(503, "UnavailableError", "the runtime is stopping")
            raise
        finally:
            job.has_begun.set()
            job.has_ended.set()
        if job.error is not None:
            logger.warning("the download of %s failed: %s", job.name, job.error)

    async def list(self, local_dir: str | None) -> list[dict[str, Any]]:
        """The cards of the models in a folder; none of a folder that requests may not name."""
        root = within(local_dir or self._settings.model_dir, self._settings.roots)
        if root is None:
            return []
        found = await anyio.to_thread.run_sync(_models, root)
        cards = {path: _card(name, root, source, status) for path, name, source, status in found}
        for path, job in self._jobs.items():
            if path.is_relative_to(root) and (job.is_running or job.error is not None or path in cards):
                status = "downloading" if job.is_running else cards.get(path, {}).get("model_status")
                cards[path] = job.card(status or "no_operation")
        return [cards[path] for path in sorted(cards)]


def _models(root: Path) -> list[tuple[Path, str, str, str]]:
    """The path, name, kind of source and status of each model below a folder."""
    found: list[tuple[Path, str, str, str]] = []
    folders = [(root, 0)]
    num_folders = 0
    while folders and num_folders < _MAX_FOLDERS:
        folder, depth = folders.pop()
        try:
            names = sorted(item.name for item in os.scandir(folder) if item.is_dir(follow_symlinks=False))
        except OSError:  # it does not exist, or is deleted meanwhile
            continue
        num_folders += len(names)
        for path in (folder / name for name in names if not name.startswith(".")):
            state, source = model_state(path)
            if source is not None and state != "absent":
                name = path.relative_to(root).as_posix()
                found.append((path, name, source, _STATUSES[state]))
            elif depth + 1 < _MAX_DEPTH:
                folders.append((path, depth + 1))
    return found
