"""`download_model`: the function of AIBrix."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.runtime.downloader.options import Options, default_local_dir
from penstock.runtime.downloader.sources import resolve
from penstock.runtime.downloader.target import model_directory
from penstock.runtime.downloader.transfer import download

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from penstock.runtime.downloader.progress import Progress

__all__ = ["download_model"]


def download_model(
    model_uri: str,
    local_path: str | Path | None = None,
    model_name: str | None = None,
    download_extra_config: Mapping[str, Any] | None = None,
    enable_progress_bar: bool = False,  # noqa: FBT001, FBT002 - AIBrix's signature
) -> Path:
    """Download a model to `local_path/model_name`; returns that path. Raises a `DownloadError`."""
    source = resolve(model_uri, Options.load(model_uri, download_extra_config))
    directory = model_directory(Path(local_path or default_local_dir()), model_name or source.model_name)
    cancelled = threading.Event()
    try:
        with _progress_bar(enabled=enable_progress_bar) as show:
            return download(source, directory, cancelled=cancelled, progress=show)
    finally:
        cancelled.set()


@contextmanager
def _progress_bar(*, enabled: bool) -> Iterator[Callable[[Progress], None] | None]:
    if not enabled:
        yield None
        return
    from tqdm import tqdm

    with tqdm(unit="B", unit_scale=True, unit_divisor=1024) as bar:

        def show(progress: Progress) -> None:
            bar.total = progress.total_bytes or None
            bar.set_description(
                f"{progress.phase} {progress.done_files}/{progress.total_files}", refresh=False
            )
            bar.update(progress.done_bytes - bar.n)

        yield show
