"""One turn of an engine: opens a model, measures the requested rows, prints a JSON object per row.

    PYTHON benches/suite/peers.py ENGINE MODEL WEIGHTS THREADS ROW...

It runs in the engine's own interpreter and imports only the standard library and that engine. All engines
get the same numbers of tokens: prompts of 512 for `prefill`, of 16 before `decode-BATCH`, where all
sequences decode together.
"""

from __future__ import annotations

import atexit
import gc
import http.client
import importlib
import itertools
import json
import os
import random
import resource
import socket
import statistics
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Sequence

PREFILL, CACHED, SHORT, LONG = 512, 460, 16, 8192
MAX_BATCH = 32
STREAM_TOKENS = 128

Prompts = list[list[int]]


def tokens_of(batch: int) -> int:
    """The number of tokens that each sequence of a batch decodes."""
    return 64 if batch <= 2 else 32  # noqa: PLR2004


def prompts(count: int, length: int, seed: int = 0, vocabulary: int = 3000) -> Prompts:
    """Random prompts without special tokens and without common prefixes."""
    chance = random.Random(seed * 1_000_003 + length)  # noqa: S311 - prompts
    return [[chance.randrange(300, vocabulary) for _ in range(length)] for _ in range(count)]


class Peer:
    """An engine with an open model."""

    # Imported before the time is taken.
    module: ClassVar[str | None] = None
    weight_bytes: int | None = None

    def __init__(self, model: str, weights: str, threads: int, rows: Sequence[str]) -> None:
        raise NotImplementedError

    def prefill(self, length: int) -> float:
        """Seconds from the request to its first token."""
        raise NotImplementedError

    def decode(self, batch: int) -> float:
        """Tokens per second of all sequences together, without the step of the prompts."""
        raise NotImplementedError

    def long_context(self) -> float:
        """Tokens per second of one sequence after a prompt of 8192 tokens, with an 8-bit KV cache."""
        raise NotImplementedError

    def cached(self) -> float:
        """Seconds to the first token of a prompt of 512 tokens of which 460 are cached."""
        raise NotImplementedError

    def streams(self, count: int) -> float:
        """Tokens per second of short sequences that run together."""
        raise NotImplementedError

    def peak_rss(self) -> int:
        """Bytes of memory at most, so far."""
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024
        raise RuntimeError("no VmHWM")


class Penstock(Peer):
    """Penstock, in one process with its caller."""

    module = "penstock"

    def __init__(self, model: str, weights: str, threads: int, rows: Sequence[str]) -> None:
        import penstock

        self._penstock = penstock
        streams = [int(row.split("-")[1]) for row in rows if row.startswith("streams")]
        is_long = "decode-8k" in rows
        quantization = {} if weights in ("q4_1", "Q4_0", "float32") else {"quantization": weights}
        if weights == "bf16" or Path(model, "model.penstock").exists():
            quantization = {"quantization": "auto"}
        self._engine = penstock.Engine(
            model,
            threads=threads,
            max_model_len=LONG + 128 if is_long else 1024,
            max_num_seqs=max([MAX_BATCH, *streams]),
            kv_cache_dtype="int8" if is_long else "auto",
            **({"kv_cache_bytes": 256 << 20} if streams else {}),
            **quantization,
        )
        self._engine.blocking.start()
        self._seeds = itertools.count()
        self._params = {"temperature": 0.0, "ignore_eos": True, "use_prefix_cache": False}
        self.prefill(SHORT)
        info = self._engine.info
        self.isa, self.weight_bytes = info.isa, info.memory.weights

    def _timings(self, prompts: Prompts, tokens: int, **changes: Any) -> list[Any]:
        start = self._engine.blocking.start_request
        options = self._params | changes
        requests = [start(prompt, max_tokens=tokens, **options) for prompt in prompts]
        return [request.result().timings for request in requests]

    def prefill(self, length: int) -> float:
        return float(self._timings(prompts(1, length, next(self._seeds)), 1)[0].first_token)

    def decode(self, batch: int) -> float:
        tokens = tokens_of(batch)
        timings = self._timings(prompts(batch, SHORT, next(self._seeds)), tokens)
        # The first request can be alone in the first step; the median is the rate of the others.
        rate = statistics.median((tokens - 1) / (timing.total - timing.first_token) for timing in timings)
        return batch * rate

    def cached(self) -> float:
        (shared,) = prompts(1, CACHED, next(self._seeds))
        times = []
        for ends in prompts(4, PREFILL - CACHED, next(self._seeds)):
            (timing,) = self._timings([shared + ends], 1, use_prefix_cache=True)
            times.append(float(timing.first_token))
        return statistics.median(times[1:])

    def long_context(self) -> float:
        (timing,) = self._timings(prompts(1, LONG), 32)
        return 31 / float(timing.total - timing.first_token)

    def streams(self, count: int) -> float:
        """Every stream is read chunk by chunk in one event loop."""
        import asyncio

        async def read(prompt: list[int]) -> None:
            async with self._engine.stream(prompt, max_tokens=STREAM_TOKENS, **self._params) as request:
                async for _ in request:
                    pass

        async def read_all() -> float:
            start = time.perf_counter()
            await asyncio.gather(*map(read, prompts(count, SHORT, next(self._seeds))))
            return count * STREAM_TOKENS / (time.perf_counter() - start)

        return max(asyncio.run(read_all()) for _ in range(1 if count == 1 else 2))


class PenstockBf16(Penstock):
    """Penstock with products of bfloat16 pairs."""

    def __init__(self, model: str, weights: str, threads: int, rows: Sequence[str]) -> None:
        os.environ["PENSTOCK_ISA"] = "avx512_bf16"
        super().__init__(model, weights, threads, rows)


class LlamaCpp(Peer):
    """The tools of llama.cpp, which are faster than its Python bindings. Each measurement is a process."""

    def __init__(self, model: str, weights: str, threads: int, rows: Sequence[str]) -> None:
        del weights, rows
        site = Path(sysconfig.get_paths()["platlib"])
        self._bin = site / "bin"
        self._env = os.environ | {"LD_LIBRARY_PATH": f"{site / 'lib'}:{site / 'llama_cpp' / 'lib'}"}
        self._common = ["-m", model, "-t", str(threads)]
        self._bench("-p", str(SHORT), "-n", "0", "--no-warmup")

    def _tool(self, tool: str, *arguments: str) -> dict[str, Any]:
        command = [str(self._bin / tool), *self._common, *arguments]
        result = subprocess.run(command, env=self._env, check=True, capture_output=True, text=True)  # noqa: S603
        lines = [line for line in result.stdout.splitlines() if line.startswith("{")]
        output: dict[str, Any] = json.loads(lines[-1])
        return output

    def _bench(self, *arguments: str) -> float:
        output = self._tool("llama-bench", "-r", "1", "-o", "jsonl", *arguments)
        self.weight_bytes = output["model_size"]
        return float(output["avg_ts"])

    def _batched(self, batch: int, tokens: int) -> float:
        context = str(batch * (SHORT + tokens))
        options = ["-c", context, "-b", "2048", "-ub", "512", "-npp", str(SHORT), "-ntg", str(tokens)]
        format_ = ["-npl", str(batch), "--output-format", "jsonl"]
        return float(self._tool("llama-batched-bench", *options, *format_)["speed_tg"])

    def prefill(self, length: int) -> float:
        return length / self._bench("-p", str(length), "-n", "0")

    def decode(self, batch: int) -> float:
        tokens = tokens_of(batch)
        return self._bench("-p", "0", "-n", str(tokens)) if batch == 1 else self._batched(batch, tokens)

    def long_context(self) -> float:
        cache = ["-fa", "1", "-ctk", "q8_0", "-ctv", "q8_0"]
        return self._bench("-p", "0", "-n", "32", "-d", str(LONG), *cache)

    def streams(self, count: int) -> float:
        """The kernels alone: one loop over one batch, without requests, results and text."""
        return self._batched(count, STREAM_TOKENS)

    def peak_rss(self) -> int:
        return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


class LlamaServer(Peer):
    """llama.cpp's HTTP server with 64 slots and a connection per stream."""

    SLOTS = 64

    def __init__(self, model: str, weights: str, threads: int, rows: Sequence[str]) -> None:
        del weights, rows
        site = Path(sysconfig.get_paths()["platlib"])
        environment = os.environ | {"LD_LIBRARY_PATH": f"{site / 'lib'}:{site / 'llama_cpp' / 'lib'}"}
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        context = ["-c", str(256 * self.SLOTS), "-np", str(self.SLOTS), "--threads-http", "300"]
        address = ["--host", "127.0.0.1", "--port", str(self._port)]
        command = [str(site / "bin" / "llama-server"), "-m", model, "-t", str(threads), *context, *address]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._server = subprocess.Popen(command, env=environment, **quiet)  # type: ignore[call-overload]  # noqa: S603
        atexit.register(self._server.kill)
        while not self._is_ready():
            if self._server.poll() is not None:
                raise RuntimeError("llama-server ended")
            time.sleep(0.05)
        self.streams(1)

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=2)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200  # noqa: PLR2004
        except OSError:
            return False
        finally:
            connection.close()

    def streams(self, count: int) -> float:
        import asyncio

        async def read(prompt: list[int]) -> None:
            options = {"temperature": 0, "ignore_eos": True, "cache_prompt": False, "stream": True}
            body = json.dumps({"prompt": prompt, "n_predict": STREAM_TOKENS, **options}).encode()
            length = f"Connection: close\r\nContent-Length: {len(body)}\r\n"
            head = "POST /completion HTTP/1.1\r\nHost: localhost\r\n" + length
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
            received = await reader.read()
            writer.close()
            if f'"predicted_n":{STREAM_TOKENS},'.encode() not in received:
                raise RuntimeError(f"a short stream: {received[-300:]!r}")

        async def read_all() -> float:
            start = time.perf_counter()
            await asyncio.gather(*map(read, prompts(count, SHORT, count)))
            return count * STREAM_TOKENS / (time.perf_counter() - start)

        return max(asyncio.run(read_all()) for _ in range(1 if count == 1 else 2))

    def peak_rss(self) -> int:
        raise NotImplementedError


class Stepped(Peer):
    """An engine with a callback per step; `_run` returns the times."""

    def _run(self, prompts: Prompts, tokens: int) -> tuple[float, list[float]]:
        """The start, and the end of each step."""
        raise NotImplementedError

    def prefill(self, length: int) -> float:
        start, ends = self._run(prompts(1, length, length), 2)
        return ends[0] - start

    def decode(self, batch: int) -> float:
        _, ends = self._run(prompts(batch, SHORT, batch), tokens_of(batch))
        return batch * (len(ends) - 1) / (ends[-1] - ends[0])


class OpenVino(Stepped):
    """OpenVINO GenAI's pipeline with continuous batching."""

    module = "openvino_genai"

    def __init__(self, model: str, weights: str, threads: int, rows: Sequence[str]) -> None:
        del weights, rows
        import openvino_genai as genai

        scheduler = genai.SchedulerConfig()
        scheduler.max_num_seqs, scheduler.max_num_batched_tokens = 64, 2048
        scheduler.cache_size, scheduler.dynamic_split_fuse = 1, True
        options = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
        self._pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", options)
        self.prefill(SHORT)

    def _run(self, prompts: Prompts, tokens: int) -> tuple[float, list[float]]:
        import numpy as np
        import openvino
        import openvino_genai as genai

        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = tokens
        config.ignore_eos, config.do_sample = True, False
        inputs = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        add = self._pipeline.add_request
        handles = [add(index, input_, config) for index, input_ in enumerate(inputs)]
        start, ends = time.perf_counter(), []
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            outputs = [output for handle in handles if handle.can_read() for output in handle.read().values()]
            if sum(len(output.generated_ids) for output in outputs) == len(prompts):
                ends.append(time.perf_counter())
        return start, ends


class CTranslate2(Stepped):
    """CTranslate2's generator."""

    module = "ctranslate2"

    def __init__(self, model: str, weights: str, threads: int, rows: Sequence[str]) -> None:
        del rows
        import ctranslate2

        options = {"inter_threads": 1, "intra_threads": threads}
        self._generator = ctranslate2.Generator(model, device="cpu", compute_type=weights, **options)
        self._vocabulary = json.loads(Path(model, "vocabulary.json").read_text())
        self.prefill(SHORT)

    def _run(self, prompts: Prompts, tokens: int) -> tuple[float, list[float]]:
        ends: dict[int, float] = {}

        def see(step: Any) -> bool:
            ends.setdefault(step.step, time.perf_counter())
            return False

        start = time.perf_counter()
        self._generator.generate_batch(
            [[self._vocabulary[id_] for id_ in prompt] for prompt in prompts],
            max_length=tokens,
            min_length=tokens,
            sampling_topk=1,
            beam_size=1,
            include_prompt_in_result=False,
            end_token=[],
            callback=see,
            max_batch_size=0,
            cache_static_prompt=False,
        )
        return start, list(ends.values())


class OnnxRuntime(Stepped):
    """ONNX Runtime GenAI's generator."""

    module = "onnxruntime_genai"

    def __init__(self, model: str, weights: str, threads: int, rows: Sequence[str]) -> None:
        del weights, rows
        import onnxruntime_genai as genai

        config = genai.Config(model)
        session = {"intra_op_num_threads": threads, "inter_op_num_threads": 1}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
        self._model = genai.Model(config)
        self.prefill(SHORT)

    def _run(self, prompts: Prompts, tokens: int) -> tuple[float, list[float]]:
        import numpy as np
        import onnxruntime_genai as genai

        params = genai.GeneratorParams(self._model)
        length = len(prompts[0]) + tokens
        params.set_search_options(
            batch_size=len(prompts), max_length=length, min_length=length, do_sample=False
        )
        generator = genai.Generator(self._model, params)
        start, ends = time.perf_counter(), []
        generator.append_tokens(np.array(prompts, dtype=np.int32))
        for _ in range(tokens):
            generator.generate_next_token()
            ends.append(time.perf_counter())
        return start, ends


class Transformers(Stepped):
    """transformers on PyTorch, with static batches."""

    module = "transformers.models.qwen2.modeling_qwen2"

    def __init__(self, model: str, weights: str, threads: int, rows: Sequence[str]) -> None:
        del weights, rows
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
        self.prefill(SHORT)

    def _run(self, prompts: Prompts, tokens: int) -> tuple[float, list[float]]:
        import torch
        from transformers.generation import StoppingCriteria, StoppingCriteriaList

        ends: list[float] = []

        class Clock(StoppingCriteria):  # type: ignore[misc]
            def __call__(self, input_ids: Any, _scores: Any, **_: Any) -> Any:
                ends.append(time.perf_counter())
                return torch.zeros(input_ids.shape[0], dtype=torch.bool)

        ids = torch.tensor(prompts)
        start = time.perf_counter()
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                stopping_criteria=StoppingCriteriaList([Clock()]),
            )
        return start, ends


PEERS: dict[str, type[Peer]] = {
    "penstock": Penstock,
    "penstock-bf16": PenstockBf16,
    "llama.cpp": LlamaCpp,
    "llama-server": LlamaServer,
    "openvino": OpenVino,
    "ctranslate2": CTranslate2,
    "onnxruntime": OnnxRuntime,
    "transformers": Transformers,
}


def measure(peer: Peer, row: str) -> float:
    """One row of an open model."""
    kind, _, number = row.partition("-")
    if row == "prefill":
        return PREFILL / min(peer.prefill(PREFILL) for _ in range(2))
    if row == "cached":
        return peer.cached()
    if row == "rss":
        return float(peer.peak_rss())
    if row == "decode-8k":
        return peer.long_context()
    return peer.streams(int(number)) if kind == "streams" else peer.decode(int(number))


def main() -> None:
    """Run one turn."""
    name, model, weights, threads, *rows = sys.argv[1:]
    if PEERS[name].module:
        importlib.import_module(PEERS[name].module)
    start = time.perf_counter()
    peer = PEERS[name](model, weights, int(threads), rows)
    ready = time.perf_counter() - start
    gc.collect()
    for row in rows:
        try:
            value = ready if row == "ready" else measure(peer, row)
        except NotImplementedError:
            continue
        print(json.dumps({"row": row, "value": value}), flush=True)
    about = {"weight_bytes": peer.weight_bytes, "isa": getattr(peer, "isa", None)}
    print(json.dumps({"about": about}), flush=True)


if __name__ == "__main__":
    main()
