"""Names of remote files: safe below a directory, distinct on every file system, and selected by patterns."""

from __future__ import annotations

import fnmatch
import unicodedata
from typing import TYPE_CHECKING
from urllib.parse import unquote

from penstock.runtime.downloader.errors import TooLargeError, UnsafeNameError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.runtime.downloader.options import Options

__all__ = ["SELECTIONS", "check_distinct", "folders_of", "is_safe", "is_state", "selected"]

#: The options that select files.
SELECTIONS = ("allow_file_suffix", "allow_patterns", "ignore_patterns")
_MAX_NAME, _MAX_SEGMENT = 1024, 255
#: Folders of a model. A name can have hundreds.
_MAX_FOLDERS = 10_000
#: Weights in formats that repositories have beside safetensors.
_OTHER_WEIGHTS = (".bin", ".ckpt", ".h5", ".msgpack", ".ot", ".pt", ".pth")


def is_safe(name: str) -> bool:
    """Whether this is a relative path of ordinary segments, also after decodings that other programs do."""
    try:
        size = len(name.encode())
    except UnicodeEncodeError:  # lone surrogates
        return False
    spellings = {name, unquote(name), unicodedata.normalize("NFKC", name)}
    has_other_separators = any(spelling.count("/") != name.count("/") for spelling in spellings)
    return size <= _MAX_NAME and not has_other_separators and all(map(_is_plain, spellings))


def _is_plain(name: str) -> bool:
    segments = name.split("/")
    has_drive = any(part[1:2] == ":" for part in segments)
    return (
        not any(unicodedata.category(character) == "Cc" for character in name)
        and "\\" not in name
        and not has_drive
        and all(part not in ("", ".", "..") and len(part.encode()) <= _MAX_SEGMENT for part in segments)
        and all(part == part.strip(" ") and not part.endswith(".") for part in segments)
    )


def is_state(name: str) -> bool:
    """Whether the path has a segment `.cache`, for the state of downloads; copies of models can have one."""
    return ".cache" in name.casefold().split("/")


def check_distinct(names: Iterable[str]) -> None:
    """Raise `UnsafeNameError` if two files are one on some file system, or one is the other's directory."""
    files: dict[str, str] = {}
    for name in names:
        folded = unicodedata.normalize("NFKC", name).casefold()
        if folded in files:
            raise UnsafeNameError(f"{name!a} and {files[folded]!a} differ only in case or in Unicode form")
        files[folded] = name
    for folder in files.keys() & folders_of(files):
        inner = next(name for folded, name in files.items() if folded.startswith(f"{folder}/"))
        raise UnsafeNameError(f"{files[folder]!a} is a file and the directory of {inner!a}")


def folders_of(names: Iterable[str]) -> set[str]:
    """The folders of files, with those above them. Raises `TooLargeError` if there are too many."""
    folders: set[str] = set()
    for name in names:
        folder = name.rpartition("/")[0]
        while folder and folder not in folders:
            folders.add(folder)
            if len(folders) > _MAX_FOLDERS:
                raise TooLargeError(f"the model has more than {_MAX_FOLDERS} folders")
            folder = folder.rpartition("/")[0]
    return folders


def selected(names: list[str], options: Options) -> list[str]:
    """The files that the options select.

    Without a list of suffixes or patterns, other weights in a directory with safetensors are left out.
    """

    def is_selected(name: str) -> bool:
        patterns = options.allow_patterns
        return (
            (not options.allow_file_suffix or name.endswith(options.allow_file_suffix))
            and (not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns))
            and not any(fnmatch.fnmatchcase(name, pattern) for pattern in options.ignore_patterns)
        )

    found = [name for name in names if is_selected(name)]
    if options.allow_file_suffix or options.allow_patterns or not options.prefer_safetensors:
        return found
    folders = {name.rpartition("/")[0] for name in found if name.endswith(".safetensors")}
    return [
        name for name in found if not (name.endswith(_OTHER_WEIGHTS) and name.rpartition("/")[0] in folders)
    ]
