"""`/v1/files` and `/v1/batches`."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from typing import IO, TYPE_CHECKING, Any

import anyio

from penstock.server.batch.lines import ENDPOINTS
from penstock.server.batch.store import new_file_id
from penstock.server.bodies import converted
from penstock.server.errors import ApiError, invalid
from penstock.server.http import too_large
from penstock.server.multipart import Multipart
from penstock.server.pages import read_page
from penstock.server.protocol.openai_batches import BatchRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from penstock.server.batch.batches import Batches
    from penstock.server.batch.store import Batch, Folder
    from penstock.server.http import Exchange
    from penstock.server.state import State
    from penstock.server.threads import Threads

__all__ = [
    "cancel_batch",
    "create_batch",
    "create_file",
    "delete_file",
    "file_content",
    "list_batches",
    "list_files",
    "read_batch",
    "read_file",
]

#: Bytes of an upload that are written at once, and for which a client has `receive_timeout`.
_PIECE = 1 << 20
#: A field of the form, a file name, and all of a form but the file.
_MAX_FIELD = 256
_MAX_FORM = 64 << 10
_SECONDS = 24 * 60 * 60


def _opened(state: State, exchange: Exchange) -> tuple[Batches, Folder]:
    """The batches of the server, and the folder of the client."""
    if state.batches is None:
        raise ApiError(403, "this route is closed: the server has no folder for files; set files_dir")
    return state.batches, state.batches.folder(exchange.key)


def _file_of(folder: Folder, file_id: str, param: str) -> dict[str, Any]:
    if (found := folder.files.get(file_id)) is None:
        raise ApiError(404, f"there is no file with the id {file_id[:64]!r}", param=param)
    return found


def _file(state: State, exchange: Exchange) -> tuple[Batches, Folder, dict[str, Any]]:
    """The file that the path names."""
    batches, folder = _opened(state, exchange)
    return batches, folder, _file_of(folder, exchange.scope["path_params"]["file_id"], "file_id")


def _batch(state: State, exchange: Exchange) -> tuple[Batches, Batch]:
    """The batch that the path names."""
    batches, folder = _opened(state, exchange)
    batch_id: str = exchange.scope["path_params"]["batch_id"]
    if (batch := folder.batches.get(batch_id)) is None:
        raise ApiError(404, f"there is no batch with the id {batch_id[:64]!r}", param="batch_id")
    return batches, batch


async def create_file(state: State, exchange: Exchange) -> None:
    """Store a file."""
    batches, folder = _opened(state, exchange)
    folder.check_room()
    upload = _Upload(state, exchange, batches, folder)
    try:
        found = await upload.read()
    except BaseException:
        with anyio.CancelScope(shield=True):
            await batches.write_threads.run(folder.remove, upload.file_id)
        raise
    await exchange.send_json(found)


class _Upload:
    """A form with a file, which is written as it arrives."""

    def __init__(self, state: State, exchange: Exchange, batches: Batches, folder: Folder) -> None:
        self.file_id = new_file_id()
        self._settings = state.settings
        self._exchange = exchange
        self._batches = batches
        self._folder = folder
        self._max_bytes = state.settings.max_file_bytes + _MAX_FORM
        self._num_read = 0
        self._begin = anyio.current_time()
        exchange.check_length(self._max_bytes)
        exchange.hold(2 * _PIECE)
        self._form = Multipart(exchange.request_headers.get("content-type", ""), self._next_piece)

    async def _next_piece(self) -> bytes | None:
        """The next bytes of the body: a client has `receive_timeout` for each `_PIECE` of them."""
        seconds = self._settings.receive_timeout * (1 + self._num_read / _PIECE)
        piece = await self._exchange.read_piece(self._begin + seconds)
        self._num_read += len(piece or b"")
        if self._num_read > self._max_bytes:
            raise too_large(self._max_bytes)
        return piece

    async def read(self) -> dict[str, Any]:
        """Write the file; returns its description."""
        fields: dict[str, str] = {}
        filename = None
        while (part := await self._form.next_part()) is not None:
            if part.name == "file":
                if filename is not None:
                    raise ApiError(400, "the form has several files", param="file")
                filename = (part.filename or "")[:_MAX_FIELD]
                await self._write()
            else:
                fields[part.name[:_MAX_FIELD]] = (await self._field(part.name)).decode(errors="replace")
        if (purpose := fields.pop("purpose", None)) != "batch":
            raise invalid("purpose", purpose, "batch")
        if fields:
            raise ApiError(400, f"{min(fields)} is not allowed: a file has no such field", param=min(fields))
        if filename is None:
            raise ApiError(400, "file is missing", param="file")
        self._folder.check_room()
        return await self._batches.write_threads.run(self._folder.publish, self.file_id, filename, purpose)

    async def _field(self, name: str) -> bytes:
        value = b""
        while piece := await self._form.read():
            value += piece
            if len(value) > _MAX_FIELD:
                limit = f"a text of at most {_MAX_FIELD} bytes"
                raise invalid(name[:_MAX_FIELD], value[:_MAX_FIELD].decode(errors="replace"), limit)
        return value

    async def _write(self) -> None:
        size, limit = 0, self._settings.max_file_bytes
        buffer = bytearray()
        async with _open(self._batches.write_threads, self._folder.path_of(self.file_id), "wb") as file:
            while True:
                piece = await self._form.read()
                size += len(piece)
                if size > limit:
                    raise ApiError(413, f"the file is too large: the limit is {limit} bytes", param="file")
                buffer += piece
                if len(buffer) >= _PIECE or not piece:
                    self._folder.take_bytes(self.file_id, len(buffer))
                    await self._batches.write_threads.run(file.write, bytes(buffer))
                    buffer.clear()
                if not piece:
                    return


@asynccontextmanager
async def _open(threads: Threads, path: Path, mode: str) -> AsyncIterator[IO[bytes]]:
    """An open file: these threads open and close it."""
    file = await threads.run(path.open, mode)
    try:
        yield file
    finally:
        with anyio.CancelScope(shield=True):
            await threads.run(file.close)


async def list_files(state: State, exchange: Exchange) -> None:
    """List the files."""
    _, folder = _opened(state, exchange)
    page = read_page(exchange, default=10_000, most=10_000)
    purpose = exchange.query().get("purpose")
    files = list(folder.files.values())  # threads change it
    found = [item for item in files if purpose is None or item["purpose"] == purpose]
    await exchange.send_json(page.of([item["id"] for item in found], found))


async def read_file(state: State, exchange: Exchange) -> None:
    """The description of a file."""
    await exchange.send_json(_file(state, exchange)[2])


async def file_content(state: State, exchange: Exchange) -> None:
    """The contents of a file."""
    batches, folder, found = _file(state, exchange)
    async with _open(batches.read_threads, folder.path_of(found["id"]), "rb") as file:

        async def read(size: int) -> bytes:
            return await batches.read_threads.run(file.read, size)

        await exchange.send_file(found["bytes"], read)


async def delete_file(state: State, exchange: Exchange) -> None:
    """Remove a file."""
    batches, folder, found = _file(state, exchange)
    for batch in folder.batches.values():
        if batch.is_unfinished and batch.fields["input_file_id"] == found["id"]:
            message = f"the file is the input of the batch {batch.id!r}, which has not ended"
            raise ApiError(400, message, param="file_id")
    del folder.files[found["id"]]  # now, so that no batch is made of it meanwhile
    await batches.write_threads.run(folder.remove, found["id"])
    await exchange.send_json({"id": found["id"], "object": "file", "deleted": True})


async def create_batch(state: State, exchange: Exchange) -> None:
    """Start a batch."""
    batches, folder = _opened(state, exchange)
    request = converted(await exchange.read_object(), BatchRequest)
    _file_of(folder, request.input_file_id, "input_file_id")
    if request.endpoint not in ENDPOINTS:
        raise invalid("endpoint", request.endpoint, " or ".join(ENDPOINTS))
    if request.output_expires_after is not None:
        limit = "left out: files are kept until they are deleted"
        raise invalid("output_expires_after", request.output_expires_after, limit)
    now = int(time.time())
    times = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    batch = await batches.add(
        exchange.key,
        {
            "object": "batch",
            "endpoint": request.endpoint,
            "input_file_id": request.input_file_id,
            "completion_window": request.completion_window,
            "status": "validating",
            "created_at": now,
            "expires_at": now + _SECONDS,
            **{f"{name}_at": None for name in times},
            "errors": None,
            "output_file_id": None,
            "error_file_id": None,
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "metadata": request.metadata,
        },
    )
    await exchange.send_json(batch.fields)


async def list_batches(state: State, exchange: Exchange) -> None:
    """List the batches."""
    _, folder = _opened(state, exchange)
    found = list(folder.batches.values())
    page = read_page(exchange)
    await exchange.send_json(page.of([batch.id for batch in found], [batch.fields for batch in found]))


async def read_batch(state: State, exchange: Exchange) -> None:
    """The state of a batch."""
    await exchange.send_json(_batch(state, exchange)[1].fields)


async def cancel_batch(state: State, exchange: Exchange) -> None:
    """Cancel a batch."""
    batches, batch = _batch(state, exchange)
    await batches.cancel(exchange.key, batch)
    await exchange.send_json(batch.fields)
