"""`penstock batch`: the requests of a file in OpenAI's batch format."""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import click

from penstock._install import missing_extra
from penstock._threads import run_in_thread
from penstock.cli.download import yes_option
from penstock.cli.engine import open_engine, served_name
from penstock.cli.lora import lora_modules
from penstock.cli.options import Command, engine_options
from penstock.server.settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    import penstock
    from penstock.server.batch.lines import FileCheck, Line
    from penstock.server.batch.results import Results

__all__ = ["batch"]

_File = partial(click.Path, dir_okay=False, path_type=Path)


@click.command("batch", cls=Command)
@click.argument("source", metavar="INPUT", type=_File(exists=True))
@click.argument("target", metavar="OUTPUT", type=_File())
@click.option("--model", required=True, help="The model that answers.")
@click.option(
    "--served-model-name",
    "names",
    multiple=True,
    help="Name of the model in the lines; repeatable. Default: MODEL, and of a path its last part.",
)
@lora_modules("LoRA adapter to load; repeatable. A line has its name as model.")
@yes_option
@engine_options
def batch(source: Path, target: Path, model: str, names: Sequence[str], **options: Any) -> None:
    """Answer the requests of INPUT, a file in OpenAI's batch format, and write the responses to OUTPUT.

    OUTPUT has a line for each request, in the order in which they end. If OUTPUT exists, the command
    continues it: requests that have a line there are not computed again. The exit status is 1 if a request
    has failed.
    """
    try:
        from penstock.server.batch.lines import FileCheck
        from penstock.server.batch.results import OutputError, Results
    except ModuleNotFoundError as error:
        raise click.ClickException(missing_extra("the batch", error.name, "server")) from error
    checked = FileCheck(source)
    while checked.advance():
        pass
    if checked.problems:
        places = (f"{source}, line {found.line}" if found.line else source for found in checked.problems)
        problems = zip(places, checked.problems, strict=True)
        raise click.UsageError("\n".join(f"{place}: {found.message}" for place, found in problems))
    begin = time.monotonic()
    try:
        with Results(target) as results:
            while results.advance():
                pass
            results.check(checked.custom_ids)
            results.resume()
            num_before, total = len(results.custom_ids), len(checked.custom_ids)
            if num_before < total:
                names = names or (served_name(model), model)
                with open_engine(model, options) as engine:
                    _run(engine, names, source, results, checked)
    except OutputError as error:
        raise click.UsageError(str(error)) from error
    click.echo(
        f"{total} requests: {results.num_completed} completed, {results.num_failed} failed"
        f" ({num_before} of them earlier); {time.monotonic() - begin:.1f} s",
        err=True,
    )
    if results.num_failed:
        sys.exit(1)


def _run(
    engine: penstock.Engine, names: Sequence[str], source: Path, results: Results, checked: FileCheck
) -> None:
    """Answer the requests without a line, with a progress bar on a terminal."""
    from tqdm import tqdm

    from penstock.server.batch.answers import answer_line
    from penstock.server.batch.lines import LineReader, Requester
    from penstock.server.batch.runner import concurrency, run_lines
    from penstock.server.state import State

    async def work(line: Line) -> None:
        if line.custom_id not in results.custom_ids:
            results.add(line.custom_id, await answer_line(state, line, Requester(), engine.health))
            bar.update()

    async def answer() -> None:
        read = partial(run_in_thread, LineReader(source).read)
        await run_lines(read, concurrency(engine.info, checked.longest), work)

    state = State(dict.fromkeys(names, engine), ServerSettings(store_responses=False))
    total, done = len(checked.custom_ids), len(results.custom_ids)
    with tqdm(total=total, initial=done, unit="request", leave=False, disable=None) as bar:
        anyio.run(answer)
