"""Compares Penstock and llama.cpp on the GGUF file of the demo model, alternating between them.

    .venv/bin/pip install xllamacpp                     # llama.cpp for Python; only needed here
    .venv/bin/python benches/against_llama_cpp.py [--rounds 5] [--threads 2]

Each measurement is a new process: it loads the model, computes one prompt of 512 tokens as a warm-up,
measures a second one, then 64 decoded tokens after a prompt of 16. llama.cpp computes with the file's
4-bit weights and reads 98 MB per decoded token; Penstock dequantises them to float32 and reads 538 MB. Prints
medians and ranges of tokens per second, and of the ratio per round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from typing import Any

PROMPT = 512
OUTPUT = 64


def prompt_of(length: int, first: int) -> list[int]:
    """Arbitrary token ids; a different `first` prevents cache hits."""
    return [first, *((7919 * position) % 40_000 for position in range(1, length))]


def measure_penstock(threads: int) -> dict[str, float]:
    """Tokens per second of prefill and decode."""
    import penstock
    from penstock.demo import model_path

    def run(prompt: list[int], output: int) -> penstock.Timings:
        params = penstock.SamplingParams(
            max_tokens=output, temperature=0.0, ignore_eos=True, use_prefix_cache=False
        )
        return engine.blocking.generate(prompt, params).timings

    with penstock.Engine(str(model_path()), threads=threads) as engine:
        run(prompt_of(PROMPT, 5), 1)
        prefill = run(prompt_of(PROMPT, 6), 1)
        decode = run(prompt_of(16, 7), OUTPUT)
    assert prefill.first_token is not None  # noqa: S101 - both generated tokens
    assert decode.first_token is not None  # noqa: S101
    return {
        "prefill": PROMPT / prefill.first_token,
        "decode": (OUTPUT - 1) / (decode.total - decode.first_token),
    }


def measure_llama_cpp(threads: int) -> dict[str, float]:
    """Tokens per second of prefill and decode, as reported by llama.cpp."""
    import xllamacpp  # type: ignore[import-not-found,unused-ignore]

    from penstock.demo import model_path

    params = xllamacpp.CommonParams()
    params.model.path = str(model_path())
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_parallel = 2048, 2048, 512, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)

    def run(prompt: list[int], output: int) -> dict[str, float]:
        options = {"temperature": 0, "cache_prompt": False, "ignore_eos": True}
        answer: Any = server.handle_completions({"prompt": prompt, "n_predict": output, **options})
        timings: dict[str, float] = answer["timings"]
        return timings

    run(prompt_of(PROMPT, 5), 1)
    prefill = run(prompt_of(PROMPT, 6), 1)
    decode = run(prompt_of(16, 7), OUTPUT)
    return {"prefill": prefill["prompt_per_second"], "decode": decode["predicted_per_second"]}


ENGINES = {"penstock": measure_penstock, "llama.cpp": measure_llama_cpp}


def in_process(engine: str, threads: int) -> dict[str, float]:
    """Measure one engine in a new process."""
    command = [sys.executable, __file__, "--threads", str(threads), "--only", engine]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout  # noqa: S603 - this script
    results: dict[str, float] = json.loads(output.splitlines()[-1])
    return results


def main() -> None:
    """Run the rounds and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=ENGINES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        print(json.dumps(ENGINES[options.only](options.threads)))
        return
    rounds = [
        {engine: in_process(engine, options.threads) for engine in ENGINES} for _ in range(options.rounds)
    ]
    for kind in ("prefill", "decode"):
        for engine in ENGINES:
            print_line(f"{kind}, {engine}", "tokens/s", [results[engine][kind] for results in rounds])
        ratios = [results["penstock"][kind] / results["llama.cpp"][kind] for results in rounds]
        print_line(f"{kind}, ratio", "", ratios)


def print_line(name: str, unit: str, values: list[float]) -> None:
    """Print median and range."""
    low, middle, high = min(values), statistics.median(values), max(values)
    print(f"{name:20} {middle:8.2f} {unit:8} ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
