"""The chat page as its users see it: helpers of its tests."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from playwright.sync_api import expect

from support.server.browser import new_page

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Locator, Page, Request, Route

    import penstock
    from support.server.serving import Served

QUESTION = "Why is the sky blue?"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
#: The answer lasts until it is stopped: `opened` adds a parameter that the page does not have.
ENDLESS: dict[str, Any] = {"temperature": 0}
COMPLETIONS = "**/v1/chat/completions"


@contextmanager
def opened(
    browser: Browser, server: Served, parameters: object = GREEDY, path: str = "/", **options: Any
) -> Iterator[Page]:
    """The chat page, with these sampling parameters, when it knows the models."""
    with new_page(browser, **options) as page:
        key = json.dumps(f"penstock:{path}:parameters")
        value = json.dumps(json.dumps(parameters))
        page.add_init_script(f"if (!localStorage[{key}]) localStorage[{key}] = {value}")
        if parameters is ENDLESS:
            page.route(COMPLETIONS, _without_end)
        page.goto(server.url + path)
        expect(page.get_by_label("Model", exact=True)).to_be_enabled()
        yield page


def _without_end(route: Route) -> None:
    """Send a request with ``ignore_eos``."""
    route.continue_(post_data=json.dumps({**sent_fields(route.request), "ignore_eos": True}))


def ask(page: Page, text: str = QUESTION) -> None:
    """Ask a question, and wait for the end of the answer."""
    send(page, text)
    wait_for_end(page)


def send(page: Page, text: str = QUESTION) -> None:
    page.get_by_label("Question", exact=True).fill(text)
    page.keyboard.press("Enter")


def wait_for_end(page: Page) -> None:
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible(timeout=60_000)


def answers(page: Page) -> Locator:
    return page.get_by_role("listitem", name="Answer", exact=True)


def questions(page: Page) -> Locator:
    return page.get_by_role("listitem", name="You", exact=True)


def body(page: Page) -> Locator:
    return answers(page).last.locator(".body")


def generated(engine: penstock.Engine, *contents: str, **params: Any) -> str:
    """The answer to a conversation without the server."""
    roles = ("user", "assistant") * len(contents)
    messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
    return engine.blocking.generate(messages, **{**GREEDY, **params}).content


def sent_fields(request: Request) -> dict[str, Any]:
    """The JSON object of a request."""
    fields: dict[str, Any] = json.loads(request.post_data or "")
    return fields


def sent_texts(request: Request) -> list[str]:
    """The contents of the messages of a request."""
    return [message["content"] for message in sent_fields(request)["messages"]]


def stored(page: Page) -> list[dict[str, Any]]:
    """The chats in the browser's storage."""
    found = page.evaluate(
        "Object.entries(localStorage).filter(([key]) => key.includes(':chat:')).map(([, v]) => v)"
    )
    return [json.loads(text) for text in found]


def replies(*deltas: dict[str, str]) -> dict[str, Any]:
    """A stream in place of the server's."""
    events = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    lines = [*map(json.dumps, events), "[DONE]"]
    return {"content_type": "text/event-stream", "body": "".join(f"data: {line}\n\n" for line in lines)}
