"""Downloads the files of a source to a directory."""

from __future__ import annotations

import errno
import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.runtime.downloader.errors import (
    DownloadError,
    InsufficientSpaceError,
    InvalidArgumentError,
    ModelNotFoundError,
    TooLargeError,
    UnsafeNameError,
)
from penstock.runtime.downloader.jobs import Job
from penstock.runtime.downloader.names import SELECTIONS, check_distinct, is_safe, is_state, selected
from penstock.runtime.downloader.pool import Pool, Workers
from penstock.runtime.downloader.progress import Counts, Progress
from penstock.runtime.downloader.retries import Pacer, SystemClock
from penstock.runtime.downloader.target import Target, check_other_models

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.runtime.downloader.files import RemoteFile
    from penstock.runtime.downloader.options import Options
    from penstock.runtime.downloader.retries import Clock
    from penstock.runtime.downloader.sources import Source

__all__ = ["download"]

logger = logging.getLogger("penstock.runtime.downloader")

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def download(
    source: Source,
    directory: Path,
    *,
    cancelled: threading.Event | None = None,
    progress: Callable[[Progress], object] | None = None,
    clock: Clock | None = None,
) -> Path:
    """Download the model to `directory`, which is created; returns its absolute path.

    `progress` is called in this thread, a few times per second. After `cancelled` is set, the call raises
    `DownloadCancelledError` within about a second. Raises a `DownloadError` otherwise; a later call resumes.
    """
    from penstock.runtime.downloader.transport import Session

    cancelled, stopped = cancelled or threading.Event(), threading.Event()
    clock = clock or SystemClock(cancelled, stopped)
    directory = directory.expanduser().absolute()
    options = source.options
    show = progress or (lambda _: None)
    is_in_place = source.kind == "local" and _is_same(source, directory)
    session = Session(Pacer(clock), stopped, options.num_threads, options.allowed_hosts)
    workers = Workers(session, cancelled)
    try:
        show(Progress())
        found = workers.call(lambda: _listed(source.files(session), options))
        files = _selected(found, options)
        if is_in_place:
            return directory
        check_other_models(directory, (file.name for file in files))
        show(Progress(phase="waiting"))
        target = Target(directory, source.kind)
        try:
            with target.locked(clock.wait, logger.info):
                target.begin()
                _transfer(source, files, target, workers, show)
                target.finish({file.name for file in files}, found)
        finally:
            target.close()
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise InsufficientSpaceError(f"{directory}: {error.strerror}") from None
        raise DownloadError(f"{directory}: {error.strerror or type(error).__name__}") from error
    finally:
        session.close()
    return directory


def _is_same(source: Source, directory: Path) -> bool:
    """Whether a local model is in this directory already."""
    origin, target = Path(source.uri).resolve(), directory.resolve()
    if origin == target:
        return True
    if origin in target.parents or target in origin.parents:
        raise InvalidArgumentError(f"{directory}: one directory is in the other", "local_dir")
    return False


def _listed(files: Iterable[RemoteFile], options: Options) -> dict[str, RemoteFile]:
    """All files by name. Refuses unsafe names."""
    found: dict[str, RemoteFile] = {}
    for number, file in enumerate(files, start=1):
        if number > options.max_files:
            raise TooLargeError(f"the model has more than {options.max_files} files (DOWNLOADER_MAX_FILES)")
        if not is_safe(file.name):
            raise UnsafeNameError(f"{file.name[:200]!a}: the name of a remote file is not allowed")
        if not is_state(file.name):
            found[file.name] = file
    return found


def _selected(found: dict[str, RemoteFile], options: Options) -> list[RemoteFile]:
    """The files that the options select, safetensors and large files first."""
    names = selected(list(found), options)
    if not names and found:
        chosen = {name: getattr(options, name) for name in SELECTIONS}
        shown = ", ".join(f"{name}={', '.join(values)!r:.100}" for name, values in chosen.items() if values)
        raise ModelNotFoundError(f"none of the model's {len(found)} files is selected: {shown}")
    if not names and not options.allow_empty:
        raise ModelNotFoundError("the model has no files")
    check_distinct(names)
    total = sum(found[name].size or 0 for name in names)
    if total > options.max_bytes:
        raise TooLargeError(
            f"the model has {total} bytes, more than {options.max_bytes} (DOWNLOADER_MAX_BYTES)"
        )
    return sorted(
        (found[name] for name in names),
        key=lambda file: (not file.name.endswith(".safetensors"), -(file.size or 0)),
    )


def _transfer(
    source: Source,
    files: list[RemoteFile],
    target: Target,
    workers: Workers,
    show: Callable[[Progress], object],
) -> None:
    """Download the files that are not here yet."""
    options = source.options
    is_fresh = options.force_download or not options.check_file_exist
    counts = Counts(len(files), sum(file.size or 0 for file in files), options.max_bytes)
    jobs = []
    for file in files:
        if not is_fresh and target.is_current(file):
            counts.add_found(file.size or 0)
            counts.add_file()
        else:
            jobs.append(Job(source, file, target, workers.session, counts))
    needed = sum(job.needed_bytes(is_fresh=is_fresh) for job in jobs)
    target.check_space(needed)
    logger.info("%s: downloading %d of %d files, %d bytes", source.uri, len(jobs), len(files), needed)
    num_threads = min(options.num_threads, sum(job.num_parts for job in jobs))
    pool = Pool(jobs, counts, is_fresh=is_fresh)
    try:
        workers.run([pool.work] * num_threads, lambda: show(counts.progress("downloading")))
    finally:
        for job in jobs:
            job.close()
    show(counts.progress("done"))
