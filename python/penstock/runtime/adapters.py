"""Adapters of the engine: `/v1/lora_adapter/load` and `/v1/lora_adapter/unload`."""

from __future__ import annotations

import re
import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import msgspec

from penstock.runtime.artifacts import (
    credentials_of,
    download_error,
    folder_name,
    names_hub_model,
    options_for,
    request_options,
    scheme_of,
)
from penstock.runtime.downloader import (
    DownloadCancelledError,
    DownloadError,
    TransferError,
    model_state,
    resolve,
)
from penstock.runtime.engine import RefusedError
from penstock.runtime.errors import not_allowed
from penstock.runtime.operations import Operations
from penstock.server.paths import within

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.runtime.bodies import DelegatedLoad
    from penstock.runtime.downloader import Options
    from penstock.runtime.downloads import Downloads
    from penstock.runtime.engine import EngineClient, Reply
    from penstock.runtime.settings import RuntimeSettings

__all__ = ["Adapters"]

_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")
_NAME_LIMIT = "1 to 100 letters, digits, - and _"
#: Of adapters with a folder.
_FOLDER_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_FOLDER_LIMIT = "1 to 128 letters, digits, dots, - and _, of which the first is no dot"
_SCHEMES = frozenset({"hf", "huggingface", "s3", "tos"})
#: The folder of a version, below that of its adapter.
_VERSION_FOLDER = "[0-9a-f]" * 12
#: Requests for one adapter at the same time.
_MAX_REQUESTS = 16


class Adapters:
    """Loads and unloads adapters, one operation per adapter at a time; equal requests share one."""

    def __init__(self, settings: RuntimeSettings, engine: EngineClient, downloads: Downloads) -> None:
        self._settings = settings
        self._engine = engine
        self._downloads = downloads
        self._folder = Path(settings.adapter_dir).resolve()
        #: The folders of adapters that this runtime has downloaded and the engine has loaded.
        self._paths: dict[str, Path] = {}
        self.operations = Operations(_MAX_REQUESTS)

    async def load(self, name: str, path: str, authorization: str | None) -> None:
        """Load an adapter that the engine finds: by hub id, or a path in one of the allowed folders.

        The adapter of a URL is downloaded first.
        """
        if not _NAME.fullmatch(name):
            raise not_allowed("ValidationError", "lora_name", name, _NAME_LIMIT)
        if not path.strip():
            raise not_allowed("ValidationError", "lora_path", path, "a hub id, a path or a URL")
        key = ("load", path, authorization)
        await self.operations.join(name, key, partial(self._load, name, path, authorization))

    async def _load(self, name: str, path: str, authorization: str | None) -> None:
        if "://" in path:
            await self._load_url(name, path, {}, authorization)
            return
        if not names_hub_model(path):
            found = within(path, self._settings.roots)
            if found is None:
                limit = "a hub id, a URL, or a path below --adapter-dir, --model-dir or an --allowed-root"
                raise not_allowed("ValidationError", "lora_path", path, limit)
            path = str(found)
        await self._engine.load_adapter(name, path, authorization)

    async def load_artifact(self, body: DelegatedLoad, authorization: str | None) -> tuple[Path, str]:
        """Download an adapter and load it; returns its folder and the text of the engine."""
        name = body.lora_name
        _check_folder_name(name)
        key = (msgspec.json.encode(body), authorization)
        return await self.operations.join(name, key, partial(self._load_artifact, body, authorization))

    async def _load_artifact(self, body: DelegatedLoad, authorization: str | None) -> tuple[Path, str]:
        credentials = await anyio.to_thread.run_sync(credentials_of, body, self._settings)
        extra = request_options(body.artifact_url, credentials, body.additional_config or {})
        return await self._load_url(body.lora_name, body.artifact_url, extra, authorization, body.local_dir)

    async def unload(
        self, name: str, number: int | None, authorization: str | None, *, deletes: bool
    ) -> Reply:
        """Unload an adapter, and delete its folder if the runtime downloaded it."""
        _check_folder_name(name)
        run = partial(self._unload, name, number, authorization, deletes=deletes)
        return await self.operations.join(name, ("unload", number, authorization, deletes), run)

    async def _unload(
        self, name: str, number: int | None, authorization: str | None, *, deletes: bool
    ) -> Reply:
        reply = await self._engine.unload_adapter(name, number, authorization)
        with anyio.CancelScope(shield=True):  # the engine does not have it any more
            if deletes:
                await anyio.to_thread.run_sync(_delete_all, self._folder / name, self._paths.get(name))
            self._paths.pop(name, None)
        return reply

    async def _load_url(
        self,
        name: str,
        url: str,
        extra: Mapping[str, object],
        authorization: str | None,
        local_dir: str | None = None,
    ) -> tuple[Path, str]:
        """Download an adapter unless it is there, and load it; returns its folder and the engine's text.

        A folder that this request has made is deleted if the engine refuses the adapter. The folder of the
        adapter's last version is deleted when the engine has this one.
        """
        self._check_url(url)
        try:
            options = options_for(url, extra, self._settings)
            resolve(url, options)
        except DownloadError as error:
            raise download_error(error) from error
        path = self._path_of(name, folder_name(url, options), local_dir)
        state, _ = await anyio.to_thread.run_sync(model_state, path)
        await self._fetch(url, path, options, keeps=state != "absent")
        try:
            text = await self._engine.load_adapter(name, str(path), authorization)
        except RefusedError:
            if state == "absent":
                await _delete_to_the_end(path)
            raise
        last = self._paths.get(name, path)
        self._paths[name] = path
        if last != path:
            await _delete_to_the_end(last)
        return path, text

    def _check_url(self, url: str) -> None:
        self._engine.adapter_routes()  # otherwise the download is for nothing
        if scheme_of(url) not in _SCHEMES:
            limit = "a URL of one of the schemes " + ", ".join(sorted(_SCHEMES))
            if scheme_of(url) in ("http", "https"):
                limit += ": a web server has one file, and an adapter is a directory"
            raise not_allowed("ValidationError", "artifact_url", url, limit)

    def _path_of(self, name: str, version: str, local_dir: str | None) -> Path:
        """The folder of an adapter. Another version has another one, so versions are never mixed."""
        folder = self._folder
        if local_dir is not None:
            found = within(local_dir, self._settings.roots)
            if found is None:
                limit = "below --adapter-dir, --model-dir or an --allowed-root"
                raise not_allowed("ValidationError", "local_dir", local_dir, limit)
            folder = found
        path = folder / name / version
        if within(path, [folder]) is None:  # a link leads out of it
            raise not_allowed("ValidationError", "lora_name", name, "a folder in that of adapters")
        return path

    async def _fetch(self, url: str, path: Path, options: Options, *, keeps: bool) -> None:
        """Download to a folder, which an error for good deletes unless the engine may have its files."""
        try:
            await self._downloads.fetch(url, path, options, slots=self._downloads.adapter_slots)
        except DownloadError as error:
            if not keeps and not isinstance(error, (DownloadCancelledError, TransferError)):
                await _delete_to_the_end(path)
            raise download_error(error) from error


def _check_folder_name(name: str) -> None:
    if not _FOLDER_NAME.fullmatch(name):
        raise not_allowed("ValidationError", "lora_name", name, _FOLDER_LIMIT)


def _delete_all(folder: Path, known: Path | None) -> None:
    """Delete the downloads of an adapter: the last one, and those of an earlier runtime in its folder."""
    for path in {*folder.glob(_VERSION_FOLDER), *filter(None, [known])}:
        _delete(path)


async def _delete_to_the_end(path: Path) -> None:
    """Delete a folder, also if the request is cancelled meanwhile."""
    with anyio.CancelScope(shield=True):
        await anyio.to_thread.run_sync(_delete, path)


def _delete(path: Path) -> None:
    """Delete a folder that a download has made, and its parent if that is empty; leave all others."""
    if model_state(path)[0] in ("absent", "unknown") or path.resolve() != path:
        return
    shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        path.parent.rmdir()
