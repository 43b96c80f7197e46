"""NUMA nodes: the CPUs of threads, the policy of memory, errors, and a system that refuses."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import penstock
from support.api.engines import PROMPT, bits_of, make_engine, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterable

NODES = Path("/sys/devices/system/node")
NUMA_MAPS = Path("/proc/self/numa_maps")
needs_nodes = pytest.mark.skipif(not NODES.joinpath("node0").exists(), reason="needs Linux with NUMA nodes")

#: Returns EPERM from `mbind` and `sched_setaffinity`, as containers do, and opens a converted model.
REFUSED = """
import ctypes, logging, struct, sys
logging.basicConfig(format="%(levelname)s %(message)s", stream=sys.stdout)
import penstock

def refuse(*calls):
    code = [(0x20, 0, 0, 0)]  # load the number of the call
    code += [(0x15, len(calls) - i, 0, call) for i, call in enumerate(calls)]  # refuse it
    code += [(0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x00050001)]  # allow; EPERM
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    filter = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code), ctypes.addressof(program)))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges
    assert libc.prctl(22, 2, ctypes.byref(filter), 0, 0) == 0, ctypes.get_errno()

refuse(237, 203)
with penstock.Engine(sys.argv[1], threads=2) as engine:
    mapped = engine.info.memory
with penstock.Engine(sys.argv[1], threads=2, numa_nodes=[int(sys.argv[2])]) as engine:
    assert len(engine.blocking.generate([1, 2, 3], max_tokens=4, ignore_eos=True).token_ids) == 4
    print(engine.info.numa.threads_pinned, engine.info.numa.memory_placed)
    assert engine.info.memory.peak == mapped.peak, "the weights are mapped"
"""


def node() -> int:
    """A node with CPUs that this process may use."""
    for folder in sorted(NODES.glob("node[0-9]*")):
        if cpus_of(folder.joinpath("cpulist").read_text()) & os.sched_getaffinity(0):
            return int(folder.name.removeprefix("node"))
    pytest.skip("no node has CPUs of this process")


def policies() -> str | None:
    """The policies of the memory of this process; `None` if the kernel does not show them."""
    return NUMA_MAPS.read_text() if NUMA_MAPS.exists() else None


def cpus_of(text: str) -> set[int]:
    parts = [part.split("-") for part in text.strip().split(",") if part]
    return {cpu for part in parts for cpu in range(int(part[0]), int(part[-1]) + 1)}


def tasks() -> set[Path]:
    """The threads of this process."""
    return set(Path("/proc/self/task").iterdir())


def cpus_of_threads(threads: Iterable[Path], *names: str) -> list[set[int]]:
    """The CPUs of those of the threads with these names."""
    found = []
    for thread in threads:
        with suppress(OSError):  # a thread that ends meanwhile
            if thread.joinpath("comm").read_text().strip() in names:
                lines = thread.joinpath("status").read_text().splitlines()
                found += [cpus_of(line.split()[1]) for line in lines if line.startswith("Cpus_allowed_list")]
    return found


@pytest.mark.needs("proc")
@needs_nodes
@pytest.mark.anyio
async def test_engine_on_a_node_has_its_threads_and_memory_there(tiny_model: Path) -> None:
    before, former = os.sched_getaffinity(0), tasks()
    async with penstock.Engine(tiny_model, threads=2, numa_nodes=[node()]) as engine:
        numa = engine.info.numa
        assert numa is not None
        assert (numa.nodes, numa.threads_pinned) == ((node(),), True)
        assert set(numa.cpus) <= before

        def are_placed() -> bool:
            workers = cpus_of_threads(tasks() - former, "penstock-worker", "penstock-device")
            return len(workers) == 2 and all(cpus == set(numa.cpus) for cpus in workers)

        wait_until(are_placed)  # a thread sets its name and its CPUs when it first runs
        if numa.memory_placed and (shown := policies()) is not None:
            assert f" prefer:{node()} anon=" in shown
        assert (await engine.generate(PROMPT, max_tokens=4, ignore_eos=True)).finish_reason == "length"
    assert os.sched_getaffinity(0) == before
    async with penstock.Engine(tiny_model, threads=1) as engine:
        assert engine.info.numa is None


@pytest.mark.needs("proc")
@needs_nodes
def test_output_on_a_node_has_the_same_bits(tiny_model: Path, tmp_path: Path) -> None:
    def output(model: Path, **options: Any) -> tuple[object, penstock.ModelInfo]:
        with make_engine(model, **options) as engine:
            result = engine.blocking.generate(PROMPT, max_tokens=12, temperature=0.0, logprobs=True)
            return bits_of(result), engine.info

    expected, info = output(tiny_model)
    assert output(tiny_model, numa_nodes=[node()])[0] == expected
    converted = penstock.convert(tiny_model, tmp_path / "converted")
    copied, info_of_copy = output(converted, numa_nodes=(node(),))
    mapped, info_of_mapped = output(converted)
    assert copied == mapped == expected
    assert info_of_copy.numa is not None
    is_copied = info_of_copy.numa.memory_placed
    assert info_of_mapped.memory.peak < info.memory.peak
    assert info_of_copy.memory.peak == (info if is_copied else info_of_mapped).memory.peak


@pytest.mark.needs("proc")
@needs_nodes
def test_threads_default_to_the_cores_of_the_nodes(tiny_model: Path) -> None:
    with penstock.Engine(tiny_model, numa_nodes=[node()]) as engine:
        assert engine.info.numa is not None
        assert 1 <= engine.info.threads <= len(engine.info.numa.cpus)


@pytest.mark.parametrize(
    ("options", "field", "message"),
    [
        ({"numa_nodes": 0}, "numa_nodes", "a sequence of NUMA nodes"),
        ({"numa_nodes": []}, "numa_nodes", "1 to 16 nodes"),
        ({"numa_nodes": range(17)}, "numa_nodes", "at most 16 nodes"),
        ({"numa_nodes": [0, -1]}, "numa_nodes", r"numa_nodes\[1\]=-1 .* an integer from 0 to 1023"),
        ({"numa_nodes": [1, 0, 1]}, "numa_nodes", r"\(1, 0, 1\) .* 1 occurs twice"),
        ({"numa_nodes": [0, 1], "threads": 3}, "threads", "a multiple of 2, the number of numa_nodes"),
    ],
)
def test_invalid_nodes_error_names_field_and_limit(options: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(penstock.ConfigError, match=message) as caught:
        penstock.EngineConfig(**options)
    assert caught.value.field == field
    assert isinstance(caught.value, ValueError)


def test_threads_of_environment_error_names_the_variable(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_THREADS", "3")
    match = "PENSTOCK_THREADS=3 is not allowed: it must be a multiple of 2, the number of numa_nodes"
    with pytest.raises(penstock.ConfigError, match=match) as caught:
        penstock.Engine(tiny_model, numa_nodes=[0, 1]).blocking.start()
    assert caught.value.field == "PENSTOCK_THREADS"


@pytest.mark.needs("proc")
@needs_nodes
def test_missing_node_error_lists_the_nodes(tiny_model: Path) -> None:
    match = r"numa_nodes=\[1023\] is not allowed: .* of this machine: [0-9, ]+; node 1023 does not exist"
    with pytest.raises(penstock.ConfigError, match=match) as caught:
        penstock.Engine(tiny_model, numa_nodes=[1023]).blocking.start()
    assert caught.value.field == "numa_nodes"


@pytest.mark.needs("proc")
@needs_nodes
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the filter has the numbers of x86-64")
def test_refused_system_calls_are_a_warning_and_shown_in_info(tiny_model: Path, tmp_path: Path) -> None:
    converted = penstock.convert(tiny_model, tmp_path / "converted")
    command = [sys.executable, "-c", REFUSED, str(converted), str(node())]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    assert output.splitlines() == [
        "WARNING the system refuses to run threads on NUMA nodes: Operation not permitted (os error 1)",
        "WARNING the system refuses to place memory on NUMA nodes: Operation not permitted (os error 1)",
        "False False",
    ]


@pytest.mark.needs("fork", "proc")
@needs_nodes
def test_child_of_a_fork_has_the_cpus_of_its_parent(tiny_model: Path) -> None:
    program = """
import os, sys, warnings, penstock
warnings.simplefilter("ignore", DeprecationWarning)
before = os.sched_getaffinity(0)
with penstock.Engine(sys.argv[1], threads=2, numa_nodes=[int(sys.argv[2])]) as engine:
    assert os.sched_getaffinity(0) == before
    child = os.fork()
    if child == 0:
        os._exit(0 if os.sched_getaffinity(0) == before else 1)
    assert os.waitpid(child, 0)[1] == 0
    engine.blocking.generate([1, 2, 3], max_tokens=4)
"""
    command = [sys.executable, "-c", program, str(tiny_model), str(node())]
    subprocess.run(command, check=True, timeout=60)
