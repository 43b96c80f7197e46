"""Fixtures of the tests of the server: Chromium, the chat page, and a server with adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import penstock
from support.api.adapters import write_adapter

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import Browser, Page

    from support.server.lora_server import LoraServer
    from support.server.serving import Served


@pytest.fixture(scope="module")
def module_lora_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoraServer]:
    """A server with room for four adapters, and an adapter outside of its root."""
    from support.server.lora_server import CONFIG, SECRET, lora_server

    folder = tmp_path_factory.mktemp(SECRET)
    write_adapter(folder / "outside", CONFIG)
    with lora_server(folder, max_adapters=2, max_cpu_adapters=4) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium. No event loop can run in the main thread meanwhile, so it ends with the module."""
    from support.server.browser import running_browser

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
    from support.server.serving import serving

    with serving(penstock.server.app({"demo": chat_engine})) as server:
        yield server


@pytest.fixture
def page(browser: Browser, chat_server: Served) -> Iterator[Page]:
    """The chat page of `chat_server`, open in a context of its own."""
    from support.server.chat_page import opened

    with opened(browser, chat_server) as page:
        yield page
