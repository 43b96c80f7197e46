# ruff: noqa: ARG001 - a processor takes both arguments, used or not
"""Custom logits processors: their arguments, their results, their failures."""

from __future__ import annotations

import copy
import gc
import re
import weakref
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest

import penstock
from support.api.engines import (
    LONG,
    PROMPT,
    SHORT,
    assert_at_rest,
    assert_at_rest_blocking,
    bits_of,
    make_engine,
    start_python,
    wait_until,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    with make_engine(tiny_model) as engine:
        yield engine


def choose(logits: Any, token_id: int) -> None:
    logits[:] = -np.inf
    logits[token_id] = 0


def test_processor_gets_tokens_and_writes_logits(engine: penstock.Engine) -> None:
    seen: list[Sequence[int]] = []

    def count(token_ids: Sequence[int], logits: penstock.Tensor) -> None:
        seen.append(token_ids)
        assert logits.shape == (512,)
        array = np.from_dlpack(logits) if len(seen) % 2 else np.asarray(logits)
        choose(array, 100 + len(token_ids))

    result = engine.blocking.generate(PROMPT, SHORT, max_tokens=3, logits_processors=[count])
    assert result.token_ids == (104, 105, 106)
    assert seen == [[*PROMPT], [*PROMPT, 104], [*PROMPT, 104, 105]]


def test_returned_logits_replace_and_reach_the_next_processor(
    engine: penstock.Engine,
) -> None:
    def first(token_ids: Sequence[int], logits: penstock.Tensor) -> Any:
        array = np.zeros(512, dtype=np.float32)
        array[7] = 1
        return array

    def second(token_ids: Sequence[int], logits: penstock.Tensor) -> Any:
        assert np.asarray(logits)[7] == 1
        return np.asarray(logits)[::-1]  # a view with a negative stride

    result = engine.blocking.generate(
        PROMPT, SHORT, max_tokens=2, temperature=0, logits_processors=[first, second]
    )
    assert result.token_ids == (504, 504)


def test_identity_processor_changes_no_bit(engine: penstock.Engine) -> None:
    def nothing(token_ids: Sequence[int], logits: penstock.Tensor) -> penstock.Tensor:
        return logits

    plain = engine.blocking.generate(PROMPT, SHORT, logprobs=True)
    processed = engine.blocking.generate(PROMPT, SHORT, logprobs=True, logits_processors=[nothing, nothing])
    assert bits_of(processed) == bits_of(plain)


def test_logits_kept_after_the_call_own_their_memory(engine: penstock.Engine) -> None:
    kept: list[Any] = []

    def keep(token_ids: Sequence[int], logits: penstock.Tensor) -> None:
        for array in kept:
            array[:] = -np.inf
        kept.append(np.asarray(logits))

    plain = engine.blocking.generate(PROMPT, SHORT)
    assert engine.blocking.generate(PROMPT, SHORT, logits_processors=[keep]).token_ids == plain.token_ids
    gc.collect()
    assert [len(array) for array in kept] == [512] * 8


def fail(token_ids: Sequence[int], logits: penstock.Tensor) -> None:
    message = "not today"
    raise LookupError(message)


FAILURES: dict[str, Any] = {
    "LookupError: not today": fail,
    r"ndarray of shape \[3\] is not a float32 array of": lambda *_: np.zeros(3, dtype=np.float32),
    r"ndarray of shape \[1, 512\]": lambda *_: np.zeros((1, 512), dtype=np.float32),
    "ndarray is not a float32 array on the CPU": lambda *_: np.zeros(512),
    r"str is not a float32 array of shape \[512\]": lambda *_: "logits",
    "ndarray has the byte order of another machine": lambda *_: np.zeros(512, dtype=np.float32).astype(">f4"),
    "the logit of token 0 is NaN": lambda *_: np.full(512, np.nan, dtype=np.float32),
    "the logit of token 0 is inf": lambda *_: np.full(512, np.inf, dtype=np.float32),
    "no token is left to sample: logits_processors": lambda *_: np.full(512, -np.inf, dtype=np.float32),
    "positional argument": lambda: None,
}


@pytest.mark.anyio
@pytest.mark.parametrize("reason", FAILURES)
async def test_failing_processor_ends_only_its_request(engine: penstock.Engine, reason: str) -> None:
    alone = await engine.generate(PROMPT, SHORT)
    async with engine.stream(PROMPT, SHORT) as other:
        with pytest.raises(penstock.GenerationError, match=reason):
            await engine.generate(PROMPT, SHORT, logits_processors=[FAILURES[reason]])
        assert bits_of(await other.result()) == bits_of(alone)
    await assert_at_rest(engine)


WAITS: dict[str, Callable[[penstock.Engine, Any], object]] = {
    "score": lambda engine, _: engine.blocking.score("a"),
    "generate": lambda engine, _: engine.blocking.generate("a"),
    "result": lambda _, request: request.result(),
    "close": lambda engine, _: engine.close(),
    "aclose": lambda engine, _: anyio.run(engine.aclose),
    "reset_prefix_cache": lambda engine, _: engine.reset_prefix_cache(),
    "event loop": lambda engine, _: anyio.run(engine.generate, "a"),
}


@pytest.mark.anyio
@pytest.mark.parametrize("way", WAITS)
async def test_engine_call_inside_a_processor_raises(engine: penstock.Engine, way: str) -> None:
    with engine.blocking.stream(PROMPT, LONG) as other:

        def wait(token_ids: Sequence[int], logits: penstock.Tensor) -> None:
            WAITS[way](engine, other)

        with pytest.raises(penstock.GenerationError, match="a logits processor cannot wait for the engine"):
            await engine.generate(PROMPT, SHORT, logits_processors=[wait])
    await assert_at_rest(engine)


@pytest.mark.anyio
async def test_processor_exception_is_logged_with_its_traceback(
    engine: penstock.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    line = fail.__code__.co_firstlineno + 2
    with pytest.raises(penstock.GenerationError, match=rf"not today \({re.escape(__file__)}, line {line}\)"):
        await engine.generate(PROMPT, SHORT, logits_processors=[fail])
    [record] = caplog.records
    assert record.name == "penstock"
    assert f'{__file__}", line {line}, in fail' in record.getMessage()


def test_processor_is_released_after_its_request(engine: penstock.Engine) -> None:
    class Processor:
        def __call__(self, token_ids: Sequence[int], logits: penstock.Tensor) -> None: ...

    processor = Processor()
    reference = weakref.ref(processor)
    engine.blocking.generate(PROMPT, SHORT, logits_processors=[processor])
    del processor
    engine.blocking.generate(PROMPT, SHORT)
    gc.collect()
    assert reference() is None


def test_interpreter_exits_during_a_processor_call(tiny_model: Path) -> None:
    code = f"""
import penstock, sys
entered = __import__("threading").Event()
def slow(token_ids, logits):
    entered.set()
    __import__("time").sleep(0.01)
engine = penstock.Engine({str(tiny_model)!r}, threads=1)
engine.blocking.start()
request = engine.blocking.start_request([1], max_tokens=400, ignore_eos=True, logits_processors=[slow])
entered.wait()
"""
    with start_python(code) as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors.decode()


def begin_a_request_of_itself(engine: penstock.Engine) -> weakref.ref[Any]:
    """Start a request whose processor refers to the request, and drop it."""
    box: list[penstock.BlockingRequest] = []

    def processor(token_ids: Sequence[int], logits: penstock.Tensor) -> None:
        assert box is not None

    box.append(engine.blocking.start_request(PROMPT, LONG, logits_processors=[processor]))
    assert box[0].params.logits_processors == (processor,)
    next(iter(box[0]))
    return weakref.ref(processor)


def test_processor_referring_to_its_request_is_collected(tiny_model: Path) -> None:
    engine = make_engine(tiny_model)
    engine.blocking.start()
    processor = begin_a_request_of_itself(engine)
    with pytest.warns(ResourceWarning, match="dropped before it finished"):
        wait_until(lambda: gc.collect() >= 0 and processor() is None)
    assert_at_rest_blocking(engine)
    session = weakref.ref(engine._session)
    engine.close()
    del engine
    gc.collect()
    assert session() is None


STUCK = """
import os, penstock, signal, sys, threading, time
entered = threading.Event()
def stuck(token_ids, logits):
    entered.set()
    threading.Event().wait()
engine = penstock.Engine(sys.argv[1], threads=1)
engine.blocking.start()
request = engine.blocking.start_request([1], max_tokens=4, logits_processors=[stuck])
entered.wait()
"""


def test_interpreter_exits_though_a_processor_never_returns(tiny_model: Path) -> None:
    with start_python(STUCK, tiny_model) as process:
        process.communicate(timeout=60)
    assert process.returncode is not None


@pytest.mark.needs("signals")
def test_ctrl_c_interrupts_close(tiny_model: Path) -> None:
    close = """
threading.Timer(0.2, signal.raise_signal, [signal.SIGINT]).start()
try:
    engine.close()
except KeyboardInterrupt:
    print("interrupted", flush=True)
os._exit(0)
"""
    with start_python(STUCK + close, tiny_model) as process:
        output, errors = process.communicate(timeout=60)
    assert output == b"interrupted\n", errors.decode()


@pytest.mark.needs("fork")
def test_fork_during_a_processor_call_exits_at_once(tiny_model: Path) -> None:
    fork = """
child = os.fork()
if child == 0:
    sys.exit(0)
begin = time.monotonic()
os.waitpid(child, 0)
print(time.monotonic() - begin < 4, flush=True)
os._exit(0)
"""
    with start_python(STUCK + fork, tiny_model) as process:
        output, errors = process.communicate(timeout=60)
    assert output == b"True\n", errors.decode()


@pytest.mark.torch
def test_torch_tensor_result_is_accepted(engine: penstock.Engine) -> None:
    import torch

    def add(token_ids: Sequence[int], logits: penstock.Tensor) -> Any:
        return torch.from_dlpack(logits) + 0

    def write(token_ids: Sequence[int], logits: penstock.Tensor) -> None:
        choose(torch.from_dlpack(logits), 9)

    plain = engine.blocking.generate(PROMPT, SHORT)
    assert engine.blocking.generate(PROMPT, SHORT, logits_processors=[add]).token_ids == plain.token_ids
    assert engine.blocking.generate(PROMPT, SHORT, logits_processors=[write]).token_ids == (9,) * 8


class Node:
    """An object that parameters can be stored in, and that has weak references."""

    params: penstock.SamplingParams
    request: penstock.BlockingRequest

    def __call__(self, token_ids: Sequence[int], logits: penstock.Tensor) -> None:
        """Leave the logits as they are."""


def test_cycle_through_parameters_is_collected() -> None:
    node = Node()
    node.params = penstock.SamplingParams(logits_processors=[node, node.__call__])
    # Each object has references of its own.
    others = [node.params.replace(seed=1), copy.copy(node.params), penstock.SamplingParams(seed=3)]
    assert others[0].logits_processors == node.params.logits_processors
    dead = weakref.ref(node)
    del node
    gc.collect()
    assert dead() is not None, "another object refers to the processor"
    others.clear()
    gc.collect()
    assert dead() is None


def test_parameters_of_an_open_request_outlive_a_collection(tiny_model: Path) -> None:
    with make_engine(tiny_model) as engine:
        node = Node()
        node.params = LONG.replace(logits_processors=[node])
        request = engine.blocking.start_request(PROMPT, node.params)
        node.request = request
        dead = weakref.ref(node)
        del node
        gc.collect()
        assert dead() is not None, "the request runs"
        assert request.result().finish_reason == "length"
        del request
        gc.collect()
        assert dead() is None


def begin_a_request_in_a_cycle(engine: penstock.Engine) -> weakref.ref[Node]:
    node = Node()
    node.params = LONG.replace(logits_processors=[node])
    node.request = engine.blocking.start_request(PROMPT, node.params)
    assert node.request.params.logits_processors == (node,)
    next(iter(node.request))
    return weakref.ref(node)


def test_cycle_through_a_running_request_is_collected(tiny_model: Path) -> None:
    with make_engine(tiny_model) as engine:
        dead = begin_a_request_in_a_cycle(engine)
        with pytest.warns(ResourceWarning, match="dropped before it finished"):
            wait_until(lambda: gc.collect() >= 0 and dead() is None)
        assert engine.blocking.generate(PROMPT, SHORT).token_ids
        assert_at_rest_blocking(engine)
