"""Hostile names, paths and folders of LoRA adapters: status 400 or 404, and the server continues."""

from __future__ import annotations

import json
import os
import shutil
import struct
import threading
from typing import TYPE_CHECKING, Any

import pytest

from support.api.adapters import write_adapter
from support.server.lora_server import (
    ADMIN,
    CONFIG,
    LOAD,
    UNLOAD,
    LoraServer,
    cleared,
    error_of,
    lora_server,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

COMPLETION = {"prompt": [1, 2, 3], "max_tokens": 2}


@pytest.fixture
def server(module_lora_server: LoraServer) -> Iterator[LoraServer]:
    """The server, which answers after each test."""
    with cleared(module_lora_server):
        yield module_lora_server


NAMES: list[Any] = [
    *("", "a,b", "a\nb", "a\0b", "\x7f", "x" * 257, "base", "\x1b[31m", "a\r\nSet-Cookie: b=c"),
    *(None, 1, True, [], {}, ["one"]),
]


@pytest.mark.parametrize("name", NAMES, ids=repr)
def test_bad_name_is_status_400(server: LoraServer, name: object) -> None:
    answer = server.ask(LOAD, {"lora_name": name, "lora_path": "one"}, headers=ADMIN)
    assert error_of(answer)[0] == 400
    assert answer[1]["error"]["param"] == "lora_name"
    assert server.ask(UNLOAD, {"lora_name": name}, headers=ADMIN)[0] in (400, 404)
    assert server.names() == ["base"]


@pytest.mark.parametrize("name", ["../one", "a b", "org/name:v1", "ß", "{}", "x" * 256, "/etc", "--help"])
def test_unusual_name_is_only_a_name(server: LoraServer, name: str) -> None:
    assert server.load(name, "one")[0] == 200
    assert server.names() == ["base", name]
    assert server.ask("/v1/completions", {"model": name, **COMPLETION})[1]["model"] == name
    assert server.ask("/metrics")[0] == 200


def hostile_paths(root: Path) -> dict[str, str]:
    """Paths that lead out of the root, or to no adapter, by their kind."""
    outside = root.parent / "outside"
    (root / "loop").symlink_to(root / "loop")
    (root / "link").symlink_to(outside)
    (root / "up").symlink_to("..")
    (root / "file").write_text("{}")
    inner = root / "linked-files"
    inner.mkdir()
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        (inner / file).symlink_to(outside / file)
    half = root / "linked-weights"
    shutil.copytree(root / "one", half)
    (half / "adapter_model.safetensors").unlink()
    (half / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    return {
        "outside": str(outside),
        "dots": "../outside",
        "dots inside": f"{root}/one/../../outside",
        "dots below nothing": f"{root}/nothing/../../outside",
        "many dots": "../" * 60 + "etc",
        "link": "link",
        "link absolute": str(root / "link"),
        "link upwards": "up/outside",
        "link of files": "linked-files",
        "link of weights": "linked-weights",
        "loop": "loop",
        "loop below": "loop/one",
        "sibling with the same beginning": f"{root}-other",
        "system": "/etc",
        "root of the system": "/",
        "process": "/proc/self/cwd",
        "file": str(outside / "adapter_config.json"),
        "device": "/dev/zero",
        "nul": f"{root}/one\0",
        "nul before dots": "one\0/../../outside",
        "long": "x" * 4096,
        "long part": f"{root}/" + "y" * 300,
        "too long": "x" * 4097,
        "home": "~/one",
        "url": "file:///etc/passwd",
        "hub id": "org/name",
        "hub id with a revision": "org/name@main",
        "empty": "",
    }


#: Kinds of paths that lead to nothing inside of the root.
MISSING = {"long part", "loop", "loop below", "home", "long", "url"}


@pytest.mark.needs("devices", "proc", "symlinks")
def test_hostile_path_is_refused_and_nothing_is_read(server: LoraServer) -> None:
    """No answer tells whether a path outside of the root exists."""
    paths = hostile_paths(server.root)
    assert len(paths) > 20
    for kind, path in paths.items():
        answer = server.load("n", path)
        status, message = error_of(answer)
        assert status == 400 or (kind in MISSING and status == 404), (kind, message)
        assert answer[1]["error"]["param"] == "lora_path", kind
    exists, missing = (error_of(server.load("n", path)) for path in ("/usr/bin", "/no/such/folder"))
    assert exists == missing
    values: list[Any] = [None, 1, [], {"a": 1}, "\ud800"]
    for value in values:
        body = json.dumps({"lora_name": "n", "lora_path": value}).encode()
        assert server.ask(LOAD, body, headers=ADMIN)[0] == 400
    assert server.names() == ["base"]
    assert server.engine.adapters == {}


def test_path_without_an_adapter_is_status_404(server: LoraServer) -> None:
    (server.root / "empty").mkdir()
    for path in ("nothing", "empty", str(server.root / "nothing"), str(server.root), "."):
        status, message = error_of(server.load("n", path))
        assert (status, message.partition(" for ")[0]) == (404, "Loading lora n failed: No adapter found")


@pytest.mark.needs("symlinks")
@pytest.mark.parametrize("form", ["absolute", "relative", "dots", "link", "slash"])
def test_paths_below_a_root_are_loaded(server: LoraServer, form: str) -> None:
    root = server.root
    if form == "link":
        (root / "alias").symlink_to("one")
    path = {
        "absolute": str(root / "one"),
        "relative": "one",
        "dots": f"{root}/two/../one",
        "link": "alias",
        "slash": "one/",
    }[form]
    assert server.load("n", path)[0] == 200
    assert server.ask("/v1/models/n")[1]["root"] == path
    assert server.load("n", str(root / "one"))[0] == 200


def test_without_a_root_no_path_is_loaded(tmp_path: Path) -> None:
    with lora_server(tmp_path, settings={"lora_roots": ()}) as server:
        for path in (str(server.root / "one"), "one", ".", "/"):
            assert server.load("n", path)[0] == 400


def header(fields: object, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file; `length` is another length of the header than it has."""
    text = json.dumps(fields).encode() if not isinstance(fields, bytes) else fields
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(begin: int, end: int, *shape: int, dtype: str = "F32") -> dict[str, Any]:
    """An entry of the header of a safetensors file."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
B = A.replace("lora_A", "lora_B")
WEIGHTS: dict[str, bytes] = {
    "empty": b"",
    "short": b"\x01\x02",
    "huge header": struct.pack("<Q", 2**63),
    "header beyond the end": header({}, length=1 << 20),
    "no json": header(b"\xff" * 64),
    "deep json": header(b'{"a":' * 50_000 + b"1" + b"}" * 50_000),
    "list": header([]),
    "no tensors": header({}),
    "overlapping": header({A: tensor(0, 4, 1), B: tensor(0, 4, 1)}, bytes(4)),
    "beyond the end": header({A: tensor(0, 1 << 40, 1 << 38)}, bytes(4)),
    "negative": header({A: tensor(-4, 0, 1)}, bytes(4)),
    "overflowing shape": header({A: tensor(0, 4, 2**32, 2**32, 2**32)}, bytes(4)),
    "a without b": header({A: tensor(0, 512, 1, 128)}, bytes(512)),
    "unknown tensor": header({"x": tensor(0, 4, 1)}, bytes(4)),
    "same name twice": header(
        b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        bytes(4),
    ),
}
CONFIGS: dict[str, bytes] = {
    "empty": b"",
    "list": b"[]",
    "truncated": b'{"r": 8',
    "deep": b'{"r":' * 100_000,
    "large": b'{"a": "' + b"x" * (32 << 20) + b'"}',
    "not utf-8": b'{"r": "\xff"}',
    "rank 0": b'{"r": 0}',
    "negative rank": b'{"r": -1}',
    "huge rank": b'{"r": 1000000000000}',
    "infinite alpha": b'{"r": 8, "lora_alpha": 1e999}',
    "nan": b'{"r": 8, "lora_alpha": NaN}',
    "another method": b'{"peft_type": "LOHA"}',
    "dora": b'{"r": 8, "use_dora": true}',
    "large pattern": b'{"r": 8, "rank_pattern": {"a{1000}{1000}": 4}}',
}


def copy_of_one(server: LoraServer, name: str) -> Path:
    """A new folder with the files of the adapter "one"."""
    return shutil.copytree(server.root / "one", server.root / name, dirs_exist_ok=True)


@pytest.mark.parametrize("kind", WEIGHTS)
def test_hostile_weights_are_status_400(server: LoraServer, kind: str) -> None:
    folder = copy_of_one(server, "hostile weights")  # a space ends the paths that are removed from messages
    (folder / "adapter_model.safetensors").write_bytes(WEIGHTS[kind])
    status, message = error_of(server.load("n", folder))
    assert (status, server.names()) == (400, ["base"])
    assert message.startswith('adapter "n" cannot be loaded: ')
    assert "weights/" not in message


@pytest.mark.parametrize("kind", CONFIGS)
def test_hostile_configuration_is_status_400(server: LoraServer, kind: str) -> None:
    folder = copy_of_one(server, "hostile-configuration")
    (folder / "adapter_config.json").write_bytes(CONFIGS[kind])
    status, message = error_of(server.load("n", folder))
    assert (status, server.names()) == (400, ["base"])
    assert message.startswith("adapter ")


@pytest.mark.needs("devices", "named_pipes", "symlinks")
def test_folder_of_other_files_is_status_400(server: LoraServer) -> None:
    """Neither a pickle nor a named pipe nor a folder is read."""
    weights = "adapter_model.safetensors"

    def pickled(folder: Path) -> None:
        (folder / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'touch executed'\ntR.")

    makers: dict[str, Callable[[Path], object]] = {
        "pickle": pickled,
        "pipe": lambda folder: os.mkfifo(folder / weights),
        "folder": lambda folder: (folder / weights).mkdir(),
        "device": lambda folder: (folder / weights).symlink_to("/dev/zero"),
        "nothing": lambda _folder: None,
        "shards": lambda folder: (folder / "adapter_model.safetensors.index.json").write_text("{}"),
    }
    for kind, make in makers.items():
        folder = copy_of_one(server, f"other-{kind}")
        (folder / weights).unlink()
        make(folder)
        status, message = error_of(server.load("n", folder))
        assert status == 400, (kind, message)
    pipe = server.root / "pipe-configuration"
    pipe.mkdir()
    os.mkfifo(pipe / "adapter_config.json")
    assert server.load("n", pipe)[0] == 404
    assert server.names() == ["base"]


def test_adapter_that_does_not_fit_is_status_400(server: LoraServer) -> None:
    large = write_adapter(server.root / "large", CONFIG, rank=65)
    status, message = error_of(server.load("n", large))
    assert status == 400
    assert "has rank 65; max_adapter_rank is 64" in message
    other = write_adapter(server.root / "other-model", {**CONFIG, "hidden_size": 64, "num_hidden_layers": 9})
    assert error_of(server.load("n", other))[0] == 400


def test_loads_of_hostile_folders_do_not_delay_requests(server: LoraServer) -> None:
    """The event loop answers while a configuration of 32 MB and a deep header are read."""
    folder = copy_of_one(server, "slow")
    (folder / "adapter_model.safetensors").write_bytes(WEIGHTS["deep json"])
    statuses: list[int] = []
    thread = threading.Thread(target=lambda: statuses.extend(server.load("n", folder)[0] for _ in range(5)))
    thread.start()
    while thread.is_alive():
        assert server.ask("/v1/completions", COMPLETION)[0] == 200
    thread.join()
    assert statuses == [400] * 5
