"""Tokens per second with LoRA adapters, relative to the base model of the same run.

    python benches/adapters.py --model PATH [--rank 16] [--tokens 64] [--rounds 5]

The model is a safetensors directory, for instance one with random weights. Each round runs batches of 1, 8
and 32 streams: on an engine without adapters, on one with adapters that no request names, and with the
requests of a batch divided between 1 and 8 adapters of all linear layers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import penstock

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ADAPTERS = 8
BATCHES = (1, 8, 32)


def write_adapter(directory: Path, model: dict[str, Any], rank: int, seed: int) -> None:
    """Write a random adapter of all linear layers in PEFT's layout."""
    from safetensors.numpy import save_file

    hidden, inner = model["hidden_size"], model["intermediate_size"]
    head_dim = model.get("head_dim") or hidden // model["num_attention_heads"]
    query, kv = model["num_attention_heads"] * head_dim, model["num_key_value_heads"] * head_dim
    shapes = {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    generator = np.random.default_rng(seed)
    tensors = {}
    for layer in range(model["num_hidden_layers"]):
        for name, (rows, columns) in shapes.items():
            module = f"base_model.model.model.layers.{layer}.{name}"
            for part, shape in {"A": (rank, columns), "B": (rows, rank)}.items():
                values = generator.standard_normal(shape, dtype=np.float32) / np.float32(100)
                tensors[f"{module}.lora_{part}.weight"] = values
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(MODULES)}
    (directory / "adapter_config.json").write_text(json.dumps(config))


def speed(engine: penstock.Engine, adapters: list[str | None], tokens: int) -> float:
    """Tokens per second of one stream for each of these adapters."""
    parameters = [
        penstock.SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0, adapter=adapter)
        for adapter in adapters
    ]
    prompts = [[index + 1, 2, 3, 4] for index in range(len(adapters))]
    started = time.perf_counter()
    for item in engine.blocking.generate_many(prompts, parameters, concurrency=len(adapters)):
        if item.error is not None:
            raise item.error
    return len(adapters) * tokens / (time.perf_counter() - started)


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a safetensors directory")
    parser.add_argument("--quantization", default=None, help="quantisation of the base weights")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a stream")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    model = json.loads((arguments.model / "config.json").read_text())
    options: dict[str, Any] = {"kv_cache_bytes": 256 << 20, "prefix_cache": False, "speculation": None}
    if arguments.quantization:
        options["quantization"] = arguments.quantization
    names = [f"adapter-{index}" for index in range(ADAPTERS)]
    plain = penstock.Engine(arguments.model, **options)
    enabled = penstock.Engine(
        arguments.model,
        max_adapters=ADAPTERS,
        max_adapter_rank=arguments.rank,
        **options,
    )
    speeds: dict[tuple[int, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as scratch, plain, enabled:
        for seed, name in enumerate(names):
            directory = Path(scratch) / name
            write_adapter(directory, model, arguments.rank, seed)
            started = time.perf_counter()
            adapter = enabled.blocking.load_adapter(name, directory)
            seconds = time.perf_counter() - started
            print(f"{name}: {adapter.bytes / 1e6:.1f} MB loaded in {1e3 * seconds:.0f} ms")
        ways: dict[str, tuple[penstock.Engine, list[str | None]]] = {
            "no adapters": (plain, [None]),
            "adapters unused": (enabled, [None]),
            "1 adapter": (enabled, [names[0]]),
            f"{ADAPTERS} adapters": (enabled, list(names)),
        }
        for _ in range(arguments.rounds):
            for batch in BATCHES:
                for way, (engine, used) in ways.items():
                    adapters = [used[index % len(used)] for index in range(batch)]
                    speeds.setdefault((batch, way), []).append(speed(engine, adapters, arguments.tokens))
    print("\n| batch | | tokens/s | ratio to no adapters (range) |\n|---|---|---|---|")
    for (batch, way), values in speeds.items():
        base = speeds[batch, "no adapters"]
        ratios = [value / other for value, other in zip(values, base, strict=True)]
        print(
            f"| {batch} | {way} | {statistics.median(values):.1f} | {statistics.median(ratios):.3f} "
            f"({min(ratios):.3f} to {max(ratios):.3f}) |"
        )


if __name__ == "__main__":
    main()
