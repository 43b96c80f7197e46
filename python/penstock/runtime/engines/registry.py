"""The file of the running engines, with which the next runtime adopts them after a crash of this one."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

__all__ = ["Claim", "Record", "Registry", "read_private"]

_PRIVATE = 0o600
_OTHERS_WRITE = 0o022


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


class Registry:
    """A file that is replaced as a whole. Only this user can read it."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)

    def load(self) -> list[Record]:
        """The records; none if there is no file, or one of another version."""
        text = read_private(self._path)
        try:
            return [] if text is None else msgspec.json.decode(text, type=list[Record])
        except msgspec.MsgspecError:
            return []

    def save(self, records: list[Record]) -> None:
        """Replace the file, also if the process is killed meanwhile."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_name(f"{self._path.name}.new")
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, _PRIVATE)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(records))
            file.flush()
            os.fsync(descriptor)
        new.replace(self._path)
