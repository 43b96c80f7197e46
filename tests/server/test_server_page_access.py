"""The chat page in Chromium: keyboard, screen readers, contrast, themes, small screens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

import penstock.server
from support.server.browser import contrast
from support.server.chat_page import (
    COMPLETIONS,
    QUESTION,
    answers,
    ask,
    body,
    generated,
    opened,
    questions,
    replies,
    send,
    wait_for_end,
)
from support.server.serving import Served, held, serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


pytestmark = [pytest.mark.browser, pytest.mark.rare]  # each gate runs test_server_page.py


def test_everything_works_by_keyboard(page: Page, chat_engine: penstock.Engine) -> None:
    field = page.get_by_label("Question", exact=True)
    expect(field).to_be_focused()
    page.keyboard.type("Why is")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("the sky blue?")
    expect(field).to_have_value("Why is\nthe sky blue?")
    page.keyboard.press("Enter")
    wait_for_end(page)
    expect(field).to_be_focused()
    expect(body(page)).to_have_text(generated(chat_engine, "Why is\nthe sky blue?"))
    focused = tab_order(page)
    wanted = [
        "New chat",
        "Why is the sky blue?",
        "Delete the chat “Why is the sky blue?”",
        "Remove all chats",
    ]
    wanted += ["Model", "Settings", "Dark theme", "Copy the question", "Edit the question"]
    wanted += ["Delete the question and its answer", "Copy the answer", "Regenerate the answer"]
    wanted += ["Delete the question and its answer", "Question", "Send"]
    assert [name for name, _ in focused] == wanted
    assert not [name for name, is_visible in focused if not is_visible]


def tab_order(page: Page) -> list[tuple[str, bool]]:
    """The names of the elements that Tab reaches in a turn, and whether their focus is visible."""
    script = """() => {
        const node = document.activeElement;
        const frame = node.id === "question" ? node.closest("form") : node;
        const style = getComputedStyle(frame);
        const isVisible = frame === node
            ? style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2
            : style.borderColor !== getComputedStyle(document.querySelector("header select")).color;
        const name = node.ariaLabel || node.labels?.[0]?.textContent || node.textContent.trim();
        let shown = node;
        while (shown && getComputedStyle(shown).opacity === "1") shown = shown.parentElement;
        return [name, isVisible && !shown];
    }"""
    page.get_by_role("button", name="New chat").focus()
    found: list[tuple[str, bool]] = []
    while page.evaluate("document.activeElement !== document.body"):
        name, is_visible = page.evaluate(script)
        found.append((name, is_visible))
        page.keyboard.press("Tab")
        assert len(found) < 40
    return found


def test_enter_that_ends_a_composition_does_not_send(page: Page) -> None:
    field = page.get_by_label("Question", exact=True)
    field.fill("ni")
    field.dispatch_event(
        "keydown", {"key": "Enter", "isComposing": True, "bubbles": True, "cancelable": True}
    )
    expect(answers(page)).to_have_count(0)
    expect(field).to_have_value("ni")


def test_end_of_an_answer_is_announced(page: Page, chat_engine: penstock.Engine) -> None:
    region = page.locator("#announcement")
    expect(region).to_have_attribute("aria-live", "polite")
    with held(chat_engine):
        send(page)
        expect(region).to_have_text("Answering.")
    wait_for_end(page)
    expect(region).to_have_text(f"Answer: {generated(chat_engine, QUESTION)}")


def test_every_control_has_a_name_and_every_id_is_unique(page: Page) -> None:
    ask(page)
    page.get_by_role("button", name="Settings").click()
    session = page.context.new_cdp_session(page)
    nodes = session.send("Accessibility.getFullAXTree")["nodes"]
    shown = [node for node in nodes if not node["ignored"]]
    roles = {
        "button",
        "textbox",
        "combobox",
        "spinbutton",
        "listitem",
        "dialog",
        "progressbar",
        "link",
        "region",
    }
    controls = [node for node in shown if node["role"]["value"] in roles]
    assert len(controls) >= 12
    assert not [node for node in controls if not node["name"]["value"].strip()]
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(({ id }) => id)")
    assert len(ids) == len(set(ids))
    assert page.evaluate("document.documentElement.lang") == "en"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_of_every_text_is_sufficient(browser: Browser, chat_server: Served, scheme: str) -> None:
    text = (
        "# Title\n\nA [link](https://example.org), `code`\n\n> quote\n\n|a|\n|-|\n|b|\n\n```c\nint a;\n```\n"
    )
    with opened(browser, chat_server, color_scheme=scheme) as page:
        page.route(COMPLETIONS, lambda route: route.fulfill(**replies({"reasoning": "So", "content": text})))
        ask(page)
        page.unroute(COMPLETIONS)
        page.route(COMPLETIONS, lambda route: route.fulfill(content_type="text/event-stream", body=""))
        ask(page, "Fail")
        page.get_by_text("Reasoning").first.click()
        expect(page.get_by_role("button", name="Try again")).to_be_visible()
        found = page.evaluate(COLOURS + TEXTS)
        page.get_by_role("button", name="Settings").click()
        found += page.evaluate(COLOURS + TEXTS)
    assert len(found) > 40
    weak = [(text, ratio) for text, *pair in found if (ratio := contrast(*pair)) < 4.5]
    assert not weak


#: The texts and placeholders that are visible, each with its colour and that of its background.
TEXTS = """
const top = document.querySelector("dialog[open]") ?? document.body;
const background = (node) => {
    for (; node; node = node.parentElement) {
        const colour = getComputedStyle(node).backgroundColor;
        if (colour !== "rgba(0, 0, 0, 0)") return rgb(colour);
    }
    return rgb("white");
};
const walker = document.createTreeWalker(top, NodeFilter.SHOW_TEXT);
const found = [];
while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    const text = walker.currentNode.data.trim();
    if (text && node.checkVisibility() && !node.closest(".hidden")) {
        found.push([text, rgb(getComputedStyle(node).color), background(node)]);
    }
}
for (const node of top.querySelectorAll("[placeholder]")) {
    found.push([node.placeholder, rgb(getComputedStyle(node, "::placeholder").color), background(node)]);
}
found;
"""


def test_phone_has_the_chats_in_a_drawer(browser: Browser, chat_server: Served) -> None:
    viewport = {"width": 360, "height": 640}
    with opened(browser, chat_server, viewport=viewport, is_mobile=True, has_touch=True) as page:
        wide = (
            "| a | b |\n|---|---|\n| "
            + "wide " * 60
            + "| "
            + "w" * 300
            + " |\n\n```\n"
            + "x" * 500
            + "\n```\n"
        )
        page.route(COMPLETIONS, lambda route: route.fulfill(**replies({"content": wide + "y" * 500})))
        page.get_by_label("Question", exact=True).fill(QUESTION)
        page.get_by_role("button", name="Send", exact=True).tap()
        wait_for_end(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        assert page.evaluate("document.querySelector('#scroller').scrollWidth") <= 360
        expect(page.get_by_role("button", name="New chat")).to_be_hidden()
        page.get_by_role("button", name="Chats", exact=True).tap()
        expect(page.get_by_role("button", name="New chat")).to_be_in_viewport()
        expect(page.get_by_role("button", name="New chat")).to_be_focused()
        order = ["New chat", QUESTION, f"Delete the chat “{QUESTION}”", "Remove all chats"]
        assert [name for name, _ in tab_order(page)] == order, "the focus does not go behind the drawer"
        page.keyboard.press("Escape")
        expect(page.get_by_role("button", name="New chat")).to_be_hidden()
        expect(page.get_by_role("button", name="Chats", exact=True)).to_be_focused()
        page.get_by_role("button", name="Chats", exact=True).tap()
        page.get_by_role("button", name="Close the chats").tap()
        expect(page.get_by_role("button", name="Chats", exact=True)).to_be_focused()
        page.get_by_role("button", name="Chats", exact=True).tap()
        expect(page.get_by_role("button", name="New chat")).to_be_in_viewport()
        page.touchscreen.tap(350, 300)
        expect(page.get_by_role("button", name="New chat")).to_be_hidden()
        page.get_by_role("button", name="Chats", exact=True).tap()
        page.get_by_role("button", name="New chat").tap()
        expect(page.get_by_text("What would you like to know?")).to_be_visible()
        sizes = page.evaluate("[...document.querySelectorAll('header button')].map((b) => b.offsetHeight)")
        assert min(sizes) >= 44


def test_enter_begins_a_line_on_a_touch_screen(browser: Browser, chat_server: Served) -> None:
    viewport = {"width": 360, "height": 640}
    with opened(browser, chat_server, viewport=viewport, is_mobile=True, has_touch=True) as page:
        expect(page.get_by_text("Shift+Enter")).to_be_hidden()
        field = page.get_by_label("Question", exact=True)
        field.tap()
        page.keyboard.type("One\ntwo")
        expect(field).to_have_value("One\ntwo")
        page.get_by_role("button", name="Send", exact=True).tap()
        wait_for_end(page)
        questions(page).get_by_role("button", name="Edit the question").tap()
        page.keyboard.type("\nthree")
        expect(questions(page).get_by_label("Question")).to_have_value("One\ntwo\nthree")


def test_long_texts_do_not_widen_a_narrow_page(browser: Browser, chat_engine: penstock.Engine) -> None:
    application = penstock.server.app({"model-of-a-long-name" * 3: chat_engine})
    viewport = {"width": 320, "height": 640}
    with serving(application) as server, opened(browser, server, viewport=viewport, may_fail=True) as page:
        text = "| name | value |\n|---|---|\n|" + " word" * 40 + " | " + "word " * 40 + "|\n"
        page.route(COMPLETIONS, lambda route: route.fulfill(**replies({"content": text})))
        ask(page)
        heads = page.evaluate("[...document.querySelectorAll('th')].map((cell) => cell.clientHeight)")
        assert max(heads) < 50, "one line: words of a table are not broken"
        page.unroute(COMPLETIONS)
        error = {"error": {"message": "x" * 3000}}
        page.route(COMPLETIONS, lambda route: route.fulfill(status=400, json=error))
        ask(page)
        expect(answers(page).last).to_contain_text("x" * 3000)
        assert page.evaluate("document.documentElement.scrollWidth") <= 320
        assert page.evaluate("document.querySelector('#scroller').scrollWidth") <= 320


def test_page_follows_the_answer_unless_it_was_scrolled(page: Page) -> None:
    lines = "".join(f"- line {number}\n" for number in range(200))
    page.route(COMPLETIONS, lambda route: route.fulfill(**replies({"content": lines})))
    ask(page)
    expect(page.get_by_text("line 199")).to_be_in_viewport()
    expect(page.get_by_role("button", name="Scroll to the end")).to_be_hidden()
    page.get_by_role("listitem", name="Answer").hover()
    page.mouse.wheel(0, -800)
    page.get_by_role("button", name="Scroll to the end").click()
    expect(page.get_by_text("line 199")).to_be_in_viewport()


def test_theme_follows_the_system_until_it_is_chosen(browser: Browser, chat_server: Served) -> None:
    with opened(browser, chat_server, color_scheme="dark") as page:
        button = page.get_by_role("button", name="Dark theme")

        def is_dark() -> bool:
            red, *_ = colours(page, "body", "background-color")
            return red < 128

        assert is_dark()
        expect(button).to_have_attribute("aria-pressed", "true")
        page.emulate_media(color_scheme="light")
        assert not is_dark()
        expect(button).to_have_attribute("aria-pressed", "false")
        button.click()
        assert is_dark()
        page.reload()
        assert is_dark()
        button.click()
        assert not is_dark()
        page.emulate_media(color_scheme="dark")
        assert is_dark(), "the system's theme was chosen again"


def colours(page: Page, selector: str, name: str) -> tuple[float, ...]:
    """A computed colour as red, green and blue."""
    return tuple(
        page.evaluate(COLOURS + f"rgb(getComputedStyle(document.querySelector('{selector}'))['{name}'])")
    )


COLOURS = """
const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
const rgb = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
};
"""
