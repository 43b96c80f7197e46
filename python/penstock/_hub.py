"""Finds the files of a model: a local path, or an id on the Hugging Face hub, which is downloaded."""

from __future__ import annotations

import concurrent.futures.thread
import os
import threading
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, overload

from penstock._core import Port
from penstock._hub_ids import parse_hub_id
from penstock._hub_messages import message_of
from penstock._install import missing_extra
from penstock.errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import MutableMapping


class FileSet(NamedTuple):
    """Files that are downloaded from a repository of the hub."""

    patterns: tuple[str, ...]
    required: tuple[str, ...]
    """A repository must have one of these."""
    hint: str
    """The end of the error for a repository without them."""
    kind: str = "model"


_MODEL_HINT = "no config.json; to use a GGUF file, download it with hf download and open its path"

#: The files of a tokenizer and of chat templates, also those in a converted model.
TOKENIZER_FILES = FileSet(
    patterns=(
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "additional_chat_templates/*.jinja",
        "model.penstock",
    ),
    required=("config.json", "model.penstock", "tokenizer.json"),
    hint=_MODEL_HINT,
)
#: The files of a model; weights in other formats or precisions are not downloaded.
MODEL_FILES = FileSet(
    patterns=(
        *TOKENIZER_FILES.patterns,
        "quantize_config.json",
        "modules.json",
        "*_Pooling/config.json",
        "model.safetensors",
        "model-*-of-*.safetensors",
        "model.safetensors.index.json",
        "weights.safetensors",
    ),
    required=("config.json", "model.penstock"),
    hint=_MODEL_HINT,
)

#: The files of a LoRA adapter; an index of weights in several files, which are refused.
ADAPTER_FILES = FileSet(
    patterns=(
        "adapter_config.json",
        "adapter_model.safetensors",
        "adapter_model.safetensors.index.json",
        "model.safetensors.index.json",
    ),
    required=("adapter_config.json",),
    hint="no adapter_config.json; it is not a LoRA adapter in PEFT's layout",
    kind="adapter",
)


def model_argument(model: str | os.PathLike[str] | bytes | bytearray | memoryview) -> str | bytes:
    """The argument of a constructor: a path or a hub id, or the contents of a converted model."""
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
        """What `resolve` returned or raised, once the port was rung; bytes are their own files."""
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome

    def abandon(self) -> None:
        """Let the process end while the download runs."""
        # Called before the threads of pools are joined; until then the library can start more of them.
        with suppress(AttributeError, RuntimeError):  # not in this version of Python, or the exit has begun
            threading._register_atexit(self._forget_threads)  # type: ignore[attr-defined]  # noqa: SLF001

    def _forget_threads(self) -> None:
        pools: Any = concurrent.futures.thread
        # A pool holds the lock while it starts and registers a thread. After `_shutdown` it starts none.
        with getattr(pools, "_global_shutdown_lock", nullcontext()):
            pools._shutdown = True  # noqa: SLF001 - as the standard library does next
            threads = _pool_threads()
            for thread in set(threads) - self._other_threads:
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
    """The local directory or file of `model`. Raises `ModelLoadError`.

    Of a model on the hub, `files` are downloaded if necessary. A hub id can name a revision:
    `owner/name@revision`.
    """
    path = Path(os.path.expanduser(model))  # noqa: PTH111 - never raises
    if model and os.path.exists(path):  # noqa: PTH110 - never raises
        return str(path)
    hub_id = parse_hub_id(model)
    if hub_id is None or path.suffix in (".gguf", ".tar"):
        message = f"{model or repr(model)}: no such file or directory"
        raise ModelLoadError(message)
    return _fetch(hub_id.name, hub_id.revision, files)


def _fetch(hub_id: str, revision: str | None, files: FileSet) -> str:
    try:
        import huggingface_hub
    except ImportError:
        needs = missing_extra("downloading it from the Hugging Face hub", "huggingface_hub", "hub")
        message = f"{hub_id}: no such directory; {needs}"
        raise ModelLoadError(message) from None
    name = hub_id if revision is None else f"{hub_id}@{revision}"
    try:
        folder = huggingface_hub.snapshot_download(
            hub_id, revision=revision, allow_patterns=list(files.patterns)
        )
    except Exception as error:  # includes errors of its HTTP library, which depends on its version
        command = f"hf download {hub_id}" + (f" --revision {revision}" if revision else "")
        raise ModelLoadError(message_of(error, name, command, files.kind)) from error
    if not any((Path(folder) / name).exists() for name in files.required):
        message = f"{name}: {files.hint}"
        raise ModelLoadError(message)
    return folder
