"""Streams from the base model and from a LoRA adapter side by side: `python examples/lora.py [MODEL]`.

The adapter is random: it shows how adapters are loaded and named, not what training achieves. An adapter that
PEFT has saved is loaded in the same way.
"""

import json
import random
import struct
import sys
import tempfile
from pathlib import Path

import anyio

import penstock
from penstock.demo import model_path

QUESTION = [{"role": "user", "content": "Name three animals."}]
RANK = 4


def write_adapter(folder: Path, model: str) -> None:
    """Write a random adapter of one module of each layer, in PEFT's layout."""
    config = penstock.describe(model)["config"]
    chance = random.Random(1)  # noqa: S311 - weights
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.mlp.down_proj"
        tensors[f"{name}.lora_A.weight"] = (RANK, config["intermediate_size"])
        tensors[f"{name}.lora_B.weight"] = (config["hidden_size"], RANK)
    header, data = {}, bytearray()
    for name, (rows, columns) in tensors.items():
        values = [chance.gauss(0, 0.04) for _ in range(rows * columns)]
        start = len(data)
        data += struct.pack(f"<{len(values)}f", *values)
        header[name] = {"dtype": "F32", "shape": [rows, columns], "data_offsets": [start, len(data)]}
    text = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["down_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


async def main(model: str) -> None:
    """Both requests run in the same batch."""
    params = penstock.SamplingParams(max_tokens=24, temperature=0)
    names = (None, "random")
    async with penstock.Engine(model, max_adapters=1) as engine:
        with tempfile.TemporaryDirectory() as folder:
            write_adapter(Path(folder), model)
            adapter = await engine.load_adapter("random", folder)
        print(f"{adapter.num_modules} modules of rank {adapter.rank}, {adapter.bytes / 1e6:.1f} MB")
        outputs = engine.stream_many([QUESTION] * 2, [params.replace(adapter=name) for name in names])
        async for item in outputs:
            if item.chunk is not None:
                print(f"{names[item.index] or 'base':7} {item.chunk.text!r}")
        await engine.unload_adapter("random")


if __name__ == "__main__":
    anyio.run(main, sys.argv[1] if sys.argv[1:] else str(model_path()))
