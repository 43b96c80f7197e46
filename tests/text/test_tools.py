"""Tool calls: rendering by the chat template, forced and parsed calls, results in the next turn."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

import penstock
from penstock.chat import ChatTemplate
from support.api.checkpoints import make_config, write_checkpoint
from support.api.engines import assert_at_rest, make_engine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"enum": [1, 2, 7]}},
    "required": ["city"],
    "additionalProperties": False,
}
TIME = {
    "type": "object",
    "properties": {"zone": {"enum": ["UTC", "CET"]}},
    "required": ["zone"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Weather.", "parameters": CITY}},
    {"type": "function", "function": {"name": "time", "parameters": TIME}},
]
SCHEMA_OF: dict[str, dict[str, Any]] = {"weather": CITY, "time": TIME}
ASKED = [{"role": "user", "content": "What is the weather in Paris, and what time is it?"}]
HERMES = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools>{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content %}{{ message.content }}{% endif %}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def demo(demo_model: Path) -> Iterator[penstock.Engine]:
    with penstock.Engine(demo_model, tool_parser="hermes", max_model_len=1024) as engine:
        yield engine


PLAIN = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"


def with_templates(folder: Path, templates: str | dict[str, str]) -> Path:
    """A model with random weights in this folder, and its chat template, or several by name."""
    checkpoint = write_checkpoint(folder, make_config("llama", max_position_embeddings=2048))
    file = checkpoint / "tokenizer_config.json"
    given: Any = templates
    if not isinstance(templates, str):
        given = [{"name": name, "template": template} for name, template in templates.items()]
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": given}))
    return checkpoint


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[penstock.Engine]:
    """An engine with random weights and a chat template that renders tools."""
    with make_engine(with_templates(tmp_path_factory.mktemp("hermes"), HERMES)) as engine:
        yield engine


@pytest.fixture(scope="module")
def two_templates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[penstock.Engine]:
    """An engine of a model with a chat template for tools beside the one without."""
    folder = with_templates(tmp_path_factory.mktemp("two"), {"default": PLAIN, "tool_use": HERMES})
    with make_engine(folder) as engine:
        yield engine


def check_calls(result: penstock.Result, names: set[str]) -> None:
    """At least one call, each of a known function with valid arguments; the last may be truncated."""
    is_whole = result.finish_reason == "tool_calls"
    calls = result.tool_calls if is_whole else result.tool_calls[:-1]
    assert calls
    for call in calls:
        assert call.name in names
        jsonschema.validate(json.loads(call.arguments), SCHEMA_OF[call.name])
    assert len({call.id for call in result.tool_calls}) == len(result.tool_calls)


@pytest.mark.anyio
async def test_required_call_is_a_valid_call_of_some_tool(demo: penstock.Engine) -> None:
    for seed in range(2):
        result = await demo.generate(
            ASKED, max_tokens=90, temperature=0.7, seed=seed, tools=TOOLS, tool_choice="required"
        )
        check_calls(result, {"weather", "time"})
        assert not result.content.strip()
    await assert_at_rest(demo)


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["weather", "time"])
async def test_named_call_is_a_valid_call_of_that_tool(demo: penstock.Engine, name: str) -> None:
    choice = {"type": "function", "function": {"name": name}}
    for seed in range(2):
        result = await demo.generate(
            ASKED, max_tokens=90, temperature=1.0, seed=seed, tools=TOOLS, tool_choice=choice
        )
        check_calls(result, {name})


@pytest.mark.anyio
async def test_without_parallel_calls_there_is_one_call(demo: penstock.Engine) -> None:
    for seed in range(2):
        result = await demo.generate(
            ASKED,
            max_tokens=90,
            temperature=1.0,
            seed=seed,
            tools=TOOLS,
            tool_choice="required",
            parallel_tool_calls=False,
        )
        check_calls(result, {"weather", "time"})
        assert len(result.tool_calls) == 1


NOTHING: list[dict[str, Any]] = [{}, {"parameters": {"type": "object", "properties": {}}}]
LOOSE = {
    "type": "object",
    "properties": {"pair": {"$ref": "#/$defs/pair"}},
    "required": ["pair"],
    "$defs": {"pair": {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}},
}


@pytest.mark.anyio
@pytest.mark.parametrize("parameters", NOTHING, ids=["omitted", "none"])
async def test_tool_without_parameters_is_called_without_arguments(
    hermes: penstock.Engine, parameters: dict[str, Any]
) -> None:
    tools = [{"type": "function", "function": {"name": "now", **parameters}}]
    result = await hermes.generate(
        ASKED, max_tokens=60, tools=tools, tool_choice="required", parallel_tool_calls=False
    )
    [call] = result.tool_calls
    assert (call.name, call.arguments) == ("now", "{}")


@pytest.mark.anyio
@pytest.mark.parametrize("choice", ["auto", "none", "required"])
async def test_integers_of_a_tool_may_have_64_bits(hermes: penstock.Engine, choice: Any) -> None:
    bounds = {"minimum": -(2**63), "maximum": 2**64 - 1}
    parameters = {"type": "object", "properties": {"n": {"type": "integer", **bounds}}, "required": ["n"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    result = await hermes.generate(ASKED, max_tokens=40, temperature=0, tools=tools, tool_choice=choice)
    assert f'"maximum": {2**64 - 1}' in hermes.apply_chat_template(ASKED, tools=tools)
    if choice == "required" and result.tool_calls:
        assert bounds["minimum"] <= json.loads(result.tool_calls[0].arguments)["n"] <= bounds["maximum"]


@pytest.mark.anyio
async def test_strict_tool_gets_only_its_parameters(hermes: penstock.Engine) -> None:
    tools = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": LOOSE}}]
    result = await hermes.generate(
        ASKED, max_tokens=80, temperature=1.0, tools=tools, tool_choice="required", parallel_tool_calls=False
    )
    assert json.loads(result.tool_calls[0].arguments) == {"pair": {"a": 1}}


UNIQUE = {
    "type": "object",
    "properties": {"days": {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "maxItems": 2}},
    "required": ["days"],
}


@pytest.mark.anyio
async def test_unsupported_keyword_of_a_tool_is_ignored_on_request(hermes: penstock.Engine) -> None:
    def tools(**fields: Any) -> list[dict[str, Any]]:
        return [{"type": "function", "function": {"name": "f", "parameters": UNIQUE, **fields}}]

    message = (
        r'^tools: keywords that are not supported: \["uniqueItems"\]; .*"ignore_unsupported": true beside'
    )
    for fields in ({}, {"ignore_unsupported": False}):
        with pytest.raises(penstock.InvalidRequestError, match=message) as raised:
            await hermes.generate(ASKED, max_tokens=1, tools=tools(**fields), tool_choice="required")
        assert (raised.value.field, raised.value.value) == ("tools", tools(**fields))
    lenient = tools(ignore_unsupported=True)
    result = await hermes.generate(ASKED, max_tokens=60, tools=lenient, tool_choice="required", temperature=0)
    assert set(json.loads(result.tool_calls[0].arguments)["days"]) <= {1, 2}
    misplaced = [{**tools()[0], "ignore_unsupported": True}]
    with pytest.raises(penstock.InvalidRequestError, match="'ignore_unsupported' in the function"):
        await hermes.generate(ASKED, max_tokens=1, tools=misplaced, tool_choice="required")


@pytest.mark.anyio
async def test_tools_not_rendered_need_a_required_or_named_call(demo: penstock.Engine) -> None:
    for choice in ("auto", None):
        with pytest.raises(penstock.InvalidRequestError, match="does not render tools") as raised:
            await demo.generate(ASKED, max_tokens=1, tools=TOOLS, tool_choice=choice)
        assert raised.value.field == "tools"
    assert (await demo.generate(ASKED, max_tokens=1, tools=TOOLS, tool_choice="none")).token_ids
    broken = [{"type": "function", "function": {"name": "f", "parameters": {"type": "banana"}}}]
    with pytest.raises(penstock.InvalidRequestError) as raised:
        await demo.generate(ASKED, max_tokens=1, tools=broken, tool_choice="required")
    assert raised.value.field == "tools"


@pytest.mark.anyio
async def test_part_of_a_required_call_is_not_content(demo: penstock.Engine) -> None:
    asked: Any = {"temperature": 0.7, "seed": 2, "tools": TOOLS, "tool_choice": "required"}
    whole = await demo.generate(ASKED, max_tokens=90, **asked)
    assert len(whole.tool_calls) > 1
    limits = range(1, whole.usage.completion_tokens)
    params = [penstock.SamplingParams(max_tokens=limit, **asked) for limit in limits]
    async for item in demo.generate_many([{"messages": ASKED}] * len(params), params):
        assert item.result is not None
        assert whole.text.startswith(item.result.text)
        assert item.result.content == ""


@pytest.mark.anyio
async def test_joined_call_deltas_equal_the_calls_of_the_result(demo: penstock.Engine) -> None:
    async with demo.stream(
        ASKED, max_tokens=90, temperature=0.7, seed=2, tools=TOOLS, tool_choice="required"
    ) as request:
        calls: dict[int, dict[str, str]] = {}
        text = ""
        async for chunk in request:
            text += chunk.text
            for delta in chunk.tool_calls:
                if delta.id is not None:
                    assert delta.name is not None
                    calls[delta.index] = {"id": delta.id, "name": delta.name, "arguments": ""}
                calls[delta.index]["arguments"] += delta.arguments
        result = await request.result()
    assert text == result.text
    assert [calls[index] for index in sorted(calls)] == [
        {"id": call.id, "name": call.name, "arguments": call.arguments} for call in result.tool_calls
    ]


@pytest.mark.anyio
async def test_template_renders_tools_for_every_tool_choice(hermes: penstock.Engine) -> None:
    without = hermes.apply_chat_template(ASKED)
    shown = hermes.apply_chat_template(ASKED, tools=TOOLS)
    assert shown == "<tools>" + "".join(json.dumps(tool) + "\n" for tool in TOOLS) + "</tools>" + without
    for choice in ("none", "auto", None):
        result = await hermes.generate(ASKED, max_tokens=1, tools=TOOLS, tool_choice=choice)
        assert result.prompt_token_ids == tuple(hermes.encode(shown, add_special_tokens=False))
    assert (await hermes.generate(ASKED, max_tokens=1)).prompt_token_ids == tuple(
        hermes.encode(without, add_special_tokens=False)
    )


NAMED = {"type": "function", "function": {"name": "time"}}


@pytest.mark.anyio
@pytest.mark.parametrize("choice", [None, "auto", "required", NAMED, "none"])
async def test_template_for_tools_is_used_for_every_choice(
    two_templates: penstock.Engine, choice: Any
) -> None:
    engine = two_templates
    shown = engine.apply_chat_template(ASKED, tools=TOOLS)
    assert shown == engine.apply_chat_template(ASKED, tools=TOOLS, chat_template=HERMES)
    result = await engine.generate(ASKED, max_tokens=1, tools=TOOLS, tool_choice=choice)
    assert result.prompt_token_ids == tuple(engine.encode(shown, add_special_tokens=False))


@pytest.mark.anyio
async def test_given_template_takes_precedence_over_that_for_tools(two_templates: penstock.Engine) -> None:
    engine = two_templates
    plain = engine.apply_chat_template(ASKED)
    assert plain == "<user>" + ASKED[0]["content"] == engine.apply_chat_template(ASKED, tools=[])
    for template in ("default", PLAIN):
        assert engine.apply_chat_template(ASKED, tools=TOOLS, chat_template=template) == plain
        with pytest.raises(penstock.InvalidRequestError, match="does not render tools"):
            await engine.generate(ASKED, max_tokens=1, tools=TOOLS, chat_template=template)
        options: Any = {"tools": TOOLS, "tool_choice": "required", "chat_template": template}
        result = await engine.generate(ASKED, max_tokens=1, **options)
        assert result.prompt_token_ids == tuple(engine.encode(plain, add_special_tokens=False))


@pytest.mark.anyio
async def test_model_may_have_only_a_template_for_tools(tmp_path: Path) -> None:
    async with make_engine(with_templates(tmp_path, {"tool_use": HERMES})) as engine:
        shown = engine.apply_chat_template(ASKED, tools=TOOLS)
        ids = tuple(engine.encode(shown, add_special_tokens=False))
        for choice in ("auto", "required"):
            result = await engine.generate(ASKED, max_tokens=1, tools=TOOLS, tool_choice=choice)
            assert result.prompt_token_ids == ids
        with pytest.raises(penstock.InvalidRequestError, match="chat templates are 'tool_use'") as raised:
            await engine.generate(ASKED, max_tokens=1)
        assert raised.value.field == "chat_template"


@pytest.mark.anyio
async def test_required_call_of_tools_that_are_not_shown_warns(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with make_engine(tiny_model, tool_parser="hermes") as engine:
        for choice in ("none", "required", NAMED):
            await engine.generate(ASKED, max_tokens=1, tools=TOOLS, tool_choice=choice)
            found = [record for record in caplog.records if "does not render tools" in record.getMessage()]
            assert len(found) == (0 if choice == "none" else 1)


@pytest.mark.anyio
@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_template_that_presents_tools_renders_once(
    two_templates: penstock.Engine,
    choice: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await two_templates.generate(ASKED, max_tokens=1, tools=TOOLS, tool_choice=choice)
    rendered: list[Any] = []
    render = ChatTemplate.render

    def counted(*args: Any, **options: Any) -> str:
        rendered.append(args)
        return render(*args, **options)

    monkeypatch.setattr(ChatTemplate, "render", counted)
    for number in (1, 2):
        await two_templates.generate(ASKED, max_tokens=1, tools=TOOLS, tool_choice=choice)
        assert len(rendered) == number
    assert "does not render tools" not in caplog.text


@pytest.mark.anyio
async def test_template_with_tools_in_some_chats_is_checked_again(tmp_path: Path) -> None:
    template = "{% if messages[0].role == 'system' %}<tools>{{ tools | tojson }}</tools>{% endif %}<user>"
    async with make_engine(with_templates(tmp_path, {"default": template}), tool_parser="hermes") as engine:
        system = [{"role": "system", "content": "Be brief."}, *ASKED]
        await engine.generate(system, max_tokens=1, tools=TOOLS)
        with pytest.raises(penstock.InvalidRequestError, match="does not render tools"):
            await engine.generate(ASKED, max_tokens=1, tools=TOOLS)


@pytest.mark.anyio
async def test_tool_format_is_detected_from_the_template(hermes: penstock.Engine) -> None:
    result = await hermes.generate(
        ASKED, max_tokens=300, seed=1, tools=TOOLS, tool_choice="required", parallel_tool_calls=False
    )
    assert result.text.lstrip().startswith("<tool_call>")
    assert result.tool_calls[0].name in SCHEMA_OF


@pytest.mark.anyio
async def test_requests_do_not_change_the_tool_format(hermes: penstock.Engine, tmp_path: Path) -> None:
    call: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    tags = "[TOOL_CALLS] <function= <arg_key>"
    asked = [{"role": "user", "content": tags}]
    result = await hermes.generate(asked, max_tokens=300, seed=1, chat_template=HERMES + tags, **call)
    assert result.text.lstrip().startswith("<tool_call>")
    assert result.tool_calls[0].name in SCHEMA_OF
    asked = [{"role": "user", "content": HERMES}]
    async with make_engine(with_templates(tmp_path, PLAIN)) as engine:
        with pytest.raises(penstock.InvalidRequestError, match="tool_parser"):
            await engine.generate(asked, max_tokens=1, chat_template=HERMES, **call)


@pytest.mark.anyio
async def test_tool_choice_none_makes_no_call(demo: penstock.Engine) -> None:
    spelled = [
        {"role": "user", "content": 'Repeat: <tool_call>{"name": "time", "arguments": {}}</tool_call>'}
    ]
    result = await demo.generate(spelled, max_tokens=60, temperature=0, tools=TOOLS, tool_choice="none")
    assert result.tool_calls == ()
    assert result.content == result.text


@pytest.mark.anyio
async def test_tool_call_and_result_are_rendered_by_the_template(hermes: penstock.Engine) -> None:
    asked = await hermes.generate(
        ASKED, max_tokens=300, seed=1, tools=TOOLS, tool_choice="required", parallel_tool_calls=False
    )
    [call] = asked.tool_calls
    spelled = {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
    answer = {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"}
    turns: list[list[dict[str, Any]]] = [
        [*ASKED, {"role": "assistant", "content": asked.content, "tool_calls": calls}, answer]
        for calls in (asked.tool_calls, [spelled])
    ]
    first, second = (hermes.apply_chat_template(turn, tools=TOOLS) for turn in turns)
    assert first == second
    arguments = json.dumps(json.loads(call.arguments), ensure_ascii=False)
    assert f'{{"name": "{call.name}", "arguments": {arguments}}}' in first
    assert "<|im_start|>tool\n21 degrees<|im_end|>" in first
    assert (await hermes.generate(turns[0], max_tokens=4, tools=TOOLS)).token_ids


def test_call_arguments_that_are_an_object_render_as_a_mapping() -> None:
    template = ChatTemplate("{{ messages[0].tool_calls[0].function.arguments is mapping }}", {})

    def is_mapping(arguments: Any) -> bool:
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        return template.render([{"role": "assistant", "tool_calls": [call]}]) == "True"

    assert is_mapping('{"a": [1, {"b": null}]}')
    assert is_mapping({"a": 1})
    assert is_mapping("no object")
    empty = ChatTemplate("{{ 'tool_calls' in messages[0] }}", {})
    assert empty.render([{"role": "assistant", "content": "x", "tool_calls": ()}]) == "False"
    with pytest.raises(penstock.InvalidRequestError, match=r"messages\[0\].tool_calls is 'x'"):
        empty.render([{"role": "assistant", "tool_calls": "x"}])


@pytest.mark.anyio
async def test_tools_require_messages_and_a_known_format(hermes: penstock.Engine, tiny_model: Path) -> None:
    for prompt in ("What is the weather?", [1, 2, 3]):
        with pytest.raises(penstock.InvalidRequestError, match="chat") as raised:
            await hermes.generate(prompt, tools=TOOLS)
        assert raised.value.field == "tools"
    async with make_engine(tiny_model) as engine:
        with pytest.raises(penstock.InvalidRequestError, match="tool_parser") as raised:
            await engine.generate(ASKED, tools=TOOLS, tool_choice="required")
        assert raised.value.field == "tools"
        await assert_at_rest(engine)
