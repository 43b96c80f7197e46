"""The files of a serialised model: `<name>.asgraph` describes `<name>.asparam`, a converted model.

The `.asgraph` is JSON with the size of the `.asparam`. It is deleted before the `.asparam` is replaced, and
placed last: if it exists and the sizes agree, both are complete.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import penstock
from penstock._json import loads
from penstock._system import lock_file
from penstock.compat.dashinfer.allspark.enums import AsStatus
from penstock.compat.dashinfer.allspark.errors import AsError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["AsFileInfo", "get_file_information"]

GRAPH, WEIGHTS = ".asgraph", ".asparam"
#: The ending of an adapter's directory.
ADAPTER = ".aslora"
#: DashInfer's quick start names the first file so.
OTHER_GRAPH = ".asmodel"
_FORMAT = "penstock serialised model"
DATA_TYPES = ("float32", "float16", "bfloat16")
#: The files of a model's directory that a conversion reads besides the weights.
_TEXT_FILES = ("*.json", "*.jinja", "additional_chat_templates/*.jinja", "model.penstock")
_LIMIT = 1 << 20


@dataclass(frozen=True)
class AsFileInfo:
    """The versions of Penstock that wrote the files of a serialised model, and the version in use."""

    create_version_graph: str
    create_version_param: str
    current_version_engine: str


@dataclass(frozen=True)
class Conversion:
    """The settings that determine the files of a serialised model."""

    source: str
    """The absolute path of the model."""
    source_files: dict[str, list[int]] = field(default_factory=dict)
    """The identity of each file of the model with its contents, as in `_identity`."""
    data_type: str = "auto"
    quantization: Any = "auto"
    config_overrides: dict[str, Any] = field(default_factory=dict)
    lora: bool = False
    """Whether adapters can be loaded."""


@dataclass(frozen=True)
class ModelGraph:
    """The content of an `.asgraph` file."""

    penstock: str
    """The version that wrote it."""
    model_type: str
    """The Hugging Face architecture."""
    weights: str
    """The name of the `.asparam` file."""
    weights_bytes: int
    conversion: Conversion

    @classmethod
    def read(cls, path: Path) -> Self:
        """The content of a file. Raises `AsError` with `ALLSPARK_IO_ERROR`."""
        try:
            with path.open("rb") as file:
                text = file.read(_LIMIT + 1)
            content = loads(text) if len(text) <= _LIMIT else None
        except (OSError, ValueError) as error:
            raise _io_error(f"{path}: {error}") from error
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise _io_error(f"{path}: not a model that Penstock has serialised; serialise it again")
        try:
            values = {name: content[name] for name in ("penstock", "model_type", "weights", "weights_bytes")}
            conversion = content["conversion"]
            graph = cls(conversion=Conversion(**conversion), **values)
        except (KeyError, TypeError) as error:
            raise _io_error(f"{path}: invalid field: {error}") from error
        texts = (graph.penstock, graph.model_type, graph.weights, graph.conversion.data_type)
        if not all(isinstance(value, str) for value in texts) or type(graph.weights_bytes) is not int:
            raise _io_error(f"{path}: a field has the wrong type")
        if not isinstance(graph.conversion.config_overrides, dict):
            raise _io_error(f"{path}: config_overrides is not an object")
        return graph

    def write(self, path: Path) -> None:
        """Write a file."""
        with path.open("w", encoding="utf-8") as file:
            json.dump({"format": _FORMAT, **asdict(self)}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())


@dataclass(frozen=True)
class ModelFiles:
    """The paths of the two files."""

    graph: Path
    weights: Path

    @classmethod
    def named(cls, directory: str | os.PathLike[str], name: str) -> Self:
        """The files of the model `name` in a directory. Slashes in the name become underscores."""
        safe = name.replace("/", "_") if isinstance(name, str) else ""
        if not safe or "\0" in safe:
            message = f"the name of a model is {name!r}; it must be the first part of a file name"
            raise ValueError(message)
        base = Path(directory)
        return cls(base / f"{safe}{GRAPH}", base / f"{safe}{WEIGHTS}")

    def read(self) -> ModelGraph:
        """The content of the `.asgraph`, or of an `.asmodel` in its place. Raises `AsError`.

        Also checks that the `.asparam` exists and has the size that was written.
        """
        graph_path = self.graph
        if not graph_path.exists() and graph_path.suffix in (GRAPH, OTHER_GRAPH):
            other = graph_path.with_suffix(OTHER_GRAPH if graph_path.suffix == GRAPH else GRAPH)
            graph_path = other if other.exists() else graph_path
        graph = ModelGraph.read(graph_path)
        try:
            size = self.weights.stat().st_size
        except (OSError, ValueError) as error:
            raise _io_error(f"{self.weights}: {error}") from error
        if size != graph.weights_bytes:
            raise _io_error(f"{self.weights}: {size} bytes; {graph_path.name} requires {graph.weights_bytes}")
        return graph

    def are_complete(self, conversion: Conversion) -> bool:
        """Whether both files are complete, of this version and of this conversion."""
        try:
            graph = self.read()
        except AsError:
            return False
        return graph.penstock == penstock.__version__ and graph.conversion == conversion

    def write(self, model: str, conversion: Conversion) -> None:
        """Convert `model` to these files.

        Existing files are replaced. A failure or a crash leaves the former files, or no `.asgraph`. Both
        files are those of one writer, also if there are several. Raises `PenstockError` and `OSError`.
        """
        with temporary_directory(self.weights) as for_weights, temporary_directory(self.graph) as for_graph:
            archive = penstock.convert(
                model,
                for_weights / "model.tar",
                quantization=conversion.quantization,
                dtype=cast("Any", conversion.data_type),  # checked by `convert`
            )
            architectures = penstock.describe(archive)["config"].get("architectures") or [""]
            graph = ModelGraph(
                penstock.__version__,
                str(architectures[0]),
                self.weights.name,
                archive.stat().st_size,
                conversion,
            )
            graph.write(for_graph / "graph.json")
            with locked(self.weights.parent):
                self.graph.unlink(missing_ok=True)
                archive.replace(self.weights)
                (for_graph / "graph.json").replace(self.graph)


def source_files(metadata: dict[str, Any]) -> dict[str, list[int]]:
    """The files that a conversion of a model reads, as in `Conversion`. Raises `OSError`."""
    path = Path(metadata["path"])
    files: Iterable[Path] = (Path(file) for file in metadata["files"])
    if path.is_dir():
        files = {*files, *(file for pattern in _TEXT_FILES for file in path.glob(pattern))}
    return {os.path.relpath(file, path): _identity(file) for file in files}


def _identity(file: Path) -> list[int]:
    """The identity of a file with certain contents.

    A program can set the time of modification, but not that of the last change of the file's state, and
    another file that takes the place of this one has another number.
    """
    status = file.stat()
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


@contextmanager
def temporary_directory(path: Path) -> Iterator[Path]:
    """A temporary directory beside `path`, so on its file system. Creates the directory of `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as directory:
        yield Path(directory)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Exclude other threads and processes that lock the directory. Windows opens no directories."""
    if not hasattr(os, "O_DIRECTORY"):
        yield
        return
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # some network file systems have no locks of directories
            lock_file(descriptor, wait=True)
        yield
    finally:
        os.close(descriptor)


class TemporaryFiles:
    """A directory of temporary files, which `remove` and the end of this process delete."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="penstock-"))
        self._process = os.getpid()
        atexit.register(self.remove)

    def remove_model(self) -> None:
        """Delete all but the adapters: they can be loaded once the model is installed."""
        if not any(self.directory.glob(f"*{ADAPTER}")):
            self.remove()
        elif os.getpid() == self._process:
            for path in (*self.directory.glob(f"*{GRAPH}"), *self.directory.glob(f"*{WEIGHTS}")):
                path.unlink()

    def remove(self) -> None:
        """Delete the directory. Can be called repeatedly; has no effect in a forked process."""
        atexit.unregister(self.remove)
        if os.getpid() == self._process:
            shutil.rmtree(self.directory, ignore_errors=True)


def get_file_information(
    model_path: str | os.PathLike[str], param_path: str | os.PathLike[str]
) -> AsFileInfo:
    """The versions in the files of a serialised model. Raises `AsError` with `ALLSPARK_IO_ERROR`."""
    files = ModelFiles(Path(model_path), Path(param_path))
    graph = files.read()
    try:
        writer = penstock.describe(files.weights)["writer_version"]
    except penstock.ModelLoadError as error:
        raise _io_error(str(error)) from error
    return AsFileInfo(graph.penstock, writer or "", penstock.__version__)


def _io_error(reason: str) -> AsError:
    return AsError(AsStatus.ALLSPARK_IO_ERROR, reason)
