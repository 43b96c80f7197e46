"""Parity with PEFT: adapters that it saves give the logits and tokens of PEFT loading them from disk."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import penstock
from support.api.checkpoints import make_config, write_checkpoint
from support.api.engines import make_engine
from support.api.ggufs import TYPES, VOCABULARY, write_gguf
from support.api.running import compute_logits, random_prompt
from support.parity.compare import Logits, assert_close, assert_greedy
from support.parity.peft_adapters import edit_config, load_adapted, load_merged, save_adapter, save_merged

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from support.parity.oracle import Oracle

pytestmark = pytest.mark.oracle

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
NUM_TOKENS = 64
make_prompt = functools.partial(random_prompt, 90, vocabulary_size=VOCABULARY)
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
#: A pattern for one layer and one for all, which both match layer 0.
ONE_LAYER, ALL_LAYERS = "model.layers.0.self_attn.q_proj", "q_proj"

#: Configurations of PEFT.
ADAPTERS: dict[str, dict[str, Any]] = {
    "rank 1": {"r": 1, "lora_alpha": 1, "target_modules": "all-linear"},
    "rank 8": {"r": 8, "lora_alpha": 8, "target_modules": "all-linear"},
    "rank 64": {"r": 64, "lora_alpha": 64, "target_modules": "all-linear"},
    "rank that is no multiple of 8": {"r": 13, "lora_alpha": 7, "target_modules": "all-linear"},
    "defaults": {"target_modules": ["q_proj", "v_proj"]},
    "larger alpha": {"r": 8, "lora_alpha": 20, "target_modules": ATTENTION},
    "fractional alpha": {"r": 8, "lora_alpha": 2.5, "target_modules": ATTENTION},
    "negative alpha": {"r": 4, "lora_alpha": -4, "target_modules": ATTENTION},
    "rsLoRA": {"r": 12, "lora_alpha": 4, "use_rslora": True, "target_modules": "all-linear"},
    "rsLoRA with ranks of modules": {
        "r": 8,
        "lora_alpha": 3,
        "use_rslora": True,
        "rank_pattern": {"q_proj": 2, "down_proj": 24, "layers.1.mlp.up_proj": 5},
        "target_modules": "all-linear",
    },
    "patterns of ranks": {
        "r": 8,
        "lora_alpha": 16,
        "rank_pattern": {"self_attn.v_proj": 3, r"model\.layers\.1\.mlp\.(up|gate)_proj": 16},
        "target_modules": "all-linear",
    },
    "patterns of alphas": {
        "r": 4,
        "lora_alpha": 2,
        "alpha_pattern": {r".*\.0\..*k_proj": 9, "o_proj": 1, "down_proj": 6},
        "target_modules": "all-linear",
    },
    "patterns of ranks and alphas": {
        "r": 4,
        "lora_alpha": 2,
        "rank_pattern": {"k_proj": 9, "o_proj": 2},
        "alpha_pattern": {"k_proj": 3, "up_proj": 5},
        "target_modules": "all-linear",
    },
    "patterns that overlap, sorted when they are saved": {
        "r": 8,
        "lora_alpha": 8,
        "alpha_pattern": {ALL_LAYERS: 2, ONE_LAYER: 64},
        "target_modules": ATTENTION,
    },
    "pattern of a part of a name": {
        "r": 8,
        "lora_alpha": 8,
        "alpha_pattern": {"proj": 64, "_proj": 64, "q_pro": 64, "attn.q_proj": 64, "0.self_attn.q_proj": 24},
        "target_modules": ATTENTION,
    },
    "modules by an expression": {"r": 8, "target_modules": r".*\.layers\.1\..*\.(q|down)_proj"},
    "modules by their ends": {"r": 8, "target_modules": ["0.self_attn.q_proj", "mlp.up_proj"]},
    "module that the model lacks": {"r": 8, "target_modules": ["q_proj", "router"]},
    "some layers": {"r": 8, "target_modules": ATTENTION, "layers_to_transform": [1]},
    "layers of a pattern": {
        "r": 8,
        "target_modules": ["up_proj"],
        "layers_to_transform": 0,
        "layers_pattern": "layers",
    },
    "excluded modules": {"r": 8, "target_modules": "all-linear", "exclude_modules": ["k_proj", "o_proj"]},
    "excluded by an expression": {
        "r": 8,
        "target_modules": "all-linear",
        "exclude_modules": r".*\.0\..*",
    },
    "dropout": {"r": 8, "target_modules": ["q_proj"], "lora_dropout": 0.5},
    "Gaussian start": {"r": 8, "target_modules": ["q_proj"], "init_lora_weights": "gaussian"},
    "orthogonal start": {"r": 8, "target_modules": ["q_proj"], "init_lora_weights": "orthogonal"},
    "without a start": {"r": 8, "target_modules": ["q_proj"], "init_lora_weights": False},
    "other name": {"r": 8, "target_modules": ATTENTION, "adapter_name": "sql"},
    "bfloat16": {"r": 8, "target_modules": "all-linear", "dtype": "bfloat16"},
    "float16": {"r": 8, "lora_alpha": 3, "target_modules": "all-linear", "dtype": "float16"},
}
BY_FAMILY = ("rank 8", "rsLoRA with ranks of modules", "bfloat16")


@pytest.fixture(scope="module", params=FAMILIES)
def any_base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of each family."""
    return write_checkpoint(tmp_path_factory.mktemp("base"), make_config(request.param))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with biases of the linear layers, which updates are added to."""
    config = make_config("llama", attention_bias=True, mlp_bias=True)
    return write_checkpoint(tmp_path_factory.mktemp("base"), config)


def run(
    prompt: list[int], base: Path, adapter: Path | None = None, **options: Any
) -> tuple[penstock.Result, NDArray[np.float32]]:
    """64 greedy tokens, and the logits of all positions."""
    with make_engine(base, max_adapters=1, threads=2, max_num_batched_tokens=64, **options) as engine:
        if adapter is not None:
            engine.blocking.load_adapter("adapter", adapter)
        result = engine.blocking.generate(
            prompt,
            max_tokens=NUM_TOKENS,
            temperature=0,
            ignore_eos=True,
            logprobs=True,
            output_logits="all",
            adapter="adapter" if adapter is not None else None,
        )
    return result, np.asarray(result.logits)


def compare(
    prompt: list[int], ours: tuple[penstock.Result, NDArray[np.float32]], oracle: Oracle
) -> tuple[list[int], Logits]:
    """Compare the logits and the tokens with those of the oracle; returns all tokens and its logits."""
    result, logits = ours
    assert result.logprobs is not None
    greedy = oracle.greedy(prompt, NUM_TOKENS)
    assert_greedy(result.token_ids, result.logprobs, greedy)
    token_ids = [*prompt, *greedy.token_ids[:-1]]
    theirs = oracle.logits(token_ids)
    assert_close(logits, theirs)
    return token_ids, theirs


def check(base: Path, adapter: Path, **options: Any) -> tuple[list[int], Logits]:
    """Compare the logits and the tokens of an adapter with those of PEFT, which are returned."""
    oracle = load_adapted(base, adapter)
    prompt, _ = oracle.find_greedy(make_prompt, NUM_TOKENS)
    return compare(prompt, run(prompt, base, adapter, **options), oracle)


def assert_adapted(base: Path, token_ids: list[int], theirs: Logits) -> None:
    """Check that the logits of an adapter are far from those of the base."""
    plain = compute_logits(base, token_ids, threads=2)[theirs.positions]
    assert np.abs(theirs.rows - plain).max() > 0.02 * np.abs(plain).max()


@pytest.mark.needs("hooks")
@pytest.mark.parametrize("name", ADAPTERS)
def test_adapter_of_peft_matches_peft(name: str, base: Path, tmp_path: Path) -> None:
    adapter = save_adapter(base, tmp_path, **ADAPTERS[name])
    assert_adapted(base, *check(base, adapter))


@pytest.mark.needs("hooks")
@pytest.mark.parametrize("name", BY_FAMILY)
def test_adapter_of_each_family_matches_peft(name: str, any_base: Path, tmp_path: Path) -> None:
    adapter = save_adapter(any_base, tmp_path, **ADAPTERS[name])
    assert_adapted(any_base, *check(any_base, adapter))


@pytest.mark.parametrize("first", [ONE_LAYER, ALL_LAYERS])
def test_first_of_overlapping_patterns_applies(first: str, base: Path, tmp_path: Path) -> None:
    adapter = save_adapter(base, tmp_path, r=8, lora_alpha=8, target_modules=["q_proj"])
    other = ONE_LAYER if first == ALL_LAYERS else ALL_LAYERS
    alphas = {ALL_LAYERS: 2, ONE_LAYER: 64}
    edit_config(adapter, alpha_pattern={first: alphas[first], other: alphas[other]})
    check(base, adapter)


def test_omitted_rank_and_alpha_match_peft(base: Path, tmp_path: Path) -> None:
    adapter = save_adapter(base, tmp_path, target_modules=ATTENTION)
    edit_config(adapter, r=8, lora_alpha=8)
    file = adapter / "adapter_config.json"
    lines = [line for line in file.read_text().split(", ") if not line.startswith(('"r"', '"lora_alpha"'))]
    file.write_text(", ".join(lines))
    assert '"r"' not in file.read_text()
    check(base, adapter)


@pytest.mark.parametrize("name", BY_FAMILY)
def test_merged_weights_give_the_same_output(name: str, any_base: Path, tmp_path: Path) -> None:
    adapter = save_adapter(any_base, tmp_path / "adapter", **ADAPTERS[name])
    merged = save_merged(any_base, adapter, tmp_path / "merged")
    oracles = load_adapted(any_base, adapter), load_merged(any_base, adapter)
    prompt, _ = oracles[0].find_greedy(make_prompt, NUM_TOKENS)
    ours, others = run(prompt, any_base, adapter), run(prompt, merged)
    assert ours[0].token_ids == others[0].token_ids
    assert_close(ours[1], Logits.all_of(others[1]))
    for oracle in oracles:
        compare(prompt, ours, oracle)
        compare(prompt, others, oracle)


@pytest.mark.needs("hooks")
def test_tied_head_is_not_adapted(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", make_config("qwen2", tie_word_embeddings=True))
    adapter = save_adapter(base, tmp_path / "adapter", r=8, target_modules="all-linear")
    assert_adapted(base, *check(base, adapter))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_base_of_half_precision_computes_as_in_float32(dtype: str, tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", make_config("llama", dtype=dtype))
    adapter = save_adapter(base, tmp_path / "adapter", r=8, target_modules="all-linear")
    check(base, adapter, kv_cache_dtype="float32")


@pytest.mark.needs("hooks")
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_adapter_over_a_gguf_base_matches_peft(architecture: str, tmp_path: Path) -> None:
    """GGUF files of Llama have another order of rows of q and k than the B of PEFT."""
    base = tmp_path / "model.gguf"
    write_gguf(base, TYPES["F32"], architecture=architecture)
    adapter = save_adapter(base, tmp_path / "adapter", r=8, lora_alpha=5, target_modules="all-linear")
    assert_adapted(base, *check(base, adapter))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_K", "Q6_K"])
def test_adapter_over_quantised_gguf_is_close_to_peft(kind: str, tmp_path: Path) -> None:
    """The oracle has the values of the codes in float32, but does not round activations."""
    base = tmp_path / "model.gguf"
    write_gguf(base, TYPES[kind])
    adapter = save_adapter(base, tmp_path / "adapter", r=8, lora_alpha=5, target_modules="all-linear")
    token_ids, theirs = check(base, adapter, quantization="none", dtype="float32")
    ours = run(token_ids, base, adapter)[1][theirs.positions]
    assert np.sqrt(np.mean((ours - theirs.rows) ** 2) / np.var(theirs.rows)) < 0.05


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"bias": "lora_only"}, "bias"),
        ({"lora_bias": True}, "lora_bias"),
        ({"init_lora_weights": "olora"}, "init_lora_weights"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"trainable_token_indices": [3, 5]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication"),
        ({"alora_invocation_tokens": [3]}, "alora_invocation_tokens"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "embed_tokens.base_layer.weight"),
        ({"target_modules": ["q_proj", "lm_head"]}, "lm_head"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_unsupported_adapter_that_peft_saves_is_refused(
    changes: dict[str, Any], field: str, base: Path, tmp_path: Path
) -> None:
    adapter = save_adapter(base, tmp_path, **{"r": 4, "target_modules": ["q_proj"], **changes})
    with (
        make_engine(base, max_adapters=1) as engine,
        pytest.raises(penstock.AdapterLoadError, match=field),
    ):
        engine.blocking.load_adapter("adapter", adapter)
