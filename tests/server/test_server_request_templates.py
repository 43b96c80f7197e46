"""Chat templates of requests: their child process, its limits, its end, and the turns of clients."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import penstock.server
from penstock import _workers
from penstock._client import client
from penstock.chat import Chat, ChatTemplate
from penstock.server import templates
from penstock.server.templates import TemplateProcess, Turns
from support.api.engines import limit_threads, make_engine, wait_until
from support.server.process import started
from support.server.serving import Served, at_rest, post, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock._renderer import Renderer

PATH = "/v1/chat/completions"
USER: dict[str, Any] = {"role": "user", "content": "Hello é 漢 😀 <b>"}
BODY: dict[str, Any] = {"messages": [USER], "max_tokens": 1}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{{ 1 }}"
#: Two values that take 2^60 steps to compare, in one operation that nothing interrupts.
EQUAL = (
    "{% set n = namespace(x=['a'], y=['a']) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}"
    "{% set n.y = [n.y, n.y] %}{% endfor %}{{ n.x == n.y }}"
)
#: A gigabyte, within the limits of the sandbox: it counts characters, of which these have four bytes.
MEMORY = (
    "{% set n = namespace(x=[]) %}{% for i in range(31) %}{% set n.x = [n.x, '😀' * 8000000] %}{% endfor %}1"
)
#: A child that does not charge the sandbox's budget for comparisons.
UNMETERED = """
import runpy, sys, types
sys.modules["penstock"] = package = types.ModuleType("penstock")
package.__path__ = [{folder!r}]
sys.path += sys.argv[3:]
from penstock import _chat_costs, _chat_sandbox
_chat_sandbox.charge_comparison = lambda *arguments, **options: None
runpy.run_path({child!r})["main"](*sys.argv[1:])
"""


@pytest.fixture(scope="module")
def process() -> TemplateProcess:
    return TemplateProcess()


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    with make_engine(tiny_model) as engine:
        yield engine


@pytest.fixture
def server(engine: penstock.Engine) -> Iterator[Served]:
    settings = penstock.server.ServerSettings(request_templates=True, api_keys=("a", "b"))
    with serving(penstock.server.app(engine, settings)) as server:
        yield server


def ask(server: Served, template: str | None, *, path: str = PATH, key: str = "a") -> tuple[int, Any]:
    """The status and the body of the response to a chat with this template."""
    fields = {} if template is None else {"chat_template": template}
    body = (
        {**BODY, **fields} if path != "/v1/responses" else {"input": [USER], "max_output_tokens": 1, **fields}
    )
    return server.ask(path, body, headers={"Authorization": f"Bearer {key}"})[:2]


@contextmanager
def asked(server: Served, template: str, **options: Any) -> Iterator[list[tuple[int, Any]]]:
    """A request that is under way while the block runs; the list has its response afterwards."""
    answers: list[tuple[int, Any]] = []
    thread = threading.Thread(target=lambda: answers.append(ask(server, template, **options)))
    thread.start()
    try:
        yield answers
    finally:
        thread.join()


@contextmanager
def begun(server: Served, template: str, path: str = PATH) -> Iterator[None]:
    """A request that is under way while the block runs; its client leaves at the end."""
    request = post(path, {**BODY, "chat_template": template})
    connection = server.send(request.replace(b"\r\n", b"\r\nX-API-Key: a\r\n", 1))
    try:
        yield
    finally:
        connection.close()


def child_of(server: Served) -> templates.Child | None:
    """The process of a server in this process."""
    found: templates.Child | None = server.application.state.templates._child
    return found


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates that loop run until their test ends them, also on a busy machine."""
    monkeypatch.setattr(templates, "MAX_SECONDS", 100.0)


def is_busy(server: Served) -> bool:
    """Whether a template is being rendered that takes long."""
    child = child_of(server)
    return child is not None and has_used_time(child.process.pid)


def has_used_time(pid: int) -> bool:
    """Whether a process has used more time than its start takes."""
    with suppress(OSError):
        ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11]
        return int(ticks) > 0.5 * os.sysconf("SC_CLK_TCK")
    return False


def children_of(pid: int) -> list[int]:
    """The processes that run the child's file for this parent."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and b"_template_child.py" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# ---- the same texts and errors as in the process

MESSAGES: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "open": [USER, {"role": "assistant", "content": "Well, "}],
    "parts": [
        {"role": "user", "content": [{"type": "text", "text": "It's "}, {"type": "text", "text": "me"}]}
    ],
    "silent": [USER, {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {}}]}],
}
VARIABLES: dict[str, Any] = {
    "documents": [{"title": "Ü", "text": "\u0001\u2028"}],
    "number": 12345678901234567890,
    "real": 1e-05,
    "flags": [True, None, {"b": 1, "a": [2.5, "x"]}],
}
SOURCES = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "parts": "{% for m in messages %}{% for p in m.content if p is mapping %}{{ p.text }}{% endfor %}"
    "{{ m.content if m.content is string }}{% endfor %}",
    "tools": "{{ tools | tojson }}{{ tools | tojson(indent=2) }}{{ documents | tojson }}{{ bos_token }}",
    "values": "{{ number }} {{ real }} {{ flags }} {{ number + 1 }} {{ '%s' | format(flags) }} {{ {1: 2} }}",
    "date": "{{ strftime_now('%Y-%m-%d %% é %B') }}",
    "macro": "{% macro f(x) %}[{{ x | upper }}]{% endmacro %}{% generation %}{{ f('a') }}{% endgeneration %}",
    "surrogates": "{{ '\ud83d' + '\ude00' }}",
    "raised": "{{ raise_exception('Conversation roles must alternate: é') }}",
    "undefined": "{{ missing.attribute }}",
    "type": "{{ 1 + 'a' }}",
    "deep": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "long": "{{ 'x' * 10 ** 10 }}",
    "private": "{{ ''.__class__.__mro__ }}",
    "syntax": "{{ 1 }}\n{% for %}",
    "size": "{{ '" + "x" * 300_000 + "' }}",
}


def outcome(source: str, renderer: Renderer | None, messages: str, **options: Any) -> object:
    """The text of a chat, or the error."""
    chat = Chat(
        MESSAGES[messages],
        chat_template_kwargs={name: VARIABLES[name] for name in VARIABLES if name != "documents"},
        documents=VARIABLES["documents"],
        **options,
    )
    tools = [{"type": "function", "function": {"name": "sun", "description": "Wetter <&> in 都市"}}]
    try:
        template = ChatTemplate(source, TOKENS, renderer)
        return chat.render(template, tools=tools, check_cancelled=lambda: None)
    except penstock.InvalidRequestError as error:
        return type(error), str(error), error.field


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("messages", MESSAGES)
def test_outcome_is_that_of_the_server_process(process: TemplateProcess, name: str, messages: str) -> None:
    for options in ({}, {"add_generation_prompt": False}, {"continue_final_message": True}):
        expected = outcome(SOURCES[name], None, messages, **options)
        assert outcome(SOURCES[name], process.template, messages, **options) == expected


def test_process_is_kept_for_the_next_template(process: TemplateProcess) -> None:
    outcome(SOURCES["chatml"], process.template, "one")
    first = process._child
    outcome(SOURCES["raised"], process.template, "one")
    outcome(SOURCES["syntax"], process.template, "one")
    assert first is not None
    assert process._child is first


def test_time_zone_is_that_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "XYZ-11:30")
    time.tzset()
    try:
        source = "{{ strftime_now('%Z %H') }}"
        assert outcome(source, TemplateProcess().template, "one") == outcome(source, None, "one")
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.needs("memory_limit")
@pytest.mark.parametrize("path", [PATH, "/tokenize", "/v1/responses"])
def test_only_templates_of_requests_use_the_process(server: Served, path: str) -> None:
    assert ask(server, None, path=path)[0] == 200
    assert child_of(server) is None
    status, answer = ask(server, "{{ messages[0].content }}{% if", path=path)
    assert (status, answer["error"]["param"]) == (400, "chat_template")
    assert ask(server, "{{ messages[0].content }}", path=path)[0] == 200
    assert child_of(server) is not None


# ---- limits


@pytest.mark.needs("memory_limit", "proc")
def test_template_that_runs_for_long_is_ended(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "MAX_SECONDS", 1.0)
    with asked(server, LOOP) as answers:
        wait_until(lambda: child_of(server) is not None or bool(answers))
        assert ask(server, "{{ 1 }}", key="b")[0] == 200
    [(status, answer)] = answers
    reason = "the chat template rejects these messages: it runs for more than 1.0 seconds"
    assert (status, answer["error"]["message"], answer["error"]["param"]) == (400, reason, "messages")


@pytest.mark.needs("memory_limit")
def test_operation_that_nothing_interrupts_is_ended(
    server: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    child = templates._CHILD
    script = tmp_path / "_template_child.py"
    script.write_text(UNMETERED.format(folder=str(child.parent), child=str(child)))
    monkeypatch.setattr(templates, "_CHILD", script)
    monkeypatch.setattr(templates, "MAX_SECONDS", 1.0)
    status, answer = ask(server, EQUAL)
    assert (status, "runs for more than" in answer["error"]["message"]) == (400, True)
    assert ask(server, "{{ 1 }}")[0] == 200


def test_time_of_a_request_is_that_of_all_its_renderings(
    process: TemplateProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(templates, "MAX_SECONDS", 0.5)
    begin = time.monotonic()
    found = outcome(LOOP, process.template, "parts", continue_final_message=True)
    assert "runs for more than 0.5 seconds" in str(found)
    assert time.monotonic() - begin < 2 * 0.5 + 2  # also of the start of a process


@pytest.mark.needs("memory_limit")
def test_template_that_takes_much_memory_is_ended(server: Served) -> None:
    status, answer = ask(server, MEMORY)
    reason = "the chat template rejects these messages: it needs more than 512 MiB of memory"
    assert (status, answer["error"]["message"]) == (400, reason)
    assert ask(server, "{{ 1 }}")[0] == 200


@pytest.mark.usefixtures("patient")
@pytest.mark.needs("memory_limit", "proc")
def test_process_that_dies_ends_only_its_request(server: Served) -> None:
    with asked(server, LOOP) as answers:
        wait_until(lambda: is_busy(server))
        child = child_of(server)
        assert child is not None
        child.process.kill()
    [(status, answer)] = answers
    assert (status, answer["error"]["param"]) == (400, "messages")
    assert "it ends the process that renders it" in answer["error"]["message"]
    assert ask(server, "{{ 1 }}")[0] == 200


@pytest.mark.needs("memory_limit", "proc", "signals")
def test_process_that_died_between_requests_is_replaced(server: Served) -> None:
    assert ask(server, "{{ 1 }}")[0] == 200
    child = child_of(server)
    assert child is not None
    os.kill(child.process.pid, signal.SIGKILL)
    wait_until(lambda: not is_running(child.process.pid))
    assert ask(server, "{{ 1 }}")[0] == 200
    assert child_of(server) is not child


@pytest.mark.needs("memory_limit")
def test_process_that_cannot_start_is_an_error_of_the_server(
    server: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(templates, "_CHILD", tmp_path / "missing.py")
    assert ask(server, "{{ 1 }}")[0] == 500
    monkeypatch.undo()
    assert ask(server, "{{ 1 }}")[0] == 200


# ---- other clients


@pytest.mark.usefixtures("patient")
@pytest.mark.needs("memory_limit", "proc")
@pytest.mark.parametrize("path", [PATH, "/tokenize"])
def test_client_that_leaves_ends_its_rendering(server: Served, engine: penstock.Engine, path: str) -> None:
    with begun(server, LOOP, path):
        wait_until(lambda: is_busy(server))
    wait_until(lambda: child_of(server) is None)
    assert ask(server, "{{ 1 }}")[0] == 200
    wait_until(lambda: at_rest(engine))


@pytest.mark.usefixtures("patient")
@pytest.mark.needs("memory_limit")
def test_waiting_for_the_process_holds_no_thread_of_others(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_threads(monkeypatch, 1)
    turns = server.application.state.templates._turns
    for path in (PATH, "/tokenize"):
        with begun(server, LOOP, path), begun(server, LOOP, path), begun(server, LOOP, path):
            wait_until(lambda: len(turns._waiting) == 2)
            for other in (PATH, "/tokenize"):
                assert ask(server, None, path=other, key="b")[0] == 200
            assert len(turns._waiting) == 2
        wait_until(lambda: not turns._is_taken)


@pytest.mark.usefixtures("patient")
@pytest.mark.needs("memory_limit", "proc")
def test_waiting_requests_of_a_client_have_a_bound(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "MAX_WAITING_OF_CLIENT", 1)
    turns = server.application.state.templates._turns
    with begun(server, LOOP):
        wait_until(lambda: is_busy(server))
        with begun(server, "{{ 1 }}", "/tokenize"):
            wait_until(lambda: bool(turns._waiting))
            for path in (PATH, "/tokenize"):
                status, answer = ask(server, "{{ 1 }}", path=path)
                assert (status, answer["error"]["code"]) == (429, "overloaded")


def test_clients_take_turns() -> None:
    turns, order = Turns(), list[str]()

    def take(name: str) -> None:
        client.set(ord(name[0]))
        with turns.turn(lambda: None):
            order.append(name)

    threads = [threading.Thread(target=take, args=[name]) for name in ("a1", "a2", "a3", "b1", "b2", "c1")]
    with turns.turn(lambda: None):
        for number, thread in enumerate(threads, 1):
            thread.start()
            wait_until(lambda: len(turns._waiting) == number)  # noqa: B023
    for thread in threads:
        thread.join()
    assert order == ["a1", "b1", "c1", "a2", "b2", "a3"]
    assert (turns._is_taken, len(turns._waiting)) == (False, 0)


def test_thread_that_is_cancelled_leaves_the_queue() -> None:
    turns = Turns()

    def fail() -> None:
        raise _workers.AbandonedError

    with turns.turn(lambda: None):
        with pytest.raises(_workers.AbandonedError), turns.turn(fail):
            pytest.fail("there is a turn already")
        assert not turns._waiting
    with turns.turn(fail):
        pass


# ---- the process itself


@pytest.mark.needs("devices", "proc")
def test_process_has_neither_files_nor_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    fresh = TemplateProcess()
    with Path(__file__).open("rb") as file:
        os.set_inheritable(file.fileno(), True)  # noqa: FBT003
        assert outcome("{{ 1 }}", fresh.template, "one") == "1"
    assert fresh._child is not None
    folder = Path(f"/proc/{fresh._child.process.pid}")
    names = {item.partition(b"=")[0] for item in (folder / "environ").read_bytes().split(b"\0") if item}
    assert names <= {name.encode() for name in templates._ENVIRONMENT}
    files = {descriptor.name: str(descriptor.readlink()) for descriptor in (folder / "fd").iterdir()}
    assert files.pop("0").startswith("socket:")
    assert files == {"1": "/dev/null", "2": "/dev/null"}
    limits = (folder / "limits").read_text()
    assert str(templates.MAX_MEMORY) in next(line for line in limits.splitlines() if "address space" in line)
    maps = (folder / "maps").read_text()
    assert "_core.abi3" not in maps
    assert "torch" not in maps


@pytest.mark.needs("proc")
def test_process_ends_with_its_owner() -> None:
    process = TemplateProcess()
    assert outcome("{{ 1 }}", process.template, "one") == "1"
    assert process._child is not None
    pid = process._child.process.pid
    del process
    gc.collect()
    assert not is_running(pid)


@pytest.mark.needs("memory_limit", "proc", "signals")
@pytest.mark.parametrize("number", ["SIGTERM", "SIGKILL"])
def test_process_ends_with_the_server(tiny_model: Path, number: str) -> None:
    with started(tiny_model, "--request-templates") as server:
        status, _, _ = server.ask(PATH, {**BODY, "chat_template": "{{ 1 }}"})
        assert status == 200
        [pid] = children_of(server.process.pid)
        server.process.send_signal(getattr(signal, number))
        server.process.wait()
        wait_until(lambda: not is_running(pid), seconds=10)


@pytest.mark.needs("memory_limit", "proc")
def test_process_with_a_running_template_ends_with_the_server(tiny_model: Path) -> None:
    with started(tiny_model, "--request-templates") as server:
        connection = server.send(post(PATH, {**BODY, "chat_template": LOOP}))
        wait_until(lambda: any(map(has_used_time, children_of(server.process.pid))))
        [pid] = children_of(server.process.pid)
        server.process.kill()
        server.process.wait()
        connection.close()
        wait_until(lambda: not is_running(pid), seconds=templates.MAX_SECONDS + 3)
