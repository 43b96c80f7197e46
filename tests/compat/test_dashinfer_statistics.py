"""Numbers and descriptions of engines and models in the DashInfer API."""

from __future__ import annotations

import logging
import re
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

import penstock
from penstock.compat.dashinfer.allspark.engine import Engine
from penstock.compat.dashinfer.allspark.statistics import profile_text
from support.compat.dashinfer import GREEDY, NAME, PROMPT, SUCCESS, generate, held, install, native, start

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def engine(tiny_model: Path) -> Iterator[Engine]:
    engine = Engine()
    install(engine, tiny_model, max_num_seqs=2, kv_cache_blocks=64)
    yield engine
    engine.stop_model(NAME)
    engine.release_model(NAME)


def test_engine_logs_its_version_when_it_is_created(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "penstock.dashinfer"):
        engine = Engine()
    assert caplog.messages == [f"AllSpark Init with Version: {engine.get_version_full()}"]
    assert re.fullmatch(r"\d+\.\d+\.\d+/\(GitSha1:\w+\)", engine.get_version_full())
    assert engine.get_version_full().startswith(penstock.__version__)
    assert engine.get_version_full() in repr(engine)
    assert engine.get_rank_id() == 0
    assert engine.is_allspark_work_as_service() is False


def test_every_number_of_a_model_is_alive(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    engine.get_as_engine_stat(NAME)
    before = engine.get_as_engine_stat(NAME)
    assert before.model_name == NAME
    assert before.total_token == before.free_token == 64 * 16
    assert before.used_device_memory_pool_size > 0
    assert before.total_device_memory_pool_size > before.used_device_memory_pool_size
    monkeypatch.undo()
    ids = [1 + index % 500 for index in range(100)]
    generate(engine, ids, {"max_length": 140, "early_stopping": False})
    generate(engine, ids, {"max_length": 140, "early_stopping": False})
    after = engine.get_as_engine_stat(NAME)
    assert after.total_generated_token == 80
    assert after.total_prefill_token == 100 + 100 - after.prefix_cache_hit_token
    assert after.prefix_cache_hit_token == 96
    assert after.prefix_cache_miss_token == 104
    assert after.prefix_cache_hit_rate == pytest.approx(0.48)
    assert after.prefix_cache_miss_rate == pytest.approx(0.52)
    with held(engine):
        for _ in range(4):
            start(engine)
        wait = engine.get_as_engine_stat(NAME)
        assert wait.running_request + wait.pending_request >= 1
        assert wait.pending_request == wait.pendding_request


def test_rates_are_those_since_an_earlier_snapshot(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    moment = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: moment)
    model = engine._models[NAME]
    assert model is not None
    model.recorder.__init__(NAME)  # type: ignore[misc]
    generate(engine)
    moment = 104.0
    statistics = engine.get_as_engine_stat(NAME)
    assert statistics.generate_token_persec == 40 / 4
    assert statistics.process_token_persec == len(PROMPT) / 4
    moment = 104.5  # too early for another average
    assert engine.get_as_engine_stat(NAME).generate_token_persec == 40 / 4
    moment = 106.0
    assert engine.get_as_engine_stat(NAME).generate_token_persec == 0


def test_numbers_as_a_dict_are_texts(engine: Engine) -> None:
    statistics = engine.get_as_engine_stat(NAME)
    numbers = statistics.dict()
    assert "model_name" not in numbers
    assert all(isinstance(value, str) for value in numbers.values())
    assert (numbers["total_span"], numbers["used_span"], numbers["free_span"]) == ("64", "0", "64")
    assert (numbers["span_size"], float(numbers["token_usage_percentage"])) == ("16", 0.0)
    text = statistics.ToString()
    assert text.startswith("model_name: tiny, ")
    assert all(f"{key}: {value}" in text for key, value in numbers.items())


def test_used_blocks_are_those_of_running_requests(engine: Engine) -> None:
    _handle, queue = start(engine, [3] * 40, {"max_length": 500, "early_stopping": False})
    queue.Get()
    with held(engine):
        statistics = engine.get_as_engine_stat(NAME)
        if queue.GeneratedLength() < 400:  # it has not ended
            assert statistics.used_span >= 3
            assert statistics.free_token == statistics.total_token - 16 * statistics.used_span
            assert 0 < statistics.token_usage_percentage < 1


def test_model_info_names_architecture_inputs_and_outputs(engine: Engine) -> None:
    text = engine.get_model_info(NAME)
    assert "LlamaForCausalLM" in text
    assert "input_ids: int64, shape [1, n], n from 1 to 510" in text
    assert "generated_ids: int64" in text


@pytest.mark.parametrize("value", ["ON", "on"])
def test_profile_is_a_table_if_profiling_is_on(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("AS_PROFILE", value)
    engine = Engine()
    install(engine, tiny_model)
    generate(engine)
    text = engine.get_op_profiling_info(NAME)
    assert text == profile_text(native(engine).profile())
    for name in (
        "*** forward ***",
        "*** reshape ***",
        "*** alloc ***",
        "min_ms      max_ms      ave_ms",
        "linear",
        "attention",
    ):
        assert name in text
    shares = [float(share) for share in re.findall(r"([0-9.]+)%", text)]
    assert sum(shares) == pytest.approx(100, abs=0.1)


def test_profile_is_empty_if_profiling_is_off(engine: Engine) -> None:
    generate(engine)
    assert engine.get_op_profiling_info(NAME) == ""


def test_profile_without_measured_time_has_shares_of_zero() -> None:
    row = SimpleNamespace(operation="linear", calls=2, seconds=0.0, min_seconds=0.0, max_seconds=0.0)
    assert "0.00%" in profile_text([row])  # type: ignore[list-item]


def test_requests_at_the_limits_take_no_more_memory(tiny_model: Path) -> None:
    engine = Engine()
    install(engine, tiny_model, max_num_seqs=4, max_model_len=128, kv_cache_blocks=32)
    reserved = native(engine).info.memory
    idle = engine.get_as_engine_stat(NAME)
    total = idle.total_device_memory_pool_size
    assert total == reserved.weights + reserved.workspace + reserved.inputs + reserved.kv_cache
    for burst in range(10):
        started = [
            start(engine, [1 + (burst + index) % 500] * (120, 1)[index % 2], {**GREEDY, "max_length": 128})
            for index in range(10)
        ]
        busy = engine.get_as_engine_stat(NAME)
        assert idle.used_device_memory_pool_size <= busy.used_device_memory_pool_size <= total
        assert engine.sync_request(NAME, None) is SUCCESS
        assert [queue.GeneratedLength() for _handle, queue in started] == [8, 127] * 5
        for handle, _queue in started:
            assert engine.release_request(NAME, handle) is SUCCESS
        after = engine.get_as_engine_stat(NAME)
        assert after.used_device_memory_pool_size == idle.used_device_memory_pool_size
        assert after.total_device_memory_pool_size == total
    assert native(engine).info.memory == reserved
