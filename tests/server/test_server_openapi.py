"""`/openapi.json`: a valid document of all routes, and generated requests that are answered as it says."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import schemathesis
from openapi_spec_validator import OpenAPIV31SpecValidator
from schemathesis import GenerationMode, checks
from starlette.applications import Starlette
from starlette.routing import Mount

import penstock.server
from penstock.server.sampling import LABELS, SAMPLING_FIELDS
from support.api.adapters import write_adapter
from support.api.checkpoints import make_config
from support.api.engines import make_engine, wait_until
from support.marks import rare_except
from support.server.serving import Served, at_rest, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KEY = {"Authorization": "Bearer boss"}
EXAMPLES, FEW = {GenerationMode.POSITIVE: 40, GenerationMode.NEGATIVE: 15}, 5
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
RERANKING: dict[str, dict[str, Any]] = {
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v2/rerank": {"query": "a", "documents": ["b"]},
    "/rerank": {"query": "a", "documents": ["b"]},
    "/v1/score": {"text_1": "a", "text_2": ["b"]},
    "/score": {"text_1": "a", "text_2": ["b"]},
}
#: Valid requests, to which generated fields are added.
VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "a", "max_tokens": 3},
    "/v1/embeddings": {"input": "a"},
    **RERANKING,
    "/v1/responses": {"input": "a", "max_output_tokens": 3},
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": {"messages": CHAT["messages"]},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
    "/v1/load_lora_adapter": {"lora_name": "n", "lora_path": "one"},
    "/v1/unload_lora_adapter": {"lora_name": "n"},
}
CHECKS: Any = (
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
)
#: These would end or change the server that all tests use.
EXCLUDED = {"/sleep", "/wake_up"}


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    parsers = {"tool_parser": "hermes", "reasoning_parser": "think"}
    with make_engine(tiny_model, max_adapters=1, max_cpu_adapters=1024, **parsers) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine: penstock.Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("adapters")
    write_adapter(root / "one", make_config("llama"), rank=1)
    settings = penstock.server.ServerSettings(
        api_keys=("key",), admin_api_keys=("boss",), lora_roots=(str(root),)
    )
    with serving(penstock.server.app({"tiny": engine}, settings)) as server:
        yield server


@pytest.fixture(scope="module")
def document(server: Served) -> dict[str, Any]:
    status, found, _ = server.ask("/openapi.json", headers=KEY)
    assert status == 200
    return dict(found)


def test_document_is_valid(document: dict[str, Any]) -> None:
    OpenAPIV31SpecValidator(document).validate()


def test_document_has_all_routes_and_their_access(document: dict[str, Any]) -> None:
    from penstock.server.application import _ADAPTER_ROUTES, _ROUTES

    routes = (*_ROUTES, *_ADAPTER_ROUTES)
    for method, path, handler, access in routes:
        operation = document["paths"][path.replace(":path", "")][method.lower()]
        assert operation["summary"] == str(handler.__doc__).partition("\n")[0]
        assert ("security" in operation) == (access != "open")
    names = [item["operationId"] for path in document["paths"].values() for item in path.values()]
    assert len(names) == len(set(names)) == len(routes)


def test_sampling_parameters_have_types_and_descriptions(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    properties = schemas["SamplingParameters"]["properties"]
    assert properties.keys() == SAMPLING_FIELDS | LABELS
    assert properties["top_p"]["anyOf"] == [{"type": "number"}, {"type": "null"}]
    assert properties["top_p"]["description"] == penstock.SamplingParams.top_p.__doc__
    chat = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]
    assert chat["schema"]["allOf"] == [
        {"$ref": "#/components/schemas/ChatRequest"},
        {"$ref": "#/components/schemas/SamplingParameters"},
    ]


def test_routes_without_keys_need_no_security(engine: penstock.Engine) -> None:
    application = Starlette(routes=[Mount("/llm", penstock.server.app({"tiny": engine}))])
    with serving(application) as server:
        status, found, _ = server.ask("/llm/openapi.json")
    assert status == 200
    assert found["servers"] == [{"url": "/llm"}]
    assert "security" not in found["paths"]["/v1/models"]["get"]
    assert "security" in found["paths"]["/sleep"]["post"]


def with_short_lists(schema: Any) -> Any:
    """The schema with short lists and without unknown fields: others take long to generate."""
    if isinstance(schema, list):
        return [with_short_lists(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: with_short_lists(item) for name, item in schema.items()}
    if found.get("type") == "array":
        found["maxItems"] = 2
    if found.get("type") == "object" and "properties" in found:
        found["additionalProperties"] = False
    return found


def with_single_fields(document: dict[str, Any]) -> dict[str, Any]:
    """The document with requests of one field each."""
    schemas = with_short_lists(document["components"]["schemas"])
    paths = copy.deepcopy(document["paths"])
    for path in VALID:
        content = paths[path]["post"]["requestBody"]["content"]["application/json"]
        references = content["schema"].get("allOf", [content["schema"]])
        properties: dict[str, Any] = {}
        for reference in references:
            properties |= schemas[reference["$ref"].rpartition("/")[2]]["properties"]
        content["schema"] = {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {name: schema},
                    "required": [name],
                    "additionalProperties": False,
                }
                for name, schema in properties.items()
            ]
        }
    answers = document["components"]["schemas"]
    requests = {name: schema for name, schema in schemas.items() if name.endswith("Request")}
    return document | {"paths": paths, "components": document["components"] | {"schemas": answers | requests}}


@pytest.mark.parametrize(
    "mode", rare_except(GenerationMode, GenerationMode.NEGATIVE), ids=lambda mode: mode.value
)
def test_generated_requests_are_answered_as_documented(
    server: Served, engine: penstock.Engine, document: dict[str, Any], mode: GenerationMode
) -> None:
    """Requests with a field that the document allows, and with others."""
    schema = schemathesis.openapi.from_dict(with_single_fields(document))
    schema.config.update(base_url=server.url)
    statuses: dict[str, set[int]] = {}

    def check(case: Any) -> None:
        if isinstance(case.body, dict):
            case.body = VALID.get(case.path, {}) | case.body
        response = case.call_and_validate(headers=KEY, checks=CHECKS, timeout=30)
        statuses.setdefault(case.path, set()).add(response.status_code)

    settings: Any = hypothesis.settings(
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
    )
    operations: Any = schema.get_all_operations()
    for result in operations:
        operation = result.ok()
        is_plain = not (operation.body or operation.path_parameters or operation.query)
        if operation.path in EXCLUDED or (is_plain and mode is GenerationMode.NEGATIVE):
            continue
        generated: Any = hypothesis.given(operation.as_strategy(generation_mode=mode))
        number = EXAMPLES[mode] if operation.path in VALID else FEW
        hypothesis.settings(settings, max_examples=number)(generated(check))()
    assert statuses.keys() >= VALID.keys()
    typical = 200 if mode is GenerationMode.POSITIVE else 400
    # The model is no reranker.
    others = RERANKING if mode is GenerationMode.POSITIVE else ()
    assert all(typical in found for path, found in statuses.items() if path in VALID and path not in others)
    assert server.ask("/health")[0] == 200
    wait_until(lambda: at_rest(engine))
