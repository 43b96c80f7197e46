"""Programs of engines that may use cuBLASLt, on the emulated device."""

from __future__ import annotations

import json
import logging
import tempfile
from pathlib import Path
from typing import Any

import penstock
from emu.client import LAUNCH_FAILED, Device
from support.api.checkpoints import write_checkpoint
from support.api.engines import PROMPT, SHORT, engine_threads
from support.api.running import random_prompt
from support.cuda.parity import answers, differences
from support.kernels.cuda import ON_GPU

SIZES: dict[str, Any] = {
    "device": "cuda",
    "threads": 1,
    "max_model_len": 128,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 16,
    "prefix_cache": False,
}
LENGTHS = (12, 30, 40)
PARAMS = SHORT.replace(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=True)


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
    assert engine_threads() == []
    return {
        "differences": [differences(a, b) for a, b in zip(ours, theirs, strict=True)],
        "same_bits": bits[0] == bits[1],
        "deterministic": info.deterministic,
    }


def repeat(config: str) -> dict[str, Any]:
    """The 12 choices of a greedy request on both devices. Their decode steps become graphs."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    count = None if ON_GPU else Device("libcuda.so.1").library.emuCount
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = write_checkpoint(Path(folder), json.loads(config))
        for device in ("cpu", "cuda"):
            with penstock.Engine(model, **SIZES | {"device": device, "deterministic": False}) as engine:
                engine.blocking.start()
                before = count(b"cuLaunchKernel") if count is not None else 0
                result = engine.blocking.generate(PROMPT, PARAMS, n=12)
            found[device] = [[choice.token_ids, choice.logprobs] for choice in result.choices]
    if count is not None:
        # Other kernels are launched by cuLaunchKernelEx. Graphs launch products without a call for each.
        found |= {"graphs": count(b"cuGraphLaunch"), "products": count(b"cuLaunchKernel") - before}
    return found


def workspaces(config: str) -> list[int]:
    """The bytes of the workspace without and with cuBLASLt."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        model = write_checkpoint(Path(folder), json.loads(config))
        for value in (True, False):
            with penstock.Engine(model, deterministic=value, **SIZES) as engine:
                engine.blocking.start()
                found.append(engine.info.memory.workspace)
    return found


def lose_device(config: str) -> list[str]:
    """The error of a request whose product is launched on a device that is lost."""
    driver = Device("libcuda.so.1")
    with tempfile.TemporaryDirectory() as folder:
        model = write_checkpoint(Path(folder), json.loads(config))
        with penstock.Engine(model, deterministic=False, **SIZES) as engine:
            engine.blocking.start()
            for call in ("cuLaunchKernel", "cuMemGetInfo_v2"):
                driver.fault(call, 0, LAUNCH_FAILED)
            try:
                engine.blocking.generate(random_prompt(30), SHORT)
            except penstock.PenstockError as error:
                return [type(error).__name__, str(error)]
    return []
