"""The routes below `/v1/runtime`."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import anyio.to_thread
import msgspec
from starlette.responses import JSONResponse, Response

from penstock._hub_ids import parse_hub_id
from penstock.runtime.artifacts import (
    download_error,
    folder_name,
    names_hub_model,
    options_for,
    request_options,
    scheme_of,
)
from penstock.runtime.bodies import Activate, Deactivate, KvLimit, Operation, Sleep, converted
from penstock.runtime.downloader import DownloadError, model_directory, resolve
from penstock.runtime.engines.accelerators import observed
from penstock.runtime.engines.commands import kind_of
from penstock.runtime.engines.flags import arguments_of
from penstock.runtime.engines.kvcached import ipc_name_of
from penstock.runtime.engines.registry import Record
from penstock.runtime.engines.supervisor import PORTS
from penstock.runtime.errors import ApiError, not_allowed
from penstock.runtime.handlers import read_body
from penstock.server.disconnects import while_connected
from penstock.server.paths import within

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from starlette.requests import Request

    from penstock.runtime.engines.engine import RunningEngine
    from penstock.runtime.state import State

__all__ = ["activate", "deactivate", "engines", "limit_kv_cache", "sleep", "snapshot", "wake"]

Returned = TypeVar("Returned")

_MODEL_NAME = re.compile(r"[A-Za-z0-9][\w./:-]{0,127}", re.ASCII)
#: The schemes of the hub, and those of URLs.
_HUB = ("hf", "huggingface")
_URLS = ("http", "https", "s3", "tos")
_IPC_NAME = re.compile(r"[\w.-]{1,104}", re.ASCII)


def _check_open(state: State) -> None:
    if not state.settings.max_engines:
        raise ApiError(403, "PermissionError", "/v1/runtime is closed: max_engines is 0")


async def activate(state: State, request: Request) -> Response:
    """Start an engine, unless the same one is there."""
    _check_open(state)
    body = converted(await read_body(state, request), Activate)
    name, run = ("activate", body.model_name), partial(_activate, state, body)
    joined = partial(state.engine_operations.join, name, msgspec.json.encode(body), run)
    engine = await while_connected(request.receive, joined)
    record = engine.record
    return JSONResponse(
        {
            "status": "success",
            "model_name": record.model_name,
            "port": record.port,
            "ipc_name": record.ipc_name,
            "message": f"the engine is {engine.phase}",
        }
    )


async def _activate(state: State, body: Activate) -> RunningEngine:
    async with state.supervisor.counted("activate"):
        try:
            record, arguments, model = await _prepared(state, body)

            async def start() -> RunningEngine:
                return state.supervisor.activate(record, arguments, model)

            # After other changes of the model: the engine that it had may still be ending.
            key = (Activate, msgspec.json.encode(body))
            return await state.engine_operations.join(("change", body.model_name), key, start)
        except ApiError as error:
            error.fields["status"] = "error"
            raise


async def _prepared(state: State, body: Activate) -> tuple[Record, list[str], str]:
    """The record, the arguments and the model of an engine to start."""
    name = body.model_name
    if not _MODEL_NAME.fullmatch(name):
        limit = "1 to 128 letters, digits and _ . / : -, of which the first is a letter or digit"
        raise not_allowed("ValidationError", "model_name", name, limit)
    kind = kind_of(body.engine, state.settings)
    if body.port and body.port not in PORTS:
        raise not_allowed("ValidationError", "port", body.port, f"0 or {PORTS[0]} to {PORTS[-1]}")
    memory = body.ipc_name or ""
    if memory and not _IPC_NAME.fullmatch(memory):
        raise not_allowed("ValidationError", "ipc_name", memory, "1 to 104 letters, digits and _ . -")
    config = body.engine_config
    arguments = arguments_of(kind, {} if config is None else config.args, state.settings.engine_flags)
    model, url = await _model(state, body)
    memory = ipc_name_of(memory or f"kvc_{name}")
    return Record(name, url, body.port, memory, [], body.claim_ref, engine=kind), arguments, model


async def _model(state: State, body: Activate) -> tuple[str, str]:
    """The model for the command, and its URL without credentials.

    The model is a hub id, which the engine downloads, or a folder. Models of URLs, and those of the hub with
    a revision, credentials or options, are downloaded; each has a folder of its own.
    """
    url, settings = body.artifact_url.strip(), state.settings
    scheme = scheme_of(url)
    hub_id = parse_hub_id(url.partition("://")[2] if scheme in _HUB else url)
    if hub_id is not None and not names_hub_model(hub_id.name):
        hub_id = None  # a path of this form
    extra = request_options(url, body.credentials, body.additional_config)
    if hub_id is not None and hub_id.revision is None and not extra:
        return hub_id.name, body.artifact_url
    if hub_id is None and scheme not in _URLS:
        found = within(url, settings.roots)
        if found is None:
            limit = "a hub id, a URL, or a path below --model-dir, --adapter-dir or an --allowed-root"
            raise not_allowed("ValidationError", "artifact_url", body.artifact_url, limit)
        if not await anyio.to_thread.run_sync(found.exists):
            message = f"artifact_url={body.artifact_url!r:.200}: no such file or directory"
            raise ApiError(404, "ModelNotFoundError", message, param="artifact_url")
        return str(found), body.artifact_url
    try:
        options = options_for(url, extra, settings)
        source = resolve(url, options)
        folder: Path = model_directory(settings.roots[0], source.model_name)
        directory = folder / folder_name(url, options)
        return str(await state.downloads.fetch(url, directory, options)), source.uri
    except DownloadError as error:
        raise download_error(error) from error


async def deactivate(state: State, request: Request) -> Response:
    """Stop an engine; an unknown one is no error."""
    _check_open(state)
    body = converted(await read_body(state, request), Deactivate)
    message = f"the model {body.model_name!r:.130} was deactivated meanwhile"
    error = ApiError(409, "ConflictError", message, param="model_name", fields={"status": "error"})
    state.engine_operations.cancel(("activate", body.model_name), error)
    await _to_the_end(state, request, body, partial(_deactivate, state, body))
    return JSONResponse({"status": "success", "model_name": body.model_name})


async def _deactivate(state: State, body: Deactivate) -> None:
    async with state.supervisor.counted("deactivate"):
        await state.supervisor.deactivate(body.model_name)


async def sleep(state: State, request: Request) -> Response:
    """Free the memory of an engine."""
    _check_open(state)
    body = converted(await read_body(state, request), Sleep)
    return JSONResponse(await _to_the_end(state, request, body, partial(_sleep, state, body)))


async def _sleep(state: State, body: Sleep) -> dict[str, Any]:
    async with state.supervisor.counted("sleep"):
        engine = state.supervisor.engine(body.model_name)
        result = await engine.sleep(body.operation_id, body.level)
    state.supervisor.save()
    return result


async def wake(state: State, request: Request) -> Response:
    """Load the model of an engine again."""
    _check_open(state)
    body = converted(await read_body(state, request), Operation)
    return JSONResponse(await _to_the_end(state, request, body, partial(_wake, state, body)))


async def _wake(state: State, body: Operation) -> dict[str, Any]:
    async with state.supervisor.counted("wake"):
        engine = state.supervisor.engine(body.model_name)
        result = await engine.wake(body.operation_id)
    state.supervisor.save()
    return result


async def _to_the_end(
    state: State, request: Request, body: Deactivate | Operation, run: Callable[[], Awaitable[Returned]]
) -> Returned:
    """Run a change of an engine. A client that disconnects does not interrupt it."""
    key = (type(body), msgspec.json.encode(body))
    joined = partial(state.engine_operations.join, ("change", body.model_name), key, run, ends=False)
    return await while_connected(request.receive, joined)


async def limit_kv_cache(state: State, request: Request) -> Response:
    """Set the limit of a KV cache of kvcached; that of Penstock has its size from the start."""
    _check_open(state)
    body = converted(await read_body(state, request), KvLimit)
    return JSONResponse(await _to_the_end(state, request, body, partial(_limit_kv_cache, state, body)))


async def _limit_kv_cache(state: State, body: KvLimit) -> dict[str, Any]:
    async with state.supervisor.counted("kv_limit"):
        engine = state.supervisor.engine(body.model_name)
        return await engine.limit_kv_cache(body.operation_id, body.limit_bytes)


async def engines(state: State, _request: Request) -> Response:
    """All engines that the runtime has started."""
    _check_open(state)
    return JSONResponse({"models": [engine.summary() for engine in state.supervisor.engines.values()]})


async def snapshot(state: State, _request: Request) -> Response:
    """All engines with the numbers of their requests, the GPUs, and the artifacts on this machine."""
    _check_open(state)
    found: dict[str, dict[str, Any]] = {}
    accelerators = await anyio.to_thread.run_sync(observed)

    async def add(engine: RunningEngine) -> None:
        found[engine.record.model_name] = await engine.snapshot(accelerators)

    async with anyio.create_task_group() as group:
        names = list(state.supervisor.engines)
        for engine in state.supervisor.engines.values():
            group.start_soon(add, engine)
    return JSONResponse(
        {
            "observed_at": datetime.now(UTC).isoformat(),
            "accelerators": [
                {"id": gpu.id, "hbm_total_bytes": gpu.total, "hbm_free_bytes": gpu.free}
                for gpu in accelerators
            ],
            "models": [found[name] for name in names],
            "cached_artifacts": sorted(state.supervisor.artifacts),
        }
    )
