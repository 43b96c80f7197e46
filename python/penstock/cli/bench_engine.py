"""`penstock bench engine`: the speed of an engine in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from penstock.cli.download import yes_option
from penstock.cli.engine import open_engine
from penstock.cli.options import Command, engine_options, json_option
from penstock.cli.output import print_json

if TYPE_CHECKING:
    import penstock

__all__ = ["bench_engine"]

BENCH_PROMPT = 512
BENCH_OUTPUT = 64
BENCH_BATCHES = (1, 8, 32)


@click.command("engine", cls=Command)
@click.argument("model")
@json_option
@yes_option
@engine_options
def bench_engine(model: str, *, as_json: bool, **options: Any) -> None:
    """Benchmark MODEL. Prints tokens per second of a 512-token prefill, and of decode batches 1, 8 and 32."""
    with open_engine(model, options) as engine:
        info = engine.info
        report: dict[str, Any] = {
            "architecture": info.architecture,
            "dtype": info.dtype,
            "weight_formats": [item.to_dict() for item in info.weight_formats],
            "threads": info.threads,
            "isa": info.isa,
            "prefill": {},
            "decode": {},
        }

        def show(line: str) -> None:
            if not as_json:
                click.echo(line)

        show(f"{info.architecture}, {info.dtype}, {info.threads} threads, {info.isa}")
        length = min(BENCH_PROMPT, info.max_model_len - 1)
        _run_together(engine, 1, length, 1)  # warm-up
        [first] = _run_together(engine, 1, length, 1)
        assert first.timings.first_token is not None  # noqa: S101 - one token was generated
        rate = length / first.timings.first_token
        report["prefill"][length] = rate
        show(f"prefill, {length} tokens: {rate:10.1f} tokens/s")
        output = min(BENCH_OUTPUT, info.max_model_len - 1)
        for batch in BENCH_BATCHES:
            if batch <= info.max_num_seqs:
                results = _run_together(engine, batch, 1, output)
                rate = batch * output / max(result.timings.total for result in results)
                report["decode"][batch] = rate
                show(f"decode, batch {batch}: {rate:10.1f} tokens/s")
    if as_json:
        print_json(report)


def _run_together(engine: penstock.Engine, batch: int, prompt: int, output: int) -> list[penstock.Result]:
    """Run `batch` requests of `prompt` arbitrary tokens; each generates exactly `output` tokens."""
    vocabulary = engine.info.vocabulary_size
    requests = [
        engine.blocking.start_request(
            [(7919 * position + number) % vocabulary for position in range(1, prompt + 1)],
            max_tokens=output,
            temperature=0.0,
            ignore_eos=True,
            use_prefix_cache=False,
        )
        for number in range(batch)
    ]
    return [request.result() for request in requests]
