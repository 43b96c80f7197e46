"""Folders of adapters that are damaged, hostile or of another format are refused with the file."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

import penstock
from support.api.adapters import PREFIX, write_adapter
from support.api.checkpoints import make_config

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from support.api.adapter_engine import AdapterEngine

CONFIG = make_config("llama")
WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
A, B = (f"{PREFIX}model.layers.1.mlp.up_proj.lora_{part}.weight" for part in "AB")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A valid adapter."""
    return write_adapter(tmp_path / "adapter", CONFIG)


def header_of(tensors: dict[str, Any]) -> bytes:
    return with_length(json.dumps(tensors).encode())


def with_length(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header


def entry(start: int, end: int, *shape: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


DUPLICATE = json.dumps(entry(0, 4096, 8, 128))
#: Whole files, and words of the error.
FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "header length: needs 8 bytes; the file has 0"),
    "seven bytes": (b"\0" * 7, "header length: needs 8 bytes; the file has 7"),
    "header beyond the file": ((1000).to_bytes(8, "little") + b"{}", "1000 bytes; the file has 2"),
    "header of 2**63 bytes": ((1 << 63).to_bytes(8, "little") + b"{}", "the limit is 100000000"),
    "header of no JSON": (with_length(b"\x80\x02]q"), "header"),
    "header that is a list": (with_length(b"[]"), "header"),
    "deep header": (with_length(b'{"a":' + b"[" * 200_000), "header"),
    "no tensors": (header_of({}), "tensors: there are none"),
    "metadata alone": (header_of({"__metadata__": {"format": "pt"}}), "tensors: there are none"),
    "tensor twice": (
        with_length(f'{{"{A}": {DUPLICATE}, "{A}": {DUPLICATE}}}'.encode()) + bytes(4096),
        A,
    ),
    "overlapping tensors": (
        header_of({A: entry(0, 4096, 8, 128), B: entry(2048, 8192, 192, 8)}) + bytes(8192),
        f"tensor {B}: starts at byte 2048 of the data; the previous tensors end at 4096",
    ),
    "gap between tensors": (
        header_of({A: entry(0, 4096, 8, 128), B: entry(4100, 10244, 192, 8)}) + bytes(10244),
        f"tensor {B}: starts at byte 4100",
    ),
    "truncated data": (
        header_of({A: entry(0, 4096, 8, 128), B: entry(4096, 10240, 192, 8)}) + bytes(9000),
        f"tensor {B}: data_offsets 4096..10240; the data has 9000 bytes",
    ),
    "bytes after the data": (
        header_of({A: entry(0, 4096, 8, 128), B: entry(4096, 10240, 192, 8)}) + bytes(10241),
        "data: 10241 bytes; the tensors cover 10240",
    ),
    "range beyond the file": (header_of({A: entry(0, 1 << 62, 8, 128)}), f"tensor {A}: data_offsets"),
    "reversed range": (header_of({A: entry(4096, 0, 8, 128)}) + bytes(4096), "data_offsets 4096..0"),
    "shape of 2**126 elements": (
        header_of({A: entry(0, 8, 1 << 63, 1 << 63)}) + bytes(8),
        f"tensor {A}: shape",
    ),
    "shape with another size": (
        header_of({A: entry(0, 4096, 8, 127)}) + bytes(4096),
        "shape [8, 127] of F32 needs 4064 bytes; data_offsets specify 4096",
    ),
    "unknown dtype": (header_of({A: entry(0, 4096, 8, 128, dtype="F7")}) + bytes(4096), "unknown dtype F7"),
    "negative offset": (header_of({A: entry(-4096, 0, 8, 128)}), "header"),
    "name of a megabyte": (header_of({"a" * (1 << 20): entry(0, 4, 1)}) + bytes(4), "the limit is 1024"),
    "name with control characters": (header_of({"\x1b[31m\n": entry(0, 4, 1)}) + bytes(4), "is neither"),
    "pickle": (b"\x80\x02}q\x00." + bytes(100), "header length"),
}


@pytest.mark.parametrize("case", FILES)
def test_damaged_file_is_refused(case: str, adapter_engine: AdapterEngine, folder: Path) -> None:
    contents, words = FILES[case]
    (folder / WEIGHTS).write_bytes(contents)
    message = adapter_engine.refusal(folder)
    assert words in message
    assert str(folder / WEIGHTS) in message


class Bomb:
    """Leaves a file behind if it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def bomb(tmp_path: Path) -> Iterator[bytes]:
    """A pickle; it is not executed in the test."""
    mark = tmp_path / "executed"
    content = pickle.dumps(Bomb(mark))
    yield content
    assert not mark.exists()
    pickle.loads(content)  # noqa: S301 - the bomb works
    assert mark.exists()


def test_pickled_weights_alone_are_refused(adapter_engine: AdapterEngine, folder: Path, bomb: bytes) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "adapter_model.bin").write_bytes(bomb)
    message = adapter_engine.refusal(folder)
    assert f"{folder}: contains no {WEIGHTS}, only adapter_model.bin: pickled weights can" in message


def test_pickled_weights_beside_safetensors_are_ignored(
    adapter_engine: AdapterEngine, folder: Path, bomb: bytes
) -> None:
    (folder / "adapter_model.bin").write_bytes(bomb)
    adapter_engine.load("adapter", folder)
    assert adapter_engine.run("adapter") != adapter_engine.base
    adapter_engine.unload("adapter")


def test_pickle_with_the_name_of_safetensors_is_refused(
    adapter_engine: AdapterEngine, folder: Path, bomb: bytes
) -> None:
    (folder / WEIGHTS).write_bytes(bomb)
    assert f"{folder / WEIGHTS}: header length" in adapter_engine.refusal(folder)


@pytest.mark.parametrize("index", ["model.safetensors.index.json", "adapter_model.safetensors.index.json"])
def test_sharded_adapter_is_refused(index: str, adapter_engine: AdapterEngine, folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "adapter_model-00001-of-00002.safetensors")
    (folder / index).write_text("{}")
    assert "adapters in several files are not supported" in adapter_engine.refusal(folder)


def without(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def replaced(name: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    def replace(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return replace


def linked(target: str) -> Callable[[Path], object]:
    return lambda path: path.symlink_to(target)


def piped(path: Path) -> None:
    os.mkfifo(path)


def looped(path: Path) -> None:
    path.symlink_to(path)


#: Changes of a valid folder, and words of the error.
FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "adapter"),
    "empty folder": (lambda folder: (without(WEIGHTS)(folder), without(SETTINGS)(folder)), SETTINGS),
    "no weights": (without(WEIGHTS), f"contains no {WEIGHTS}"),
    "no configuration": (without(SETTINGS), f"contains no {SETTINGS}"),
    "weights that are a folder": (replaced(WEIGHTS, os.mkdir), WEIGHTS),
    "configuration that is a folder": (replaced(SETTINGS, os.mkdir), SETTINGS),
    "weights in a loop of links": (replaced(WEIGHTS, looped), WEIGHTS),
    "configuration in a loop of links": (replaced(SETTINGS, looped), SETTINGS),
    "link of the weights without a target": (replaced(WEIGHTS, linked("absent")), WEIGHTS),
    "weights that are a named pipe": (replaced(WEIGHTS, piped), WEIGHTS),
    "configuration that is a named pipe": (replaced(SETTINGS, piped), SETTINGS),
    "weights that are a device": (replaced(WEIGHTS, linked("/dev/zero")), WEIGHTS),
    "configuration that is a device": (
        replaced(SETTINGS, lambda path: path.symlink_to("/dev/zero")),
        SETTINGS,
    ),
    "configuration without an end": (
        replaced(SETTINGS, lambda path: path.symlink_to("/proc/self/mem")),
        SETTINGS,
    ),
    "sparse weights of a terabyte": (lambda folder: os.truncate(folder / WEIGHTS, 1 << 40), WEIGHTS),
    "sparse configuration of a terabyte": (lambda folder: os.truncate(folder / SETTINGS, 1 << 40), SETTINGS),
}
#: The needs of these changes, by words of their names.
NEEDED = {
    "link": pytest.mark.needs("symlinks"),
    "named pipe": pytest.mark.needs("named_pipes"),
    "device": pytest.mark.needs("devices", "symlinks"),
    "without an end": pytest.mark.needs("proc", "symlinks"),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[mark for words, mark in NEEDED.items() if words in case]) for case in FOLDERS],
)
def test_folder_is_refused(case: str, adapter_engine: AdapterEngine, folder: Path) -> None:
    change, words = FOLDERS[case]
    change(folder)
    message = adapter_engine.refusal(folder)
    assert words in message
    assert str(folder) in message


@pytest.mark.needs("permissions", "refusals")
@pytest.mark.parametrize("name", [WEIGHTS, SETTINGS])
def test_unreadable_file_is_refused(name: str, adapter_engine: AdapterEngine, folder: Path) -> None:
    (folder / name).chmod(0)
    assert "ermission denied" in adapter_engine.refusal(folder)


def test_file_in_place_of_a_folder_is_refused(adapter_engine: AdapterEngine, folder: Path) -> None:
    assert WEIGHTS in adapter_engine.refusal(folder / WEIGHTS)


@pytest.mark.needs("symlinks")
def test_loop_of_links_is_refused(adapter_engine: AdapterEngine, tmp_path: Path) -> None:
    looped(tmp_path / "loop")
    assert str(tmp_path / "loop") in adapter_engine.refusal(tmp_path / "loop")


@pytest.mark.parametrize("path", ["", "\0", "a\0b", "x" * 5000, "../" * 2000, "a/b/c", "-", "https://host/a"])
def test_path_that_is_no_folder_is_an_error(path: str, adapter_engine: AdapterEngine) -> None:
    with pytest.raises(penstock.AdapterLoadError):
        adapter_engine.load("damaged", path)
    adapter_engine.check_unchanged()


def test_file_that_shrinks_later_does_not_matter(adapter_engine: AdapterEngine, folder: Path) -> None:
    """The weights are copied while the adapter is loaded."""
    adapter_engine.load("adapter", folder)
    expected = adapter_engine.run("adapter")
    os.truncate(folder / WEIGHTS, 0)
    shutil.rmtree(folder)
    assert adapter_engine.run("adapter") == expected
    adapter_engine.unload("adapter")


def damage(content: bytes, chance: random.Random) -> bytes:
    """The content with some bytes replaced, inserted, removed or repeated."""
    changed = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 5))):
        end = min(len(changed), chance.choice((16, 300, 3000, len(changed))))
        start = chance.randrange(max(end, 1))
        length = chance.choice((0, 1, 1, 4, 30))
        new = chance.choice(
            (
                bytes(chance.randrange(256) for _ in range(chance.choice((0, 1, 4)))),
                chance.choice(
                    (b"0", b"9", b"-1", b"1e9", b"null", b"true", b'"', b"[]", b"{}", b",", b"\\", b"(")
                ),
                bytes(changed[start : start + length]) * 2,
            )
        )
        changed[start : start + length] = new
    return bytes(changed)


def test_random_damage_is_refused_or_has_no_effect_on_others(
    adapter_engine: AdapterEngine, folder: Path
) -> None:
    chance = random.Random(5)
    small = write_adapter(folder, CONFIG, rank=1, modules=("q_proj", "up_proj"))
    contents = {name: (small / name).read_bytes() for name in (SETTINGS, WEIGHTS)}
    num_loaded = 0
    for _ in range(200):
        for name, content in contents.items():
            (folder / name).write_bytes(content)
        name = chance.choice((SETTINGS, WEIGHTS))
        (folder / name).write_bytes(damage(contents[name], chance))
        try:
            adapter_engine.load("damaged", folder)
        except penstock.AdapterLoadError:
            continue
        num_loaded += 1
        with suppress(penstock.GenerationError):  # its outputs are not finite
            adapter_engine.run("damaged")
        adapter_engine.unload("damaged")
    assert 5 < num_loaded < 195
    adapter_engine.check_unchanged()
