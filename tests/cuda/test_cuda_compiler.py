"""The compiler of CUDA kernels: NVRTC of the check dependency group, its errors, and the cache of images."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import penstock
from support import hooks
from support.cuda import memory
from support.kernels.emulator import run_program
from support.paths import ROOT

pytestmark = pytest.mark.timeout(600)  # the first test builds the emulator

KERNEL = """
#include "scale.cuh"
extern "C" __global__ void scale(float* x, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = FACTOR * x[i];
}
"""
COMPILE = """
from support import hooks

hooks.compile_cuda_kernel("scale.cu", "sm_80")
"""
HEADER = "#pragma once\n#define FACTOR 2.0f\n"


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of compiled kernels."""
    monkeypatch.delenv("PENSTOCK_NVRTC", raising=False)
    monkeypatch.delenv("PENSTOCK_KERNEL_DIR", raising=False)
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A working copy of one kernel."""
    folder = tmp_path / "cuda"
    folder.mkdir()
    (folder / "scale.cu").write_text(KERNEL)
    (folder / "scale.cuh").write_text(HEADER)
    monkeypatch.setenv("PENSTOCK_KERNEL_DIR", str(folder))
    return folder


@pytest.fixture
def own_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A copy of the compiler, which is used."""
    library = Path(str(penstock.cuda_info().compiler_path))
    folder = tmp_path / "lib"
    folder.mkdir()
    for file in library.parent.glob("libnvrtc*"):
        shutil.copy(file, folder)
    monkeypatch.setenv("PENSTOCK_NVRTC", str(folder / library.name))
    return folder / library.name


def inode(folder: Path) -> int:
    """The identity of the only file of the cache, which a compilation replaces."""
    (file,) = folder.iterdir()
    return file.stat().st_ino


def run(code: str) -> bytes:
    """The output of a Python process."""
    path = os.pathsep.join([*sys.path, str(ROOT / "tests")])
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, check=True, capture_output=True, timeout=100).stdout


def test_compiler_of_the_dependency_group_is_found() -> None:
    info = penstock.cuda_info()
    assert info.compiler_reason is None
    assert info.compiler_version is not None
    assert int(info.compiler_version.split(".")[0]) >= 12
    assert info.compiler_path is not None
    assert "/nvidia/" in info.compiler_path


@pytest.mark.needs("hooks")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_100a", "sm_120a"])
def test_embedded_kernel_compiles_to_an_image(architecture: str) -> None:
    image = hooks.compile_cuda_kernel("rms_norm.cu", architecture)
    assert image.startswith(b"\x7fELF")
    assert b"rms_norm" in image


@pytest.mark.needs("hooks")
def test_working_copy_is_compiled_instead(sources: Path) -> None:
    assert hooks.cuda_kernels() == [path.name for path in sources.glob("*.cu")]
    assert b"scale" in hooks.compile_cuda_kernel("scale.cu", "sm_80")


@pytest.mark.needs("hooks")
def test_error_names_the_file_and_the_line(sources: Path, cache: Path) -> None:
    (sources / "scale.cu").write_text(KERNEL.replace("FACTOR *", "MISSING *"))
    with pytest.raises(penstock.GenerationError, match=r"scale\.cu\(5\): error: .*MISSING"):
        hooks.compile_cuda_kernel("scale.cu", "sm_80")
    (sources / "scale.cu").write_text(KERNEL)
    (sources / "scale.cuh").write_text(HEADER + "int x = ;\n")
    with pytest.raises(penstock.GenerationError, match=r"scale\.cuh\(3\): error: "):
        hooks.compile_cuda_kernel("scale.cu", "sm_80")
    assert list(cache.iterdir()) == []


@pytest.mark.needs("hooks")
def test_unknown_architecture_and_kernel_are_errors() -> None:
    with pytest.raises(penstock.GenerationError, match="sm_1"):
        hooks.compile_cuda_kernel("rms_norm.cu", "sm_1")
    with pytest.raises(penstock.GenerationError, match="null character"):
        hooks.compile_cuda_kernel("rms_norm.cu", "sm_\0")
    with pytest.raises(penstock.GenerationError, match=r"there is no kernel none\.cu"):
        hooks.compile_cuda_kernel("none.cu", "sm_80")


@pytest.mark.needs("hooks")
def test_folder_of_kernels_that_does_not_exist_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_KERNEL_DIR", "/no/such/folder")
    with pytest.raises(penstock.GenerationError, match="kernels in /no/such/folder cannot be read"):
        hooks.compile_cuda_kernel("rms_norm.cu", "sm_80")


def test_wrong_compiler_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_NVRTC", "libc.so.6")
    info = penstock.cuda_info()
    assert info.compiler_reason is not None
    assert "libc.so.6 (it has no function nvrtcVersion)" in info.compiler_reason
    assert (info.compiler_version, info.compiler_path) == (None, None)


def test_compiler_of_the_variable_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    path = penstock.cuda_info().compiler_path
    assert path is not None
    monkeypatch.setenv("PENSTOCK_NVRTC", path)
    monkeypatch.setattr("penstock._cuda._PACKAGES", {})
    assert penstock.cuda_info().compiler_path == path


@pytest.mark.needs("hooks")
@pytest.mark.usefixtures("sources")
def test_image_is_compiled_once(cache: Path) -> None:
    image = hooks.compile_cuda_kernel("scale.cu", "sm_80")
    first = inode(cache)
    assert hooks.compile_cuda_kernel("scale.cu", "sm_80") == image
    assert inode(cache) == first
    assert cache.stat().st_mode & 0o777 == 0o700


@pytest.mark.needs("hooks")
def test_change_of_any_input_compiles_again(sources: Path, cache: Path) -> None:
    hooks.compile_cuda_kernel("scale.cu", "sm_80")
    hooks.compile_cuda_kernel("scale.cu", "sm_90a")
    assert len(list(cache.iterdir())) == 2
    for name in ("scale.cu", "scale.cuh"):
        with (sources / name).open("a") as file:
            file.write("// a comment\n")
        hooks.compile_cuda_kernel("scale.cu", "sm_80")
    assert len(list(cache.iterdir())) == 4


@pytest.mark.needs("hooks", "sources")
@pytest.mark.usefixtures("sources")
def test_other_file_of_the_compiler_compiles_again(own_compiler: Path, cache: Path) -> None:
    counts = []
    for seconds in (1e9, 1e9, 1.1e9):
        os.utime(own_compiler, (seconds, seconds))
        run(COMPILE)
        counts.append(len(list(cache.iterdir())))
    assert counts == [1, 1, 2]


@pytest.mark.needs("hooks", "sources")
@pytest.mark.usefixtures("sources")
def test_builtins_beside_the_compiler_are_found(own_compiler: Path, cache: Path) -> None:
    library = own_compiler.read_bytes()
    assert library.count(b"$ORIGIN\0") == 1
    own_compiler.write_bytes(library.replace(b"$ORIGIN\0", b"/absent\0"))  # the path in which it searches
    run(COMPILE)
    assert len(list(cache.iterdir())) == 1


@pytest.mark.needs("hooks")
@pytest.mark.usefixtures("sources")
def test_damaged_image_is_compiled_again(cache: Path) -> None:
    image = hooks.compile_cuda_kernel("scale.cu", "sm_80")
    (file,) = cache.iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    assert hooks.compile_cuda_kernel("scale.cu", "sm_80") == image
    assert file.read_bytes().endswith(image)


@pytest.mark.needs("devices", "hooks", "resource", "sources")
def test_image_that_cannot_be_opened_is_kept(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    code = """
import contextlib, os, resource
import penstock
from support import hooks

hooks.compile_cuda_kernel("rms_norm.cu", "sm_80")
hooks.cuda_folders = list  # the variable names the compiler
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
with contextlib.suppress(OSError):
    while True:
        os.open("/dev/null", os.O_RDONLY)
with contextlib.suppress(penstock.GenerationError):  # the compiler may need a file
    hooks.compile_cuda_kernel("rms_norm.cu", "sm_80")
"""
    hooks.compile_cuda_kernel("rms_norm.cu", "sm_80")
    first = inode(cache)
    monkeypatch.setenv("PENSTOCK_NVRTC", str(penstock.cuda_info().compiler_path))
    run(code)
    assert inode(cache) == first


@pytest.mark.needs("hooks", "permissions")
@pytest.mark.usefixtures("sources")
def test_folder_that_others_may_change_is_not_used(cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    assert hooks.compile_cuda_kernel("scale.cu", "sm_80").startswith(b"\x7fELF")
    assert list(cache.iterdir()) == []


@pytest.mark.needs("hooks", "sources")
@pytest.mark.usefixtures("sources")
def test_processes_that_compile_at_once_get_the_same_image(cache: Path) -> None:
    code = (
        "import sys; from support import hooks\n"
        "sys.stdout.buffer.write(hooks.compile_cuda_kernel('scale.cu', 'sm_80'))"
    )
    with ThreadPoolExecutor(3) as pool:
        images = set(pool.map(run, [code] * 3))
    assert images == {hooks.compile_cuda_kernel("scale.cu", "sm_80")}
    assert len(list(cache.iterdir())) == 1


@pytest.fixture
def markers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder of files with the names of the kernels, which have a variable of their name and no kernel."""
    folder = tmp_path / "markers"
    folder.mkdir()
    for name in hooks.cuda_kernels():
        (folder / name).write_text(f"__device__ int marker_{Path(name).stem} = 1;\n")
    monkeypatch.setenv("PENSTOCK_KERNEL_DIR", str(folder))
    return folder


@pytest.mark.needs("cuda", "hooks")
@pytest.mark.timeout(600)  # the first test builds the emulator
def test_several_threads_compile_the_images_of_one(markers: Path, tmp_path: Path) -> None:
    images = []
    for threads in (1, 4):
        folder = tmp_path / f"cache of {threads}"
        (error,) = run_program(memory.compiled, threads, PENSTOCK_CACHE=str(folder)).result
        assert "cuModuleGetFunction failed with CUDA_ERROR_NOT_FOUND" in error
        images.append({file.name: file.read_bytes() for file in (folder / "kernels").iterdir()})
    assert images[0] == images[1]
    assert 10 < len(images[0]) <= len(list(markers.iterdir()))


@pytest.mark.needs("cuda", "hooks")
@pytest.mark.timeout(600)
def test_error_of_one_of_several_compiling_threads_is_reported(markers: Path, tmp_path: Path) -> None:
    (markers / "rope_kv.cu").write_text("error\n")
    (error,) = run_program(memory.compiled, 4, PENSTOCK_CACHE=str(tmp_path / "others")).result
    assert "rope_kv.cu(1): error" in error
    assert len(list((tmp_path / "others" / "kernels").iterdir())) > 10
