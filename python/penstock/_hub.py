"""Finds the files of a model: a local path, or a model of the Hugging Face hub, which is downloaded."""

from __future__ import annotations

import concurrent.futures.thread
import os
import threading
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from penstock._core import Port
from penstock._hub_files import MODEL_FILES, FileSet
from penstock.errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import MutableMapping
    from typing import Self

    from penstock._hub_download import Plan
    from penstock._hub_ids import HubModel

__all__ = [
    "Lookup",
    "PlannedModel",
    "cached",
    "find",
    "model_argument",
    "plan",
    "resolve",
]


class PlannedModel(str):
    """The name of a model with a plan, which `resolve` downloads without asking the hub again."""

    __slots__ = ("plan",)
    plan: Plan

    def __new__(cls, model: str, plan: Plan) -> Self:
        self = super().__new__(cls, model)
        self.plan = plan
        return self


def model_argument(model: str | os.PathLike[str] | bytes | bytearray | memoryview) -> str | bytes:
    """The argument of a constructor: a path or a name on the hub, or the contents of a converted model."""
    if isinstance(model, (bytes, bytearray, memoryview)):
        return bytes(model)
    if isinstance(model, (str, os.PathLike)):
        return os.fsdecode(model)
    message = f"expected str, os.PathLike or bytes object for the model, not {type(model).__name__}"
    raise TypeError(message)


class Lookup:
    """`resolve` in a thread that can be abandoned: a stalled download delays neither Ctrl-C nor the exit.

    `port` is rung at the end. Daemon threads do not delay the exit of the process, and the threads of the hub
    library's pool inherit that from the thread that starts them. But the standard library also registers the
    threads of pools to be joined at exit: an abandoned lookup removes those.
    """

    def __init__(self, model: str | bytes, port: Port, files: FileSet = MODEL_FILES) -> None:
        self._port = port
        self._outcome: str | bytes | BaseException = ""
        self._other_threads = set(_pool_threads())
        threading.Thread(target=self._run, name="penstock download", args=(model, files), daemon=True).start()

    def _run(self, model: str | bytes, files: FileSet) -> None:
        try:
            self._outcome = resolve(model, files) if isinstance(model, str) else model
        except BaseException as error:  # noqa: BLE001 - raised by `result`
            self._outcome = error
        finally:
            self._port.ring()

    def result(self) -> str | bytes:
        """What `resolve` returned or raised, once the port was rung; bytes are their own files.

        After an error, the process can end before the other transfers do.
        """
        if isinstance(self._outcome, BaseException):
            if set(_pool_threads()) - self._other_threads:
                self.abandon()
            raise self._outcome
        return self._outcome

    def abandon(self) -> None:
        """Let the process end while the download runs."""
        # Called before the threads of pools are joined; until then the library can start more of them.
        with suppress(AttributeError, RuntimeError):  # not in this version of Python, or the exit has begun
            threading._register_atexit(partial(_forget_threads, self._other_threads))  # type: ignore[attr-defined]  # noqa: SLF001


def _forget_threads(others: set[threading.Thread]) -> None:
    """Let the exit not join the daemon threads of pools, except `others`."""
    pools: Any = concurrent.futures.thread
    # A pool holds the lock while it starts and registers a thread. After `_shutdown` it starts none.
    with getattr(pools, "_global_shutdown_lock", nullcontext()):
        pools._shutdown = True  # noqa: SLF001 - as the standard library does next
        threads = _pool_threads()
        for thread in set(threads) - others:
            if thread.daemon:
                threads.pop(thread, None)


@overload
def find(model: str, files: FileSet = MODEL_FILES) -> str: ...
@overload
def find(model: str | bytes, files: FileSet = MODEL_FILES) -> str | bytes: ...
def find(model: str | bytes, files: FileSet = MODEL_FILES) -> str | bytes:
    """The same as `resolve`; Ctrl-C interrupts a download at once."""
    port = Port(blocking=True)
    lookup = Lookup(model, port, files)
    try:
        port.wait()
    except BaseException:
        lookup.abandon()
        raise
    return lookup.result()


def _pool_threads() -> MutableMapping[threading.Thread, object]:
    """The threads of pools that are joined at exit."""
    return getattr(concurrent.futures.thread, "_threads_queues", {})


def resolve(model: str, files: FileSet = MODEL_FILES) -> str:
    """The local directory or file of `model`, of which `files` are downloaded if necessary.

    `model` is a path, an alias, or the name of a model on the hub; see `parse_hub_model`. A path that exists
    takes precedence. Raises `ModelLoadError`.
    """
    found = model.plan if isinstance(model, PlannedModel) else plan(model, files)
    if isinstance(found, str):
        return found
    from penstock import _hub_download

    return _hub_download.download(found)


def plan(model: str, files: FileSet = MODEL_FILES) -> Plan | str:
    """The files of a model on the hub, and which of them `resolve` has to download; or a local path.

    The path is `model` itself, or that of a downloaded model if the hub does not answer. Raises
    `ModelLoadError`.
    """
    path = _local(model)
    if path is not None:
        return path
    from penstock import _hub_download

    return _hub_download.plan(*_named(model, files), files)


def cached(model: str, files: FileSet = MODEL_FILES) -> str | None:
    """The local directory or file of a model on the hub if it was downloaded; None if it was not."""
    from penstock import _hub_download

    return _hub_download.cached(*_named(model, files), files)


def _local(model: str) -> str | None:
    """The path of a model, if it exists."""
    path = os.path.expanduser(model)  # noqa: PTH111 - never raises
    return str(Path(path)) if model and os.path.exists(path) else None  # noqa: PTH110 - never raises


def _named(model: str, files: FileSet) -> tuple[str, HubModel]:
    """The name of a model in messages, and the model on the hub."""
    from penstock._hub_aliases import aliases, nearest_alias
    from penstock._hub_ids import parse_hub_model

    is_model = files.kind == "model"
    target = aliases().get(model) if is_model else None
    source = parse_hub_model(target or model)
    if source is not None:
        has_file = source.file is not None or source.quantization is not None
        is_path = Path(model).suffix in (".gguf", ".tar") and source.file is None
        if is_path or (has_file and not is_model):
            source = None
    if source is None:
        message = f"{model or repr(model)}: no such file or directory"
        alias = nearest_alias(model) if is_model and "/" not in model else None
        raise ModelLoadError(f"{message}, and no alias; did you mean {alias}?" if alias else message)
    return (model if target is None else f"{model} ({target})"), source
