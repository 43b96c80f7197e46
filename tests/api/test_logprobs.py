"""Logprobs, logits and hidden states in results, from an executor that returns synthetic values.

Its values: the logprob of a token is -0.01 times its position, the top tokens are the ids from 0 with
logprobs 0.5 apart, and a row of logits or of hidden states contains its position and the seed of its choice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import penstock
from support import hooks
from support.api.engines import PROMPT, make_engine
from support.api.running import random_prompt

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

pytestmark = [pytest.mark.anyio, pytest.mark.needs("hooks")]

LENGTH = len(PROMPT)
SEED = 7
#: The width of each kind of tensor.
WIDTHS = {"logits": 5, "hidden_states": 3, "embeddings": 2}
PARAMS = penstock.SamplingParams(max_tokens=6, seed=SEED, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    with make_engine(tiny_model, max_num_batched_tokens=16, max_num_seqs=4) as engine:
        engine._session.adopt(hooks.fake_engine(tiny_model, engine.config))
        yield engine


def made_up_logprobs(first: int, end: int) -> tuple[float, ...]:
    """The logprobs of the tokens at these positions."""
    return tuple(float(np.float32(position) * np.float32(-0.01)) for position in range(first, end))


def rows(tensor: penstock.Tensor | None) -> NDArray[np.float32]:
    """The values of a tensor, without a copy."""
    assert tensor is not None
    return np.asarray(tensor)


async def test_tokens_have_logprobs_and_top_logprobs(engine: penstock.Engine) -> None:
    request = await engine.start_request(PROMPT, PARAMS, logprobs=True, top_logprobs=2)
    chunks = [chunk async for chunk in request]
    result = await request.result()
    expected = made_up_logprobs(LENGTH, LENGTH + 6)
    assert result.logprobs == expected
    assert result.cumulative_logprob == sum(expected)
    assert result.top_logprobs == (((0, 0.0), (1, -0.5)),) * 6
    assert tuple(top for chunk in chunks for top in chunk.top_logprobs or ()) == result.top_logprobs
    plain = await engine.generate(PROMPT, PARAMS, logprobs=True)
    assert (plain.logprobs, plain.top_logprobs) == (expected, None)
    untold = await engine.generate(PROMPT, PARAMS)
    assert (untold.logprobs, untold.cumulative_logprob, untold.prompt_logprobs) == (None, None, None)


@pytest.mark.parametrize("length", [1, 2, 100])
async def test_prompt_tokens_except_the_first_have_logprobs(engine: penstock.Engine, length: int) -> None:
    for n in (1, 3):
        result = await engine.generate(range(length), PARAMS, n=n, prompt_logprobs=1)
        assert result.prompt_logprobs == (None, *made_up_logprobs(1, length))
        assert result.prompt_top_logprobs == (None, *[((0, 0.0),)] * (length - 1))
    plain = await engine.generate(range(length), PARAMS, prompt_logprobs=0)
    assert plain.prompt_logprobs == (None, *made_up_logprobs(1, length))
    assert plain.prompt_top_logprobs is None


@pytest.mark.parametrize("name", WIDTHS)
@pytest.mark.parametrize("length", [1, 4, 100])
@pytest.mark.parametrize("n", [1, 3])
async def test_tensor_rows_match_the_requested_positions(
    engine: penstock.Engine, name: str, length: int, n: int
) -> None:
    end = length + 6 - 1
    for extent, first, last in [("prompt", 0, length), ("generation", length - 1, end), ("all", 0, end)]:
        options: Any = {f"output_{name}": extent}
        result = await engine.generate(range(length), PARAMS, n=n, **options)
        for choice in result.choices:
            array = rows(getattr(choice, name))
            assert array.dtype == np.float32
            assert array.shape == (last - first, WIDTHS[name])
            assert array[:, 0].tolist() == list(range(first, last))
            is_own = np.arange(first, last) >= length - 1
            own_seed = SEED if extent == "prompt" else choice.seed
            assert array[:, 1].tolist() == np.where(is_own, own_seed, SEED).tolist()
        assert [getattr(result, other) is None for other in WIDTHS] == [other != name for other in WIDTHS]


@pytest.mark.parametrize("name", WIDTHS)
@pytest.mark.parametrize("extent", ["prompt", "generation", "all"])
@pytest.mark.parametrize("is_late", [False, True], ids=["live", "late"])
async def test_chunks_have_the_rows_of_their_tokens(
    engine: penstock.Engine, name: str, extent: str, *, is_late: bool
) -> None:
    options: Any = {f"output_{name}": extent}
    request = await engine.start_request(PROMPT, PARAMS, max_tokens=40, n=3, unread="keep", **options)
    if is_late:
        await request.result()
    chunks = [chunk async for chunk in request]
    assert all(getattr(chunk, other) is None for chunk in chunks for other in WIDTHS if other != name)
    result = await request.result()
    for choice in result.choices:
        own = [chunk for chunk in chunks if chunk.index == choice.index]
        if extent == "prompt" and choice.index > 0:
            assert all(getattr(chunk, name) is None for chunk in own)
            continue
        parts = [rows(getattr(chunk, name)) for chunk in own]
        num_prompt = LENGTH if extent == "prompt" else LENGTH - 1 if extent == "all" else 0
        num_first = num_prompt if choice.index == 0 else 0
        if extent == "prompt":
            assert [len(part) for part in parts] == [num_first, *[0] * (len(own) - 1)]
        else:
            sizes = [len(chunk.token_ids) for chunk in own]
            assert [len(part) for part in parts] == [sizes[0] + num_first, *sizes[1:]]
        whole = rows(getattr(choice, name))
        expected = whole if choice.index == 0 else whole[num_prompt:]
        assert np.concatenate(parts).tobytes() == expected.tobytes()
        assert all(part.shape[1] == whole.shape[1] for part in parts)


async def test_chunk_of_a_dropped_request_keeps_its_rows(engine: penstock.Engine) -> None:
    async with engine.stream(PROMPT, PARAMS, output_hidden_states="all") as request:
        chunk = await anext(request)
    del request
    assert rows(chunk.hidden_states)[:, 0].tolist() == list(range(LENGTH - 1 + len(chunk.token_ids)))


async def test_result_returns_the_same_memory_each_time(engine: penstock.Engine) -> None:
    request = await engine.start_request(PROMPT, PARAMS, output_logits="prompt", n=2)
    results = [await request.result(), await request.result()]
    choices = [choice for result in results for choice in result.choices]
    addresses = {rows(choice.logits).__array_interface__["data"] for choice in choices}
    assert len(addresses) == 1
    ((_, is_read_only),) = addresses
    assert is_read_only


async def test_output_after_a_stop_string_has_no_rows(engine: penstock.Engine) -> None:
    whole = await engine.generate(PROMPT, PARAMS, max_tokens=100)
    stop = engine.decode(whole.token_ids[4:5])
    result = await engine.generate(
        PROMPT, PARAMS, max_tokens=100, stop=stop, logprobs=True, top_logprobs=1, output_logits="all"
    )
    length = len(result.token_ids)
    assert result.stop_reason == stop
    assert length <= 5
    assert result.logprobs == made_up_logprobs(LENGTH, LENGTH + length)
    assert len(result.top_logprobs or ()) == length
    assert len(rows(result.logits)) == LENGTH + length - 1


async def test_cancelled_request_has_the_rows_of_its_tokens(engine: penstock.Engine) -> None:
    request = await engine.start_request(PROMPT, PARAMS, max_tokens=400, output_hidden_states="all", n=2)
    await anext(request)
    request.cancel()
    for choice in (await request.result()).choices:
        assert choice.finish_reason in {"cancelled", "length"}
        assert len(rows(choice.hidden_states)) == LENGTH - 1 + len(choice.token_ids)


@pytest.mark.parametrize("extent", ["prompt", "generation", "all"])
async def test_embeddings_are_those_of_the_input_tokens(tiny_model: Path, extent: str) -> None:
    table = np.frombuffer(hooks.tensor(tiny_model, "model.embed_tokens.weight"), np.float32).reshape(512, -1)
    prompt = random_prompt(40)
    params = PARAMS.replace(temperature=1.0, n=2, max_tokens=20)
    options: Any = {"output_embeddings": extent}
    async with make_engine(tiny_model, dtype="float32", max_num_batched_tokens=16) as engine:
        await engine.generate(prompt, params)  # nothing of the prompt is taken from the prefix cache
        request = await engine.start_request(prompt, params, **options)
        chunks = [chunk async for chunk in request]
        result = await request.result()
    first = 0 if extent != "generation" else len(prompt) - 1
    last = len(prompt) if extent == "prompt" else len(prompt) + 20 - 1
    for choice in result.choices:
        expected = table[[*prompt, *choice.token_ids][first:last]]
        assert rows(choice.embeddings).tobytes() == expected.tobytes()
    parts = [rows(chunk.embeddings) for chunk in chunks if chunk.index == 0]
    assert np.concatenate(parts).tobytes() == rows(result.embeddings).tobytes()


async def test_embeddings_come_once_despite_preemption(tiny_model: Path) -> None:
    table = np.frombuffer(hooks.tensor(tiny_model, "model.embed_tokens.weight"), np.float32).reshape(512, -1)
    params = PARAMS.replace(temperature=1.0, max_tokens=70)
    prompts = [random_prompt(30, seed=seed) for seed in range(6)]
    async with make_engine(tiny_model, dtype="float32", kv_cache_blocks=16) as engine:
        for _ in range(20):  # until the requests arrive fast enough to need more memory
            batch = engine.generate_many(prompts, params, output_embeddings="all", concurrency=6)
            results = [item.result async for item in batch]
            if engine.stats().preemptions > 0:
                break
        assert engine.stats().preemptions > 0
    for prompt, result in zip(prompts, results, strict=True):
        assert result is not None
        expected = table[[*prompt, *result.token_ids[:-1]]]
        assert rows(result.embeddings).tobytes() == expected.tobytes()


async def test_tensors_share_the_limit_of_a_request(tiny_model: Path) -> None:
    async with make_engine(tiny_model, max_output_bytes=64 * 1024) as engine:
        hidden_size = rows((await engine.generate(PROMPT, PARAMS, output_embeddings="all")).embeddings).shape[
            1
        ]
        most = 64 * 1024 // 4 // hidden_size // 2
        options: Any = {"output_embeddings": "generation", "output_hidden_states": "generation"}
        await engine.generate(PROMPT, PARAMS, max_tokens=most, **options)
        with pytest.raises(penstock.InvalidRequestError, match="tensors and logprobs would take") as caught:
            await engine.generate(PROMPT, PARAMS, max_tokens=most + 1, **options)
        assert caught.value.field in options


async def test_logits_and_hidden_states_match_transformers(tiny_model: Path) -> None:
    async with make_engine(tiny_model, dtype="float32") as engine:
        result = await engine.generate(
            PROMPT,
            PARAMS.replace(temperature=1.0, n=2, logprobs=True, top_logprobs=3, prompt_logprobs=2),
            output_logits="all",
            output_hidden_states="all",
        )
    for choice in result.choices:
        token_ids = [*PROMPT, *choice.token_ids]
        computed = hooks.logits(tiny_model, token_ids[:-1])
        logits = np.frombuffer(computed, np.float32).reshape(len(token_ids) - 1, -1)
        assert rows(choice.logits).tobytes() == computed
        assert len(rows(choice.hidden_states)) == len(logits)
        wide = logits.astype(np.float64)
        logprobs = wide - np.logaddexp.reduce(wide, axis=1, keepdims=True)
        reported = [*(result.prompt_logprobs or ())[1:], *(choice.logprobs or ())]
        chosen = logprobs[range(len(logits)), token_ids[1:]]
        np.testing.assert_allclose(np.array(reported, np.float64), chosen, rtol=0, atol=1e-5)
        tops = [*(result.prompt_top_logprobs or ())[1:], *(choice.top_logprobs or ())]
        for row, top in zip(logits, tops, strict=True):
            assert top is not None
            likeliest = np.argsort(-row, kind="stable")[: len(top)]
            assert [token for token, _logprob in top] == likeliest.tolist()
        assert [len(top or ()) for top in tops] == [2] * (LENGTH - 1) + [3] * len(choice.token_ids)


async def test_logprobs_of_the_whole_vocabulary_match_a_stable_sort(tiny_model: Path) -> None:
    async with make_engine(tiny_model, max_logprobs=-1, dtype="float32") as engine:
        size = engine.info.vocabulary_size
        options = PARAMS.replace(logprobs=True, top_logprobs=size, prompt_logprobs=size - 1)
        result = await engine.generate(PROMPT, options, output_logits="all")
        with pytest.raises(
            penstock.InvalidRequestError, match=r"top_logprobs.* at most the vocabulary's 512"
        ):
            await engine.generate(PROMPT, options, top_logprobs=size + 1)
    tops = [*(result.prompt_top_logprobs or ())[1:], *(result.top_logprobs or ())]
    for row, top in zip(rows(result.logits).astype(np.float64), tops, strict=True):
        assert top is not None
        order = np.argsort(-row, kind="stable")[: len(top)]
        assert [token for token, _logprob in top] == order.tolist()
        expected = row[order] - np.logaddexp.reduce(row)
        np.testing.assert_allclose([logprob for _token, logprob in top], expected, rtol=0, atol=1e-5)
    assert [len(top or ()) for top in tops] == [size - 1] * (LENGTH - 1) + [size] * len(result.token_ids)


@pytest.mark.parametrize("field", ["top_logprobs", "prompt_logprobs"])
async def test_more_logprobs_than_the_engine_allows_are_refused(tiny_model: Path, field: str) -> None:
    for options, most in (({}, 20), ({"max_logprobs": 3}, 3), ({"max_logprobs": 0}, 0)):
        async with make_engine(tiny_model, **options) as engine:
            await engine.generate(PROMPT, PARAMS.replace(logprobs=True, **{field: most}))
            match = rf"{field}={most + 1} .* at most max_logprobs={most}, an option of the engine"
            with pytest.raises(penstock.InvalidRequestError, match=match):
                await engine.generate(PROMPT, PARAMS.replace(logprobs=True, **{field: most + 1}))


async def test_output_bytes_of_unfinished_requests_are_bounded(tiny_model: Path) -> None:
    per_token = 4 * 512
    most = 410 * per_token
    with make_engine(tiny_model, max_output_bytes=most) as engine:
        assert engine.info.vocabulary_size * 4 == per_token
        params = PARAMS.replace(output_logits="generation")
        with pytest.raises(penstock.InvalidRequestError, match=f"the maximum is {most}"):
            await engine.generate(PROMPT, params, max_tokens=411)
        first = await engine.start_request(PROMPT, params, max_tokens=400)  # longer than what can be unread
        message = f"{11 * per_token} bytes .* reserved {400 * per_token} of max_output_bytes={most}"
        with pytest.raises(penstock.OverloadedError, match=message):
            await engine.generate(PROMPT, params, max_tokens=11)
        assert rows((await engine.generate(PROMPT, params, max_tokens=10)).logits).shape == (10, 512)
        assert len((await engine.generate(PROMPT, PARAMS)).token_ids) == 6
        assert rows((await first.result()).logits).shape == (400, 512)
        assert rows((await engine.generate(PROMPT, params, max_tokens=410)).logits).shape == (410, 512)
        items = [item async for item in engine.generate_many([PROMPT] * 5, params, max_tokens=150)]
        assert all(item.error is None for item in items)
