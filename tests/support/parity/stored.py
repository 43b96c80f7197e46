"""Results of the oracle that are stored in `tests/data/oracle`, so that most runs of the tests need no torch.

pytest's option `--oracle` has three values. `stored` reads results and computes none. `live` computes them
and checks that they are those of the files. `write` computes them and writes the files: `make oracle`.

A result is found by a key, the hash of its kind and its inputs; checkpoints are part of the inputs by their
fingerprint. Each file of tests has a file of results, which records the versions of the libraries and the
hash of the modules that have computed it.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import importlib.metadata
import io
import json
import math
import tomllib
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from support.paths import DATA, ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

    #: Arrays and values of JSON.
    Result = dict[str, Any]

FOLDER = DATA / "oracle"
#: Of all files together.
MAX_BYTES = 5_000_000
#: The distributions whose versions are recorded.
LIBRARIES = ("torch", "transformers", "peft", "compressed-tensors")
#: The modules of this package that compute results.
MODULES = ("compressed.py", "oracle.py", "peft_adapters.py", "processors.py", "templates.py")
#: The largest difference between a stored and a live value, relative to the largest one of its kind.
SAME = 1e-5
#: Files of this size and more are not read as a whole for their fingerprint.
LARGE = 16 << 20
COMMAND = "run `make oracle` and commit tests/data/oracle"


class Mode(enum.Enum):
    """The source of a result of the oracle that a test needs."""

    STORED = "stored"
    LIVE = "live"
    WRITE = "write"


class Store:
    """The results of a run of the tests, in files of a folder."""

    def __init__(self, mode: Mode = Mode.STORED, folder: Path = FOLDER) -> None:
        self.mode = mode
        self.folder = folder
        self._name = ""
        self._files: dict[str, dict[str, Result]] = {}
        self._new: dict[str, dict[str, Result]] = {}
        self._failed: set[str] = set()

    def begin(self, name: str) -> None:
        """Use the results of the file of tests with this name."""
        self._name = name

    def fail(self, name: str) -> None:
        """Do not write the results of a file of tests: one of the tests has failed."""
        self._failed.add(name)

    def recall(self, kind: str, inputs: Any, compute: Callable[[], Result]) -> Result:
        """The result of a call of the oracle: stored or computed, as the mode says."""
        key = key_of(kind, inputs)
        if self.mode is Mode.WRITE:
            results = self._new.setdefault(self._name, {})
            if key not in results:
                results[key] = compute()
            return results[key]
        result = self.find(kind, inputs)
        if result is None:
            message = f"{self._name}.npz has no stored result of {kind!r} with these inputs: {COMMAND}\n"
            pytest.fail(f"{message}{brief(inputs)}", pytrace=False)
        if self.mode is Mode.LIVE:
            computed = compute()
            assert_same(kind, result, computed)
            return computed
        return result

    def find(self, kind: str, inputs: Any) -> Result | None:
        """The stored result, if there is one."""
        if self._name not in self._files:
            file = self.folder / f"{self._name}.npz"
            self._files[self._name] = read_file(file)[0] if file.exists() else {}
        return self._files[self._name].get(key_of(kind, inputs))

    def save(self) -> None:
        """Write the files of the tests that have passed."""
        for name, results in self._new.items():
            if name not in self._failed:
                self.folder.mkdir(parents=True, exist_ok=True)
                write_file(self.folder / f"{name}.npz", results, made_by())


#: Of this run; the plugin `modes` sets its mode.
STORE = Store()


def store() -> Store:
    """The store of this run."""
    return STORE


# ---- keys


def key_of(kind: str, inputs: Any) -> str:
    """The key of a result."""
    text = json.dumps([kind, inputs], sort_keys=True, default=plain)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def plain(value: Any) -> Any:
    """Values of numpy in JSON; arrays as a digest."""
    if isinstance(value, np.ndarray):
        return [value.dtype.str, value.shape, hashlib.sha256(value.tobytes()).hexdigest()]
    return value.item()


def brief(inputs: Any) -> str:
    """The beginning of the inputs."""
    text = json.dumps(inputs, default=plain)
    return text if len(text) < 300 else f"{text[:300]}..."


def fingerprint(path: Path) -> Any:
    """The inputs of results in a checkpoint: the configuration and the weights, not the tokenizer.

    The weights are generated, and another C library may round a few of them in another way. Therefore
    what is hashed is their names, types and shapes, and a weighted sum of all values with a few digits.
    """
    if path.suffix == ".gguf":
        if (size := path.stat().st_size) >= LARGE:
            return [size, sampled_digest(path, size)]
        import gguf

        reader = gguf.GGUFReader(path)
        skipped = ("GGUF.", "tokenizer.")
        fields = {name: field for name, field in reader.fields.items() if not name.startswith(skipped)}
        weights = {tensor.name: np.asarray(tensor.data) for tensor in reader.tensors}
        kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
        return [{name: field.contents() for name, field in fields.items()}, kinds, summary(weights)]
    texts = [path / name for name in ("config.json", "generation_config.json", "adapter_config.json")]
    files = sorted(path.glob("*.safetensors"))
    weights = {name: values for file in files for name, values in read_safetensors(file)}
    # The order of fields has a meaning for adapters.
    return [[list_of(json.loads(file.read_text())) for file in texts if file.exists()], summary(weights)]


def list_of(value: Any) -> Any:
    """Objects as lists of pairs, which keep their order in keys."""
    if isinstance(value, dict):
        return [[name, list_of(inner)] for name, inner in value.items()]
    return [list_of(inner) for inner in value] if isinstance(value, list) else value


def sampled_digest(path: Path, size: int) -> str:
    """The digest of 64 parts of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for index in range(64):
            file.seek(index * (size - 4096) // 63)
            digest.update(file.read(4096))
    return digest.hexdigest()


def summary(weights: dict[str, NDArray[Any]]) -> Any:
    """Names, types and shapes of tensors, and a weighted sum of their values."""
    total = 0.0
    for index, name in enumerate(sorted(weights)):
        values = weights[name].ravel()
        values = (values if values.dtype == np.float32 else values.view(np.uint8)).astype(np.float64)
        factors = ((np.arange(len(values), dtype=np.uint64) + index) * 2654435761 % 2**32) / 2**32 - 0.5
        total += float(values @ factors) / max(math.sqrt(float(values @ values)), 1e-30)
    shapes = {name: [values.dtype.str, values.shape] for name, values in weights.items()}
    return [shapes, round(total, 3) + 0.0]


#: The types of safetensors that numpy does not have are read as integers of their size.
TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "F8_E4M3": "u1"} | {
    f"{name}{8 * size}": f"<{name.lower()}{size}" for name in "IU" for size in (1, 2, 4, 8)
}


def header_of(file: Path) -> dict[str, Any]:
    """The type, shape and place of each tensor of a file."""
    with file.open("rb") as content:
        header: dict[str, Any] = json.loads(content.read(int.from_bytes(content.read(8), "little")))
    header.pop("__metadata__", None)
    return header


def read_safetensors(file: Path) -> Iterable[tuple[str, NDArray[Any]]]:
    """The tensors of a file."""
    content = file.read_bytes()
    data = content[8 + int.from_bytes(content[:8], "little") :]
    for name, entry in header_of(file).items():
        start, end = entry["data_offsets"]
        yield name, np.frombuffer(data[start:end], TYPES[entry["dtype"]]).reshape(entry["shape"])


# ---- files


def write_file(file: Path, results: dict[str, Result], source: dict[str, str]) -> None:
    """Write results as an archive of numpy: an index and the values of each type.

    The same results give the same bytes. Numbers of several bytes are stored as planes of their bytes, which
    compress better.
    """
    parts: dict[str, list[NDArray[Any]]] = {}
    ends: dict[str, int] = {}
    entries = {}
    for key, result in sorted(results.items()):
        entry: Result = {"arrays": {}, "values": {}}
        for name, value in result.items():
            if not isinstance(value, np.ndarray):
                entry["values"][name] = value
                continue
            dtype = value.dtype.str[1:]
            start = ends.get(dtype, 0)
            ends[dtype] = start + value.size
            parts.setdefault(dtype, []).append(value.ravel())
            entry["arrays"][name] = [dtype, value.shape, start]
        entries[key] = entry
    index = json.dumps({"made_by": source, "results": entries}, ensure_ascii=False, separators=(",", ":"))
    arrays = {"index": np.frombuffer(index.encode(), np.uint8)}
    for dtype, values in sorted(parts.items()):
        flat = np.concatenate(values)
        arrays[dtype] = flat.view(np.uint8).reshape(-1, flat.itemsize).T
    with zipfile.ZipFile(file, "w", zipfile.ZIP_LZMA) as archive:
        for name, array in arrays.items():
            buffer = io.BytesIO()
            np.lib.format.write_array(buffer, np.ascontiguousarray(array), version=(1, 0))
            member = zipfile.ZipInfo(f"{name}.npy")
            member.compress_type = zipfile.ZIP_LZMA
            archive.writestr(member, buffer.getvalue())


def read_file(file: Path) -> tuple[dict[str, Result], dict[str, str]]:
    """The results of a file, and what has made them."""
    with np.load(file) as archive:
        arrays = {name: archive[name] for name in archive.files}
    index = json.loads(arrays.pop("index").tobytes())
    flat = {dtype: np.ascontiguousarray(planes.T).view(dtype).ravel() for dtype, planes in arrays.items()}
    results = {}
    for key, entry in index["results"].items():
        results[key] = dict(entry["values"])
        for name, (dtype, shape, start) in entry["arrays"].items():
            results[key][name] = flat[dtype][start : start + math.prod(shape)].reshape(shape)
    return results, index["made_by"]


# ---- versions


def script_hash() -> str:
    """The hash of the modules that compute results."""
    folder = Path(__file__).parent
    contents = [name.encode() + b"\0" + (folder / name).read_bytes() for name in MODULES]
    return hashlib.sha256(b"\0".join(contents)).hexdigest()


@functools.cache
def made_by() -> dict[str, str]:
    """The installed versions of the libraries without local parts, and the hash of the modules."""
    versions = {name: importlib.metadata.version(name).partition("+")[0] for name in LIBRARIES}
    return {**versions, "script": script_hash()}


def pinned() -> dict[str, str]:
    """The versions that pyproject.toml requires, and the hash of the modules."""
    content = tomllib.loads((ROOT / "pyproject.toml").read_text())
    pins = dict(line.split("==") for line in content["dependency-groups"]["oracle"] if "==" in line)
    return {**{name: pins[name] for name in LIBRARIES}, "script": script_hash()}


def stale(file: Path, expected: dict[str, str]) -> list[str]:
    """Messages about what differs between the origin of a file of results and what is expected."""
    found = read_file(file)[1]
    return [
        f"{file.name}: {name} is {found.get(name)}, expected {expected.get(name)}: {COMMAND}"
        for name in sorted({*found, *expected})
        if found.get(name) != expected.get(name)
    ]


# ---- comparison


def exact(value: Any) -> Any:
    """A value in a form that is equal for equal values: tuples are lists, as in files."""
    if isinstance(value, np.ndarray):
        return [value.dtype.str, value.shape, value.tobytes()]
    return json.loads(json.dumps(value))


def assert_same(kind: str, stored: Result, live: Result) -> None:
    """Check that a live result is the stored one.

    Floating-point numbers may differ by `SAME` relative to the largest one, or to the field `peak`.
    """
    assert stored.keys() == live.keys(), kind
    for name, value in live.items():
        message = f"{kind}: the stored {name} differs from the live one: {COMMAND}"
        if not (isinstance(value, float) or (isinstance(value, np.ndarray) and value.dtype.kind == "f")):
            assert exact(stored[name]) == exact(value), message
            continue
        old, new = (np.asarray(each, np.float64) for each in (stored[name], value))
        assert old.shape == new.shape, message
        if new.size:
            limit = SAME * max(float(np.abs(new).max()), live.get("peak", 0.0))
            assert np.abs(old - new).max() <= limit, message
