"""Tokens and the bits of their logprobs depend only on the request.

They are independent of batch composition, chunked prefill and thread count. Each instruction set is compared
with itself: different instruction sets may add in different orders.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import pytest

import penstock
from support.api.checkpoints import make_config, write_checkpoint
from support.api.running import random_prompt
from support.marks import rare_except
from support.paths import TESTS

PROMPT = random_prompt(150)
SAMPLING = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "top_k": 50, "top_p": 0.95, "seed": 7},
}
CHECKPOINTS = {
    "llama": make_config("llama", num_attention_heads=6, num_key_value_heads=2),
    "mistral with a short window, bfloat16": make_config("mistral", sliding_window=40, dtype="bfloat16"),
    "qwen3, float16": make_config("qwen3", dtype="float16", head_dim=80),
    "qwen2 with dynamic rope": make_config(
        "qwen2",
        max_position_embeddings=100,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    ),
    "llama with log-n attention": make_config("llama", use_logn_attn=True, seq_length=40),
}


class Answer(NamedTuple):
    """The fields that must have the same bits."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


def answer_of(result: penstock.Result) -> Answer:
    assert result.logprobs is not None
    return Answer(tuple(result.token_ids), tuple(result.logprobs))


async def answer(engine: penstock.Engine, sampling: dict[str, Any], *, neighbours: int = 0) -> Answer:
    """The answer of the request, while `neighbours` other requests start, finish and are cancelled."""
    chance = random.Random(neighbours)
    arrivals = sorted(chance.randrange(40) for _ in range(neighbours))

    async def neighbour(seed: int) -> None:
        prompt = random_prompt(chance.randint(1, 200), seed=seed)
        request = await engine.start_request(
            prompt, max_tokens=chance.randint(1, 60), temperature=1.0, ignore_eos=True
        )
        if seed % 3 == 0:
            await anext(aiter(request))
            request.cancel()
        await request.result()

    async with anyio.create_task_group() as group:
        request = await engine.start_request(
            PROMPT, max_tokens=48, ignore_eos=True, logprobs=True, **sampling
        )
        seen = 0
        while arrivals and arrivals[0] == 0:
            arrivals.pop(0)
            group.start_soon(neighbour, len(arrivals))
        async for chunk in request:
            seen += len(chunk.token_ids)
            while arrivals and arrivals[0] <= seen:
                arrivals.pop(0)
                group.start_soon(neighbour, len(arrivals))
    return answer_of(await request.result())


def observe(
    checkpoint: Path, sampling: dict[str, Any], *, neighbours: int = 0, chunk: int = 512, **config: Any
) -> Answer:
    async def main() -> Answer:
        sizes: dict[str, Any] = {
            "max_model_len": 400,
            "max_num_batched_tokens": chunk,
            "max_num_seqs": min(chunk, 32),
        }
        async with penstock.Engine(str(checkpoint), **sizes, **config) as engine:
            return await answer(engine, sampling, neighbours=neighbours)

    return anyio.run(main)


@pytest.fixture(scope="module", params=CHECKPOINTS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("bits"), CHECKPOINTS[request.param])


@pytest.mark.parametrize("sampling", SAMPLING)
def test_batch_chunks_and_threads_change_no_bit(checkpoint: Path, sampling: str) -> None:
    alone = observe(checkpoint, SAMPLING[sampling], threads=1)
    assert len(alone.token_ids) == 48
    for threads in (1, 2):
        for chunk in (16, 64, 512):
            for neighbours in (0, 31):
                other = observe(
                    checkpoint,
                    SAMPLING[sampling],
                    neighbours=neighbours,
                    threads=threads,
                    chunk=chunk,
                )
                assert other == alone, f"{threads} threads, chunks of {chunk}, {neighbours} neighbours"


@pytest.mark.parametrize("kv_cache_dtype", ["float16", "bfloat16", "int8", "uint4"])
def test_batch_changes_no_bit_with_any_kv_type(checkpoint: Path, kv_cache_dtype: str) -> None:
    alone = observe(checkpoint, SAMPLING["sampled"], threads=1, kv_cache_dtype=kv_cache_dtype)
    for threads, chunk, neighbours in ((1, 16, 31), (2, 64, 31), (2, 16, 0)):
        other = observe(
            checkpoint,
            SAMPLING["sampled"],
            neighbours=neighbours,
            threads=threads,
            chunk=chunk,
            kv_cache_dtype=kv_cache_dtype,
        )
        assert other == alone, f"{threads} threads, chunks of {chunk}, {neighbours} neighbours"


def test_block_size_changes_no_bit(checkpoint: Path) -> None:
    first, *others = [observe(checkpoint, SAMPLING["greedy"], block_size=size) for size in (16, 32, 64, 128)]
    assert others == [first] * 3


CPU_FLAGS = {
    "portable": set[str](),
    "avx2": {"avx2", "fma", "f16c"},
    "avx_vnni": {"avx2", "fma", "f16c", "avx_vnni"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
    "avx512_vnni": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"},
    "avx512_bf16": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16"},
    "amx": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "amx_tile", "amx_int8"},
    "neon": {"asimd"},
    "neon_dotprod": {"asimd", "asimddp"},
    "neon_i8mm": {"asimd", "asimddp", "i8mm"},
}


@pytest.mark.needs("proc")
@pytest.mark.parametrize("isa", rare_except(CPU_FLAGS, "portable", "avx2"))
def test_each_instruction_set_is_reproducible(checkpoint: Path, isa: str) -> None:
    if missing := CPU_FLAGS[isa] - set(Path("/proc/cpuinfo").read_text().split()):
        pytest.skip(f"this processor has no {', '.join(sorted(missing))}")
    done = subprocess.run(
        [sys.executable, __file__, str(checkpoint)],
        env=os.environ | {"PENSTOCK_ISA": isa, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    alone, *others = json.loads(done.stdout)
    assert others == [alone] * len(others)


def main() -> None:
    """Print the answers of the same request in four different settings, for the current `PENSTOCK_ISA`."""
    checkpoint = Path(sys.argv[1])
    settings: list[dict[str, Any]] = [
        {"threads": 1},
        {"threads": 2},
        {"threads": 1, "chunk": 16},
        {"threads": 2, "chunk": 64, "neighbours": 31},
    ]
    json.dump([observe(checkpoint, SAMPLING["greedy"], **setting) for setting in settings], sys.stdout)


if __name__ == "__main__":
    main()
