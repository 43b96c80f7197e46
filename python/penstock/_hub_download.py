"""Downloads the files of a model from the Hugging Face hub into the cache of the hub's library.

Files that the hub stores by checksum, which the weights are, are transferred here: an interrupted transfer
continues, also in a later process, and a file enters the cache only if it has the size and the SHA-256 that
the hub's API names. The library downloads the other files, and defines the layout of the cache. Of its names,
`http_get`, `WeakFileLock` and `repo_folder_name` are not documented: a new major version can change them.
"""

from __future__ import annotations

import glob
import hashlib
import io
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from penstock._hub_aliases import nearest_alias
from penstock._hub_files import gguf_of, is_certain, select
from penstock._hub_messages import message_of
from penstock._install import missing_extra
from penstock.errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from _typeshed import ReadableBuffer
    from huggingface_hub import ModelInfo

    from penstock._hub_files import FileSet
    from penstock._hub_ids import HubModel

__all__ = ["Plan", "RemoteFile", "cached", "download", "plan"]

#: Transfers at a time.
_TRANSFERS = 4


class RemoteFile(NamedTuple):
    """A file of a repository."""

    name: str
    #: In bytes; 0 if the hub does not name it.
    size: int
    #: None for small files, which the hub does not store by checksum.
    sha256: str | None


class Plan(NamedTuple):
    """The files of a model, and those of them that have to be downloaded."""

    #: The name of the model in messages.
    name: str
    #: That of the `FileSet`.
    kind: str
    source: HubModel
    commit: str
    files: tuple[RemoteFile, ...]
    missing: tuple[RemoteFile, ...]
    #: None if the repository's card names none.
    licence: str | None

    @property
    def weights(self) -> int:
        """Size of the files with weights in bytes."""
        return sum(file.size for file in self.files if file.name.lower().endswith((".gguf", ".safetensors")))

    @property
    def size(self) -> int:
        """Number of bytes to download, without those that an interrupted download has left."""
        return sum(file.size - _partial_size(self.source, file) for file in self.missing)

    @property
    def free(self) -> int:
        """Free bytes in the file system of the cache."""
        folder = self.folder
        while not folder.exists():
            folder = folder.parent
        return shutil.disk_usage(folder).free

    @property
    def folder(self) -> Path:
        """The cache of the hub's library."""
        from huggingface_hub import constants

        return Path(constants.HF_HUB_CACHE)

    @property
    def endpoint(self) -> str:
        """The address of the hub."""
        from huggingface_hub import constants

        return constants.ENDPOINT

    @property
    def path(self) -> str:
        """The local directory or file of the model, once it is complete."""
        return _path(self._snapshot, [file.name for file in self.files])

    @property
    def is_complete(self) -> bool:
        """Whether the cache has the files as those of this revision."""
        is_newest = _commit(self.source) == self.commit
        return is_newest and _has_all(self._snapshot, [file.name for file in self.files])

    def check_space(self) -> None:
        """Raise `ModelLoadError` if the download is larger than the free space."""
        needed, free = self.size, self.free
        if needed > free:
            room = f"{self.folder} has {free:,} bytes free"
            raise ModelLoadError(f"{self.name}: the download needs {needed:,} bytes, and {room}")

    @property
    def _snapshot(self) -> Path:
        return _repository(self.source) / "snapshots" / self.commit


def plan(name: str, source: HubModel, files: FileSet) -> Plan | str:
    """Ask the hub for the files of a model. Raises `ModelLoadError`.

    If the hub does not answer, the model is that which was downloaded last: its local directory or file.
    `name` is that of the model in messages.
    """
    _check_library(name)
    from huggingface_hub import errors

    try:
        return _plan(name, source, files)
    except ModelLoadError:
        raise
    except Exception as error:  # includes errors of its HTTP library, which depends on its version
        is_answer = isinstance(error, errors.RevisionNotFoundError)
        path = None if is_answer else cached(name, source, files)
        if path is None:
            raise _failure(name, source, files.kind, error) from error
        return path


def download(found: Plan) -> str:
    """The local directory or file of a model; downloads what the cache lacks. Raises `ModelLoadError`."""
    if found.is_complete:
        return found.path
    found.check_space()
    try:
        _fetch(found)
    except ModelLoadError:
        raise
    except Exception as error:
        failure = _failure(found.name, found.source, found.kind, error)
        if any(_partial_size(found.source, file) for file in found.missing):
            failure = ModelLoadError(f"{failure}; the next attempt continues the download")
        raise failure from error
    return found.path


def cached(name: str, source: HubModel, files: FileSet) -> str | None:
    """The local directory or file of a model that was downloaded completely; None if it was not.

    The library keeps the names of all files of a commit, of which the model is selected as the hub's are.
    Programs that download a single file keep none: then the files of the cache are all that is known.
    """
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError:
        return None
    commit = _commit(source)
    if commit is None:
        return None
    folder = _repository(source) / "snapshots" / commit
    is_known = True
    try:
        names = [file.path for file in huggingface_hub.get_cached_repo_tree(source.name, revision=commit)]
    except errors.CachedRepoTreeNotFoundError:
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
        is_known = False
    try:
        found = select(name, source, names, files)
    except ModelLoadError:
        return None
    is_model = is_known or is_certain(source, found)
    return _path(folder, found) if is_model and _has_all(folder, found) else None


def _check_library(name: str) -> None:
    try:
        import huggingface_hub  # noqa: F401
    except ImportError:
        needs = missing_extra("downloading it from the Hugging Face hub", "huggingface_hub", "hub")
        raise ModelLoadError(f"{name}: no such file or directory; {needs}") from None


def _plan(name: str, source: HubModel, files: FileSet) -> Plan:
    import huggingface_hub
    from huggingface_hub import constants

    info = huggingface_hub.HfApi().model_info(
        source.name,
        revision=source.revision or constants.DEFAULT_REVISION,
        files_metadata=True,
        timeout=constants.HF_HUB_ETAG_TIMEOUT,
    )
    stored = {file.rfilename: file for file in info.siblings or ()}
    chosen = []
    for file in (stored[each] for each in select(name, source, stored, files)):
        sha256 = file.lfs.sha256 if file.lfs else None
        chosen.append(RemoteFile(file.rfilename, (file.lfs.size if file.lfs else file.size) or 0, sha256))
    commit = info.sha or ""
    repository = _repository(source)
    missing = [
        file
        for file in chosen
        if not (repository / "snapshots" / commit / file.name).exists()
        and not (file.sha256 and (repository / "blobs" / file.sha256).exists())
    ]
    return Plan(name, files.kind, source, commit, tuple(chosen), tuple(missing), _licence(info))


def _licence(info: ModelInfo) -> str | None:
    card = info.card_data
    named = None if card is None else card.get("license")
    if named == "other":
        named = card.get("license_name") or named if card is not None else named
    return str(named) if named else None


class _Output(io.BufferedWriter):
    """Appends to a file, until the download is stopped."""

    def __init__(self, path: Path, stop: threading.Event) -> None:
        super().__init__(io.FileIO(path, "ab"))
        self._stop = stop

    def write(self, data: ReadableBuffer, /) -> int:
        if self._stop.is_set():
            raise InterruptedError
        return super().write(data)


def _fetch(found: Plan) -> None:
    """Complete the cache with the files of this commit, which becomes that of the revision."""
    import huggingface_hub
    from huggingface_hub import constants

    # The hub sends larger files by its own protocol only, which verifies them.
    limit = constants.MAX_HTTP_DOWNLOAD_SIZE
    files = [file for file in found.missing if file.sha256 is not None and file.size <= limit]
    stop = threading.Event()
    pool = ThreadPoolExecutor(_TRANSFERS)
    try:
        for transfer in as_completed([pool.submit(_transfer, found, file, stop) for file in files]):
            transfer.result()
    finally:  # the first error does not wait for the other transfers, which can be of gigabytes or stall
        stop.set()
        pool.shutdown(wait=False, cancel_futures=True)
    huggingface_hub.snapshot_download(
        found.source.name,
        revision=found.commit,
        allow_patterns=[glob.escape(file.name) for file in found.files],
    )
    _set_commit(found.source, found.commit)


def _transfer(found: Plan, file: RemoteFile, stop: threading.Event) -> None:
    """Continue or begin the download of a file, and publish it in the cache."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import WeakFileLock, build_hf_headers  # type: ignore[attr-defined]

    repository = _repository(found.source)
    target = repository / "blobs" / str(file.sha256)
    lock = found.folder / ".locks" / repository.name / f"{file.sha256}.lock"  # that of the library
    for folder in (target.parent, lock.parent):
        folder.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if target.exists():
            return
        partial = _partial(found.source, file)
        with _Output(partial, stop) as output:
            if output.tell() > file.size:
                output.truncate(0)
            http_get(
                hf_hub_url(found.source.name, file.name, revision=found.commit),
                output,
                resume_size=output.seek(0, 2),
                headers=build_hf_headers(),
                expected_size=file.size,
                displayed_filename=file.name,
            )
        _verify(found.name, file, partial)
        partial.replace(target)


def _verify(name: str, file: RemoteFile, partial: Path) -> None:
    with partial.open("rb") as data:
        actual = hashlib.file_digest(data, "sha256").hexdigest()
    if actual != file.sha256:
        partial.unlink()
        sums = f"the SHA-256 {actual}, and not {file.sha256}, which the hub names"
        raise ModelLoadError(f"{name}: {file.name} was received with {sums}; the file was deleted")


def _failure(name: str, source: HubModel, kind: str, error: Exception) -> ModelLoadError:
    from huggingface_hub import errors

    command = f"hf download {source.name}" + (f" {source.file}" if source.file else "")
    command += f" --include '*{source.quantization}.gguf'" if source.quantization else ""
    command += f" --revision {source.revision}" if source.revision else ""
    message = message_of(error, name, command, kind)
    if isinstance(error, errors.RepositoryNotFoundError) and not isinstance(error, errors.GatedRepoError):
        alias = nearest_alias(source.name)
        message += f"; did you mean {alias}?" if alias and kind == "model" else ""
    return ModelLoadError(message)


# ---- the layout of the cache


def _repository(source: HubModel) -> Path:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=source.name, repo_type="model")


def _commit(source: HubModel) -> str | None:
    """The commit of a revision when it was last downloaded."""
    revision = source.revision or "main"
    repository = _repository(source)
    if (repository / "snapshots" / revision).is_dir():
        return revision
    reference = repository / "refs" / revision
    return (reference.read_text().strip() or None) if reference.is_file() else None


def _set_commit(source: HubModel, commit: str) -> None:
    """Note the commit of a branch or a tag, for `_commit`."""
    revision = source.revision or "main"
    if revision != commit:
        reference = _repository(source) / "refs" / revision
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text(commit)


def _has_all(folder: Path, names: Sequence[str]) -> bool:
    return all((folder / name).exists() for name in names)


def _path(folder: Path, names: Sequence[str]) -> str:
    return str(folder / (gguf_of(names) or ""))


def _partial(source: HubModel, file: RemoteFile) -> Path:
    return _repository(source) / "blobs" / f"{file.sha256}.penstock.incomplete"


def _partial_size(source: HubModel, file: RemoteFile) -> int:
    partial = _partial(source, file)
    return min(partial.stat().st_size, file.size) if file.sha256 and partial.exists() else 0
