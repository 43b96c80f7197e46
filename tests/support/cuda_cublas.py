"""Programs of engines that may use cuBLASLt, on the emulated device."""

from __future__ import annotations

import json
import logging
import tempfile
from pathlib import Path
from typing import Any

import penstock
from api_support import PROMPT, SHORT, bits_of, engine_threads
from emu.client import Device
from support.checkpoints import write_checkpoint
from support.cuda_parity import answers, differences
from support.running import random_prompt

SIZES: dict[str, Any] = {
    "device": "cuda",
    "threads": 1,
    "max_model_len": 128,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 16,
    "prefix_cache": False,
}
LENGTHS = (12, 30, 40)


def compare(config: str, mode: str) -> dict[str, Any]:
    """The differences between the devices, and whether results depend on the division of the prompt."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    options = {"deterministic": mode == "deterministic"}
    with tempfile.TemporaryDirectory() as folder:
        model = write_checkpoint(Path(folder), json.loads(config))
        prompts = [random_prompt(length, seed=length) for length in LENGTHS]
        theirs = answers(model, "cpu", prompts)
        ours = answers(model, "cuda", prompts, **options)
        bits = []
        for tokens in (16, 64):
            with penstock.Engine(model, **SIZES | options | {"max_num_batched_tokens": tokens}) as engine:
                result = engine.blocking.generate(prompts[-1], SHORT, prompt_logprobs=0)
                bits.append(result.prompt_logprobs)
                info = engine.info
    return {
        "differences": [differences(a, b) for a, b in zip(ours, theirs, strict=True)],
        "same_bits": bits[0] == bits[1],
        "deterministic": info.deterministic,
        "workspace": info.memory.workspace,
    }


def repeat(config: str) -> dict[str, Any]:
    """The results of a batch of equal requests by graphs, with products of 9 and more rows in each step."""
    driver = Device("libcuda.so.1")
    with tempfile.TemporaryDirectory() as folder:
        model = write_checkpoint(Path(folder), json.loads(config))
        with penstock.Engine(model, deterministic=False, **SIZES) as engine:
            alone = engine.blocking.generate(PROMPT, SHORT, max_tokens=24)
            driver.library.emuClear()
            items = list(engine.blocking.generate_many([PROMPT] * 12, SHORT.replace(max_tokens=24)))
            graphs = driver.library.emuCount(b"cuGraphLaunch")
            products = driver.library.emuCount(b"cuLaunchKernel")
    results = {bits_of(item.result) for item in items if item.result is not None}
    tokens = {result[0] for result in results}
    return {"graphs": graphs, "products": products, "tokens": len(tokens), "alone": len(alone.token_ids)}


def fail(config: str) -> list[str]:
    """The errors of an engine whose cuBLASLt fails: at its start, or of a request."""
    errors = []
    with tempfile.TemporaryDirectory() as folder:
        model = write_checkpoint(Path(folder), json.loads(config))
        try:
            with penstock.Engine(model, deterministic=False, **SIZES) as engine:
                engine.blocking.generate(random_prompt(30), SHORT)
        except penstock.PenstockError as error:
            errors = [type(error).__name__, str(error)]
    assert engine_threads() == []
    return errors
