"""64 threads start, read, stop, release and sync requests of two models, which stop, unload and start again.

Meanwhile other models are installed, released and serialised, and adapters loaded and unloaded. For longer:
`pytest tests/compat/test_dashinfer_storm.py --storm-operations 2000`.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from penstock.compat.dashinfer.allspark.engine import Engine
from penstock.compat.dashinfer.allspark.enums import AsStatus, GenerateRequestStatus
from penstock.compat.dashinfer.allspark.errors import AsError
from penstock.compat.dashinfer.allspark.model_loader import HuggingFaceModel
from support.api.adapters import write_adapter
from support.api.checkpoints import make_config, write_checkpoint
from support.api.engines import check_stats, resources, run_in_threads
from support.compat.dashinfer import SUCCESS, generate, install, native

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.compat.dashinfer.allspark.engine import RequestHandle
    from penstock.compat.dashinfer.allspark.result_queue import ResultQueue

pytestmark = pytest.mark.needs("proc")

NUM_THREADS = 64
NAMES = ("first", "second")
#: Requests of different lengths: prompt and generation configuration.
REQUESTS: list[tuple[list[int], dict[str, Any]]] = [
    (
        [seed + 1] * (seed + 1),
        {"seed": seed, "early_stopping": False, "max_length": 8 + 16 * seed, "logprobs": True},
    )
    for seed in range(6)
]
#: The name of the adapter of both models, and a request with it.
ADAPTER = "adapter"
ADAPTED: tuple[list[int], dict[str, Any]] = ([7] * 7, {**REQUESTS[2][1], "lora_name": ADAPTER})
FINISHED, INTERRUPTED = GenerateRequestStatus.GenerateFinished, GenerateRequestStatus.GenerateInterrupted
#: Of calls that another thread's call can make invalid.
REFUSED = {
    AsStatus.ALLSPARK_REQUEST_DENIED,
    AsStatus.ALLSPARK_INVALID_CALL_ERROR,
    AsStatus.ALLSPARK_ILLEGAL_REQUEST_ID,
}


class Storm:
    """The operations of the threads, and what they found."""

    def __init__(
        self, engine: Engine, model: Path, output: Path, adapters: dict[str, Path], num_operations: int
    ) -> None:
        self.engine = engine
        self.adapters = adapters  # the directory of the adapter of each model
        self.model = model  # that of the first name
        self.output = output  # the directory of its serialised files
        self.num_operations = num_operations
        self.installing = threading.Lock()  # `install` replaces a function of the module
        self.expected = {name: [generate(engine, *request, name) for request in REQUESTS] for name in NAMES}
        self.adapted: dict[str, list[int]] = {}
        for name, path in adapters.items():
            assert engine.load_lora(name, str(path)) is SUCCESS
            self.adapted[name] = generate(engine, *ADAPTED, name)
        self.done: Counter[str] = Counter()
        self.errors: list[BaseException] = []
        self.shared: list[tuple[str, RequestHandle]] = []  # requests that several threads stop and release

    def run(self, seed: int) -> None:
        """The operations of one thread."""
        chance = random.Random(seed)
        operations = [
            self.read,
            self.read,
            self.sync,
            self.stop,
            self.release,
            self.share,
            self.restart,
            self.look,
            self.adapt,
            self.reload,
            self.install,
            self.serialise,
        ]
        try:
            for _ in range(self.num_operations):
                operation = chance.choices(operations, [12, 12, 8, 8, 8, 8, 1, 4, 8, 0.2, 0.2, 0.2])[0]
                operation(chance)
                self.done[operation.__name__] += 1
        except BaseException as error:  # noqa: BLE001 - reported by the test
            self.errors.append(error)

    def start(self, chance: random.Random) -> tuple[str, RequestHandle, ResultQueue, list[int]] | None:
        """A request with the tokens that it generates; `None` while the model is stopped."""
        name, index = chance.choice(NAMES), chance.randrange(len(REQUESTS))
        status, handle, queue = self.engine.start_request_ids(name, None, *REQUESTS[index])
        if handle is None or queue is None:
            assert status in REFUSED
            self.done["denied"] += 1
            self.engine.sync_request(name, None)  # until it can be started again
            return None
        self.done["started"] += 1
        return name, handle, queue, self.expected[name][index]

    def finish(self, name: str, handle: RequestHandle, queue: ResultQueue, expected: list[int]) -> None:
        """Read a request by the loop of the documents, check its tokens and release it."""
        ids: list[int] = []
        status = queue.GenerateStatus()
        while status not in (FINISHED, INTERRUPTED):
            elements = queue.Get()
            if elements is not None:
                assert len(elements.token_logprobs_list) == len(elements.ids_from_generate)
                ids += elements.ids_from_generate
            status = queue.GenerateStatus()
        assert queue.error is None
        assert ids == expected[: len(ids)]
        assert len(ids) == len(expected) or queue._request.finish_reason in ("interrupted", "cancelled")
        self.engine.release_request(name, handle)
        assert self.engine.release_request(name, handle) is AsStatus.ALLSPARK_ILLEGAL_REQUEST_ID

    def read(self, chance: random.Random) -> None:
        """Read a request to its end."""
        if started := self.start(chance):
            self.finish(*started)

    def sync(self, chance: random.Random) -> None:
        """Wait for a request, then read it at once."""
        if started := self.start(chance):
            name, handle, queue, expected = started
            assert self.engine.sync_request(name, handle) is SUCCESS
            assert queue.GenerateStatus() in (FINISHED, INTERRUPTED)
            elements = queue.Get()
            ids = [] if elements is None else elements.ids_from_generate
            assert ids == expected[: len(ids)]
            assert self.engine.release_request(name, handle) is SUCCESS

    def stop(self, chance: random.Random) -> None:
        """Stop a request while it runs."""
        if started := self.start(chance):
            name, handle, queue, expected = started
            elements = queue.GetWithTimeout(chance.randrange(1, 3))
            assert self.engine.stop_request(name, handle) is SUCCESS
            self.finish(
                name, handle, queue, expected[0 if elements is None else len(elements.ids_from_generate) :]
            )

    def release(self, chance: random.Random) -> None:
        """Release a request while it runs, and read what there is."""
        if started := self.start(chance):
            name, handle, queue, expected = started
            assert self.engine.release_request(name, handle) is SUCCESS
            self.finish(name, handle, queue, expected)

    def share(self, chance: random.Random) -> None:
        """Leave a request to other threads, or use one of theirs in any way."""
        if started := self.start(chance):
            self.shared.append(started[:2])
        name, handle = chance.choice([*self.shared, (NAMES[0], None)])
        for call in chance.sample([self.engine.stop_request, self.engine.release_request], 2):
            assert call(name, handle) in {SUCCESS, AsStatus.ALLSPARK_EMPTY_REQUEST, *REFUSED}
            assert call(NAMES[name == NAMES[0]], handle) is not SUCCESS

    def restart(self, chance: random.Random) -> None:
        """Wait for all requests of a model, or stop and start it."""
        name = chance.choice(NAMES)
        if chance.random() < 0.5:
            assert self.engine.sync_request(name, None) is SUCCESS
        else:
            assert self.engine.stop_model(name) in {SUCCESS, *REFUSED}
            assert self.engine.start_model(name) in {SUCCESS, *REFUSED}

    def look(self, chance: random.Random) -> None:
        """Look at the numbers, and make calls that are refused."""
        statistics = self.engine.get_as_engine_stat(chance.choice(NAMES))
        assert 0 <= statistics.free_token <= statistics.total_token
        assert self.engine.stop_model("third") is AsStatus.ALLSPARK_PARAM_ERROR
        assert self.engine.start_request_ids(NAMES[0], None, [], {})[0] is not SUCCESS

    def adapt(self, chance: random.Random) -> None:
        """Run a request with an adapter, or load or unload the adapter."""
        name, kind = chance.choice(NAMES), chance.random()
        if kind < 0.1:
            status = self.engine.unload_lora(name, ADAPTER)
            others = {AsStatus.ALLSPARK_LORA_IN_USE, AsStatus.ALLSPARK_LORA_NOT_FOUND}
            assert status in {SUCCESS, *others, *REFUSED}
        elif kind < 0.4:
            status = self.engine.load_lora(name, str(self.adapters[name]))
            # One that is being unloaded counts until its requests have ended.
            others = {
                AsStatus.ALLSPARK_LORA_ALREADY_LOADED,
                AsStatus.ALLSPARK_LORA_NUM_EXCEED_LIMIT_ERROR,
            }
            assert status in {SUCCESS, *others, *REFUSED}
        else:
            status, handle, queue = self.engine.start_request_ids(name, None, *ADAPTED)
            if handle is None or queue is None:
                assert status in {AsStatus.ALLSPARK_LORA_NOT_FOUND, *REFUSED}
            else:
                self.finish(name, handle, queue, self.adapted[name])
                self.done["adapted"] += 1

    def reload(self, chance: random.Random) -> None:
        """Unload a model and load it again."""
        name = chance.choice(NAMES)
        for call in (self.engine.unload_device_mem, self.engine.load_device_mem):
            try:
                status = call(name)
            except AsError as error:
                status = error.status
            assert status in {SUCCESS, *REFUSED}  # another thread may load it

    def install(self, chance: random.Random) -> None:
        """Install another model, use and release it."""
        name, index = f"of thread {threading.get_ident()}", chance.randrange(len(REQUESTS))
        with self.installing:
            install(self.engine, self.model, name, max_num_seqs=2, max_model_len=128, kv_cache_blocks=9)
        assert generate(self.engine, *REQUESTS[index], name) == self.expected[NAMES[0]][index]
        assert self.engine.release_model(name) is AsStatus.ALLSPARK_INVALID_CALL_ERROR
        assert self.engine.stop_model(name) is SUCCESS
        assert self.engine.release_model(name) is SUCCESS

    def serialise(self, chance: random.Random) -> None:
        """Write the files of a model, which all threads write."""
        loader = HuggingFaceModel(str(self.model), "model").load_model()
        loader.serialize_to_path(None, self.output, skip_if_exists=chance.random() < 0.5)


@pytest.mark.rare
@pytest.mark.timeout(600)
def test_storm_of_threads_on_two_models_leaks_nothing(
    tiny_model: Path, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    before = resources()
    num_threads = threading.active_count()
    engine = Engine()
    models = (tiny_model, write_checkpoint(tmp_path / "model", make_config("qwen3"), seed=1))
    adapters = {
        name: write_adapter(tmp_path / name / ADAPTER, make_config(family))
        for name, family in zip(NAMES, ("llama", "qwen3"), strict=True)
    }
    options: dict[str, Any] = {"max_num_seqs": 16, "max_model_len": 128, "kv_cache_blocks": 9}
    for name, model in zip(NAMES, models, strict=True):
        install(engine, model, name, max_adapters=1, **options)
    num_operations = pytestconfig.getoption("--storm-operations")
    storm = Storm(engine, tiny_model, tmp_path / "serialised", adapters, num_operations)
    for name in NAMES:
        assert engine.stop_model(name) is SUCCESS
    assert storm.start(random.Random(0)) is None
    for name in NAMES:
        assert engine.start_model(name) is SUCCESS
    started = storm.start(random.Random(0))
    assert started is not None
    storm.finish(*started)
    run_in_threads(storm.run, range(NUM_THREADS))
    assert storm.errors == []
    assert min(storm.done.pop("started"), storm.done.pop("denied"), storm.done.pop("adapted")) > 0
    assert storm.done.total() == NUM_THREADS * num_operations
    for name in NAMES:
        assert engine.load_device_mem(name) is SUCCESS
        engine.start_model(name)
        for index, request in enumerate(REQUESTS):
            assert generate(engine, *request, name) == storm.expected[name][index]
        assert engine.sync_request(name, None) is SUCCESS
        check_stats(native(engine, name))
        statistics = engine.get_as_engine_stat(name)
        assert (statistics.running_request, statistics.pending_request) == (0, 0)
        assert statistics.free_token == statistics.total_token
        assert engine.stop_model(name) is SUCCESS
        assert engine.release_model(name) is SUCCESS
    del engine, storm
    assert resources() == before
    assert threading.active_count() <= num_threads  # an idle worker thread of an earlier test may have ended
