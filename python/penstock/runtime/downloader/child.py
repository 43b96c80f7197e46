"""The child process of `process.py`: one download."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import msgspec

from penstock.runtime.downloader import errors
from penstock.runtime.downloader.process import Order, Report
from penstock.runtime.downloader.sources import resolve
from penstock.runtime.downloader.transfer import download


def _read_order() -> Order:
    """The first line on standard input."""
    line = b""
    while not line.endswith(b"\n") and (data := os.read(0, 1 << 16)):
        line += data
    return msgspec.json.decode(line, type=Order)


def main() -> None:
    """The child: one download."""
    output = os.dup(1)
    os.dup2(2, 1)  # other output is no report
    cancelled = threading.Event()

    def report(line: Report) -> None:
        try:
            os.write(output, msgspec.json.encode(line) + b"\n")
        except BrokenPipeError:
            cancelled.set()

    def watch_parent() -> None:
        while os.read(0, 1 << 16):
            pass
        cancelled.set()

    order = _read_order()
    threading.Thread(target=watch_parent, daemon=True).start()
    try:
        source = resolve(order.uri, order.options)
        path = download(
            source,
            Path(order.directory),
            cancelled=cancelled,
            progress=lambda progress: report(Report(progress=progress)),
        )
        report(Report(path=str(path)))
    except errors.DownloadError as error:
        kind = next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in errors.__all__)
        report(Report(error=kind, message=str(error), field=getattr(error, "field", "")))
    except Exception as error:  # noqa: BLE001 - messages of libraries can have credentials
        report(Report(error="DownloadError", message=f"the download failed: {type(error).__name__}"))


if __name__ == "__main__":
    main()
