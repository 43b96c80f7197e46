"""Chats with an adapter of a server: the chat page, and `penstock chat --url`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner
from playwright.sync_api import expect

from penstock.cli import main
from support.chat_page import COMPLETIONS, answers, ask, opened, sent_fields
from support.lora_server import LoraServer, lora_server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser

GREEDY = {"temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoraServer]:
    """A server with the adapters "one" and "two"."""
    with lora_server(tmp_path_factory.mktemp("lora")) as server:
        for name in ("one", "two"):
            assert server.load(name, server.root / name)[0] == 200
        yield server


@pytest.mark.browser
def test_chat_page_offers_the_adapters(browser: Browser, server: LoraServer) -> None:
    with opened(browser, server, GREEDY) as page:
        model = page.get_by_label("Model", exact=True)
        expect(model.locator("option")).to_have_text(["base", "one", "two"])
        expect(model).to_have_value("base")
        model.select_option("two")
        with page.expect_request(COMPLETIONS) as sent:
            ask(page, "Hello")
        assert sent_fields(sent.value)["model"] == "two"
        expect(answers(page)).to_have_count(1)


def test_chat_of_the_command_line_takes_an_adapter_as_model(server: LoraServer) -> None:
    options = ("--max-tokens", "8", "--temperature", "0", "--ignore-eos")
    outputs = []
    for model in ((), ("--model", "base"), ("--model", "one"), ("--model", "two")):
        done = CliRunner().invoke(main, ["chat", "--url", server.url, "Hello", *model, *options])
        assert done.exit_code == 0, done.output
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]
    assert len(set(outputs)) == 3
    done = CliRunner().invoke(main, ["chat", "--url", server.url, "Hello", "--model", "three"])
    assert done.exit_code == 1
    assert "'three' does not exist" in done.output
