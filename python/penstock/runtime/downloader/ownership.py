"""Owners of folders and files: what other users of the machine may have written is not used.

The superuser can change everything, so its folders and files are not those of another user.
"""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from penstock.runtime.downloader.errors import ForeignFileError

__all__ = ["is_own", "is_private", "make_folder", "make_private", "private_folder"]

_OTHERS_WRITE = 0o022
_ROOT = 0
_PRIVATE, _READABLE = 0o700, 0o755


def private_folder() -> Path:
    """The folder of this user in that for temporary files, which all users share.

    It has a value where the runtime cannot run, for the help text of its options.
    """
    user = os.geteuid() if hasattr(os, "geteuid") else 0
    return Path(tempfile.gettempdir()) / f"aibrix-{user}"


def is_own(facts: os.stat_result) -> bool:
    """Whether a folder or file belongs to this user."""
    return facts.st_uid in (os.geteuid(), _ROOT)


def is_private(facts: os.stat_result) -> bool:
    """Whether no other user can write to a folder or file."""
    return is_own(facts) and not facts.st_mode & _OTHERS_WRITE


def make_private(descriptor: int, path: str | Path) -> bool:
    """Take the right to write to a folder or file from other users; returns whether they had it.

    Raises `ForeignFileError` if it belongs to another user, and if this user cannot change the right.
    """
    facts = os.fstat(descriptor)
    if not is_own(facts):
        raise _foreign(path, facts)
    if is_private(facts):
        return False
    try:
        os.fchmod(descriptor, stat.S_IMODE(facts.st_mode) & ~_OTHERS_WRITE)
    except OSError:
        raise _foreign(path, facts) from None
    return True


def make_folder(folder: Path) -> None:
    """Make a folder and those above it; other users can only read it.

    Raises `ForeignFileError` if it is below `private_folder()`, and that is not this user's alone.
    """
    private = private_folder()
    if folder.is_relative_to(private):
        with suppress(FileExistsError):
            private.mkdir(_PRIVATE)
        facts = private.lstat()
        if not (stat.S_ISDIR(facts.st_mode) and is_private(facts)):
            raise _foreign(private, facts)
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(_READABLE, exist_ok=True)


def _foreign(path: str | Path, facts: os.stat_result) -> ForeignFileError:
    import pwd

    try:
        user = f"{pwd.getpwuid(facts.st_uid).pw_name} (uid {facts.st_uid})"
    except KeyError:
        user = f"uid {facts.st_uid}"
    mode = stat.S_IMODE(facts.st_mode)
    message = (
        f"{path}: it belongs to {user} and has the mode {mode:04o}; it must belong to uid {os.geteuid()}, "
        "and other users must not write to it: remove it, or choose another folder"
    )
    return ForeignFileError(message)
