"""LMDeploy's `pipeline`: lists of prompts, their parameters and results, chats, and the end of a pipeline."""

from __future__ import annotations

import gc
import logging
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import penstock
from penstock.compat import lmdeploy
from penstock.compat.lmdeploy import ChatTemplateConfig, GenerationConfig, Pipeline
from penstock.compat.lmdeploy.engine_configs import AnyEngineConfig
from penstock.compat.lmdeploy.errors import ArgumentError
from penstock.compat.lmdeploy.messages import PytorchEngineConfig, Response, TurbomindEngineConfig
from penstock.compat.lmdeploy.model import BaseChatTemplate
from penstock.compat.lmdeploy.serve.async_engine import AsyncEngine, Session
from support.api.engines import assert_at_rest_blocking, resources, wait_until
from support.compat.lmdeploy import GREEDY, LONG, config, open_pipeline

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

RAW: dict[str, Any] = {"do_preprocess": False}


@pytest.fixture(scope="module")
def pipe(tiny_model: Path) -> Iterator[Pipeline]:
    with open_pipeline(tiny_model, max_batch_size=4) as pipe:
        yield pipe


@pytest.fixture(scope="module")
def chatty(demo_model: Path) -> Iterator[Pipeline]:
    with Pipeline(demo_model, session_len=1024) as pipe:
        yield pipe


def texts(responses: list[Response]) -> list[str]:
    return [response.text for response in responses]


@pytest.mark.parametrize(
    ("arguments", "returns_text"),
    [
        ({}, False),
        ({"backend_config": TurbomindEngineConfig(session_len=128)}, False),
        ({"backend_config": PytorchEngineConfig(session_len=128)}, False),
        ({"backend": "turbomind"}, True),
        ({"backend": "pytorch"}, True),
        ({"tp": 1}, True),
        ({"instance_num": 4}, True),
        ({"backend_config": lmdeploy.pytorch.EngineConfig()}, True),
        ({"backend_config": lmdeploy.turbomind.EngineConfig()}, True),
    ],
)
def test_arguments_choose_between_text_and_response(
    arguments: dict[str, Any],
    returns_text: bool,  # noqa: FBT001
    tiny_model: Path,
) -> None:
    with open_pipeline(tiny_model, **arguments) as pipe:
        kind = str if returns_text else Response
        assert isinstance(pipe("ab", gen_config=config(1), **RAW), kind)
        assert [type(one) for one in pipe.batch_infer(["ab", "cd"], config(1), **RAW)] == [kind, kind]
        assert isinstance(pipe, AsyncEngine)


def test_async_engine_returns_text(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_THREADS", "1")
    with AsyncEngine(tiny_model, None, "pytorch", lmdeploy.pytorch.EngineConfig()) as engine:
        assert isinstance(engine(["ab"], GREEDY, **RAW)[0], str)


def test_call_with_early_keywords_returns_text(pipe: Pipeline) -> None:
    text = pipe("ab", request_output_len=8, top_k=1, ignore_eos=True, **RAW)
    assert text == pipe("ab", GREEDY, **RAW).text
    response = pipe("ab", GREEDY, request_output_len=2, **RAW)
    assert response.generate_token_len == 8


def test_early_keywords_have_the_documented_defaults() -> None:
    from penstock.compat.lmdeploy.prompts import config_of

    made = config_of(None, {"ignore_eos": True})
    assert made == GenerationConfig(
        max_new_tokens=512, top_k=40, top_p=0.8, temperature=0.8, repetition_penalty=1.0, ignore_eos=True
    )
    assert config_of(None, {"ignore_eos": None}) == GenerationConfig()


def test_prompts_have_one_result_each_in_order(pipe: Pipeline) -> None:
    prompts = [f"prompt {number}" for number in range(11)]
    responses = pipe(prompts, GREEDY, **RAW)
    assert [response.index for response in responses] == list(range(11))
    assert texts(responses) == [pipe(prompt, GREEDY, **RAW).text for prompt in prompts]
    assert all(
        response.input_token_len == len(pipe.tokenizer.encode(prompt))
        for response, prompt in zip(responses, prompts, strict=True)
    )
    assert pipe([], GREEDY) == []
    assert_at_rest_blocking(pipe.engine)


def test_messages_are_one_prompt_and_lists_several(chatty: Pipeline) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    short = GenerationConfig(max_new_tokens=4)
    one = chatty(chat, short)
    assert isinstance(one, Response)
    assert texts(chatty([chat, chat], short)) == [one.text] * 2 == texts(chatty(["Hi", chat], short))
    assert chatty("Hi", short).text == one.text


def test_each_prompt_has_its_own_parameters(pipe: Pipeline) -> None:
    configs = [config(number) for number in range(1, 10)]
    responses = pipe(["ab"] * 9, configs, **RAW)
    assert [response.generate_token_len for response in responses] == list(range(1, 10))


def test_lists_of_a_wrong_length_are_refused_at_once(pipe: Pipeline) -> None:
    for call in (pipe, pipe.infer, pipe.batch_infer):
        with pytest.raises(ValueError, match=r"gen_config is .* one GenerationConfig for each prompt: 2"):
            call(["ab", "cd"], gen_config=[GREEDY])
    with pytest.raises(ValueError, match="one GenerationConfig for each prompt"):
        pipe.stream_infer(["ab", "cd"], gen_config=[GREEDY] * 3)
    with pytest.raises(ValueError, match=r"sessions is a list of 1; .* one session for each prompt: 2"):
        pipe.stream_infer(["ab", "cd"], sessions=[pipe.session()])


@pytest.mark.parametrize(
    "prompts", [("ab", "image"), [("ab", "image")], 3, [3], ["ab", 3], None, {"role": "user"}, [[]]]
)
def test_prompts_of_other_forms_are_refused(prompts: object, pipe: Pipeline) -> None:
    for call in (pipe, pipe.stream_infer):
        with pytest.raises(ValueError, match=r"^prompts(\[\d\])? is "):
            call(prompts)


def test_prompt_of_another_form_is_named(pipe: Pipeline) -> None:
    with pytest.raises(ArgumentError, match=r"^prompts\[1\] is 3; it must be text or a list of messages"):
        pipe(["ab", 3])
    with pytest.raises(ArgumentError, match=r"^prompts is \('hi', 'you'\); it must be text, or a list"):
        pipe(("hi", "you"))
    with pytest.raises(ArgumentError, match=r"^messages is \['hi'\]; it must be text or a list of messages"):
        pipe.generate(["hi"])
    with pytest.raises(ArgumentError, match=r"^gen_config\[1\] is 3; it must be a GenerationConfig"):
        pipe(["ab", "cd"], [GREEDY, 3])  # type: ignore[list-item]


@pytest.mark.parametrize("call", ["__call__", "infer", "stream_infer", "chat", "generate"])
def test_keywords_are_checked_in_every_call(
    call: str, pipe: Pipeline, caplog: pytest.LogCaptureFixture
) -> None:
    method = getattr(pipe, call)
    with pytest.raises(TypeError, match=r"(infer|chat|generate)\(\) got an unexpected keyword argument"):
        method("ab", max_new_tokens=3)
    for arguments in ({}, {"gen_config": GREEDY}):
        with pytest.raises(ArgumentError, match="temperature is 9; it must be "):
            method("ab", temperature=9, **arguments)
        with pytest.raises(ArgumentError, match="request_output_len is 'x'; it must be "):
            method("ab", request_output_len="x", **arguments)
    assert caplog.text == ""
    method("ab", gen_config=GREEDY, top_p=0.5, top_k=3)
    assert "no effect beside gen_config" in caplog.text


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ("infer", "do_preprocess"),
        ("infer", "use_tqdm"),
        ("stream_infer", "sequence_start"),
        ("stream_infer", "stream_response"),
        ("chat", "stream_response"),
        ("generate", "sequence_start"),
        ("generate", "sequence_end"),
        ("generate", "stream_response"),
        ("generate", "do_preprocess"),
        ("generate", "stop"),
    ],
)
def test_flag_of_another_type_is_refused(call: str, name: str, pipe: Pipeline) -> None:
    with pytest.raises(ArgumentError, match=f"^{name} is 'no'; it must be True or False"):
        getattr(pipe, call)("ab", **{name: "no"})


@pytest.mark.parametrize(
    ("ids", "name"),
    [(["a"], "input_ids[0]"), ([1, True], "input_ids[1]"), (3, "input_ids"), ("a", "input_ids")],
)
@pytest.mark.anyio
async def test_token_ids_of_another_type_are_refused(ids: Any, name: str, pipe: Pipeline) -> None:
    instance: Any = await pipe.get_generator(stop=False, session_id=1)
    for call in (instance.infer, instance.async_stream_infer):
        with pytest.raises(ArgumentError, match=rf"^{re.escape(name)} is .*; it must be a "):
            call(1, ids)
        with pytest.raises(ArgumentError, match=r"^step is '3'"):
            call(1, [1], step="3")
    with pytest.raises(ArgumentError, match=rf"^{re.escape(name)} is .*; it must be a "):
        pipe.generate(None, 1, input_ids=ids)
    with pytest.raises(
        ArgumentError, match=r"^session_id is None; it must be given with sequence_start=False"
    ):
        pipe.generate("ab", sequence_start=False)
    assert not pipe.sessions.is_busy(1)
    assert instance.infer(1, np.array([10, 20]), GREEDY, sequence_end=True).num_token == 8


def test_unknown_keyword_names_the_configuration(pipe: Pipeline, tiny_model: Path) -> None:
    with pytest.raises(TypeError, match=r"; use gen_config=GenerationConfig\(max_new_tokens=...\)"):
        pipe("ab", max_new_tokens=3)
    with pytest.raises(TypeError, match=r"; use gen_config=GenerationConfig\(max_new_tokens=...\)"):
        lmdeploy.pipeline(tiny_model, max_new_tokens=3)


def test_third_argument_has_the_meanings_of_all_versions(pipe: Pipeline) -> None:
    raw = pipe("ab", GREEDY, **RAW)
    assert pipe("ab", GREEDY, False).token_ids == raw.token_ids  # noqa: FBT003
    assert pipe("ab", GREEDY, True).input_token_len == pipe("ab", GREEDY).input_token_len  # noqa: FBT003
    assert pipe("ab", None, 3, top_k=1) == pipe("ab", request_output_len=3, top_k=1)
    assert pipe("ab", GREEDY, ChatTemplateConfig("base")).token_ids == raw.token_ids


def test_sampling_without_effect_is_logged_once(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_pipeline(tiny_model) as pipe:
        pipe(["ab"] * 2, [config(1), config(1, temperature=0.0)], **RAW)
        pipe("ab", config(1, do_sample=False, top_p=0.5), **RAW)
        assert caplog.text == ""
        pipe(["ab"] * 2, config(1, temperature=0.7), **RAW)
        assert ["temperature=0.7" in message for message in caplog.messages] == [True]


def test_failing_prompts_leave_the_others_intact(pipe: Pipeline) -> None:
    bad = config(8, ignore_eos=False, response_format={"type": "regex_schema", "regex_schema": "("})
    configs = [GREEDY, bad, GREEDY, config(0), GREEDY]
    responses = pipe(["ab", "cd", "x" * 600, "ef", "gh"], configs, **RAW)
    [long] = pipe(["ab " * 1_000_000], GREEDY, **RAW)
    assert long.error_code == "context_length_exceeded"
    assert long.error_message == "the prompt has more than 1024 tokens; session_len is 512"
    assert [response.error_code for response in responses] == [
        None,
        "invalid_request",
        "context_length_exceeded",
        "invalid_request",
        None,
    ]
    assert [response.finish_reason for response in responses] == ["length", *["error"] * 3, "length"]
    assert [response.text == "" for response in responses] == [False, True, True, True, False]
    assert "600 tokens; session_len is 512" in str(responses[2].error_message)
    reasons = {}
    for part in pipe.stream_infer(["ab", "x" * 600, "ef"], gen_config=GREEDY, **RAW):
        reasons[part.index] = part.finish_reason
    assert reasons == {0: "length", 1: "error", 2: "length"}


def test_changed_parameters_are_checked_by_the_request(pipe: Pipeline) -> None:
    changed = config(4)
    changed.response_format = {"type": "json_schema"}
    assert [response.error_message for response in pipe(["ab"], changed, **RAW)] == [
        "json_schema of response_format is None; it must be a mapping"
    ]


def test_failed_prompts_are_logged_once(pipe: Pipeline, caplog: pytest.LogCaptureFixture) -> None:
    for count, name in enumerate(("infer", "stream_infer"), 1):
        list(getattr(pipe, name)(["ab", "x" * 600], gen_config=GREEDY, do_preprocess=False))
        assert len(caplog.messages) == count
        assert caplog.messages[-1].startswith("prompt 1 failed: history and input have 600 tokens")
        assert caplog.messages[-1].endswith("(context_length_exceeded)")


def test_error_of_a_text_is_logged(pipe: Pipeline, caplog: pytest.LogCaptureFixture) -> None:
    found = pipe(["ab", "x" * 600], request_output_len=4, ignore_eos=True, **RAW)
    assert [bool(text) for text in found] == [True, False]
    assert "prompt 1 failed: history and input have 600 tokens" in caplog.text


def test_list_never_exceeds_the_batch_size(pipe: Pipeline) -> None:
    most = 0
    for _ in pipe.stream_infer(["ab"] * 20, gen_config=config(5), **RAW):
        stats = pipe.engine.stats()
        most = max(most, stats.running + stats.waiting)
    assert 1 < most <= 4


def test_output_has_exactly_the_tokens_asked_for(pipe: Pipeline) -> None:
    for count in (1, 5, 256):
        response = pipe("ab", config(count), **RAW)
        assert response.finish_reason == "length"
        assert response.generate_token_len == len(response.token_ids) == count
    rest = pipe("ab", config(None), **RAW)
    assert rest.generate_token_len == 512 - rest.input_token_len


def test_unknown_adapter_is_an_error_of_its_request(pipe: Pipeline) -> None:
    response = pipe.infer("ab", GREEDY, adapter_name="lora")
    assert (response.finish_reason, response.error_code) == ("error", "invalid_request")
    assert response.error_message == 'adapter "lora" is not loaded; no adapter is loaded'
    assert pipe("ab", GREEDY, **RAW).finish_reason == "length"


def test_list_starts_no_thread_without_a_progress_bar(tiny_model: Path) -> None:
    code = f"""
import sys
import threading
from penstock.compat.lmdeploy import GenerationConfig, pipeline
with pipeline({str(tiny_model)!r}) as pipe:
    names = {{*threading.enumerate()}}
    pipe(["ab"], GenerationConfig(max_new_tokens=1), do_preprocess=False)
    assert names == {{*threading.enumerate()}} and "tqdm" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    "arguments",
    [
        ([config(2), config(3)], False, None, False),
        (None, [config(2), config(3)], False, None, False),
    ],
)
def test_stream_infer_takes_both_orders(arguments: Any, pipe: Pipeline) -> None:
    parts = list(pipe.stream_infer(["ab", "cd"], *arguments))
    assert {part.input_token_len for part in parts} == {len(pipe.tokenizer.encode("ab"))}
    assert sorted(part.generate_token_len for part in parts) == [2, 2, 3, 3]
    raw = list(pipe.stream_infer(["ab", "cd"], *arguments[:-2]))
    assert {part.input_token_len for part in raw} == {len(pipe.tokenizer.encode("ab"))}
    with pytest.raises(TypeError, match="multiple values for argument 'gen_config'"):
        pipe.stream_infer("ab", *arguments, gen_config=GREEDY)
    with pytest.raises(TypeError, match="at most"):
        pipe.stream_infer("ab", *arguments, True, 3)  # noqa: FBT003


def test_names_of_earlier_versions_are_attributes(pipe: Pipeline, tiny_model: Path) -> None:
    assert (pipe.backend, pipe.tp, pipe.instance_num, pipe.model_name) == ("turbomind", 1, 4, None)
    with open_pipeline(tiny_model, backend="pytorch", model_name="base", instance_num=2) as other:
        assert (other.backend, other.instance_num, other.model_name) == ("pytorch", 2, "base")
    responses = pipe(["ab", "cd"], GREEDY, **RAW)
    assert [response.session_id for response in responses] == [0, 1]


def test_values_of_a_session_are_checked(pipe: Pipeline) -> None:
    session = pipe.session()
    with pytest.raises(ValueError, match="gen_config is 3; it must be"):
        session.update(gen_config=3)
    with pytest.raises(ValueError, match="step is 'a'; it must be"):
        session.update(step="a")
    with pytest.raises(TypeError, match="unexpected keyword argument 'gen_cfg'"):
        session.update(gen_cfg=3)
    with pytest.raises(ValueError, match="prompt is "):
        pipe.chat(["a", "b"])


def test_progress_is_shown_on_request(pipe: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    pipe.infer(["ab"] * 3, GREEDY, use_tqdm=True, **RAW)
    assert "3/3" in capsys.readouterr().err
    pipe.infer(["ab"] * 3, GREEDY, **RAW)
    assert capsys.readouterr().err == ""


def test_requests_share_blocks_only_with_prefix_caching(tiny_model: Path) -> None:
    for shares in (False, True):
        with open_pipeline(tiny_model, enable_prefix_caching=shares) as pipe:
            first, second = (pipe("x" * 200, GREEDY, **RAW) for _ in range(2))
            assert first.token_ids == second.token_ids
            assert (second.cached_tokens >= 128) == shares
            assert first.cached_tokens == 0


@pytest.mark.needs("proc")
def test_block_ends_the_pipeline_and_its_threads(tiny_model: Path) -> None:
    gc.collect()
    before = resources()
    with open_pipeline(tiny_model) as pipe:
        pipe(["ab"], GREEDY, **RAW)
    wait_until(lambda: resources() == before)
    with pytest.raises(penstock.EngineStoppedError, match="the engine was closed"):
        pipe("ab")


def test_backend_of_another_name_is_refused(tiny_model: Path) -> None:
    with pytest.raises(ValueError, match="backend is 'foo'"):
        lmdeploy.pipeline(tiny_model, backend="foo")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "returns_text"),
    [
        ((None, "turbomind", lmdeploy.turbomind.EngineConfig()), True),
        (("base", "pytorch", None, None, 8, 1, "ERROR"), True),
        ((TurbomindEngineConfig(), ChatTemplateConfig("base"), "INFO"), False),
        ((None, ChatTemplateConfig("base")), False),
        ((None, TurbomindEngineConfig()), False),
        (("base", PytorchEngineConfig(), ChatTemplateConfig("base"), "ERROR"), False),
        ((None, None, ChatTemplateConfig("base")), False),
        ((None, None, None, "ERROR"), False),
    ],
)
def test_positional_arguments_have_the_orders_of_all_versions(
    arguments: Any,
    returns_text: bool,  # noqa: FBT001
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PENSTOCK_THREADS", "1")
    level = logging.getLogger("penstock").level
    try:
        with lmdeploy.pipeline(str(tiny_model), *arguments) as pipe:
            assert isinstance(pipe, Pipeline)
            assert pipe.settings.returns_text == returns_text
            configs = [value for value in arguments if isinstance(value, AnyEngineConfig)]
            assert [pipe.backend_config] == (configs or [TurbomindEngineConfig()]) or returns_text
            has_template = any(isinstance(value, ChatTemplateConfig) for value in arguments)
            assert isinstance(pipe.chat_template, BaseChatTemplate) or not has_template
    finally:
        logging.getLogger("penstock").setLevel(level)
    with pytest.raises(TypeError, match="multiple values"):
        lmdeploy.pipeline(str(tiny_model), None, "turbomind", backend="turbomind")
    with pytest.raises(TypeError, match="at most"):
        lmdeploy.pipeline(str(tiny_model), *[None] * 8)


def test_cache_that_is_too_small_names_session_len(tiny_model: Path) -> None:
    cache = {"cache_max_entry_count": 4, "cache_block_seq_len": 16}
    with pytest.raises(
        penstock.OutOfMemoryError, match=r"session_len=512 .* settings that fit: session_len=64"
    ):
        open_pipeline(tiny_model, session_len=512, **cache)
    with open_pipeline(tiny_model, **cache) as pipe:
        assert pipe.session_len == 64
        responses = pipe(["a" * 30, "b" * 100, "c"], config(100), **RAW)
    assert [response.generate_token_len for response in responses] == [34, 0, 63]
    assert responses[1].error_code == "context_length_exceeded"


def test_log_level_is_that_of_the_logger(tiny_model: Path) -> None:
    with pytest.raises(ValueError, match="log_level is 'LOUD'"):
        lmdeploy.pipeline(tiny_model, log_level="LOUD")


def test_chat_remembers_its_turns(chatty: Pipeline) -> None:
    answer = GenerationConfig(max_new_tokens=12)
    session = chatty.chat("My name is Bob.", gen_config=answer)
    assert isinstance(session, Session)
    first = session.response
    assert isinstance(first, Response)
    assert session.history == [("My name is Bob.", first.text)]
    assert session.step == first.input_token_len + first.generate_token_len
    step = session.step
    assert chatty.chat("What is my name?", session, answer) is session
    second = session.response
    assert isinstance(second, Response)
    assert len(session.history) == 2
    assert second.input_token_len < step
    assert session.step == step + second.input_token_len + second.generate_token_len
    # The same as one chat with all messages; the model's template ends the first answer.
    messages = [
        {"role": "user", "content": "My name is Bob."},
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "What is my name?"},
    ]
    assert chatty(messages, answer).text == second.text
    assert "What is my name?" in str(session)
    session.close()
    assert (session.history, session.step) == ([], 0)


@pytest.mark.parametrize("end", ["break", "abort", "error"])
def test_unfinished_turn_leaves_the_history(end: str, chatty: Pipeline) -> None:
    session = chatty.chat("Hi", gen_config=GenerationConfig(max_new_tokens=4))
    history, step = list(session.history), session.step
    if end == "error":
        bad = GenerationConfig(max_new_tokens=0)
        chatty.chat("And?", session, bad)
        assert session.response is not None
        assert session.response.finish_reason == "error"
    else:
        for _ in chatty.chat("And?", session, LONG, stream_response=True):
            if end == "break":
                break
            session.abort()
    assert (session.history, session.step) == (history, step)
    again = chatty.chat("And?", session, GenerationConfig(max_new_tokens=4)).response
    other = chatty.chat("Hi", gen_config=GenerationConfig(max_new_tokens=4))
    assert other.step == step
    assert chatty.chat("And?", other, GenerationConfig(max_new_tokens=4)).response.text == again.text
    assert_at_rest_blocking(chatty.engine)


def test_stream_of_a_chat_has_the_whole_answer(chatty: Pipeline) -> None:
    answer = GenerationConfig(max_new_tokens=8)
    whole: Any = chatty.chat("Hi", gen_config=answer).response
    session = chatty.session()
    parts = []
    for part in chatty.chat("Hi", session, answer, stream_response=True):
        parts.append(part.text)
        assert bool(session.history) == (part.finish_reason is not None)
    assert "".join(parts) == whole.text == chatty.chat("Hi", gen_config=answer).response.text
    assert session.history == [("Hi", whole.text)]


def test_changed_history_is_sent_again(chatty: Pipeline) -> None:
    answer = GenerationConfig(max_new_tokens=4)
    session = chatty.chat("My name is Bob.", gen_config=answer)
    session.history = [("My name is Eve.", "Hello Eve!")]
    changed = chatty.chat("What is my name?", session, answer).response
    messages = [
        {"role": "user", "content": "My name is Eve."},
        {"role": "assistant", "content": "Hello Eve!"},
        {"role": "user", "content": "What is my name?"},
    ]
    assert changed.text == chatty(messages, answer).text
    assert len(session.history) == 2
    chatty.end_session(session)
    assert chatty.chat("And?", session, answer).response.finish_reason == "length"


def test_conflicting_turn_leaves_the_session(chatty: Pipeline) -> None:
    session = chatty.session()
    parts = chatty.chat("Count to ten.", session, LONG, stream_response=True)
    next(parts)
    chatty.chat("Stop.", session, GREEDY)
    assert (session.prompt, session.response, session.history) == ("Count to ten.", None, [])
    parts.close()
    chatty.chat("Who?", session, GREEDY, adapter_name="lora")
    assert session.response is not None
    assert session.response.error_code == "invalid_request"
    assert session.history == []


def test_session_of_another_pipeline_is_refused(pipe: Pipeline, chatty: Pipeline) -> None:
    with pytest.raises(ValueError, match="session is "):
        chatty.chat("Hi", pipe.session())
    with pytest.raises(ValueError, match="session is "):
        chatty.chat("Hi", 3)  # type: ignore[arg-type]
