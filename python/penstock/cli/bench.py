"""`penstock bench`: the engine in this process, or a server under load."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock._install import missing_extra
from penstock.bench.settings import BENCH_GROUPS, BenchSettings
from penstock.cli.bench_engine import bench_engine
from penstock.cli.options import Command, Option, api_key, key_options, settings_options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.bench.serve import Benchmark

__all__ = ["bench"]


class _BenchGroup(click.Group):
    """A group in which `engine` is the default command."""

    command_class = Command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in {*self.commands, *ctx.help_option_names}:
            args = ["engine", *args]
        return super().parse_args(ctx, args)


@click.group("bench", cls=_BenchGroup)
def bench() -> None:
    """Measure MODEL in this process, or a server under load.

    `penstock bench MODEL` is `penstock bench engine MODEL`.
    """


bench.add_command(bench_engine)


def _goals(given: Sequence[str]) -> dict[str, float]:
    goals = {}
    for item in (item for text in given for item in text.replace(",", " ").split()):
        name, _, limit = item.partition(":")
        try:
            goals[name] = float(limit)
        except ValueError:
            raise click.BadParameter(f"{item!r}: NAME:MILLISECONDS is expected, such as ttft:200") from None
    return goals


class _NewFile(click.Path):
    """The path of a file that will be written, which is checked before the benchmark runs."""

    def __init__(self, *suffixes: str) -> None:
        super().__init__(dir_okay=False, writable=True)
        self.suffixes = suffixes

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path."""
        path = Path(value)
        if not path.parent.is_dir():
            self.fail(f"{path.parent} is not a directory", param, ctx)
        if self.suffixes and path.suffix not in self.suffixes:
            self.fail(f"{value!r}: one of {', '.join(self.suffixes)} is expected", param, ctx)
        return super().convert(value, param, ctx)


@bench.command("serve")
@click.option(
    "--url", required=True, cls=Option, group="Server", help="Address, such as http://127.0.0.1:8000."
)
@key_options("Server")
@settings_options(BenchSettings, BENCH_GROUPS)
@click.option(
    "--goodput",
    multiple=True,
    cls=Option,
    group="Report",
    help="Goals in milliseconds, such as ttft:200 tpot:50 e2el:5000; the requests that meet all are counted.",
)
@click.argument("more_goals", nargs=-1, metavar="")
@click.option("--output", type=_NewFile(), cls=Option, group="Report", help="JSON file of the numbers.")
@click.option(
    "--detailed",
    is_flag=True,
    cls=Option,
    group="Report",
    help="Add the numbers of each request to the JSON.",
)
@click.option(
    "--plot",
    type=_NewFile(".pdf", ".png", ".svg"),
    cls=Option,
    group="Report",
    help="PDF, PNG or SVG file of the latencies over the load.",
)
@click.option(
    "--chart/--no-chart",
    default=None,
    cls=Option,
    group="Report",
    help="Plot in the terminal. Default: if standard output is one.",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    cls=Option,
    group="Report",
    help="Print one JSON object, and no tables.",
)
def _bench_serve(goodput: Sequence[str], more_goals: Sequence[str], **options: Any) -> None:
    """Measure a server with OpenAI's API under load.

    A closed loop keeps a number of requests in flight (--concurrency), an open loop starts them by a schedule
    (--request-rate). Ctrl-C prints the numbers so far.
    """
    if more_goals and not goodput:
        raise click.UsageError(f"Got unexpected extra argument ({more_goals[0]})")
    report = {name: options.pop(name) for name in ("output", "detailed", "plot", "chart", "as_json")}
    settings = BenchSettings(
        api_key=api_key(options.pop("api_key"), options.pop("api_key_file")),
        goodput=_goals([*goodput, *more_goals]),
        **{name: value for name, value in options.items() if value not in (None, ())},
    )
    try:
        from penstock.bench.serve import Benchmark

        if report["plot"]:
            importlib.import_module("matplotlib")  # before the load, not after it
    except ModuleNotFoundError as error:
        raise click.ClickException(missing_extra("bench serve", error.name, "bench")) from error
    benchmark = Benchmark(settings)
    is_interrupted = False
    try:
        _run(benchmark, is_silent=report["as_json"])
    except KeyboardInterrupt:
        is_interrupted = True
        click.echo(err=True)
        if benchmark.points and not report["as_json"]:
            _print_point(benchmark, benchmark.points[-1])
    if benchmark.points:
        _report(benchmark, **report)
    if is_interrupted:
        raise KeyboardInterrupt
    if any(point["failed"] or not point["completed"] for point in benchmark.points):
        sys.exit(1)


def _run(benchmark: Benchmark, *, is_silent: bool) -> None:
    """Run all load points, each with a table at its end, and a progress bar on a terminal."""
    from tqdm import tqdm

    settings = benchmark.settings
    total = settings.num_prompts and settings.num_prompts * len(settings.loads)
    with tqdm(total=total, unit="req", leave=False, disable=None) as bar:

        def show(point: dict[str, Any]) -> None:
            if not is_silent:
                bar.clear()
                _print_point(benchmark, point)

        benchmark.run(show, lambda _record: bar.update())


def _print_point(benchmark: Benchmark, point: dict[str, Any]) -> None:
    from penstock.bench.report import table

    click.echo(table(point, benchmark.settings) + "\n")


def _report(
    benchmark: Benchmark,
    *,
    output: str | None,
    detailed: bool,
    plot: str | None,
    chart: bool | None,
    as_json: bool,
) -> None:
    """Print and write everything that concerns all load points."""
    from penstock.bench.plot import terminal_plot, write_plot
    from penstock.bench.report import curve

    result = json.dumps(benchmark.result(detailed=detailed), ensure_ascii=False)
    if output is not None:
        Path(output).write_text(result + "\n", encoding="utf-8")
    if as_json:
        click.echo(result)
    elif len(benchmark.points) > 1:
        click.echo(curve(benchmark.points, benchmark.settings))
    if chart or (chart is None and sys.stdout.isatty() and not as_json):
        click.echo(terminal_plot(benchmark.points, benchmark.settings))
    if plot is not None:
        title = f"{benchmark.model} at {benchmark.settings.shown_url}"
        distributions = list(benchmark.distributions())
        write_plot(plot, title, benchmark.points, distributions, benchmark.settings)
