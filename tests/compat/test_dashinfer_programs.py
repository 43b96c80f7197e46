"""Programs that use the DashInfer API as DashInfer's own do: its HTTP server and its benchmarks."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest

from penstock.compat.dashinfer.allspark import (
    ASGenerationConfigBuilder,
    AsStatus,
    Engine,
    GenerateRequestStatus,
    HuggingFaceModel,
    PromptTemplate,
    TargetDevice,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence
    from pathlib import Path

NAME = "qwen"
MAX_LENGTH = 400


class Served:
    """A model that runs, with its loader, as DashInfer's programs set it up."""

    def __init__(self, model: Path, directory: Path) -> None:
        self.loader = HuggingFaceModel(str(model), NAME, in_memory_serialize=False, trust_remote_code=True)
        self.engine = Engine()
        self.loader.read_model_config()
        self.loader.load_model(load_format=None).serialize_to_path(
            self.engine, str(directory), enable_quant=False, weight_only_quant=True, skip_if_exists=False
        ).free_model()
        builder = self.loader.create_reference_runtime_config_builder(NAME, TargetDevice.CPU, [], max_batch=8)
        self.config = builder.max_length(MAX_LENGTH).build()
        self.engine.install_model(self.config)
        assert self.engine.start_model(NAME) is AsStatus.ALLSPARK_SUCCESS

    def greedy(self, max_length: int) -> ASGenerationConfigBuilder:
        """The model's generation configuration, with the most likely tokens."""
        builder = self.loader.create_reference_generation_config_builder(self.config)
        return builder.update({"top_k": 1, "max_length": max_length})

    def expected(self, ids: Sequence[int], max_length: int) -> list[int]:
        """The greedy output of a request, without a look at its status."""
        config = self.greedy(max_length)
        _status, handle, queue = self.engine.start_request_ids(NAME, self.loader, list(ids), config)
        assert queue is not None
        self.engine.sync_request(NAME, handle)
        elements = queue.Get()
        self.engine.release_request(NAME, handle)
        return [] if elements is None else elements.ids_from_generate


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tiny_model, tmp_path_factory.mktemp("output"))
    yield served
    served.engine.stop_model(NAME)
    served.engine.release_model(NAME)


# ---- the throughput benchmark: a thread for each request, and any other status is an error


def measure(served: Served, ids: Sequence[int], max_length: int) -> list[int]:
    """The tokens of a request of the benchmark. Raises `AssertionError` where it reports an error."""
    config = served.greedy(max_length)
    status, handle, queue = served.engine.start_request_ids(NAME, served.loader, list(ids), config)
    assert status is AsStatus.ALLSPARK_SUCCESS
    assert queue is not None
    output: list[int] = []
    while True:
        state = queue.GenerateStatus()
        if state == GenerateRequestStatus.Init:
            continue
        assert state in (GenerateRequestStatus.Generating, GenerateRequestStatus.GenerateFinished), state
        elements = queue.Get()
        if elements is not None:
            assert elements.prefix_cache_len == elements.prefix_len_gpu + elements.prefix_len_cpu
            output += elements.ids_from_generate
        if state == GenerateRequestStatus.GenerateFinished:
            break
    served.engine.stop_request(NAME, handle)
    served.engine.release_request(NAME, request_handle=handle)
    return output


@pytest.mark.parametrize("num_tokens", [1, 2, 60])
def test_throughput_benchmark_sees_no_unexpected_status(served: Served, num_tokens: int) -> None:
    prompts = [[seed, 2 * seed, 3 * seed] for seed in range(1, 17)]
    expected = [served.expected(ids, len(ids) + num_tokens) for ids in prompts]
    with ThreadPoolExecutor(16) as pool:
        outputs = list(pool.map(lambda ids: measure(served, ids, len(ids) + num_tokens), prompts))
    assert outputs == expected


def test_performance_test_starts_a_batch_with_one_capsule(served: Served) -> None:
    config = served.greedy(48).build() | {"num_beams": 1, "num_return_sequences": 1, "temperature": 0.8}
    config |= {"do_sample": True, "top_p": 0.8, "early_stopping": True}
    ids = np.arange(1, 17).reshape(1, 16)
    inputs = {"input_ids": ids.__dlpack__()}
    queues, handles = [], []
    for number in range(8):
        config["uuid"] = str(number)
        status, handle, queue = served.engine.start_request(NAME, inputs, generate_config=config)
        assert status is AsStatus.ALLSPARK_SUCCESS
        handles.append(handle)
        queues.append(queue)
    assert served.engine.sync_request(NAME, None) is AsStatus.ALLSPARK_SUCCESS
    expected = served.expected(ids[0], 48)
    for handle, queue in zip(handles, queues, strict=True):
        assert queue is not None
        with pytest.warns(DeprecationWarning, match="GetNoWait"):
            assert served.engine.get_no_wait(NAME, queue) == expected
        with pytest.warns(DeprecationWarning, match="GenerateStatus"):
            status_now = served.engine.get_request_status(NAME, queue)
        assert status_now is GenerateRequestStatus.GenerateFinished
        served.engine.release_request(NAME, request_handle=handle)


# ---- the HTTP server: an asynchronous generator that waits in `Get`


async def parts(served: Served, text: str) -> AsyncIterator[str]:
    """The parts of the text of an answer, decoded one by one."""
    builder = served.loader.create_reference_generation_config_builder(served.config)
    builder.update({"top_k": 1, "repetition_penalty": 1.1})
    prompt = PromptTemplate.apply_chatml_template(f"user: {text}")
    _status, handle, queue = served.engine.start_request_text(NAME, served.loader, prompt, builder)
    assert queue is not None
    running = (
        GenerateRequestStatus.Init,
        GenerateRequestStatus.Generating,
        GenerateRequestStatus.ContextFinished,
    )
    status = queue.GenerateStatus()
    while status in running:
        elements = queue.Get()
        if elements is not None:
            tokenizer = served.loader.init_tokenizer().tokenizer
            assert tokenizer is not None
            yield tokenizer.decode(elements.ids_from_generate)
        status = queue.GenerateStatus()
    served.engine.release_request(NAME, handle)


def test_http_server_streams_the_answer_of_a_chat(served: Served) -> None:
    async def answer(text: str) -> str:
        return "".join([part async for part in parts(served, text)])

    async def answers() -> tuple[str, str, str]:
        return await asyncio.gather(answer("Hello"), answer("Hello"), answer("Tell me more"))

    first, second, third = asyncio.run(answers())
    assert first == second != third
    assert first
