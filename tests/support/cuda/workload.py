"""Programs with all kinds of requests on the emulated device."""

from __future__ import annotations

import ctypes
import math
import random
import signal
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np

import penstock
from support.api.checkpoints import make_config, write_checkpoint
from support.api.engines import (
    BACKENDS,
    PROMPT,
    assert_at_rest,
    bits_of,
    check_stats,
    engine_threads,
    wait_until,
)
from support.api.running import random_prompt

if TYPE_CHECKING:
    from collections.abc import Iterable

SIZES: dict[str, Any] = {
    "threads": 1,
    "max_model_len": 128,
    "max_num_batched_tokens": 48,
    "max_num_seqs": 6,
    "kv_cache_blocks": 60,
}
COMMON = penstock.SamplingParams(max_tokens=12, temperature=0.0, logprobs=True, seed=5)


def favour(token_ids: Any, logits: Any) -> None:
    """A logits processor: a token that depends on the last one becomes more likely."""
    np.asarray(logits)[(int(np.asarray(token_ids)[-1]) * 7 + 1) % 512] += 5


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
SCHEMA_FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
REQUESTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "greedy": (random_prompt(40), {"ignore_eos": True}),
    "seeded": (random_prompt(20), {"temperature": 1.0, "ignore_eos": True}),
    "filters": ([5] * 9, {"temperature": 1.2, "top_k": 40, "top_p": 0.9, "min_p": 0.01}),
    "penalties": (
        [7, 8, 9] * 4,
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.3, "temperature": 0.7},
    ),
    "tokens": ([9], {"bad_token_ids": list(range(200, 300)), "min_tokens": 6, "temperature": 1.0}),
    "no repeats": ([3, 4] * 8, {"no_repeat_ngram_size": 2}),
    "top logprobs": (random_prompt(33, seed=2), {"top_logprobs": 5, "prompt_logprobs": 2}),
    "regex": ("say: ", {"regex": "(yes|no)( [0-9]{2}){3}", "temperature": 1.0}),
    "schema": ("json: ", {"response_format": SCHEMA_FORMAT, "max_tokens": 40, "temperature": 0.8}),
    "processor": (random_prompt(10, seed=3), {"logits_processors": [favour]}),
    "choices": (random_prompt(18, seed=4), {"n": 3, "temperature": 1.0}),
    "beams": (random_prompt(12, seed=6), {"num_beams": 3, "max_tokens": 6, "seed": None}),
}


def checkpoint(folder: str) -> Path:
    return write_checkpoint(Path(folder), make_config("llama"))


def answers(engine: penstock.Engine, names: Iterable[str] = REQUESTS) -> dict[str, Any]:
    """The choices of requests, which run at the same time."""
    names = list(names)

    def ask(name: str) -> list[Any]:
        prompt, options = REQUESTS[name]
        params = COMMON.replace(logprobs=None) if "num_beams" in options else COMMON
        result = engine.blocking.generate(prompt, params, **options)
        return [(choice.token_ids, choice.text, choice.finish_reason) for choice in result.choices]

    with ThreadPoolExecutor(len(names)) as pool:
        return dict(zip(names, pool.map(ask, names), strict=True))


def halves(kv_type: Any) -> list[str]:
    """The requests of which two runs differ, of a bfloat16 model with heads that tensor cores multiply."""
    names = ("greedy", "seeded", "filters", "choices")
    with tempfile.TemporaryDirectory() as folder:
        config = make_config("llama", num_hidden_layers=1, dtype="bfloat16", head_dim=128)
        model = write_checkpoint(Path(folder), config)
        with penstock.Engine(model, device="cuda", kv_cache_dtype=kv_type, **SIZES) as engine:
            found, again = (answers(engine, names) for _ in range(2))
    return [name for name in names if found[name] != again[name]]


def mixed() -> dict[str, Any]:
    """All kinds of requests on two engines of the device and one of the CPU, which are open together."""
    with tempfile.TemporaryDirectory() as folder:
        model = checkpoint(folder)
        with (
            penstock.Engine(model, device="cpu", **SIZES) as cpu,
            penstock.Engine(model, device="cuda", **SIZES) as first,
            penstock.Engine(model, device="cuda", **SIZES) as second,
            ThreadPoolExecutor(3) as pool,
        ):
            expected, *found = pool.map(answers, (cpu, first, second))
            again = answers(first)
            for engine in (first, second):
                check_stats(engine)
    wait_until(lambda: not engine_threads())  # the threads that compile grammars end after the engine
    return {
        "texts": {name: choices[0][1] for name, choices in expected.items()},
        "differing": [name for name in REQUESTS for one in (*found, again) if one[name] != expected[name]],
    }


#: Options of an engine, in place of `SIZES`.
OPTIONS: dict[str, dict[str, Any]] = {
    "memory_ratio": {"kv_cache_blocks": None, "memory_ratio": 0.2},
    "kv_cache_bytes": {"kv_cache_blocks": None, "kv_cache_bytes": 1 << 20},
    "kv_cache_ratio": {"kv_cache_blocks": None, "kv_cache_ratio": 0.5},
    "host_cache_bytes": {"host_cache_bytes": 1 << 20, "kv_cache_blocks": 12},
    "weights_cache_bytes": {"weights_cache_bytes": 1 << 26, "quantization": "int8"},
    "preemption_mode": {"preemption_mode": "interrupt"},
    "max_paused": {"max_paused": 2},
    "config_overrides": {"config_overrides": {"rms_norm_eps": 1e-2}},
}


def options() -> dict[str, list[Any]]:
    """The tokens, best choice and score with each of `OPTIONS`: on the CPU, and twice on the device."""
    ranked = COMMON.replace(n=1, best_of=3, temperature=1.0, logprobs=None)
    found: dict[str, list[Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = checkpoint(folder)
        for name, changes in OPTIONS.items():
            found[name] = []
            for device in ("cpu", "cuda", "cuda"):
                with penstock.Engine(model, device=device, **SIZES | changes) as engine:
                    answer = engine.blocking.generate(PROMPT, COMMON, cache_salt="a", ignore_eos=True)
                    best = engine.blocking.generate(PROMPT, ranked, ignore_eos=True)
                    score = engine.blocking.score(PROMPT)
                found[name].append(
                    [answer.token_ids, best.token_ids, round(math.log(score.perplexity or 0), 3)]
                )
    return found


def lives() -> dict[str, Any]:
    """An engine that sleeps and wakes, its profile, and the calls of its steps."""
    count = ctypes.CDLL("libcuda.so.1").emuCount
    params = COMMON.replace(max_tokens=30, ignore_eos=True)
    with tempfile.TemporaryDirectory() as folder:
        model = checkpoint(folder)
        with penstock.Engine(model, device="cuda", profile=True, **SIZES) as engine:
            events = {"graphs": b"cuGraphLaunch", "steps": b"emuArm", "early": b"programmatic launch"}
            before = {name: count(event) for name, event in events.items()}
            first = bits_of(engine.blocking.generate(PROMPT, params))
            counts = {name: count(event) - before[name] for name, event in events.items()}
            rows = [(row.operation, row.calls) for row in engine.profile()]
            engine.blocking.sleep()
            engine.blocking.wake()
            is_same = bits_of(engine.blocking.generate(PROMPT, params)) == first
            device = engine.info.device
    return counts | {"same": is_same, "rows": rows, "device": device, "threads": engine_threads()}


def embeddings_between() -> list[Any]:
    """The bits of three equal requests, of which the second reads embeddings, and the launches of graphs."""
    count = ctypes.CDLL("libcuda.so.1").emuCount
    params = COMMON.replace(max_tokens=30, ignore_eos=True)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        model = checkpoint(folder)
        with penstock.Engine(model, device="cuda", **SIZES) as engine:
            for scope in (None, "all", None):
                before = count(b"cuGraphLaunch")
                result = engine.blocking.generate(PROMPT, params, output_embeddings=scope)
                found.append([bits_of(result), count(b"cuGraphLaunch") - before])
    return found


def changing_batches() -> int:
    """The graphs that are made for batches of 12, 11, 10, ... requests, three times."""
    count = ctypes.CDLL("libcuda.so.1").emuCount
    with tempfile.TemporaryDirectory() as folder:
        model = checkpoint(folder)
        with penstock.Engine(model, device="cuda", **{**SIZES, "max_num_seqs": 12}) as engine:
            before = count(b"cuGraphInstantiateWithFlags")
            for _ in range(3):
                params = [COMMON.replace(max_tokens=3 + i, ignore_eos=True) for i in range(12)]
                requests = [engine.blocking.start_request(PROMPT, one) for one in params]
                for request in requests:
                    request.result()
            return int(count(b"cuGraphInstantiateWithFlags") - before)


async def storm(engine: penstock.Engine, seed: int, count: int) -> int:
    """Requests that start, are read and are cancelled in a random order; the number of cancelled ones."""
    chance = random.Random(seed)
    cancelled = 0

    async def one(index: int, length: int, chunks: int) -> None:
        nonlocal cancelled
        params = COMMON.replace(temperature=1.0, seed=index, ignore_eos=True, max_tokens=30)
        async with engine.stream(random_prompt(length, seed=index), params) as request:
            async for _ in request:
                if (chunks := chunks - 1) < 0:
                    break
            request.cancel()
            result = await request.result()
            cancelled += result.finish_reason == "cancelled"

    async with anyio.create_task_group() as group:
        for index in range(count):
            group.start_soon(one, index, chance.randint(1, 60), chance.randint(0, 40))
            if chance.random() < 0.3:
                await anyio.lowlevel.checkpoint()
    await assert_at_rest(engine)
    return cancelled


def storms(count: str, loops: str) -> list[dict[str, Any]]:
    """Storms on each event loop over memory for two requests, which are swapped or computed again."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        model = checkpoint(folder)
        for seed, backend in enumerate(BACKENDS[: int(loops)]):
            mode = ("swap", "recompute")[seed % 2]
            sizes = SIZES | {"kv_cache_blocks": 8, "preemption_mode": mode}

            async def main(sizes: dict[str, Any] = sizes, seed: int = seed) -> dict[str, Any]:
                async with penstock.Engine(model, device="cuda", **sizes) as engine:
                    cancelled = await storm(engine, seed, int(count))
                    stats = engine.stats()
                return {"cancelled": cancelled, "preemptions": stats.preemptions, "swaps": stats.swaps}

            found.append(anyio.run(main, **backend) | {"threads": engine_threads()})
    return found


def facades() -> dict[str, Any]:
    """The text of one prompt from engines of both devices, a server, LMDeploy's and DashInfer's APIs."""
    from penstock.compat.dashinfer import allspark
    from support.compat import dashinfer
    from support.compat.lmdeploy import GREEDY, open_pipeline
    from support.server.process import started

    params = penstock.SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    prompt = "the quick brown fox"
    with tempfile.TemporaryDirectory() as folder:
        model = checkpoint(folder)
        found: dict[str, Any] = {}
        for device in ("cpu", "cuda", "auto"):
            with penstock.Engine(model, device=device, **SIZES) as engine:
                found[device] = engine.blocking.generate(prompt, params).text
                found[f"device of {device}"] = engine.info.device
        with open_pipeline(model) as pipe:
            found["pipeline"] = pipe([prompt], gen_config=GREEDY, do_preprocess=False)[0].text
            found["device of pipeline"] = pipe.engine.info.device
        with started(model, "--device", "cuda", "--max-model-len", "128") as server:
            body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            found["server"] = server.ask("/v1/completions", body)[1]["choices"][0]["text"]
            server.process.send_signal(signal.SIGTERM)
            found["status"] = server.end()
        loader = allspark.HuggingFaceModel(model, dashinfer.NAME).load_model()
        loader.serialize_to_path(None, Path(folder) / "serialised")
        builder = loader.create_reference_runtime_config_builder(
            dashinfer.NAME, allspark.TargetDevice.CUDA, [0], 4
        )
        allspark_engine = allspark.Engine()
        allspark_engine.install_model(builder.build())
        allspark_engine.start_model(dashinfer.NAME)
        tokenizer = penstock.Tokenizer(model)
        ids = tokenizer.encode(prompt)
        config = {**dashinfer.GREEDY, "max_length": len(ids) + 8}
        found["dashinfer"] = tokenizer.decode(dashinfer.generate(allspark_engine, ids, config))
        found["device of dashinfer"] = dashinfer.native(allspark_engine).info.device
        allspark_engine.stop_model(dashinfer.NAME)
        allspark_engine.release_model(dashinfer.NAME)
    return found
