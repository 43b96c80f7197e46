"""The chat page in Chromium with a server that needs a key, is busy, loads, fails, or has a prefix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from playwright.sync_api import expect
from starlette.applications import Starlette
from starlette.routing import Mount

import penstock.server
from penstock.server.models import Progress
from support.api.engines import make_engine, wait_until
from support.server.browser import new_page
from support.server.chat_page import (
    COMPLETIONS,
    QUESTION,
    answers,
    ask,
    body,
    generated,
    opened,
    send,
    sent_texts,
    stored,
    wait_for_end,
)
from support.server.serving import Served, at_rest, post, serving

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Browser, Page


pytestmark = [pytest.mark.browser, pytest.mark.rare]  # each gate runs test_server_page.py


def test_key_is_asked_for_and_kept_in_the_tab_only(browser: Browser, chat_engine: penstock.Engine) -> None:
    settings = penstock.server.ServerSettings(api_keys=("secret",))
    application = penstock.server.app({"demo": chat_engine}, settings)
    with serving(application) as server, new_page(browser, may_fail=True) as page:
        page.goto(server.url)
        alert = page.get_by_role("alert")
        expect(alert).to_have_text("This server needs an API key.")
        expect(page.get_by_label("API key")).to_be_focused()
        page.get_by_label("API key").fill("wrong")
        page.keyboard.press("Enter")
        expect(alert).to_have_text("The server does not accept this API key.")
        page.get_by_label("API key").fill("secret")
        page.keyboard.press("Enter")
        expect(page.get_by_label("Model", exact=True)).to_be_enabled()
        send(page)
        expect(body(page)).not_to_be_empty()
        page.keyboard.press("Escape")
        assert "secret" not in page.evaluate("JSON.stringify(localStorage)")
        assert "secret" in page.evaluate("JSON.stringify(sessionStorage)")
        page.reload()
        expect(page.get_by_label("Model", exact=True)).to_be_enabled()


def test_busy_server_says_when_to_try_again(browser: Browser, chat_engine: penstock.Engine) -> None:
    settings = penstock.server.ServerSettings(max_outputs_per_key=1)
    application = penstock.server.app({"demo": chat_engine}, settings)
    other = {"prompt": [1, 2], "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with serving(application) as server, opened(browser, server, may_fail=True) as page:
        with server.send(post("/v1/completions", other)):
            wait_until(lambda: bool(application.state.calls.generations))
            ask(page)
            expect(answers(page)).to_contain_text("The server has too many requests now. Try again in 1 s.")
        wait_until(lambda: at_rest(chat_engine))
        page.get_by_role("button", name="Try again").click()
        wait_for_end(page)
        expect(body(page)).to_have_text(generated(chat_engine, QUESTION))
        assert [message["role"] for message in stored(page)[0]["messages"]] == ["user", "assistant"]


def test_refused_field_is_named_and_the_question_not_sent_again(
    browser: Browser, chat_server: Served
) -> None:
    with opened(browser, chat_server, {"top_p": 7}, may_fail=True) as page:
        ask(page, "First")
        expect(answers(page)).to_contain_text("The server refused the request (400): top_p=7")
        with page.expect_request(COMPLETIONS) as sent:
            ask(page, "Second")
        assert sent_texts(sent.value) == ["Second"]


def test_loading_is_shown_with_its_progress(browser: Browser, demo_model: Path) -> None:
    engine = make_engine(demo_model)
    application = penstock.server.app({"demo": engine})
    progress = application.state.models["demo"].progress = Progress()
    progress(30, 120)
    with serving(application) as server, new_page(browser, may_fail=True) as page:
        page.goto(server.url)
        expect(page.get_by_text("The server loads the model.")).to_be_visible()
        expect(page.get_by_label("Loaded part of the model")).to_have_attribute("value", "0.25")
        ask(page)
        expect(answers(page)).to_contain_text("The model is not available now. Try again in 5 s.")
        progress(60, 120)
        expect(page.get_by_label("Loaded part of the model")).to_have_attribute("value", "0.5")
        with engine:
            engine.blocking.start()
            application.state.models["demo"].progress = None
            expect(page.get_by_text("The server loads the model.")).to_be_hidden()
            expect(page.get_by_label("Model", exact=True)).to_have_value("demo")
            page.get_by_role("button", name="Try again").click()
            expect(body(page)).not_to_be_empty()
            page.keyboard.press("Escape")
            wait_until(lambda: at_rest(engine))


def test_lost_server_is_an_error_in_plain_words(browser: Browser, chat_engine: penstock.Engine) -> None:
    with new_page(browser, may_fail=True) as page:
        with serving(penstock.server.app({"demo": chat_engine})) as server:
            page.goto(server.url)
            expect(page.get_by_label("Model", exact=True)).to_be_enabled()
        send(page)
        expect(answers(page)).to_contain_text("The server cannot be reached.")


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        ({"status": 500, "json": {"error": {"message": "no disk"}}}, "The server failed (500): no disk"),
        ({"body": "<html>", "content_type": "text/html"}, "The server sent an answer that cannot be read."),
        ({"json": {"data": None}}, "The server sent an answer that cannot be read."),
    ],
)
def test_models_are_asked_for_until_they_are_known(
    browser: Browser, chat_server: Served, reply: dict[str, Any], text: str
) -> None:
    with new_page(browser, may_fail=True) as page:
        page.route("**/v1/models", lambda route: route.fulfill(**reply))
        page.goto(chat_server.url)
        expect(page.locator("#banner")).to_have_text(text)
        page.unroute("**/v1/models")
        expect(page.get_by_label("Model", exact=True)).to_be_enabled()
        expect(page.locator("#banner")).to_be_hidden()


@pytest.mark.parametrize(
    "data",
    [
        "{no JSON",
        "null",
        "1",
        '{"choices":[{"delta":{"content":1}}]}',
        '{"choices":[{"delta":{"reasoning":{}}}]}',
    ],
)
def test_event_that_cannot_be_read_is_an_error_in_plain_words(page: Page, data: str) -> None:
    events = f'data: {{"object":"other"}}\n\ndata: {data}\n\ndata: [DONE]\n\n'
    page.route(COMPLETIONS, lambda route: route.fulfill(content_type="text/event-stream", body=events))
    ask(page)
    expect(answers(page).locator(".error p")).to_have_text("The server sent an answer that cannot be read.")


def test_error_in_a_stream_keeps_the_text(page: Page) -> None:
    event = (
        'data: {"choices":[{"delta":{"content":"Half"}}]}\n\ndata: {"error":{"message":"out of memory"}}\n\n'
    )
    page.route(COMPLETIONS, lambda route: route.fulfill(content_type="text/event-stream", body=event))
    ask(page)
    expect(body(page)).to_have_text("Half")
    expect(answers(page)).to_contain_text("The answer ended early: out of memory")


def test_page_works_under_a_prefix(browser: Browser, chat_engine: penstock.Engine) -> None:
    application = penstock.server.app({"demo": chat_engine})
    mounted = Starlette(routes=[Mount("/a/prefix", application)])
    with serving(mounted) as server, opened(browser, server, path="/a/prefix/") as page:
        ask(page)
        expect(body(page)).to_have_text(generated(chat_engine, QUESTION))
        assert page.evaluate(
            "performance.getEntriesByType('resource').every(({ name }) => name.includes('/a/prefix/'))"
        )
