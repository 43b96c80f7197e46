"""The code blocks of DashInfer's documents run as they are written, with the CPU in place of CUDA.

`tests/data/dashinfer` has the blocks. The package `modelscope` is replaced by one that returns a local model.
"""

from __future__ import annotations
import __future__

import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

import penstock
from penstock.compat.dashinfer import allspark
from penstock.compat.dashinfer.allspark import AsCacheMode, GenerateRequestStatus, TargetDevice
from penstock.compat.dashinfer.allspark.runtime_config import engine_options
from support.api.checkpoints import make_config, write_checkpoint
from support.paths import DATA, ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.needs("sources")

BLOCKS = DATA / "dashinfer"
ALIAS = ROOT / "python" / "aliases" / "dashinfer"
NAME = "qwen_Qwen2.5-1.5B-Instruct"
GREETING = "who are you?"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint with the context length that the documents use."""
    config = make_config("qwen2", max_position_embeddings=4096)
    return write_checkpoint(tmp_path_factory.mktemp("model"), config)


@pytest.fixture(autouse=True)
def _environment(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PENSTOCK_DASHINFER_DEVICE", "cpu")
    monkeypatch.setenv("PENSTOCK_THREADS", "1")
    monkeypatch.syspath_prepend(ALIAS)
    monkeypatch.chdir(tmp_path)
    packages: dict[str, Any] = {
        name: ModuleType(name) for name in ("modelscope", "modelscope.utils", "modelscope.utils.constant")
    }
    packages["modelscope"].snapshot_download = lambda *_: str(model)
    packages["modelscope.utils.constant"].DEFAULT_MODEL_REVISION = "master"
    for name, package in packages.items():
        monkeypatch.setitem(sys.modules, name, package)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "dashinfer"]:
        del sys.modules[name]


def read(block: str) -> str:
    return (BLOCKS / f"{block}.txt").read_text()


def run(block: str, names: dict[str, Any] | None = None) -> dict[str, Any]:
    """Execute a block with these names; returns them with those that it defines."""
    names = {} if names is None else names
    code = compile(read(block), block, "exec", flags=__future__.annotations.compiler_flag)
    exec(code, names)  # noqa: S102 - the documents' code
    return names


def documented_names(model: Path) -> dict[str, Any]:
    """The names that the documents' blocks take from the text around them."""
    names = {name: getattr(allspark, name) for name in allspark.__all__}
    return names | {
        "allspark": allspark,
        "model_local_path": str(model),
        "safe_model_name": NAME,
        "device_list": [0],
        "in_memory": False,
        "user_data_type": "float32",
        "output_base_folder": "model_output",
        "tmp_dir": "model_output",
        "init_quant": False,
        "weight_only_quant": False,
    }


def greedy(model: Path, prompt: str, max_length: int) -> list[int]:
    with penstock.Engine(model, threads=1) as engine:
        result = engine.blocking.generate(prompt, temperature=0.0, max_length=max_length)
        return list(result.token_ids)


def test_every_block_is_run_by_a_test() -> None:
    source = Path(__file__).read_text()
    missing = [block.stem for block in BLOCKS.iterdir() if block.stem not in source]
    assert missing == []


def test_quick_start_generates_the_greedy_tokens(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = read("quick_start_01")
    assert 'user_data_type = "float16"' in source
    names = run("quick_start_01")
    with penstock.Engine(model, dtype="float16", threads=1) as engine:
        result = engine.blocking.generate(names["templated_input_str"], temperature=0.0, max_length=2048)
        assert names["generated_ids"] == list(result.token_ids)
    assert names["status"] is GenerateRequestStatus.GenerateFinished
    assert capsys.readouterr().out.endswith(f"{names['model_name']} have been released.\n")
    names["engine"].release_model(NAME)


@pytest.mark.parametrize("in_memory", [False, True], ids=["files", "memory"])
def test_steps_of_the_quick_start_run_in_order(in_memory: bool, model: Path) -> None:  # noqa: FBT001
    names = documented_names(model) | {"in_memory": in_memory, "templated_input_str": GREETING}
    for step in (2, 3, 5, 4, 6, 7, 8, 10):
        run(f"quick_start_{step:02}", names)  # quick_start_02 to quick_start_10
    expected = greedy(model, GREETING, 2048)
    assert names["generated_ids"] == expected
    assert isinstance(names["output_text"], str)
    run("quick_start_07", names)
    run("quick_start_09", names)
    assert names["generated_ids"] == expected
    names["engine"].stop_model(NAME)
    names["engine"].release_model(NAME)


# The blocks quick_start_03, quick_start_04, quick_start_05, quick_start_06, quick_start_08 are steps above.


def test_offline_example_generates_and_releases(model: Path) -> None:
    names = run("offline_inference_01", documented_names(model))
    assert len(names["generated_ids"]) > 0
    assert names["generated_elem"].ids_from_generate == names["generated_ids"]
    names["engine"].release_model(NAME)


def test_creation_of_an_engine_logs_its_version(caplog: pytest.LogCaptureFixture) -> None:
    lines = read("offline_inference_02").splitlines()
    # The last line of the block is the log line.
    assert lines[-1].startswith("I20240906")
    caplog.set_level("INFO")
    exec("\n".join(lines[:-1]), {})  # noqa: S102
    assert "AllSpark Init with Version: " in caplog.text


def test_runtime_config_builder_example_builds() -> None:
    config = run("offline_inference_03")["runtime_config"]
    assert config.model_path == "/path/to/model/model_prefix.asgraph"
    assert (config.compute_unit, config.engine_max_batch, config.engine_max_length) == ("CUDA:0", 32, 2048)
    assert config.cache_mode is AsCacheMode.AsCacheQuantU4


def test_generation_config_example_builds(model: Path) -> None:
    config = run("offline_inference_04", documented_names(model))["config"]
    assert (config["max_length"], config["temperature"], config["top_k"]) == (512, 0.7, 50)


@pytest.mark.parametrize(
    ("block", "method"),
    [
        ("offline_inference_05", "start_request_ids"),
        ("offline_inference_06", "start_request_text"),
        ("offline_inference_07", "stop_request"),
        ("offline_inference_08", "release_request"),
        ("offline_inference_09", "sync_request"),
    ],
)
def test_methods_have_the_documented_parameters(block: str, method: str) -> None:
    documented = list(inspect.signature(run(block)[method]).parameters)
    assert list(inspect.signature(getattr(allspark.Engine, method)).parameters) == documented


def test_polling_example_collects_all_tokens(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = documented_names(model) | {"templated_input_str": GREETING}
    for block in ("quick_start_02", "quick_start_03", "quick_start_05", "quick_start_06", "quick_start_07"):
        run(block, names)
    run("offline_inference_10", names)
    assert names["generated_ids"] == greedy(model, GREETING, 2048)
    assert capsys.readouterr().out.startswith("new token: [")
    names["engine"].stop_model(NAME)
    names["engine"].release_model(NAME)


@pytest.mark.parametrize(
    ("block", "unit", "threads"),
    [
        ("runtime_config_01", "CUDA:0", 0),
        ("runtime_config_02", "CUDA:0,1", 0),
        ("runtime_config_03", "CUDA:1,3", 0),
        ("runtime_config_04", "CPU:0", 0),
        ("runtime_config_05", "CPU:0", 32),
    ],
)
def test_compute_unit_example_has_its_device(block: str, unit: str, threads: int, model: Path) -> None:
    loader = allspark.HuggingFaceModel(model, NAME).load_model().serialize_to_path(None, "model_output")
    names = {
        "runtime_builder": loader.create_reference_runtime_config_builder,
        "safe_model_name": NAME,
        "TargetDevice": TargetDevice,
    }
    config = eval(read(block), names).build()  # noqa: S307
    assert (config.compute_unit, config.num_threads, config.engine_max_batch) == (unit, threads, 64)
    assert engine_options(config)[1].get("threads") == (threads or None)


@pytest.mark.parametrize(("mode", "dtype"), [("16", "float32"), ("8", "int8"), ("4", "uint4")])
def test_usage_example_installs_with_its_cache_mode(mode: str, dtype: str, model: Path) -> None:
    loader = allspark.HuggingFaceModel(model, NAME).load_model().serialize_to_path(None, "model_output")
    names = documented_names(model) | {
        "model_loader": loader,
        "engine": allspark.Engine(),
        "set_engine_max_length": 512,
        "set_prefill_cache": True,
        "cache_quant_mode": mode,
    }
    run("runtime_config_06", names)
    installed = names["engine"]._models[NAME]
    assert installed.engine.info.kv_cache_dtype == dtype
    names["engine"].release_model(NAME)
