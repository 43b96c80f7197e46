"""vLLM's `AsyncLLM`: the streaming example of its documents, cancelling, adapters and embeddings."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest

import penstock
from penstock.compat.vllm import (
    AsyncEngineArgs,
    AsyncLLM,
    AsyncLLMEngine,
    LoRARequest,
    PoolingParams,
    RequestOutputKind,
    SamplingParams,
    UnsupportedError,
)
from support.api.adapters import write_adapter
from support.api.checkpoints import make_config

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.compat.vllm import RequestOutput

pytestmark = pytest.mark.anyio

PROMPT = "The future of artificial intelligence is"
LONG = SamplingParams(max_tokens=400, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(demo_model: Path) -> Iterator[AsyncLLM]:
    engine_args = AsyncEngineArgs(model=str(demo_model), enforce_eager=True, max_model_len=512)
    llm = AsyncLLM.from_engine_args(engine_args)
    yield llm
    llm.shutdown()


async def read(
    llm: AsyncLLM, kind: RequestOutputKind, prompt: Any = PROMPT, **fields: Any
) -> list[RequestOutput]:
    params = SamplingParams(output_kind=kind, **{"max_tokens": 24, "temperature": 0, "logprobs": 1, **fields})
    return [output async for output in llm.generate(prompt, params, request_id="r")]


async def test_new_text_is_streamed_as_in_the_document(llm: AsyncLLM, demo_model: Path) -> None:
    sampling_params = SamplingParams(
        max_tokens=40, temperature=0.8, top_p=0.95, seed=42, output_kind=RequestOutputKind.DELTA
    )
    text, has_finished = "", False
    async for output in llm.generate(request_id="stream-1", prompt=PROMPT, sampling_params=sampling_params):
        assert (output.request_id, output.prompt, has_finished) == ("stream-1", PROMPT, False)
        for completion in output.outputs:
            text += completion.text
        has_finished = output.finished
    assert has_finished
    async with penstock.Engine(demo_model, max_model_len=512) as engine:
        expected = await engine.generate(PROMPT, max_tokens=40, temperature=0.8, top_p=0.95, seed=42)
    assert text == expected.text


async def test_kinds_of_outputs_have_the_same_whole(llm: AsyncLLM) -> None:
    deltas = await read(llm, RequestOutputKind.DELTA, prompt_logprobs=1)
    cumulative = await read(llm, RequestOutputKind.CUMULATIVE, prompt_logprobs=1)
    (final,) = await read(llm, RequestOutputKind.FINAL_ONLY, prompt_logprobs=1)
    assert len(deltas) > 1
    assert len(cumulative) > 1
    (whole,) = final.outputs
    (last,) = cumulative[-1].outputs
    assert (last.text, last.token_ids, last.logprobs) == (whole.text, whole.token_ids, whole.logprobs)
    assert last.cumulative_logprob == pytest.approx(whole.cumulative_logprob)
    assert cumulative[-1].prompt_logprobs == deltas[-1].prompt_logprobs == final.prompt_logprobs
    parts = [output.outputs[0] for output in deltas]
    assert "".join(part.text for part in parts) == whole.text
    assert [token for part in parts for token in part.token_ids] == whole.token_ids
    assert [entry for part in parts for entry in part.logprobs or []] == whole.logprobs
    assert parts[-1].cumulative_logprob == pytest.approx(whole.cumulative_logprob)
    texts = [output.outputs[0].text for output in cumulative]
    assert all(after.startswith(before) for before, after in itertools.pairwise(texts))
    assert [output.finished for output in cumulative[:-1]] == [False] * (len(cumulative) - 1)


async def test_last_output_ends_all_choices(llm: AsyncLLM) -> None:
    outputs = await read(llm, RequestOutputKind.CUMULATIVE, n=3, temperature=1.0, seed=1)
    (final,) = await read(llm, RequestOutputKind.FINAL_ONLY, n=3, temperature=1.0, seed=1)
    assert [output.finished for output in outputs].index(True) == len(outputs) - 1
    ended = {output.outputs[0].index: output.outputs[0] for output in outputs if output.outputs[0].finished()}
    assert [ended[index].text for index in range(3)] == [choice.text for choice in final.outputs]


async def test_aborted_request_has_a_last_output(llm: AsyncLLM) -> None:
    outputs = []
    async for output in llm.generate(PROMPT, LONG, "long"):
        outputs.append(output)
        await llm.abort(["long", "unknown"])
    assert outputs[-1].finished
    assert outputs[-1].outputs[0].finish_reason == "abort"
    assert len(outputs[-1].outputs[0].token_ids) < 400


async def test_closed_generator_cancels_its_request(llm: AsyncLLM) -> None:
    generator = llm.generate(PROMPT, LONG, "left")
    await anext(generator)
    (request,) = llm._ids
    await generator.aclose()
    assert (await request.result()).finish_reason == "cancelled"
    assert not llm._ids


async def test_request_that_is_not_read_continues(tiny_model: Path) -> None:
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(tiny_model)))
    generator = llm.generate([1, 2, 3], LONG, "slow")
    await anext(generator)
    with anyio.fail_after(60):
        await llm.sleep(mode="wait")  # a paused request would not end
    outputs = [output async for output in generator]
    assert outputs[-1].outputs[0].finish_reason == "length"
    assert len(outputs[-1].outputs[0].token_ids) == 400
    llm.shutdown()


async def test_requests_run_together(llm: AsyncLLM) -> None:
    texts: dict[int, str] = {}

    async def run(index: int) -> None:
        (output,) = await read(llm, RequestOutputKind.FINAL_ONLY, f"{index} and")
        texts[index] = output.outputs[0].text

    async with anyio.create_task_group() as group:
        for index in range(8):
            group.start_soon(run, index)
    for index in range(8):
        (output,) = await read(llm, RequestOutputKind.FINAL_ONLY, f"{index} and")
        assert output.outputs[0].text == texts[index]


async def test_adapters_are_loaded_and_removed(tiny_model: Path, tmp_path: Path) -> None:
    paths = [write_adapter(tmp_path / str(seed), make_config("llama"), seed=seed) for seed in (1, 2)]
    first, second = (LoRARequest("sql", index, str(path)) for index, path in enumerate(paths, start=1))
    llm = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(str(tiny_model), enable_lora=True))
    params = SamplingParams(temperature=0, output_kind=RequestOutputKind.FINAL_ONLY)
    prompt = {"prompt_token_ids": [1, 2, 3]}
    ids = []
    for request in (None, first, second):
        async for output in llm.generate(prompt, params, "r", prompt_text="abc", lora_request=request):  # type: ignore[arg-type]
            ids.append(tuple(output.outputs[0].token_ids))
            assert (output.prompt, output.lora_request) == ("abc", request)
    assert len(set(ids)) == 3
    assert await llm.list_loras() == {1, 2}
    assert not await llm.add_lora(first)
    assert await llm.remove_lora(1)
    assert not await llm.remove_lora(1)
    assert await llm.add_lora(first)
    llm.shutdown()
    plain = AsyncLLM.from_engine_args(AsyncEngineArgs(str(tiny_model)))
    with pytest.raises(UnsupportedError, match=r"lora_request is 'sql'.*enable_lora=True"):
        await anext(plain.generate("a", params, "r", lora_request=first))
    plain.shutdown()


async def test_embedding_is_that_of_the_engine(llm: AsyncLLM, demo_model: Path) -> None:
    (output,) = [item async for item in llm.encode(PROMPT, PoolingParams(dimensions=16), "e")]
    async with penstock.Engine(demo_model) as engine:
        expected = await engine.embed(PROMPT, dimensions=16)
    np.testing.assert_array_equal([memoryview(output.outputs.data)], memoryview(expected.tensor))
    assert output.prompt_token_ids == llm.get_tokenizer().encode(PROMPT)


async def test_engine_sleeps_wakes_and_shuts_down(tiny_model: Path) -> None:
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(tiny_model)))
    await llm.check_health()
    await llm.do_log_stats()
    assert not await llm.is_sleeping()
    await llm.sleep(mode="wait")
    assert await llm.is_sleeping()
    assert await llm.wake_up()
    assert await llm.reset_prefix_cache()
    assert llm.is_running
    assert llm.tokenizer is llm.get_tokenizer()
    llm.shutdown(timeout=60)
    assert not llm.is_running
    with pytest.raises(penstock.EngineStoppedError):
        await llm.check_health()


@pytest.mark.parametrize(
    "arguments",
    [
        {"data_parallel_rank": 1},
        {"kv_hints": {"a": 1}},
        {"reasoning_ended": True},
        {"reasoning_parser_kwargs": {"a": 1}},
        {"tokenization_kwargs": {"truncate_prompt_tokens": 1}},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
async def test_argument_of_a_request_is_refused_by_name(arguments: Any, llm: AsyncLLM) -> None:
    with pytest.raises(UnsupportedError, match=f"^{next(iter(arguments))} is "):
        await anext(llm.generate(PROMPT, LONG, "r", **arguments))
