"""Operations of the runtime that requests share, and clients that leave."""

from __future__ import annotations

import signal
import threading
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from penstock.runtime import RuntimeSettings, downloads
from penstock.runtime.bodies import Download
from penstock.runtime.downloads import Downloads
from penstock.runtime.engines.supervisor import Supervisor
from penstock.runtime.errors import ApiError
from penstock.runtime.operations import Operations
from penstock.runtime.serve import serve
from penstock.server.listener import Address
from support.api.engines import BACKENDS, wait_until
from support.runtime.remote import Asked, Sent, serving_files
from support.runtime.runtime import TOKEN, Answer, FakeEngine, runtime_of, with_token
from support.server.serving import post

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

LOAD, UNLOAD = "/v1/lora_adapter/load", "/v1/lora_adapter/unload"
ENGINE_LOAD = "/v1/load_lora_adapter"
BODY = {"lora_name": "n", "lora_path": "org/repo"}


class Work:
    """An operation that a test ends; counts how often it runs and how often it was cancelled."""

    def __init__(self) -> None:
        self.num_started = self.num_cancelled = self.num_running = 0
        self.may_end = anyio.Event()
        self.error: Exception | None = None

    async def __call__(self) -> str:
        """Wait until it may end."""
        self.num_started += 1
        self.num_running += 1
        assert self.num_running == 1
        try:
            await self.may_end.wait()
        except anyio.get_cancelled_exc_class():
            self.num_cancelled += 1
            raise
        finally:
            self.num_running -= 1
        if self.error is not None:
            raise self.error
        return "result"


def on_each_loop(test: Callable[[Operations, Work], Awaitable[None]]) -> Any:
    """A test with operations, at most 3 requests per name, and their work, on each kind of event loop."""

    async def main() -> None:
        operations = Operations(3)
        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                operations.group = group
                await test(operations, Work())

    def run(backend: dict[str, Any]) -> None:
        anyio.run(main, **backend)

    run.__name__ = test.__name__
    return pytest.mark.parametrize("backend", BACKENDS)(run)


class Clients:
    """Requests that join operations; `results` has their results and errors."""

    def __init__(self, operations: Operations, group: Any) -> None:
        self._operations = operations
        self._group = group
        self.results: list[Any] = []

    async def add(self, work: Work, key: str = "key", *, ends: bool = True) -> anyio.CancelScope:
        """A request that waits; the scope cancels it."""
        scope = anyio.CancelScope()

        async def request() -> None:
            with scope:
                try:
                    self.results.append(await self._operations.join("name", key, work, ends=ends))
                except ApiError as error:
                    self.results.append(error.status)

        self._group.start_soon(request)
        await anyio.wait_all_tasks_blocked()
        return scope


@on_each_loop
async def test_equal_requests_share_one_operation(operations: Operations, work: Work) -> None:
    async with anyio.create_task_group() as group:
        clients = Clients(operations, group)
        for _ in range(3):
            await clients.add(work)
        assert operations.num_requests("name") == 3
        work.may_end.set()
    assert (clients.results, work.num_started) == (["result"] * 3, 1)
    assert operations.num_requests("name") == 0
    # A later request has an operation of its own.
    assert await operations.join("name", "key", work) == "result"
    assert work.num_started == 2


@on_each_loop
async def test_operation_ends_with_its_last_request(operations: Operations, work: Work) -> None:
    async with anyio.create_task_group() as group:
        clients = Clients(operations, group)
        scopes = [await clients.add(work) for _ in range(2)]
        scopes[0].cancel()
        await anyio.wait_all_tasks_blocked()
        assert (work.num_started, work.num_cancelled) == (1, 0)
        scopes[1].cancel()
        await anyio.wait_all_tasks_blocked()
        assert (work.num_started, work.num_cancelled) == (1, 1)
        await clients.add(work)
        work.may_end.set()
    assert (clients.results, work.num_started) == (["result"], 2)


@on_each_loop
async def test_operation_to_the_end_goes_on_without_requests(operations: Operations, work: Work) -> None:
    async with anyio.create_task_group() as group:
        clients = Clients(operations, group)
        (await clients.add(work, ends=False)).cancel()
        await anyio.wait_all_tasks_blocked()
        await clients.add(work, ends=False)
        work.may_end.set()
    assert (clients.results, work.num_started, work.num_cancelled) == (["result"], 1, 0)


@on_each_loop
async def test_operations_of_one_name_run_one_at_a_time(operations: Operations, work: Work) -> None:
    async with anyio.create_task_group() as group:
        clients = Clients(operations, group)
        for key in "abc":
            await clients.add(work, key)
        assert work.num_started == 1  # the work checks that it runs alone
        await clients.add(work, "d")  # one too many
        assert clients.results == [503]
        work.may_end.set()
    assert (clients.results[1:], work.num_started) == (["result"] * 3, 3)


@on_each_loop
async def test_error_of_an_operation_reaches_all_requests(operations: Operations, work: Work) -> None:
    work.error = ApiError(409, "ConflictError", "no")
    async with anyio.create_task_group() as group:
        clients = Clients(operations, group)
        for _ in range(2):
            await clients.add(work)
        work.may_end.set()
    assert (clients.results, work.num_started) == ([409, 409], 1)


@on_each_loop
async def test_end_of_the_application_ends_requests(operations: Operations, work: Work) -> None:
    async with anyio.create_task_group() as group:
        clients = Clients(operations, group)
        async with anyio.create_task_group() as application:
            operations.group = application
            await clients.add(work)
            operations.group = None
            application.cancel_scope.cancel()
        await clients.add(work)
    assert clients.results == [503, 503]


# ---- clients on sockets


def test_clients_that_leave_take_no_slots(tmp_path: Path) -> None:
    engine = FakeEngine()
    for path in (ENGINE_LOAD, "/v1/unload_lora_adapter"):
        engine.answer(path, Answer())
    with runtime_of(engine, adapter_dir=str(tmp_path)) as runtime, ExitStack() as stack:
        engine.may_answer.clear()
        for number in range(64):
            stack.enter_context(runtime.send(post(LOAD, {**BODY, "lora_name": f"n{number}"})))
        state = runtime.application.state
        wait_until(lambda: state.num_changes == 64)
        assert runtime.ask(UNLOAD, {"lora_name": "other"})[0] == 503
        wait_until(lambda: len(engine.calls) == 10)  # the connections to the engine
        stack.close()
        wait_until(lambda: state.num_changes == 0)
        engine.may_answer.set()
        assert runtime.ask(UNLOAD, {"lora_name": "other"})[0] == 200
    assert len(engine.calls) < 64  # the others ended before they had a connection


def test_repeated_loads_of_an_adapter_are_one_call_of_the_engine() -> None:
    engine = FakeEngine()
    engine.answer(ENGINE_LOAD, Answer())
    with runtime_of(engine) as runtime:
        engine.may_answer.clear()
        operations = runtime.application.state.adapters.operations
        # The first client repeats its request after its timeout.
        with runtime.send(post(LOAD, BODY)):
            wait_until(lambda: len(engine.calls) == 1)
            statuses: list[int] = []
            threads = [
                threading.Thread(target=lambda: statuses.append(runtime.ask(LOAD, BODY)[0])) for _ in range(3)
            ]
            for thread in threads:
                thread.start()
            wait_until(lambda: operations.num_requests("n") == 4)
        wait_until(lambda: operations.num_requests("n") == 3)
        engine.may_answer.set()
        for thread in threads:
            thread.join()
    assert (statuses, len(engine.calls)) == ([200] * 3, 1)


def test_loads_with_other_keys_share_no_operation() -> None:
    engine = FakeEngine()
    engine.answer(ENGINE_LOAD, Answer(401), Answer(200))
    with runtime_of(engine) as runtime:
        engine.may_answer.clear()
        statuses: list[int] = []

        def load(key: str) -> None:
            statuses.append(runtime.ask(LOAD, BODY, headers={"Authorization": f"Bearer {key}"})[0])

        def is_waiting(number: int) -> bool:
            return bool(runtime.application.state.adapters.operations.num_requests("n") == number)

        threads = [threading.Thread(target=load, args=(key,)) for key in ("a", "b")]
        for number, thread in enumerate(threads, 1):
            thread.start()
            wait_until(partial(is_waiting, number))
        engine.may_answer.set()
        for thread in threads:
            thread.join()
    assert sorted(statuses) == [200, 401]
    assert {call.headers["authorization"] for call in engine.calls} == {"Bearer a", "Bearer b"}


def test_requests_for_one_adapter_are_limited() -> None:
    engine = FakeEngine()
    engine.answer(ENGINE_LOAD, Answer())
    with runtime_of(engine) as runtime, ExitStack() as stack:
        engine.may_answer.clear()
        for _ in range(16):
            stack.enter_context(runtime.send(post(LOAD, BODY)))
        operations = runtime.application.state.adapters.operations
        wait_until(lambda: operations.num_requests("n") == 16)
        status, error, headers = runtime.ask(LOAD, BODY)
        assert (status, error["type"], headers["retry-after"]) == (503, "OverloadedError", "1")
        engine.may_answer.set()
        assert runtime.ask(LOAD, {**BODY, "lora_name": "other"})[0] == 200


def test_end_of_the_runtime_answers_requests_that_wait() -> None:
    engine = FakeEngine()
    with runtime_of(engine) as runtime:
        engine.may_answer.clear()
        with runtime.send(post(LOAD, BODY)) as connection:
            wait_until(lambda: len(engine.calls) == 1)
            runtime.server.should_exit = True
            answer = connection.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"the runtime is stopping" in answer


def test_lists_at_the_same_time_share_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()
    scanned: list[Path] = []
    models = downloads._models

    def slow(root: Path) -> list[Any]:
        scanned.append(root)
        may_end.wait(60)
        return models(root)

    monkeypatch.setattr(downloads, "_models", slow)
    with runtime_of(FakeEngine(), model_dir=str(tmp_path)) as runtime:
        statuses: list[int] = []
        threads = [
            threading.Thread(target=lambda: statuses.append(runtime.ask("/v1/model/list")[0]))
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: runtime.application.state.lists.num_requests("lists") == 8)
        may_end.set()
        for thread in threads:
            thread.join()
    assert (statuses, scanned) == ([200] * 8, [tmp_path])


def test_client_that_leaves_ends_the_download_of_its_activation(tmp_path: Path) -> None:
    folders = {name: str(tmp_path / name) for name in ("model_dir", "adapter_dir", "registry_path")}
    with serving_files() as hub:
        hub.files["/m.gguf"] = b"m" * 100_000
        hub.stop_after(1)
        settings = {"artifact_hosts": ("127.0.0.1",), "max_downloads": 1, "tokens": (TOKEN,), **folders}
        with runtime_of(FakeEngine(), **settings) as runtime:
            body = {"model_name": "m", "artifact_url": f"{hub.url}/m.gguf"}
            state = runtime.application.state
            with runtime.send(with_token(post("/v1/runtime/models/activate", body))):
                assert hub.is_stopped.wait(20)
                assert state.downloads.num_running() == 1
            wait_until(lambda: state.num_changes == 0 and state.downloads.num_running() == 0)
            assert runtime.ask("/v1/runtime/models")[1] == {"models": []}
            hub.stop_after(None)
            status, card, _ = runtime.ask("/v1/model/download", {"model_uri": f"{hub.url}/m.gguf"})
            assert (status, card["model_status"]) in ((200, "downloading"), (200, "downloaded"))


def test_change_of_an_engine_is_not_interrupted(tmp_path: Path) -> None:
    """A client leaves while its engine is being stopped: the process still ends."""
    registry = str(tmp_path / "engines.json")
    with runtime_of(FakeEngine(), registry_path=registry, tokens=(TOKEN,)) as runtime:
        state = runtime.application.state
        may_end, ended = threading.Event(), threading.Event()

        async def deactivate(_name: str) -> None:
            await anyio.to_thread.run_sync(partial(may_end.wait, 20), abandon_on_cancel=True)
            ended.set()

        state.supervisor.deactivate = deactivate
        with runtime.send(with_token(post("/v1/runtime/models/deactivate", {"model_name": "m"}))):
            wait_until(lambda: state.num_changes == 1)
        wait_until(lambda: state.num_changes == 0)
        assert not ended.is_set()
        may_end.set()
        assert ended.wait(20)


def test_end_of_the_runtime_ends_a_request_for_a_download(tmp_path: Path) -> None:
    with serving_files() as hub:
        hub.models["org/m"] = {"config.json": b"{}"}
        may_continue = threading.Event()

        def hold(_asked: Asked) -> Sent | None:
            may_continue.wait(60)
            return None

        hub.faults.append(hold)
        settings = RuntimeSettings(model_dir=str(tmp_path / "models"), artifact_hosts=("127.0.0.1",))
        body = Download(model_uri="org/m", download_extra_config={"hf_endpoint": hub.url})
        statuses: list[int] = []

        async def main() -> None:
            downloads = Downloads(settings)

            async def request() -> None:
                try:
                    await downloads.start(body)
                except ApiError as error:
                    statuses.append(error.status)

            async with anyio.create_task_group() as requests, anyio.create_task_group() as application:
                downloads.group = application
                requests.start_soon(request)
                await anyio.to_thread.run_sync(partial(wait_until, lambda: bool(hub.requests)))
                application.cancel_scope.cancel()

        anyio.run(main)
        may_continue.set()
    assert statuses == [503]


def test_failure_of_the_application_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(_self: Supervisor) -> None:
        raise RuntimeError("no luck")

    monkeypatch.setattr(Supervisor, "run", run)
    settings = RuntimeSettings(registry_path=str(tmp_path / "engines.json"))
    timer = threading.Timer(20, signal.raise_signal, [signal.SIGTERM])  # without the failure
    timer.start()
    with pytest.raises(SystemExit) as caught:
        serve(settings, Address("127.0.0.1", 0))
    timer.cancel()
    assert caught.value.code == 1
