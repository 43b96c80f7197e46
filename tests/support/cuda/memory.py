"""Programs on the emulated device that show the memory of the host, and the order of allocations."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

import penstock
from emu.client import OUT_OF_MEMORY, Device
from support.api.checkpoints import make_config, write_checkpoint
from support.api.engines import PROMPT, SHORT
from support.api.running import random_prompt

SIZES: dict[str, Any] = {
    "device": "cuda",
    "threads": 1,
    "max_model_len": 256,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 2,
    "kv_cache_blocks": 40,
}


def write_model(folder: str) -> Path:
    """A model of one layer."""
    return write_checkpoint(Path(folder), make_config("llama", num_hidden_layers=1))


def open_on(host: penstock.Host, model: Path, **options: Any) -> penstock.Engine:
    """An engine that has started."""
    engine = penstock.Engine(model, host=host, **SIZES | options)
    engine.blocking.start()
    return engine


def account() -> dict[str, Any]:
    """The memory of the host that an engine takes and reserves, and the errors of hosts with less."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(folder)
        host = penstock.Host()
        with open_on(host, model, host_cache_blocks=4) as engine:
            assert len(engine.blocking.generate(PROMPT, SHORT).token_ids) == 8
            memory, reserved = engine.info.memory, host.reserved_bytes
        after = host.reserved_bytes
        errors = []
        for limit in (memory.inputs - 1, reserved - 1):
            small = penstock.Host(memory_bytes=limit)
            try:
                open_on(small, model, host_cache_blocks=4).blocking.close()
            except penstock.OutOfMemoryError as error:
                errors.append(str(error))
        exact = penstock.Host(memory_bytes=reserved)
        with open_on(exact, model, host_cache_blocks=4):
            left = exact.memory_bytes - exact.reserved_bytes if exact.memory_bytes else None
    return {
        "inputs": memory.inputs,
        "host_cache": memory.host_cache,
        "reserved": reserved,
        "after": after,
        "left": left,
        "errors": errors,
    }


def long_prompts() -> list[Any]:
    """The log probabilities of a prompt in one step of many parts, and in small steps; the allocations."""
    driver = Device("libcuda.so.1")
    prompt = random_prompt(240)
    found: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(folder)
        for tokens in (256, 16):
            sizes = {"max_num_batched_tokens": tokens, "prefix_cache_ttl": None}
            with open_on(penstock.Host(), model, **sizes) as engine:
                driver.library.emuClear()
                result = engine.blocking.generate(prompt, SHORT, prompt_logprobs=3)
                calls = [driver.library.emuCount(name) for name in (b"cuMemHostAlloc", b"cuMemAlloc_v2")]
            found.append([result.token_ids, repr(result.prompt_logprobs), calls])
    return found


def shares() -> list[int]:
    """The bytes of the KV cache of two engines that take half of the free memory, one after the other."""
    sizes = {"max_model_len": 4096, "max_num_seqs": 64, "kv_cache_blocks": None, "memory_ratio": 0.5}
    with tempfile.TemporaryDirectory() as folder:
        config = make_config("llama", num_hidden_layers=1, head_dim=128, max_position_embeddings=4096)
        model = write_checkpoint(Path(folder), config)
        with (
            open_on(penstock.Host(), model, **sizes) as first,
            open_on(penstock.Host(), model, **sizes) as second,
        ):
            return [engine.info.memory.kv_cache for engine in (first, second)]


def modules() -> dict[str, Any]:
    """The error of a device without memory for kernels."""
    driver = Device("libcuda.so.1")
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(folder)
        open_on(penstock.Host(), model).blocking.close()
        count = driver.library.emuCount(b"cuModuleLoadData")
        for nth in (1, count):
            driver.library.emuClear()
            driver.fault("cuModuleLoadData", nth, OUT_OF_MEMORY)
            try:
                open_on(penstock.Host(), model).blocking.close()
            except penstock.PenstockError as error:
                allocated = driver.library.emuCount(b"cuMemAlloc_v2")
                found[str(nth)] = [type(error).__name__, str(error), allocated]
        driver.library.emuClear()
    return found


def compiled(*threads: str) -> list[str]:
    """The errors of engines whose kernels are compiled by some threads."""
    errors = []
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(folder)
        for count in threads:
            try:
                open_on(penstock.Host(), model, threads=int(count)).blocking.close()
            except penstock.PenstockError as error:
                errors.append(str(error))
    return errors


def refused() -> list[str]:
    """The errors of heads that kernels do not have."""
    errors = []
    for dim, kv_type in ((320, "auto"), (36, "uint4")):
        with tempfile.TemporaryDirectory() as folder:
            config = make_config("llama", num_hidden_layers=1, head_dim=dim)
            model = write_checkpoint(Path(folder), config)
            try:
                open_on(penstock.Host(), model, kv_cache_dtype=kv_type).blocking.close()
            except penstock.ConfigError as error:
                errors.append(str(error))
    return errors


def too_large() -> list[str]:
    """The errors of engines on the device that is chosen, and on one that is asked for."""
    errors = []
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(folder)
        for device in ("auto", "cuda"):
            try:
                open_on(penstock.Host(), model, device=device).blocking.close()
            except penstock.OutOfMemoryError as error:
                errors.append(str(error))
    return errors


def automatic(head_dim: int = 32) -> str:
    """The device of an engine with device="auto"."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    with tempfile.TemporaryDirectory() as folder:
        config = make_config("llama", num_hidden_layers=1, head_dim=head_dim)
        engine = penstock.Engine(write_checkpoint(Path(folder), config), threads=1, device="auto")
        with engine:
            engine.blocking.generate(PROMPT, SHORT)
            return str(engine.info.device)
