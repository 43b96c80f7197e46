"""Keywords of LMDeploy's calls that are variables of the chat template."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from penstock.compat.lmdeploy import GenerationConfig, Pipeline
from penstock.compat.lmdeploy.errors import ArgumentError
from support.api.checkpoints import make_config, write_checkpoint
from support.compat.lmdeploy import open_pipeline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: The text of a prompt is the last message and the variables.
TEMPLATE = (
    "{{ messages[-1].content }}|{{ enable_thinking }}|{{ reasoning_effort }}|{{ thinking }}|"
    "{{ tools | map(attribute='function') | map(attribute='name') | join if tools }}"
)
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]
ONE = GenerationConfig(max_new_tokens=1)


@pytest.fixture(scope="module")
def pipe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    path = write_checkpoint(tmp_path_factory.mktemp("model"), make_config("llama"))
    settings = path / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": TEMPLATE}))
    with open_pipeline(path) as pipe:
        yield pipe


async def last_item(pipe: Pipeline, prompt: str, variables: dict[str, Any]) -> Any:
    return [item async for item in pipe.generate(prompt, 7, ONE, **variables)][-1]


#: The calls that take a prompt; each returns an object with the number of tokens of the prompt.
CALLS: dict[str, Callable[..., Any]] = {
    "call": lambda pipe, prompt, variables: pipe(prompt, gen_config=ONE, **variables),
    "infer": lambda pipe, prompt, variables: pipe.infer([prompt], ONE, **variables)[0],
    "stream_infer": lambda pipe, prompt, variables: [*pipe.stream_infer(prompt, gen_config=ONE, **variables)][
        -1
    ],
    "chat": lambda pipe, prompt, variables: pipe.chat(prompt, gen_config=ONE, **variables).response,
    "generate": lambda pipe, prompt, variables: asyncio.run(last_item(pipe, prompt, variables)),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({}, "Hi||||"),
        ({"enable_thinking": False}, "Hi|False|||"),
        ({"enable_thinking": None, "tools": None}, "Hi||||"),
        ({"tools": TOOLS, "reasoning_effort": "low"}, "Hi||low||find"),
        ({"chat_template_kwargs": {"thinking": True}}, "Hi|||True|"),
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, "Hi|False|||"),
        ({"thinking": 12345}, "Hi|||12345|"),
        ({"media_io_kwargs": {"video": {}}, "mm_processor_kwargs": {"size": 1}}, "Hi||||"),
    ],
    ids=["none", "thinking", "null", "tools", "kwargs", "precedence", "other", "media"],
)
def test_keyword_is_a_variable_of_the_chat_template(
    call: str, variables: dict[str, Any], text: str, pipe: Pipeline
) -> None:
    output = CALLS[call](pipe, "Hi", variables)
    assert output.input_token_len == len(pipe.tokenizer.encode(text))
    messages = CALLS[call](pipe, [{"role": "user", "content": "Hi"}], variables)
    assert messages.input_token_len == output.input_token_len


def test_unknown_keyword_is_logged_once(pipe: Pipeline, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        pipe("Hi", gen_config=ONE, maximum=3)
    warnings = [record.getMessage() for record in caplog.records]
    assert warnings == ["the keyword 'maximum' is a variable of the chat template: no argument has this name"]


def test_turn_with_other_variables_renders_the_whole_chat(pipe: Pipeline) -> None:
    session = pipe.chat("Hi", gen_config=ONE)
    assert pipe.chat("Hi", session, ONE, enable_thinking=False).response is not None
    # the template shows the last message only: a turn that continued the session would be refused
    assert len(session.history) == 2


@pytest.mark.parametrize("call", CALLS)
def test_variables_of_a_wrong_type_are_refused(call: str, pipe: Pipeline) -> None:
    for value in (3, [("a", 1)], {1: 2}):
        with pytest.raises(ArgumentError, match=r"chat_template_kwargs is .* it must be None or a mapping"):
            CALLS[call](pipe, "Hi", {"chat_template_kwargs": value})
    with pytest.raises(ArgumentError, match="rewind_stop_tokens is True; it must be left out"):
        CALLS[call](pipe, "Hi", {"rewind_stop_tokens": True})
    with pytest.raises(TypeError, match=r"use gen_config=GenerationConfig\(max_new_tokens"):
        CALLS[call](pipe, "Hi", {"max_new_tokens": 3})


def test_none_in_a_list_of_parameters_is_the_default(pipe: Pipeline) -> None:
    raw: dict[str, Any] = {"do_preprocess": False}
    short = GenerationConfig(max_new_tokens=2, ignore_eos=True)
    first, second = pipe(["ab", "ab"], gen_config=[short, None], **raw)
    assert first.generate_token_len == 2
    assert second.text == pipe("ab", **raw).text
    early = pipe(
        ["ab", "ab"], gen_config=[short, None], request_output_len=4, ignore_eos=True, top_k=1, **raw
    )
    assert [response.generate_token_len for response in early] == [2, 4]
    last = {part.index: part for part in pipe.stream_infer(["ab"] * 2, gen_config=[None, short], **raw)}
    assert (last[0].generate_token_len, last[1].generate_token_len) == (second.generate_token_len, 2)
