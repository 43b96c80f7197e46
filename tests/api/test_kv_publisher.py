"""KV events on ZMQ sockets: late readers, lost messages, replays, and the rules of routers."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import anyio
import msgspec
import pytest

import penstock
from support.api.adapters import write_adapter
from support.api.checkpoints import make_config
from support.api.engines import make_engine
from support.api.kv_events import LlmD, aibrix_events, salt_of_dynamo
from support.api.running import random_prompt

zmq = pytest.importorskip("zmq")

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

pytestmark = pytest.mark.needs("unix_sockets")

PARAMS = penstock.SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
TOPIC = "kv@pod@tiny"
#: Milliseconds: longer than a message ever takes.
PATIENCE = 60_000


class Reader:
    """A subscriber of the events."""

    def __init__(self, context: Any, options: Mapping[str, Any]) -> None:
        self.events = context.socket(zmq.SUB)
        self.events.setsockopt(zmq.SUBSCRIBE, TOPIC.encode())
        self.events.setsockopt(zmq.RCVTIMEO, PATIENCE)
        self.events.connect(options["endpoint"])

    def take(self) -> tuple[int, bytes]:
        """The number and the payload of the next message."""
        topic, number, payload = self.events.recv_multipart()
        assert topic == TOPIC.encode()
        assert len(number) == 8
        return int.from_bytes(number, "big"), payload


def replay(context: Any, options: Mapping[str, Any], start: int) -> list[tuple[int, bytes]]:
    """The messages from a number on that the publisher repeats."""
    found: list[tuple[int, bytes]] = []
    with context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.RCVTIMEO, PATIENCE)
        socket.connect(options["replay_endpoint"])
        socket.send_multipart((b"", start.to_bytes(8, "big")))
        while True:
            empty, number, payload = socket.recv_multipart()
            assert empty == b""
            if number == (-1).to_bytes(8, "big", signed=True):
                assert payload == b""
                return found
            found.append((int.from_bytes(number, "big"), payload))


def free_port(context: Any) -> int:
    with context.socket(zmq.PUB) as socket:
        port: int = socket.bind_to_random_port("tcp://127.0.0.1")
        return port


@contextmanager
def context() -> Iterator[Any]:
    sockets = zmq.Context()
    try:
        yield sockets
    finally:
        sockets.destroy(linger=0)


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    return {
        "endpoint": f"ipc://{tmp_path}/e",
        "replay_endpoint": f"ipc://{tmp_path}/r",
        "topic": TOPIC,
        "hash_key": "fleet",
    }


def run(engine: penstock.Engine, seed: int, **options: Any) -> None:
    engine.blocking.generate(random_prompt(64, seed=seed), PARAMS, **options)


def num_cached(engine: penstock.Engine) -> int:
    return engine.stats().blocks_cached


def all_events(messages: list[tuple[int, bytes]]) -> list[Any]:
    return [event for _, payload in messages for event in msgspec.msgpack.decode(payload)[1]]


def test_replay_gives_a_late_reader_all_messages(tiny_model: Path, options: dict[str, Any]) -> None:
    with context() as sockets, make_engine(tiny_model, kv_events=options) as engine:
        for seed in range(3):
            run(engine, seed)
        index = LlmD()
        numbers: list[int] = []
        while len(index.blocks) < num_cached(engine):  # the last message may be on its way
            numbers = []
            index = LlmD()
            for number, payload in replay(sockets, options, 0):
                numbers.append(number)
                index.take(payload)
        assert numbers == list(range(len(numbers)))
        assert index.num_unknown_parents == 0
        assert [number for number, _ in replay(sockets, options, numbers[-1])] == numbers[-1:]
        assert replay(sockets, options, 1000) == []


def test_live_reader_follows_the_engine_to_its_end(tiny_model: Path, options: dict[str, Any]) -> None:
    with context() as sockets:
        with make_engine(tiny_model, kv_events=options) as engine:
            reader = Reader(sockets, options)
            index = LlmD()
            # A subscription takes effect at an unknown time: what was sent before is repeated.
            first, payload = -1, b""
            while first < 0:
                run(engine, 0)
                engine.reset_prefix_cache()
                if reader.events.poll(100):
                    first, payload = reader.take()
            for _, before in replay(sockets, options, 0):
                index.take(before)
            last = first
            run(engine, 1)
            engine.blocking.sleep()
            engine.blocking.wake()
            run(engine, 2)
        cleared = 0
        while cleared < 2:  # by the sleep, and by the end
            number, payload = reader.take()
            assert number == last + 1
            last = number
            index.take(payload)
            cleared += msgspec.msgpack.decode(payload)[1] == [["AllBlocksCleared"]]
        assert index.blocks == set()


def test_lost_messages_are_found_in_the_replay(
    tiny_model: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock._kv_publisher._MAX_KEPT", 2)
    with context() as sockets, make_engine(tiny_model, kv_events=options) as engine:
        for seed in range(6):
            run(engine, seed)
        for _ in range(2):  # the first messages are no longer kept, so all blocks come again
            index = LlmD()
            while len(index.blocks) < num_cached(engine):
                index = LlmD()
                messages = replay(sockets, options, 0)
                for _, payload in messages:
                    index.take(payload)
            assert index.num_unknown_parents == 0
            assert all_events(messages)[0] == ["AllBlocksCleared"]
            run(engine, 7)
            run(engine, 8)


def test_messages_follow_the_rules_of_the_routers(
    tiny_model: Path, options: dict[str, Any], tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "adapter", make_config("llama"), seed=1)
    with context() as sockets, make_engine(tiny_model, kv_events=options, max_adapters=1) as engine:
        engine.blocking.load_adapter("sql", folder)
        run(engine, 0)
        run(engine, 0, adapter="sql", cache_salt="mine")
        run(engine, 0, cache_salt="dynamo-cache-salt:other")
        run(engine, 0, cache_salt="mine")
        messages: list[tuple[int, bytes]] = []
        while sum(len(event[1]) for event in all_events(messages) if event[0] == "BlockStored") < 16:
            messages = replay(sockets, options, 0)
        for _, payload in messages:
            assert aibrix_events(payload)
    found = []
    hashes = set()
    for name, *fields in all_events(messages):
        if name == "BlockStored":
            blocks, parent, tokens, size, lora_id, medium, lora_name, extra_keys = fields
            assert (size, medium, len(tokens)) == (16, "GPU", 16 * len(blocks))
            assert (lora_id is None) == (lora_name is None)
            assert extra_keys is None or len(extra_keys) == len(blocks)
            hashes.update(blocks)
            if parent is None:
                found.append((lora_name, salt_of_dynamo(extra_keys, lora_name)))
    assert found == [(None, None), ("sql", "mine"), (None, "other"), (None, "mine")]
    assert len(hashes) == 16


def test_maps_have_the_same_fields(tiny_model: Path, options: dict[str, Any]) -> None:
    options |= {"format": "map", "rank": 3}
    with context() as sockets, make_engine(tiny_model, kv_events=options) as engine:
        run(engine, 0)
        events: list[dict[str, Any]] = []
        while len(events) < 2:
            batches = [msgspec.msgpack.decode(payload) for _, payload in replay(sockets, options, 0)]
            events = [event for batch in batches for event in batch["events"]]
        assert all(batch["data_parallel_rank"] == 3 and batch["ts"] > 0 for batch in batches)
    assert events[0] == {"type": "AllBlocksCleared"}
    stored = events[1]
    assert stored.pop("type") == "BlockStored"
    assert len(stored.pop("block_hashes")) * 16 == len(stored.pop("token_ids"))
    none = dict.fromkeys(("parent_block_hash", "lora_id", "lora_name", "extra_keys"))
    assert stored == {"block_size": 16, "medium": "GPU", **none}


def test_hash_key_decides_the_hashes(tiny_model: Path) -> None:
    def hashes(key: str) -> Any:
        async def first() -> Sequence[int]:
            async with make_engine(tiny_model, kv_events={"hash_key": key}) as engine:
                await engine.generate(random_prompt(64), PARAMS)
                stream = engine.kv_events()
                assert await anext(stream) == penstock.AllBlocksCleared()
                event = await anext(stream)
                assert isinstance(event, penstock.BlockStored)
                return event.block_hashes

        return anyio.run(first)

    assert hashes("fleet") == hashes("fleet")
    assert not set(hashes("fleet")) & set(hashes("other"))


def test_address_that_is_taken_is_an_error(tiny_model: Path) -> None:
    with context() as sockets:
        other = sockets.socket(zmq.PUB)
        port = other.bind_to_random_port("tcp://127.0.0.1")
        with (
            pytest.raises(penstock.ConfigError, match=rf"tcp://127.0.0.1:{port} cannot be used"),
            make_engine(tiny_model, kv_events=str(port)),
        ):
            pass
        other.close()
    with make_engine(tiny_model, kv_events=str(port)):  # nothing was left open
        pass


def test_address_that_others_reach_is_warned_of(tiny_model: Path) -> None:
    with context() as sockets:
        port = free_port(sockets)
    with (
        pytest.warns(RuntimeWarning, match="contain the tokens of prompts"),
        make_engine(tiny_model, kv_events={"endpoint": f"tcp://*:{port}"}),
    ):
        pass


@pytest.mark.needs("fork")
def test_child_of_a_fork_closes_nothing_of_the_parent(tiny_model: Path, options: dict[str, Any]) -> None:
    program = """
import os, sys, warnings
import penstock
warnings.simplefilter("ignore", DeprecationWarning)
model, endpoint = sys.argv[1:]
engine = penstock.Engine(model, threads=2, kv_events=endpoint)
with engine:
    process = os.fork()
    if process == 0:
        engine.close()
        sys.exit(0)
    assert os.waitpid(process, 0)[1] == 0
    engine.blocking.generate([1] * 40, max_tokens=2)
print("done")
"""
    command = [sys.executable, "-c", program, str(tiny_model), options["endpoint"]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
