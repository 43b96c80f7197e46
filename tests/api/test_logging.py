"""Records of the engine's threads reach the Python logger `penstock`; the threads never wait for it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from support import hooks
from support.api.checkpoints import make_config, write_checkpoint
from support.api.engines import PROMPT, SHORT, make_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import penstock

CAPACITY = 256


@pytest.fixture
def engine(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> Iterator[penstock.Engine]:
    """An engine opened at log level WARNING, with an empty record queue."""
    caplog.set_level(logging.WARNING, logger="penstock")
    with make_engine(tiny_model) as engine:
        engine.stats()
        caplog.clear()
        yield engine


def close(engine: penstock.Engine) -> None:
    engine.close()


def read_stats(engine: penstock.Engine) -> None:
    engine.stats()


def generate_in_a_thread(engine: penstock.Engine) -> None:
    engine.blocking.generate(PROMPT, SHORT)


@pytest.mark.needs("hooks")
@pytest.mark.parametrize("occasion", [read_stats, generate_in_a_thread, close])
def test_records_arrive_on_the_next_python_call(
    engine: penstock.Engine, caplog: pytest.LogCaptureFixture, occasion: Callable[[penstock.Engine], None]
) -> None:
    hooks.log_records("warn", 2)
    hooks.log_records("error", 1)
    assert caplog.record_tuples == []
    occasion(engine)
    assert caplog.record_tuples == [
        ("penstock", logging.WARNING, "record 0 of a test"),
        ("penstock", logging.WARNING, "record 1 of a test"),
        ("penstock", logging.ERROR, "record 0 of a test"),
    ]
    engine.close()
    assert len(caplog.records) == 3


@pytest.mark.anyio
async def test_records_of_loading_arrive_with_start(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="penstock")
    engine = make_engine(tiny_model)
    await engine.start()
    assert caplog.records
    await engine.aclose()


@pytest.mark.needs("hooks")
def test_record_has_the_time_and_thread_of_its_creation(
    engine: penstock.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    before = time.time()
    hooks.log_records("error", 1)
    after = time.time()
    start = logging.LogRecord("", 0, "", 0, "", None, None)
    engine.stats()
    (record,) = caplog.records
    assert before <= record.created <= after
    assert record.msecs == pytest.approx(record.created % 1 * 1000, abs=1)
    expected = start.relativeCreated - (start.created - record.created) * 1000
    assert record.relativeCreated == pytest.approx(expected, abs=1)
    assert record.pathname.endswith("testing.rs")
    assert record.threadName != threading.current_thread().name


@pytest.mark.needs("hooks")
@pytest.mark.anyio
async def test_records_arrive_while_a_loop_waits_for_requests(
    engine: penstock.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    hooks.log_records("error", 1)
    await engine.generate(PROMPT, SHORT)
    assert [record.getMessage() for record in caplog.records] == ["record 0 of a test"]


@pytest.mark.needs("hooks")
def test_excess_records_are_dropped_and_counted(
    engine: penstock.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    hooks.log_records("error", CAPACITY + 1000)
    engine.stats()
    messages = [record.getMessage() for record in caplog.records]
    assert messages[:CAPACITY] == [f"record {number} of a test" for number in range(CAPACITY)]
    assert messages[CAPACITY:] == ["1000 log records were dropped; the queue holds 256"]
    caplog.clear()
    hooks.log_records("error", 1)
    engine.stats()
    assert len(caplog.records) == 1


@pytest.mark.parametrize("is_set", [True, False])
def test_idle_engine_is_checked_only_for_tests(tiny_model: Path, is_set: bool) -> None:  # noqa: FBT001
    code = """
import logging, sys, penstock
logging.basicConfig(level=logging.DEBUG, stream=sys.stdout)
with penstock.Engine(sys.argv[1], threads=1) as engine:
    engine.blocking.generate([1, 2], max_tokens=1)
"""
    variables = {name: value for name, value in os.environ.items() if name != "PENSTOCK_CHECK_INTEGRITY"}
    assert variables != os.environ, "the tests set it"
    command = [sys.executable, "-c", code, str(tiny_model)]
    env = dict(os.environ) if is_set else variables
    done = subprocess.run(command, env=env, check=True, capture_output=True, text=True, timeout=60)
    assert ("all parts of the idle engine agree" in done.stdout) == is_set


@pytest.mark.needs("hooks")
def test_disabled_level_is_not_queued(engine: penstock.Engine, caplog: pytest.LogCaptureFixture) -> None:
    hooks.log_records("info", CAPACITY + 1000)
    engine.stats()
    assert caplog.records == []


@pytest.mark.needs("hooks")
def test_level_is_that_of_the_logger_when_an_engine_opens(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for level, expected in ((logging.DEBUG, 3), (logging.INFO, 2), (logging.CRITICAL, 0)):
        caplog.set_level(level, logger="penstock")
        with make_engine(tiny_model) as engine:
            engine.stats()
            caplog.clear()
            for name in ("error", "info", "debug", "trace"):
                hooks.log_records(name, 1)
            engine.stats()
            assert (
                len([record for record in caplog.records if "of a test" in record.getMessage()]) == expected
            )


@pytest.mark.needs("hooks")
def test_raising_handler_has_no_effect_on_requests(
    engine: penstock.Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_record: logging.LogRecord) -> bool:
        raise ZeroDivisionError

    unraised: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", lambda unraisable: unraised.append(unraisable.exc_type))
    logging.getLogger("penstock").addFilter(fail)
    try:
        hooks.log_records("error", 1)
        engine.stats()
    finally:
        logging.getLogger("penstock").removeFilter(fail)
    assert unraised == [ZeroDivisionError]
    assert caplog.records == []


def test_dependency_records_about_a_prompt_are_not_delivered(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(1, logger="penstock")
    with make_engine(tiny_model) as engine:
        engine.blocking.generate("secret", SHORT)
        engine.stats()
    assert caplog.records
    assert not [record for record in caplog.records if "Replacing" in record.getMessage()]
    assert not [record for record in caplog.records if "'s'" in record.getMessage()]


@pytest.mark.needs("hooks")
def test_ctrl_c_in_a_handler_propagates(engine: penstock.Engine) -> None:
    def interrupt(_record: logging.LogRecord) -> bool:
        raise KeyboardInterrupt

    logging.getLogger("penstock").addFilter(interrupt)
    try:
        hooks.log_records("error", 1)
        with pytest.raises(KeyboardInterrupt):
            engine.blocking.generate(PROMPT, SHORT)
    finally:
        logging.getLogger("penstock").removeFilter(interrupt)
    assert len(engine.blocking.generate(PROMPT, SHORT).token_ids) == 8


def test_open_engine_logs_what_it_reserves(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="penstock")
    with make_engine(tiny_model, kv_cache_blocks=40) as engine:
        reserved = engine.info.memory.kv_cache
    [message] = [record.message for record in caplog.records if " loaded: " in record.message]
    assert f", {reserved / 1024:.0f} KiB reserved for a KV cache of 40 blocks (limit " in message
    assert "), no host tier, warm-up " in message


def test_missing_max_tokens_of_a_long_model_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config("llama", max_position_embeddings=8192)
    model = write_checkpoint(tmp_path, config)
    with make_engine(model, max_model_len=8192, kv_cache_blocks=600) as engine:
        for params in ({"max_tokens": 4}, {"max_length": 40}, {"choice": ["a"]}):
            engine.blocking.start_request(PROMPT, **params).cancel()
        assert not [record for record in caplog.records if "max_tokens" in record.message]
        for _ in range(2):
            engine.blocking.start_request(PROMPT).cancel()
    messages = [record.message for record in caplog.records if "max_tokens" in record.message]
    assert messages == [
        f"a request without max_tokens can generate {8192 - len(PROMPT)} tokens: set max_tokens"
    ]


def test_missing_max_tokens_of_a_short_model_is_not_logged(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make_engine(tiny_model) as engine:
        engine.blocking.start_request(PROMPT).cancel()
    assert not caplog.records
