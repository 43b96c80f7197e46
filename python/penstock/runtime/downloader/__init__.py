"""Downloads models: from the Hugging Face hub, S3, TOS, a web server or a local directory.

    options = Options.load(uri, extra={"num_threads": 16})
    source = resolve(uri, options)
    path = download(source, directory, cancelled=threading.Event(), progress=print)

`download` blocks; it runs in any thread. `run` is for event loops: it runs the download in a child process,
so the memory of a download and its libraries is not that of the caller. An interrupted download resumes.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.runtime.downloader.errors import (
        AccessDeniedError,
        DownloadCancelledError,
        DownloadError,
        ForeignFileError,
        InsufficientSpaceError,
        IntegrityError,
        InvalidArgumentError,
        ModelNotFoundError,
        TooLargeError,
        TransferError,
        UnsafeNameError,
    )
    from penstock.runtime.downloader.model import download_model
    from penstock.runtime.downloader.options import Options, default_local_dir
    from penstock.runtime.downloader.process import run
    from penstock.runtime.downloader.progress import Progress
    from penstock.runtime.downloader.sources import Source, resolve
    from penstock.runtime.downloader.target import ModelState, model_directory, model_state
    from penstock.runtime.downloader.transfer import download

__all__ = [
    "AccessDeniedError",
    "DownloadCancelledError",
    "DownloadError",
    "ForeignFileError",
    "InsufficientSpaceError",
    "IntegrityError",
    "InvalidArgumentError",
    "ModelNotFoundError",
    "ModelState",
    "Options",
    "Progress",
    "Source",
    "TooLargeError",
    "TransferError",
    "UnsafeNameError",
    "default_local_dir",
    "download",
    "download_model",
    "model_directory",
    "model_state",
    "resolve",
    "run",
]

#: The modules are imported on use: the command line needs only `command`.
_MODULES = {
    "errors": (
        "AccessDeniedError",
        "DownloadCancelledError",
        "DownloadError",
        "ForeignFileError",
        "InsufficientSpaceError",
        "IntegrityError",
        "InvalidArgumentError",
        "ModelNotFoundError",
        "TooLargeError",
        "TransferError",
        "UnsafeNameError",
    ),
    "model": ("download_model",),
    "options": ("Options", "default_local_dir"),
    "process": ("run",),
    "progress": ("Progress",),
    "sources": ("Source", "resolve"),
    "target": ("ModelState", "model_directory", "model_state"),
    "transfer": ("download",),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
