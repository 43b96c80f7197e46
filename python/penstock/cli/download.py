"""The facts and the question of the command line before a model of the hub is downloaded."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import click

import penstock
from penstock import _hub
from penstock._hub_aliases import aliases, default_alias
from penstock._install import missing_extra
from penstock.cli.output import program

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock._hub_download import Plan

__all__ = ["Alias", "Memory", "confirm_download", "default_model", "is_at_terminal", "list_aliases"]
__all__ += ["shown_size", "yes_option"]

yes_option = click.option(
    "-y", "--yes", "assume_yes", is_flag=True, help="Download a model of the hub without a question."
)

#: Default of `memory_ratio`, and the variables that replace it.
_RATIO, _RATIOS = 0.9, ("PENSTOCK_MEMORY_RATIO", "BFC_MEM_RATIO")
#: The variable with the mebibytes that stay free.
_LEFTOVER = "BFC_LEFTOVER_MB"
#: The part of the memory for the weights of a suggested model; the rest is for its workspace and KV cache.
_SENSIBLE = 0.7
#: The largest suggestion for a CPU, in bytes of weights: each output token reads all of them.
_CPU_LIMIT = 5 << 30


class Memory(NamedTuple):
    """The memory of a device that an engine may take, in bytes."""

    limit: int
    device: str

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Memory:
        """That of an engine with these options; no limit for a device that the engine will refuse."""
        ratio = options.get("memory_ratio") or next(filter(None, map(_number, _RATIOS)), _RATIO)
        leftover = (_number(_LEFTOVER) or 0) * (1 << 20)
        limits = {"cpu": penstock.Host().available_bytes}
        device = options.get("device") or "auto"
        if device != "cpu":
            found = penstock.cuda_info().devices
            usable = {f"cuda:{each.index}": each.free_memory for each in found if each.reason is None}
            limits |= {name: memory for name, memory in usable.items() if memory is not None}
            names = {"auto": next(iter(usable), "cpu"), "cuda": "cuda:0"}
            device = names.get(device, device)
        if device not in limits:
            return cls(sys.maxsize, device)
        return cls(int(max(0, limits[device] - leftover) * ratio), device)

    def holds(self, weights: int) -> bool:
        """Whether a model of this size is a sensible one."""
        limit = self.limit * _SENSIBLE
        return weights <= (min(limit, _CPU_LIMIT) if self.device == "cpu" else limit)


def _number(variable: str) -> float | None:
    """The value of a variable; the engine refuses one that is no number."""
    with suppress(ValueError):
        return float(os.environ[variable]) if variable in os.environ else None
    return None


class Alias(NamedTuple):
    """An alias and what the hub says of its model."""

    name: str
    target: str
    is_downloaded: bool
    #: None if the hub was not asked or did not answer.
    plan: Plan | None = None
    #: The reason why the hub did not tell it.
    error: str | None = None


def shown_size(size: int) -> str:
    """A number of bytes for people."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:,.0f} MB"  # noqa: PLR2004


def is_at_terminal() -> bool:
    """Whether a question can be asked."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def list_aliases(*, with_sizes: bool) -> list[Alias]:
    """All aliases; `with_sizes` asks the hub about each."""
    found = {name: Alias(name, target, _hub.cached(target) is not None) for name, target in aliases().items()}

    def ask(alias: Alias) -> None:
        try:
            plan = _hub.plan(alias.target)
        except penstock.ModelLoadError as error:
            found[alias.name] = alias._replace(error=str(error))
        else:
            found[alias.name] = alias._replace(plan=None if isinstance(plan, str) else plan)

    if with_sizes:  # no pool: after Ctrl-C, nothing waits for daemon threads
        threads = [threading.Thread(target=ask, args=[alias], daemon=True) for alias in found.values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return list(found.values())


def default_model(*, assume_yes: bool) -> str:
    """The model of a chat that names none: one that was downloaded, or a small one to download.

    Raises `click.ClickException` with the command to use where no question can be asked.
    """
    downloaded = [alias.name for alias in list_aliases(with_sizes=False) if alias.is_downloaded]
    name = default_alias() if default_alias() in downloaded or not downloaded else downloaded[0]
    missing = "Missing argument 'MODEL', or --url"
    if find_spec("huggingface_hub") is None:
        needs = missing_extra("downloading a model", "huggingface_hub", "hub")
        raise click.UsageError(f"{missing}; {needs}{_demo()}")
    if not (assume_yes or is_at_terminal()):
        chats = "chats with a model that is downloaded" if downloaded else "downloads a small model and chats"
        raise click.UsageError(f"{missing}. This {chats}: {program()} chat {name}{_demo()}")
    if downloaded:
        others = f"; downloaded with a short name: {', '.join(downloaded)}" if len(downloaded) > 1 else ""
        click.echo(f"No model is named: chatting with {name}{others}", err=True)
        return name
    click.echo(f"No model is named; {name} is a small one.{_demo()}", err=True)
    _suggest(Memory.of({}), but=name)
    return name


def confirm_download(model: str, options: Mapping[str, Any], *, is_loaded: bool = True) -> str:
    """The model to open, after a question if something has to be downloaded for it.

    The question says if the model does not fit into memory. Nothing is asked with `--yes` or without a
    terminal: there, a model that does not fit is an error. `is_loaded` means that an engine loads the model.
    Raises `click.Abort` after a no.
    """
    found = _hub.plan(model)
    if isinstance(found, str):
        return found
    if found.missing:
        _confirm(found, options, is_loaded=is_loaded)
    return _hub.PlannedModel(model, found)


def _confirm(found: Plan, options: Mapping[str, Any], *, is_loaded: bool) -> None:
    found.check_space()
    problem = _problem(found, options) if is_loaded else None
    if options.get("assume_yes"):
        if problem:
            click.echo(f"Warning: {found.name} {problem}", err=True)
        return
    if not is_at_terminal():
        if problem:
            raise click.ClickException(f"{found.name} {problem}; --yes downloads it all the same")
        return
    _show(found)
    if problem:
        click.echo(f"It {problem}.", err=True)
        _suggest(Memory.of(options))
    if not _ask("Download it?", default=problem is None):
        raise click.Abort


def _problem(found: Plan, options: Mapping[str, Any]) -> str | None:
    """The reason why the model does not fit; None if it does, or if its size in memory is not known."""
    if options.get("quantization") or options.get("dtype"):
        return None
    memory = Memory.of(options)
    if found.weights <= memory.limit:
        return None
    place = "memory" if memory.device == "cpu" else f"memory of {memory.device}"
    return (
        f"does not fit into memory: the weights have {found.weights:,} bytes, "
        f"and an engine may take {memory.limit:,} bytes of the available {place}"
    )


def _suggest(memory: Memory, but: str | None = None) -> None:
    """Name the largest model that fits, if the hub tells the sizes."""
    sizes = {each.name: each.plan.weights for each in list_aliases(with_sizes=True) if each.plan is not None}
    fitting = {name: size for name, size in sizes.items() if memory.holds(size)}
    if not fitting:
        return
    best = max(fitting, key=lambda name: fitting[name])
    if best != but:
        size = shown_size(fitting[best])
        command = f"{program()} chat {best}"
        click.echo(f"The largest that fits this machine well is {best}, {size}: {command}", err=True)
    click.echo(f"All short names, with sizes: {program()} models --sizes", err=True)


def _show(found: Plan) -> None:
    names = [file.name for file in found.missing]
    checked = [file for file in found.missing if file.sha256 is not None]
    checksum = checked[0].sha256 if len(checked) == 1 else f"of {len(checked)} files"
    lines = {
        "repository": f"{found.source.name}, commit {found.commit[:12]}",
        "files": ", ".join(names if len(names) <= 3 else [*names[:2], f"{len(names) - 2} more"]),  # noqa: PLR2004
        "size": f"{shown_size(found.size)}; {shown_size(found.free)} free in {found.folder}",
        "licence": found.licence or "not named by the repository",
        "SHA-256": f"{checksum}, from {found.endpoint}; verified" if checked else "none",
    }
    click.echo(f"{found.name} has to be downloaded:", err=True)
    for name, value in lines.items():
        click.echo(f"  {name:11} {value}", err=True)


def _ask(question: str, *, default: bool) -> bool:
    """The answer; the end of the input is a no."""
    while True:
        click.echo(f"{question} [{'Y/n' if default else 'y/N'}] ", nl=False, err=True)
        line = sys.stdin.readline()
        answer = line.strip().lower()
        if not line:
            click.echo(err=True)
            return False
        if answer in ("", "y", "yes", "n", "no"):
            return answer.startswith("y") if answer else default


def _demo() -> str:
    """The command for the demo model, if it is installed."""
    with suppress(penstock.ModelLoadError):
        return f"\nThe demo model is installed: {program()} chat {penstock.demo.model_path()}"
    return ""
