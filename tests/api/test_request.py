"""Requests: chunks, results, parameters, finish reasons."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING

import anyio
import pytest

import penstock
from support.api.checkpoints import make_config, write_checkpoint
from support.api.engines import LONG, PROMPT, SHORT, assert_at_rest, make_engine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Unpack

    from penstock._options import SamplingOptions

pytestmark = [pytest.mark.anyio, pytest.mark.loops]

END_OF_TURN = 258
ONE = penstock.SamplingParams(max_tokens=1)


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    with make_engine(tiny_model) as engine:
        yield engine


async def test_joined_chunks_equal_the_result(engine: penstock.Engine) -> None:
    request = await engine.start_request("Hello", LONG, logprobs=True)
    chunks = [chunk async for chunk in request]
    result = await request.result()
    assert "".join(chunk.text for chunk in chunks) == result.text
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == result.token_ids
    assert result.logprobs is not None
    assert tuple(value for chunk in chunks for value in chunk.logprobs or ()) == result.logprobs
    assert all(value <= 0 for value in result.logprobs)
    assert result.text == engine.decode(result.token_ids)
    assert result.prompt_token_ids == tuple(engine.encode("Hello"))
    assert result.usage == penstock.Usage(
        prompt_tokens=5, completion_tokens=400, cached_tokens=0, cached_host_tokens=0
    )
    assert (result.finish_reason, result.stop_reason, request.finish_reason) == ("length", None, "length")
    assert result.timings.first_token is not None
    assert 0 <= result.timings.queued <= result.timings.first_token <= result.timings.total


async def test_last_chunk_of_each_choice_has_its_finish_reason(engine: penstock.Engine) -> None:
    request = await engine.start_request(PROMPT, LONG, n=3, temperature=1.0)
    chunks = [chunk async for chunk in request]
    for index in range(3):
        *others, last = [chunk for chunk in chunks if chunk.index == index]
        assert {chunk.finish_reason for chunk in others} <= {None}
        assert (last.finish_reason, last.stop_reason) == ("length", None)


async def test_last_chunk_comes_after_all_tokens_were_read(engine: penstock.Engine) -> None:
    token = (await engine.generate(PROMPT, SHORT)).token_ids[3]
    request = await engine.start_request(PROMPT, SHORT, stop_token_ids=[token])
    last = await anext(request)
    while last.finish_reason is None:
        last = await anext(request)
    assert (last.finish_reason, last.stop_reason) == ("stop", token)
    assert [chunk async for chunk in request] == []


async def test_last_chunk_of_a_cancelled_request_says_so(engine: penstock.Engine) -> None:
    request = await engine.start_request(PROMPT, LONG)
    await anext(request)
    request.cancel()
    chunks = [chunk async for chunk in request]
    assert [chunk.finish_reason for chunk in chunks][-1] == "cancelled"


async def test_running_request_has_prompt_usage_and_timings(engine: penstock.Engine) -> None:
    async with engine.stream("Hello", LONG) as request:
        assert request.prompt_token_ids == tuple(engine.encode("Hello"))
        num_read = len((await anext(request)).token_ids)
        usage, timings = request.usage, request.timings
        assert usage.prompt_tokens == 5
        assert num_read <= usage.completion_tokens < 400
        assert timings.first_token is not None
        assert 0 <= timings.queued <= timings.first_token <= timings.total
        result = await request.result()
        assert (request.usage, request.timings) == (result.usage, result.timings)


async def test_result_is_complete_whenever_it_is_requested(engine: penstock.Engine) -> None:
    expected = await engine.generate(PROMPT, LONG)
    request = await engine.start_request(PROMPT, LONG)
    first = await anext(request)
    during = await request.result()
    rest = [chunk async for chunk in request]
    after = await request.result()
    assert during.token_ids == after.token_ids == expected.token_ids
    assert during.text == after.text == expected.text
    assert first.token_ids + tuple(token for chunk in rest for token in chunk.token_ids) == expected.token_ids
    assert [chunk async for chunk in request] == []


async def test_one_task_iterates_while_another_awaits_the_result(engine: penstock.Engine) -> None:
    request = await engine.start_request(PROMPT, LONG)
    results = []

    async def collect() -> None:
        results.append(await request.result())

    async with anyio.create_task_group() as group:
        group.start_soon(collect)
        group.start_soon(collect)
        tokens = [token async for chunk in request for token in chunk.token_ids]
    assert [result.token_ids for result in results] == [tuple(tokens)] * 2


async def test_second_concurrent_reader_raises(engine: penstock.Engine) -> None:
    request = await engine.start_request(PROMPT, LONG)
    errors = []

    async def read() -> None:
        try:
            async for _chunk in request:
                pass
        except RuntimeError as error:
            errors.append(str(error))

    async with anyio.create_task_group() as group:
        group.start_soon(read)
        group.start_soon(read)
    assert len(errors) == 1
    assert "one reader at a time" in errors[0]
    assert request.finish_reason == "length"


async def test_same_seed_gives_the_same_output_and_is_reported(engine: penstock.Engine) -> None:
    drawn = await engine.generate(PROMPT, max_tokens=50, temperature=1.0, ignore_eos=True)
    again = await engine.generate(PROMPT, max_tokens=50, temperature=1.0, ignore_eos=True, seed=drawn.seed)
    other = await engine.generate(PROMPT, max_tokens=50, temperature=1.0, ignore_eos=True)
    assert again.token_ids == drawn.token_ids
    assert other.seed != drawn.seed
    assert other.token_ids != drawn.token_ids
    largest = await engine.start_request(PROMPT, SHORT, seed=2**64 - 1)
    assert largest.params.seed == (await largest.result()).seed == 2**64 - 1


async def test_temperature_0_is_greedy_for_any_seed(engine: penstock.Engine) -> None:
    answers = {
        (await engine.generate(PROMPT, SHORT, temperature=0.0, seed=seed)).token_ids for seed in range(5)
    }
    assert len(answers) == 1


async def test_stop_string_is_removed_from_the_text(engine: penstock.Engine) -> None:
    whole = await engine.generate(PROMPT, LONG)
    stop = whole.text[60:64]
    cut = whole.text.index(stop)
    for stops in (stop, [stop], ["never appears", stop]):
        result = await engine.generate(PROMPT, LONG, stop=stops)
        assert (result.finish_reason, result.stop_reason) == ("stop", stop)
        assert result.text == whole.text[:cut]
        assert result.token_ids == whole.token_ids[: len(result.token_ids)]
        assert stop in engine.decode(result.token_ids)
        assert stop not in engine.decode(result.token_ids[:-1])
    request = await engine.start_request(PROMPT, LONG, stop=stop)
    assert "".join([chunk.text async for chunk in request]) == whole.text[:cut]


async def test_stop_token_is_in_token_ids_but_not_in_text(engine: penstock.Engine) -> None:
    whole = await engine.generate(PROMPT, LONG)
    token = whole.token_ids[20]
    length = whole.token_ids.index(token) + 1
    result = await engine.generate(PROMPT, LONG, stop_token_ids=[token])
    assert (result.finish_reason, result.stop_reason) == ("stop", token)
    assert result.token_ids == whole.token_ids[:length]
    assert result.text == engine.decode(whole.token_ids[: length - 1])
    late = await engine.generate(PROMPT, LONG, stop_token_ids=[token], min_tokens=100)
    assert len(late.token_ids) > 100
    assert token not in late.token_ids[:100]


async def test_eos_token_ends_the_output_unless_ignored(engine: penstock.Engine) -> None:
    for seed in range(50):
        ignoring = await engine.generate(PROMPT, LONG, temperature=2.0, seed=seed)
        if END_OF_TURN in ignoring.token_ids:
            break
    else:
        pytest.fail("no seed draws the end token")
    assert ignoring.finish_reason == "length"
    ending = await engine.generate(PROMPT, LONG, temperature=2.0, seed=seed, ignore_eos=False)
    assert (ending.finish_reason, ending.stop_reason) == ("stop", END_OF_TURN)
    assert ending.token_ids == ignoring.token_ids[: ignoring.token_ids.index(END_OF_TURN) + 1]


async def test_special_tokens_are_shown_on_request(engine: penstock.Engine) -> None:
    for seed in range(50):
        hidden = await engine.generate(PROMPT, LONG, temperature=2.0, seed=seed)
        if END_OF_TURN in hidden.token_ids:
            break
    shown = await engine.generate(PROMPT, LONG, temperature=2.0, seed=seed, skip_special_tokens=False)
    assert "<|im_end|>" in shown.text
    assert "<|im_end|>" not in hidden.text


async def test_messages_use_the_template_without_extra_special_tokens(
    engine: penstock.Engine,
) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    request = await engine.start_request(messages, SHORT)
    rendered = engine.apply_chat_template(messages)
    assert rendered.endswith("<|im_start|>assistant\n")
    result = await request.result()
    assert result.prompt_token_ids == tuple(engine.encode(rendered, add_special_tokens=False))


async def test_chat_template_can_be_selected_by_name(tiny_model: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "shout.jinja").write_text("{{ messages[0].content | upper }}!")
    messages = [{"role": "user", "content": "Hi"}]
    async with make_engine(model) as engine:
        assert engine.apply_chat_template(messages, chat_template="shout") == "HI!"
        assert engine.apply_chat_template(messages) == engine.apply_chat_template(
            messages, chat_template="default"
        )
        assert engine.apply_chat_template(messages).startswith("<|im_start|>user\nHi")
        with pytest.raises(penstock.InvalidRequestError, match="'default', 'shout'") as caught:
            engine.apply_chat_template(messages, chat_template="whisper")
        assert (caught.value.field, caught.value.value) == ("chat_template", "whisper")
    (model / "tokenizer_config.json").unlink()
    async with make_engine(model) as engine:
        with pytest.raises(
            penstock.InvalidRequestError, match="'default'; this model's chat templates are 'shout'"
        ):
            await engine.generate(messages, SHORT)


async def test_long_text_in_a_worker_thread_gives_the_same_ids(
    engine: penstock.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = await engine.generate("Some words and some more", SHORT)
    monkeypatch.setattr("penstock._session.LONG_TEXT", 4)
    there = await engine.generate("Some words and some more", SHORT)
    assert there.prompt_token_ids == here.prompt_token_ids
    assert there.token_ids == here.token_ids


async def test_model_defaults_apply_and_given_values_override(tiny_model: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    settings = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2]}
    (model / "generation_config.json").write_text(json.dumps(settings))
    async with make_engine(model) as engine:
        async with engine.stream(PROMPT) as request:
            params = request.params
        assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.6, 20, 0.95, 0.0)
        assert params.max_tokens == engine.info.max_model_len - len(PROMPT)
        request = await engine.start_request(PROMPT, temperature=0.0, top_k=0, max_tokens=3)
        assert (request.params.temperature, request.params.top_k, request.params.top_p) == (0.0, 0, 0.95)
        await request.result()
    settings["do_sample"] = False
    (model / "generation_config.json").write_text(json.dumps(settings))
    async with make_engine(model) as engine:
        request = await engine.start_request(PROMPT, max_tokens=3)
        assert request.params.temperature == 0.0
        await request.result()


async def test_given_sampling_parameters_override_a_greedy_model(tiny_model: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    settings = {"do_sample": False, "temperature": 0.6}
    (model / "generation_config.json").write_text(json.dumps(settings))
    async with make_engine(model) as engine:

        async def temperature(**options: Unpack[SamplingOptions]) -> float | None:
            async with engine.stream(PROMPT, ONE, **options) as request:
                return request.params.temperature

        assert await temperature() == 0.0
        assert await temperature(seed=3) == 0.0
        assert await temperature(temperature=0.8) == 0.8
        assert await temperature(temperature=0.0, top_k=5) == 0.0
        assert await temperature(top_k=5) == 0.6
        assert await temperature(top_p=0.5) == 0.6
        assert await temperature(min_p=0.1) == 0.6
        answers = {
            (await engine.generate(PROMPT, max_tokens=20, top_k=50, seed=seed)).token_ids for seed in range(5)
        }
        assert len(answers) == 5


async def test_end_tokens_beyond_the_vocabulary_are_ignored(tiny_model: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    async with make_engine(model) as engine:
        token = (await engine.generate(PROMPT, SHORT)).token_ids[3]
    settings = {"eos_token_id": [512, token, 2**32 - 1]}
    (model / "generation_config.json").write_text(json.dumps(settings))
    async with make_engine(model) as engine:
        result = await engine.generate(PROMPT, SHORT, ignore_eos=False)
        assert (result.finish_reason, result.stop_reason) == ("stop", token)
        with pytest.raises(penstock.InvalidRequestError, match="512"):
            await engine.generate(PROMPT, SHORT, stop_token_ids=[512])  # given explicitly, so an error


async def test_maximum_stop_ids_work_beside_the_models_own(engine: penstock.Engine) -> None:
    token = (await engine.generate(PROMPT, SHORT)).token_ids[3]
    others = [other for other in range(300) if other not in (token, END_OF_TURN)][:255]
    result = await engine.generate(PROMPT, SHORT, stop_token_ids=[*others, token], ignore_eos=False)
    assert result.finish_reason == "stop"
    assert result.token_ids[-1] == result.stop_reason


async def test_special_token_in_a_prompt_text_is_one_token(tiny_model: Path, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", make_config("llama", vocab_size=520))
    shutil.copy(tiny_model / "tokenizer.json", model)  # it has 512 tokens
    (model / "added_tokens.json").write_text(json.dumps({"<|tool|>": 512}))
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings["added_tokens_decoder"] = {"513": {"content": "<|think|>", "special": True}}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    async with make_engine(model) as engine:
        for text, ids in (
            ("a<|im_end|>b", [END_OF_TURN]),
            ("a<|tool|>b", [512]),
            ("<|think|><|im_end|><|tool|>", [513, END_OF_TURN, 512]),
        ):
            result = await engine.generate(text, SHORT)
            assert [token for token in result.prompt_token_ids if token >= 256] == ids
            assert engine.decode(result.prompt_token_ids, skip_special_tokens=False) == text
        chat = await engine.generate([{"role": "user", "content": "<|think|>"}], SHORT)
        assert chat.prompt_token_ids.count(513) == 1


async def test_keywords_override_params(engine: penstock.Engine) -> None:
    request = await engine.start_request(PROMPT, penstock.SamplingParams(max_tokens=5, top_k=7), top_k=3)
    assert (request.params.max_tokens, request.params.top_k) == (5, 3)
    await request.result()
    await assert_at_rest(engine)


async def test_output_ends_at_max_model_len(engine: penstock.Engine) -> None:
    request = await engine.start_request([1] * 500, max_tokens=10**6, ignore_eos=True)
    assert request.params.max_tokens == 12
    result = await request.result()
    assert (result.finish_reason, len(result.token_ids)) == ("length", 12)


async def test_timeout_around_one_chunk_loses_no_output(engine: penstock.Engine) -> None:
    expected = await engine.generate(PROMPT, LONG)
    request = await engine.start_request(PROMPT, LONG)
    tokens: list[int] = []

    async def read(scope: anyio.CancelScope) -> None:
        with scope, suppress(StopAsyncIteration):  # the engine may finish earlier
            tokens.extend((await anext(request)).token_ids)

    for num_checkpoints in range(50):
        scope = anyio.CancelScope()
        async with anyio.create_task_group() as group:
            group.start_soon(read, scope)
            for _ in range(num_checkpoints % 5):
                await anyio.lowlevel.checkpoint()
            scope.cancel()
    tokens += [token async for chunk in request for token in chunk.token_ids]
    assert tuple(tokens) == expected.token_ids


async def test_finish_reason_is_known_without_a_reader(engine: penstock.Engine) -> None:
    request = await engine.start_request(PROMPT, SHORT)
    while request.finish_reason is None:
        await anyio.lowlevel.checkpoint()
    assert request.finish_reason == "length"


async def test_polling_takes_no_output_from_a_reader(engine: penstock.Engine) -> None:
    request = await engine.start_request(PROMPT, LONG)
    chunks: list[penstock.Chunk] = []
    async with anyio.create_task_group() as group:

        async def read() -> None:
            chunks.extend([chunk async for chunk in request])

        group.start_soon(read)
        while request.finish_reason is None:
            await anyio.lowlevel.checkpoint()
    assert sum((chunk.token_ids for chunk in chunks), ()) == (await request.result()).token_ids
