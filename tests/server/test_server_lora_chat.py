"""Clients of a server with adapters: those of OpenAI and Anthropic, the chat page, `penstock chat --url`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anthropic
import openai
import pytest
from click.testing import CliRunner
from playwright.sync_api import expect

from penstock.cli import main
from support.server.chat_page import COMPLETIONS, answers, ask, opened, sent_fields
from support.server.lora_server import LoraServer, lora_server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser

CHAT: list[Any] = [{"role": "user", "content": "Hello"}]
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


def test_clients_use_an_adapter_as_model(server: LoraServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["base", "one", "two"]
        assert client.models.retrieve("one").id == "one"
        chat = client.chat.completions.create(model="one", messages=CHAT, max_tokens=4)
        assert chat.model == "one"
        embeddings = client.embeddings.create(model="two", input="Hello")
        assert embeddings.model == "two"
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.completions.create(model="three", prompt="Hello")
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as other:
        message = other.messages.create(model="one", messages=CHAT, max_tokens=4)
        assert message.model == "one"
        with pytest.raises(anthropic.NotFoundError, match="does not exist"):
            other.messages.create(model="three", messages=CHAT, max_tokens=4)
