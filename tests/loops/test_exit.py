"""The end of the interpreter while daemon threads or the last objects use the library: no panic, no hang."""

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
    "chat": "engine.apply_chat_template(CHAT, chat_template='{% macro f() %}x{% endmacro %}{{ f() }}')",
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

CHAT = [{"role": "user", "content": "x"}]
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


LATE = """
import builtins, sys
from collections.abc import Mapping
import penstock

class Own(Mapping):
    def __init__(self, values): self.values = values
    def __getitem__(self, key): return self.values[key]
    def __iter__(self): return iter(self.values)
    def __len__(self): return len(self.values)

values = ({"5": 1.0}, Own({5: 1.0}), Own({"type": "json_object"}), [1], 3, object())
fields = ("logit_bias", "response_format", "tools", "stop", "stop_token_ids")

class Last:
    def __del__(self, make=penstock.SamplingParams, inputs=(fields, values), error=Exception, write=print):
        fields, values = inputs
        for field in fields:
            for value in values:
                try:
                    make(**{field: value})
                except error:
                    pass
        write("made")

builtins.last = Last()
"""


def test_parameters_of_the_last_objects_raise_no_panic() -> None:
    with start_python(LATE) as process:
        output, errors = process.communicate(timeout=60)
    assert (output, process.returncode) == (b"made\n", 0)
    assert b"panic" not in errors.lower(), errors.decode()
