"""A program that compares the CUDA backend with the CPU backend, on the emulated device."""

from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import penstock
from support.api.checkpoints import write_checkpoint
from support.api.ggufs import TYPES, write_gguf
from support.api.running import random_prompt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

#: The smallest sizes at which prompts have several chunks, blocks and splits of attention.
SIZES: dict[str, Any] = {
    "max_model_len": 320,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 4,
    "threads": 1,
}
#: One token, one block and a bit, two chunks.
LENGTHS = (1, 17, 100)
PARAMS = penstock.SamplingParams(
    max_tokens=8,
    temperature=0.0,
    ignore_eos=True,
    logprobs=True,
    prompt_logprobs=2,
    output_logits="all",
    output_hidden_states="all",
    output_embeddings="all",
)


def answers(
    model: Path, device: str, prompts: Sequence[Sequence[int]], **options: Any
) -> list[penstock.Result]:
    """The results of concurrent prompts on a device."""
    with penstock.Engine(model, device=device, **SIZES | options) as engine:
        items = list(engine.blocking.generate_many(prompts, PARAMS))
        assert engine.info.device.startswith(device), engine.info.device
    results = [item.result for item in items if item.result is not None]
    assert len(results) == len(prompts), items
    return results


def write_model(folder: Path, config: dict[str, Any]) -> Path:
    """A checkpoint of a configuration, or a GGUF file of a type of weights."""
    if (kind := config.get("gguf")) is None:
        return write_checkpoint(folder, config)
    write_gguf(folder / "model.gguf", TYPES[kind], architecture=config["architecture"])
    return folder / "model.gguf"


def distance(ours: Any, theirs: Any) -> float:
    """The largest difference, relative to the largest value."""
    a, b = (np.asarray(values, dtype=np.float64) for values in (ours, theirs))
    assert a.shape == b.shape
    return float(np.abs(a - b).max() / max(float(np.abs(b).max()), 1e-9)) if a.size else 0.0


def compare(cases: str) -> dict[str, Any]:
    """The differences between the devices for each case, a configuration and options of the engine."""
    found = {}
    for name, (config, options) in json.loads(cases).items():
        with tempfile.TemporaryDirectory() as folder:
            model = write_model(Path(folder), config)
            size = config.get("vocab_size", 256)
            prompts = [random_prompt(length, vocabulary_size=size, seed=length) for length in LENGTHS]
            theirs, ours = (answers(model, device, prompts, **options) for device in ("cpu", "cuda"))
        found[name] = [differences(a, b) for a, b in zip(ours, theirs, strict=True)]
    return found


def differences(ours: penstock.Result, theirs: penstock.Result) -> dict[str, Any]:
    """The differences between two results. After different tokens, nothing is compared."""
    pairs = zip(ours.token_ids, theirs.token_ids, strict=True)
    same = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
    # The logits of the prompt, and of the tokens after it.
    rows = theirs.usage.prompt_tokens + same

    def tensors(name: str) -> float:
        a, b = (np.asarray(getattr(result, name))[:rows] for result in (ours, theirs))
        return distance(a, b)

    return {
        "same_tokens": same,
        "tokens": len(theirs.token_ids),
        "logprobs": distance(values(ours.logprobs)[:same], values(theirs.logprobs)[:same]),
        "prompt_logprobs": distance(values(ours.prompt_logprobs)[1:], values(theirs.prompt_logprobs)[1:]),
        "logits": tensors("logits"),
        "hidden_states": tensors("hidden_states"),
        "embeddings": tensors("embeddings"),
    }


def values(logprobs: Sequence[float | None] | None) -> NDArray[np.float64]:
    """Log probabilities as numbers; the first token of a prompt has none."""
    return np.array([value or 0.0 for value in logprobs or ()])


#: The first tokens of the answer are not near a tie.
DEMO_PROMPT = "The capital of France is Paris, and the capital of Italy is"


def answer_demo() -> list[dict[str, Any]]:
    """The tokens and log probabilities of the demo model in bfloat16, on both devices."""
    options: dict[str, Any] = SIZES | {"quantization": "none", "dtype": "bfloat16", "threads": 2}
    results = []
    for device in ("cuda", "cpu"):
        with penstock.Engine(penstock.demo.model_path(), device=device, **options) as engine:
            result = engine.blocking.generate(DEMO_PROMPT, max_tokens=6, temperature=0.0, logprobs=True)
        results.append({"token_ids": result.token_ids, "logprobs": result.logprobs})
    return results


def write_answers(model: str, length: str, file: str) -> None:
    """Writes the prompt, the tokens, their logprobs and all logits of a greedy answer to a file."""
    prompt = random_prompt(int(length))
    [result] = answers(Path(model), "cuda", [prompt])
    np.savez(
        file,
        prompt=prompt,
        token_ids=result.token_ids,
        logprobs=values(result.logprobs),
        logits=np.asarray(result.logits),
    )
