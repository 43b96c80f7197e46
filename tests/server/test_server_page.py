"""The chat page in Chromium: questions, answers, settings, stored chats."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

import penstock.server
from support.api.checkpoints import make_config, write_checkpoint
from support.api.engines import make_engine, wait_until
from support.server.browser import new_page
from support.server.chat_page import (
    COMPLETIONS,
    ENDLESS,
    QUESTION,
    answers,
    ask,
    body,
    generated,
    opened,
    questions,
    replies,
    send,
    sent_fields,
    sent_texts,
    stored,
    wait_for_end,
)
from support.server.serving import Served, at_rest, serving

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Browser, Page


pytestmark = pytest.mark.browser


# ---- questions and answers


def test_answer_is_that_of_the_engine_with_its_counts(page: Page, chat_engine: penstock.Engine) -> None:
    ask(page)
    expect(body(page)).to_have_text(generated(chat_engine, QUESTION))
    numbers = answers(page).locator(".numbers")
    expect(numbers).to_contain_text("12 tokens · ")
    expect(numbers).to_contain_text(re.compile(r"· \d+\.\d tokens/s · first token after \d\.\d\d s ·"))
    usage = chat_engine.blocking.generate([{"role": "user", "content": QUESTION}], max_tokens=1).usage
    expect(numbers).to_contain_text(f"prompt {usage.prompt_tokens} tokens")


def test_second_question_continues_the_chat(page: Page, chat_engine: penstock.Engine) -> None:
    ask(page)
    first = generated(chat_engine, QUESTION)
    ask(page, "And at night?")
    expect(body(page)).to_have_text(generated(chat_engine, QUESTION, first, "And at night?"))
    assert [message["role"] for message in stored(page)[0]["messages"]] == ["user", "assistant"] * 2


def test_stop_ends_the_request_and_keeps_the_text(
    browser: Browser, chat_server: Served, chat_engine: penstock.Engine
) -> None:
    with opened(browser, chat_server, ENDLESS) as page:
        send(page)
        expect(body(page)).to_contain_text("atmospher")
        assert chat_engine.stats().running == 1
        page.get_by_role("button", name="Stop").click()
        wait_until(lambda: at_rest(chat_engine))
        wait_for_end(page)
        expect(answers(page)).to_contain_text("Stopped.")
        expect(answers(page).locator(".numbers")).to_contain_text("tokens/s")
        assert body(page).inner_text().startswith(generated(chat_engine, QUESTION)[:40])
        assert stored(page)[0]["messages"][1]["content"].startswith(generated(chat_engine, QUESTION)[:40])


def test_text_is_shown_while_the_answer_is_generated(browser: Browser, chat_server: Served) -> None:
    with opened(browser, chat_server, ENDLESS) as page:
        send(page)
        expect(body(page)).not_to_be_empty()
        expect(answers(page)).to_have_attribute("aria-busy", "true")
        page.keyboard.press("Escape")
        expect(answers(page)).not_to_have_attribute("aria-busy", "true")


def test_closed_page_frees_the_request(
    browser: Browser, chat_server: Served, chat_engine: penstock.Engine
) -> None:
    with opened(browser, chat_server, ENDLESS) as page:
        send(page)
        expect(body(page)).not_to_be_empty()
        page.reload()
        wait_until(lambda: at_rest(chat_engine))
        expect(body(page)).not_to_be_empty()  # the part that was shown is stored


def test_regenerate_sends_the_question_again(page: Page) -> None:
    ask(page)
    with page.expect_request(COMPLETIONS) as sent:
        page.get_by_role("button", name="Regenerate the answer").click()
    assert sent_fields(sent.value)["messages"] == [{"role": "user", "content": QUESTION}]
    wait_for_end(page)
    expect(answers(page)).to_have_count(1)
    expect(page.get_by_label("Question", exact=True)).to_be_focused()


def test_edited_question_continues_from_there(page: Page, chat_engine: penstock.Engine) -> None:
    ask(page)
    ask(page, "And at night?")
    questions(page).first.hover()
    questions(page).first.get_by_role("button", name="Edit the question").click()
    field = questions(page).first.get_by_label("Question")
    expect(field).to_have_value(QUESTION)
    field.fill("What is rain?")
    field.press("Enter")
    expect(questions(page)).to_have_count(1)
    wait_for_end(page)
    expect(body(page)).to_have_text(generated(chat_engine, "What is rain?"))


def test_escape_leaves_an_edited_question_as_it_was(page: Page) -> None:
    ask(page)
    questions(page).get_by_role("button", name="Edit the question").click()
    questions(page).get_by_label("Question").fill("Another")
    page.keyboard.press("Escape")
    expect(questions(page)).to_have_text(QUESTION)
    expect(answers(page)).to_have_count(1)
    expect(questions(page).get_by_role("button", name="Edit the question")).to_be_focused()


def test_deleted_question_takes_its_answer_with_it(page: Page, chat_engine: penstock.Engine) -> None:
    ask(page)
    ask(page, "And at night?")
    answers(page).first.get_by_role("button", name="Delete").click()
    expect(questions(page)).to_have_text(["And at night?"])
    with page.expect_request(COMPLETIONS) as sent:
        page.get_by_role("button", name="Regenerate the answer").click()
    assert sent_texts(sent.value) == ["And at night?"]
    wait_for_end(page)
    expect(body(page)).to_have_text(generated(chat_engine, "And at night?"))


def test_answer_and_code_are_copied(browser: Browser, chat_server: Served) -> None:
    permissions = ["clipboard-read", "clipboard-write"]
    with opened(browser, chat_server, permissions=permissions) as page:
        source = "Look:\n\n```python\nif a < b:\n    print('*')\n\n# end\n```\n"
        page.route(COMPLETIONS, lambda route: route.fulfill(**replies({"content": source})))
        ask(page)
        page.get_by_role("button", name="Copy the answer").click()
        expect(page.get_by_role("status").filter(has_text="Copied.")).to_be_attached()
        assert page.evaluate("navigator.clipboard.readText()") == source
        page.get_by_role("button", name="Copy the python code").click()
        expect(page.get_by_role("button", name="Copy the python code")).to_have_text("\u2713")
        assert page.evaluate("navigator.clipboard.readText()") == "if a < b:\n    print('*')\n\n# end"


def test_copying_works_without_the_clipboard_interface(browser: Browser, chat_server: Served) -> None:
    with opened(browser, chat_server, permissions=["clipboard-read"]) as page:
        ask(page)
        page.evaluate("Object.defineProperty(Clipboard.prototype, 'writeText', { value: undefined })")
        page.get_by_role("button", name="Copy the question").click()
        expect(page.get_by_role("status").filter(has_text="Copied.")).to_be_attached()
        assert page.evaluate("navigator.clipboard.readText()") == QUESTION


def test_reasoning_is_collapsed_and_not_sent_again(page: Page) -> None:
    thoughts = ({"reasoning": "I <b>think</b>"}, {"reasoning": " so."}, {"content": "Yes."})
    page.route(COMPLETIONS, lambda route: route.fulfill(**replies(*thoughts)))
    ask(page)
    expect(body(page)).to_have_text("Yes.")
    expect(page.get_by_text("I <b>think</b> so.")).to_be_hidden()
    page.get_by_text("Reasoning", exact=True).click()
    expect(page.get_by_text("I <b>think</b> so.")).to_be_visible()
    with page.expect_request(COMPLETIONS) as sent:
        send(page, "Sure?")
    assert sent_texts(sent.value) == [
        QUESTION,
        "Yes.",
        "Sure?",
    ]
    wait_for_end(page)


# ---- settings and storage


def test_settings_are_those_of_the_request(page: Page, chat_engine: penstock.Engine) -> None:
    page.get_by_role("button", name="Settings").click()
    values = {"Temperature": 0.7, "Maximum tokens": 9, "Top-p": 0.9, "Top-k": 50, "Min-p": 0.01, "Seed": 42}
    for label, value in values.items():
        page.get_by_label(label).fill(str(value))
    page.get_by_label("System prompt of this chat").fill("Be brief.")
    page.get_by_role("button", name="Done").click()
    ask(page)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    params = penstock.SamplingParams(temperature=0.7, max_tokens=9, top_p=0.9, top_k=50, min_p=0.01, seed=42)
    expect(body(page)).to_have_text(chat_engine.blocking.generate(messages, params).content)
    page.reload()
    page.get_by_role("button", name="Settings").click()
    expect(page.get_by_label("Seed")).to_have_value("42")
    expect(page.get_by_label("System prompt of this chat")).to_have_value("Be brief.")
    page.get_by_role("button", name="Reset parameters").click()
    page.keyboard.press("Escape")
    with page.expect_request(COMPLETIONS) as sent:
        send(page)
    assert "seed" not in sent_fields(sent.value)
    page.keyboard.press("Escape")


def test_sampling_defaults_are_shown_unless_the_files_have_some(
    browser: Browser, chat_engine: penstock.Engine, tmp_path: Path
) -> None:
    model = write_checkpoint(tmp_path, make_config("llama"))
    (model / "generation_config.json").write_text('{"temperature": 0.3}')
    with (
        make_engine(model) as other,
        serving(penstock.server.app({"one": chat_engine, "two": other})) as server,
        opened(browser, server, {"max_tokens": 2}) as page,
    ):
        shown, models = page.locator("#sampling"), page.get_by_label("Model", exact=True)
        expect(shown).to_have_text("Temperature 0.7, Min-p 0.05, Maximum tokens 2")
        models.select_option("two")
        expect(shown).to_have_text("Maximum tokens 2")
        with page.expect_request(COMPLETIONS) as sent:
            ask(page)
        assert not {"temperature", "min_p"} & sent_fields(sent.value).keys()
        models.select_option("one")
        page.get_by_role("button", name="Settings").click()
        expect(page.get_by_label("Min-p")).to_have_attribute("placeholder", "0.05")
        page.get_by_label("Temperature").fill("0.4")
        page.get_by_role("button", name="Done").click()
        with page.expect_request(COMPLETIONS) as sent:
            ask(page)
        fields = sent_fields(sent.value)
        assert (fields["temperature"], fields["min_p"]) == (0.4, 0.05)


def test_model_is_chosen_and_remembered(browser: Browser, chat_engine: penstock.Engine) -> None:
    with (
        serving(penstock.server.app({"one": chat_engine, "two": chat_engine})) as server,
        opened(browser, server) as page,
    ):
        page.get_by_label("Model", exact=True).select_option("two")
        page.reload()
        expect(page.get_by_label("Model", exact=True)).to_have_value("two")
        with page.expect_request(COMPLETIONS) as sent:
            ask(page)
        assert sent_fields(sent.value)["model"] == "two"


def test_chats_survive_a_reload_until_they_are_removed(page: Page) -> None:
    ask(page, "First question")
    page.get_by_role("button", name="New chat").click()
    expect(answers(page)).to_have_count(0)
    ask(page, "Second question")
    text = body(page).inner_text()
    page.reload()
    expect(questions(page)).to_have_text(["Second question"])
    assert body(page).inner_text() == text
    page.get_by_role("button", name="First question", exact=True).click()
    expect(questions(page)).to_have_text(["First question"])
    page.get_by_role("button", name="Delete the chat “First question”").click()
    assert [chat["title"] for chat in stored(page)] == ["Second question"]
    expect(page.get_by_text("Chats are stored in this browser only.")).to_be_visible()
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Remove all chats").click()
    assert stored(page) == []
    page.reload()
    expect(page.get_by_text("What would you like to know?")).to_be_visible()


def test_deleted_chat_ends_its_answer_and_stays_away(
    browser: Browser, chat_server: Served, chat_engine: penstock.Engine
) -> None:
    with opened(browser, chat_server, ENDLESS) as page:
        send(page)
        expect(body(page)).not_to_be_empty()
        page.get_by_role("button", name=f"Delete the chat “{QUESTION}”").click()
        wait_until(lambda: at_rest(chat_engine))
        expect(answers(page)).to_have_count(0)
        assert stored(page) == []


def test_chats_that_cannot_be_read_are_removed(page: Page) -> None:
    ask(page)
    for number, text in enumerate(("{", "1", "{}", '{"id": "a", "time": 1, "messages": [null]}')):
        page.evaluate("([key, text]) => (localStorage[key] = text)", [f"penstock:/:chat:{number}", text])
    page.reload()
    expect(questions(page)).to_have_text([QUESTION])
    assert [chat["title"] for chat in stored(page)] == [QUESTION]


def test_number_and_size_of_stored_chats_are_bounded(page: Page) -> None:
    page.evaluate("""async () => {
        const storage = await import("/page/storage.js");
        for (let number = 0; number < 105; number += 1) {
            const chat = storage.newChat();
            const messages = [{ role: "user", content: "x" }];
            storage.saveChat({ ...chat, time: number, title: `${number}`, messages });
        }
    }""")
    assert sorted(int(chat["title"]) for chat in stored(page)) == list(range(5, 105))
    kept = page.evaluate("""async () => {
        const storage = await import("/page/storage.js");
        const long = (title, length, time) => {
            const messages = [{ role: "user", content: "x".repeat(length) }];
            return storage.saveChat({ ...storage.newChat(), time, title, messages });
        };
        return [long("one", 1_500_000, 200), long("two", 1_500_000, 201), long("three", 2_000_001, 202)];
    }""")
    assert kept == [True, True, False]
    assert [chat["title"] for chat in stored(page)] == ["two"]


def test_page_works_without_storage(
    browser: Browser, chat_server: Served, chat_engine: penstock.Engine
) -> None:
    with new_page(browser) as page:
        for name in ("localStorage", "sessionStorage"):
            page.add_init_script(f"Object.defineProperty(window, '{name}', {{ get: () => undefined.none }})")
        page.goto(chat_server.url)
        expect(page.get_by_label("Model", exact=True)).to_be_enabled()
        send(page)
        expect(body(page)).not_to_be_empty()
        page.keyboard.press("Escape")
        wait_until(lambda: at_rest(chat_engine))
