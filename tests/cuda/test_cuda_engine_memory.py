"""The memory that a CUDA engine takes of the host and of the device, and its errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.cuda import memory
from support.kernels.emulator import needs_emulator, run_program

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(600)  # the first test builds the emulator


def test_host_counts_the_page_locked_memory_of_an_engine() -> None:
    found = run_program(memory.account).result
    assert found["host_cache"] > 0
    assert found["reserved"] == found["inputs"] + found["host_cache"]
    assert (found["after"], found["left"]) == (0, 0)
    buffers, tier = found["errors"]
    assert "buffers of the host for the device (" in buffers
    assert "of the host that are available" in buffers
    assert tier.startswith("host_cache_blocks=4 exceeds the ")
    assert "that other programs, engines and buffers of the host leave, which hold 3 blocks" in tier


@needs_emulator
def test_memory_ratio_is_a_share_of_the_free_memory() -> None:
    first, second = run_program(memory.shares).result
    assert 0.3 * first < second < 0.55 * first


@needs_emulator
def test_parts_of_a_step_have_bounded_memory_and_the_same_bits() -> None:
    (whole, whole_logprobs, calls), (chunked, chunked_logprobs, _) = run_program(memory.long_prompts).result
    assert calls == [0, 0]
    assert (whole, whole_logprobs) == (chunked, chunked_logprobs)
    assert len(whole) == 8


@needs_emulator
def test_kernels_that_do_not_fit_are_an_error_of_memory() -> None:
    ended = run_program(memory.modules)
    assert ended.findings == []
    assert len(ended.result) == 2
    for kind, message, allocated in ended.result.values():
        assert allocated == 0, "kernels are loaded before the rest of the memory is taken"
        assert kind == "OutOfMemoryError", message
        assert message.startswith("a module of kernels needs ")
        assert "cuModuleLoadData failed with CUDA_ERROR_OUT_OF_MEMORY" in message


@needs_emulator
def test_model_too_large_for_the_chosen_device_names_the_cpu() -> None:
    automatic, chosen = run_program(memory.too_large, EMU_MEMORY=str(1 << 20)).result
    assert "exceed the memory limit of " in automatic
    assert automatic.endswith("; device='auto' is a CUDA device here, and device='cpu' is another choice")
    assert automatic.startswith(chosen)
    assert "device=" not in chosen


def test_heads_without_kernels_are_refused_by_name() -> None:
    device, kv_type = run_program(memory.refused).result
    assert device.startswith("device=cuda is not allowed: it must be 'cpu' for heads of 320 dimensions")
    assert kv_type.startswith("kv_cache_dtype=uint4 is not allowed: it must be another type on CUDA")


def test_auto_is_the_cpu_for_heads_without_kernels() -> None:
    ended = run_program("from support.cuda.memory import automatic; print(automatic(head_dim=320))")
    assert ended.output.splitlines()[-1] == "cpu"
    (line,) = [line for line in ended.errors.splitlines() if "is the CPU" in line]
    assert line.startswith("WARNING device='auto' is the CPU: device=cuda is not allowed: it must be 'cpu'")
    assert "heads of 320 dimensions" in line


def test_auto_is_the_cpu_if_the_kernels_do_not_compile(tmp_path: Path) -> None:
    for name in ("embedding.cu", "rms_norm.cu"):
        (tmp_path / name).write_text("error\n")
    ended = run_program(
        "from support.cuda.memory import automatic; print(automatic())", PENSTOCK_KERNEL_DIR=str(tmp_path)
    )
    assert ended.output.splitlines()[-1] == "cpu"
    (line,) = [line for line in ended.errors.splitlines() if "is the CPU" in line]
    assert line.startswith("WARNING device='auto' is the CPU: device='cuda:0' cannot be used: ")
    assert "could not be started" not in line
