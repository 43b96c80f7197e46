"""An engine that is open during a fork: errors in the child, no effect on the parent, no hang."""

from __future__ import annotations

import http.client
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: The limit for one program, far above its run time of about a second.
TIMEOUT = 60

#: Opens an engine, with a finished, an unread and a running request, and then forks.
PREAMBLE = """
import asyncio, gc, multiprocessing, os, sys, warnings
import penstock
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and later warn of every fork with threads

MODEL = sys.argv[1]
PROMPT = [1, 2, 3]

def fork(child):
    '''The exit status of `child` in a forked process, which returns through the interpreter's own exit.'''
    process = os.fork()
    if process == 0:
        sys.exit(child())
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])

def raises(call):
    try:
        call()
    except penstock.EngineStoppedError as error:
        assert f"process {PARENT}" in str(error) and "fork" in str(error), error
        return True
    return False

PARENT = os.getpid()
"""
OPEN = """
engine = penstock.Engine(MODEL, threads=2)
engine.blocking.start()
expected = engine.blocking.generate(PROMPT, max_tokens=4, temperature=0).token_ids
running = engine.blocking.start_request(PROMPT, max_tokens=400, ignore_eos=True)
"""
FINISH = """
assert engine.blocking.generate(PROMPT, max_tokens=4, temperature=0).token_ids == expected
engine.close()
print("parent done")
"""


def run_program(program: str, model: Path) -> str:
    """The output of a program, which must exit with status 0 and write no error."""
    done = subprocess.run(
        [sys.executable, "-W", "default", "-c", PREAMBLE + program, str(model)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


@pytest.mark.needs("fork")
def test_every_call_in_the_child_raises(tiny_model: Path) -> None:
    program = """
def child():
    calls = {
        "start": engine.blocking.start,
        "generate": lambda: engine.blocking.generate(PROMPT),
        "asynchronous generate": lambda: asyncio.run(engine.generate(PROMPT)),
        "score": lambda: engine.blocking.score(PROMPT),
        "beams": lambda: engine.blocking.generate(PROMPT, num_beams=2),
        "info": lambda: engine.info,
        "stats": engine.stats,
        "encode": lambda: engine.encode("text"),
        "decode": lambda: engine.decode([1]),
        "reset_prefix_cache": engine.reset_prefix_cache,
        "next": lambda: next(running),
        "result": running.result,
        "finish_reason": lambda: running.finish_reason,
    }
    quiet = [name for name, call in calls.items() if not raises(call)]
    assert not quiet, quiet
    running.cancel()
    assert "forked" in repr(engine) and "forked" in repr(running)
    return 0

assert fork(child) == 0
"""
    assert run_program(OPEN + program + FINISH, tiny_model) == "parent done\n"


@pytest.mark.needs("fork")
@pytest.mark.parametrize(
    "ending",
    [
        "running = engine = None; gc.collect()",
        "engine.close(); running = engine = None; gc.collect()",
        "asyncio.run(engine.aclose())",
        "engine.__exit__(None, None, None)",
        "pass",
    ],
    ids=["drop", "close", "aclose", "exit", "keep"],
)
def test_child_that_closes_or_drops_exits_with_its_own_status(tiny_model: Path, ending: str) -> None:
    program = f"""
def child():
    global engine, running
    {ending}
    return 7

for _ in range(3):
    assert fork(child) == 7
"""
    assert run_program(OPEN + program + FINISH, tiny_model) == "parent done\n"


@pytest.mark.needs("fork")
def test_sys_exit_inside_async_with_exits_the_child(tiny_model: Path) -> None:
    program = """
async def main():
    async with penstock.Engine(MODEL, threads=1) as engine:
        request = await engine.start_request(PROMPT, max_tokens=100, ignore_eos=True)
        process = os.fork()
        if process == 0:
            sys.exit(5)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        result = await request.result()
        print(status, len(result.token_ids), flush=True)
        # The child's loop took the wake-up descriptor out of the epoll set that it shared with this loop:
        # since then no thread can wake asyncio here, with or without an engine.
        os._exit(0)

asyncio.run(main())
"""
    assert run_program(program, tiny_model) == "5 100\n"


@pytest.mark.needs("fork")
def test_child_drops_the_copy_and_uses_its_own_engine(tiny_model: Path) -> None:
    program = """
def child():
    global engine, running
    running = engine = None
    gc.collect()
    with penstock.Engine(MODEL, threads=2) as own:
        answer = own.blocking.generate(PROMPT, max_tokens=4, temperature=0, regex="[a-z]+")
        assert answer.text.isalpha()
        assert own.blocking.generate(PROMPT, max_tokens=4, temperature=0).token_ids == expected
    return 0

assert fork(child) == 0
"""
    assert run_program(OPEN + program + FINISH, tiny_model) == "parent done\n"


@pytest.mark.needs("fork")
def test_prefork_pool_with_one_engine_per_worker(tiny_model: Path) -> None:
    program = """
import signal

engines = []

def initialise():  # as a worker's initialiser does: the parent's engine is replaced
    engines[:] = [penstock.Engine(MODEL, threads=1)]
    engines[0].blocking.start()

def work(seed):
    return engines[0].blocking.generate(PROMPT, max_tokens=4, temperature=0).token_ids

if __name__ == "__main__":
    engines.append(engine)
    with multiprocessing.get_context("fork").Pool(2, initialise) as pool:
        assert pool.map(work, range(8)) == [expected] * 8
"""
    assert run_program(OPEN + program + FINISH, tiny_model) == "parent done\n"


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing_child_opens_its_own_engine(tiny_model: Path, tmp_path: Path, method: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(f"""
import multiprocessing, sys, warnings
import penstock
warnings.simplefilter("ignore", DeprecationWarning)

def child(model, queue):
    with penstock.Engine(model, threads=1) as engine:
        queue.put(engine.blocking.generate([1, 2, 3], max_tokens=4, temperature=0).token_ids)

if __name__ == "__main__":
    context = multiprocessing.get_context({method!r})
    with penstock.Engine(sys.argv[1], threads=1) as engine:
        queue = context.Queue()
        process = context.Process(target=child, args=(sys.argv[1], queue))
        process.start()
        assert queue.get() == engine.blocking.generate([1, 2, 3], max_tokens=4, temperature=0).token_ids
        process.join()
        print(process.exitcode)
""")
    done = subprocess.run(
        [sys.executable, str(program), str(tiny_model)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", ""), done.stderr


APPLICATION = """
import os
import penstock

engine = penstock.Engine(os.environ["MODEL"], threads=1)
engine.blocking.start()

def application(environ, start_response):
    try:
        text = str(len(engine.blocking.generate([1, 2, 3], max_tokens=4, ignore_eos=True).token_ids))
        status = "200 OK"
    except penstock.EngineStoppedError as error:
        text, status = str(error), "503 Service Unavailable"
    start_response(status, [("Content-Type", "text/plain")])
    return [text.encode()]
"""


@contextmanager
def gunicorn(directory: Path, model: Path, *options: str) -> Iterator[str]:
    """The address of a running gunicorn, which must exit with status 0 on SIGTERM."""
    (directory / "service.py").write_text(APPLICATION)
    arguments = ["--bind", "127.0.0.1:0", "--workers", "2", "--chdir", str(directory), *options]
    with subprocess.Popen(
        [sys.executable, "-m", "gunicorn", *arguments, "service:application"],
        env={**os.environ, "MODEL": str(model)},
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stderr is not None
        try:
            found = (re.search(r"Listening at: http://(\S+)", line) for line in server.stderr)
            yield next(match[1] for match in found if match)
        finally:
            server.send_signal(signal.SIGTERM)
            errors = server.communicate(timeout=TIMEOUT)[1]
        assert server.returncode == 0, errors
        assert "Traceback" not in errors, errors
        assert "SIGKILL" not in errors, errors


def fetch(address: str) -> tuple[int, str]:
    """The status and body of a response."""
    connection = http.client.HTTPConnection(address, timeout=TIMEOUT)
    connection.request("GET", "/")
    response = connection.getresponse()
    status, text = response.status, response.read().decode()
    connection.close()
    return status, text


@pytest.mark.needs("signals")
def test_gunicorn_workers_open_their_own_engines(tiny_model: Path, tmp_path: Path) -> None:
    with gunicorn(tmp_path, tiny_model) as address:
        assert [fetch(address) for _ in range(4)] == [(200, "4")] * 4


@pytest.mark.needs("signals")
def test_gunicorn_preload_gives_errors_at_once(tiny_model: Path, tmp_path: Path) -> None:
    with gunicorn(tmp_path, tiny_model, "--preload") as address:
        begin = time.monotonic()
        status, text = fetch(address)
        seconds = time.monotonic() - begin
    assert status == 503
    assert "before a fork" in text
    assert seconds < TIMEOUT / 2
