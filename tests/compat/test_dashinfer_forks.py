"""The DashInfer API in the child of a fork: typed errors, no hang, and a new engine that works."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.needs("fork")

#: Forks while other threads hold every lock; each call of the child that returns otherwise is printed.
PROGRAM = """
import gc, os, signal, sys, threading, traceback, warnings
sys.path.insert(0, "tests")
from pathlib import Path
import numpy as np
from penstock.compat.dashinfer.allspark.engine import Engine
from penstock.compat.dashinfer.allspark.enums import AsStatus
from penstock.compat.dashinfer.allspark.errors import AsError
from support.compat.dashinfer import GREEDY, NAME, PROMPT, SUCCESS, generate, held, install, start

warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and later warn of every fork with threads
DENIED = AsStatus.ALLSPARK_REQUEST_DENIED
MODEL = Path(sys.argv[1])

def is_denied(call):
    try:
        result = call()
    except AsError as error:
        return error.status is DENIED and "before a fork" in str(error)
    return result is DENIED or result == (DENIED, None, None)

def child():
    global engine, queue, handle, elements
    signal.alarm(60)
    calls = {
        "start_request_ids": lambda: engine.start_request_ids(NAME, None, [1], GREEDY),
        "install_model": lambda: install(engine, MODEL, "other"),
        **{
            name: lambda name=name: getattr(engine, name)(NAME)
            for name in ("start_model", "stop_model", "release_model", "unload_device_mem", "load_device_mem",
                         "get_as_engine_stat", "get_model_info", "get_op_profiling_info")
        },
        **{
            name: lambda name=name: getattr(engine, name)(NAME, handle)
            for name in ("stop_request", "release_request", "sync_request")
        },
        **{
            name: getattr(queue, name)
            for name in ("Get", "GetNoWait", "GenerateStatus", "GeneratedLength", "RequestStatInfo")
        },
        "GetWithTimeout": lambda: queue.GetWithTimeout(1),
        "error": lambda: queue.error,
        "prefix_cache_len": lambda: elements.prefix_cache_len,
    }
    wrong = [name for name, call in calls.items() if not is_denied(call)]
    assert not wrong, wrong
    new = Engine()
    install(new, MODEL)
    capsule = np.array(PROMPT).__dlpack__()
    assert new.start_request(NAME, {"input_ids": capsule}, GREEDY)[0] is SUCCESS
    assert generate(new) == expected
    del engine, queue, handle, elements
    gc.collect()
    assert new.stop_model(NAME) is SUCCESS
    assert new.release_model(NAME) is SUCCESS
    return 0

engine = Engine()
install(engine, MODEL)
expected = generate(engine)
handle, queue = start(engine)
engine.sync_request(NAME, handle)
elements = queue.Get()
with held(engine):
    handle, queue = start(engine)
    reader = threading.Thread(target=queue.Get)
    reader.start()
    while not queue._request._has_leader:
        os.sched_yield()
    with engine._lock, queue._lock:
        process = os.fork()
        if process == 0:
            try:
                status = child()
            except BaseException:
                traceback.print_exc()
                status = 1
            os._exit(status)  # `held` belongs to the parent
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
reader.join()
assert generate(engine) == expected
print("parent done")
"""


def test_calls_in_the_child_are_refused_and_do_not_wait(tiny_model: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tiny_model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    errors = [line for line in done.stderr.splitlines() if not line.startswith("ALLSPARK_REQUEST_DENIED: ")]
    assert (done.returncode, done.stdout, errors) == (0, "parent done\n", [])
