"""Chat options of a request: template, variables, documents, generation prompt, continuation, objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import penstock
from support.api.engines import SHORT, make_engine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "user", "content": "Hi"}]
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}</>{% endfor %}"
    "{% for document in documents or [] %}[{{ document.text }}]{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<no thinking>{% endif %}"
)
CASES: list[tuple[dict[str, Any], str]] = [
    ({}, "<user>Hi</><assistant>"),
    ({"chat_template_kwargs": {"enable_thinking": False}}, "<user>Hi</><assistant><no thinking>"),
    ({"documents": [{"text": "one"}]}, "<user>Hi</>[one]<assistant>"),
    ({"add_generation_prompt": False}, "<user>Hi</>"),
    ({"continue_final_message": True}, "<user>Hi"),
]


class Model:
    """Like a pydantic model."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def model_dump(self) -> dict[str, Any]:
        """The fields."""
        return dict(self.fields)


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    with make_engine(tiny_model) as engine:
        yield engine


@pytest.mark.parametrize(("options", "expected"), CASES)
async def test_chat_options_apply_to_every_call(
    engine: penstock.Engine, options: dict[str, Any], expected: str
) -> None:
    assert engine.apply_chat_template(MESSAGES, chat_template=TEMPLATE, **options) == expected
    ids = tuple(engine.encode(expected, add_special_tokens=False))
    options = {**options, "chat_template": TEMPLATE}
    results = [
        await engine.generate(MESSAGES, SHORT, **options),
        engine.blocking.generate(MESSAGES, SHORT, **options),
        await (await engine.start_request(MESSAGES, SHORT, **options)).result(),
    ]
    async for item in engine.generate_many([MESSAGES], SHORT, **options):
        assert item.result is not None
        results.append(item.result)
    assert [result.prompt_token_ids for result in results] == [ids] * 4


async def test_continued_message_may_repeat_an_earlier_one(engine: penstock.Engine) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "Hi"}]
    text = engine.apply_chat_template(messages, chat_template=TEMPLATE, continue_final_message=True)
    assert text == "<user>Hi</><assistant>Hi"


async def test_messages_may_be_objects_with_model_dump(engine: penstock.Engine) -> None:
    call = Model(id="1", type="function", function=Model(name="f", arguments="{}"))
    messages = [
        Model(role="user", content="Hi", name=None),
        Model(role="assistant", content=None, tool_calls=[call]),
        {"role": "tool", "content": "3"},
    ]
    plain = [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call.model_dump() | {"function": {"name": "f"}}],
        },
        {"role": "tool", "content": "3"},
    ]
    text = engine.apply_chat_template(messages, chat_template=TEMPLATE)
    assert text == engine.apply_chat_template(plain, chat_template=TEMPLATE)
    assert (await engine.generate(messages, SHORT)).finish_reason == "length"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"chat_template": 3}, "chat_template"),
        ({"chat_template": "missing"}, "chat_template"),
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs['tools']"),
        ({"add_generation_prompt": "yes"}, "add_generation_prompt"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "add_generation_prompt"),
        ({"chat_template": "{{ 1 }}", "continue_final_message": True}, "continue_final_message"),
    ],
)
async def test_wrong_chat_option_is_refused_by_name(
    engine: penstock.Engine, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(penstock.InvalidRequestError) as caught:
        await engine.generate(MESSAGES, SHORT, **options)
    assert caught.value.field == field


async def test_chat_option_of_a_text_prompt_is_refused(engine: penstock.Engine) -> None:
    with pytest.raises(penstock.InvalidRequestError, match="prompt is not a chat") as caught:
        await engine.generate("Hi", SHORT, chat_template_kwargs={"enable_thinking": False})
    assert caught.value.field == "chat_template_kwargs"
