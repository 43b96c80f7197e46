"""`/health?deep=1`: a step shows that a model works, also under load."""

from __future__ import annotations

import asyncio
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, cast

import pytest

import penstock.server
from penstock.server import models
from support import hooks
from support.api.engines import make_engine, run_in_threads, wait_until
from support.server.serving import Served, at_rest, held, post, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PATH = "/v1/completions"
DEEP = "/health?deep=1"
LONG: dict[str, Any] = {"prompt": [1, 2], "max_tokens": 500, "ignore_eos": True}


@pytest.fixture
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    with make_engine(tiny_model, max_num_seqs=1, max_waiting=2) as engine:
        yield engine


@pytest.fixture
def server(engine: penstock.Engine) -> Iterator[Served]:
    settings = penstock.server.ServerSettings(api_keys=("secret",), probe_timeout=60)
    with serving(penstock.server.app({"tiny": engine, "alias": engine}, settings)) as server:
        yield server


def probe(server: Served) -> tuple[int, dict[str, Any]]:
    """The status of a probe, and the state of the model."""
    status, answer, _ = server.ask(DEEP)
    assert answer["models"]["tiny"] == answer["models"]["alias"]
    return status, answer["models"]["tiny"]


def test_deep_probe_generates_one_token(server: Served, engine: penstock.Engine) -> None:
    status, state = probe(server)
    assert (status, state["status"]) == (200, "ok")
    assert 0 < state["probe_seconds"] < 60
    stats = engine.stats()
    assert (stats.generation_tokens, stats.requests_admitted, stats.blocks_cached) == (1, 1, 0)
    assert "probe_seconds" not in server.ask("/health")[1]["models"]["tiny"]
    assert engine.stats().generation_tokens == 1


def test_result_of_a_probe_holds_for_a_time(
    server: Served, engine: penstock.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "_PROBE_MAX_AGE", 1000)
    assert probe(server) == probe(server)
    assert engine.stats().generation_tokens == 1
    monkeypatch.setattr(models, "_PROBE_MAX_AGE", 0)
    probe(server)
    assert engine.stats().generation_tokens == 2


def test_stuck_step_fails_the_probe_in_time(engine: penstock.Engine) -> None:
    """The other probe sees nothing: the step is not older than `stall_timeout`."""
    settings = penstock.server.ServerSettings(probe_timeout=0.2)
    with serving(penstock.server.app({"tiny": engine, "alias": engine}, settings)) as server:
        with held(engine):
            assert server.ask("/health")[0] == 200
            assert probe(server) == (503, {"status": "stuck"})
        wait_until(lambda: at_rest(engine))
        wait_until(lambda: probe(server)[0] == 200)


def test_probes_at_the_same_time_share_a_request(
    engine: penstock.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_admitted = engine.stats().requests_admitted
    found: list[dict[str, Any]] = []
    settings = penstock.server.ServerSettings(probe_timeout=60)
    begun: list[penstock.Engine] = []
    original = models._compute

    async def generate(engine: penstock.Engine, timeout: float) -> dict[str, Any]:  # noqa: ASYNC109
        begun.append(engine)
        return await original(engine, timeout)

    monkeypatch.setattr(models, "_compute", generate)
    with serving(penstock.server.app(engine, settings)) as server:

        def ask(_index: int) -> None:
            found.append(server.ask(DEEP)[1]["models"]["default"])

        with held(engine):
            waiting = threading.Thread(target=run_in_threads, args=(ask, range(8)))
            waiting.start()
            wait_until(lambda: len(begun) == 1)
            wait_until(lambda: engine.stats().waiting == 1)
        waiting.join()
    assert len(begun) == 1
    assert len(found) == 8
    assert len({state["probe_seconds"] for state in found}) == 1
    assert engine.stats().requests_admitted == num_admitted + 2  # with the one that held the step


def test_cancelled_probe_is_run_again_for_those_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        begun = asyncio.Queue[None]()
        end = asyncio.Event()

        async def generate(_engine: object, _timeout: float) -> dict[str, Any]:
            begun.put_nowait(None)
            await end.wait()
            return {"status": "ok"}

        monkeypatch.setattr(models, "_compute", generate)
        probe, engine = models.Probe(), cast("penstock.Engine", None)
        tasks = [asyncio.create_task(probe.run(engine, 60)) for _ in range(3)]
        await begun.get()
        tasks[0].cancel()
        await begun.get()
        end.set()
        assert await asyncio.gather(*tasks[1:]) == [{"status": "ok"}] * 2
        assert begun.empty()

    asyncio.run(run())


def test_probe_of_a_busy_model_preempts_no_request(tiny_model: Path) -> None:
    settings = penstock.server.ServerSettings(probe_timeout=60, trust_priority=True)
    longer = {"max_position_embeddings": 8192}
    body = {**LONG, "max_tokens": 8000}
    with (
        make_engine(tiny_model, max_num_seqs=1, max_waiting=2, config_overrides=longer) as engine,
        serving(penstock.server.app({"tiny": engine, "alias": engine}, settings)) as server,
        ExitStack() as connections,
    ):
        for _ in range(3):
            connections.enter_context(server.send(post(PATH, body)))
        wait_until(lambda: (engine.stats().running, engine.stats().waiting) == (1, 2))
        assert server.ask(PATH, body)[0] == 429
        status, state = probe(server)
        assert (status, "probe_seconds" in state) == (200, True)
        wait_until(lambda: engine.stats().running + engine.stats().waiting == 3)
        stats = engine.stats()
        assert (stats.finished_length, stats.preemptions) == (0, 0)
        connections.close()
        wait_until(lambda: at_rest(engine))


@pytest.mark.needs("hooks")
def test_failed_step_fails_the_probe(server: Served, engine: penstock.Engine, tiny_model: Path) -> None:
    engine._session.adopt(hooks.failing_engine(tiny_model, engine.config, 0))
    assert probe(server) == (503, {"status": "failed"})


def test_model_that_is_not_open_is_not_probed(tiny_model: Path) -> None:
    with serving(penstock.server.app(make_engine(tiny_model))) as server:
        status, answer, _ = server.ask(DEEP)
    assert (status, answer["models"]) == (503, {"default": {"status": "stopped"}})


@pytest.mark.parametrize(
    ("query", "status"), [("deep=0", 200), ("other=1", 200), ("deep", 400), ("deep=2", 400)]
)
def test_query_is_0_or_1(server: Served, engine: penstock.Engine, query: str, status: int) -> None:
    assert server.ask(f"/health?{query}")[0] == status
    assert engine.stats().generation_tokens == 0
