"""Request fields as sampling parameters: OpenAI's names, vLLM's names, and those of `SamplingParams`."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, get_args, get_type_hints

import msgspec

import penstock
from penstock._json import MAX_SCHEMA
from penstock.server.bodies import converted
from penstock.server.errors import ApiError, invalid
from penstock.server.protocol.peers import PEER_ALIASES, PEER_FIELDS, PEER_LABELS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from penstock.server.http import Exchange
    from penstock.server.state import State

__all__ = [
    "LABELS",
    "ONE_OUTPUT",
    "SAMPLING_FIELDS",
    "Unsupported",
    "beam_names",
    "fields_named",
    "read_request",
    "sampling_options",
]

Structure = TypeVar("Structure")

logger = logging.getLogger("penstock.server")

#: Fields with the name and the meaning of a sampling parameter. The others have a meaning of their own in
#: the API, are set by the server, or cannot be sent as JSON.
_PLAIN = penstock.SamplingOptions.__annotations__.keys() - {
    "adapter",
    "choice",
    "echo",
    "grammar",
    "logits_processors",
    "logprobs",
    "output_embeddings",
    "output_hidden_states",
    "output_logits",
    "regex",
    "top_logprobs",
    "unread",
}
#: vLLM's constraints of structured output, and the sampling parameters that they become.
_CONSTRAINTS = {"json": "response_format", "regex": "regex", "choice": "choice", "grammar": "grammar"}
#: The former names of the constraints, those of Python, and SGLang's.
_GUIDED = {
    **{f"guided_{name}": name for name in _CONSTRAINTS},
    **{name: name for name in ("regex", "choice", "grammar")},
    "json_schema": "json",
}

SAMPLING_FIELDS = frozenset(_PLAIN | _GUIDED.keys() | {"structured_outputs", "use_beam_search"})

#: For each field that the server cannot honour, the values that it may have, and that limit in words.
Unsupported: TypeAlias = "Mapping[str, tuple[tuple[object, ...], str]]"
#: The names that engines have for the adapter of a request.
_ADAPTER_FIELDS: Unsupported = dict.fromkeys(
    ("adapter", "adapter_id", "adapter_name", "lora_path", "lora_request"),
    ((), "left out: model is the name of the model or of an adapter"),
)
#: Parameters for more outputs than the one that a message or a response is.
ONE_OUTPUT: Unsupported = {
    "best_of": ((1,), "left out: the answer is one output"),
    "n": ((1,), "left out: the answer is one output"),
    "num_beams": ((1,), "left out: the answer is one output"),
    "prompt_logprobs": ((), "left out: the answer has no place for them"),
}
#: Fields that are accepted and have no effect: they describe the request, or hint at how to compute it.
LABELS = frozenset(
    {
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
#: The fields for `max_tokens`, which checks them.
_MAX_TOKENS = frozenset({"max_tokens", "max_completion_tokens", "max_output_tokens"})
#: Larger numbers with a fraction are not exact.
_MAX_EXACT = 2**53
_MAX_WARNED = 256


async def read_request(
    state: State,
    exchange: Exchange,
    structure: type[Structure],
    labels: Collection[str] = (),
    unsupported: Unsupported = MappingProxyType({}),
) -> tuple[dict[str, Any], Structure]:
    """The fields of a generating request that are not null and have an effect, and its structure.

    The log names each unknown field once; `labels` are further fields that have no effect. The route clears
    the fields before the request waits for the engine.
    """
    fields = await exchange.read_object()
    request = await exchange.in_body_thread(_checked, state, fields, structure, labels, unsupported)
    return fields, request


def _checked(
    state: State,
    fields: dict[str, Any],
    structure: type[Structure],
    labels: Collection[str],
    unsupported: Unsupported,
) -> Structure:
    for alias, name in PEER_ALIASES.items():
        if alias in fields and fields.setdefault(name, fields[alias]) != fields.pop(alias):
            raise invalid(alias, "another value", f"left out beside {name}, which means the same")
    unsupported = {**_ADAPTER_FIELDS, **PEER_FIELDS, **unsupported}
    for name, (allowed, limit) in unsupported.items():
        if name in fields and fields[name] not in allowed:
            raise invalid(name, fields[name], limit)
    known = {*structure.__struct_fields__, *labels, *unsupported}  # type: ignore[attr-defined]
    for name in fields.keys() - known - SAMPLING_FIELDS - LABELS - PEER_LABELS - state.unknown_fields:
        if len(state.unknown_fields) < _MAX_WARNED:
            state.unknown_fields.add(name)
            shown = name[:64].encode("unicode_escape").decode()
            logger.warning("request field %r is unknown and ignored", shown)
    # Fields without effect are not kept while the request waits: decoded, they can be far larger than JSON.
    for name in fields.keys() - structure.__struct_fields__ - SAMPLING_FIELDS:  # type: ignore[attr-defined]
        del fields[name]
    for name in fields.keys() & _integers(structure):  # type: ignore[arg-type] # a class has a hash
        value = fields[name]
        if type(value) is float and value.is_integer() and abs(value) < _MAX_EXACT:
            fields[name] = int(value)  # JSON has one kind of number: 1.0 is 1
    return converted(fields, structure)


@cache
def _integers(structure: type) -> frozenset[str]:
    """The fields of a request that are integers."""
    hints = get_type_hints(penstock.SamplingOptions) | get_type_hints(structure)
    kinds = {name: {hint, *get_args(hint)} for name, hint in hints.items()}
    found = {name for name, allowed in kinds.items() if int in allowed and float not in allowed}
    return frozenset(found | _MAX_TOKENS)


def sampling_options(fields: dict[str, Any]) -> dict[str, Any]:
    """The keywords of `SamplingParams` for the fields of a request, which are not `None`."""
    if "stream_options" in fields and not fields.get("stream"):
        raise invalid("stream_options", fields["stream_options"], "left out unless stream is true")
    options = {name: value for name, value in fields.items() if name in _PLAIN}
    constraints = dict(_constraints(fields))
    if len(constraints) > 1 or (constraints and "response_format" in options):
        names = [*constraints, *(["response_format"] if "response_format" in options else [])]
        raise invalid("structured_outputs", sorted(names), "one constraint: an output has one format")
    for name, value in constraints.items():
        options[_CONSTRAINTS[name]] = _json_schema(value) if name == "json" else value
    if "seed" in options and type(options["seed"]) is int and -(2**63) <= options["seed"] < 0:
        options["seed"] %= 2**64
    if not options.get("tools"):
        # Clients send these without tools, too.
        options.pop("tools", None)
        options.pop("parallel_tool_calls", None)
        if options.get("tool_choice") in ("none", "auto"):
            del options["tool_choice"]
    uses_beams = fields.get("use_beam_search", False)
    if not isinstance(uses_beams, bool):
        raise invalid("use_beam_search", uses_beams, "true or false")
    if uses_beams:
        options["num_beams"] = options.get("num_beams", options.get("n", 1))
    return options


def _constraints(fields: dict[str, Any]) -> list[tuple[str, Any]]:
    """The constraints of structured output, in vLLM's spellings."""
    found = [(name, fields[guided]) for guided, name in _GUIDED.items() if guided in fields]
    given = fields.get("structured_outputs")
    if given is None:
        return found
    if not isinstance(given, dict):
        raise invalid("structured_outputs", given, "an object")
    for name, value in given.items():
        if value is None or value is False:
            continue
        if name == "json_object":
            found.append(("json", {"type": "object"}))
        elif name in _CONSTRAINTS:
            found.append((name, value))
        else:
            raise invalid(f"structured_outputs.{name}", value, f"left out; use {', '.join(_CONSTRAINTS)}")
    return found


def _json_schema(schema: object) -> dict[str, Any]:
    if isinstance(schema, str):
        limit = f"a JSON schema of at most {MAX_SCHEMA} characters"
        if len(schema) > MAX_SCHEMA:
            raise invalid("structured_outputs.json", schema, limit)
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.DecodeError, RecursionError) as error:
            raise invalid("structured_outputs.json", schema, limit) from error
    return {"type": "json_schema", "json_schema": {"schema": schema}}


def beam_names(fields: dict[str, Any]) -> dict[str, str]:
    """The field that a request has for the number of beams, if another one."""
    return {"num_beams": "n"} if fields.get("use_beam_search") and "num_beams" not in fields else {}


@contextmanager
def fields_named(names: Mapping[str, str]) -> Iterator[None]:
    """Report errors of these sampling parameters under the names that the request has for them."""
    try:
        yield
    except penstock.InvalidRequestError as error:
        name = names.get(error.field or "")
        if name is None:
            raise
        message = str(error).replace(error.field or "", name, 1)
        raise ApiError(400, message, param=name) from error
