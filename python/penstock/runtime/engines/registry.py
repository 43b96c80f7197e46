"""The file of the running engines, with which the next runtime adopts them after a crash of this one."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import msgspec

__all__ = ["Claim", "Record", "Registry", "read_private", "write_private"]

_PRIVATE = 0o600
_PRIVATE_FOLDER = 0o700
_OTHERS_WRITE = 0o022
_ALL_WRITE = 0o002


class Claim(msgspec.Struct, forbid_unknown_fields=True):
    """The object of the cluster that asked for an engine."""

    namespace: str
    name: str
    uid: str


class Record(msgspec.Struct):
    """An engine, and its process if it has one."""

    model_name: str
    artifact_url: str
    port: int
    ipc_name: str
    #: The command of the process.
    command: list[str]
    claim_ref: Claim | None = None
    pid: int = 0
    #: That of the process, in ticks since the system started: another process can get the same pid.
    start_time: int = 0
    is_asleep: bool = False
    #: As `commands.Kind`.
    engine: str = "vllm"


def read_private(path: Path) -> bytes | None:
    """The content of a file that only this user can have written; nothing of another one.

    The registry has commands, and its folder can be one in which all users write.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        facts = os.fstat(descriptor)
        if facts.st_uid != os.geteuid() or facts.st_mode & _OTHERS_WRITE:
            return None
        return file.read()


def write_private(path: Path, content: bytes) -> None:
    """Replace a file as a whole, also if the process is killed meanwhile; only this user can read it."""
    _make_folder(path.parent)
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, _PRIVATE)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(descriptor)
    new.replace(path)


def _make_folder(folder: Path) -> None:
    """Make a folder. Raises `OSError` for one in which other users can replace files."""
    folder.mkdir(mode=_PRIVATE_FOLDER, parents=True, exist_ok=True)
    facts = folder.stat()
    if facts.st_uid != os.geteuid() or facts.st_mode & _ALL_WRITE:
        raise OSError(errno.EPERM, "the folder belongs to another user, or all users can write in it", folder)


class Registry:
    """A file of one runtime at a time, which is replaced as a whole."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._lock = -1

    def exists(self) -> bool:
        """Whether there is a file; there is none in a folder that this user cannot read."""
        try:
            return self._path.exists()
        except OSError:
            return False

    def lock(self) -> bool:
        """Whether the file is this runtime's from now on; it is not while another one runs.

        Raises `OSError` if the lock cannot be made.
        """
        if self._lock >= 0:
            return True
        _make_folder(self._path.parent)
        name = self._path.with_name(f"{self._path.name}.lock")
        lock = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, _PRIVATE)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return False
        self._lock = lock
        return True

    def unlock(self) -> None:
        """Leave the file to another runtime."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def load(self) -> list[Record]:
        """The records; none if there is no file, or one of another version."""
        text = read_private(self._path)
        try:
            return [] if text is None else msgspec.json.decode(text, type=list[Record])
        except msgspec.MsgspecError:
            return []

    def save(self, records: list[Record]) -> None:
        """Replace the file."""
        write_private(self._path, msgspec.json.encode(records))
