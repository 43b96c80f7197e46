"""The archive of compiled kernels: a package with one needs no compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

import penstock
from support import hooks
from support.kernels.emulator import Ended, run_program
from support.paths import ROOT
from support.tools import tool

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(600)  # the first test builds the emulator

ABSENT = "/no/such/libnvrtc.so"
AUTOMATIC = "from support.cuda.memory import automatic; print(automatic())"


@pytest.fixture
def archive(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An archive with a kernel for sm_80, and a process without a compiler."""
    monkeypatch.delenv("PENSTOCK_NVRTC", raising=False)
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "archive"
    monkeypatch.setenv("PENSTOCK_KERNEL_ARCHIVE", str(folder))
    hooks.archive_cuda_kernel("rms_norm.cu", "", "sm_80")
    monkeypatch.setenv("PENSTOCK_NVRTC", ABSENT)
    return folder


@pytest.mark.needs("hooks")
def test_archived_kernel_needs_no_compiler(archive: Path) -> None:
    image = hooks.compile_cuda_kernel("rms_norm.cu", "sm_80")
    (file,) = archive.rglob("*.cubin")
    assert file.read_bytes().endswith(image)
    assert image.startswith(b"\x7fELF")
    assert file.parent.name == "sm_80"
    assert file.parent.parent.name.startswith("cuda1")


@pytest.mark.needs("hooks")
def test_later_minor_versions_use_the_kernels_of_sm_80(archive: Path) -> None:
    image = hooks.compile_cuda_kernel("rms_norm.cu", "sm_80")
    assert hooks.compile_cuda_kernel("rms_norm.cu", "sm_86") == image
    (file,) = archive.rglob("*.cubin")
    assert image in file.read_bytes()


@pytest.mark.needs("hooks")
@pytest.mark.parametrize(("name", "architecture"), [("rms_norm.cu", "sm_90a"), ("copy.cu", "sm_80")])
@pytest.mark.usefixtures("archive")
def test_kernel_outside_the_archive_needs_the_compiler(name: str, architecture: str) -> None:
    with pytest.raises(penstock.GenerationError, match=f"NVRTC is not available: .*{ABSENT}"):
        hooks.compile_cuda_kernel(name, architecture)


@pytest.mark.needs("hooks")
def test_damaged_file_is_compiled_again(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = hooks.compile_cuda_kernel("rms_norm.cu", "sm_80")
    (file,) = archive.rglob("*.cubin")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(penstock.GenerationError, match="NVRTC is not available"):
        hooks.compile_cuda_kernel("rms_norm.cu", "sm_80")
    monkeypatch.delenv("PENSTOCK_NVRTC")
    assert hooks.compile_cuda_kernel("rms_norm.cu", "sm_80") == image


@pytest.mark.needs("hooks", "sources")
def test_other_sources_are_not_in_the_archive(
    archive: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    working_copy = tmp_path / "cuda"
    working_copy.mkdir()
    for file in (ROOT / "cuda").iterdir():
        (working_copy / file.name).write_bytes(file.read_bytes())
    monkeypatch.setenv("PENSTOCK_KERNEL_DIR", str(working_copy))
    assert hooks.compile_cuda_kernel("rms_norm.cu", "sm_80")
    with (working_copy / "common.cuh").open("a") as header:
        header.write("// a change\n")
    with pytest.raises(penstock.GenerationError, match="NVRTC is not available"):
        hooks.compile_cuda_kernel("rms_norm.cu", "sm_80")
    assert len(list(archive.rglob("*.cubin"))) == 1


@pytest.mark.needs("cuda", "hooks", "sources")
@pytest.mark.rare
def test_engine_on_cuda_needs_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    monkeypatch.setenv("PENSTOCK_KERNEL_ARCHIVE", str(archive))

    def run() -> Ended:
        return run_program(AUTOMATIC, PENSTOCK_NVRTC=ABSENT, PENSTOCK_CACHE=str(tmp_path))

    ended = run()
    assert ended.output.splitlines()[-1] == "cpu"
    assert "NVRTC is not available" in ended.errors
    files = [file for file, variant in tool("build_kernels").sources("sm_90a") if not variant]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda file: hooks.archive_cuda_kernel(file, "", "sm_90a"), files))
    ended = run()
    assert ended.output.splitlines()[-1] == "cuda:0"
    assert not list(tmp_path.glob("kernels/*"))


@pytest.mark.needs("sources")
def test_tool_lists_every_file_of_kernels_once() -> None:
    sources = tool("build_kernels").sources("sm_90a")
    files = {path.name for path in (ROOT / "cuda").glob("*.cu")}
    assert {file for file, _ in sources} == files
    assert len(set(sources)) == len(sources)
    assert {("attention.cu", f"bf16,u4,uint4,{size}") for size in (80, 128, 256)} <= set(sources)
    others = tool("build_kernels").sources("sm_80")
    warpgroups = {"attention_warpgroup.cu", "gemm_quantised_warpgroup.cu", "gemm_warpgroup.cu"}
    assert files - {file for file, _ in others} == warpgroups
    # Devices of 8.9 load kernels of sm_80, which has no products of 8-bit floats.
    fp8 = {source for source in sources if source[1].endswith(",fp8")}
    assert fp8
    assert set(others) == {source for source in sources if source[0] not in warpgroups} - fp8


@pytest.mark.needs("sources")
def test_tool_needs_the_core_alone() -> None:
    code = "import sys; sys.modules.update(numpy=None, pytest=None); import build_kernels as tool"
    code += "; print(len(tool.sources('sm_90a')))"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tools")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(tool("build_kernels").sources("sm_90a"))
