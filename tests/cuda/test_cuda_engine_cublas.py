"""deterministic=False: cuBLASLt multiplies, here a stand-in on the emulated device."""

from __future__ import annotations

import importlib.metadata
import json
from typing import TYPE_CHECKING, Any

import pytest

import penstock
from emu import build
from support.api.checkpoints import make_config
from support.cuda import cublas
from support.kernels import cuda
from support.kernels.emulator import Ended, needs_demo, run_program
from support.marks import rare_except

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.timeout(600)  # the first test builds the emulator
EMULATED = pytest.mark.skipif(cuda.ON_GPU, reason="needs the stand-in of cuBLASLt")

#: Biases, additions to residuals, and rows of a multiple of 16 bytes.
CONFIGS = {
    "bfloat16": make_config("qwen2", dtype="bfloat16"),
    "float16": make_config("llama", dtype="float16", intermediate_size=104),
    # The rows of logits are aligned to 4 bytes.
    "bfloat16, odd vocabulary": make_config("llama", dtype="bfloat16", vocab_size=509),
}
#: Rows of products that are not a multiple of 16 bytes.
UNALIGNED = make_config(
    "llama",
    dtype="bfloat16",
    intermediate_size=333,
    hidden_size=60,
    head_dim=20,
    num_attention_heads=3,
    num_key_value_heads=1,
)
#: Models of which cuBLASLt multiplies nothing.
NOTHING = {
    "float32": make_config("llama"),
    "rows that are not aligned": UNALIGNED,
    "no algorithm": CONFIGS["bfloat16"],
}
LIMITS = {"bfloat16, odd vocabulary": 3e-2, "bfloat16": 3e-2, "float16": 4e-3}


def warnings(ended: Ended) -> set[str]:
    return {line for line in ended.errors.splitlines() if line.startswith("WARNING")}


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


@pytest.mark.needs("proc")
@pytest.mark.parametrize("dtype", CONFIGS)
def test_products_of_cublas_have_nearly_the_values_of_the_cpu(dtype: str) -> None:
    if cuda.ON_GPU and (reason := penstock.cuda_info().cublas_reason):
        pytest.skip(reason)
    found = run(cublas.compare, CONFIGS[dtype], "varying").result
    assert all(result["logits"] < LIMITS[dtype] for result in found["differences"]), found
    assert not found["deterministic"]
    # The stand-in has other bits for other numbers of rows, so it was used.
    assert cuda.ON_GPU or not found["same_bits"]


@pytest.mark.needs("proc")
@EMULATED
def test_deterministic_engine_does_not_use_cublas() -> None:
    config = CONFIGS["bfloat16"]
    found = run(cublas.compare, config, "deterministic", EMU_CUBLAS_FAULT="cublasLtCreate").result
    assert found["deterministic"]
    assert found["same_bits"]


def test_steps_with_products_of_cublas_become_graphs() -> None:
    found = run(cublas.repeat, CONFIGS["bfloat16"]).result
    tokens, logprobs = found["cpu"][0]
    assert len(found["cuda"]) == 12
    for ours, values in found["cuda"]:
        assert ours == tokens
        assert values == pytest.approx(logprobs, abs=0.05)
    if not cuda.ON_GPU:
        assert found["graphs"] > 10
        # Those of 2 layers and the head, in prefill and in the steps before the graph, but not in all.
        assert 9 * 3 <= found["products"] < 9 * 24


@EMULATED
def test_product_that_fails_in_a_capture_is_tried_without_it() -> None:
    ended = run(cublas.repeat, CONFIGS["bfloat16"], EMU_CUBLAS_FAULT="capture")
    tokens, logprobs = ended.result["cpu"][0]
    assert all(ours == tokens for ours, _ in ended.result["cuda"])
    assert all(values == pytest.approx(logprobs, abs=0.05) for _, values in ended.result["cuda"])
    assert ended.result["graphs"] == 0  # until many steps later
    assert ended.result["products"] >= 9 * 24  # in every step
    assert not warnings(ended)


@pytest.mark.needs("proc")
@EMULATED
def test_kernels_compute_products_without_an_algorithm() -> None:
    found = run(cublas.compare, CONFIGS["bfloat16"], "varying", EMU_CUBLAS_UNSUPPORTED="30").result
    assert all(result["logits"] < LIMITS["bfloat16"] for result in found["differences"]), found
    assert not found["deterministic"]


@EMULATED
@pytest.mark.rare
def test_checked_products_have_no_findings() -> None:
    config = CONFIGS["bfloat16"] | {"num_hidden_layers": 1}
    assert run(cublas.repeat, config, checked=True).result["products"] > 0


@EMULATED
def test_workspace_is_in_the_plan_of_the_memory() -> None:
    without, with_cublas = run(cublas.workspaces, CONFIGS["bfloat16"]).result
    assert with_cublas - without == 32 << 20


@pytest.mark.needs("proc")
@EMULATED
@pytest.mark.parametrize(
    "function",
    rare_except(
        [
            *("cublasLtCreate", "cublasLtMatmulDescCreate", "cublasLtMatmulDescSetAttribute"),
            *("cublasLtMatrixLayoutCreate", "cublasLtMatmulPreferenceCreate"),
            *("cublasLtMatmulPreferenceSetAttribute", "cublasLtMatmulAlgoGetHeuristic", "cublasLtMatmul"),
        ],
        "cublasLtCreate",
        "cublasLtMatmul",
    ),
)
def test_library_that_fails_at_the_start_is_not_used(function: str) -> None:
    ended = run(cublas.compare, CONFIGS["bfloat16"], "varying", EMU_CUBLAS_FAULT=function)
    assert ended.result["deterministic"]
    assert ended.result["same_bits"]
    reason = f"{function} failed with status 14, CUBLAS_STATUS_INTERNAL_ERROR"
    assert warnings(ended) == {f"WARNING deterministic=False changes nothing: {reason}"}


@pytest.mark.needs("proc")
@EMULATED
@pytest.mark.parametrize("function", ["cublasLtMatmulAlgoGetHeuristic", "cublasLtMatmul"])
def test_kernels_compute_products_that_fail_later(function: str) -> None:
    ended = run(cublas.compare, CONFIGS["bfloat16"], "varying", EMU_CUBLAS_FAULT=f"{function}:12")
    found = ended.result
    assert all(result["logits"] < LIMITS["bfloat16"] for result in found["differences"]), found
    reason = f"{function} failed with status 14, CUBLAS_STATUS_INTERNAL_ERROR"
    # The engines after the first one do not use the library.
    assert warnings(ended) == {
        f"WARNING kernels compute new products instead of cuBLASLt: {reason}",
        f"WARNING deterministic=False changes nothing: {reason}",
    }


@EMULATED
def test_error_of_a_lost_device_is_that_of_the_driver() -> None:
    kind, message = run(cublas.lose_device, CONFIGS["bfloat16"]).result
    assert kind == "EngineStoppedError"
    assert "CUDA_ERROR_LAUNCH_FAILED" in message


@pytest.mark.needs("proc")
@EMULATED
@pytest.mark.parametrize("model", NOTHING)
def test_model_without_products_for_cublas_is_deterministic(model: str) -> None:
    config = NOTHING[model]
    unsupported = "all" if model == "no algorithm" else "0"
    ended = run(cublas.compare, config, "varying", EMU_CUBLAS_UNSUPPORTED=unsupported)
    assert ended.result["deterministic"]
    assert ended.result["same_bits"]
    reason = "cuBLASLt multiplies none of the model's weights"
    assert warnings(ended) == {f"WARNING deterministic=False changes nothing: {reason}"}


@EMULATED
def test_engine_without_cublas_is_deterministic_and_warns() -> None:
    code = f"""
from penstock import _cuda
_cuda._PACKAGES = {{}}
import json, logging
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
from support.cuda import cublas
print(json.dumps(cublas.workspaces({json.dumps(json.dumps(CONFIGS["bfloat16"]))})))
"""
    compiler = penstock.cuda_info().compiler_path or ""
    ended = run_program(code, PENSTOCK_CUBLAS="", PENSTOCK_NVRTC=compiler)
    assert ended.findings == []
    assert len(set(ended.result)) == 1
    [warning] = warnings(ended)
    assert "deterministic=False changes nothing: cuBLASLt is not available: libcublasLt.so.13 (" in warning
    assert "install the package nvidia-cublas" in warning


@EMULATED
def test_library_of_the_variable_that_cannot_be_used_is_an_error() -> None:
    code = """
import json, penstock
try:
    penstock.Engine(penstock.demo.model_path(), device="cuda", deterministic=False).blocking.start()
except penstock.ConfigError as error:
    print(json.dumps(str(error)))
"""
    ended = run_program(code, PENSTOCK_CUBLAS="/no/libcublasLt.so")
    assert (
        "PENSTOCK_CUBLAS=/no/libcublasLt.so is not allowed: it must be the path of cuBLASLt" in ended.result
    )


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


@pytest.mark.torch
def test_library_of_the_package_can_be_used() -> None:
    try:  # torch brings it, but not every build of torch
        version = importlib.metadata.version("nvidia-cublas").split(".")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("nvidia-cublas is not installed")
    info = penstock.cuda_info()
    assert (info.cublas_version, info.cublas_reason) == (".".join(version[:2]), None)


@needs_demo
def test_cpu_is_deterministic_with_both_values() -> None:
    for value in (True, False):
        with penstock.Engine(penstock.demo.model_path(), device="cpu", deterministic=value) as engine:
            engine.blocking.start()
            assert engine.info.deterministic
