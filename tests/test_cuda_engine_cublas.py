"""deterministic=False: cuBLASLt multiplies, here a stand-in on the emulated device."""

from __future__ import annotations

import importlib.metadata
import json
from typing import TYPE_CHECKING, Any

import pytest

import penstock
from emu import build
from support import cuda, cuda_cublas
from support.checkpoints import make_config
from support.emulator import Ended, run_program

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.timeout(600)  # the first test builds the emulator
EMULATED = pytest.mark.skipif(cuda.ON_GPU, reason="needs the stand-in of cuBLASLt")

#: Biases, additions to residuals, and rows of a multiple of 16 bytes.
CONFIGS = {
    "bfloat16": make_config("qwen2", dtype="bfloat16"),
    "float16": make_config("llama", dtype="float16", intermediate_size=104),
}
#: Rows of products that are not a multiple of 16 bytes.
UNALIGNED = make_config("llama", dtype="bfloat16", intermediate_size=333, hidden_size=60, head_dim=20)
LIMITS = {"bfloat16": 3e-2, "float16": 4e-3}


def run(
    program: Callable[..., object],
    config: dict[str, Any],
    *arguments: object,
    checked: bool = False,
    **environment: str,
) -> Ended:
    ended = run_program(program, json.dumps(config), *arguments, checked=checked, **environment)
    assert ended.findings == []
    return ended


@pytest.mark.parametrize("dtype", CONFIGS)
def test_products_of_cublas_have_nearly_the_values_of_the_cpu(dtype: str) -> None:
    if cuda.ON_GPU and (reason := penstock.cuda_info().cublas_reason):
        pytest.skip(reason)
    found = run(cuda_cublas.compare, CONFIGS[dtype], "varying").result
    assert all(result["logits"] < LIMITS[dtype] for result in found["differences"]), found
    assert not found["deterministic"]
    # The stand-in has other bits for other numbers of rows, so it was used.
    assert cuda.ON_GPU or not found["same_bits"]


@EMULATED
def test_deterministic_engine_does_not_use_cublas() -> None:
    config = CONFIGS["bfloat16"]
    found = run(cuda_cublas.compare, config, "deterministic", EMU_CUBLAS_FAULT="cublasLtCreate").result
    assert found["deterministic"]
    assert found["same_bits"]


@EMULATED
@pytest.mark.parametrize("name", ["no algorithm", "rows that are not aligned"])
def test_kernels_compute_products_that_cublas_does_not(name: str) -> None:
    config = UNALIGNED if name.startswith("rows") else CONFIGS["bfloat16"]
    unsupported = "0" if name.startswith("rows") else "1"
    found = run(cuda_cublas.compare, config, "varying", EMU_CUBLAS_UNSUPPORTED=unsupported).result
    assert all(result["logits"] < LIMITS["bfloat16"] for result in found["differences"]), found
    assert found["same_bits"]


@EMULATED
def test_steps_with_products_of_cublas_become_graphs() -> None:
    found = run(cuda_cublas.repeat, CONFIGS["bfloat16"]).result
    assert found["graphs"] > 10
    assert found["products"] > 0
    assert found["tokens"] == 1  # all rows of a step are computed in the same way
    assert found["alone"] == 24


@EMULATED
def test_checked_products_have_no_findings() -> None:
    config = CONFIGS["bfloat16"] | {"num_hidden_layers": 1}
    assert run(cuda_cublas.repeat, config, checked=True).result["products"] > 0


@EMULATED
@pytest.mark.parametrize(
    "function",
    [
        *("cublasLtCreate", "cublasLtMatmulDescCreate", "cublasLtMatmulDescSetAttribute"),
        *("cublasLtMatrixLayoutCreate", "cublasLtMatmulPreferenceCreate", "cublasLtMatmulAlgoGetHeuristic"),
        "cublasLtMatmul",
    ],
)
def test_function_that_fails_is_a_typed_error(function: str) -> None:
    kind, message = run(cuda_cublas.fail, CONFIGS["bfloat16"], EMU_CUBLAS_FAULT=function).result
    assert kind in ("DeviceUnavailableError", "EngineStoppedError", "PenstockError")
    assert f"{function} failed with CUBLAS_STATUS_INTERNAL_ERROR" in message


@EMULATED
def test_engine_without_cublas_is_deterministic_and_logs_a_warning() -> None:
    ended = run(cuda_cublas.compare, CONFIGS["bfloat16"], "varying", PENSTOCK_CUBLAS="/no/libcublasLt.so")
    assert ended.result["deterministic"]
    assert ended.result["same_bits"]
    [warning] = {line for line in ended.errors.splitlines() if line.startswith("WARNING")}
    assert "deterministic=False changes nothing: cuBLASLt is not available: /no/libcublasLt.so (" in warning
    assert "install the package nvidia-cublas" in warning


@EMULATED
def test_information_has_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    library = str(build.build_cublas())
    monkeypatch.setenv("PENSTOCK_CUBLAS", library)
    info = penstock.cuda_info()
    assert (info.cublas_version, info.cublas_path, info.cublas_reason) == ("13.10", library, None)
    monkeypatch.setenv("PENSTOCK_CUBLAS", "libc.so.6")
    info = penstock.cuda_info()
    assert (info.cublas_version, info.cublas_path) == (None, None)
    assert info.cublas_reason is not None
    assert "libc.so.6 (it has no function cublasLtGetVersion)" in info.cublas_reason


@pytest.mark.oracle
def test_library_of_the_package_can_be_used() -> None:
    try:  # torch brings it, but not every build of torch
        version = importlib.metadata.version("nvidia-cublas").split(".")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("nvidia-cublas is not installed")
    info = penstock.cuda_info()
    assert (info.cublas_version, info.cublas_reason) == (".".join(version[:2]), None)


def test_cpu_is_deterministic_with_both_values() -> None:
    for value in (True, False):
        with penstock.Engine(penstock.demo.model_path(), device="cpu", deterministic=value) as engine:
            engine.blocking.start()
            assert engine.info.deterministic
