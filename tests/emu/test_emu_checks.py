"""The emulated CUDA driver reports defects of programs and kernels."""

from __future__ import annotations

import re

import pytest

from emu.client import ILLEGAL_ADDRESS, LAUNCH_FAILED
from support.kernels.emulator import run

pytestmark = pytest.mark.timeout(600)  # the first test builds the emulator

# ---- Defects of programs.

#: A dependent launch that does not wait.
EARLY = [
    "access before dependency_wait: scale, read of 4 bytes of device memory .* at sound.cu:LINE",
    "kernel failed: kernel scale, .*: a block of a dependent launch ends without dependency_wait",
]

#: Defects that only instrumented kernels show, and the reports.
CHECKED = {
    # The operation that is executed second is reported.
    "missing_wait": ["not ordered after a (read|write) of another stream: .* of device memory at 0x0.*"],
    "reused_buffer": ["not ordered after a (read|write) of another stream: .* of device memory at 0x0.*"],
    "graph_without_edge": [
        "not ordered after a write of another stream: saxpy, read of 4 bytes of .* at sound.cu:LINE"
    ],
    "early_read_by_dependent_launch": EARLY,
    "early_read_in_a_graph": EARLY,
    "never_written": [
        "read of memory that was never written: saxpy, read of 4 bytes of device memory .* at sound.cu:LINE"
    ],
    "small_grid": [
        "read of memory that was never written: copy to the host, read of 928 bytes of device memory .*"
    ],
    "out_of_bounds": [
        "out of bounds: saxpy, read of 4 bytes of device memory .* at sound.cu:LINE",
        "out of bounds: saxpy, read of 4 bytes of device memory .* at sound.cu:LINE",
        "out of bounds: saxpy, write of 4 bytes of device memory .* at sound.cu:LINE",
    ],
    "region_released": [
        "use after free: saxpy, read of 4 bytes of device memory at 0x0 at sound.cu:LINE",
    ],
    "region_unwritten": [
        "read of memory that was never written: saxpy, read of 4 bytes of .* at sound.cu:LINE",
    ],
    "region_outside": [f"region outside of device memory: {1 << 60} bytes"],
}

#: Defects that all kernels show.
ALWAYS = {
    "early_free": ["device memory freed before the host waited for its users: 4000 bytes"],
    "double_free": [
        "free of an invalid pointer: freed before",
        "free of an invalid pointer: not an allocation",
    ],
    "changed_source": ["pinned memory changed before the host waited for the copy: 4000 bytes"],
    "work_in_step": [
        "call inside a step: cuStreamSynchronize",
        "call inside a step: cuMemAlloc_v2",
        "call inside a step: cuMemFree_v2",
    ],
    "leaks": [
        f"leak at the release of the context: {leak}"
        for leak in (
            *("2 device allocations", "1 pinned allocations", "1 streams", "1 events", "1 modules"),
            *("1 graphs", "1 executable graphs"),
        )
    ],
}


def assert_findings(findings: list[str], patterns: list[str]) -> None:
    patterns = [pattern.replace(".cu:LINE", r"\.cu:\d+") for pattern in patterns]
    assert len(findings) == len(patterns), findings
    for finding, pattern in zip(findings, patterns, strict=True):
        assert re.fullmatch(pattern, finding), finding


@pytest.mark.parametrize("scenario", CHECKED)
def test_defect_is_found_with_checked_kernels(scenario: str) -> None:
    assert_findings(run(scenario, checked=True).findings, CHECKED[scenario])


@pytest.mark.parametrize("delay", ["200", "2000"])
@pytest.mark.parametrize("scenario", ["missing_wait", "reused_buffer", "graph_without_edge"])
def test_missing_order_is_found_in_every_interleaving(scenario: str, delay: str) -> None:
    assert_findings(run(scenario, checked=True, EMU_DELAY_US=delay).findings, CHECKED[scenario])


@pytest.mark.parametrize("checked", [False, True], ids=["plain", "checked"])
@pytest.mark.parametrize("scenario", ALWAYS)
def test_defect_is_found_with_all_kernels(scenario: str, *, checked: bool) -> None:
    assert_findings(run(scenario, checked=checked).findings, ALWAYS[scenario])


@pytest.mark.parametrize("checked", [False, True], ids=["plain", "checked"])
@pytest.mark.parametrize("scenario", ["use_after_free", "bad_pointer"])
def test_invalid_address_is_an_error_of_the_stream(scenario: str, *, checked: bool) -> None:
    outcome = run(scenario, checked=checked)
    assert outcome.result == ILLEGAL_ADDRESS
    assert "illegal address" in outcome.findings[-1]


def test_host_pointer_in_a_checked_kernel_is_an_error() -> None:
    outcome = run("host_pointer", checked=True)
    assert outcome.result == ILLEGAL_ADDRESS
    place = r"kernel saxpy, block \(0,0,0\), thread \(0,0,0\): read of host memory at \w+ at sound.cu:LINE"
    assert_findings(outcome.findings, [f"kernel failed: {place}"])


def test_result_that_is_read_too_early_is_undefined() -> None:
    assert run("early_read").result == ["a5a5a5a5", "0000803f"]  # then 1.0


# ---- Defects of kernels.

#: Defects that only instrumented kernels show: kinds of findings, each at a line of the kernel.
KERNELS_CHECKED = {
    "sums_without_barrier": {"read of shared memory that was never written", "race in shared memory"},
    "exchange_without_syncwarp": {"race in shared memory"},
    "copy_without_wait": {"read of shared memory that was never written"},
    "copy_into_used_stage": {"race in shared memory", "read of shared memory that was never written"},
    "product_of_unseen_tile": {"read by wgmma before products_see_writes and a barrier"},
    "product_of_tile_seen_late": {"read by wgmma before products_see_writes and a barrier"},
    "product_of_used_tile": {
        "race in shared memory",
        "read by wgmma before products_see_writes and a barrier",
    },
    "shared_never_written": {"read of shared memory that was never written"},
    "histogram_without_atomics": {"race in device memory"},
}

#: Defects that end a kernel.
KERNELS_FAIL = {
    "copy_left_pending": (LAUNCH_FAILED, "an asynchronous copy is pending at the end"),
    "product_of_used_registers": (
        ILLEGAL_ADDRESS,
        r"wgmma: registers of an operand were written before the wait at warpgroup\.cuh:\d+",
    ),
    "product_without_begin": (LAUNCH_FAILED, "wgmma before begin_products"),
    "product_left_pending": (LAUNCH_FAILED, "a product of tiles is pending at the end"),
    "copy_misaligned": (
        ILLEGAL_ADDRESS,
        "cp.async: an address is not aligned to 16 bytes at planted.cu:LINE",
    ),
    "divergent_barrier": (
        LAUNCH_FAILED,
        ".*planted.cu:LINE: the threads of a block arrive at different barriers; .*planted.cu:LINE",
    ),
    "launch_before_wait": (LAUNCH_FAILED, "dependency_launch before dependency_wait"),
    "block_without_wait": (LAUNCH_FAILED, "a block of a dependent launch ends without dependency_wait"),
    "divergent_shuffle": (
        LAUNCH_FAILED,
        ".*: the lanes of a warp arrive at different operations or with different masks; .*planted.cu:LINE",
    ),
    "lane_outside_of_mask": (LAUNCH_FAILED, ".*planted.cu:LINE: a lane that is not in the mask takes part"),
    "shuffle_from_absent_lane": (LAUNCH_FAILED, "shuffle from lane 20, which does not take part"),
    "deadlock": (
        LAUNCH_FAILED,
        "deadlock: .* from thread 0: warp at .*planted.cu:LINE; from thread 1: barrier at .*planted.cu:LINE;",
    ),
    "deep_recursion": (ILLEGAL_ADDRESS, "the stack of 64 KiB is exhausted at .*"),
}

SOUND = ["row_sums", "row_sums_dynamic", "staged_copy", "histogram"]


@pytest.mark.parametrize("kernel", KERNELS_CHECKED)
def test_defect_of_a_kernel_is_found_when_it_is_checked(kernel: str) -> None:
    findings = run("kernel", kernel, checked=True).findings
    assert {finding.partition(":")[0] for finding in findings} == KERNELS_CHECKED[kernel]
    place = r"(planted\.cu|warpgroup\.cuh):\d+"
    assert all(re.fullmatch(rf".*: {kernel}, .* at {place}", finding) for finding in findings)


@pytest.mark.parametrize("checked", [False, True], ids=["plain", "checked"])
@pytest.mark.parametrize("kernel", KERNELS_FAIL)
def test_defect_of_a_kernel_ends_it_with_an_error(kernel: str, *, checked: bool) -> None:
    code, reason = KERNELS_FAIL[kernel]
    outcome = run("kernel", kernel, checked=checked)
    assert outcome.error is not None
    assert outcome.error[1] == code
    place = rf"kernel failed: kernel {kernel}, block \(\d,0,0\), thread \(\d+,0,0\): "
    assert_findings(outcome.findings, [place + reason])


@pytest.mark.parametrize(("kernel", "alignment"), [("read_misaligned", 16), ("write_misaligned", 8)])
def test_misaligned_vector_access_of_a_checked_kernel_fails(kernel: str, alignment: int) -> None:
    outcome = run("kernel", kernel, checked=True)
    assert outcome.error is not None
    assert outcome.error[1] == ILLEGAL_ADDRESS
    place = rf"kernel failed: kernel {kernel}, block \(0,0,0\), thread \(0,0,0\): "
    reason = rf"the address 0x\w+ is not aligned to {alignment} bytes at planted.cu:LINE"
    assert_findings(outcome.findings, [place + reason])


def test_read_behind_dynamic_shared_memory_is_found() -> None:
    outcome = run("kernel", "shared_out_of_bounds", checked=True)
    assert outcome.error is not None
    assert re.search(r"thread \(31,0,0\): read of host memory at \w+ at planted\.cu", outcome.findings[-1])


@pytest.mark.parametrize("order", ["0", "1", "7", "8"])
@pytest.mark.parametrize("kernel", SOUND)
def test_sound_kernel_has_one_result_in_every_order(kernel: str, order: str) -> None:
    outcome = run("kernel", kernel, checked=True, EMU_ORDER=order)
    assert outcome.findings == []
    assert outcome.result == run("kernel", kernel).result


def test_racy_kernel_has_other_results_in_other_orders() -> None:
    ascending, descending = (run("kernel", "sums_without_barrier", EMU_ORDER=order).result for order in "01")
    assert ascending != descending
    assert descending == run("kernel", "row_sums").result
