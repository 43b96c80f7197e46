"""LMDeploy's engine configurations: their checks, and the engines that they open."""

from __future__ import annotations

import dataclasses
import functools
import json
import threading
from typing import TYPE_CHECKING, Any

import pytest

import penstock
from penstock.compat.lmdeploy import pipeline, pytorch, turbomind
from penstock.compat.lmdeploy.chat_templates import TEMPLATES
from penstock.compat.lmdeploy.engine_options import NO_EFFECT, open_engine, resolve
from penstock.compat.lmdeploy.errors import ArgumentError, UnsupportedError
from penstock.compat.lmdeploy.messages import (
    GenerationConfig,
    PytorchEngineConfig,
    SpeculativeConfig,
    TurbomindEngineConfig,
    VisionConfig,
)
from support.api.quantised import METHODS, write_quantised
from support.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path

CLASSES = (TurbomindEngineConfig, PytorchEngineConfig, turbomind.EngineConfig, pytorch.EngineConfig)
#: Another valid value of a field, and the options that change with it; `None` if it is refused later.
CHANGES: dict[str, tuple[Any, dict[str, Any] | None]] = {
    **dict.fromkeys(
        (
            "tp",
            "dp",
            "cp",
            "ep",
            "nnodes",
            "device_num",
            "attn_tp_size",
            "attn_cp_size",
            "attn_dp_size",
            "mlp_tp_size",
            "mlp_dp_size",
            "moe_tp_size",
            "outer_dp_size",
            "node_rank",
            "dp_rank",
        ),
        (2, None),
    ),
    "dtype": ("float16", {"dtype": "float16"}),
    "session_len": (128, {"max_model_len": 128}),
    "max_batch_size": (7, {"max_num_seqs": 7}),
    "cache_max_entry_count": (0.25, {"kv_cache_ratio": 0.25}),
    "cache_block_seq_len": (16, {"block_size": 16}),
    "block_size": (32, {"block_size": 32}),
    "quant_policy": (4, {"kv_cache_dtype": "uint4"}),
    "rope_scaling_factor": (2.0, {"config_overrides": "dynamic, factor 2"}),
    "use_dynamic_ntk": (True, {"config_overrides": "dynamic, factor 1"}),
    "use_logn_attn": (True, {"config_overrides": {"use_logn_attn": True}}),
    "hf_overrides": ({"rope_theta": 5e5}, {"config_overrides": {"rope_theta": 5e5}}),
    "max_prefill_token_num": (256, {"max_num_batched_tokens": 256}),
    "num_tokens_per_iter": (256, {"max_num_batched_tokens": 256}),
    "max_context_token_num": (256, {"max_num_batched_tokens": 256}),
    "num_gpu_blocks": (20, {"kv_cache_blocks": 20}),
    "num_cpu_blocks": (10, {"host_cache_blocks": 10}),
    "eviction_type": ("copy", {"preemption_mode": "swap"}),
    "model_format": ("fp8", None),
    "adapters": ({"a": "b"}, {"max_adapters": 1}),
    "custom_module_map": ({"a": "b"}, None),
    "devices": ([0, 1], None),
    "device_type": ("ascend", None),
    "logprobs_mode": ("raw_logits", None),
    "enable_return_routed_experts": (True, None),
    "dllm_block_length": (4, None),
    "role": ("Prefill", None),
    "cache_chunk_size": (4, {}),
    "cache_prompt": ("all", {}),
    "cache_generation": ("all", {}),
    "prefix_cache_decode_state_interval": (64, {}),
    "kernel_block_size": (16, {}),
    "communicator": ("native", {}),
    "dist_init_addr": ("host:1", {}),
    "cudagraph_capture_batch_sizes": ([1], {}),
    "distributed_executor_backend": ("ray", {}),
    "mp_engine_backend": ("ray", {}),
    "migration_backend": ("other", {}),
    "dllm_unmasking_strategy": ("sequential", {}),
    "dllm_denoising_steps": (4, {}),
    "dllm_confidence_threshold": (0.5, {}),
}
#: Fields with an effect that other tests show.
ELSEWHERE = {"enable_prefix_caching", "model_name", "download_dir", "revision", "group_size", "kv_bits"}


def options_of(config: Any, model: Path) -> dict[str, Any]:
    return dict(resolve(model, backend_config=config).options)


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        *((kind, "tp", 0) for kind in CLASSES),
        *((kind, "session_len", 0) for kind in CLASSES),
        *((kind, "max_batch_size", "many") for kind in CLASSES),
        *((kind, "cache_max_entry_count", 0) for kind in CLASSES[:3]),
        *((kind, "quant_policy", 1) for kind in CLASSES[:3]),
        (TurbomindEngineConfig, "quant_policy", 16),
        (turbomind.EngineConfig, "quant_policy", 8),
        (turbomind.EngineConfig, "kv_bits", 3),
        (TurbomindEngineConfig, "rope_scaling_factor", -1.0),
        (turbomind.EngineConfig, "rope_scaling_factor", -1.0),
        (TurbomindEngineConfig, "max_prefill_token_num", -1),
        (TurbomindEngineConfig, "num_tokens_per_iter", -1),
        (TurbomindEngineConfig, "async_", 2),
        (TurbomindEngineConfig, "dtype", "int8"),
        (TurbomindEngineConfig, "cache_prompt", "none"),
        (PytorchEngineConfig, "cache_max_entry_count", 1),
        (PytorchEngineConfig, "device_type", "abacus"),
        (PytorchEngineConfig, "kernel_block_size", 24),
        (PytorchEngineConfig, "kernel_block_size", 8),
        (PytorchEngineConfig, "prefix_cache_decode_state_interval", 65),
        (pytorch.EngineConfig, "eviction_type", "drop"),
        (pytorch.EngineConfig, "num_gpu_blocks", -1),
        (pytorch.EngineConfig, "prefill_interval", 0),
    ],
)
def test_invalid_value_is_refused_by_the_class(config: Any, field: str, value: Any) -> None:
    with pytest.raises(AssertionError, match=f"{field} is .*; it must be ") as error:
        config(**{field: value})
    assert repr(value) in str(error.value)
    assert isinstance(error.value, ValueError)


def test_block_size_is_a_multiple_of_the_kernel_block_size() -> None:
    with pytest.raises(ArgumentError, match="kernel_block_size is 48; it must be a power of two"):
        PytorchEngineConfig(block_size=64, kernel_block_size=48)
    with pytest.raises(
        ArgumentError, match="block_size is 64; it must be a multiple of kernel_block_size, 128"
    ):
        PytorchEngineConfig(block_size=64, kernel_block_size=128)
    assert PytorchEngineConfig(block_size=32).kernel_block_size == 32


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        pytest.param(
            kind, field.name, id=f"{kind.__module__.rpartition('.')[2]}-{kind.__name__}-{field.name}"
        )
        for kind in CLASSES
        for field in dataclasses.fields(kind)
        if field.name not in ELSEWHERE
    ],
)
def test_every_field_is_mapped_or_refused_or_listed(kind: Any, field: str, tiny_model: Path) -> None:
    default = getattr(kind(), field)
    value, changes = CHANGES.get(field, (1 - default if isinstance(default, (bool, int)) else 1, {}))
    if (kind, field) == (turbomind.EngineConfig, "quant_policy"):
        changes = {"kv_cache_dtype": "int8"}
    if (kind, field) == (PytorchEngineConfig, "model_format"):
        changes = {"quantization": "fp8"}
    if isinstance(default, int) and not isinstance(default, bool) and field not in CHANGES:
        value = default or 64
    config = kind(**{field: value})
    if changes is None:
        with pytest.raises(ArgumentError, match=f"{field} is "):
            options_of(config, tiny_model)
        return
    before, after = options_of(kind(), tiny_model), options_of(config, tiny_model)
    different = {name: option for name, option in after.items() if before.get(name) != option}
    if isinstance(changes.get("config_overrides"), str):
        factor = float(changes["config_overrides"][-1])
        overrides = different.pop("config_overrides")
        assert overrides["rope_parameters"].items() >= {"rope_type": "dynamic", "factor": factor}.items()
        assert (list(overrides), different) == (["rope_parameters"], {})
    else:
        assert different == changes
    assert (field in NO_EFFECT) == (changes == {})


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (TurbomindEngineConfig(), {"block_size": 64, "kv_cache_ratio": 0.8}),
        (PytorchEngineConfig(), {"block_size": 64, "kv_cache_ratio": 0.8}),
        (turbomind.EngineConfig(), {"block_size": 128, "kv_cache_ratio": 0.5, "max_num_seqs": 128}),
        (pytorch.EngineConfig(), {"block_size": 64, "max_num_seqs": 128}),
        (TurbomindEngineConfig(cache_max_entry_count=40), {"block_size": 64, "kv_cache_blocks": 40}),
        (
            TurbomindEngineConfig(max_batch_size=1000),
            {"block_size": 64, "kv_cache_ratio": 0.8, "max_num_seqs": 1000, "max_num_batched_tokens": 1000},
        ),
        (
            TurbomindEngineConfig(num_tokens_per_iter=300, max_prefill_token_num=200),
            {"block_size": 64, "kv_cache_ratio": 0.8, "max_num_batched_tokens": 200},
        ),
        (
            pytorch.EngineConfig(eviction_type="copy", num_cpu_blocks=8, num_gpu_blocks=16),
            {
                "block_size": 64,
                "max_num_seqs": 128,
                "preemption_mode": "swap",
                "host_cache_blocks": 8,
                "kv_cache_blocks": 16,
            },
        ),
    ],
)
def test_configuration_becomes_options_of_the_engine(
    config: Any, expected: dict[str, Any], tiny_model: Path
) -> None:
    expected = {"max_logprobs": 1024, "prefix_cache_ttl": 1e9, **expected}
    assert options_of(config, tiny_model) == expected


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (TurbomindEngineConfig(cache_max_entry_count=1.5), "cache_max_entry_count is 1.5"),
        (
            TurbomindEngineConfig(cache_block_seq_len=48),
            "cache_block_seq_len is 48; it must be 16, 32, 64 or",
        ),
        (pytorch.EngineConfig(block_size=256), "block_size is 256; it must be 16, 32, 64 or 128"),
        (PytorchEngineConfig(num_gpu_blocks=15), "num_gpu_blocks is 15"),
        (PytorchEngineConfig(quant_policy=42), "quant_policy is 42"),
        (PytorchEngineConfig(quant_policy=17), "quant_policy is 17"),
        (TurbomindEngineConfig(rope_scaling_factor=0.5), "rope_scaling_factor is 0.5"),
        (TurbomindEngineConfig(model_format="mxfp4"), "model_format is 'mxfp4'"),
        (turbomind.EngineConfig(model_format="llama"), "Meta's files are pickles, which are not read"),
        (TurbomindEngineConfig(hf_overrides="rope"), "hf_overrides is 'rope'"),  # type: ignore[arg-type]
        ({"tp": 1}, "backend_config is {'tp': 1}"),
    ],
)
def test_unsupported_value_is_refused_with_the_field(config: Any, reason: str, tiny_model: Path) -> None:
    with pytest.raises(ArgumentError, match=reason.replace("[", r"\[")):
        options_of(config, tiny_model)


@pytest.mark.parametrize(
    ("arguments", "returns_text"),
    [
        ({}, False),
        ({"model_name": "vicuna"}, False),
        ({"backend_config": TurbomindEngineConfig()}, False),
        ({"backend_config": PytorchEngineConfig()}, False),
        ({"session_len": 64}, False),
        ({"backend": "pytorch"}, True),
        ({"instance_num": 4}, True),
        ({"tp": 1}, True),
        ({"backend_config": turbomind.EngineConfig()}, True),
        ({"backend_config": pytorch.EngineConfig()}, True),
    ],
)
def test_arguments_of_the_first_version_select_text(
    arguments: dict[str, Any],
    returns_text: object,
    tiny_model: Path,
) -> None:
    assert resolve(tiny_model, **arguments).settings.returns_text is returns_text


def test_settings_have_the_values_of_the_pipeline(tiny_model: Path) -> None:
    config = TurbomindEngineConfig(enable_prefix_caching=True)
    settings = resolve(tiny_model, backend_config=config, instance_num=8, model_name="vicuna").settings
    assert (settings.enable_prefix_caching, settings.max_concurrency, settings.model_name) == (
        True,
        8,
        "vicuna",
    )
    settings = resolve(tiny_model, backend_config=pytorch.EngineConfig(model_name="yi")).settings
    assert (settings.enable_prefix_caching, settings.max_concurrency, settings.model_name) == (
        False,
        None,
        "yi",
    )
    assert isinstance(resolve(tiny_model, "pytorch").settings.config, PytorchEngineConfig)


def test_arguments_can_be_fields_of_the_configuration(tiny_model: Path) -> None:
    options = resolve(tiny_model, session_len=64, cache_max_entry_count=20, trust_remote_code=True).options
    assert (options["max_model_len"], options["kv_cache_blocks"]) == (64, 20)
    assert resolve(tiny_model, "pytorch", block_size=32).options["block_size"] == 32
    with pytest.raises(ArgumentError, match="session_len is 0"):
        resolve(tiny_model, session_len=0)
    with pytest.raises(TypeError, match="unexpected argument 'session_length'"):
        resolve(tiny_model, session_length=64)
    with pytest.raises(TypeError, match="'adapters'; it is a field of PytorchEngineConfig"):
        resolve(tiny_model, adapters={"a": "b"})


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"backend": "foo"}, "backend is 'foo'; it must be 'turbomind' or 'pytorch'"),
        ({"devices": 1}, "devices is 1; it must be None or a list"),
        ({"tp": 2}, "tp is 2; it is not supported"),
        ({"tp": 0}, "tp is 0"),
        ({"instance_num": 0}, "instance_num is 0"),
        ({"vision_config": VisionConfig()}, "vision_config is .*: images are not supported yet"),
        ({"speculative_config": SpeculativeConfig("eagle")}, "draft models are not supported"),
    ],
)
def test_invalid_argument_of_a_pipeline_is_refused(
    arguments: dict[str, Any], reason: str, tiny_model: Path
) -> None:
    with pytest.raises(ValueError, match=reason):
        resolve(tiny_model, **arguments)


def test_revision_is_part_of_the_id_of_a_model(tiny_model: Path) -> None:
    config = TurbomindEngineConfig(revision="main")
    assert resolve("owner/name", backend_config=config).model == "owner/name@main"
    assert resolve(tiny_model, backend_config=config).model == str(tiny_model)
    config = TurbomindEngineConfig(download_dir="models")
    assert resolve(tiny_model, backend_config=config).model == str(tiny_model)
    with pytest.raises(UnsupportedError, match="HF_HUB_CACHE"):
        resolve("owner/name", backend_config=config)


@pytest.mark.parametrize(
    ("method", "accepted"),
    [
        ("awq", {"model_format": "awq", "group_size": 64}),
        ("awq", {"model_format": "awq"}),
        ("gptq", {"model_format": "gptq"}),
        ("w4a16", {"model_format": "compressed-tensors"}),
        ("fp8-blocks", {"model_format": "fp8"}),
    ],
)
def test_format_is_compared_with_the_files(method: str, accepted: dict[str, Any], tmp_path: Path) -> None:
    write_quantised(tmp_path, METHODS[method])
    assert "quantization" not in resolve(tmp_path, **_early(accepted)).options
    for name in ("hf", "awq", "gptq", "fp8"):
        if name != accepted["model_format"]:
            with pytest.raises(ArgumentError, match=f"model_format is '{name}'; .* quantised: "):
                resolve(tmp_path, model_format=name)
    if method == "awq":
        with pytest.raises(ArgumentError, match="group_size is 32; it must be 64, that of the files"):
            resolve(tmp_path, **_early({"group_size": 32}))


def _early(values: dict[str, Any]) -> dict[str, Any]:
    return {"backend_config": turbomind.EngineConfig(**values)} if "group_size" in values else values


def test_value_of_another_kind_is_refused_with_its_reason() -> None:
    with pytest.raises(ArgumentError, match=r"model_format is 'awq'; it must be None for a GGUF file"):
        resolve("model.gguf", model_format="awq")
    with pytest.raises(ArgumentError, match="model_path is 123; it must be a directory"):
        resolve(123)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="model_name is 3; it must be None or a text"):
        resolve("model", model_name=3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="quant_policy is 5; it must be 0, 4 or 8"):
        PytorchEngineConfig(quant_policy=5)


def test_format_of_plain_files_is_hf(tiny_model: Path) -> None:
    assert "quantization" not in resolve(tiny_model, model_format="hf").options
    with pytest.raises(ArgumentError, match=r"model_format is 'awq'; .* files, which are not quantised"):
        resolve(tiny_model, model_format="awq")
    options = resolve(tiny_model, backend_config=PytorchEngineConfig(model_format="fp8")).options
    assert options["quantization"] == "fp8"


def test_engine_has_the_values_of_the_configuration(tiny_model: Path) -> None:
    config = TurbomindEngineConfig(
        session_len=256,
        max_batch_size=3,
        cache_max_entry_count=24,
        cache_block_seq_len=32,
        quant_policy=8,
        num_tokens_per_iter=64,
        dtype="bfloat16",
    )
    model, options, _settings = resolve(tiny_model, backend_config=config)
    with penstock.Engine(model, **options) as engine:
        info = engine.info
    assert (info.max_model_len, info.max_num_seqs, info.max_num_batched_tokens) == (256, 3, 64)
    assert (info.num_blocks, info.block_size) == (24, 32)
    assert (info.kv_cache_dtype, info.dtype) == ("int8", "bfloat16")


def test_early_configuration_opens_a_tiered_engine(tiny_model: Path) -> None:
    config = pytorch.EngineConfig(eviction_type="copy", num_cpu_blocks=8, num_gpu_blocks=16, session_len=512)
    model, options, _settings = resolve(tiny_model, "pytorch", config)
    with penstock.Engine(model, **options) as engine:
        assert engine.info.num_blocks == 16
        assert engine.info.host_tier is not None
        assert engine.config.preemption_mode == "swap"


@pytest.mark.parametrize("eviction_type", ["recompute", "copy"])
def test_preempted_requests_have_the_same_outputs(eviction_type: str, tiny_model: Path) -> None:
    """Eight requests of 7 blocks each compete for 16 blocks, and run long enough to be concurrent."""
    prompts = [f"{index}" * 100 for index in range(8)]
    gen_config = GenerationConfig(max_new_tokens=300, ignore_eos=True)

    def outputs(num_gpu_blocks: int) -> list[list[int]]:
        config = pytorch.EngineConfig(
            block_size=64, num_gpu_blocks=num_gpu_blocks, num_cpu_blocks=64, eviction_type=eviction_type
        )
        with pipeline(tiny_model, backend_config=config) as pipe:
            responses = [part for part in pipe.stream_infer(prompts, gen_config=gen_config) if part.token_ids]
            preemptions = pipe.engine.stats().preemptions
        assert bool(preemptions) == (num_gpu_blocks == 16)
        tokens: list[list[int]] = [[] for _ in prompts]
        for part in responses:
            tokens[part.index] += part.token_ids
        return tokens

    assert outputs(16) == outputs(64)


@pytest.mark.parametrize("prefill_interval", [1, 4])
def test_new_request_joins_within_the_prefill_interval(prefill_interval: int, tiny_model: Path) -> None:
    config = pytorch.EngineConfig(prefill_interval=prefill_interval, num_gpu_blocks=16)
    is_decoding, has_started = threading.Event(), threading.Event()
    steps: list[str] = []

    def hold(_ids: list[int], _logits: penstock.Tensor) -> None:
        steps.append("first")
        if len(steps) == 5:
            is_decoding.set()
            has_started.wait(60)

    def record(_ids: list[int], _logits: penstock.Tensor) -> None:
        steps.append("second")

    with pipeline(tiny_model, backend_config=config) as pipe:
        blocking = pipe.engine.blocking
        options: Any = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
        first = blocking.start_request("abc", logits_processors=[hold], **options)
        assert is_decoding.wait(60)
        second = blocking.start_request("xyz", logits_processors=[record], **options)
        has_started.set()
        second.result()
        first.result()
    # The step with the second request also computes a token of the first one.
    assert steps[5:].index("second") - 1 <= prefill_interval


@pytest.mark.parametrize(
    ("configs", "least"),
    [
        ((TurbomindEngineConfig, {"quant_policy": 8}), 1.8),
        ((TurbomindEngineConfig, {"quant_policy": 4}), 3.3),
        ((turbomind.EngineConfig, {"quant_policy": 4}), 1.8),
        ((turbomind.EngineConfig, {"quant_policy": 4, "kv_bits": 4}), 3.3),
        ((turbomind.EngineConfig, {"kv_bits": 4}), 0),
    ],
)
def test_quantised_cache_has_more_blocks(configs: Any, least: float, demo_model: Path) -> None:
    kind, values = configs
    plain, quantised = num_blocks(kind, demo_model), num_blocks(kind, demo_model, **values)
    assert quantised >= least * plain
    assert quantised <= (1.05 * plain if not least else 4.5 * plain)


@functools.cache
def num_blocks(kind: Any, model: Path, **values: Any) -> int:
    """The number of blocks of a KV cache of 64 MiB."""
    options = options_of(kind(**values), model) | {"dtype": "float16", "kv_cache_bytes": 2**26}
    del options["kv_cache_ratio"]
    with penstock.Engine(model, **options) as engine:
        return engine.info.num_blocks


def test_rope_factor_raises_the_maximum_length(tiny_model: Path) -> None:
    config = TurbomindEngineConfig(session_len=1024, cache_max_entry_count=64)
    with pytest.raises(ArgumentError, match="session_len=1024 is not allowed: it must be at most 512"):
        open_engine(str(tiny_model), resolve(tiny_model, backend_config=config).options, {})
    config.rope_scaling_factor = 2.0
    with penstock.Engine(tiny_model, **resolve(tiny_model, backend_config=config).options) as engine:
        assert engine.info.max_model_len == 1024


def test_log_n_attention_applies_beyond_the_trained_length(tiny_model: Path) -> None:
    prompt = [index % 500 for index in range(600)]

    def logprobs(*, use_logn_attn: bool, length: int) -> object:
        values: dict[str, Any] = {
            "rope_scaling_factor": 2.0,
            "session_len": 1024,
            "cache_max_entry_count": 64,
        }
        model, options, _settings = resolve(tiny_model, use_logn_attn=use_logn_attn, **values)
        with penstock.Engine(model, **options) as engine:
            score = engine.blocking.score(prompt[:length])
        return score.logprobs

    assert logprobs(use_logn_attn=True, length=500) == logprobs(use_logn_attn=False, length=500)
    assert logprobs(use_logn_attn=True, length=600) != logprobs(use_logn_attn=False, length=600)


@pytest.mark.needs("symlinks")
def test_rope_factor_does_not_replace_another_scaling(tiny_model: Path, tmp_path: Path) -> None:
    config = json.loads((tiny_model / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"rope_parameters": {"rope_type": "yarn", "factor": 2}})
    )
    for file in tiny_model.iterdir():
        if file.name != "config.json":
            (tmp_path / file.name).symlink_to(file)
    with pytest.raises(UnsupportedError, match=r"rope_scaling_factor is 2.0; .* of type yarn"):
        resolve(tmp_path, rope_scaling_factor=2.0)


@pytest.mark.needs("sources")
def test_every_field_and_template_is_documented() -> None:
    page = (ROOT / "docs" / "lmdeploy.md").read_text(encoding="utf-8")
    names = {field.name for kind in (*CLASSES, GenerationConfig) for field in dataclasses.fields(kind)}
    sizes = ("attn_", "mlp_", "moe_", "outer_")
    names = {name for name in names | NO_EFFECT | set(TEMPLATES) if not name.startswith(sizes)}
    assert {name for name in names if f"`{name}`" not in page} == set()
