"""Families that differ from a tested one only in names compute the bits of that one.

The relatives are compared with transformers; a model with the same weights under the names of another family
has the same tokens and log probabilities, to the bit.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

import penstock
from support.api.checkpoints import make_config, write_checkpoint
from support.api.running import random_prompt

if TYPE_CHECKING:
    from pathlib import Path

SEED_OSS = {"architectures": ["SeedOssForCausalLM"], "model_type": "seed_oss"}
INTERNLM3 = {"architectures": ["InternLM3ForCausalLM"], "model_type": "internlm3"}
EVERYWHERE = {"attention_bias": True, "mlp_bias": True}
#: The relative, and the fields of the other family.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "seed_oss with its defaults": (make_config("qwen2"), SEED_OSS),
    "seed_oss without biases": (make_config("llama"), {**SEED_OSS, "attention_bias": False}),
    "seed_oss with all biases": (
        make_config("llama", **EVERYWHERE),
        {**SEED_OSS, "attention_bias": True, "attention_out_bias": True, "mlp_bias": True},
    ),
    "internlm3 with its defaults": (make_config("llama", head_dim=None), INTERNLM3),
    "internlm3 with biases of q, k and v": (make_config("qwen2"), {**INTERNLM3, "qkv_bias": True}),
    "internlm3 with all biases": (
        make_config("llama", **EVERYWHERE),
        {**INTERNLM3, "qkv_bias": True, "bias": True},
    ),
}


def answer(checkpoint: Path) -> penstock.Result:
    with penstock.Engine(checkpoint, threads=2, max_num_batched_tokens=32) as engine:
        return engine.blocking.generate(
            random_prompt(70), max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=True, top_logprobs=4
        )


@pytest.mark.parametrize("case", CASES)
def test_family_has_the_bits_of_its_relative(case: str, tmp_path: Path) -> None:
    config, fields = CASES[case]
    relative = write_checkpoint(tmp_path, config)
    expected = answer(relative)
    flags = {"attention_bias", "mlp_bias"}
    renamed = {name: value for name, value in config.items() if name not in flags} | fields
    (relative / "config.json").write_text(json.dumps(renamed))
    found = answer(relative)
    assert found.token_ids == expected.token_ids
    assert (found.logprobs, found.top_logprobs) == (expected.logprobs, expected.top_logprobs)


def test_seed_oss_needs_the_tensor_of_each_bias(tmp_path: Path) -> None:
    config = make_config("qwen2", **SEED_OSS, attention_out_bias=True)
    checkpoint = write_checkpoint(tmp_path, {**config, "model_type": "qwen2"})
    (checkpoint / "config.json").write_text(json.dumps(config))
    missing = r"model\.layers\.0\.self_attn\.o_proj\.bias"
    with pytest.raises(penstock.ModelLoadError, match=missing), penstock.Engine(checkpoint):
        pass
