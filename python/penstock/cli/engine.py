"""Engines of the command line: opened with a progress bar and with the adapters that the options name."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import penstock
from penstock._options import EngineOptions, SamplingOptions
from penstock.cli.download import confirm_download
from penstock.cli.lora import adapter_settings, lora_modules
from penstock.cli.options import given

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = ["lora_modules_option", "open_engine", "progress_bar", "sampling_fields", "served_name"]

lora_modules_option = lora_modules(
    "LoRA adapter to load; repeatable. --adapter selects one. Default: the first one."
)


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A function that shows byte counts, on a terminal."""
    from tqdm import tqdm

    with tqdm(desc=title, unit="B", unit_scale=True, leave=False, disable=None) as bar:

        def show_progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show_progress


@contextmanager
def open_engine(model: str, options: Mapping[str, Any]) -> Iterator[penstock.Engine]:
    """Open an engine, with a progress bar on a terminal while it loads, and a question before a download."""
    model = confirm_download(model, options)
    settings: dict[str, Any] = given(EngineOptions, options)
    modules = options.get("modules", ())
    if modules:
        settings = adapter_settings(settings, len(modules), default=len(modules))
    with progress_bar("loading") as show_progress:
        engine = penstock.Engine(model, progress=show_progress, **settings)
        engine.blocking.start()
    with engine:
        for module in modules:
            engine.blocking.load_adapter(module.name, module.path)
        yield engine


def sampling_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `SamplingParams` that were set; the adapter is the first one by default."""
    fields = given(SamplingOptions, options)
    if options["modules"]:
        fields.setdefault("adapter", options["modules"][0].name)
    return fields


def served_name(model: str) -> str:
    """The name of a model without another one: responses have it, so it has no folders of this machine."""
    path = Path(model)
    return path.resolve().name if path.exists() else model
