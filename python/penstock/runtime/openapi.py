"""`/openapi.json` and `/docs`: a description of the routes, made of the structures of their bodies."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

import msgspec

import penstock
from penstock.runtime import bodies

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["document", "page"]

_BODIES: dict[str, Any] = {
    "/v1/lora_adapter/load": bodies.DirectLoad | bodies.DelegatedLoad,
    "/v1/lora_adapter/unload": bodies.DirectUnload | bodies.DelegatedUnload,
    "/v1/model/download": bodies.Download,
    "/v1/runtime/models/activate": bodies.Activate,
    "/v1/runtime/models/deactivate": bodies.Deactivate,
    "/v1/runtime/models/kv-limit": bodies.KvLimit,
    "/v1/runtime/models/sleep": bodies.Sleep,
    "/v1/runtime/models/wake": bodies.Operation,
}
#: Parameters of the query, which are all texts.
_QUERIES: dict[tuple[str, str], type[msgspec.Struct]] = {
    ("DELETE", "/v1/model/download"): bodies.CancelDownload,
    ("GET", "/v1/model/list"): bodies.ListModels,
}


def document(routes: Iterable[tuple[str, str, Callable[..., Any], str]]) -> dict[str, Any]:
    """The OpenAPI document of the routes."""
    paths: dict[str, dict[str, Any]] = {}
    schemas: dict[str, Any] = {}
    for method, path, handler, level in routes:
        operation: dict[str, Any] = {
            "operationId": f"{method.lower()}{path.replace('/', '_')}",
            "summary": (handler.__doc__ or "").partition("\n")[0],
            "responses": {"200": {"description": "success"}, "default": {"description": "error"}},
            "security": [] if level == "open" else [{"token": []}],
        }
        if method == "POST" and path in _BODIES:
            kinds = getattr(_BODIES[path], "__args__", (_BODIES[path],))
            found, components = msgspec.json.schema_components(
                kinds, ref_template="#/components/schemas/{name}"
            )
            schemas |= components
            schema = found[0] if len(kinds) == 1 else {"anyOf": list(found)}
            content = {"application/json": {"schema": schema}}
            operation["requestBody"] = {"required": True, "content": content}
        if (method, path) in _QUERIES:
            operation["parameters"] = [
                {"name": field.name, "in": "query", "required": field.required, "schema": {"type": "string"}}
                for field in msgspec.structs.fields(_QUERIES[method, path])
            ]
        paths.setdefault(path, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Penstock runtime", "version": penstock.__version__},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def page(description: dict[str, Any]) -> str:
    """A page with the routes, which loads nothing from other servers."""
    rows = [
        f"<tr><td>{method.upper()}</td><td>{html.escape(path)}</td>"
        f"<td>{html.escape(operation['summary'])}</td></tr>"
        for path, operations in description["paths"].items()
        for method, operation in operations.items()
    ]
    title = html.escape(description["info"]["title"])
    link = '<p><a href="openapi.json">openapi.json</a></p>'
    body = f"<h1>{title}</h1>{link}<table>{''.join(rows)}</table>"
    return f'<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>{title}</title>{body}</html>'
