"""`/v1/rerank` and `/v1/score`: values, forms, bounds and failures."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

import penstock.server
from penstock.server.protocol import objects
from penstock.server.rerank import UNSUPPORTED
from support.api.engines import make_engine, wait_until
from support.server.serving import Served, at_rest, held, post, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

QUERY = "What is the capital of France?"
DOCUMENTS = ["Paris is the capital of France.", "Bananas are yellow.", "France is a country."]
BODY = {"query": QUERY, "documents": DOCUMENTS}
RERANK = ("/v1/rerank", "/v2/rerank", "/rerank")
SCORE = ("/v1/score", "/score")


@pytest.fixture(scope="module")
def engine(demo_model: Path) -> Iterator[penstock.Engine]:
    with penstock.Engine(demo_model, max_model_len=256) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine: penstock.Engine) -> Iterator[Served]:
    settings = penstock.server.ServerSettings(max_prompts=8, max_embedding_tokens=1000, rerank="qwen3")
    with serving(penstock.server.app({"demo": engine}, settings)) as server:
        yield server


def ask(server: Served, path: str, **fields: Any) -> dict[str, Any]:
    status, answer, _ = server.ask(path, fields)
    assert status == 200, answer
    kind = objects.Scores if path.endswith("score") else objects.Ranking
    msgspec.convert(answer, kind, strict=True)  # as the OpenAPI document says
    found: dict[str, Any] = answer
    return found


# ---- values and forms


@pytest.mark.parametrize("path", RERANK)
def test_ranking_is_that_of_the_engine(server: Served, engine: penstock.Engine, path: str) -> None:
    expected = engine.blocking.rerank(QUERY, DOCUMENTS, family="qwen3")
    answer = ask(server, path, **BODY)
    assert answer["results"] == [
        {"index": item.index, "relevance_score": item.score, "document": {"text": item.document}}
        for item in expected.items
    ]
    assert answer["model"] == "demo"
    assert re.fullmatch("rerank-[0-9a-f]{32}", answer["id"])
    tokens = expected.usage.prompt_tokens
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


def test_documents_can_be_objects_and_can_be_left_out(server: Served) -> None:
    full = ask(server, "/rerank", **BODY)["results"]
    objects = [{"text": text} for text in DOCUMENTS]
    assert ask(server, "/rerank", query=QUERY, documents=objects)["results"] == full
    short = ask(server, "/rerank", **BODY, top_n=2, return_documents=False)["results"]
    assert short == [{key: item[key] for key in ("index", "relevance_score")} for item in full[:2]]
    assert len(ask(server, "/rerank", **BODY, top_n=0)["results"]) == 3


def test_instruction_changes_the_scores(server: Served) -> None:
    plain = ask(server, "/rerank", **BODY)["results"]
    assert ask(server, "/rerank", **BODY, instruction="Find fruit.")["results"] != plain


@pytest.mark.parametrize("path", SCORE)
@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents")])
def test_scores_are_in_the_order_of_the_pairs(server: Served, path: str, names: tuple[str, str]) -> None:
    ranked = ask(server, "/rerank", **BODY)["results"]
    expected = [item["relevance_score"] for item in sorted(ranked, key=lambda item: item["index"])]
    for queries in (QUERY, [QUERY], [QUERY] * 3):
        answer = ask(server, path, **{names[0]: queries, names[1]: DOCUMENTS})
        assert answer["object"] == "list"
        assert re.fullmatch("score-[0-9a-f]{32}", answer["id"])
        assert [entry["score"] for entry in answer["data"]] == expected
        assert [(entry["index"], entry["object"]) for entry in answer["data"]] == [
            (index, "score") for index in range(3)
        ]
    [one] = ask(server, path, **{names[0]: QUERY, names[1]: DOCUMENTS[1]})["data"]
    assert one["score"] == expected[1]


# ---- bounds and failures


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"documents": []}, "documents"),
        ({"documents": ["a"] * 9}, "documents"),
        ({"documents": "a"}, "documents"),
        ({"documents": [{"body": "a"}]}, "documents"),
        ({"documents": ["a", "long " * 300]}, "documents[1]"),
        ({"documents": ["word " * 150] * 5}, "documents"),
        ({"query": None}, "query"),
        ({"top_n": -1}, "top_n"),
        ({"priority": -1}, "priority"),
    ],
)
def test_invalid_field_is_named(server: Served, fields: dict[str, Any], name: str) -> None:
    status, answer, _ = server.ask("/v1/rerank", {**BODY, **fields})
    assert status == 400, answer
    found = answer["error"]["param"] or answer["error"]["message"]
    assert name.partition("[")[0] in found
    assert name in answer["error"]["message"]


@pytest.mark.parametrize("path", [*RERANK, *SCORE])
@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_field_that_would_have_no_effect_is_refused(server: Served, path: str, name: str) -> None:
    body = {"text_1": QUERY, "text_2": DOCUMENTS} if path in SCORE else BODY
    status, answer, _ = server.ask(path, {**body, name: [1]})
    assert (status, answer["error"]["param"]) == (400, name)


def test_defaults_of_fields_without_effect_are_accepted(server: Served) -> None:
    defaults = {
        "use_activation": True,
        "add_special_tokens": True,
        "truncate_prompt_tokens": None,
        "max_tokens_per_doc": 0,
        "truncation_side": "left",
    }
    assert ask(server, "/rerank", **BODY, **defaults)["results"] == ask(server, "/rerank", **BODY)["results"]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"text_1": QUERY}, "text_2"),
        ({"text_2": QUERY}, "text_1"),
        ({"text_1": QUERY, "queries": QUERY, "text_2": "a"}, "text_1"),
        ({"text_1": [QUERY] * 2, "text_2": ["a"] * 3}, "text_1"),
        ({"text_1": [], "text_2": ["a"]}, "text_1"),
        ({"text_1": QUERY, "documents": []}, "documents"),
    ],
)
def test_texts_that_make_no_pairs_are_named(server: Served, fields: dict[str, Any], name: str) -> None:
    status, answer, _ = server.ask("/v1/score", fields)
    assert (status, answer["error"]["param"]) == (400, name)


@pytest.mark.parametrize("path", [*RERANK, *SCORE])
def test_model_that_is_no_reranker_is_refused_with_a_remedy(tiny_model: Path, path: str) -> None:
    with make_engine(tiny_model) as engine, serving(penstock.server.app({"tiny": engine})) as server:
        status, answer, _ = server.ask(path, {"query": "a", "documents": ["b"], "text_1": "a"})
    assert (status, answer["error"]["param"]) == (400, "model")
    assert "--rerank qwen3" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("bert", "rerank='bert' is not allowed: it must be 'qwen3', or a mapping"),
        ({"prompt": "{query}{document}"}, r"rerank\['positive'\]=None"),
    ],
)
def test_unknown_recipe_is_refused_at_the_start(recipe: Any, message: str) -> None:
    with pytest.raises(penstock.ConfigError, match=message) as caught:
        penstock.server.ServerSettings(rerank=recipe)
    assert caught.value.field == "rerank"


def test_recipe_can_be_described_by_a_mapping(engine: penstock.Engine) -> None:
    family = {"prompt": "{query} {document}", "positive": "yes"}
    settings = penstock.server.ServerSettings(rerank=family)
    expected = engine.blocking.rerank(QUERY, DOCUMENTS, family=family)
    with serving(penstock.server.app({"demo": engine}, settings)) as server:
        results = ask(server, "/rerank", **BODY)["results"]
    assert [item["relevance_score"] for item in results] == [item.score for item in expected.items]


def test_routes_need_a_key_and_keys_share_no_prefix(engine: penstock.Engine) -> None:
    settings = penstock.server.ServerSettings(rerank="qwen3", api_keys=("one", "two"))
    body = {"query": QUERY, "documents": DOCUMENTS[:1]}
    with serving(penstock.server.app({"demo": engine}, settings)) as server:
        assert [server.ask(path, body)[0] for path in (*RERANK, *SCORE)] == [401] * 5
        hits = [engine.stats().prefix_hit_tokens]
        for key in ("one", "two", "two"):
            assert server.ask("/rerank", body, headers={"Authorization": f"Bearer {key}"})[0] == 200
            hits.append(engine.stats().prefix_hit_tokens)
    assert hits[0] == hits[1] == hits[2] < hits[3]


def test_more_documents_than_outputs_of_a_key_are_refused(engine: penstock.Engine) -> None:
    settings = penstock.server.ServerSettings(rerank="qwen3", max_outputs_per_key=2)
    with serving(penstock.server.app({"demo": engine}, settings)) as server:
        status, answer, _ = server.ask("/rerank", BODY)
    assert (status, answer["error"]["param"]) == (400, "documents")


def test_disconnect_ends_the_requests(server: Served, engine: penstock.Engine) -> None:
    with held(engine):
        with server.send(post("/rerank", BODY)):
            wait_until(lambda: server.application.state.calls.num_active == 1)
        wait_until(lambda: server.application.state.calls.num_active == 0)
    wait_until(lambda: at_rest(engine))
