"""Programs in which calls of the emulated driver fail while an engine starts, and while it computes."""

from __future__ import annotations

import ctypes
import tempfile
import threading
from pathlib import Path
from typing import Any

import penstock
from emu.client import CAPTURE_INVALIDATED, GLOBAL, LAUNCH_FAILED, NOT_READY, OUT_OF_MEMORY, Device
from support import hooks
from support.api.checkpoints import make_config, write_checkpoint
from support.api.engines import LONG, PROMPT, SHORT, engine_threads
from support.paths import TESTS

SIZES: dict[str, Any] = {
    "device": "cuda",
    "threads": 1,
    "max_model_len": 128,
    "max_num_batched_tokens": 16,
    "max_num_seqs": 2,
    "kv_cache_blocks": 20,
    "host_cache_blocks": 4,
}
#: Tokens of a request before the step that becomes a graph.
CAPTURED = 4
#: Calls that take memory.
ALLOCATIONS = ("cuMemAlloc_v2", "cuMemHostAlloc")
#: Calls that end the use of something: an engine that closes does not report their failures.
ENDS = ("Destroy", "Free", "Unload", "Release", "Unregister")


def call_names() -> list[str]:
    """The functions of the emulated driver that can fail."""
    names = TESTS.joinpath("emu", "calls.txt").read_text().split()
    return [name for name in names if not name.startswith("cuGetError")]


def code_of(call: str) -> int:
    return OUT_OF_MEMORY if call in ALLOCATIONS else LAUNCH_FAILED


class Failing:
    """A driver with calls that fail, and a model."""

    def __init__(self, folder: str) -> None:
        self.driver = Device("libcuda.so.1")
        self.model = write_checkpoint(Path(folder), make_config("llama", num_hidden_layers=1))

    def open(self) -> penstock.Engine:
        """An engine that has not started."""
        return penstock.Engine(self.model, **SIZES)

    def counts(self) -> dict[str, int]:
        """The calls since the last `clear`."""
        count = self.driver.library.emuCount
        return {name: number for name in call_names() if (number := count(name.encode()))}

    def clear(self) -> list[str]:
        """Removes the faults and the findings; returns the findings."""
        findings = self.driver.findings()
        self.driver.library.emuClear()
        return findings

    def current_context(self) -> int | None:
        """The context of the device, which this process has."""
        device = self.driver.output(ctypes.c_int, "cuDeviceGet", 0)
        context: int | None = self.driver.output(ctypes.c_void_p, "cuDevicePrimaryCtxRetain", device)
        self.driver.call("cuDevicePrimaryCtxRelease_v2", device)
        return context

    def check_next_engine(self) -> None:
        """Another engine in this process works, and leaves nothing."""
        with self.open() as engine:
            assert len(engine.blocking.generate(PROMPT, SHORT).token_ids) == 8
        assert self.clear() == []
        assert engine_threads() == []


def describe(error: BaseException | None) -> list[str]:
    """The type and the message of an error."""
    return [type(error).__name__, str(error)] if error else []


def fail_in_start() -> dict[str, Any]:
    """Lets the first call of each function fail in the start of an engine, then one in the middle.

    Allocations fail for want of memory, and in another way.
    """
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        failing = Failing(folder)
        failing.check_next_engine()
        engine = failing.open()
        engine.blocking.start()
        counts = failing.counts()
        engine.blocking.close()
        failing.clear()
        for call, count in counts.items():
            cases = [(nth, code_of(call)) for nth in sorted({1, count // 2 + 1})]
            cases += [(1, LAUNCH_FAILED)] if call in ALLOCATIONS else []
            for nth, code in cases:
                failing.driver.fault(call, nth, code)
                error: BaseException | None = None
                try:
                    with failing.open() as engine:
                        engine.blocking.start()
                except penstock.PenstockError as raised:
                    error = raised
                threads = engine_threads()
                found[f"{call} {nth} {code}"] = [describe(error), failing.clear(), threads]
        failing.check_next_engine()
    return found


def fail_in_step() -> dict[str, Any]:
    """Lets a call of each function that steps use fail while two requests run."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        failing = Failing(folder)
        with failing.open() as engine:
            engine.blocking.start()
            failing.clear()
            engine.blocking.generate(PROMPT, SHORT)
            counts = failing.counts()
        for call in counts:
            if any(end in call for end in ENDS):
                continue
            failing.clear()
            with failing.open() as engine:
                requests = [engine.blocking.start_request(PROMPT, LONG, max_tokens=100) for _ in range(2)]
                next(requests[0])
                failing.driver.fault(call, 1, code_of(call))
                errors = []
                for request in requests:
                    try:
                        request.result()
                    except penstock.PenstockError as raised:
                        errors.append(describe(raised))
                try:
                    engine.blocking.generate(PROMPT, SHORT)
                except penstock.PenstockError as raised:
                    errors.append(describe(raised))
            found[call] = [errors, failing.clear(), engine_threads()]
            failing.check_next_engine()
    return found


def refuse_graphs() -> list[Any]:
    """The outputs of a request with graphs and without memory for them, with the calls and the findings."""
    found: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        failing = Failing(folder)
        for refused in (None, "cuGraphInstantiateWithFlags", "cuGraphLaunch"):
            failing.clear()
            if refused:
                failing.driver.fault(refused, 0, OUT_OF_MEMORY)
            with failing.open() as engine:
                result = engine.blocking.generate(PROMPT, LONG, max_tokens=40)
                counts = failing.counts()
            graphs = [counts.get(f"cuGraph{name}", 0) for name in ("InstantiateWithFlags", "Launch")]
            found.append([result.token_ids, graphs, failing.clear()])
    return found


def panic_in_capture() -> list[Any]:
    """A step that panics while it becomes a graph.

    Returns the error of its request, the captures until the step before it and until this step, the tokens of
    another request before and after, the captures after a long one, and the findings and threads at the end.
    """
    other = LONG.replace(max_tokens=CAPTURED)
    captures = []
    with tempfile.TemporaryDirectory() as folder:
        failing = Failing(folder)
        with failing.open() as engine:
            failing.clear()  # of the warm-up
            expected = engine.blocking.generate(PROMPT, other).token_ids
            captures.append(failing.counts().get("cuStreamBeginCapture_v2", 0))
        engine = failing.open()
        position = len(PROMPT) + CAPTURED - 1
        engine._session.adopt(hooks.failing_engine(failing.model, engine.config, failing_position=position))
        failing.clear()
        with engine:
            try:
                engine.blocking.generate(PROMPT, LONG, max_tokens=100)
            except penstock.GenerationError as raised:
                error = describe(raised)
            captures.append(failing.counts().get("cuStreamBeginCapture_v2", 0))
            found = engine.blocking.generate(PROMPT, other).token_ids
            # The graph is that of a part of a step. After some steps it is removed, and later made again.
            engine.blocking.generate([1] * (position + 1), LONG, max_tokens=100)
            captures.append(failing.counts().get("cuStreamBeginCapture_v2", 0))
        return [error, captures, expected, found, failing.clear(), engine_threads()]


def refuse_embeddings() -> list[Any]:
    """The tokens of a request before and after others without memory for their embeddings, and the errors.

    All requests have steps of the same shape. Such a step computes its embeddings, and then itself.
    """
    with tempfile.TemporaryDirectory() as folder:
        failing = Failing(folder)
        engine = failing.open()
        engine._session.adopt(hooks.failing_engine(failing.model, engine.config, refused_details=0))
        failing.clear()
        tokens, errors = [], []
        with engine:
            plain = SHORT.replace(max_tokens=1)
            for params in (plain, *[plain.replace(output_embeddings="all")] * 6, plain):
                try:
                    result = engine.blocking.generate([5], params)
                    tokens.append(result.token_ids)
                except penstock.GenerationError as raised:
                    errors.append(describe(raised)[1])
            captures = failing.counts().get("cuStreamBeginCapture_v2", 0)
        return [tokens, errors, captures, failing.clear(), engine_threads()]


def end_captures() -> list[Any]:
    """The tokens of a request in calm, and while captures end with an error.

    Once before its first launch, and once at its end; then another thread waits for the device in a loop.
    """
    found: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        failing = Failing(folder)
        for ended in ("never", "at the beginning", "at the end"):
            with failing.open() as engine:
                failing.clear()
                if ended == "at the beginning":
                    failing.driver.plant("cuStreamBeginCapture_v2", 1)
                elif ended == "at the end":
                    failing.driver.fault("cuGraphInstantiateWithFlags", 1, CAPTURE_INVALIDATED)
                found.append(engine.blocking.generate(PROMPT, LONG, max_tokens=40).token_ids)
                found.append(failing.counts().get("cuGraphLaunch", 0))
        is_over = threading.Event()

        def wait_for_the_device() -> None:
            failing.driver.call("cuCtxSetCurrent", context)
            while not is_over.is_set():
                failing.driver.code("cuCtxSynchronize")

        with failing.open() as engine:
            context = failing.current_context()
            thread = threading.Thread(target=wait_for_the_device)
            thread.start()
            found += [engine.blocking.generate(PROMPT, LONG, max_tokens=40).token_ids for _ in range(5)]
            is_over.set()
            thread.join()
        return [found, failing.clear(), engine_threads()]


def capture_elsewhere() -> list[Any]:
    """The tokens of a request before, and while this thread captures a graph of its own."""
    with tempfile.TemporaryDirectory() as folder:
        failing = Failing(folder)
        d = failing.driver
        with failing.open() as engine:
            expected = engine.blocking.generate(PROMPT, LONG, max_tokens=40).token_ids
            d.call("cuCtxSetCurrent", failing.current_context())
            stream = d.stream()
            d.call("cuStreamBeginCapture_v2", stream, GLOBAL)
            found = engine.blocking.generate(PROMPT, LONG, max_tokens=40).token_ids
            graph = d.output(ctypes.c_void_p, "cuStreamEndCapture", stream, position=1)
            d.call("cuGraphDestroy", graph)
            d.call("cuStreamDestroy_v2", stream)
            d.call("cuCtxSetCurrent", None)
        return [expected, found, failing.clear(), engine_threads()]


def leave_context() -> list[Any]:
    """Whether this thread has a context: at first, with an engine, and after one that did not open.

    In the middle, the tokens of two requests with a processor that does nothing, and with one that changes
    the context of its thread.
    """
    found: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        failing = Failing(folder)
        driver = failing.driver

        def current() -> bool:
            return bool(driver.output(ctypes.c_void_p, "cuCtxGetCurrent"))

        def change(_tokens: Any, _logits: Any) -> None:
            driver.call("cuCtxSetCurrent", None)

        driver.call("cuInit", 0)
        found.append(current())
        with failing.open() as engine:
            found.append(current())
            for processor in (lambda _tokens, _logits: None, change):
                many = engine.blocking.generate_many([PROMPT] * 2, SHORT, logits_processors=[processor])
                found.append([item.result.token_ids if item.result else str(item.error) for item in many])
        failing.driver.fault("cuModuleLoadData", 3, LAUNCH_FAILED)
        try:
            failing.open().blocking.start()
        except penstock.DeviceUnavailableError:
            found.append(current())
        failing.clear()
        failing.check_next_engine()
    return found


def fail_waits() -> list[Any]:
    """The tokens of two requests before and while the waits of the waiting thread fail, and the waits.

    No event is ready when it is asked, so all tickets depend on that thread.
    """
    waits = "cuEventSynchronize@penstock-cuda"
    with tempfile.TemporaryDirectory() as folder:
        failing = Failing(folder)
        with failing.open() as engine:

            def tokens() -> list[Any]:
                requests = [engine.blocking.start_request(PROMPT, SHORT) for _ in range(2)]
                return [request.result().token_ids for request in requests]

            expected = tokens()
            failing.driver.fault("cuEventQuery", 0, NOT_READY)
            failing.driver.fault(waits, 0, LAUNCH_FAILED)
            found = tokens()
            count = failing.driver.library.emuCount(waits.encode())
            findings = failing.clear()
        threads = engine_threads()
    return [expected, found, count, findings, threads]


def lose_context() -> list[Any]:
    """Two engines of a device, and a kernel of one that reads a bad address; then another engine."""
    with tempfile.TemporaryDirectory() as folder:
        failing = Failing(folder)
        errors = []
        with failing.open() as engine, failing.open() as other:
            requests = [engine.blocking.start_request(PROMPT, LONG, max_tokens=100)]
            next(requests[0])
            failing.driver.plant("launch", 1)
            requests.append(other.blocking.start_request(PROMPT, LONG, max_tokens=100))
            for request in requests:
                try:
                    request.result()
                except penstock.EngineStoppedError as raised:
                    errors.append(describe(raised))
        threads = engine_threads()
        failing.clear()
        failing.check_next_engine()
    return [errors, threads]


def lose_device() -> list[Any]:
    """Lets every call fail in a step, as on a device that is lost, and then lets the device work again."""
    with tempfile.TemporaryDirectory() as folder:
        failing = Failing(folder)
        with failing.open() as engine:
            request = engine.blocking.start_request(PROMPT, LONG, max_tokens=100)
            next(request)
            for call in failing.counts():
                failing.driver.fault(call, 0, LAUNCH_FAILED)
            try:
                request.result()
            except penstock.EngineStoppedError as raised:
                error = describe(raised)
        failing.clear()
        threads = engine_threads()
        failing.check_next_engine()
    return [error, threads]
