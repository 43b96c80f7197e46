"""`download`: files of a repository on the Hugging Face hub."""

from __future__ import annotations

import fnmatch
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import penstock
from penstock._hub_messages import message_of
from penstock._install import missing_extra

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["download"]


def download(repo_id: str, patterns: Sequence[str], **options: Any) -> list[str]:
    """The local path of the one file that each pattern matches; that in the cache, if the hub is offline.

    `options` are `local_dir` and `cache_dir`. Raises `ValueError` if a pattern matches no file or several,
    `penstock.ModelLoadError` if a file cannot be downloaded, `ImportError` without the extra `hub`.
    """
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError as error:
        raise ImportError(missing_extra("from_pretrained", "huggingface_hub", "hub")) from error
    try:
        files = huggingface_hub.HfApi().model_info(repo_id, revision="main").siblings or ()
    except (
        errors.RepositoryNotFoundError,
        errors.RevisionNotFoundError,
        errors.HFValidationError,
    ) as error:
        raise _failure(repo_id, patterns, error) from error
    except Exception as error:  # noqa: BLE001 - errors of the connection and of the HTTP library
        try:
            return _cached(repo_id, patterns, options)
        except errors.LocalEntryNotFoundError as missing:
            missing.__cause__ = error
            raise _failure(repo_id, patterns, missing) from missing
    found = _matches(repo_id, patterns, [file.rfilename for file in files])
    try:
        return [huggingface_hub.hf_hub_download(repo_id, name, **options) for name in found]
    except Exception as error:
        raise _failure(repo_id, patterns, error) from error


def _cached(repo_id: str, patterns: Sequence[str], options: Any) -> list[str]:
    """The same of the files that were downloaded before. Raises the hub's `LocalEntryNotFoundError`."""
    import huggingface_hub
    from huggingface_hub import errors

    allowed = list(patterns)
    found: Any = huggingface_hub.snapshot_download(
        repo_id, allow_patterns=allowed, local_files_only=True, **options
    )
    folder = Path(found)
    paths = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    names = [path.as_posix() for path in paths if path.parts[0] != ".cache"]  # of the hub, in a `local_dir`
    if not all(fnmatch.filter(names, pattern) for pattern in patterns):
        raise errors.LocalEntryNotFoundError(repo_id)
    return [str(folder / name) for name in _matches(repo_id, patterns, names)]


def _matches(repo_id: str, patterns: Iterable[str], names: Sequence[str]) -> list[str]:
    """The name that each pattern matches."""
    matches = []
    for pattern in patterns:
        found = fnmatch.filter(names, pattern)
        if len(found) != 1:
            message = f"{pattern!r} matches {len(found)} files of {repo_id}, which has {sorted(names)}"
            raise ValueError(message)
        matches += found
    return matches


def _failure(repo_id: str, patterns: Iterable[str], error: Exception) -> penstock.ModelLoadError:
    included = "".join(f" --include {shlex.quote(pattern)}" for pattern in patterns)
    return penstock.ModelLoadError(message_of(error, repo_id, f"hf download {repo_id}{included}"))
