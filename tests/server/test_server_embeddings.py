"""`/v1/embeddings`: values, forms, bounds and failures."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import openai
import pytest

import penstock.server
from support.api.engines import make_engine, wait_until
from support.parity.oracle import load_oracle
from support.server.serving import Served, at_rest, held, post, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

PATH = "/v1/embeddings"
TEXTS = ["The sky is blue.", "Rain", "The sky is blue. " * 8, "Ünïcödé 世界", "a"]
SIZE = 128


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    with make_engine(tiny_model, max_num_batched_tokens=64) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine: penstock.Engine) -> Iterator[Served]:
    settings = penstock.server.ServerSettings(max_prompts=64, max_embedding_tokens=1000)
    with serving(penstock.server.app({"tiny": engine}, settings)) as server:
        yield server


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def embedded(server: Served, given: object, **fields: Any) -> Floats:
    """The embeddings, `[inputs, size]`; checks the form of the response."""
    status, answer, _ = server.ask(PATH, {"input": given, **fields})
    assert status == 200
    assert (answer["object"], answer["model"]) == ("list", "tiny")
    assert [entry["index"] for entry in answer["data"]] == list(range(len(answer["data"])))
    assert {entry["object"] for entry in answer["data"]} == {"embedding"}
    return np.array([entry["embedding"] for entry in answer["data"]])


def states(engine: penstock.Engine, text: str) -> Floats:
    """The hidden states of a text."""
    result = engine.blocking.generate(text, max_tokens=1, output_hidden_states="prompt")
    return np.asarray(result.hidden_states).astype(np.float64)


def unit(vector: Floats) -> Floats:
    """The vector divided by its length."""
    divided: Floats = vector / np.sqrt((vector**2).sum())
    return divided


# ---- values


@pytest.mark.oracle
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings_are_those_of_transformers(
    server: Served, engine: penstock.Engine, tiny_model: Path, pooling: str
) -> None:
    oracle = load_oracle(tiny_model)
    found = embedded(server, TEXTS, pooling=pooling)
    of_engine = np.asarray(engine.blocking.embed(TEXTS, pooling=pooling).tensor)  # type: ignore[arg-type]
    for text, vectors in zip(TEXTS, zip(found, of_engine, strict=True), strict=True):
        expected = unit(oracle.pooled(engine.encode(text), pooling).astype(np.float64))
        assert all(np.abs(vector - expected).max() < 1e-5 for vector in vectors)


def test_defaults_are_those_of_the_model_and_its_engine(tiny_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    modules = [{"type": "models.Transformer", "path": ""}, {"type": "models.Pooling", "path": "1_Pooling"}]
    (model / "modules.json").write_text(json.dumps(modules))
    (model / "1_Pooling").mkdir()
    (model / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
    with make_engine(model) as engine, serving(penstock.server.app({"tiny": engine})) as server:
        found = embedded(server, TEXTS)
        assert found.astype("f4").tobytes() == bytes(engine.blocking.embed(TEXTS).tensor)
        assert np.abs(found[0] - states(engine, TEXTS[0])[-1]).max() == 0


def test_pooling_of_the_files_that_is_not_supported_is_named(tiny_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    (model / "modules.json").write_text('[{"type": "models.Dense", "path": "1_Dense"}]')
    with make_engine(model) as engine, serving(penstock.server.app({"tiny": engine})) as server:
        status, answer, _ = server.ask(PATH, {"input": "a"})
        assert (status, answer["error"]["param"]) == (400, "pooling")
        assert "'Dense'" in answer["error"]["message"]
        assert server.ask(PATH, {"input": "a", "pooling": "mean"})[0] == 200


def test_pooling_and_normalisation_of_the_hidden_states(server: Served, engine: penstock.Engine) -> None:
    rows = states(engine, TEXTS[0])
    assert rows.shape == (len(engine.encode(TEXTS[0])), SIZE)
    for fields, expected in (
        ({}, unit(rows.mean(axis=0))),
        ({"pooling": "last"}, unit(rows[-1])),
        ({"normalize": False}, rows.mean(axis=0)),
        ({"dimensions": 16}, unit(rows.mean(axis=0)[:16])),
        ({"dimensions": 16, "normalize": False}, rows.mean(axis=0)[:16]),
    ):
        [vector] = embedded(server, TEXTS[0], **fields)
        np.testing.assert_allclose(vector, expected, rtol=1e-6, atol=1e-7)


def test_embedding_does_not_depend_on_the_batch(server: Served) -> None:
    together = embedded(server, TEXTS * 4)
    alone = np.concatenate([embedded(server, text) for text in TEXTS])
    assert together.tobytes() == np.tile(alone, (4, 1)).tobytes()


def test_token_ids_have_the_embedding_of_their_text(server: Served, engine: penstock.Engine) -> None:
    token_ids = [engine.encode(text) for text in TEXTS]
    assert embedded(server, token_ids).tobytes() == embedded(server, TEXTS).tobytes()
    assert embedded(server, token_ids[0]).tobytes() == embedded(server, TEXTS[0]).tobytes()


# ---- forms


def test_client_gets_the_same_floats_in_both_formats(client: openai.OpenAI, engine: penstock.Engine) -> None:
    plain = client.embeddings.create(model="tiny", input=TEXTS, encoding_format="float")
    decoded = client.embeddings.create(model="tiny", input=TEXTS)  # the client asks for base64
    for one, other in zip(plain.data, decoded.data, strict=True):
        assert np.array_equal(np.array(one.embedding, "f4"), np.array(other.embedding, "f4"))
    expected = sum(len(engine.encode(text)) for text in TEXTS)
    assert plain.usage.prompt_tokens == plain.usage.total_tokens == expected


@pytest.mark.anyio
async def test_async_client_gets_embeddings(
    server: Served, anyio_backend: tuple[str, dict[str, Any]]
) -> None:
    assert anyio_backend
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        answer = await client.embeddings.create(model="tiny", input="Rain", dimensions=8)
    assert len(answer.data[0].embedding) == 8


# ---- bounds and failures


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [1, "a"]}, "input"),
        ({"input": ["a"] * 65}, "input"),
        ({"input": ["a" * 400] * 3}, "input"),
        ({"input": "a" * 600}, "input"),
        ({"input": [[600]]}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({"dimensions": SIZE + 1}, "dimensions"),
        ({"dimensions": 0}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"pooling": "max"}, "pooling"),
        ({"priority": -1}, "priority"),
    ],
)
def test_invalid_field_is_named(server: Served, fields: dict[str, Any], name: str) -> None:
    status, answer, _ = server.ask(PATH, {"input": "a", **fields})
    assert (status, answer["error"]["param"]) == (400, name)
    assert name in answer["error"]["message"]


def test_input_is_not_kept_in_the_prefix_cache(server: Served, engine: penstock.Engine) -> None:
    engine.reset_prefix_cache()
    text = "remember " * 40
    embedded(server, text)
    body = {"prompt": text, "max_tokens": 1}
    _, first, _ = server.ask("/v1/completions", body)
    _, second, _ = server.ask("/v1/completions", body)
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (first, second)]
    assert cached[0] == 0
    assert cached[1] > 0


def test_disconnect_frees_the_blocks(server: Served, engine: penstock.Engine) -> None:
    embedded(server, "a")  # the size of the model is known
    with held(engine):
        with server.send(post(PATH, {"input": TEXTS})):
            wait_until(lambda: server.application.state.calls.num_active == 1)
        wait_until(lambda: server.application.state.calls.num_active == 0)
    wait_until(lambda: at_rest(engine))


@pytest.mark.parametrize("limit", ["max_outputs", "max_outputs_per_key"])
def test_more_inputs_than_outputs_are_refused(engine: penstock.Engine, limit: str) -> None:
    settings = penstock.server.ServerSettings(**{limit: 4})  # type: ignore[arg-type] # all are numbers
    with serving(penstock.server.app({"tiny": engine}, settings)) as server:
        assert server.ask(PATH, {"input": ["a"] * 4})[0] == 200
        status, answer, _ = server.ask(PATH, {"input": ["a"] * 5})
    assert (status, answer["error"]["param"]) == (400, "input")
    assert "at most 4" in answer["error"]["message"]


def test_embeddings_are_in_the_log_and_the_metrics(
    engine: penstock.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "penstock.server.access")
    with serving(penstock.server.app({"tiny": engine})) as server:
        usage = server.ask(PATH, {"input": TEXTS})[1]["usage"]
        wait_until(lambda: bool(caplog.records))
        measures = server.application.state.models["tiny"].measures
    record: Any = caplog.records[-1].msg
    assert record.prompt_tokens == usage["prompt_tokens"] > 0
    assert measures.request_prompt_tokens.sum == usage["prompt_tokens"]
    assert sum(measures.request_prompt_tokens.counts) == len(TEXTS)


def test_aborted_embeddings_are_status_503(server: Served, engine: penstock.Engine) -> None:
    embedded(server, "a")
    with held(engine), server.send(post(PATH, {"input": TEXTS})) as connection:
        wait_until(lambda: len(server.application.state.calls.generations) == 1)
        [name] = server.application.state.calls.generations
        assert server.ask("/abort", {"request_id": name})[0] == 200
        assert connection.makefile("rb").readline().startswith(b"HTTP/1.1 503 ")
    wait_until(lambda: at_rest(engine))
