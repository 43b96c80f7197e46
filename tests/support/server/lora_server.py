"""A server of two adapters on a real socket."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import penstock
import penstock.server
from support.api.adapters import write_adapter
from support.api.checkpoints import make_config, write_checkpoint
from support.api.engines import make_engine
from support.server.serving import Served, at_rest, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CONFIG = make_config("llama")
ADMIN = {"Authorization": "Bearer boss"}
#: In the path of folders that no response may have.
SECRET = "very-secret"  # noqa: S105 - the name of a folder
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class LoraServer(Served):
    """A server with adapters; `root` is the folder of those that it may load."""

    engine: penstock.Engine
    root: Path

    def load(self, name: str, path: object, **fields: Any) -> tuple[int, Any, dict[str, str]]:
        """Load an adapter as an administrator."""
        return self.ask(LOAD, {"lora_name": name, "lora_path": str(path), **fields}, headers=ADMIN)

    def unload(self, name: str, **fields: Any) -> tuple[int, Any, dict[str, str]]:
        """Unload an adapter as an administrator."""
        return self.ask(UNLOAD, {"lora_name": name, **fields}, headers=ADMIN)

    def names(self) -> list[str]:
        """The listed models."""
        return [row["id"] for row in self.ask("/v1/models")[1]["data"]]


@contextmanager
def lora_server(
    folder: Path, *, settings: dict[str, Any] | None = None, **options: Any
) -> Iterator[LoraServer]:
    """A server of a random model "base", and the folders of the adapters "one" and "two" in its root.

    `options` are those of the engine.
    """
    root = folder / "adapters"
    for seed, name in enumerate(("one", "two"), start=1):
        write_adapter(root / name, CONFIG, seed=seed)
    given = {"admin_api_keys": ("boss",), "lora_roots": (str(root),), **(settings or {})}
    model = write_checkpoint(folder / "model", CONFIG)
    with make_engine(model, **{"max_adapters": 4, **options}) as engine:
        application = penstock.server.app({"base": engine}, penstock.server.ServerSettings(**given))
        with serving(application) as served:
            server = LoraServer(application, served.port)
            server.engine, server.root = engine, root
            yield server


@contextmanager
def cleared(server: LoraServer) -> Iterator[None]:
    """Check that the server answers after the block, and remove the adapters that it has then."""
    yield
    for name in server.names()[1:]:
        assert server.unload(name)[0] == 200
    assert server.ask("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 2})[0] == 200
    assert at_rest(server.engine)


def error_of(answer: tuple[int, Any, dict[str, str]]) -> tuple[int, str]:
    """The status and the message of an error in the form of OpenAI's API, without a folder of the server."""
    status, body, headers = answer
    assert headers["content-type"] == "application/json"
    message: str = body["error"]["message"]
    assert SECRET not in message
    return status, message
