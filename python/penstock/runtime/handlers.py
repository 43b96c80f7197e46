"""The routes about health, models, adapters and downloads."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import msgspec
from starlette.responses import JSONResponse, PlainTextResponse, Response

from penstock.runtime.artifacts import engine_key_of
from penstock.runtime.bodies import (
    CancelDownload,
    DelegatedLoad,
    DelegatedUnload,
    DirectLoad,
    DirectUnload,
    Download,
    ListModels,
    converted,
    decoded,
)
from penstock.runtime.errors import ApiError
from penstock.server.disconnects import while_connected

if TYPE_CHECKING:
    from starlette.requests import Request

    from penstock.runtime.state import State

__all__ = [
    "BODY_READ",
    "cancel_download",
    "download_model",
    "has_body",
    "healthz",
    "list_models",
    "load_adapter",
    "models",
    "read_body",
    "ready",
    "unload_adapter",
]

logger = logging.getLogger("penstock.runtime")

_NOT_FOUND = 404
#: The item of the scope that says whether the body was read.
BODY_READ = "penstock.body_read"


async def healthz(_state: State, _request: Request) -> Response:
    """Whether the runtime answers."""
    return JSONResponse({"status": "ok"})


async def ready(state: State, request: Request) -> Response:
    """Whether the runtime knows its engine and, as a setting, whether this one answers."""
    settings = state.settings
    if not (settings.engine and settings.engine_endpoint):
        return JSONResponse({"status": "not ready"}, 503)
    if settings.ready_checks_engine and not await while_connected(request.receive, state.is_engine_up):
        return JSONResponse({"status": "not ready", "reason": "the engine does not answer"}, 503)
    return JSONResponse({"status": "ready"})


async def models(state: State, request: Request) -> Response:
    """The engine's list of models."""
    try:
        body = await state.engine.models(state.access.authorization(request, "read"))
    except ApiError:
        if not state.settings.strict_compat:
            raise
        raise ApiError(500, "ServerError", "Unexpected error listing models") from None
    if state.settings.strict_compat:
        body = await anyio.to_thread.run_sync(_owned_by_vllm, body)
    return Response(body, media_type="application/json")


def _owned_by_vllm(body: bytes) -> bytes:
    """A list of models with vLLM as the owner of those of Penstock, as in AIBrix's documents."""
    try:
        found = msgspec.json.decode(body)
        for row in found["data"]:
            if row.get("owned_by") == "penstock":
                row["owned_by"] = "vllm"
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, LookupError, TypeError, AttributeError):
        return body  # not a list of models
    return msgspec.json.encode(found)


async def read_body(state: State, request: Request) -> dict[str, Any]:
    """The JSON object of a body, without the fields that are null."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # Browsers send other types to other origins without asking them first.
        raise ApiError(415, "UnsupportedMediaTypeError", "the content type must be application/json")
    limit, timeout = state.settings.max_body_bytes, state.settings.receive_timeout
    parts = bytearray()
    with anyio.move_on_after(timeout):
        async for part in request.stream():
            parts += part
            if len(parts) > limit:
                message = f"the body is too large: the limit is {limit} bytes"
                raise ApiError(413, "BodyTooLargeError", message)
        request.scope[BODY_READ] = True
        return decoded(bytes(parts))
    raise ApiError(408, "RequestTimeoutError", f"the body did not arrive within {timeout:g} seconds")


def has_body(request: Request) -> bool:
    """Whether the request has a body."""
    return request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers


async def load_adapter(state: State, request: Request) -> Response:
    """Load an adapter that the engine finds, or download it before."""
    fields = await read_body(state, request)
    if "artifact_url" not in fields:
        direct = converted(fields, DirectLoad)
        name, path = direct.lora_name, direct.lora_path
        authorization = state.access.authorization(request, "change")
        await while_connected(request.receive, partial(state.adapters.load, name, path, authorization))
        return PlainTextResponse(f"Success: LoRA adapter '{name}' loaded successfully from '{path}'.")
    body = converted(fields, DelegatedLoad)
    try:
        authorization = state.access.authorization(request, "change", engine_key_of(body))
        work = partial(state.adapters.load_artifact, body, authorization)
        folder, text = await while_connected(request.receive, work)
    except ApiError as error:
        error.fields["error"] = str(error)
        if not state.settings.strict_compat:
            raise
        raise ApiError(500, "ServerError", str(error), fields=error.fields, is_flat=False) from None
    message = f"Successfully loaded adapter {body.lora_name}"
    answer = {"local_path": str(folder), "engine_response": {"message": text}}
    return JSONResponse({"status": "success", "message": message, **answer})


async def unload_adapter(state: State, request: Request) -> Response:
    """Unload an adapter. One that the engine does not have is no error in the short form of the body."""
    fields = await read_body(state, request)
    authorization = state.access.authorization(request, "change")
    if "lora_int_id" in fields:
        direct = converted(fields, DirectUnload)
        name = direct.lora_name
        work = partial(state.adapters.unload, name, direct.lora_int_id, authorization, deletes=False)
        reply = await while_connected(request.receive, work)
        if reply.status == _NOT_FOUND:
            message = f"the engine has no adapter {name!r}: {reply.reason()}"
            raise ApiError(404, "NotFoundError", message, param="lora_name")
        return PlainTextResponse(f"Success: LoRA adapter '{name}' unloaded successfully.")
    body = converted(fields, DelegatedUnload)
    name, deletes = body.lora_name, body.cleanup_local
    work = partial(state.adapters.unload, name, None, authorization, deletes=deletes)
    reply = await while_connected(request.receive, work)
    answer = {"status": "success", "message": f"Successfully unloaded adapter {name}"}
    if state.settings.strict_compat:
        return JSONResponse(answer)
    return JSONResponse({**answer, "was_loaded": reply.status != _NOT_FOUND})


async def download_model(state: State, request: Request) -> Response:
    """Start a download, or report one."""
    body = converted(await read_body(state, request), Download)
    return JSONResponse(await while_connected(request.receive, partial(state.downloads.start, body)))


async def cancel_download(state: State, request: Request) -> Response:
    """End a download, which a parameter of the query or a body names."""
    fields = await read_body(state, request) if has_body(request) else dict(request.query_params)
    body = converted(fields, CancelDownload)
    return JSONResponse(await state.downloads.cancel(body.model_name, body.local_dir))


async def list_models(state: State, request: Request) -> Response:
    """The models in a folder, which a parameter of the query or a body names."""
    if has_body(request):
        folder = converted(await read_body(state, request), ListModels).local_dir
    else:
        folder = request.query_params.get("local_dir")
    join = partial(state.lists.join, "lists", folder, partial(state.downloads.list, folder))
    return JSONResponse({"object": "list", "data": await while_connected(request.receive, join)})
