"""LoRA adapters: loaded while the engine runs, named by requests, several in one batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import penstock
from support.api.adapters import write_adapter, write_merged
from support.api.checkpoints import make_config, write_checkpoint
from support.api.engines import make_engine
from support.api.running import random_prompt

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.anyio

CONFIG = make_config("llama")
PROMPT = random_prompt(70)
PARAMS = penstock.SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, logprobs=True)
#: Distinct ranks, modules and scales.
ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"rank": 8, "seed": 1, "lora_alpha": 4},
    "wide": {"rank": 33, "seed": 2},
    "narrow": {"rank": 1, "seed": 3, "modules": ("q_proj", "down_proj")},
    "half": {"rank": 8, "seed": 4, "dtype": "bfloat16", "modules": ("v_proj", "up_proj")},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("base"), CONFIG)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(root / name, CONFIG, **options) for name, options in ADAPTERS.items()}


def open_engine(model: Path, **options: Any) -> penstock.Engine:
    return make_engine(model, **{"max_adapters": 4} | options)


@pytest.fixture(scope="module")
def engine(model: Path, folders: dict[str, Path]) -> Iterator[penstock.Engine]:
    """An engine with all adapters."""
    with open_engine(model) as engine:
        for name, folder in folders.items():
            engine.blocking.load_adapter(name, folder)
        yield engine


async def test_adapter_gives_the_output_of_merged_weights(engine: penstock.Engine, tmp_path: Path) -> None:
    merged = write_merged(tmp_path, CONFIG, rank=8, seed=1, scale=0.5)
    async with make_engine(merged) as other:
        expected = await other.generate(PROMPT, PARAMS)
    result = await engine.generate(PROMPT, PARAMS, adapter="all")
    base = await engine.generate(PROMPT, PARAMS)
    assert (result.adapter, base.adapter) == ("all", None)
    assert result.token_ids == expected.token_ids != base.token_ids
    assert result.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
