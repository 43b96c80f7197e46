"""Chat templates: parity with Hugging Face, errors that name the field, and limits on hostile templates."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from penstock import _chat_costs, _chat_sandbox, _json, _renderer, chat
from penstock.chat import Chat, ChatTemplate
from penstock.errors import InvalidRequestError
from support.api.engines import start_python
from support.parity import templates

if TYPE_CHECKING:
    from pathlib import Path

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' ~ (tool_call.arguments | tojson) ~ "}<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
        {{- "<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim }}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = (
    "{{ bos_token }}{% set ns = namespace(index=0) %}{% for message in messages %}"
    "{% if message['role'] not in ['user', 'assistant'] %}{% continue %}{% endif %}"
    "{% if (message['role'] == 'user') != (ns.index % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% set ns.index = ns.index + 1 %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
)

QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n') %}
            {%- set reasoning_content = reasoning_content.split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if loop.index0 > ns.last_query_index %}
            {{- '<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- set tool_call = tool_call.function if tool_call.function else tool_call %}
            {{- '\\n<tool_call>\\n{"name": "' ~ tool_call.name ~ '", "arguments": ' }}
            {{- tool_call.arguments if tool_call.arguments is string else tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

# Blocks on separate lines, comments, macros, captured blocks, filters of many kinds.
ODD = """\
{# a comment #}
{%- macro entry(key, value, depth=0) -%}
    {{ '  ' * depth }}{{ key }}: {{ value if value is string else value | tojson(sort_keys=true) }}
{% endmacro %}
  {% for message in messages %}
    {% if loop.index > 3 %}{% break %}{% endif %}
{{ entry(message.role | upper, message.content | default('nothing'), loop.index) }}
  {% endfor %}
{% set block %}<{{ messages | map(attribute='role') | join(', ') }}>{% endset %}
{{ block | replace('<', '[') | replace('>', ']') | indent(2, true) }}
{{ '%s has %d, %.2f' | format('x', 3, 0.5) }} {{ '%s-%03d' % ('a', 7) }} {{ '{}|{:>6}'.format('é', 'b') }}
{{ dict(a=1, b=[1, 2]) | dictsort | tojson }} {{ 'a,b'.split(',') | batch(1) | list }} {{ 'ab' | center(7) }}|
{{ messages | selectattr('role', 'equalto', 'user') | list | length }} {{ 2 ** 10 }}
{{ [0] * 3 + [1] }} {{ missing }}
"""

OPEN = "<|im_start|>assistant\n"

PLAIN: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief. ünïcödé 漢字 👩‍🚀 <b>&amp;</b> \"quotes\" 'single'"},
    {"role": "user", "content": "  What is 1+1?\n\n"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nIt is 2."},
    {"role": "user", "content": "{{ 7*7 }} {% raw %} <|im_end|>"},
]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Wetter in <Städten> & 都市",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]

WITH_TOOLS: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather in Köln?"},
    {
        "role": "assistant",
        "content": None,
        "reasoning": "I should look.",
        "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}],
    },
    {"role": "tool", "content": '{"°C": 21.5}'},
]


# The start of a loop that makes `n.x` longer, and a list whose two items are the same list, repeatedly.
DOUBLE = "{% set n = namespace(x='0123456789') %}{% for i in range(99) %}"
NEST = (
    "{{% set n = namespace(x=['0123456789']) %}}"
    "{{% for i in range({}) %}}{{% set n.x = [n.x, n.x] %}}{{% endfor %}}"
)

# Keeps many copies of a value.
ESCAPE = "{{% for i in range(9) %}}{{% set x = ('\U0010ffff' * 500000)|tojson({}) %}}{{% endfor %}}"
KEEP = (
    "{{% set v = {} %}}{{% set n = namespace(x=[]) %}}"
    "{{% for i in range(99999) %}}{{% set n.x = [n.x, {}] %}}{{% endfor %}}"
)


def render(source: str, messages: Any = None, **variables: Any) -> str:
    prompted = {name: variables.pop(name) for name in ("add_generation_prompt",) if name in variables}
    messages = messages or [{"role": "user", "content": "hi"}]
    return ChatTemplate(source, TOKENS).render(messages, variables, **prompted)


def render_open(source: str, content: Any, *earlier: dict[str, Any], **message: Any) -> str:
    """A chat whose last message is continued."""
    messages = [*earlier, {"role": "assistant", "content": content, **message}]
    chat = Chat(messages, continue_final_message=True, chat_template_kwargs={"date_string": "26 Jul 2024"})
    return chat.render(ChatTemplate(source, TOKENS))


@pytest.mark.oracle
@pytest.mark.parametrize(
    "source", [CHATML, LLAMA3, MISTRAL, QWEN, ODD], ids=["chatml", "llama3", "mistral", "qwen", "odd"]
)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize(
    ("messages", "variables"),
    [
        (PLAIN, {}),
        (PLAIN[1:], {}),
        (PLAIN, {"enable_thinking": False}),
        (PLAIN, {"tools": TOOLS}),
        (WITH_TOOLS, {"tools": TOOLS}),
        ([*PLAIN, {"role": "assistant", "content": "ok"}], {}),
        (PLAIN[2:3], {}),
    ],
)
def test_text_is_equal_to_transformers(
    source: str, *, add_generation_prompt: bool, messages: list[dict[str, Any]], variables: dict[str, Any]
) -> None:
    # LLAMA3 has the date of today.
    options = {"add_generation_prompt": add_generation_prompt, "date_string": "26 Jul 2024", **variables}
    # Errors must be the same, except for missing content beside tool calls.
    expected = templates.render(source, messages, TOKENS, **options)
    if expected is None:
        assert source in {CHATML, LLAMA3, MISTRAL}
        with pytest.raises(InvalidRequestError, match="rejects these messages"):
            render(source, messages, **options)
    else:
        assert render(source, messages, **options) == expected


def test_date_of_today_is_that_of_the_host() -> None:
    days = {datetime.now(tz=timezone).strftime("%d %b %Y") for timezone in (UTC, None)}
    assert render(LLAMA3).split("Today: ")[1][:11] in days


def test_chatml_conversation() -> None:
    assert render(CHATML, PLAIN[1:2]) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n  What is 1+1?\n\n<|im_end|>\n<|im_start|>assistant\n"
    )


def test_block_lines_are_removed() -> None:
    source = "  {% for message in messages %}\n{{ message.role }}\n  {% endfor %}\nend\n"
    assert render(source) == "user\nend"


def test_tojson_is_equal_to_hugging_face() -> None:
    assert render("{{ tools | tojson }}", tools=[{"ä": "<&'>", "n": None}]) == '[{"ä": "<&\'>", "n": null}]'
    value = {"b": [1, 2], "a": "x"}
    assert render("{{ tools | tojson(indent=2, sort_keys=true) }}", tools=value) == json.dumps(
        value, indent=2, sort_keys=True
    )


def test_template_sees_special_tokens_and_variables() -> None:
    assert render("{{ bos_token }}{{ answer }}{{ eos_token }}", answer=42) == "<s>42</s>"
    assert (
        render("{{ tools is none }} {{ documents is none }} {{ pad_token is defined }}") == "True True False"
    )
    assert render("{{ strftime_now('%%') }}") == "%"


def test_reasoning_is_read_from_each_key() -> None:
    for name in ("reasoning_content", "thinking", "reasoning"):
        message = {"role": "assistant", "content": "", name: "hm"}
        assert render("{{ messages[0].reasoning_content }}", [message]) == "hm"


def test_tool_call_without_content_gets_empty_content() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [PLAIN[0], {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert "<|im_start|>assistant\n<|im_end|>\n" in render(CHATML, messages)


def test_content_of_the_assistant_and_of_tools_may_be_null() -> None:
    for role in ("assistant", "tool"):
        messages: list[dict[str, Any]] = [{"role": role, "content": None}, {"role": role}]
        for message in messages:
            text = render(CHATML, [*PLAIN[:1], message])
            assert text.endswith(f"<|im_start|>{role}\n<|im_end|>\n" + OPEN)
    with pytest.raises(InvalidRequestError, match="content"):
        render(CHATML, [{"role": "user", "content": None}])


BAD_ARGUMENTS = ("", " ", "null", "{", '{"a": 1', "[1]", '"x"', "7", None, [1], 7, "[" * 5000, "1" * 5000)


@pytest.mark.oracle
@pytest.mark.parametrize("source", [QWEN, LLAMA3], ids=["qwen", "llama3"])
def test_arguments_that_are_no_object_are_rendered_empty(source: str) -> None:
    def messages(**arguments: Any) -> list[dict[str, Any]]:
        calls = [{"id": "1", "type": "function", "function": {"name": "weather", **arguments}}]
        return [PLAIN[1], {"role": "assistant", "content": "", "tool_calls": calls}, WITH_TOOLS[2]]

    options = {"tools": TOOLS, "date_string": "26 Jul 2024", "add_generation_prompt": True}
    empty = templates.render(source, messages(arguments={}), TOKENS, **options)
    assert empty is not None
    assert render(source, messages(), **options) == empty
    for arguments in BAD_ARGUMENTS:
        assert render(source, messages(arguments=arguments), **options) == empty
    full = templates.render(source, messages(arguments={"city": "Köln"}), TOKENS, **options)
    assert render(source, messages(arguments='{"city": "K\\u00f6ln"}'), **options) == full


def test_arguments_of_a_call_without_function_are_decoded_too() -> None:
    source = "{{ messages[0].tool_calls[0].arguments | tojson }}"
    for arguments, expected in (('{"a": 1}', '{"a": 1}'), ("", "{}"), (None, "{}")):
        calls = [{"name": "f", "arguments": arguments}]
        assert render(source, [{"role": "assistant", "tool_calls": calls}]) == expected


def test_values_of_arguments_have_a_limit() -> None:
    def called(arguments: str) -> list[dict[str, Any]]:
        return [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]

    text = json.dumps({"a": [[]] * 30_000, "b": "[{," * 50_000})
    assert chat.is_large(called(text))
    assert not chat.is_large(called('{"a": 1}'))
    assert json.loads(render("{{ messages[0].tool_calls[0].function.arguments | tojson }}", called(text)))
    with pytest.raises(InvalidRequestError, match="have 80001 values; the limit is 65536") as raised:
        render(CHATML, called(json.dumps({"a": [[]] * 40_000})))
    assert raised.value.field == "messages"
    # All calls of a chat count together.
    many = called(json.dumps({"a": [[]] * 20_000})) * 2
    with pytest.raises(InvalidRequestError, match="have 80002 values; the limit is 65536"):
        render(CHATML, many)


def test_lone_surrogate_in_arguments_is_replaced() -> None:
    source = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    function = {"name": "f", "arguments": '{"a": "x\\ud83d", "\\udc00": "\\ud83d\\ude00"}'}
    message = {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
    assert render(source, [message]) == '{"a": "x\ufffd", "\ufffd": "😀"}'


CONTINUED = ["e", "<", "end", "assistant", "|im_start|>", "_", "0", "ok", " ok", "ok ", "ok\n", "\nok \n\n"]
CONTINUED += ["<think>\nhm", "<think>\nhm\n</think>\n\nIt is", "", " ", "\n", " \n "]


@pytest.mark.oracle
@pytest.mark.parametrize(
    "source", [CHATML, LLAMA3, MISTRAL, QWEN], ids=["chatml", "llama3", "mistral", "qwen"]
)
@pytest.mark.parametrize("content", CONTINUED)
def test_continued_text_is_equal_to_transformers(source: str, content: str) -> None:
    messages = [PLAIN[1], {"role": "assistant", "content": content}]
    options = {"date_string": "26 Jul 2024", "continue_final_message": True}
    expected = templates.render(source, messages, TOKENS, **options)
    assert expected is not None
    if source == LLAMA3 and not content.strip():
        # transformers removes the template's own white space, too, if the template strips the content.
        expected += "\n\n"
    assert render_open(source, content, PLAIN[1]) == expected


WRITTEN = "<a>{{ messages[-1].content%s }}%s"


@pytest.mark.parametrize(
    ("source", "content", "expected"),
    [
        (WRITTEN % (" | trim", "\n</a>"), "ok\n", "<a>ok"),
        (WRITTEN % (" | trim", " </a>"), " ok ", "<a>ok"),
        (WRITTEN % (" | trim", "\n</a>"), "\n\n", "<a>"),
        (WRITTEN % (".strip('\n')", "</a>"), "ok \n", "<a>ok "),
        (WRITTEN % (".rstrip()", "</a>"), "  ", "<a>"),
        (WRITTEN % (".lstrip()", "</a>"), "  ", "<a>"),
        (WRITTEN % ("", "\n\n</a>"), "ok\n", "<a>ok\n"),
        (WRITTEN % ("", "{{ messages[0].content }}"), "ok", "<a>ok"),
        (WRITTEN % (" | tojson", "</a>"), "ok", '<a>"ok'),
        ("{{ messages[-1].content }}" + WRITTEN % ("", "</a>"), "ok", "ok<a>ok"),
        ("{{ messages[-1].content }}" + WRITTEN % ("", "</a>"), "ok ", "ok <a>ok "),
        ("{% if messages[-1].content %}" + WRITTEN % ("", "</a>") + "{% endif %}", "", "<a>"),
        ("{% if messages[-1].content.strip() %}" + WRITTEN % ("", "</a>") + "{% endif %}", " ", "<a>"),
    ],
)
def test_continued_text_ends_after_the_content(source: str, content: str, expected: str) -> None:
    assert render_open(source, content, PLAIN[1]) == expected


@pytest.mark.parametrize(
    ("content", "end"),
    [
        ([], ""),
        ([{"type": "text", "text": ""}], ""),
        ([{"type": "text", "text": "a "}, {"type": "text", "text": "e"}], "a e"),
        ([{"type": "text", "text": "e"}, {"type": "text", "text": "e \n"}], "ee \n"),
        (None, ""),
    ],
)
def test_continued_content_may_be_parts_or_null(content: Any, end: str) -> None:
    source = (
        "{% for message in messages %}<{{ message.role }}>{% if message.content is string %}"
        "{{ message.content }}{% else %}{% for part in message.content %}{{ part.text }}{% endfor %}"
        "{% endif %}<end>{% endfor %}"
    )
    assert render_open(source, content, PLAIN[1]).endswith("<end><assistant>" + end)
    assert render_open(CHATML, content, PLAIN[1]).endswith("<|im_start|>assistant\n" + end)


def test_continued_content_follows_the_reasoning() -> None:
    for content in ("", "e", "\n"):
        text = render_open(QWEN, content, PLAIN[1], reasoning="hm")
        assert text.endswith("<|im_start|>assistant\n<think>\nhm\n</think>\n\n" + content)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content }}",
        "{{ messages[-1].content | upper }}",
        "{{ messages[-1].content.split('</think>')[-1] }}",
        "{{ messages[-1].content[:3] }}",
        "{{ messages[-1].content | length }}",
    ],
)
def test_content_that_the_template_changes_is_refused(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="does not write its content unchanged") as raised:
        render_open(source, "<think>hm</think>yes", {"role": "user", "content": "<think>hm</think>yes"})
    assert raised.value.field == "continue_final_message"


def test_only_white_space_at_the_end_is_rendered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []

    def counted(*args: Any) -> str:
        texts.append(rendered(*args))
        return texts[-1]

    rendered = _chat_sandbox.render
    monkeypatch.setattr(_chat_sandbox, "render", counted)
    for content, number in (("", 1), ("ok", 1), (" ok", 1), ("ok ", 2), ("\n", 2)):
        texts.clear()
        render_open(CHATML, content, PLAIN[1])
        assert len(texts) == number


PARTS = [{"role": "user", "content": [{"type": "text", "text": "It's "}, {"type": "text", "text": "me"}]}]
IMAGE = [{"role": "user", "content": [{"type": "text", "text": "Look"}, {"type": "image", "url": "x"}]}]


@pytest.mark.parametrize(
    "source",
    [
        CHATML,
        "{{ messages[0].content }}",
        "{{ messages[0].content | trim }}",
        "{{ messages[0].content | tojson }}",
        "{{ messages[0]['content'] ~ '' }}",
    ],
)
def test_text_parts_are_joined_if_template_lacks_parts(source: str) -> None:
    whole = [{"role": "user", "content": "It's me"}]
    assert render(source, PARTS) == render(source, whole)
    with pytest.raises(
        InvalidRequestError,
        match=r"messages\[0\].content\[1\] is .* must be a text: the model reads text only",
    ):
        render(source, IMAGE)


def test_parts_are_passed_to_a_template_that_supports_them() -> None:
    source = "{% for part in messages[0].content %}<{{ part.type }}>{{ part.text }}{% endfor %}"
    assert render(source, PARTS) == "<text>It's <text>me"
    assert render(source, IMAGE) == "<text>Look<image>"


def test_messages_of_the_caller_are_unchanged() -> None:
    message = {"role": "user", "content": None, "reasoning": "hm", "extra": [1]}
    render("{{ messages[0] }}", [message])
    assert message == {"role": "user", "content": None, "reasoning": "hm", "extra": [1]}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ("hi", "messages is 'hi'; it must be a list of messages"),
        ({"role": "user"}, "messages is {'role': 'user'}; it must be a list"),
        (7, "messages is 7; it must be a list"),
        ([], "messages is []; it must be at least one message"),
        (["hi"], r"messages[0] is 'hi'; it must be a mapping with role and content"),
        ([{"content": "x"}], "messages[0].role is missing; it must be a string"),
        ([PLAIN[0], {"role": 1, "content": "x"}], "messages[1].role is 1; it must be a string"),
        (
            [{"role": "user", "content": 5}],
            "messages[0].content is 5; it must be a string or a list of parts",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"text": "b"}]}],
            "messages[0].content[1] is {'text': 'b'}; it must be a mapping with a string 'type'",
        ),
        (
            [{"role": "user", "content": "a\ud800b"}],
            "messages[0].content has a lone surrogate, U+D800, at position 1",
        ),
        (
            [{"role": "user", "content": "a", "x": {"y": [object]}}],
            "messages[0].x.y[0] is <class 'object'>; it must be a",
        ),
        ([{"role": "user", "content": "a", "x": {1: 2}}], "a key of messages[0].x is 1; it must be a string"),
        (
            [{"role": "user", "content": "a", "x": [0, {"\ud800": 2}]}],
            "a key of messages[0].x[1] has a lone surrogate, U+D800, at position 0",
        ),
        (
            [{"role": "user", "content": "a", "x" * 65: {"y": "\ud800"}}],
            f"messages[0].{'x' * 64}....y has a lone surrogate, U+D800, at position 0",
        ),
    ],
)
def test_malformed_message_error_names_the_field(messages: Any, expected: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        ChatTemplate(CHATML, TOKENS).render(messages)
    assert str(raised.value).startswith(expected)
    assert raised.value.field is not None


def test_place_of_a_valid_value_is_not_written() -> None:
    class Key(str):
        """A key that may be long: it is not copied for each value."""

        __slots__ = ()

        def __format__(self, spec: str) -> str:
            raise AssertionError

        __str__ = __repr__ = __format__  # type: ignore[assignment]

    [message] = chat.checked([{"role": "user", "content": "a", Key("x"): {Key("y"): [1, {Key("z"): 2}]}}])
    assert message["x"] == {"y": [1, {"z": 2}]}


def test_endless_nesting_is_rejected() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(InvalidRequestError, match="is nested deeper than 100"):
        render(CHATML, tools=endless)


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (("bos_token", "raise_exception", "range"), "the template reserves this name"),
        (("self", "not", "true", "None", "a-b", "1a", ""), "no template can read a variable of this name"),
        (("messages", "tools", "documents", "add_generation_prompt"), "another argument sets it"),
    ],
)
def test_variable_that_cannot_be_read_is_refused(names: tuple[str, ...], reason: str) -> None:
    for name in names:
        with pytest.raises(InvalidRequestError, match=reason) as raised:
            Chat(PLAIN, chat_template_kwargs={name: None}).render(ChatTemplate("x", TOKENS))
        assert raised.value.field == f"chat_template_kwargs[{name!r}]"
        assert raised.value.field in str(raised.value)


@pytest.mark.parametrize("name", ["check_cancelled", "variables", "template", "chat_template", "loop", "if"])
def test_variables_may_have_the_names_of_parameters(name: str) -> None:
    chat = Chat(PLAIN, chat_template_kwargs={name: "value"})
    assert chat.render(ChatTemplate("{{ %s }}" % name, TOKENS)) == "value"  # noqa: UP031 - braces


def test_template_errors_are_reported() -> None:
    with pytest.raises(
        InvalidRequestError, match="rejects these messages: Conversation roles must alternate"
    ):
        render(MISTRAL, [PLAIN[1], PLAIN[1]])
    with pytest.raises(InvalidRequestError, match="'nothing' is undefined"):
        render("{{ nothing.at_all }}")
    with pytest.raises(InvalidRequestError, match="TypeError"):
        render("{{ messages[0].content + 1 }}")


def test_syntax_error_names_the_line() -> None:
    with pytest.raises(InvalidRequestError, match="chat_template: line 2: ") as raised:
        ChatTemplate("a\n{% if %}", {})
    assert raised.value.field == "chat_template"
    with pytest.raises(
        InvalidRequestError, match="chat_template has 1048577 characters; the limit is 1048576"
    ):
        ChatTemplate("a" * (1 << 20) + "a", {})
    with pytest.raises(InvalidRequestError, match="chat_template"):
        ChatTemplate("{{ " + "(" * 5000 + ")" * 5000 + " }}", {})


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''['__class__'] }}",
        "{{ messages|attr('__class__') }}",
        "{{ (messages|first)|attr('__init__') }}",
        "{{ strftime_now.__globals__ }}",
        "{{ '{x.__class__}'.format_map({'x': ''}) }}",
    ],
)
def test_unsafe_attributes_are_undefined(source: str) -> None:
    assert not render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__['__builtins__'] }}",
        "{{ dict.__base__.__subclasses__() }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ self.__init__.__globals__ }}",
        "{{ '{0.__class__.__base__}'.format('') }}",
        "{{ ['{0.__class__}']|map('format')|list }}{{ ''.__class__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{% set n = namespace(__html__=1) %}",
        "{% set n = namespace() %}{% set n.__call__ = 1 %}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os.getcwd() }}",
        "{% extends 'x' %}",
        "{{ lipsum(n=1000000) }}",
    ],
)
def test_sandbox_escapes_are_rejected(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="rejects these messages"):
        render(source)


def test_width_of_a_field_can_be_an_argument() -> None:
    for source, text in (
        ("{{ '{:>{}}|{:{w}}'.format('a', 3, 'b', w='2') }}", "  a|b "),
        ("""{{ '{"a": {"b": %s}}'|format('c') }}""", '{"a": {"b": c}}'),
        ("""{{ '{{"a": "{}"}}'.format('d') }}""", '{"a": "d"}'),
    ):
        assert render(source) == text


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 10 ** 10 }}",
        "{{ 1000000000 * [0] }}",
        "{{ 10 ** 9999999 }}",
        "{% set n = namespace(x=2) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
        DOUBLE + "{% set n.x = n.x + n.x %}{% endfor %}",
        DOUBLE + "{% set n.x = n.x ~ n.x %}{% endfor %}",
        DOUBLE + "{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}",
        NEST.format(99) + "{{ n.x }}",
        NEST.format(40) + "{{ n.x|string }}",
        NEST.format(40) + "{{ n.x|tojson }}",
        "{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
        "{% for i in range(99999) %}" + "x" * 9999 + "{% endfor %}",
        "{% set x %}{% for i in range(99999) %}" + "x" * 9999 + "{% endfor %}{% endset %}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{{ '%999999999d'|format(1) }}",
        "{{ '{:999999999}'.format(1) }}",
        "{{ '%000000000000400000000d' % 1 }}",
        "{{ '%000000000000400000000d'|format(1) }}",
        "{{ ['%000000000000400000000d']|map('format', 1)|list }}",
        "{{ '%000000000000400000000d' is odd }}",
        "{{ '{:000000000000400000000}'.format('a') }}",
        "{{ '{:٤٠٠٠٠٠٠٠٠}'.format('a') }}",
        "{{ '{:{}}'.format(1, 999999999) }}",
        "{{ '{:{}}'.format('a', '900000000') }}",
        "{{ '{:{}}'.format('a', '>900000000') }}",
        "{{ '{:{}}'.format('a', 900000000.0) }}",
        "{{ '{:{w}}'.format('a', w='900000000') }}",
        "{{ '{a:{w}}'.format_map({'a': 1, 'w': '900000000'}) }}",
        "{{ '{:{}{}}'.format('a', 4000, 50000) }}",
        "{{ '{:9{}}'.format('a', 99999999) }}",
        "{{ '{:{:0<9}}'.format('a', 9) }}",
        "{{ '{0:{1[0]}}'.format('a', ['900000000']) }}",
        "{{ '{:.{}f}'.format(1.0, 900000000) }}",
        "{{ '{x:999999999}'.format_map({'x': 1}) }}",
        "{{ 'x'.ljust(999999999) }}",
        "{{ 'x'.zfill(width=999999999) }}",
        "{{ '\t'.expandtabs(999999999) }}",
        "{{ ('x' * 100000).replace('x', 'y' * 100000) }}",
        "{{ ('x' * 100000).replace('', 'y' * 100000) }}",
        "{{ ('x' * 100000).join(['a'] * 100000) }}",
        "{{ 'ab'.translate({97: 'x' * 1000000}) }}",
        "{{ ('x' * 100000)|replace('x', 'y' * 100000) }}",
        "{{ ['x' * 100000] * 100000 }}",
        "{{ (['x' * 100000] * 100000)|join }}",
        "{{ (['a'] * 100000)|join('x' * 100000) }}",
        "{{ ('\n' * 100000)|indent(100000) }}",
        "{{ 'x'|center(999999999) }}",
        "{{ ('x' * 1000)|wordwrap(1, true, 'y' * 100000) }}",
        "{{ ([1] * 100000)|tojson(indent=100000) }}",
        ESCAPE.format("ensure_ascii=true"),
        ESCAPE.format("1"),
        "{{ [1]|batch(999999999, 0)|list }}",
        "{{ [1]|slice(999999999)|list }}",
        "{% for i in range(999999999) %}{% endfor %}",
        "{{ 'x'.encode().ljust(999999999) }}",
        "{{ (1).to_bytes(999999999, 'big') }}",
        "{{ 1|round(99999999, 'ceil') }}",
        "{{ ([[0] * 1000000] * 1000)|sum(start=[]) }}",
        "{{ ('x' * 100000).join(range(99999)|map('string')) }}",
        "{{ (range(99999)|map('string'))|join('x' * 100000) }}",
        "{{ ([1] * 100000)|tojson(indent='x' * 100000) }}",
        "{{ ([1] * 100000)|tojson(separators=('x' * 100000, ':')) }}",
        "{{ ('x' * 100000)|replace(new='y' * 100000, old='x') }}",
        "{{ ([1] * 100000)|replace('1', 'y' * 100000) }}",
        KEEP.format("'x' * 4000000", "v[loop.index:]"),
        KEEP.format("[0] * 4000000", "v|list"),
        KEEP.format("[0] * 4000000", "v.copy()"),
        KEEP.format("dict(range(99998)|batch(2))", "dict(v)"),
        "{% macro f() %}" + "x" * 99999 + "{% endmacro %}" + KEEP.format("0", "f()"),
        "{% block b %}" + "x" * 99999 + "{% endblock %}" + KEEP.format("0", "self.b()"),
        KEEP.format("'a ' * 200000", "v.split()"),
        KEEP.format("'a,' * 200000", "v.rsplit(',')"),
        KEEP.format("' a' * 200000", "v.split()"),
        KEEP.format("'a\n' * 200000", "v.splitlines()"),
        KEEP.format("'aä' * 200000", "v|list"),
        KEEP.format("0", "range(99999)|list"),
        KEEP.format("0", "range(99999)|select|list"),
        KEEP.format("0", "[" + "v, " * 2000 + "]"),
        "{{ ('a' * 1000000)|wordwrap(1) }}",
        "{{ ('(' * 2000000)|urlize }}",
        "{{ ('<!---->' * 400000)|striptags }}",
        "{{ ('a-' * 3000000)|title }}",
        "{{ ('a ' * 3000000)|wordcount }}",
        "{% set n = ('f' * 1200000)|int(base=16) %}{{ n // 3 }}",
        "{{ ('f' * 700)|int(0, 16) % 7 }}",
        "{{ (1).from_bytes([1] * 1000, 'big') }}",
        "{{ '%999999999d' is odd }}",
        "{{ '%999999999d' is divisibleby(1) }}",
        NEST.format(40) + "{{ n.x is lower }}",
        NEST.format(40) + "{{ raise_exception(n.x) }}",
        NEST.format(40) + "{{ {'a': n.x}.values() ~ '' }}",
        NEST.format(40) + "{{ namespace(a=n.x) }}",
        NEST.format(40).replace("[n.x, n.x]", "namespace(a=n.x, b=n.x)") + "{{ n }}",
        "{% set x = [(('x' * 4000000)|safe).join] * 9 ~ '' %}",
        "{% set x = [range(2 ** 2000, 2 ** 2000 + 5)] * 9999 ~ '' %}",
    ],
)
def test_memory_use_is_limited(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_chat_costs, "MAX_SECONDS", 100.0)
    monkeypatch.setattr(_chat_costs, "MAX_TOTAL_CHARS", 4 * _chat_costs.MAX_CHARS)
    limits = (
        r"it makes (a )?texts? of more than|integers of more than|is not available|Range too big|TypeError"
        r"|a width that has several parts"
    )
    with pytest.raises(InvalidRequestError, match=limits):
        render(source)


LONG = "{% set x = 'a' * 400000 ~ 'b' ~ 'a' * 400000 %}{% set y = 'a' * 400000 ~ 'c' ~ 'a' * 400000 %}"

SHARED = (
    "{% set n = namespace(x=['a'], y=['a'], t=(1,)) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}"
    "{% set n.y = [n.y, n.y] %}{% set n.t = (n.t, n.t) %}{% endfor %}"
)


@pytest.mark.parametrize(
    "source",
    [
        SHARED + "{{ n.x == n.y }}",
        SHARED + "{{ n.x != n.y }}",
        SHARED + "{{ n.x < n.y }}",
        SHARED + "{{ 1 < 2 != n.x <= n.y }}",
        SHARED + "{{ n.x in [n.y] }}",
        SHARED + "{{ n.x not in (n.y, 1) }}",
        SHARED + "{{ n.x is eq(n.y) }}",
        SHARED + "{{ n.x is in([n.y]) }}",
        SHARED + "{{ [n.x]|select('eq', n.y)|list }}",
        SHARED + "{{ [{'a': n.x}]|selectattr('a', 'in', [n.y])|list }}",
        SHARED + "{{ [n.x, n.y]|sort }}",
        SHARED + "{{ [n.x, n.y]|max }}",
        SHARED + "{{ [n.t, n.t]|unique|list }}",
        SHARED + "{{ {'a': n.x, 'b': n.y}|dictsort(false, 'value') }}",
        SHARED + "{{ [n.x].index(n.y) }}",
        SHARED + "{{ [n.x].count(n.y) }}",
        SHARED + "{{ {n.t: 1} }}",
        SHARED + "{{ {1: 1}[n.t] }}",
        SHARED + "{{ {1: 1}.get(n.t) }}",
        SHARED + "{{ {}.fromkeys([n.t]) }}",
        SHARED + "{% for i in [1, 2] %}{{ loop.changed(n.x if i == 1 else n.y) }}{% endfor %}",
        SHARED + "{{ dict([(n.t, 1)]) }}",
        SHARED + "{{ namespace([(n.t, 1)]) }}",
        SHARED + "{{ {1: 1}.items() - [(1, n.t)] }}",
        SHARED + "{{ {'a': n.x}.items() == {'a': n.y}.items() }}",
        SHARED + "{{ [namespace(a=n.x), namespace(a=n.y)]|sort(attribute='a') }}",
        SHARED + "{{ [1]|map(n.t)|list }}",
        SHARED + "{{ 1|attr(n.t) }}",
        SHARED + "{{ n.t is filter }}",
        SHARED + "{{ n.t is test }}",
        SHARED + "{{ {}[n.x].a }}",
    ],
)
def test_shared_parts_are_read_as_often_as_they_occur(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_chat_costs, "MAX_CHARS", 1 << 16)
    with pytest.raises(InvalidRequestError, match="it compares or searches a value of more than 65536"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ (['A' * 4000000] * 20000)|unique|list|length }}",
        "{{ (['A' * 4000000] * 20000)|min|length }}",
        "{{ (['A' * 2000000] * 50000)|sort|length }}",
        "{{ (['A' * 2000000] * 50000)|map('batch', 1)|groupby(0)|length }}",
        "{{ ('a' * 4000000).strip('b' * 1000000 + 'a') }}",
        "{{ ('a' * 4000000)|trim('b' * 1000000 + 'a') }}",
        "{{ ('a' * 4000000).rfind('b' + 'a' * 2000000) }}",
        "{{ ('a' * 4000000).rsplit('b' + 'a' * 2000000, 1) }}",
        LONG + "{{ x in [y] * 20000 }}",
        LONG + "{{ x not in (y,) * 20000 }}",
        LONG + "{{ x is in([y] * 20000) }}",
        LONG + "{{ x in ([y] * 20000)|reverse }}",
        LONG + "{{ ('a' * 400000 ~ 'b') in [y] * 20000 }}",
        LONG + "{{ '" + "a" * 50_000 + "' in ['" + "a" * 49_999 + "b'] * 100000 }}",
        LONG + "{{ x.startswith((y,) * 20000) }}",
        LONG + "{{ x.endswith((y,) * 20000) }}",
        LONG + "{% set y = x ~ x %}{% set z = x ~ x %}{{ y " + "== z " * 4000 + "}}",
        "{% set n = namespace() %}{{ ([{}] * 9999)|sort(attribute='x' + '.x' * 9999) }}",
        "{% set n = namespace() %}{{ ([{}] * 9999)|sum(attribute='x' + '.x' * 9999) }}",
    ],
)
def test_reading_is_limited(source: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"compares or searches|makes a text of more than"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ {}.fromkeys(v) }}",
        "{{ {}.fromkeys(v|select) }}",
        "{{ dict(v|batch(2)) }}",
        "{{ namespace(v|batch(2)) }}",
        "{{ v|unique|list }}",
        "{{ v|map('abs')|unique|list }}",
        "{{ v|batch(1)|unique(attribute=0)|list }}",
        "{{ {}.keys() - v }}",
        "{{ v|list - {}.keys() }}",
        "{{ ({}.keys() - []).union([], v) }}",
        "{{ ({}.keys() - []).symmetric_difference(v|select) }}",
        "{{ {1: 1}.keys().isdisjoint(v) }}",
        (
            "{% set n = namespace(x=[]) %}{% for i in v[:5000] %}{% set n.x = n.x + [(i,)] %}{% endfor %}"
            "{{ {}.fromkeys(n.x) }}"
        ),
    ],
)
def test_keys_of_equal_hashes_are_limited(source: str) -> None:
    modulus = sys.hash_info.modulus
    with pytest.raises(InvalidRequestError, match="it compares or searches more than 268435456"):
        render("{% set v = range(" + f"{modulus}, {15_001 * modulus}, {modulus}" + ") %}" + source)


def test_texts_and_small_integers_are_keys_without_limit() -> None:
    source = "{% set v = range(99998) %}{{ dict(v|batch(2))|length }} {{ v|unique|list|length }} "
    assert render(source + "{{ {}.fromkeys(v|map('string'))|length }}") == "49999 99998 99998"


# Numbers in 201 tuples, lists and dicts.
NESTED = (
    "{% set n = namespace(t=(1,), x=[1], y=[1], d={1: 1}, e={1: 1}) %}{% for i in range(200) %}"
    "{% set n.t = (n.t,) %}{% set n.x = [n.x] %}{% set n.y = [n.y] %}{% set n.d = {'a': n.d} %}"
    "{% set n.e = {'a': n.e} %}{% endfor %}"
)


@pytest.mark.parametrize(
    "source",
    [
        "{{ {1: 1}[n.t] }}",
        "{{ {n.t: 1} }}",
        "{{ n.t in {1: 1} }}",
        "{{ {1: 1}.get(n.t) }}",
        "{{ [n.t]|unique|list }}",
        "{{ [{'a': n.t}]|unique(attribute='a')|list }}",
        "{{ [n.t]|groupby(0) }}",
        "{{ dict([(n.t, 1)]) }}",
        "{{ {}.fromkeys([n.t]) }}",
        "{{ {1: 1}.keys() - [n.t] }}",
        "{{ {1: 1}.keys().isdisjoint([n.t]) }}",
        "{{ [1]|map(n.t)|list }}",
        "{{ [1]|select(n.t)|list }}",
        "{{ [{}]|map(attribute=n.t)|list }}",
        "{{ [{}]|sort(attribute=n.t) }}",
        "{{ 1|attr(n.t) }}",
        "{{ n.t is filter }}",
        "{{ n.x }}",
        "{{ n.d|string }}",
        "{{ n }}",
        "{{ n.x ~ '' }}",
        "{{ '%s' % n.d }}",
        "{{ '%s'|format(n.x) }}",
        "{{ '{}'.format(n.d) }}",
        "{{ n.x|tojson(indent=1) }}",
        "{{ n.x == n.y }}",
        "{{ n.d == n.e }}",
        "{{ n.x < n.y }}",
        "{{ n.x is eq(n.y) }}",
        "{{ n.x in [n.y] }}",
        "{{ [n.x, n.y]|sort }}",
        "{{ {'a': n.x}.values()|string }}",
        "{{ {'a': n.x}.items()|string }}",
        "{{ {'a': n.x}.keys().mapping|string }}",
        "{{ raise_exception(n.x) }}",
        "{% for x in [n.x, n.y] %}{{ loop.changed(x) }}{% endfor %}",
    ],
)
def test_nesting_of_a_value_that_is_read_is_limited(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="it reads a value that is nested deeper than 200"):
        render(NESTED + source)


def test_value_that_is_not_read_may_be_nested() -> None:
    assert render(NESTED + "{{ n.t|length }}{{ [n.x]|length }}{{ n.d.a.a is mapping }}") == "11True"
    assert render(NESTED + "{{ n.x[0] }}") == "[" * 200 + "1" + "]" * 200


@pytest.mark.parametrize(
    "name",
    [
        "select",
        "reject('none')",
        "selectattr('a')",
        "map('string')",
        "map(attribute='a')",
        "batch(1)",
        "slice(1)",
        "unique",
        "items",
    ],
)
def test_filters_without_a_list_between_are_limited(name: str) -> None:
    loop = "{% set n = namespace(x=[]) %}{% for i in range(50) %}{% set n.x = n.x|select %}{% endfor %}"
    assert render(loop + "{{ n.x|list }}") == "[]"
    assert render(loop * 2 + "{{ n.x|list }}") == "[]"
    for last in (f"n.x|{name}", f"n.x|list|map('string', n.x)|{name}", "[1]|batch(1, n.x)"):
        with pytest.raises(
            InvalidRequestError, match="it applies more than 50 filters without making a list"
        ):
            render(loop + "{% set n.x = " + last + " %}")


@pytest.mark.parametrize("value", ["'x'", "[1]"])
def test_only_numbers_are_rounded(value: str) -> None:
    with pytest.raises(InvalidRequestError, match="it rounds a value that is no number"):
        render("{{ %s|round(9, 'ceil') }}" % value)  # noqa: UP031 - braces


def test_comparisons_are_those_of_python() -> None:
    source = (
        "{{ [x == y, x != y, x < 3 <= y, 5 > x > y, x in z, x not in z, x is eq(y), x is in(z), z == [x, y],"
        " z < [x], {x: 1}[x], {(x, y): 2}[(x, y)], (x == y) == false, 1 if z else 2, 'b' in 'abc' ~ x] }}"
    )
    values = {"x": 1, "y": 3, "z": [1, 3]}
    expected = [False, True, True, False, True, False, False, True, True, False, 1, 2, True, 1, True]
    assert ChatTemplate(source, {}).render([{"role": "user", "content": ""}], values) == str(expected)


@pytest.mark.parametrize(
    ("source", "limit"),
    [
        ("a" * 300_000, "characters; the limit is 262144"),
        ("{% macro f() %}{% endmacro %}" * 1300, "nodes; the limit is 10000"),
        ("{{ dict(" + ",".join(f"a{index}=1" for index in range(6000)) + ") }}", "nodes; the limit is 10000"),
        ("{% if x %}" + "{% elif x %}" * 5000 + "{% endif %}", "nodes; the limit|recursion"),
    ],
)
def test_size_of_a_template_is_limited(source: str, limit: str) -> None:
    with pytest.raises(InvalidRequestError, match=limit) as caught:
        render(source)
    assert caught.value.field == "chat_template"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for n in [60] recursive %}{% if n %}{{ loop([n - 1, n - 1]) }}{% endif %}{% endfor %}",
        "{% set n = namespace() %}{% set n.x = n %}{{ ([n] * 9999)|map(attribute='x' + '.x' * 99999)|list }}",
    ],
)
def test_duration_is_limited(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_chat_costs, "MAX_SECONDS", 0.05)
    with pytest.raises(InvalidRequestError, match=r"it runs for more than 0\.05 seconds"):
        render(source)


def test_long_conversation_stays_within_the_limits() -> None:
    messages = [{"role": ("user", "assistant")[turn % 2], "content": "word " * 200} for turn in range(2000)]
    assert len(render(QWEN, messages)) > 2_000_000
    assert len(render(MISTRAL, messages)) > 2_000_000


def test_templates_are_cached_within_a_limit() -> None:
    size = _renderer.CACHED_TEMPLATES
    chat._compiled.cache_clear()
    for index in range(2 * size):
        ChatTemplate(f"{index}", {})
        ChatTemplate(f"{index}", {})
    cache = chat._compiled.cache_info()
    assert (cache.hits, cache.currsize) == (2 * size, size)


def test_import_does_not_import_jinja() -> None:
    code = "import sys, penstock.chat, penstock._chat_sandbox; sys.exit('jinja2' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


RENDER_UNTIL_INTERRUPTED = """
import sys, threading, time, signal
import penstock

tokenizer = penstock.Tokenizer(sys.argv[1])
loops = "{% for a in range(1000) %}{% for b in range(1000) %}{% endfor %}{% endfor %}"
template = "{% macro f() %}" + loops + "{% endmacro %}" + "{{ f() }}" * 100
chat = [{"role": "user", "content": "x"}]
threading.Timer(0.3, signal.raise_signal, [signal.SIGINT]).start()
begin = time.monotonic()
try:
    tokenizer.apply_chat_template(chat, chat_template=template)
except KeyboardInterrupt:
    print("interrupted", time.monotonic() - begin)
"""


@pytest.mark.needs("signals")
def test_interrupt_ends_a_rendering_with_macros(tiny_model: Path) -> None:
    with start_python(RENDER_UNTIL_INTERRUPTED, tiny_model) as process:
        output, errors = process.communicate(timeout=60)
    assert output.startswith(b"interrupted"), errors.decode()
    assert float(output.split()[1]) < 5


@pytest.mark.parametrize(
    "text",
    [
        '{"a": [1, "x", null], "b": {"c": "[[{"}}',
        '{"a": "' + "[" * 1000 + '"}',
        '{"a": "\\"' + "[" * 1000 + '"}',
        "[" + "[1]," * 1000 + "[]]",
        "[" * 100 + "]" * 100,
    ],
)
def test_json_within_the_nesting_limit_is_that_of_python(text: str) -> None:
    assert _json.loads(text) == json.loads(text)
    assert _json.loads(text.encode()) == json.loads(text)


@pytest.mark.parametrize(
    "text", ["[" * 101 + "]" * 101, '{"a":' * 100_000, '["' + '\\"' * 10 + '",' + "[" * 200]
)
def test_json_beyond_the_nesting_limit_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="nested deeper than 100"):
        _json.loads(text)


@pytest.mark.parametrize("text", ['"' * 1_000_000, '"' + "\\" * 1_000_000, '\\"' * 500_000])
def test_hostile_json_takes_linear_time(text: str) -> None:
    with pytest.raises(ValueError, match="Extra data"):
        _json.loads("[]" * 101 + text)
