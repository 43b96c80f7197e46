"""Downloads the files of a model from the Hugging Face hub into the cache of the hub's library.

Files that the hub stores by checksum, which the weights are, are transferred here: an interrupted transfer
continues, also in a later process, and a file enters the cache only if it has the size and the SHA-256 that
the hub's API names. The library downloads the other files, and defines the layout of the cache.
"""

from __future__ import annotations

import glob
import hashlib
import shutil
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from penstock._hub_aliases import nearest_alias
from penstock._hub_files import gguf_of, select
from penstock._hub_messages import message_of
from penstock._install import missing_extra
from penstock.errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Sequence

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
        return is_newest and all((self._snapshot / file.name).exists() for file in self.files)

    def check_space(self) -> None:
        """Raise `ModelLoadError` if the download is larger than the free space."""
        needed, free = self.size, self.free
        if needed > free:
            room = f"{self.folder} has {free:,} bytes free"
            raise ModelLoadError(f"{self.name}: the download needs {needed:,} bytes, and {room}")

    @property
    def _snapshot(self) -> Path:
        return _repository(self.source) / "snapshots" / self.commit


def plan(name: str, source: HubModel, files: FileSet) -> Plan:
    """Ask the hub for the files of a model. Raises `ModelLoadError`.

    `name` is that of the model in messages.
    """
    _check_library(name)
    try:
        return _plan(name, source, files)
    except ModelLoadError:
        raise
    except Exception as error:  # includes errors of its HTTP library, which depends on its version
        raise _failure(name, source, files, error) from error


def download(name: str, source: HubModel, files: FileSet) -> str:
    """The local directory or file of a model; downloads what the cache lacks. Raises `ModelLoadError`.

    If the hub does not answer, the files that were downloaded last are the model.
    """
    _check_library(name)
    from huggingface_hub import errors

    try:
        found = _plan(name, source, files)
    except ModelLoadError:
        raise
    except Exception as error:
        is_answer = isinstance(error, errors.RevisionNotFoundError)
        path = None if is_answer else cached(name, source, files)
        if path is None:
            raise _failure(name, source, files, error) from error
        return path
    if found.is_complete:
        return found.path
    found.check_space()
    try:
        commit = _fetch(found)
    except ModelLoadError:
        raise
    except Exception as error:
        failure = _failure(name, source, files, error)
        if any(_partial_size(source, file) for file in found.missing):
            failure = ModelLoadError(f"{failure}; the next attempt continues the download")
        raise failure from error
    return found.path if commit == found.commit else download(name, source, files)


def cached(name: str, source: HubModel, files: FileSet) -> str | None:
    """The local directory or file of a model that was downloaded completely; None if it was not."""
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError:
        return None
    commit = _commit(source)
    folder = _repository(source) / "snapshots" / (commit or "")
    if commit is None or not folder.is_dir():
        return None
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    try:
        found = select(name, source, names, files)
        if gguf_of(found) is None:  # the library knows which files belong to the revision
            huggingface_hub.snapshot_download(
                source.name,
                revision=source.revision,
                allow_patterns=list(files.patterns),
                local_files_only=True,
            )
    except (ModelLoadError, errors.LocalEntryNotFoundError):
        return None
    return _path(folder, found)


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
    return Plan(name, source, commit, tuple(chosen), tuple(missing), _licence(info))


def _licence(info: ModelInfo) -> str | None:
    card = info.card_data
    named = None if card is None else card.get("license")
    if named == "other":
        named = card.get("license_name") or named if card is not None else named
    return str(named) if named else None


def _fetch(found: Plan) -> str:
    """Complete the cache; returns the commit that it has then, which can be newer."""
    import huggingface_hub
    from huggingface_hub import constants

    # The hub sends larger files by its own protocol only, which verifies them.
    limit = constants.MAX_HTTP_DOWNLOAD_SIZE
    files = [file for file in found.missing if file.sha256 is not None and file.size <= limit]
    with ThreadPoolExecutor(_TRANSFERS) as pool:
        transfers = [pool.submit(_transfer, found, file) for file in files]
        try:
            for transfer in as_completed(transfers):
                transfer.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    folder: str = huggingface_hub.snapshot_download(
        found.source.name,
        revision=found.source.revision,
        allow_patterns=[glob.escape(file.name) for file in found.files],
    )
    return Path(folder).name


def _transfer(found: Plan, file: RemoteFile) -> None:
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
        with partial.open("ab") as output:
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


def _failure(name: str, source: HubModel, files: FileSet, error: Exception) -> ModelLoadError:
    from huggingface_hub import errors

    command = f"hf download {source.name}" + (f" {source.file}" if source.file else "")
    command += f" --include '*{source.quantization}.gguf'" if source.quantization else ""
    command += f" --revision {source.revision}" if source.revision else ""
    message = message_of(error, name, command, files.kind)
    if isinstance(error, errors.RepositoryNotFoundError) and not isinstance(error, errors.GatedRepoError):
        alias = nearest_alias(source.name)
        message += f"; did you mean {alias}?" if alias and files.kind == "model" else ""
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
    return reference.read_text().strip() if reference.is_file() else None


def _path(folder: Path, names: Sequence[str]) -> str:
    return str(folder / (gguf_of(names) or ""))


def _partial(source: HubModel, file: RemoteFile) -> Path:
    return _repository(source) / "blobs" / f"{file.sha256}.penstock.incomplete"


def _partial_size(source: HubModel, file: RemoteFile) -> int:
    partial = _partial(source, file)
    return min(partial.stat().st_size, file.size) if file.sha256 and partial.exists() else 0
