"""LoRA adapters on the emulated CUDA device: as on the CPU, and the same bits in every batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from emu.client import Device
from support.api.adapters import write_adapter
from support.api.checkpoints import make_config, write_checkpoint
from support.api.engines import check_stats, make_engine
from support.api.running import random_prompt
from support.kernels.emulator import Ended, run_program

pytestmark = pytest.mark.timeout(600)  # the first test builds the kernels

CONFIG = make_config("llama", num_hidden_layers=2)
#: Adapters of distinct ranks, modules, scales and types.
ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"rank": 8, "lora_alpha": 5},
    "small": {"rank": 3, "modules": ("q_proj", "v_proj", "down_proj")},
    "large": {"rank": 40, "modules": ("k_proj", "o_proj", "up_proj"), "dtype": "bfloat16"},
    "half": {"rank": 16, "modules": ("v_proj", "gate_proj"), "dtype": "float16"},
}
NAMES: list[str | None] = [*ADAPTERS, None]
LIMITS = {"max_adapters": 4, "max_model_len": 64, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of float32, `base`, and its adapters."""
    root = tmp_path_factory.mktemp("adapters")
    write_checkpoint(root / "base", CONFIG)
    for seed, (name, options) in enumerate(ADAPTERS.items()):
        write_adapter(root / name, CONFIG, seed=seed, **options)
    return root


def open_engine(folder: Path, **options: Any) -> penstock.Engine:
    """An open engine with all adapters."""
    engine = make_engine(folder / "base", **LIMITS | {"kv_cache_dtype": "float32"} | options)
    engine.blocking.start()
    for name in ADAPTERS:
        engine.blocking.load_adapter(name, folder / name)
    return engine


def outputs(engine: penstock.Engine, concurrency: int) -> list[Any]:
    """The tokens and their log probabilities of eight requests over all adapters and the base."""
    params = [
        penstock.SamplingParams(
            max_tokens=6, temperature=0, ignore_eos=True, logprobs=True, adapter=NAMES[index % len(NAMES)]
        )
        for index in range(8)
    ]
    prompts = [random_prompt(3 + 4 * index, seed=index) for index in range(8)]
    items = list(engine.blocking.generate_many(prompts, params, concurrency=concurrency))
    check_stats(engine)
    return [[list(item.result.token_ids), item.result.logprobs] for item in items if item.result]


def run_requests(folder: str, options: str, concurrencies: str) -> list[Any]:
    """The outputs of the requests, for each number of requests that run at the same time."""
    with open_engine(Path(folder), prefix_cache=False, **json.loads(options)) as engine:
        return [outputs(engine, concurrency) for concurrency in json.loads(concurrencies)]


def on_cuda(folder: Path, *concurrencies: int, checked: bool = False, **options: Any) -> list[Any]:
    options["device"] = "cuda"
    ended = run_program(run_requests, folder, json.dumps(options), json.dumps(concurrencies), checked=checked)
    assert ended.findings == []
    return list(ended.result)


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[Any]:
    """The output of each request when no other runs."""
    (found,) = on_cuda(folder, 1)
    assert len(found) == 8
    return list(found)


@pytest.mark.needs("cuda")
def test_adapters_give_the_tokens_of_the_cpu(folder: Path, alone: list[Any]) -> None:
    (expected,) = run_requests(str(folder), "{}", "[1]")
    assert [tokens for tokens, _ in alone] == [tokens for tokens, _ in expected]
    for (_, found), (_, logprobs) in zip(alone, expected, strict=True):
        assert np.allclose(found, logprobs, atol=1e-4)


def test_adapters_give_distinct_outputs(folder: Path) -> None:
    """Otherwise the comparisons would prove nothing."""
    with open_engine(folder) as engine:
        prompt = random_prompt(9)
        params = penstock.SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
        found = {engine.blocking.generate(prompt, params.replace(adapter=name)).token_ids for name in NAMES}
    assert len(found) == len(NAMES)


@pytest.mark.needs("cuda")
def test_batch_and_chunks_change_no_bit(folder: Path, alone: list[Any]) -> None:
    assert on_cuda(folder, 8) == [alone]
    assert on_cuda(folder, 8, max_num_batched_tokens=16) == [alone]


@pytest.mark.needs("cuda")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"quantization": "int4"}, id="int4"),
        *(
            pytest.param(options, id=" ".join(options.values()), marks=pytest.mark.rare)
            for options in (
                *({"dtype": "bfloat16"}, {"dtype": "float16"}),
                *({"quantization": name} for name in ("w8a16", "w4a16", "int8")),
            )
        ),
    ],
)
def test_adapters_on_rounded_weights_are_those_of_the_cpu(folder: Path, options: dict[str, Any]) -> None:
    one, all_at_once = on_cuda(folder, 1, 8, **options)
    assert one == all_at_once
    (expected,) = run_requests(str(folder), json.dumps(options), "[1]")
    first = np.array([logprobs[0] for _, logprobs in one])
    assert np.allclose(first, [logprobs[0] for _, logprobs in expected], atol=0.05)


@pytest.mark.needs("cuda")
@pytest.mark.rare
def test_few_adapters_on_the_device_change_no_bit(folder: Path, alone: list[Any]) -> None:
    """Adapters are replaced while other steps run."""
    assert on_cuda(folder, 1, 8, max_adapters=1, max_cpu_adapters=4) == [alone, alone]


def move_adapters(folder: str) -> dict[str, Any]:
    """Outputs, and the adapters on the device after each, with room for two adapters but not in one piece."""
    with open_engine(Path(folder), device="cuda") as engine:
        sizes = {name: adapter.bytes for name, adapter in engine.adapters.items()}
    room = sizes["large"] + sizes["small"]
    found: dict[str, Any] = {"sizes": sizes, "outputs": [], "on device": []}
    with open_engine(Path(folder), device="cuda", adapter_cache_bytes=room) as engine:
        for name in ("all", "small", "large", "small"):
            params = penstock.SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, adapter=name)
            found["outputs"].append(engine.blocking.generate(random_prompt(9), params).token_ids)
            found["on device"].append(sorted(key for key, each in engine.adapters.items() if each.on_device))
    return found


@pytest.mark.needs("cuda")
def test_adapters_are_moved_together_for_a_large_one(folder: Path) -> None:
    ended: Ended = run_program(move_adapters, folder)
    assert ended.findings == []
    sizes, found = ended.result["sizes"], ended.result["outputs"]
    assert sizes["all"] < sizes["large"]  # so "large" fits neither before "small" nor after it
    assert ended.result["on device"] == [["all"], ["all", "small"], ["large", "small"], ["large", "small"]]
    assert found[1] == found[3]
    with open_engine(folder) as engine:
        for name, tokens in zip(("all", "small", "large"), found, strict=False):
            params = penstock.SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, adapter=name)
            assert list(engine.blocking.generate(random_prompt(9), params).token_ids) == tokens


def change_adapters(folder: str, device: str) -> list[Any]:
    """Outputs of a request before and after its adapter is replaced, unloaded and loaded again."""
    root = Path(folder)
    found = []
    with open_engine(root, device=device) as engine:

        def add(adapter: str | None) -> None:
            params = penstock.SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, adapter=adapter)
            found.append(engine.blocking.generate(random_prompt(9), params).token_ids)

        add("all")
        engine.blocking.load_adapter("all", root / "large", replace=True)
        add("all")
        engine.blocking.unload_adapter("large")
        engine.blocking.unload_adapter("all")
        add(None)
        engine.blocking.load_adapter("again", root / "all")
        add("again")
        check_stats(engine)
    return found


@pytest.mark.needs("cuda")
def test_adapters_are_replaced_and_unloaded(folder: Path) -> None:
    ended: Ended = run_program(change_adapters, folder, "cuda")
    assert ended.findings == []
    found = [tuple(tokens) for tokens in ended.result]
    assert found == [tuple(tokens) for tokens in change_adapters(str(folder), "cpu")]
    assert found[0] == found[3]
    assert len(set(found)) == 3


@pytest.mark.needs("cuda")
@pytest.mark.rare
def test_kernels_use_only_memory_of_loaded_adapters(folder: Path, alone: list[Any]) -> None:
    assert on_cuda(folder, 8, checked=True, max_adapters=2, max_cpu_adapters=4) == [alone]


def copy_half_an_adapter(folder: str) -> list[Any]:
    """Replaces an adapter on the device by a smaller one of which half is not copied.

    Returns the changes of regions of the arena, and a finding.
    """
    driver = Device("libcuda.so.1")
    with open_engine(Path(folder), device="cuda", max_adapters=1, max_cpu_adapters=4) as engine:
        params = penstock.SamplingParams(max_tokens=2, temperature=0, adapter="all")
        engine.blocking.generate(random_prompt(9), params)
        driver.library.emuClear()
        driver.plant("cuMemcpyHtoDAsync_v2", 1)
        engine.blocking.generate(random_prompt(9), params.replace(adapter="small"))
        found = [driver.library.emuCount(b"emuRegion"), driver.findings()[:1]]
        driver.library.emuClear()
    return found


@pytest.mark.needs("cuda")
@pytest.mark.rare
def test_adapter_does_not_read_what_the_one_before_has_left(folder: Path) -> None:
    ended = run_program(copy_half_an_adapter, folder, checked=True)
    assert ended.findings == []
    regions, findings = ended.result
    assert regions == 2  # one is freed, one is given out
    (finding,) = findings
    assert "never written" in finding
