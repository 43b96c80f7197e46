"""The process that renders the chat templates of requests, for `server/templates.py`, which runs this file.

Importing the package would load the engine. So a package without contents takes its place, in which only the
sandbox and the modules that it uses are found. Standard input is a socket; a message of either side is its
length, in eight bytes, and JSON:

    parent                         child
                                   ["ready", ""]
    [source, values]
                                   ["text", "..."], or a kind of error and its message

The process ends with its parent: at the end of the messages, and by a timer if a template runs then.
"""

from __future__ import annotations

import functools
import json
import resource
import signal
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from collections.abc import Callable

    import jinja2


def answer(message: bytes, compiled: Callable[[str], jinja2.Template], seconds: float) -> tuple[str, str]:
    """The kind of an answer, and its text or the message of an error."""
    from penstock import _chat_sandbox
    from penstock._chat_costs import Budget
    from penstock._renderer import CompileError, RenderError

    try:
        source, values = json.loads(message)
        return "text", _chat_sandbox.render(compiled(source), values, Budget(seconds=seconds))
    except (CompileError, RenderError) as error:
        if isinstance(error.__cause__, MemoryError):
            return "memory", ""
        return "compile" if isinstance(error, CompileError) else "render", str(error)


def _send(channel: BinaryIO, *parts: str) -> None:
    message = json.dumps(parts, ensure_ascii=False).encode(errors="surrogatepass")
    channel.write(len(message).to_bytes(8) + message)
    channel.flush()


def main(memory: str, seconds: str, *folders: str) -> None:
    """Answer messages until the parent ends."""
    most = int(memory), resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = min(number for number in most if number != resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    package = types.ModuleType("penstock")
    package.__path__ = [str(Path(__file__).parent)]
    sys.modules["penstock"] = package
    sys.path += folders
    from penstock import _chat_sandbox
    from penstock._renderer import CACHED_TEMPLATES

    _chat_sandbox.reserved_names()  # makes the environment
    compiled = functools.lru_cache(maxsize=CACHED_TEMPLATES)(_chat_sandbox.compile_template)
    with open(0, "rb", closefd=False) as requests, open(0, "wb", closefd=False) as answers:
        _send(answers, "ready", "")
        while header := requests.read(8):
            message = requests.read(int.from_bytes(header))
            signal.setitimer(signal.ITIMER_REAL, float(seconds))
            try:
                _send(answers, *answer(message, compiled, float(seconds)))
            except MemoryError:
                _send(answers, "memory", "")
            signal.setitimer(signal.ITIMER_REAL, 0)
            del message  # the process keeps no chat


if __name__ == "__main__":
    main(*sys.argv[1:])
