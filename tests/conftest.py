"""Fixtures of all tests: the event loops, the demo model, and a small generated checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import penstock
from api_support import make_engine
from penstock.demo import model_path
from penstock.errors import ModelLoadError
from support.adapter_engine import AdapterEngine
from support.adapters import write_adapter
from support.checkpoints import make_config, write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import Browser, Page

    from support.lora_server import LoraServer
    from support.serving import Served


@pytest.fixture(
    params=[
        pytest.param(("asyncio", {"use_uvloop": False}), id="asyncio"),
        pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop"),
        pytest.param(("trio", {}), id="trio"),
    ]
)
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """Run a test marked `anyio` once on each event loop."""
    backend: tuple[str, dict[str, Any]] = request.param
    return backend


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's GGUF file."""
    try:
        return model_path()
    except ModelLoadError as error:
        from support import cuda

        if cuda.ON_GPU:
            pytest.skip("needs the demo model")
        pytest.fail(f"{error}; `make check` and `make test` do", pytrace=False)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama checkpoint of a few hundred kilobytes: 512 tokens, 512 positions, a byte tokenizer."""
    return write_checkpoint(tmp_path_factory.mktemp("tiny-llama"), make_config("llama"))


@pytest.fixture(scope="session")
def adapter_folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Adapters of `tiny_model` with distinct weights; each fourth has the same rank, the first one 8."""
    root, config = tmp_path_factory.mktemp("adapters"), make_config("llama")
    return [
        write_adapter(root / str(index), config, seed=index, rank=(8, 4, 12, 16)[index % 4])
        for index in range(12)
    ]


@pytest.fixture
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    """`tiny_model` with room for three adapters."""
    with make_engine(tiny_model, max_adapters=3) as engine:
        yield engine


@pytest.fixture(scope="module")
def adapter_engine(tiny_model: Path) -> Iterator[AdapterEngine]:
    """`tiny_model` with room for two adapters."""
    with make_engine(tiny_model, max_adapters=2) as engine:
        yield AdapterEngine(engine)


@pytest.fixture(scope="module")
def module_lora_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoraServer]:
    """A server with room for four adapters, and an adapter outside of its root."""
    from support.lora_server import CONFIG, SECRET, lora_server

    folder = tmp_path_factory.mktemp(SECRET)
    write_adapter(folder / "outside", CONFIG)
    with lora_server(folder, max_adapters=2, max_cpu_adapters=4) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium. No event loop can run in the main thread meanwhile, so it ends with the module."""
    from support.browser import running_browser

    with running_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def chat_engine(demo_model: Path) -> Iterator[penstock.Engine]:
    """The demo model, for the chat page."""
    with penstock.Engine(demo_model, threads=1) as engine:
        yield engine


@pytest.fixture(scope="module")
def chat_server(chat_engine: penstock.Engine) -> Iterator[Served]:
    """A server of the demo model, for the chat page."""
    import penstock.server
    from support.serving import serving

    with serving(penstock.server.app({"demo": chat_engine})) as server:
        yield server


@pytest.fixture
def page(browser: Browser, chat_server: Served) -> Iterator[Page]:
    """The chat page of `chat_server`, open in a context of its own."""
    from support.chat_page import opened

    with opened(browser, chat_server) as page:
        yield page


def pytest_addoption(parser: pytest.Parser) -> None:
    """The lengths of the soak test and of the storm."""
    parser.addoption("--soak-waves", type=int, default=60, help="bursts of requests in the soak test")
    parser.addoption(
        "--storm-operations", type=int, default=200, help="operations of each thread in the storm"
    )
