"""All kinds of requests, cancels, pressure, sleep and several engines on the emulated device."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from support.cuda import workload
from support.kernels.emulator import END, needs_emulator, run_program

pytestmark = pytest.mark.timeout(600)  # the first test builds the emulator


def check_mixed(found: dict[str, Any]) -> None:
    assert found["differing"] == []
    texts = found["texts"]
    assert re.fullmatch("(yes|no)( [0-9]{2}){3}", texts["regex"])
    assert json.loads(texts["schema"]).keys() == {"a", "b"}


def check_storm(found: dict[str, Any]) -> None:
    assert found["cancelled"] > 0
    assert found["preemptions"] > 0
    assert found["threads"] == []


@pytest.mark.needs("proc")
@pytest.mark.rare  # each gate runs it with checked kernels
def test_engines_of_one_device_give_the_answers_of_the_cpu() -> None:
    ended = run_program(workload.mixed)
    assert ended.findings == []
    check_mixed(ended.result)


@pytest.mark.rare
def test_engines_with_any_option_give_the_answers_of_the_cpu() -> None:
    ended = run_program(workload.options)
    assert ended.findings == []
    for name, (cpu, *device) in ended.result.items():
        assert device == [cpu] * 2, name
    assert len({str(found) for found in ended.result.values()}) == 3  # plain, int8, and another epsilon


@pytest.mark.needs("proc")
@needs_emulator
def test_engine_that_wakes_gives_the_same_bits_and_uses_graphs() -> None:
    ended = run_program(workload.lives)
    assert ended.findings == []
    found = ended.result
    assert found["same"]
    assert found["device"] == "cuda:0"
    assert found["graphs"] > 20  # of 30 steps
    assert found["steps"] > 0  # in which the emulator forbids allocations and waits
    assert found["early"] > 0  # launches that begin while the kernel before them ends
    calls = dict(found["rows"])
    assert calls["attention"] == 2 * calls["embed"] == 60
    assert found["threads"] == []


@needs_emulator
def test_steps_that_read_embeddings_use_graphs() -> None:
    ended = run_program(workload.embeddings_between)
    assert ended.findings == []
    bits, graphs = zip(*ended.result, strict=True)
    assert bits[0] == bits[1] == bits[2]
    assert min(graphs) > 20  # of 30 steps


@needs_emulator
def test_batches_that_change_in_each_step_make_no_graphs() -> None:
    ended = run_program(workload.changing_batches)
    assert ended.findings == []
    assert ended.result <= 2  # at the begin, where requests arrive one by one


@pytest.mark.needs("proc")
@pytest.mark.rare
def test_storms_of_cancels_under_pressure_leave_nothing() -> None:
    """On each event loop; the memory holds one request or two."""
    ended = run_program(workload.storms, 24, 3)
    assert ended.findings == []
    assert len(ended.result) == 3
    for found in ended.result:
        check_storm(found)
    assert ended.result[0]["swaps"] > 0
    assert ended.result[1]["swaps"] == 0  # computed again


@pytest.mark.needs("signals")
def test_facades_and_server_give_the_answers_of_the_engine() -> None:
    ended = run_program(workload.facades)
    assert set(ended.findings) <= {END}  # of the server's process
    found = ended.result
    devices = [found[f"device of {name}"] for name in ("cuda", "auto", "pipeline", "dashinfer")]
    assert devices == ["cuda:0"] * 4
    texts = [found[name] for name in ("cpu", "cuda", "auto", "pipeline", "server", "dashinfer")]
    assert texts == texts[:1] * 6
    assert found["status"] == 0


@pytest.mark.needs("proc")
@pytest.mark.rare
def test_checked_kernels_find_no_defect_in_a_mixed_workload() -> None:
    ended = run_program(workload.mixed, checked=True)
    assert ended.findings == []
    check_mixed(ended.result)


@pytest.mark.parametrize("kv_type", [pytest.param("auto", marks=pytest.mark.rare), "int8"])
def test_checked_kernels_find_no_defect_with_tensor_cores(kv_type: str) -> None:
    ended = run_program(workload.halves, kv_type, checked=True)
    assert ended.findings == []
    assert ended.result == []


@pytest.mark.needs("proc")
@pytest.mark.rare
def test_checked_kernels_find_no_defect_in_a_storm() -> None:
    ended = run_program(workload.storms, 16, 1, checked=True)
    assert ended.findings == []
    check_storm(ended.result[0])
