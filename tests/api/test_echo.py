"""`echo`: the text begins with the prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from support.api.engines import LONG, PROMPT, SHORT, make_engine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import penstock
    from penstock._options import Prompt

pytestmark = pytest.mark.anyio

TEXT = "Wake me up, \u00e9 and all."
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    with make_engine(tiny_model) as engine:
        yield engine


async def test_echoed_text_begins_with_the_prompt(engine: penstock.Engine) -> None:
    special = [257, *PROMPT]
    prompts: list[tuple[Prompt, str]] = [
        (TEXT, TEXT),
        (PROMPT, engine.decode(PROMPT)),
        (special, engine.decode(special)),
        (MESSAGES, engine.apply_chat_template(MESSAGES)),
    ]
    for prompt, prefix in prompts:
        plain = await engine.generate(prompt, LONG)
        echoed = await engine.generate(prompt, LONG, echo=True)
        assert echoed.text == prefix + plain.text
        assert echoed.content == plain.text
        assert echoed.token_ids == plain.token_ids
        assert echoed.usage.completion_tokens == plain.usage.completion_tokens
    shown = await engine.generate(special, SHORT, echo=True, skip_special_tokens=False)
    assert shown.text.startswith("<|im_start|>")


async def test_tokens_complete_the_last_character_of_the_prompt(engine: penstock.Engine) -> None:
    *begin, last = engine.encode("Hello \u00e9")
    assert engine.decode(begin) == "Hello \ufffd"
    options: dict[str, Any] = {"echo": True, "temperature": 0.0, "logit_bias": {last: 100.0}}
    for number, text in ((1, "Hello \u00e9"), (2, "Hello \u00e9\ufffd")):
        result = await engine.generate(begin, max_tokens=number, **options)
        assert (result.text, result.content) == (text, text.removeprefix("Hello "))
        async with engine.stream(begin, max_tokens=number, n=2, **options) as request:
            texts = ["", ""]
            async for chunk in request:
                texts[chunk.index] += chunk.text
        assert texts == [text, text]
    # The text ends before the sequence, which begins with the rest of the character.
    stopped = await engine.generate(begin, max_tokens=4, stop_token_sequences=[[last, last]], **options)
    assert (stopped.text, stopped.finish_reason) == ("Hello \ufffd", "stop")


async def test_first_chunk_of_each_choice_begins_with_the_echo(engine: penstock.Engine) -> None:
    request = await engine.start_request(TEXT, LONG, echo=True, n=3, temperature=1.0)
    texts = ["", "", ""]
    contents = ["", "", ""]
    async for chunk in request:
        if not texts[chunk.index]:
            assert chunk.text.startswith(TEXT)
            assert chunk.token_ids
        texts[chunk.index] += chunk.text
        contents[chunk.index] += chunk.content
    result = await request.result()
    assert texts == [choice.text for choice in result.choices]
    assert contents == [choice.content for choice in result.choices]
    assert [TEXT + content for content in contents] == texts


async def test_stop_strings_are_not_matched_in_the_echo(engine: penstock.Engine) -> None:
    plain = await engine.generate(TEXT, LONG)
    assert "Wake" not in plain.text
    result = await engine.generate(TEXT, LONG, echo=True, stop=["Wake me", ". "[:1] + plain.text[:3]])
    assert result.text == TEXT + plain.text
    assert result.finish_reason == "length"
