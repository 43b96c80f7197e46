"""Loading and unloading LoRA adapters at run time: the codes that AIBrix and clients of vLLM expect."""

from __future__ import annotations

import shutil
import threading
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING

import anyio
import pytest

import penstock.server
from penstock.server.errors import ApiError
from support.api.adapters import write_adapter
from support.api.engines import make_engine, run_in_threads, wait_until
from support.server.lora_server import (
    ADMIN,
    CONFIG,
    LOAD,
    UNLOAD,
    LoraServer,
    cleared,
    error_of,
    lora_server,
)
from support.server.serving import at_rest, held, post, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock._hub_files import FileSet
    from penstock._hub_ids import HubModel

COMPLETION = {"prompt": [1, 2, 3], "max_tokens": 2}


@pytest.fixture
def server(module_lora_server: LoraServer) -> Iterator[LoraServer]:
    """The server, which has no adapter before and after a test."""
    with cleared(module_lora_server):
        yield module_lora_server


def test_controller_of_aibrix_gets_its_answers(server: LoraServer) -> None:
    """Its calls: list, load if the name is not listed, list; at the end unload, perhaps twice."""
    assert server.names() == ["base"]
    path = str(server.root / "one")
    status, text, headers = server.load("sql", path)
    assert (status, text) == (200, b"Success: LoRA adapter 'sql' added successfully.")
    assert headers["content-type"] == "text/plain; charset=utf-8"
    assert server.load("sql", path)[0] == 200
    [row] = server.ask("/v1/models")[1]["data"][1:]
    assert (row["id"], row["root"], row["parent"]) == ("sql", path, "base")
    assert server.ask("/v1/completions", {"model": "sql", **COMPLETION})[1]["model"] == "sql"
    status, text, _ = server.unload("sql", lora_int_id=None)
    assert (status, text) == (200, b"Success: LoRA adapter 'sql' removed successfully.")
    assert error_of(server.unload("sql", lora_int_id=7)) == (404, "The lora adapter 'sql' cannot be found.")
    assert server.names() == ["base"]
    assert server.ask("/v1/completions", {"model": "sql", **COMPLETION})[0] == 404


def test_other_contents_are_a_conflict_unless_in_place(server: LoraServer) -> None:
    body = {"model": "n", **COMPLETION, "max_tokens": 12, "temperature": 0}

    def text() -> str:
        return str(server.ask("/v1/completions", body)[1]["choices"][0]["text"])

    assert server.load("n", "one")[0] == 200
    first = text()
    status, message = error_of(server.load("n", "two"))
    assert status == 409
    assert message == (
        "The lora adapter 'n' has already been loaded with other contents: unload it, or set load_inplace."
    )
    assert text() == first
    assert server.load("n", "two", load_inplace=True)[0] == 200
    assert server.ask("/v1/models/n")[1]["root"] == "two"
    assert text() != first
    assert server.load("n", "one")[0] == 409


def test_changed_files_are_other_contents_but_copies_are_not(server: LoraServer) -> None:
    folder = write_adapter(server.root / "changing", CONFIG, rank=2)
    assert server.load("n", folder)[0] == 200
    copy = shutil.copytree(folder, server.root / "copy")
    assert server.load("n", copy)[0] == 200
    write_adapter(folder, CONFIG, rank=4)
    assert server.load("n", folder)[0] == 409
    assert server.load("n", folder, load_inplace=True)[0] == 200
    assert server.engine.adapters["n"].rank == 4


def test_idle_adapter_used_least_recently_makes_room(server: LoraServer) -> None:
    body = {"prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0}

    def ask(name: str) -> str:
        status, answer, _ = server.ask("/v1/completions", {**body, "model": name})
        assert (status, answer["model"]) == (200, name)
        return str(answer["choices"][0]["text"])

    for name, folder in zip("abcd", ("one", "two") * 2, strict=True):
        assert server.load(name, folder)[0] == 200
    expected = [ask(name) for name in "abc"]
    assert expected[0] == expected[2] != expected[1]
    assert server.load("e", "one")[0] == 200  # in place of d, which no request used
    assert set(server.engine.adapters) == {*"abce"}
    assert server.names()[0] == "base"
    assert sorted(server.names()[1:]) == [*"abcde"]
    assert server.ask("/v1/models/d")[1]["root"] == "two"
    assert ask("d") == expected[1]  # loaded again in place of a
    assert set(server.engine.adapters) == {*"bcde"}
    assert server.ask("/v1/embeddings", {"model": "a", "input": [1, 2, 3]})[0] == 200
    assert set(server.engine.adapters) == {*"acde"}
    assert server.load("b", "one")[0] == 409
    assert server.load("b", "two")[0] == 200
    assert [server.unload("c")[0] for _ in range(2)] == [200, 404]  # c had made room for b


def test_full_server_is_status_503_while_all_adapters_are_used(server: LoraServer) -> None:
    for name in "abcde":
        assert server.load(name, "one")[0] == 200
    assert "a" not in server.engine.adapters
    with held(server.engine):
        body = {"prompt": [1, 2], "max_tokens": 400, "ignore_eos": True, "stream": True}
        with ExitStack() as streams:
            for name in "bcde":
                streams.enter_context(server.send(post("/v1/completions", {**body, "model": name})))
            wait_until(lambda: len(server.application.state.calls.generations) == 4)
            for answer in (server.load("f", "one"), server.ask("/v1/completions", {**body, "model": "a"})):
                status, message = error_of(answer)
                assert (status, answer[2]["retry-after"]) == (503, "5")
                assert message.startswith("service unavailable: ")
    wait_until(lambda: at_rest(server.engine))
    assert server.load("f", "one")[0] == 200


def test_evicted_adapter_that_has_lost_its_files_is_status_503(server: LoraServer) -> None:
    folder = shutil.copytree(server.root / "one", server.root / "gone")
    for name in "abcde":
        assert server.load(name, folder if name == "a" else "one")[0] == 200
    shutil.rmtree(folder)
    status, message = error_of(server.ask("/v1/completions", {"model": "a", "prompt": [1], "max_tokens": 1}))
    assert status == 503
    assert "cannot be loaded again" in message
    assert server.unload("a")[0] == 200
    assert "a" not in server.names()


def test_loads_of_one_name_at_the_same_time_join(server: LoraServer) -> None:
    statuses: list[int] = []
    run_in_threads(lambda _: statuses.append(server.load("n", "one")[0]), range(8))
    assert statuses == [200] * 8
    statuses.clear()
    run_in_threads(lambda path: statuses.append(server.load("m", path)[0]), ["one", "two"])
    assert sorted(statuses) == [200, 409]


def test_load_that_takes_too_long_is_status_503(tmp_path: Path) -> None:
    """The error has a word by which AIBrix's controller tries again."""
    with lora_server(tmp_path, settings={"lora_timeout": 1e-9}) as server:
        answer = server.load("n", "one")
        status, message = error_of(answer)
        assert (status, answer[2]["retry-after"]) == (503, "5")
        assert message.startswith("service unavailable: ")
        assert "timeout" in message
        assert server.names() == ["base"]
        assert server.ask("/v1/completions", COMPLETION)[0] == 200


@pytest.mark.anyio
async def test_adapters_are_loaded_on_each_event_loop(module_lora_server: LoraServer) -> None:
    engines, roots = {"base": module_lora_server.engine}, (str(module_lora_server.root),)
    for seconds in (25.0, 1e-9):
        settings = penstock.server.ServerSettings(lora_roots=roots, lora_timeout=seconds)
        state = penstock.server.app(engines, settings).state
        [model] = state.adapters.models
        if seconds < 1:
            with pytest.raises(ApiError, match="service unavailable"):
                await state.adapters.load(model, "n", "one", replace=False)
            continue
        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(partial(state.adapters.load, model, "n", "one", replace=False))
        assert list(model.adapters) == ["n"]
        await state.adapters.unload("n", force=False)
        assert model.adapters == {}


def test_unload_waits_for_the_time_of_the_setting(tmp_path: Path) -> None:
    with lora_server(tmp_path, settings={"lora_timeout": 0.2}) as server:
        server.engine.blocking.load_adapter("n", server.root / "one")
        # An unread request does not end by itself.
        request = server.engine.blocking.start_request([1], max_tokens=500, ignore_eos=True, adapter="n")
        assert server.unload("n")[0] == 200
        assert request.finish_reason is None
        request.cancel()


def test_routes_need_an_administrator(server: LoraServer) -> None:
    body = {"lora_name": "n", "lora_path": "one"}
    for path in (LOAD, UNLOAD):
        assert error_of(server.ask(path, body))[0] == 401
        assert error_of(server.ask(path, body, headers={"Authorization": "Bearer other"}))[0] == 401
    settings = penstock.server.ServerSettings(lora_roots=(str(server.root),))
    with serving(penstock.server.app({"base": server.engine}, settings)) as served:
        for path in (LOAD, UNLOAD):
            assert served.ask(path, body)[0] == 403
    assert server.names() == ["base"]


def test_server_without_adapters_has_no_routes(tiny_model: Path) -> None:
    settings = penstock.server.ServerSettings(admin_api_keys=("boss",))
    with make_engine(tiny_model) as engine, serving(penstock.server.app(engine, settings)) as served:
        for path in (LOAD, UNLOAD):
            body = {"lora_name": "n", "lora_path": "one"}
            assert served.ask(path, body, headers=ADMIN)[1]["error"]["code"] == "not_found"
            assert path not in served.ask("/openapi.json")[1]["paths"]


def test_asleep_model_loads_none_and_unloads(tmp_path: Path) -> None:
    with lora_server(tmp_path) as server:
        for name in ("n", "o"):
            assert server.load(name, "one")[0] == 200
        assert server.ask("/sleep", {}, headers=ADMIN)[0] == 200
        status, message = error_of(server.load("m", "one"))
        assert (status, message.partition(":")[0]) == (503, "service unavailable")
        assert server.unload("o")[0] == 200
        assert server.names() == ["base", "n"]
        assert server.ask("/wake_up", {}, headers=ADMIN)[0] == 200
        assert server.ask("/v1/completions", {"model": "n", **COMPLETION})[0] == 200


# ---- the hub


class FakeHub:
    """Downloads of one repository, `org/one`."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.asked: list[str] = []
        #: While this is clear, nothing is downloaded.
        self.may_answer = threading.Event()
        self.may_answer.set()
        monkeypatch.setattr("penstock._hub_download.plan", self.plan)

    def plan(self, _name: str, source: HubModel, files: FileSet) -> str:
        """The folder of a repository; an error has the cause that the hub's library raises."""
        self.asked.append(source.name)
        self.may_answer.wait(60)
        assert files.kind == "adapter"
        if source.name == "org/one":
            return str(self.folder)
        cause = OSError()
        if source.name != "org/unreachable":
            cause.response = SimpleNamespace(status_code=404)  # type: ignore[attr-defined]
        raise penstock.ModelLoadError(source.name) from cause


@pytest.mark.needs("symlinks")
def test_hub_is_asked_only_if_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub(write_adapter(tmp_path / "cache", CONFIG), monkeypatch)
    with lora_server(tmp_path) as server:
        status, message = error_of(server.load("n", "org/one"))
        assert status == 400
        assert "allow_lora_downloads" in message
        assert hub.asked == []
    shutil.rmtree(tmp_path / "adapters")
    with lora_server(tmp_path, settings={"allow_lora_downloads": True}) as server:
        assert server.load("n", "org/one")[0] == 200
        assert server.ask("/v1/models/n")[1]["root"] == "org/one"
        assert server.load("n", "org/one")[0] == 200
        assert error_of(server.load("m", "org/none"))[0] == 404
        status, message = error_of(server.load("m", "org/unreachable"))
        assert status == 503
        assert message.startswith("service unavailable")
        asked = list(hub.asked)
        monkeypatch.chdir(tmp_path)
        for path in (
            "cache/..",
            "model/../cache",
            "../cache",
            "cache",
            "org/one/two",
            "a//b",
            "org/one@../x\0",
        ):
            assert server.load("m", path)[0] in (400, 404), path
        (tmp_path / "org").mkdir()
        (tmp_path / "org" / "local").symlink_to(tmp_path / "cache")
        assert server.load("m", "org/local")[0] in (400, 404)
        assert hub.asked == asked
        assert server.names() == ["base", "n"]


def test_loads_under_way_keep_their_names_and_have_a_bound(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two loads at a time; a model cannot get an adapter of a name that another one is loading."""
    hub = FakeHub(write_adapter(tmp_path / "cache", CONFIG), monkeypatch)
    settings = penstock.server.ServerSettings(admin_api_keys=("boss",), allow_lora_downloads=True)
    statuses: list[int] = []
    with make_engine(tiny_model, max_adapters=4) as first, make_engine(tiny_model, max_adapters=4) as second:
        application = penstock.server.app({"first": first, "second": second}, settings)
        with serving(application) as served:

            def load(name: str, model: str) -> int:
                body = {"lora_name": name, "lora_path": "org/one", "model": model}
                status: int = served.ask(LOAD, body, headers=ADMIN)[0]
                statuses.append(status)
                return status

            hub.may_answer.clear()
            threads = [threading.Thread(target=load, args=(name, "first")) for name in "abc"]
            for thread in threads:
                thread.start()
            adapters = application.state.adapters
            wait_until(lambda: sum(adapters._loads.values()) == 3)
            wait_until(lambda: len(hub.asked) == 2)
            assert [load(name, "second") for name in "abc"] == [409] * 3
            assert [row["id"] for row in served.ask("/v1/models")[1]["data"]] == ["first", "second"]
            assert len(hub.asked) == 2
            hub.may_answer.set()
            for thread in threads:
                thread.join()
            assert statuses == [409] * 3 + [200] * 3
            assert load("d", "second") == 200
            assert (list(first.adapters), list(second.adapters)) == (["a", "b", "c"], ["d"])
