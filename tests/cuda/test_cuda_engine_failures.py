"""Calls of the driver that fail are errors of the engine. Nothing leaks, and the next engine works."""

from __future__ import annotations

from typing import Any

import pytest

from emu.client import OUT_OF_MEMORY
from support.cuda import failures
from support.kernels.emulator import run_program

pytestmark = [pytest.mark.timeout(600), pytest.mark.needs("proc")]

#: The errors of an engine that cannot start.
START_ERRORS = {"DeviceUnavailableError", "OutOfMemoryError", "PenstockError"}
#: Calls that are used often enough that their absence means that a program has not tried them.
IN_START = {"cuInit", "cuMemAlloc_v2", "cuMemHostAlloc", "cuModuleLoadData", "cuStreamCreateWithPriority"}
IN_STEPS = {"cuMemcpyHtoDAsync_v2", "cuLaunchKernelEx", "cuEventRecord"}
#: Calls that free something, and the one before them: their errors are logged.
QUIET = (*failures.ENDS, "cuCtxGetCurrent")

#: A thread calls them when it starts, which may be late: then a step seems to use them. They also restore
#: what the thread of a caller had, and such an error is logged.
OF_THREADS = ("cuCtxSetCurrent", "cuThreadExchangeStreamCaptureMode")

#: The driver ends a capture also if it reports an error; here, the capture stays open.
STAYS_OPEN = "cuStreamEndCapture"


def name_in_message(call: str) -> str:
    """The function without the suffix of its version or variant."""
    return call.removesuffix("_v2").removesuffix("WithPriority")


def is_quiet(call: str) -> bool:
    return any(end in call for end in QUIET)


def check_stopped(error: list[str], call: str) -> None:
    kind, message = error
    assert kind == "EngineStoppedError"
    assert name_in_message(call) in message
    assert "CUDA_ERROR_LAUNCH_FAILED" in message


def test_call_that_fails_in_the_start_is_a_typed_error() -> None:
    ended = run_program(failures.fail_in_start)
    assert ended.findings == []
    tried: dict[str, Any] = ended.result
    assert {name.split()[0] for name in tried} >= IN_START
    for name, (error, findings, threads) in tried.items():
        call = name.split()[0]
        assert threads == [], name
        if is_quiet(call):
            assert all(finding.startswith("leak at the release") for finding in findings), name
            continue
        assert findings == [] or call == STAYS_OPEN, name
        if call in OF_THREADS and not error:
            continue
        kind, message = error
        assert kind in START_ERRORS, (name, error)
        assert name_in_message(call) in message, (name, error)
        assert message.count("could not be started") == (kind == "PenstockError"), message
        has_no_memory = name.endswith(f" {OUT_OF_MEMORY}")
        assert (kind == "OutOfMemoryError") == has_no_memory, (name, error)
        if has_no_memory and call == "cuMemAlloc_v2":
            assert "settings that fit" in message


def test_call_that_fails_in_a_step_ends_the_engine_only() -> None:
    ended = run_program(failures.fail_in_step)
    assert ended.findings == []
    assert ended.result.keys() >= IN_STEPS
    for call, (errors, findings, threads) in ended.result.items():
        assert threads == [], call
        if is_quiet(call) or call in OF_THREADS:
            continue
        assert findings == [] or call == STAYS_OPEN, call
        if call in ("cuEventQuery", "cuEventSynchronize") and not errors:
            continue  # only this call has failed; a lost device also fails the one that reads the results
        assert len(errors) == 3, call  # two requests, and a later one
        for error in errors:
            check_stopped(error, call)


def test_engine_without_memory_for_graphs_launches_kernels() -> None:
    ended = run_program(failures.refuse_graphs)
    assert ended.findings == []
    (tokens, (made, launched), _), *refused = ended.result
    assert made > 0
    assert launched > 20
    # A graph that cannot be made is not launched; one that cannot be launched first is not kept.
    assert [launches for _, (_, launches), _ in refused] == [0, 1]
    assert all((same, graphs > 0) == (tokens, True) for same, (graphs, _), _ in refused)
    assert all(findings == [] for *_, findings in ended.result)


def test_step_that_panics_in_a_capture_fails_its_request_only() -> None:
    ended = run_program(failures.panic_in_capture)
    assert ended.findings == []
    (kind, message), captures, expected, found, *rest = ended.result
    assert (kind, "was to fail its step" in message) == ("GenerationError", True)
    assert captures == [0, 1, 2]
    assert found == expected
    assert rest == [[], []]


def test_step_without_memory_for_embeddings_fails_alone() -> None:
    ended = run_program(failures.refuse_embeddings)
    assert ended.findings == []
    (before, after), errors, captures, *rest = ended.result
    assert before == after
    assert [("memory" in error) for error in errors] == [True] * 6
    assert captures > 0
    assert rest == [[], []]


def test_captures_that_another_thread_ends_become_launches() -> None:
    ended = run_program(failures.end_captures)
    assert ended.findings == []
    (calm, graphs, *others), *rest = ended.result
    assert graphs > 20
    assert others == [calm, 0, calm, 0, *[calm] * 5]
    assert rest == [[], []]


def test_engine_works_while_another_library_captures_a_graph() -> None:
    ended = run_program(failures.capture_elsewhere)
    assert ended.findings == []
    expected, found, *rest = ended.result
    assert found == expected
    assert rest == [[], []]


def test_contexts_of_callers_and_engines_are_apart() -> None:
    ended = run_program(failures.leave_context)
    assert ended.findings == []
    before, opened, expected, found, failed = ended.result
    assert (before, opened, failed) == (False, False, False)
    assert found == expected


def test_waits_that_fail_leave_no_ticket_asleep() -> None:
    ended = run_program(failures.fail_waits)
    assert ended.findings == []
    expected, found, count, findings, threads = ended.result
    assert found == expected
    assert count > 0
    assert (findings, threads) == ([], [])


def test_device_is_used_again_after_a_kernel_read_a_bad_address() -> None:
    ended = run_program(failures.lose_context)
    errors, threads = ended.result
    assert [kind for kind, _ in errors] == ["EngineStoppedError"] * 2
    assert all("CUDA_ERROR_ILLEGAL_ADDRESS" in message for _, message in errors)
    assert threads == []


def test_engine_on_a_device_that_is_lost_can_be_closed() -> None:
    ended = run_program(failures.lose_device)
    error, threads = ended.result
    check_stopped(error, "cu")
    assert threads == []
