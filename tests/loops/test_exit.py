"""The end of the interpreter while daemon threads use an engine: no panic, no hang, no output."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.api.engines import start_python

if TYPE_CHECKING:
    from pathlib import Path

#: The work of a daemon thread, which it repeats.
WORK = {
    "generate": "engine.blocking.generate([10, 20, 30], max_tokens=50, ignore_eos=True)",
    "stream": """
for chunk in engine.blocking.start_request([10, 20, 30], max_tokens=50, ignore_eos=True):
    pass
""",
    "wait": "Port(blocking=True).wait()",
    "encode": "engine.encode('hello world ' * 20_000)",
    "compile": "engine.blocking.generate('x', regex=f'a{next(numbers)}', max_tokens=2)",
    "load": """
with penstock.Engine(sys.argv[1], threads=1) as other:
    other.info
""",
    "event loop": """
async def many():
    async with asyncio.TaskGroup() as group:
        for number in range(10):
            group.create_task(engine.generate([10, 20, number], max_tokens=20, ignore_eos=True))
asyncio.run(many())
""",
}

PROGRAM = """
import asyncio, itertools, sys, threading, time
import penstock
from penstock._core import Port

engine = penstock.Engine(sys.argv[1], threads=1)
engine.blocking.start()
numbers = itertools.count()
code = compile(sys.argv[2], "work", "exec")
begun = threading.Barrier(4)

def work():
    begun.wait()
    while True:
        exec(code, globals())

class Last:
    sleep = staticmethod(time.sleep)

    def __del__(self):  # the interpreter is gone for other threads, which may run meanwhile
        self.sleep(0.05)

for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
sys.last = Last()
begun.wait()
print("end")
"""


@pytest.mark.parametrize("work", WORK.values(), ids=WORK)
def test_daemon_threads_do_not_disturb_the_exit(tiny_model: Path, work: str) -> None:
    process = start_python(PROGRAM, tiny_model, work)
    with process:
        try:
            output, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (output, process.returncode) == (b"end\n", 0), errors.decode()
    assert b"panicked" not in errors, errors.decode()
    assert b"Exception in thread" not in errors, errors.decode()
