"""Many sessions on one engine at the same time, with cancels, rewinding, adapters and evictions."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import anyio
import pytest

import penstock
from penstock.compat.lmdeploy.instances import Instance, ResponseType
from penstock.compat.lmdeploy.messages import PytorchEngineConfig
from support.api.adapters import write_adapter
from support.api.checkpoints import make_config
from support.api.engines import assert_at_rest, assert_at_rest_blocking, run_in_threads
from support.compat.lmdeploy import config, open_pipeline

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.compat.lmdeploy import Pipeline

SESSIONS, TURNS, TOKENS = 256, 3, 6
#: Tokens of a request that is cancelled.
LONG = 100

ADAPTERS = (None, "one", "two")

#: The prompt of a turn, what followed it and its adapter, for each turn of a session.
Log = list[tuple[list[int], list[int], str | None]]


async def converse(pipe: Pipeline, number: int, log: Log) -> None:
    """The turns of one session; some are cancelled, some rewind, some change the adapter."""
    chance = random.Random(number)
    history: list[int] = []
    for turn in range(TURNS):
        prompt = [chance.randrange(4, 500) for _ in range(chance.randint(1, 20))]
        step = chance.randint(1, len(history)) if history and chance.random() < 0.3 else 0
        is_cancelled, stop_after = chance.random() < 0.3, chance.randint(1, TOKENS)
        adapter = chance.choice(ADAPTERS)
        options: dict[str, Any] = {"sequence_start": turn == 0, "sequence_end": False, "step": step}
        options["adapter_name"] = adapter
        stream = pipe.generate(
            None, number, config(LONG if is_cancelled else TOKENS), input_ids=prompt, **options
        )
        output: list[int] = []
        async for item in stream:
            output += item.token_ids or []
            if is_cancelled and item.generate_token_len >= stop_after and item.finish_reason is None:
                if chance.random() < 0.5:
                    pipe.stop_session(number)
                else:
                    break
        await stream.aclose()
        history = history[: step or None] + prompt
        log.append((list(history), output, adapter))
        history += output
        assert pipe.sessions.length(number) == len(history)
    pipe.end_session(number)


@pytest.mark.anyio
async def test_interleaved_sessions_equal_single_requests(tiny_model: Path, tmp_path: Path) -> None:
    adapters = {
        name: write_adapter(tmp_path / name, make_config("llama"), seed=seed)
        for seed, name in enumerate(filter(None, ADAPTERS))
    }
    backend_config = PytorchEngineConfig(
        max_batch_size=64, num_gpu_blocks=96, block_size=16, adapters=adapters
    )
    with open_pipeline(tiny_model, backend_config=backend_config) as pipe:
        logs: list[Log] = [[] for _ in range(SESSIONS)]
        async with anyio.create_task_group() as group:
            for number, log in enumerate(logs):
                group.start_soon(converse, pipe, number, log)
        turns = [turn for log in logs for turn in log]
        prompts = [prompt for prompt, _, _ in turns]
        params = penstock.SamplingParams(
            max_tokens=TOKENS, temperature=0.0, ignore_eos=True, use_prefix_cache=False
        )
        batch = pipe.engine.blocking.generate_many(
            prompts, [params.replace(adapter=adapter) for *_, adapter in turns]
        )
        for (_, output, _), item in zip(turns, batch, strict=True):
            assert item.result is not None
            assert output[:TOKENS] == list(item.result.token_ids)[: len(output)]
        stats = pipe.engine.stats()
        assert stats.finished_cancelled > SESSIONS // 8
        assert sum(len(log[-1][0]) for log in logs) > 2 * 16 * stats.blocks_total  # most were evicted
        assert [pipe.sessions.length(number) for number in range(SESSIONS)] == [0] * SESSIONS
        await assert_at_rest(pipe.engine)


def test_list_of_prompts_keeps_the_memory_flat(tiny_model: Path) -> None:
    """Each prompt is prepared when the request before it has ended."""
    num_running = 0

    def prepared(pipe: Pipeline) -> int:
        return sum(len(batch._jobs.running) + len(batch._jobs._kept) for batch in pipe.batches)

    with open_pipeline(tiny_model, max_batch_size=8) as pipe:
        for _ in pipe.stream_infer(["ab"] * 400, gen_config=config(1), do_preprocess=False):
            num_running = max(num_running, prepared(pipe))
        assert num_running <= 16
        assert len(pipe(["ab"] * 2000, config(1), do_preprocess=False)) == 2000


def test_threads_share_sessions_and_lists(tiny_model: Path) -> None:
    """Threads with blocking streams, lists, stop words and sessions that end; one drops its streams."""
    with open_pipeline(tiny_model, max_batch_size=8) as pipe:
        word = pipe.infer("ab", config(24), do_preprocess=False).text[8:11]
        text_config = config(24, stop_words=[word])
        expected = [pipe.infer(prompt, text_config, do_preprocess=False) for prompt in ("ab", "cd")]
        assert expected[0].finish_reason == "stop"

        def use(number: int) -> None:
            instance = Instance(pipe._context())
            for turn in range(4):
                if number % 3 == 0:
                    responses = pipe(["ab", "cd"], text_config, do_preprocess=False)
                    for response, alone in zip(responses, expected, strict=True):
                        assert (response.text, response.token_ids) == (alone.text, alone.token_ids)
                elif number % 3 == 1:
                    options: dict[str, Any] = {"sequence_start": turn == 0, "sequence_end": turn == 3}
                    state, ids, count = instance.infer(number, [5 + number, 6], config(4), **options)
                    assert (state, len(ids), count) == (ResponseType.FINISH, 4, 4)
                    assert pipe.sessions.length(number) == (turn + 1) * 6 * (turn < 3)
                else:
                    parts = pipe.stream_infer("ab", gen_config=config(LONG), do_preprocess=False)
                    assert next(parts).finish_reason is None
                    pipe.end_session(number)

        run_in_threads(use, range(12))
        assert pipe.sessions._states == {}
        assert pipe.batches == set()
        assert_at_rest_blocking(pipe.engine)
