"""The directory of a model on disk.

The files are published by renames, so a file of the model is complete or absent. `.cache/penstock` has the
rest:

- `lock`, locked by the process that downloads,
- `manifest.jsonl`: a line about the model, then a line for each complete file. The first line of a complete
  model says so; the file is replaced at the beginning and the end of a download, and extended meanwhile,
- `*.part`, files that are incomplete, and `*.state`, how far each of their parts is (see `parts.py`).

All paths below the directory are opened segment by segment without following links. What other users may have
written is not used: folders and files of this user are made private and hashed again, files of others are
replaced, and folders of others are errors.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import stat
import time
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any, Literal

from penstock.runtime.downloader.checksums import hash_file
from penstock.runtime.downloader.errors import (
    ForeignFileError,
    InsufficientSpaceError,
    InvalidArgumentError,
    TooLargeError,
    UnsafeNameError,
)
from penstock.runtime.downloader.names import folders_of, is_safe, is_state
from penstock.runtime.downloader.ownership import is_own, is_private, make_folder, make_private

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from penstock.runtime.downloader.checksums import Hasher
    from penstock.runtime.downloader.files import RemoteFile

__all__ = ["ModelState", "Target", "check_other_models", "model_directory", "model_state"]

#: `partial` is a download that was interrupted, or a model of which files are missing.
ModelState = Literal["absent", "downloading", "partial", "complete", "unknown"]

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_FOLDER_MODE = 0o755
_STATE = ".cache/penstock"
_LOCK, _MANIFEST = "lock", "manifest.jsonl"
_LOCK_POLL, _LOCK_LOG = 0.1, 10.0


def model_directory(local_dir: Path, model_name: str) -> Path:
    """`local_dir/model_name`. Raises `InvalidArgumentError` if that is not below, or is in a model."""
    if not is_safe(model_name) or is_state(model_name):
        message = f"model_name={model_name!r:.200}: expected a relative path without special segments"
        raise InvalidArgumentError(message, "model_name")
    for parent in Path(model_name).parents[:-1]:
        if (Path(local_dir) / parent / _STATE / _LOCK).exists():
            message = f"model_name={model_name!r:.200}: {str(parent)!r:.200} is a model itself"
            raise InvalidArgumentError(message, "model_name")
    if (Path(local_dir) / _STATE / _LOCK).exists():
        message = f"local_dir={str(local_dir)!r:.200} is a model itself: models are in folders of it"
        raise InvalidArgumentError(message, "local_dir")
    return Path(local_dir) / model_name


def check_other_models(directory: Path, names: Iterable[str]) -> None:
    """Raise `InvalidArgumentError` if one of these files of a model would be in the directory of another."""
    for folder in folders_of(names):
        if (directory / folder / _STATE / _LOCK).exists():
            message = f"model_name: the model has files in {folder!r:.200}, which is another model"
            raise InvalidArgumentError(message, "model_name")


def model_state(directory: Path) -> tuple[ModelState, str | None]:
    """The state of a model's directory, and the kind of its source; None for other directories.

    The directory of another user is `unknown`. One with something that other users can write to is `partial`.
    """
    if not directory.is_dir():
        return "absent", None
    try:
        if not is_own(directory.stat()):
            return "unknown", None
        lock = os.open(directory / _STATE / _LOCK, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return "unknown", None
    try:
        if not is_own(os.fstat(lock)):
            return "unknown", None
        header: dict[str, Any] = {}
        files: dict[str, dict[str, Any]] = {}
        with suppress(OSError), (directory / _STATE / _MANIFEST).open("rb") as manifest:
            header, files = _read_manifest(manifest)
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return "downloading", header.get("source")
    finally:
        os.close(lock)

    def is_present(name: str, facts: dict[str, Any]) -> bool:
        with suppress(OSError):
            found = (directory / name).lstat()
            return stat.S_ISREG(found.st_mode) and is_private(found) and bool(found.st_size == facts["size"])
        return False

    is_complete = header.get("complete") is True and all(map(is_present, files, files.values()))
    if is_complete and not _are_private(directory, [f"{_STATE}/{_MANIFEST}", *files]):
        is_complete = False
    return ("complete" if is_complete else "partial"), header.get("source")


def _are_private(directory: Path, names: Iterable[str]) -> bool:
    """Whether no other user can write to the folders of these files, nor to the files."""
    try:
        below = [(directory / folder).lstat() for folder in folders_of(names)]
        files = [(directory / name).lstat() for name in names]
        return all(map(is_private, [directory.stat(), *below, *files]))
    except (OSError, TooLargeError):
        return False


class Target:
    """The directory of a model, open for a download. Names are those of remote files, which are checked."""

    def __init__(self, directory: Path, source: str) -> None:
        make_folder(directory)
        self.directory = directory
        self._source = source
        self._root = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        self.state = self._manifest = -1
        self._files: dict[str, dict[str, Any]] = {}
        #: Whether other users could write to a folder: the records of its files do not hold.
        self._was_open = False
        try:
            self._was_open = make_private(self._root, directory)
            self.state, _ = self._open_parent(f"{_STATE}/{_LOCK}", create=True)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the directory."""
        for descriptor in (self._root, self.state, self._manifest):
            if descriptor >= 0:
                os.close(descriptor)

    @contextmanager
    def locked(self, wait: Callable[[float], None], log: Callable[[str], None]) -> Iterator[None]:
        """The exclusive right to download to this directory, among all threads and processes."""
        lock = os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644, dir_fd=self.state)
        try:
            make_private(lock, self.directory / _STATE / _LOCK)
            next_log = time.monotonic()
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= next_log:
                        log(f"{self.directory}: waiting for another download to this directory")
                        next_log = time.monotonic() + _LOCK_LOG
                    wait(_LOCK_POLL)
            yield
        finally:
            os.close(lock)

    # ---- the manifest

    def begin(self) -> None:
        """Read the manifest; from now on the model is incomplete."""
        with suppress(OSError):
            descriptor = os.open(_MANIFEST, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=self.state)
            with os.fdopen(descriptor, "rb") as file:
                self._was_open |= make_private(descriptor, self.directory / _STATE / _MANIFEST)
                _, self._files = _read_manifest(file)
        for name in filter(is_safe, {str(PurePosixPath(name).parent / "x") for name in self._files}):
            with suppress(OSError, UnsafeNameError):
                os.close(self._open_parent(name, create=False)[0])
        if self._was_open:
            self._files = {}
            self._remove_state()
        self._write_manifest(is_complete=False)
        self._manifest = os.open(_MANIFEST, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW, dir_fd=self.state)

    def record(self, file: RemoteFile, size: int) -> None:
        """Add a file that is complete."""
        self._files[file.name] = {"size": size, "version": file.version}
        os.write(self._manifest, _line({"file": file.name, **self._files[file.name]}))

    def finish(self, names: set[str], files: Mapping[str, RemoteFile]) -> None:
        """The model is complete with the files `names`; the rest of the state is removed.

        Files of earlier downloads are removed unless `files`, all files of the model, has their version.
        """
        for name in self._files.keys() - names:
            file = files.get(name)
            if file is None or self._files[name] != {"size": file.size, "version": file.version}:
                del self._files[name]
                self._remove(name)
        self._write_manifest(is_complete=True)
        self._remove_state()

    def _remove_state(self) -> None:
        """Remove what is left of incomplete files."""
        with os.scandir(self.state) as entries:
            for entry in entries:
                if entry.name not in (_LOCK, _MANIFEST):
                    os.unlink(entry.name, dir_fd=self.state)

    def _write_manifest(self, *, is_complete: bool) -> None:
        lines = [_line({"format": 1, "source": self._source, "complete": is_complete})]
        lines += [_line({"file": name, **facts}) for name, facts in self._files.items()]
        new = f"{_MANIFEST}.new"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with os.fdopen(os.open(new, flags, 0o644, dir_fd=self.state), "wb") as file:
            file.writelines(lines)
            if is_complete:
                file.flush()
                os.fsync(file.fileno())
        os.rename(new, _MANIFEST, src_dir_fd=self.state, dst_dir_fd=self.state)
        if is_complete:
            os.fsync(self.state)

    # ---- files

    def size_of(self, name: str) -> int | None:
        """The size of a file; None if there is none, -1 for a link, or a file of another user.

        A file of this user to which others could write is made private, and its record is removed. Raises
        `UnsafeNameError` for a directory.
        """
        try:
            folder, last = self._open_parent(name, create=False)
        except FileNotFoundError:
            return None
        try:
            descriptor = os.open(last, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW, dir_fd=folder)
        except FileNotFoundError:
            return None
        except OSError:  # a link, or unreadable
            return -1
        finally:
            os.close(folder)
        try:
            facts = os.fstat(descriptor)
            if stat.S_ISDIR(facts.st_mode):
                raise UnsafeNameError(f"{name!a}: there is a directory with this name")
            if not stat.S_ISREG(facts.st_mode):
                return -1
            if make_private(descriptor, self.directory / name):
                self._files.pop(name, None)
        except ForeignFileError:
            return -1
        finally:
            os.close(descriptor)
        return facts.st_size

    def is_current(self, file: RemoteFile) -> bool:
        """Whether this version of the file is here, from an earlier download."""
        if not file.version or file.name not in self._files or self.size_of(file.name) != file.size:
            return False
        return self._files.get(file.name) == {"size": file.size, "version": file.version}

    def may_be_current(self, file: RemoteFile) -> bool:
        """Whether there is a file of this size that no download recorded."""
        if file.name in self._files or file.size is None:
            return False
        return self.size_of(file.name) == file.size

    def hash_file(self, name: str, hasher: Hasher) -> None:
        """Add the content of a file to a digest."""
        folder, last = self._open_parent(name, create=False)
        try:
            descriptor = os.open(last, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)
        finally:
            os.close(folder)
        try:
            hash_file(hasher, descriptor, 0, os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)

    def publish(self, part: str, name: str) -> None:
        """Give a file in the folder of the state its name, in place of an older one."""
        folder, last = self._open_parent(name, create=True)
        try:
            os.rename(part, last, src_dir_fd=self.state, dst_dir_fd=folder)
        except (IsADirectoryError, NotADirectoryError):
            raise UnsafeNameError(f"{name!a}: there is a directory with this name") from None
        finally:
            os.close(folder)

    def _remove(self, name: str) -> None:
        """Remove a file of an earlier download."""
        if not is_safe(name):
            return
        try:
            folder, last = self._open_parent(name, create=False)
        except (FileNotFoundError, UnsafeNameError):
            return
        try:
            with suppress(FileNotFoundError, IsADirectoryError):
                os.unlink(last, dir_fd=folder)
        finally:
            os.close(folder)

    def check_space(self, needed: int) -> None:
        """Raise `InsufficientSpaceError` if the file system has less free space."""
        if needed > (free := self.free_bytes()):
            raise InsufficientSpaceError(f"{self.directory}: {needed} bytes are needed, {free} are free")

    def free_bytes(self) -> int:
        """The free space of the file system."""
        return shutil.disk_usage(self._root).free

    def _open_parent(self, name: str, *, create: bool) -> tuple[int, str]:
        """The descriptor of a file's directory, and the last segment of its name."""
        *folders, last = name.split("/")
        descriptor = os.dup(self._root)
        path = self.directory
        for folder in folders:
            parent = descriptor
            path /= folder
            try:
                if create:
                    with suppress(FileExistsError):
                        os.mkdir(folder, _FOLDER_MODE, dir_fd=parent)
                descriptor = os.open(folder, _FOLDER, dir_fd=parent)
            except OSError as error:
                if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                    raise
                raise UnsafeNameError(f"{name!a}: {folder!a} is a link or a file") from None
            finally:
                os.close(parent)
            try:
                self._was_open |= make_private(descriptor, path)
            except ForeignFileError:
                os.close(descriptor)
                raise
        return descriptor, last


def _line(facts: dict[str, Any]) -> bytes:
    return json.dumps(facts).encode() + b"\n"


def _read_manifest(lines: IO[bytes]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The first line, and the size and version of each file. A line that is not whole is left out."""
    header: dict[str, Any] = {}
    files: dict[str, dict[str, Any]] = {}
    for line in lines:
        try:
            facts = json.loads(line)
            if "file" in facts:
                files[facts["file"]] = {"size": facts["size"], "version": facts["version"]}
            else:
                header = facts
        except (ValueError, KeyError, TypeError):
            continue
    return header, files
