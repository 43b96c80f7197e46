"""Requests that name a LoRA adapter as their model, and adapters that are unloaded meanwhile."""

from __future__ import annotations

import json
import re
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import penstock
import penstock.server
from penstock.server.calls import Generation
from penstock.server.models import Progress
from support.api.engines import make_engine, wait_until
from support.paths import DATA
from support.server.lora_server import ADMIN, LOAD, LoraServer, lora_server
from support.server.serving import at_rest, held, serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from penstock.server.errors import ApiError

CHAT: list[Any] = [{"role": "user", "content": "Hello"}]
PLAIN: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
PROMPT = [5, 6, 7, 8]
#: Requests of each route that computes, without a model.
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 8, **PLAIN},
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 8, **PLAIN},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 8, **PLAIN},
    "/v1/messages": {"messages": CHAT, "max_tokens": 8, **PLAIN},
    "/v1/embeddings": {"input": PROMPT},
}
#: The part of a response that the weights determine.
OUTPUT: dict[str, Callable[[Any], Any]] = {
    "/v1/chat/completions": lambda answer: answer["choices"][0]["message"]["content"],
    "/v1/completions": lambda answer: answer["choices"][0]["text"],
    "/v1/responses": lambda answer: answer["output"][0]["content"][0]["text"],
    "/v1/messages": lambda answer: answer["content"][0]["text"],
    "/v1/embeddings": lambda answer: answer["data"][0]["embedding"],
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoraServer]:
    """A server with the adapters "one" and "two"."""
    with lora_server(tmp_path_factory.mktemp("lora")) as server:
        for name in ("one", "two"):
            assert server.load(name, server.root / name)[0] == 200
        yield server


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoraServer]:
    """A server without adapters, of which three sequences have a slot."""
    with lora_server(tmp_path_factory.mktemp("narrow"), max_num_seqs=3) as server:
        yield server


@pytest.fixture
def extra(server: LoraServer) -> Iterator[str]:
    """The name of an adapter that a test may unload; its files are those of "one"."""
    assert server.load("extra", server.root / "one")[0] == 200
    yield "extra"
    server.unload("extra", force=True)
    assert at_rest(server.engine)


def in_thread(work: Callable[[], object]) -> threading.Thread:
    """A started thread."""
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def long(path: str) -> dict[str, Any]:
    """The request of a route with a long output, if it has one."""
    return {name: 400 if value == 8 else value for name, value in REQUESTS[path].items()}


def num_unfinished(server: LoraServer, name: str) -> int:
    """Number of outputs that wait or run with an adapter."""
    adapter = server.engine.adapters[name]
    return adapter.waiting + adapter.running


@pytest.mark.parametrize("path", REQUESTS)
def test_model_selects_the_adapter_in_each_route(server: LoraServer, path: str) -> None:
    outputs = {}
    for name in ("base", "one", "two"):
        status, answer, _ = server.ask(path, {"model": name, **REQUESTS[path]})
        assert (status, answer["model"]) == (200, name)
        outputs[name] = str(OUTPUT[path](answer))
    assert len(set(outputs.values())) == 3
    _, answer, _ = server.ask(path, REQUESTS[path])
    assert (answer["model"], str(OUTPUT[path](answer))) == ("base", outputs["base"])


def test_output_is_that_of_the_engine_with_the_adapter(server: LoraServer) -> None:
    body = {**REQUESTS["/v1/completions"], "return_token_ids": True}
    for name in ("one", "two"):
        result = server.engine.blocking.generate(
            PROMPT, max_tokens=8, temperature=0, ignore_eos=True, adapter=name
        )
        assert result.adapter == name
        _, answer, _ = server.ask("/v1/completions", {**body, "model": name})
        assert tuple(answer["choices"][0]["token_ids"]) == result.token_ids


def test_batches_beams_and_best_of_use_the_adapter(server: LoraServer) -> None:
    for fields in (
        {"prompt": [PROMPT, [9, 9, 9]]},
        {"use_beam_search": True, "n": 2},
        {"best_of": 2, "temperature": 1, "seed": 1},
    ):
        texts = set()
        for name in ("base", "one"):
            body = {**REQUESTS["/v1/completions"], "model": name, **fields}
            status, answer, _ = server.ask("/v1/completions", body)
            assert (status, answer["model"]) == (200, name)
            texts.add(str([choice["text"] for choice in answer["choices"]]))
        assert len(texts) == 2


def test_stream_has_the_name_of_the_adapter(server: LoraServer) -> None:
    events = server.events("/v1/chat/completions", {"model": "two", **REQUESTS["/v1/chat/completions"]})
    assert {event["model"] for event in events[:-1]} == {"two"}
    _, answer, _ = server.ask("/v1/chat/completions", {"model": "two", **REQUESTS["/v1/chat/completions"]})
    text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events[:-1])
    assert text == answer["choices"][0]["message"]["content"]


def test_tokens_of_an_adapter_are_those_of_its_model(server: LoraServer) -> None:
    for path, body in (
        ("/tokenize", {"prompt": "Hello"}),
        ("/detokenize", {"tokens": [72, 73]}),
        ("/v1/messages/count_tokens", {"messages": CHAT}),
    ):
        found = [server.ask(path, {"model": name, **body})[:2] for name in ("base", "one")]
        assert found[0] == found[1]
        assert found[0][0] == 200


@pytest.mark.parametrize("path", [*REQUESTS, "/v1/messages/count_tokens"])
@pytest.mark.parametrize("field", ["adapter", "adapter_id", "adapter_name", "lora_path", "lora_request"])
def test_no_other_field_selects_an_adapter(server: LoraServer, path: str, field: str) -> None:
    body = REQUESTS.get(path, {"messages": CHAT})
    status, answer, _ = server.ask(path, {"model": "base", **body, field: "one"})
    assert status == 400
    assert f"{field}='one'" in answer["error"]["message"]
    assert server.ask(path, {"model": "base", **body, field: None})[0] == 200


@pytest.mark.parametrize("path", [*REQUESTS, "/tokenize"])
def test_unknown_name_is_status_404_and_names_the_others(server: LoraServer, path: str) -> None:
    body = REQUESTS.get(path, {"prompt": "a"})
    status, answer, _ = server.ask(path, {"model": "none", **body})
    assert status == 404
    assert "'none' does not exist: model must be one of 'base', 'one', 'two'" in answer["error"]["message"]


def test_prefix_cache_is_not_shared_between_adapters(server: LoraServer) -> None:
    prompt = list(range(100, 180))

    def cached(name: str) -> int:
        body = {"model": name, "prompt": prompt, "max_tokens": 1}
        usage = server.ask("/v1/completions", body)[1]["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [cached(name) for name in ("base", "one", "two")] == [0, 0, 0]
    assert all(cached(name) >= 64 for name in ("base", "one", "two"))


def test_list_has_the_rows_of_vllm(server: LoraServer) -> None:
    _, answer, _ = server.ask("/v1/models")
    base, one, two = answer["data"]
    assert (base["id"], base["parent"], base["max_model_len"]) == ("base", None, 512)
    assert one == {
        "id": "one",
        "object": "model",
        "created": one["created"],
        "owned_by": "penstock",
        "root": str(server.root / "one"),
        "parent": "base",
        "max_model_len": None,
        "chat_sampling": {"temperature": 0.7, "min_p": 0.05},
        "permission": one["permission"],
    }
    assert one["created"] >= base["created"]
    [permission] = one["permission"]
    assert re.fullmatch("modelperm-[0-9a-f]{32}", permission["id"])
    assert permission["id"] != base["permission"][0]["id"]
    assert (permission["created"], permission["organization"]) == (one["created"], "*")
    [documented] = json.loads((DATA / "aibrix" / "vllm_models.json").read_text())["data"][0]["permission"]
    assert permission == documented | {"id": permission["id"], "created": permission["created"]}
    assert server.ask("/v1/models/two")[:2] == (200, two)
    assert server.ask("/v1/models/three")[0] == 404


def test_adapter_of_an_application_is_listed(server: LoraServer) -> None:
    path = server.root / "two"
    server.engine.blocking.load_adapter("own", path)
    try:
        _, row, _ = server.ask("/v1/models/own")
        assert (row["root"], row["parent"]) == (str(path), "base")
        assert server.ask("/v1/completions", {"model": "own", "prompt": PROMPT})[0] == 200
        assert server.load("own", path)[0] == 200
        server.engine.blocking.load_adapter("own", server.root / "one", replace=True)
        assert server.ask("/v1/models/own")[1]["root"] == str(server.root / "one")
        server.engine.blocking.load_adapter("base", path)  # the model has precedence
        assert server.names() == ["base", "one", "own", "two"]
        assert server.ask("/v1/models/base")[1]["parent"] is None
    finally:
        for name in ("own", "base"):
            server.engine.blocking.unload_adapter(name)


# ---- adapters that are unloaded


def test_unloaded_adapter_finishes_its_requests(server: LoraServer, extra: str) -> None:
    """A request that has started ends as usual; new ones get status 404, and the answer waits for it."""
    body = {"model": extra, "prompt": PROMPT, "max_tokens": 40, **PLAIN}
    expected = server.ask("/v1/completions", body)[1]["choices"]
    answers: list[Any] = []
    with held(server.engine):
        threads = [in_thread(lambda: answers.append(server.ask("/v1/completions", body)))]
        wait_until(lambda: num_unfinished(server, extra) > 0)
        threads.append(in_thread(lambda: answers.append(server.unload(extra))))
        wait_until(lambda: extra not in server.engine.adapters)
        assert server.ask("/v1/completions", body)[0] == 404
        assert server.names() == ["base", "one", "two"]
        assert answers == []
    for thread in threads:
        thread.join()
    by_kind = {str(type(body)): (status, body) for status, body, _ in answers}
    assert by_kind[str(bytes)] == (200, b"Success: LoRA adapter 'extra' removed successfully.")
    status, answer = by_kind[str(dict)]
    assert (status, answer["choices"]) == (200, expected)


@pytest.mark.parametrize("stream", [False, True])
def test_batch_ends_if_its_adapter_is_unloaded_before_the_rest(narrow: LoraServer, stream: bool) -> None:  # noqa: FBT001
    assert narrow.load("extra", narrow.root / "one")[0] == 200
    body = {"model": "extra", "prompt": [PROMPT] * 20, "max_tokens": 2, "stream": stream}
    answers: list[Any] = []
    with held(narrow.engine):
        running = in_thread(lambda: answers.append(narrow.ask("/v1/completions", body)))
        wait_until(lambda: num_unfinished(narrow, "extra") == 3)  # as many as run at the same time
        unloading = in_thread(lambda: narrow.unload("extra"))
        wait_until(lambda: "extra" not in narrow.engine.adapters)
    running.join()
    unloading.join()
    status, answer, _ = answers[0]
    error = json.loads(answer.decode().strip().split("\n\n")[-1].removeprefix("data: ")) if stream else answer
    assert status == (200 if stream else 404)
    assert error["error"] == {
        "message": "the model does not exist: its adapter was unloaded",
        "type": "not_found_error",
        "param": "model",
        "code": "model_not_found",
    }


@pytest.mark.parametrize("path", REQUESTS)
def test_forced_unload_is_an_error_of_its_requests(server: LoraServer, extra: str, path: str) -> None:
    body = {"model": extra, **long(path)}
    answers: list[Any] = []
    with held(server.engine):
        running = in_thread(lambda: answers.append(server.ask(path, body)))
        wait_until(lambda: num_unfinished(server, extra) > 0)
        unloading = in_thread(lambda: server.unload(extra, force=True))
        wait_until(lambda: extra not in server.engine.adapters)
    running.join()
    unloading.join()
    status, answer, headers = answers[0]
    assert (status, headers["retry-after"]) == (503, "1")
    assert answer["error"]["message"] == "the adapter 'extra' was unloaded"


def test_forced_unload_is_known_after_another_load(
    server: LoraServer, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = server.engine.adapters[extra].path
    error_of = Generation.error_of

    def load_before(generation: Generation, error: BaseException, place: str | None = None) -> ApiError:
        in_thread(lambda: server.engine.blocking.load_adapter(extra, path)).join()
        assert extra in server.engine.adapters
        return error_of(generation, error, place)

    monkeypatch.setattr(Generation, "error_of", load_before)
    answers: list[Any] = []
    with held(server.engine):
        body = {"model": extra, **long("/v1/completions")}
        running = in_thread(lambda: answers.append(server.ask("/v1/completions", body)))
        wait_until(lambda: num_unfinished(server, extra) > 0)
        unloading = in_thread(lambda: server.unload(extra, force=True))
        wait_until(lambda: extra not in server.engine.adapters)
    running.join()
    unloading.join()
    status, answer, _ = answers[0]
    assert (status, answer["error"]["code"]) == (503, "adapter_unloaded")


def test_unload_that_waits_can_be_forced(server: LoraServer, extra: str) -> None:
    # An unread request does not end by itself.
    request = server.engine.blocking.start_request(PROMPT, max_tokens=500, ignore_eos=True, adapter=extra)
    thread = in_thread(lambda: server.unload(extra))
    wait_until(lambda: extra not in server.engine.adapters)
    assert server.unload(extra, force=True)[0] == 200
    thread.join()
    with pytest.raises(penstock.GenerationError, match="was unloaded"):
        request.result()
    assert server.unload(extra, force=True)[0] == 404


@pytest.mark.parametrize("path", [path for path in REQUESTS if path != "/v1/embeddings"])
def test_forced_unload_is_an_event_of_streams(server: LoraServer, extra: str, path: str) -> None:
    body = {"model": extra, **long(path), "stream": True}
    answers: list[Any] = []
    with held(server.engine):
        running = in_thread(lambda: answers.append(server.ask(path, body)))
        wait_until(lambda: num_unfinished(server, extra) > 0)
        unloading = in_thread(lambda: server.unload(extra, force=True))
        wait_until(lambda: extra not in server.engine.adapters)
    running.join()
    unloading.join()
    status, text, _ = answers[0]
    assert status == 200
    last = text.decode().strip().split("\n\n")[-1]
    assert "the adapter 'extra' was unloaded" in last
    assert "[DONE]" not in text.decode()


def test_loads_and_unloads_do_not_disturb_streams(server: LoraServer) -> None:
    body = {"model": "one", "prompt": PROMPT, "max_tokens": 300, **PLAIN}
    expected = server.ask("/v1/completions", body)[1]["choices"][0]["text"]
    texts: list[str] = []

    def read() -> None:
        events = server.events("/v1/completions", body)
        texts.append("".join(event["choices"][0]["text"] for event in events[:-1]))

    threads = [in_thread(read) for _ in range(3)]
    for _ in range(10):
        assert server.load("other", server.root / "two")[0] == 200
        assert server.ask("/v1/completions", {"model": "other", "prompt": PROMPT, "max_tokens": 2})[0] == 200
        assert server.unload("other")[0] == 200
    for thread in threads:
        thread.join()
    assert texts == [expected] * 3


def test_metrics_name_the_adapters_in_use(narrow: LoraServer) -> None:
    names = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")

    def labels() -> list[str]:
        families = text_string_to_metric_families(narrow.ask("/metrics")[1].decode())
        found = [family for family in families if family.name == "vllm:lora_requests_info"]
        [sample] = found[0].samples
        assert abs(sample.value - time.time()) < 60
        return [sample.labels[name] for name in names]

    for name in "badc":
        assert narrow.load(name, narrow.root / "one")[0] == 200
    assert labels() == ["4", "", ""]
    with held(narrow.engine):
        threads = []
        for name in "badc":  # two of them have a slot
            body = {"model": name, "prompt": PROMPT, "max_tokens": 2}
            threads.append(in_thread(partial(narrow.ask, "/v1/completions", body)))
            wait_until(lambda name=name: num_unfinished(narrow, name) == 1)  # type: ignore[misc]
        assert labels() == ["4", "a,b", "c,d"]
    for thread in threads:
        thread.join()
    assert labels() == ["4", "", ""]


# ---- several models


def test_names_are_unique_over_all_models(server: LoraServer, tiny_model: Path) -> None:
    """Of three models, two can have adapters; a load names the one that gets it."""
    settings = penstock.server.ServerSettings(admin_api_keys=("boss",), lora_roots=(str(server.root),))
    with make_engine(tiny_model, max_adapters=1) as second, make_engine(tiny_model) as third:
        models = {"first": server.engine, "alias": server.engine, "second": second, "third": third}
        with serving(penstock.server.app(models, settings)) as served:

            def load(name: str, **fields: Any) -> tuple[int, str]:
                body = {"lora_name": name, "lora_path": "one", **fields}
                status, answer, _ = served.ask(LOAD, body, headers=ADMIN)
                return status, "" if status == 200 else answer["error"]["param"]

            assert load("new") == (400, "model")
            assert load("new", model="third") == (400, "model")
            assert load("new", model="fourth") == (404, "model")
            assert load("new", model="one") == (404, "model")
            assert load("one", model="second") == (409, "lora_name")
            assert load("alias", model="second") == (400, "lora_name")
            assert load("new", model="second") == (200, "")
            rows = {row["id"]: row["parent"] for row in served.ask("/v1/models")[1]["data"]}
            models_of = {"first": None, "alias": None, "second": None, "third": None}
            assert rows == {**models_of, "one": "first", "two": "first", "new": "second"}
            for name in ("one", "new"):
                assert served.ask("/v1/completions", {"model": name, "prompt": PROMPT})[1]["model"] == name
            status, answer, _ = served.ask("/v1/completions", {"prompt": PROMPT})
            assert (status, answer["error"]["param"]) == (400, "model")
            assert served.ask("/sleep", {"model": "new"}, headers=ADMIN)[0] == 404


def test_model_is_loading_until_its_adapters_are_loaded(server: LoraServer) -> None:
    model = server.application.state.models["base"]
    model.progress = Progress()
    try:
        status, answer, _ = server.ask("/health")
        assert (status, answer["models"]["base"]["status"]) == (503, "loading")
    finally:
        model.progress = None
    assert server.ask("/health")[0] == 200


def test_model_that_is_not_open_has_no_adapters(tiny_model: Path) -> None:
    engine = penstock.Engine(tiny_model, max_adapters=1)
    settings = penstock.server.ServerSettings(admin_api_keys=("boss",))
    with serving(penstock.server.app({"base": engine}, settings)) as served:
        assert [row["id"] for row in served.ask("/v1/models")[1]["data"]] == ["base"]
        body = json.dumps({"model": "one", "prompt": PROMPT}).encode()
        assert served.ask("/v1/completions", body)[0] == 404
