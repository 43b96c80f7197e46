"""The runtime configuration of the DashInfer API: the builder, files, checks and environment variables."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import penstock
from penstock.compat.dashinfer import allspark
from penstock.compat.dashinfer.allspark import AsCacheMode, AsStatus, TargetDevice, environment
from penstock.compat.dashinfer.allspark.generation_config import sampling_options
from penstock.compat.dashinfer.allspark.runtime_config import (
    AsModelConfig,
    AsModelRuntimeConfigBuilder,
    engine_options,
)

if TYPE_CHECKING:
    from collections.abc import Callable

#: The example of DashInfer's FAQ.
TWO_GPUS = {
    "model_name": "m",
    "compute_unit": {"device_type": "cuda", "device_ids": [0, 1], "compute_thread_in_device": 0},
    "engine_max_length": 100,
    "engine_max_batch": 32,
}


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsModelConfig:
    """The configuration of a serialised model on the CPU."""
    loader = allspark.HuggingFaceModel(tiny_model, "m").load_model()
    loader.serialize_to_path(None, tmp_path_factory.mktemp("output"))
    return loader.create_reference_runtime_config_builder("m", TargetDevice.CPU, [0], 4).build()


def options(config: AsModelConfig, **changes: Any) -> dict[str, Any]:
    values = {**vars(config), **changes}
    return dict(engine_options(AsModelConfig(**values))[1])


def refusal(config: AsModelConfig, **changes: Any) -> tuple[AsStatus, str]:
    with pytest.raises(allspark.AsError) as caught:
        options(config, **changes)
    return caught.value.status, caught.value.reason


def test_new_configuration_has_the_documented_defaults() -> None:
    config = AsModelConfig()
    assert (config.engine_max_length, config.engine_max_batch, config.cache_span_size) == (2048, 32, 128)
    assert (config.enable_prefix_cache, config.prefix_cache_ttl) == (True, 300)
    assert config.cache_mode is AsCacheMode.AsCacheDefault


def test_equal_configurations_compare_equal() -> None:
    assert AsModelConfig(model_name="m") == AsModelConfig(model_name="m")
    assert AsModelConfig(compute_unit="CPU:0") != AsModelConfig(compute_unit="CUDA:0")
    assert "engine_max_length=2048" in repr(AsModelConfig())


def test_dict_of_two_gpus_builds_the_documented_configuration() -> None:
    config = AsModelRuntimeConfigBuilder().from_dict(TWO_GPUS).build()
    assert config.compute_unit == "CUDA:0,1"
    assert (config.model_name, config.engine_max_length, config.engine_max_batch) == ("m", 100, 32)


def test_dict_with_prefill_length_is_honoured(model: AsModelConfig) -> None:
    builder = AsModelRuntimeConfigBuilder().from_dict({**TWO_GPUS, "engine_max_prefill_length": 64})
    assert builder.build().engine_max_prefill_length == 64
    assert options(model, engine_max_prefill_length=64, cache_span_size=16)["max_num_batched_tokens"] == 64


@pytest.mark.parametrize("missing", TWO_GPUS)
def test_dict_without_a_required_key_names_it(missing: str) -> None:
    rest = {key: value for key, value in TWO_GPUS.items() if key != missing}
    with pytest.raises(KeyError, match=missing):
        AsModelRuntimeConfigBuilder().from_dict(rest)


def test_update_sets_every_documented_key() -> None:
    builder = AsModelRuntimeConfigBuilder().update_from_dict(
        {
            "enable_prefix_cache": False,
            "prefix_cache_ttl": 20,
            "kv_cache_mode": "AsCacheQuantI8",
            "kv_cache_span_size": 32,
            "enable_sparsity_matmul": True,
            "cache_span_num_init": 3,
            "engine_max_prefill_length": 64,
            "engine_max_length": "1024",
            "engine_max_batch": "8",
            "eviction_strategy": "Random",
        }
    )
    config = builder.build()
    assert (config.enable_prefix_cache, config.prefix_cache_ttl) == (False, 20)
    assert (config.cache_mode, config.cache_span_size) == (AsCacheMode.AsCacheQuantI8, 32)
    assert (config.engine_max_length, config.engine_max_batch) == (1024, 8)
    assert config.eviction_strategy is allspark.AsEvictionStrategy.Random


def test_update_with_a_bad_value_changes_nothing() -> None:
    builder = AsModelRuntimeConfigBuilder().max_length(64)
    before = builder.build()
    for bad in ({"engine_max_length": 32, "no_such_key": 1}, {"engine_max_length": 32, "model_name": 5}):
        with pytest.raises(ValueError, match=r"no_such_key|model_name"):
            builder.update_from_dict(bad)
        assert builder.build() == before


def test_update_with_a_key_that_is_no_text_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="unknown keys in the runtime configuration: 1, None;"):
        AsModelRuntimeConfigBuilder().update_from_dict({1: 2, None: 3})  # type: ignore[dict-item]


def test_setters_are_fluent_and_accept_numeric_strings() -> None:
    config = (
        AsModelRuntimeConfigBuilder()
        .model_name("m")
        .model_dir("/models", "prefix")
        .compute_unit(TargetDevice.CPU_NUMA, [0, 1], 4)
        .max_length("512")
        .max_batch("16")
        .max_prefill_length(128)
        .prefill_cache(enable=False)
        .prefix_cache_ttl(60)
        .kv_cache_mode(AsCacheMode.AsCacheQuantU4)
        .kv_cache_span_size(64)
        .set_span_init_size(7)
        .enable_sparsity_matmul(enable=False)
        .lora_max_rank("32")
        .lora_max_num("2")
        .build()
    )
    assert (config.model_path, config.weights_path) == ("/models/prefix.asgraph", "/models/prefix.asparam")
    assert (config.compute_unit, config.num_threads) == ("CPU_NUMA:0,1", 4)
    assert (config.engine_max_length, config.engine_max_batch) == (512, 16)
    assert (config.lora_max_rank, config.lora_max_num, config.cache_span_num_init) == (32, 2, 7)


def test_builder_keeps_its_values_after_build() -> None:
    builder = AsModelRuntimeConfigBuilder().model_name("m")
    config = builder.build()
    config.model_name = "other"
    assert builder.build().model_name == "m"


@pytest.mark.parametrize(
    ("device", "ids", "unit"),
    [
        (TargetDevice.CUDA, None, "CUDA:0"),
        (TargetDevice.CUDA, [1, 3], "CUDA:1,3"),
        ("cpu", [1], "CPU:0"),
        ("CPU_NUMA", [1], "CPU_NUMA:1"),
    ],
)
def test_compute_unit_has_the_documented_text(device: Any, ids: list[int] | None, unit: str) -> None:
    assert AsModelRuntimeConfigBuilder().compute_unit(device, ids).build().compute_unit == unit


@pytest.mark.parametrize(
    "call",
    [
        lambda builder: builder.compute_unit("tpu"),
        lambda builder: builder.compute_unit("cuda", [-1]),
        lambda builder: builder.compute_unit("cuda", []),
        lambda builder: builder.compute_unit("CUDA", 5),
        lambda builder: builder.update_from_dict({"compute_unit": {"device_type": "cuda", "device_ids": 5}}),
        lambda builder: builder.update_from_dict([1]),
        lambda builder: builder.from_dict(5),
        lambda builder: builder.max_length("long"),
        lambda builder: builder.max_length("9" * 5000),
        lambda builder: builder.max_batch(""),
        lambda builder: builder.max_batch(float("nan")),
        lambda builder: builder.kv_cache_mode("int8"),
        lambda builder: builder.prefill_cache("yes"),
        lambda builder: builder.model_name(None),
        lambda builder: builder.model_dir(None, "m"),
        lambda builder: builder.model_dir("output", 5),
        lambda builder: builder.model_file_path(b"m.asgraph", "m.asparam"),
        lambda builder: builder.parse_device_type("CUDA:x"),
        lambda builder: builder.parse_device_type("0"),
    ],
)
def test_bad_value_of_a_setter_is_a_value_error(call: Callable[[Any], object]) -> None:
    with pytest.raises(ValueError, match="must be"):
        call(AsModelRuntimeConfigBuilder())


def test_device_type_is_parsed_to_device_and_ids() -> None:
    assert AsModelRuntimeConfigBuilder.parse_device_type("CUDA:1,3") == (TargetDevice.CUDA, [1, 3])
    assert AsModelRuntimeConfigBuilder.parse_device_type("cpu") == (TargetDevice.CPU, [0])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("engine_max_length", 2),
        ("engine_max_batch", 0),
        pytest.param("engine_max_length", 10**5000, id="length of 5001 digits"),
        pytest.param("cache_span_size", 10**5000, id="span size of 5001 digits"),
        ("cache_span_size", 48),
        ("matmul_precision", "low"),
        ("model_name", ""),
        ("weights_path", ""),
        ("prefix_cache_ttl", 0),
        ("engine_max_length", float("nan")),
        ("cache_mode", None),
        ("compute_unit", "TPU:0"),
        ("enable_sparsity_matmul", True),
        ("lora_names", "adapter"),
        ("lora_max_rank", 0),
        ("lora_max_rank", 1025),
        ("lora_max_num", 1025),
        ("cache_span_num_init", -1),
        ("cache_span_num_grow", -1),
    ],
)
def test_bad_field_is_a_param_error_that_names_it(name: str, value: object, model: AsModelConfig) -> None:
    status, reason = refusal(model, **{name: value})
    assert status is AsStatus.ALLSPARK_PARAM_ERROR
    assert name in reason


@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_documented_span_sizes_are_block_sizes(size: int, model: AsModelConfig) -> None:
    assert options(model, cache_span_size=size)["block_size"] == size


def test_fields_become_options_of_the_engine(model: AsModelConfig) -> None:
    result = options(
        model,
        cache_mode=AsCacheMode.AsCacheQuantU4,
        enable_prefix_cache=False,
        num_threads=2,
        engine_max_batch=5,
    )
    assert result["kv_cache_dtype"] == "uint4"
    assert result["prefix_cache"] is False
    assert "prefix_cache_ttl" not in result
    assert (result["threads"], result["max_num_seqs"]) == (2, 5)
    assert (result["preemption_mode"], result["preemption_victim"]) == ("interrupt", "longest")


@pytest.mark.parametrize("variable", ["BFC_MEM_RATIO", "PENSTOCK_MEMORY_RATIO"])
def test_gpu_has_the_documented_memory_ratio_unless_one_is_set(
    variable: str, model: AsModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("BFC_MEM_RATIO", "PENSTOCK_MEMORY_RATIO", environment.DEVICE):
        monkeypatch.delenv(name, raising=False)
    assert options(model, compute_unit="CUDA:0")["memory_ratio"] == 0.975
    assert "memory_ratio" not in options(model, compute_unit="CPU:0")
    monkeypatch.setenv(variable, "0.5")
    assert options(model, compute_unit="CUDA:0")["memory_ratio"] is None  # the core reads it


@pytest.mark.parametrize(("given", "value"), [(0, False), (1, True)])
def test_zero_and_one_are_booleans_of_dictionaries(given: int, value: bool) -> None:  # noqa: FBT001
    builder = AsModelRuntimeConfigBuilder().update_from_dict({"enable_prefix_cache": given})
    assert builder.build().enable_prefix_cache is value
    params = sampling_options({"logprobs": given}, num_prompt_tokens=1, max_model_len=64, vocabulary_size=512)
    assert params.get("logprobs", False) is value


def test_numa_nodes_have_the_threads_of_each_node(model: AsModelConfig) -> None:
    result = options(model, compute_unit="CPU_NUMA:0,1", num_threads=4)
    assert (result["numa_nodes"], result["threads"]) == ([0, 1], 8)
    assert "numa_nodes" not in options(model, compute_unit="CPU:0")


def test_cuda_is_one_gpu_or_the_cpu_in_its_place(
    model: AsModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(environment.DEVICE, raising=False)
    assert options(model, compute_unit="CUDA:0")["device"] == "cuda:0"
    assert options(model, compute_unit="CUDA:3")["device"] == "cuda:3"
    status, reason = refusal(model, compute_unit="CUDA:0,1")
    assert status is AsStatus.ALLSPARK_PARAM_ERROR
    assert reason.endswith("'CUDA:0,1'; a model runs on one GPU")
    monkeypatch.setenv(environment.DEVICE, "cpu")
    replaced = options(model, compute_unit="CUDA:0,1")
    assert replaced["device"] == "cpu"
    assert "numa_nodes" not in replaced
    monkeypatch.setenv(environment.DEVICE, "gpu")
    assert environment.DEVICE in refusal(model, compute_unit="CUDA:0")[1]


def test_missing_gpu_is_a_parameter_error_with_a_remedy(
    model: AsModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(environment.DEVICE, raising=False)
    values = {**vars(model), "compute_unit": "CUDA:999"}
    with pytest.raises(allspark.AsError, match=r"cuda:999.*PENSTOCK_DASHINFER_DEVICE=cpu") as caught:
        allspark.Engine().install_model(AsModelConfig(**values))
    assert caught.value.status is AsStatus.ALLSPARK_PARAM_ERROR


def test_missing_and_broken_files_are_io_errors(model: AsModelConfig, tmp_path: Path) -> None:
    bad = {
        "missing": None,
        "empty": b"",
        "text": b"not JSON",
        "deep": b"[" * 100_000,
        "list": b"[]",
        "foreign": b"{}",
        "fields": json.dumps({"format": "penstock serialised model"}).encode(),
    }
    graph = json.loads(Path(model.model_path).read_text())
    bad["types"] = json.dumps({**graph, "weights_bytes": "5"}).encode()
    bad["size"] = json.dumps({**graph, "weights_bytes": 5}).encode()
    for name, content in bad.items():
        path = tmp_path / f"{name}.asgraph"
        if content is not None:
            path.write_bytes(content)
        assert refusal(model, model_path=str(path))[0] is AsStatus.ALLSPARK_IO_ERROR, name
    assert refusal(model, weights_path=str(tmp_path / "none"))[0] is AsStatus.ALLSPARK_IO_ERROR


@pytest.mark.parametrize("name", ["config.json", "config.yaml", "section.yml"])
def test_configuration_is_read_from_json_and_yaml(name: str, tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    content = {"runtime_config": TWO_GPUS} if name.startswith("section") else TWO_GPUS
    path = tmp_path / name
    path.write_text(json.dumps(content) if name.endswith("json") else yaml.safe_dump(content))
    built = AsModelRuntimeConfigBuilder().from_file(path).build()
    assert built == AsModelRuntimeConfigBuilder().from_dict(TWO_GPUS).build()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", "{"),
        ("b.yaml", "a: ["),
        ("c.json", "[1]"),
        ("d.json", "[" * 100_000),
        ("e.yaml", "[" * 2000 + "]" * 2000),
        ("f.yaml", "a: 2020-13-45"),
        ("g.yaml", "a: !!int ''"),
    ],
)
def test_invalid_configuration_file_is_a_value_error(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=name):
        AsModelRuntimeConfigBuilder().from_file(tmp_path / name)


def test_cpu_cache_ratio_is_a_share_of_the_available_memory(
    model: AsModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "host_cache_bytes" not in options(model)
    monkeypatch.setattr(environment, "_available_memory", lambda: 1000)
    monkeypatch.setenv("CPU_CACHE_RATIO", "0.3")
    assert options(model)["host_cache_bytes"] == 300
    for bad in ("-0.1", "1.5", "nan", "much"):
        monkeypatch.setenv("CPU_CACHE_RATIO", bad)
        assert "CPU_CACHE_RATIO" in refusal(model)[1]


def test_engine_with_cpu_cache_ratio_has_a_host_tier(
    model: AsModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "_available_memory", lambda: 1 << 22)
    monkeypatch.setenv("CPU_CACHE_RATIO", "0.5")
    path, result = engine_options(model)
    with penstock.Engine(path, **result) as engine:
        assert engine.info.host_tier is not None


def test_available_memory_is_less_than_that_of_the_machine() -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < environment._available_memory() < total


@pytest.mark.parametrize("value", [None, "1"])
def test_model_on_the_cpu_runs_with_and_without_warm_up(
    value: str | None, model: AsModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    if value:
        monkeypatch.setenv("ALLSPARK_DISABLE_WARMUP", value)
    engine = allspark.Engine()
    engine.install_model(model)
    assert engine.start_model("m") is AsStatus.ALLSPARK_SUCCESS
    for _ in range(2):
        _, handle, queue = engine.start_request_ids(
            "m", None, list(range(40)), {"max_length": 42, "top_k": 1}
        )
        engine.sync_request("m", handle)
        assert queue is not None
        elements = queue.Get()
        assert elements is not None
        assert len(elements.ids_from_generate) <= 2
    engine.stop_model("m")
    engine.release_model("m")


@pytest.mark.parametrize("ratio", ["0", "1.5", "nan", "-1", "all"])
def test_bfc_mem_ratio_outside_its_range_is_an_error(
    ratio: str, model: AsModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BFC_MEM_RATIO", ratio)
    with pytest.raises(RuntimeError, match=r"ALLSPARK_PARAM_ERROR: BFC_MEM_RATIO"):
        allspark.Engine().install_model(model)


def test_bfc_mem_ratio_bounds_the_memory(model: AsModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    path, result = engine_options(model)

    def limit(ratio: str) -> int:
        monkeypatch.setenv("BFC_MEM_RATIO", ratio)
        with penstock.Engine(path, **result) as engine:
            return engine.info.memory.limit

    assert limit("0.25") < limit("0.9") / 2


def test_length_beyond_the_models_is_a_param_error(model: AsModelConfig) -> None:
    with pytest.raises(RuntimeError, match="ALLSPARK_PARAM_ERROR: engine_max_length"):
        allspark.Engine().install_model(AsModelConfig(**{**vars(model), "engine_max_length": 100_000}))
