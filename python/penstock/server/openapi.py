"""`/openapi.json`: the OpenAPI document of the routes, the structures of requests and sampling parameters."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple, get_type_hints

import msgspec

import penstock
from penstock.server.protocol import objects
from penstock.server.protocol.anthropic import CountRequest, MessagesRequest
from penstock.server.protocol.openai_batches import BatchRequest, FileRequest
from penstock.server.protocol.openai_chat import ChatRequest
from penstock.server.protocol.openai_completions import CompletionRequest
from penstock.server.protocol.openai_embeddings import EmbeddingsRequest
from penstock.server.protocol.openai_responses import ResponsesRequest
from penstock.server.protocol.rerank import RerankRequest, ScoreRequest
from penstock.server.protocol.tokens import (
    AbortRequest,
    CacheRequest,
    DetokenizeRequest,
    LoadAdapterRequest,
    ModelRequest,
    SleepRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
)
from penstock.server.sampling import LABELS, SAMPLING_FIELDS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.server.http import Exchange
    from penstock.server.limits import Handler, RouteRow
    from penstock.server.state import State

__all__ = ["document", "openapi_handler"]

_REFERENCE = "#/components/schemas/{name}"
_SAMPLING = "SamplingParameters"


class Operation(NamedTuple):
    """The bodies of a route."""

    request: type | None = None
    #: The structure of the response, an empty object without one, or the type of another content.
    response: type | str | None = None
    #: Whether sampling parameters can be given beside the fields of the request.
    samples: bool = False
    streams: bool = False
    #: Whether a request can have no body.
    is_optional: bool = False
    #: The parameters of the query, with the schema of each.
    query: Mapping[str, dict[str, Any]] = {}
    error: type = objects.Error
    #: The type of the body of a request.
    content: str = "application/json"


_PAGES: dict[str, dict[str, Any]] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": 100},
    "order": {"enum": ["asc", "desc"]},
    "after": {"type": "string"},
}
_FILE_PAGES: dict[str, dict[str, Any]] = {
    **_PAGES,
    "limit": {"type": "integer", "minimum": 1, "maximum": 10_000},
    "purpose": {"type": "string"},
}
_OPERATIONS = {
    "POST /v1/chat/completions": Operation(ChatRequest, objects.ChatCompletion, samples=True, streams=True),
    "POST /v1/completions": Operation(CompletionRequest, objects.Completion, samples=True, streams=True),
    "POST /v1/responses": Operation(ResponsesRequest, objects.Response, samples=True, streams=True),
    "GET /v1/responses/{response_id}": Operation(None, objects.Response),
    "DELETE /v1/responses/{response_id}": Operation(None, objects.DeletedResponse),
    "POST /v1/responses/{response_id}/cancel": Operation(None, objects.Response),
    "GET /v1/responses/{response_id}/input_items": Operation(None, objects.InputItems, query=_PAGES),
    "POST /v1/files": Operation(FileRequest, objects.File, content="multipart/form-data"),
    "GET /v1/files": Operation(None, objects.FileList, query=_FILE_PAGES),
    "GET /v1/files/{file_id}": Operation(None, objects.File),
    "DELETE /v1/files/{file_id}": Operation(None, objects.DeletedFile),
    "GET /v1/files/{file_id}/content": Operation(None, "application/octet-stream"),
    "POST /v1/batches": Operation(BatchRequest, objects.Batch),
    "GET /v1/batches": Operation(None, objects.BatchList, query=_PAGES),
    "GET /v1/batches/{batch_id}": Operation(None, objects.Batch),
    "POST /v1/batches/{batch_id}/cancel": Operation(None, objects.Batch),
    "POST /v1/messages": Operation(MessagesRequest, objects.AnthropicMessage, samples=True, streams=True),
    "POST /v1/messages/count_tokens": Operation(CountRequest, objects.InputTokens),
    "POST /v1/embeddings": Operation(EmbeddingsRequest, objects.Embeddings),
    "POST /v1/rerank": Operation(RerankRequest, objects.Ranking),
    "POST /v2/rerank": Operation(RerankRequest, objects.Ranking),
    "POST /rerank": Operation(RerankRequest, objects.Ranking),
    "POST /v1/score": Operation(ScoreRequest, objects.Scores),
    "POST /score": Operation(ScoreRequest, objects.Scores),
    "POST /tokenize": Operation(TokenizeRequest, objects.Tokenized),
    "POST /detokenize": Operation(DetokenizeRequest, objects.Detokenized),
    "POST /abort": Operation(AbortRequest, objects.Aborted),
    "POST /reset_prefix_cache": Operation(CacheRequest, is_optional=True),
    "POST /sleep": Operation(SleepRequest, is_optional=True),
    "POST /wake_up": Operation(ModelRequest, is_optional=True),
    "POST /v1/load_lora_adapter": Operation(LoadAdapterRequest, "text/plain"),
    "POST /v1/unload_lora_adapter": Operation(UnloadAdapterRequest, "text/plain"),
    "GET /version": Operation(None, objects.Version),
    "GET /v1/models": Operation(None, objects.ModelList),
    "GET /v1/models/{name}": Operation(None, objects.ModelRow),
    "GET /metrics": Operation(None, "text/plain"),
    "GET /health": Operation(
        None, objects.Health, query={"deep": {"enum": ["0", "1"]}}, error=objects.Health
    ),
    "GET /ping": Operation(None, objects.Ping, error=objects.Ping),
}
_DESCRIPTION = """The OpenAI-compatible server of Penstock.

A field that is `null` is omitted; unknown fields are ignored. Sampling parameters have the names of vLLM."""


def document(routes: Sequence[RouteRow], *, needs_key: bool) -> dict[str, Any]:
    """The OpenAPI document of these routes, without the path under which they are mounted."""
    operations = [_OPERATIONS[f"{method} {_plain(path)}"] for method, path, *_ in routes]
    used = [kind for item in operations for kind in (item.request, item.response, item.error)]
    structures = list(dict.fromkeys(kind for kind in used if isinstance(kind, type)))
    found, schemas = msgspec.json.schema_components(structures, ref_template=_REFERENCE)
    references = dict(zip(structures, found, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for operation, (method, path, handler, access) in zip(operations, routes, strict=True):
        plain = _plain(path)
        described = _described(plain, handler, operation, references)
        if access == "admin" or (needs_key and access != "open"):
            described["security"] = [{"bearer": []}, {"apiKey": []}]
        paths.setdefault(plain, {})[method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {"title": "Penstock", "version": penstock.__version__, "description": _DESCRIPTION},
        "paths": paths,
        "components": {
            "schemas": {**schemas, _SAMPLING: _sampling_schema()},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _plain(path: str) -> str:
    """The path of a route without the kinds of its parameters."""
    return path.replace(":path}", "}")


def _described(
    path: str, handler: Handler, operation: Operation, references: Mapping[type, dict[str, Any]]
) -> dict[str, Any]:
    """The operation of a route. The summary is the docstring of its handler."""
    error, failure = _json(references[objects.Error]), _json(references[operation.error])
    if isinstance(operation.response, str):
        answer = {operation.response: {"schema": {"type": "string"}}}
    else:
        answer = _json({"type": "object"} if operation.response is None else references[operation.response])
    if operation.streams:
        answer["text/event-stream"] = {}
    described: dict[str, Any] = {
        "operationId": _operation_id(path, handler),
        "summary": (handler.__doc__ or "").partition("\n")[0],
        "responses": {
            "200": {"description": "The answer", "content": answer},
            "4XX": {"description": "An error of the client", "content": error},
            "5XX": {"description": "An error of the server", "content": failure},
        },
    }
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall("{([a-z_]+)}", path)
    ]
    parameters += [
        {"name": name, "in": "query", "schema": schema} for name, schema in operation.query.items()
    ]
    if parameters:
        described["parameters"] = parameters
    if operation.request is not None:
        schema = references[operation.request]
        if operation.samples:
            schema = {"allOf": [schema, {"$ref": _REFERENCE.format(name=_SAMPLING)}]}
        content = {operation.content: {"schema": schema}}
        described["requestBody"] = {"required": not operation.is_optional, "content": content}
    return described


def _operation_id(path: str, handler: Handler) -> str:
    """The name of the handler; for paths of other clients than OpenAI's, which share it, with the path."""
    is_other = path in ("/rerank", "/v2/rerank", "/score")
    return handler.__name__ + path.replace("/", "_") if is_other else handler.__name__


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _sampling_schema() -> dict[str, Any]:
    """The fields that are sampling parameters. Their descriptions are those of `SamplingParams`."""
    hints = get_type_hints(penstock.SamplingOptions)
    label = {"description": "Accepted; does not change the output."}
    properties: dict[str, dict[str, Any]] = dict.fromkeys(sorted(LABELS), label)
    for name in sorted(SAMPLING_FIELDS):
        schema: dict[str, Any] = {}
        if name in hints:
            try:
                schema = msgspec.json.schema(hints[name])
            except TypeError:  # a union of mappings
                schema = {"type": ["object", "null"]}
            schema["description"] = getattr(penstock.SamplingParams, name).__doc__
        properties[name] = schema
    description = "Sampling parameters, and fields of OpenAI's service."
    return {"type": "object", "description": description, "properties": properties}


def openapi_handler(routes: Sequence[RouteRow]) -> Handler:
    """The handler of `/openapi.json` for these routes."""
    made: dict[bool, dict[str, Any]] = {}

    async def openapi(state: State, exchange: Exchange) -> None:
        """Describe the routes."""
        needs_key = bool(state.keys)
        if needs_key not in made:  # takes 0.1 s
            made[needs_key] = await state.tokenizer_threads.run(document, routes, needs_key=needs_key)
        servers = [{"url": exchange.scope.get("root_path") or "/"}]
        await exchange.send_json({**made[needs_key], "servers": servers})

    return openapi
