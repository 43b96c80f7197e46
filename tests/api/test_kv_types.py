"""KV-cache types: memory savings and accuracy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

import penstock
from support.api.checkpoints import make_config, write_checkpoint
from support.api.engines import make_engine
from support.api.running import compute_logits, perplexity, random_prompt
from support.marks import rare_except
from support.paths import DATA, ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

#: Two English texts, and the number of tokens of each.
TEXTS = {"licence": ROOT / "LICENSE", "story": DATA / "alice.txt"}
NUM_TOKENS = 600


#: Bounds, about twice the measured values: the RMS error of the logits relative to their standard deviation,
#: and the relative change of the perplexity.
BOUNDS = {
    "float16": (0.001, 0.0005),
    "bfloat16": (0.012, 0.003),
    "int8": (0.03, 0.004),
    "uint4": (0.25, 0.1),
}


@pytest.fixture(scope="module", params=rare_except(TEXTS, "licence"))
def exact(demo_model: Path, request: pytest.FixtureRequest) -> tuple[list[int], NDArray[np.float32]]:
    """The token ids of a text, and the demo model's logits with a float32 KV cache."""
    with make_engine(demo_model) as engine:
        token_ids = engine.encode(TEXTS[request.param].read_text())[:NUM_TOKENS]
    assert len(token_ids) == NUM_TOKENS
    return token_ids, compute_logits(demo_model, token_ids)


@pytest.mark.needs("hooks", "sources")
@pytest.mark.parametrize("name", rare_except(BOUNDS, "int8"))
def test_quantised_kv_cache_stays_close_on_the_demo_model(
    name: str, demo_model: Path, exact: tuple[list[int], NDArray[np.float32]]
) -> None:
    token_ids, expected = exact
    narrow = compute_logits(demo_model, token_ids, kv_cache_dtype=name)
    error = np.sqrt(np.mean((narrow - expected) ** 2) / np.var(expected))
    change = perplexity(narrow, token_ids) / perplexity(expected, token_ids) - 1
    print(f"{name}: error of logits {error:.5f}, change of perplexity {change:+.5f}")
    most_error, most_change = BOUNDS[name]
    assert 0 < error < most_error
    assert abs(change) < most_change


@pytest.mark.needs("hooks", "sources")
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("name", BOUNDS)
def test_quantised_kv_cache_stays_within_bounds_on_random_models(
    name: str, family: str, tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(
        tmp_path / "model", make_config(family, head_dim=80 if family == "qwen3" else 32)
    )
    token_ids = random_prompt(200)
    exact = compute_logits(checkpoint, token_ids)
    narrow = compute_logits(checkpoint, token_ids, kv_cache_dtype=name)
    error = np.sqrt(np.mean((narrow - exact) ** 2) / np.var(exact))
    print(f"{family}, {name}: error of logits {error:.5f}")
    assert 0 < error < BOUNDS[name][0]


def test_smaller_kv_type_gives_more_blocks_per_byte(demo_model: Path) -> None:
    def blocks(name: str) -> int:
        config = {"dtype": "bfloat16", "max_num_seqs": 64, "kv_cache_bytes": 64 << 20}
        with make_engine(demo_model, kv_cache_dtype=name, **config) as engine:
            assert engine.info.kv_cache_dtype == name
            return engine.info.num_blocks

    model_type = blocks("bfloat16")
    assert blocks("float16") == model_type
    assert blocks("float32") == model_type // 2
    assert blocks("int8") / model_type > 1.75
    assert blocks("uint4") / model_type > 3.5


def test_unknown_kv_type_error_lists_the_types(tiny_model: Path) -> None:
    with pytest.raises(penstock.ConfigError, match=r"int8.*uint4"):
        make_engine(tiny_model, kv_cache_dtype="int3")
