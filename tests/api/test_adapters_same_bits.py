"""The bits of a request with an adapter depend neither on other requests nor on the engine's limits."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest

import penstock
from support.api.adapters import make_tensors, write_adapter, write_adapter_files
from support.api.checkpoints import make_config, write_checkpoint
from support.api.engines import bits_of, check_stats, make_engine
from support.api.running import random_prompt

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

    Ask = Callable[[penstock.Engine, str | None], Awaitable[Any]]
    Run = tuple[list[int], penstock.SamplingParams]

CONFIG = make_config("llama", num_attention_heads=6, num_key_value_heads=2)
#: Adapters of distinct ranks, modules, scales and types.
ADAPTERS: dict[str, dict[str, Any]] = {
    "rank 1": {"rank": 1},
    "rank 2": {"rank": 2, "modules": ("q_proj", "down_proj")},
    "rank 8": {"rank": 8, "lora_alpha": 5},
    "rank 15": {"rank": 15, "modules": ("k_proj", "v_proj", "o_proj")},
    "rank 16": {"rank": 16, "use_rslora": True},
    "rank 33": {"rank": 33, "modules": ("gate_proj",)},
    "rank 64": {"rank": 64},
    "bfloat16": {"rank": 8, "dtype": "bfloat16", "modules": ("v_proj", "up_proj", "o_proj")},
}
NAMES = [*ADAPTERS, None]
MAX_LEN = 160
LIMITS = {"max_adapters": 8, "max_model_len": MAX_LEN, "max_num_seqs": 32}


def requests() -> list[Run]:
    """32 requests over all adapters and the base; half of the prompts repeat tokens, for accepted drafts."""
    runs = []
    for index in range(32):
        prompt = random_prompt(5 + 3 * index, seed=index)
        if index % 2:
            prompt = (prompt[:10] * 10)[: len(prompt)]
        params = penstock.SamplingParams(
            max_tokens=24,
            temperature=0.0 if index % 3 else 0.8,
            top_k=20,
            seed=index,
            ignore_eos=True,
            logprobs=True,
            adapter=NAMES[index % len(NAMES)],
        )
        runs.append((prompt, params))
    return runs


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("base"), CONFIG)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: write_adapter(root / name, CONFIG, seed=seed, **options)
        for seed, (name, options) in enumerate(ADAPTERS.items())
    }


def open_engine(model: Path, folders: dict[str, Path], **options: Any) -> penstock.Engine:
    """An open engine with all adapters."""
    engine = make_engine(model, **LIMITS | options)
    engine.blocking.start()
    for name, folder in folders.items():
        engine.blocking.load_adapter(name, folder)
    return engine


def run_alone(engine: penstock.Engine, runs: Sequence[Run]) -> list[Any]:
    return [bits_of(engine.blocking.generate(*run)) for run in runs]


def run_together(engine: penstock.Engine, runs: Sequence[Run]) -> list[Any]:
    prompts, params = zip(*runs, strict=True)
    items = list(engine.blocking.generate_many(prompts, params, concurrency=len(runs)))
    check_stats(engine)
    return [item.result and bits_of(item.result) for item in items]


@pytest.fixture(scope="module")
def alone(model: Path, folders: dict[str, Path]) -> list[Any]:
    """The output of each request when no other runs, and nothing is cached."""
    with open_engine(model, folders, prefix_cache=False) as engine:
        return run_alone(engine, requests())


def test_adapters_give_distinct_outputs(model: Path, folders: dict[str, Path]) -> None:
    """Otherwise the comparisons below would prove nothing."""
    prompt, params = requests()[1]
    with open_engine(model, folders) as engine:
        runs = [(prompt, params.replace(adapter=name)) for name in NAMES]
        assert len({output[:2] for output in run_alone(engine, runs)}) == len(NAMES)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("chunk", [32, 64, 512])
def test_batch_chunks_and_threads_change_no_bit(
    threads: int, chunk: int, model: Path, folders: dict[str, Path], alone: list[Any]
) -> None:
    options = {"threads": threads, "max_num_batched_tokens": chunk}
    with open_engine(model, folders, **options) as engine:
        assert run_together(engine, requests()) == alone


def test_50_random_mixes_change_no_bit(model: Path, folders: dict[str, Path], alone: list[Any]) -> None:
    """Mixes of 1 to 32 requests, in any order, over an engine with room for half of the adapters."""
    chance = random.Random(1)
    runs = requests()
    limits = {"max_adapters": 4, "max_cpu_adapters": 8, "max_num_batched_tokens": 64}
    with open_engine(model, folders, **limits) as engine:
        for _ in range(50):
            indices = chance.sample(range(len(runs)), chance.randint(1, len(runs)))
            found = run_together(engine, [runs[index] for index in indices])
            assert found == [alone[index] for index in indices]


def test_prefix_cache_hits_change_no_bit(model: Path, folders: dict[str, Path], alone: list[Any]) -> None:
    with open_engine(model, folders) as engine:
        run_together(engine, requests())
        before = engine.stats().prefix_hit_tokens
        assert run_together(engine, requests()) == alone
        assert engine.stats().prefix_hit_tokens > before


@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
def test_preemption_changes_no_bit(
    preemption_mode: str, model: Path, folders: dict[str, Path], alone: list[Any]
) -> None:
    options = {"kv_cache_blocks": 3 * MAX_LEN // 16, "preemption_mode": preemption_mode}
    with open_engine(model, folders, **options) as engine:
        for _ in range(20):  # until the requests arrive fast enough to need more memory
            assert run_together(engine, requests()) == alone
            if engine.stats().preemptions > 0:
                break
        assert engine.stats().preemptions > 0
        assert (engine.stats().swaps > 0) == (preemption_mode == "swap")


def test_speculation_changes_no_bit(model: Path, folders: dict[str, Path], alone: list[Any]) -> None:
    with open_engine(model, folders, speculation="ngram", num_speculative_tokens=4) as engine:
        assert run_together(engine, requests()) == alone
        assert engine.stats().accepted_tokens > 0


@pytest.mark.parametrize("max_adapters", [1, 3])
def test_few_adapters_on_the_device_change_no_bit(
    max_adapters: int, model: Path, folders: dict[str, Path], alone: list[Any]
) -> None:
    limits = {"max_adapters": max_adapters, "max_cpu_adapters": 8}
    with open_engine(model, folders, **limits) as engine:
        assert run_together(engine, requests()) == alone
        assert sum(adapter.on_device for adapter in engine.adapters.values()) <= max_adapters


def test_memory_for_the_largest_adapter_changes_no_bit(
    model: Path, folders: dict[str, Path], alone: list[Any]
) -> None:
    """The adapters are moved together when a large one needs their room."""
    with open_engine(model, folders) as engine:
        largest = max(adapter.bytes for adapter in engine.adapters.values())
    with open_engine(model, folders, adapter_cache_bytes=largest) as engine:
        assert run_together(engine, requests()) == alone
        on_device = [adapter.bytes for adapter in engine.adapters.values() if adapter.on_device]
        assert sum(on_device) <= largest


def test_base_rows_have_the_bits_of_an_engine_without_adapters(model: Path, alone: list[Any]) -> None:
    runs = [(index, run) for index, run in enumerate(requests()) if run[1].adapter is None]
    with make_engine(model, max_model_len=MAX_LEN) as engine:
        assert engine.info.memory.adapters == 0
        assert run_together(engine, [run for _, run in runs]) == [alone[index] for index, _ in runs]
    assert len(runs) == 3


def test_16_threads_change_no_bit(model: Path, folders: dict[str, Path], alone: list[Any]) -> None:
    with open_engine(model, folders, threads=16) as engine:
        assert run_together(engine, requests()) == alone


def test_matrices_of_two_types_have_the_bits_of_float32(model: Path, tmp_path: Path) -> None:
    """A in float32 and B in float16, beside the same values in float32."""
    wide, half = make_tensors(CONFIG), make_tensors(CONFIG, dtype="float16")
    mixed = {name: half[name] if "lora_B" in name else values for name, values in wide.items()}
    rounded = {name: ("F32", values.astype(np.float32)) for name, (_, values) in mixed.items()}
    folders = {
        "mixed": write_adapter_files(tmp_path / "mixed", {"r": 8}, mixed),
        "rounded": write_adapter_files(tmp_path / "rounded", {"r": 8}, rounded),
        "wide": write_adapter_files(tmp_path / "wide", {"r": 8}, wide),
    }
    prompt, params = requests()[0]
    with open_engine(model, folders) as engine:
        runs = [(prompt, params.replace(adapter=name)) for name in folders]
        outputs = run_alone(engine, runs)
    assert outputs[0] == outputs[1] != outputs[2]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_has_the_bits_of_its_float32_values(dtype: str, model: Path, tmp_path: Path) -> None:
    half = make_tensors(CONFIG, dtype=dtype)
    wide = {}
    for name, (_, values) in half.items():
        if dtype == "bfloat16":
            wide[name] = ("F32", (values.astype(np.uint32) << np.uint32(16)).view(np.float32))
        else:
            wide[name] = ("F32", values.astype(np.float32))
    folders = {
        "half": write_adapter_files(tmp_path / "half", {"r": 8}, half),
        "wide": write_adapter_files(tmp_path / "wide", {"r": 8}, wide),
    }
    with open_engine(model, folders) as engine:
        assert 1.9 < engine.adapters["wide"].bytes / engine.adapters["half"].bytes < 2.1
        for prompt, params in requests()[:8]:
            outputs = run_alone(engine, [(prompt, params.replace(adapter=name)) for name in folders])
            assert outputs[0] == outputs[1] != run_alone(engine, [(prompt, params.replace(adapter=None))])[0]


def test_update_of_zeros_has_the_bits_of_the_base(model: Path, tmp_path: Path) -> None:
    tensors = {
        name: (dtype, values * ("lora_A" in name)) for name, (dtype, values) in make_tensors(CONFIG).items()
    }
    folders = {"zero": write_adapter_files(tmp_path, {"r": 8}, tensors)}
    with open_engine(model, folders) as engine:
        for prompt, params in requests()[:8]:
            runs = [(prompt, params.replace(adapter=name)) for name in ("zero", None)]
            zero, base = run_alone(engine, runs)
            assert zero == base


def outputs_of(result: penstock.Result) -> list[Any]:
    """All outputs of all choices."""
    return [
        (
            choice.text,
            choice.token_ids,
            choice.logprobs,
            choice.top_logprobs,
            choice.finish_reason,
            None if choice.logits is None else np.asarray(choice.logits).tobytes(),
        )
        for choice in result.choices
    ]


def prefer_even(_: Sequence[int], logits: penstock.Tensor) -> None:
    np.asarray(logits)[::2] += 2


#: Options of a request.
FEATURES: dict[str, dict[str, Any]] = {
    "choices": {"n": 3, "seed": 1},
    "best of": {"n": 2, "best_of": 4, "seed": 1},
    "beams": {"num_beams": 3, "max_tokens": 10},
    "grammar": {"regex": "(abc|abd){3}[0-9]{3}", "seed": 1},
    "processors": {"logits_processors": [prefer_even], "temperature": 0},
    "logits": {"output_logits": "all", "temperature": 0},
    "prompt logprobs": {"prompt_logprobs": 3, "temperature": 0},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "temperature": 0},
    "several": {"n": 2, "regex": "[a-z ]{12}", "top_logprobs": 2, "seed": 1},
}


FEW = ("rank 8", "rank 64", None)


async def compare_in_a_batch(model: Path, folders: dict[str, Path], ask: Ask) -> None:
    """Compare the answers of `ask` alone with those beside 32 other requests."""
    with open_engine(model, folders) as engine:
        expected = [await ask(engine, name) for name in FEW]
        assert len(set(map(str, expected))) == len(FEW)
    found: dict[str | None, Any] = {}

    async def keep(engine: penstock.Engine, name: str | None) -> None:
        found[name] = await ask(engine, name)

    with open_engine(model, folders, max_num_batched_tokens=48) as engine:
        async with anyio.create_task_group() as group:
            for run in requests():
                group.start_soon(engine.generate, *run)
            for name in FEW:
                group.start_soon(keep, engine, name)
    assert [found[name] for name in FEW] == expected


@pytest.mark.anyio
@pytest.mark.parametrize("feature", FEATURES)
async def test_feature_with_an_adapter_has_the_same_bits_in_a_batch(
    feature: str, model: Path, folders: dict[str, Path]
) -> None:
    options = {"max_tokens": 12, "logprobs": "num_beams" not in FEATURES[feature]} | FEATURES[feature]
    prompt = random_prompt(40)

    async def ask(engine: penstock.Engine, name: str | None) -> Any:
        result = await engine.generate(prompt, adapter=name, **options)
        assert result.adapter == name
        return outputs_of(result), result.prompt_logprobs

    await compare_in_a_batch(model, folders, ask)


@pytest.mark.anyio
async def test_score_with_an_adapter_has_the_same_bits_in_a_batch(
    model: Path, folders: dict[str, Path]
) -> None:
    text = random_prompt(90)

    async def ask(engine: penstock.Engine, name: str | None) -> Any:
        return (await engine.score(text, adapter=name)).logprobs

    await compare_in_a_batch(model, folders, ask)
