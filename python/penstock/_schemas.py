"""JSON schemas of Python types: of a `response_format`, and of the parameters of functions that are tools.

pydantic makes the schemas of a `response_format`. It is not imported before a type needs it.
"""

from __future__ import annotations

import inspect
import types
import typing
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Union

from penstock.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["format_of", "parse", "tools_of"]

_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_TYPES = "str, int, float, bool, None, Literal, list, dict with str keys, unions of them, or pydantic models"


# ---- response_format


def format_of(given: object) -> object:
    """The JSON schema of a type; anything else, such as a mapping, itself.

    Raises `InvalidRequestError` for a type that pydantic does not take, and for one that needs pydantic
    where it is not installed.
    """
    if isinstance(given, type) and hasattr(given, "model_json_schema"):
        return given.model_json_schema()
    return _adapter_of(given).json_schema() if _is_type(given) else given


def parse(kind: Any, content: str) -> object:
    """The value of this type that a JSON text has; raises pydantic's `ValidationError`."""
    if hasattr(kind, "model_validate_json"):
        return kind.model_validate_json(content)
    return _adapter_of(kind).validate_json(content)


def _is_type(given: object) -> bool:
    """Whether an object is a class, or a type such as `list[str]`, `int | None` or `Literal["a", "b"]`."""
    return (
        isinstance(given, (type, getattr(typing, "TypeAliasType", type)))
        or typing.get_origin(given) is not None
    )


def _adapter_of(kind: Any) -> Any:
    try:
        return _cached_adapter(kind)
    except TypeError:  # the arguments of the type have no hash
        return _adapter(kind)


def _adapter(kind: Any) -> Any:
    limit = "a mapping, or a type that pydantic takes"
    try:
        import pydantic
        from pydantic.errors import PydanticUserError
    except ImportError:
        message = f"response_format={kind!r} is a type, which needs the package pydantic"
        raise InvalidRequestError(message, "response_format", kind, limit) from None
    try:
        adapter: Any = pydantic.TypeAdapter[Any](kind)
        adapter.json_schema()
    except PydanticUserError as error:
        reason = error.message.partition("\n")[0]
        message = f"response_format={kind!r} is not allowed: it must be {limit} ({reason})"
        raise InvalidRequestError(message, "response_format", kind, limit) from error
    return adapter


_cached_adapter = lru_cache(maxsize=64)(_adapter)


# ---- tools


def tools_of(given: object) -> object:
    """`tools` with the definitions of functions in place of them; anything but a list or tuple itself.

    Raises `InvalidRequestError` for a function with a parameter that no schema describes.
    """
    if not isinstance(given, (list, tuple)) or not any(map(callable, given)):
        return given
    return [_definition(tool) if callable(tool) else tool for tool in given]


def _definition(function: Callable[..., object]) -> dict[str, Any]:
    """The tool of a function: its name, its docstring, and the schema of its parameters."""
    name = getattr(function, "__name__", None)
    if isinstance(function, type) or not name or not name.isidentifier():
        _refuse(function, "it is not a function with a name")
    definition: dict[str, Any] = {"name": name, "parameters": _parameters(function)}
    if description := inspect.getdoc(function):
        definition["description"] = description
    return {"type": "function", "function": definition}


def _parameters(function: Callable[..., object]) -> dict[str, Any]:
    try:
        signature = inspect.signature(function)
        annotations = typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError, ValueError) as error:
        _refuse(function, f"its signature cannot be read ({error})")
    properties: dict[str, Any] = {}
    definitions: dict[str, Any] = {}
    required = []
    for name, parameter in signature.parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            _refuse(function, f"parameter {name!r} is {parameter.kind.description}")
        if name not in annotations:
            _refuse(function, f"parameter {name!r} has no annotation")
        schema = _schema(annotations[name], definitions)
        if schema is None:
            kind = annotations[name]
            _refuse(function, f"parameter {name!r} has the type {kind!r}, which is not one of {_TYPES}")
        properties[name] = schema
        if parameter.default is parameter.empty:
            required.append(name)
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return schema | {"$defs": definitions} if definitions else schema


def _schema(kind: Any, definitions: dict[str, Any]) -> dict[str, Any] | None:
    """The schema of a type, or `None`; the definitions that it refers to are added to `definitions`."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        schema = _schema(arguments[0], definitions)
        texts = [text for text in arguments[1:] if isinstance(text, str)]
        return schema | {"description": texts[0]} if schema is not None and texts else schema
    if kind is Any:
        return {}
    if kind in _PLAIN:
        return {"type": _PLAIN[kind]}
    if origin is Literal and all(type(value) in _PLAIN for value in arguments):
        return {"enum": list(arguments)}
    if origin in (Union, types.UnionType):
        options = [_schema(argument, definitions) for argument in arguments]
        return None if None in options else {"anyOf": options}
    if kind is list or origin is list:
        items = _schema(arguments[0], definitions) if arguments else {}
        return None if items is None else {"type": "array", "items": items}
    if kind is dict or (origin is dict and arguments[0] is str):
        values = _schema(arguments[1], definitions) if arguments else {}
        return None if values is None else {"type": "object", "additionalProperties": values}
    if isinstance(kind, type) and hasattr(kind, "model_json_schema"):
        model = dict(kind.model_json_schema())
        definitions.update(model.pop("$defs", {}))
        return model
    return None


def _refuse(function: object, reason: str) -> NoReturn:
    name = getattr(function, "__name__", None) or repr(function)
    limit = "a mapping, or a function of which each parameter has an annotation with a JSON schema"
    message = f"tools: the function {name!r} is not allowed: {reason}; a tool must be {limit}"
    raise InvalidRequestError(message, "tools", function, limit)
