"""`penstock bench serve`: counts against the engine's, load, failures and reports, over sockets."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner, Result

import penstock.server
from penstock.bench.settings import BENCH_GROUPS
from penstock.cli import main
from support.api.engines import make_engine, start_python, wait_until
from support.api.terminal import Terminal
from support.server.serving import Served, at_rest, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SMALL = ("--input-len", 12, "--output-len", 6, "--random-vocab-size", 250, "--ignore-eos")
EVENT = b'data: {"choices": [{"index": 0, "text": "a"}]}\n\n'
#: The location is that of a redirection.
HEADERS = [(b"content-type", b"text/event-stream"), (b"location", b"/elsewhere")]
STOP = b'data: {"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}\n\n'
END = b'data: {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}\n\ndata: [DONE]\n\n'


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    with make_engine(tiny_model) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine: penstock.Engine) -> Iterator[Served]:
    with serving(penstock.server.app(engine)) as server:
        yield server


def run(url: str, *arguments: object) -> Result:
    command = ["bench", "serve", "--url", url, *map(str, arguments)]
    return CliRunner().invoke(main, command)


def numbers(url: str, *arguments: object) -> list[dict[str, Any]]:
    """The load points of a run that succeeds."""
    done = run(url, "--json", *arguments)
    assert done.exit_code == 0, done.output
    points: list[dict[str, Any]] = json.loads(done.stdout)["points"]
    return points


class Stub:
    """An ASGI application that answers with fixed parts of a stream; `None` ends the connection."""

    def __init__(self, *parts: bytes | None, status: int = 200) -> None:
        self.parts = parts
        self.status = status
        self.in_flight = 0
        self.peak = 0
        self.clients: list[tuple[str, int]] = []

    async def wait(self) -> None:
        """Wait before the first part."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request."""
        while (await receive()).get("more_body"):
            pass
        self.clients.append(scope["client"])
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        await self.wait()
        await send({"type": "http.response.start", "status": self.status, "headers": HEADERS})
        for part in self.parts:
            if part is None:
                raise ConnectionError
            await send({"type": "http.response.body", "body": part, "more_body": True})
        self.in_flight -= 1
        await send({"type": "http.response.body", "body": b""})


class GroupStub(Stub):
    """Answers groups of requests, when all of a group are in flight."""

    def __init__(self, size: int) -> None:
        super().__init__(EVENT, END)
        self.barrier = asyncio.Barrier(size)

    async def wait(self) -> None:
        """Wait for the group."""
        await self.barrier.wait()


# ---- counts


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_counts_equal_those_of_the_engine(server: Served, engine: penstock.Engine, endpoint: str) -> None:
    before = engine.stats()
    options = ("--endpoint", endpoint, "--num-prompts", 9, "--num-warmups", 0, *SMALL)
    [point] = numbers(server.url, "--concurrency", 4, *options)
    wait_until(lambda: at_rest(engine))
    after = engine.stats()
    assert point["completed"] == after.requests_finished - before.requests_finished == 9
    assert point["total_output_tokens"] == after.generation_tokens - before.generation_tokens == 9 * 6
    prompt_tokens = after.prompt_tokens - before.prompt_tokens
    cached = after.prefix_hit_tokens - before.prefix_hit_tokens
    assert point["total_input_tokens"] == prompt_tokens + cached
    if endpoint == "completions":
        assert point["total_input_tokens"] == 9 * 12
    assert point["max_concurrent_requests"] == 4
    assert point["failed"] == 0


def test_tokens_of_all_choices_are_counted_by_the_usage(server: Served) -> None:
    [point] = numbers(server.url, "--num-prompts", 4, "--concurrency", 1, *SMALL, "--extra-body", '{"n": 3}')
    assert point["total_output_tokens"] == 4 * 6 * 3


def test_output_without_text_is_counted_by_the_usage() -> None:
    """Tokens that are parts of characters have no text of their own."""
    with serving(Stub(STOP, END)) as server:
        options = ("--model", "m", "--num-warmups", 0, "--num-prompts", 3, "--goodput", "ttft:9000")
        [point] = numbers(server.url, *options)
    assert (point["completed"], point["total_output_tokens"], point["request_goodput"]) == (3, 3, 0.0)


def test_prompts_of_a_small_dataset_repeat_with_a_warning(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_text('{"prompt": "Hi"}\n{"prompt": "Ho"}')
    with serving(Stub(EVENT, END)) as server:
        options = ("--model", "m", "--concurrency", 1, "--num-prompts", 3, "--dataset-path", file)
        [point] = numbers(server.url, *options)
    assert any(text.startswith("2 of 3 requests have the prompt") for text in point["warnings"])


def test_closed_loop_has_exactly_n_requests_in_flight() -> None:
    """The server answers none before the fifth arrives, so with fewer in flight no response would come."""
    stub = GroupStub(5)
    with serving(stub) as server:
        options = ("--model", "m", "--num-warmups", 0, "--timeout", 20)
        [point] = numbers(server.url, "--concurrency", 5, "--num-prompts", 20, *options)
    assert (stub.peak, point["max_concurrent_requests"], point["completed"]) == (5, 5, 20)


def test_rate_inf_starts_all_requests_at_once() -> None:
    stub = GroupStub(30)
    with serving(stub) as server:
        options = ("--model", "m", "--num-warmups", 0, "--timeout", 20)
        [point] = numbers(server.url, "--request-rate", "inf", "--num-prompts", 30, *options)
    assert (stub.peak, point["completed"]) == (30, 30)


def test_open_loop_does_not_wait_for_responses() -> None:
    stub = GroupStub(20)
    with serving(stub) as server:
        load = ("--request-rate", 2000, "--burstiness", "inf", "--num-prompts", 20)
        [point] = numbers(server.url, *load, "--model", "m", "--num-warmups", 0, "--timeout", 20)
    assert (stub.peak, point["completed"]) == (20, 20)


@pytest.mark.needs("resource")
def test_limit_of_descriptors_is_raised() -> None:
    code = "import resource; hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
    code += "resource.setrlimit(resource.RLIMIT_NOFILE, (60, hard))\nfrom penstock.cli import main; main()"
    with serving(GroupStub(100)) as server:
        load = ("--request-rate", "inf", "--num-prompts", 100, "--model", "m", "--num-warmups", 0)
        process = start_python(code, "bench", "serve", "--url", server.url, *load, "--json", "--timeout", 20)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert json.loads(output)["points"][0]["completed"] == 100


@pytest.mark.parametrize(("options", "connections"), [((), 8), (("--keep-alive",), 2)])
def test_connections_are_used_again_with_keep_alive(options: tuple[str, ...], connections: int) -> None:
    stub = Stub(EVENT, END)
    with serving(stub) as server:
        load = ("--model", "m", "--num-warmups", 0, "--concurrency", 2, "--num-prompts", 8)
        numbers(server.url, *load, *options)
    assert (len(stub.clients), len(set(stub.clients))) == (8, connections)


def test_several_loads_make_a_curve(server: Served, tmp_path: Path) -> None:
    plot, output = tmp_path / "plot.png", tmp_path / "result.json"
    options = (
        "--plot",
        plot,
        "--output",
        output,
        "--detailed",
        "--chart",
        "--goodput",
        "ttft:9000",
        "tpot:9000",
    )
    done = run(server.url, "--concurrency", "1,3", "--num-prompts", 6, *SMALL, *options)
    assert done.exit_code == 0, done.output
    assert done.stdout.count(" Serving Benchmark Result ") == 2
    assert done.stdout.count("\nRequest goodput (req/s): ") == 2
    [header] = [line for line in done.stdout.splitlines() if line.lstrip().startswith("load ")]
    assert header.split()[:4] == ["load", "req/s", "tok/s", "good/s"]
    assert len(re.findall(r"^ *[13] \|", done.stdout, flags=re.MULTILINE)) == 6
    assert plot.read_bytes().startswith(b"\x89PNG\r\n")
    result = json.loads(output.read_text())
    assert [point["max_concurrency"] for point in result["points"]] == [1, 3]
    for point in result["points"]:
        assert point["request_goodput"] == point["request_throughput"]
        details = point["requests"]
        assert sum(request["output_tokens"] for request in details) == point["total_output_tokens"] == 36
        assert max(request["scheduled"] + request["e2el"] for request in details) == pytest.approx(
            point["duration"]
        )
        with_text = [request for request in details if request["ttft"] is not None]
        assert sum(len(request["itl"]) + 1 for request in with_text) == point["output_events"]


def test_table_has_the_rows_of_vllm_bench_serve(server: Served) -> None:
    done = run(server.url, "--request-rate", 100, "--num-prompts", 4, *SMALL, "--metric-percentiles", "50,99")
    labels = re.findall(r"^([^-=\n].*?): +\S+$", done.stdout, flags=re.MULTILINE)
    expected = [
        *(
            "Successful requests",
            "Failed requests",
            "Request rate configured (RPS)",
            "Benchmark duration (s)",
        ),
        *("Total input tokens", "Total generated tokens", "Request throughput (req/s)"),
        *("Output token throughput (tok/s)", "Total token throughput (tok/s)"),
        *("Mean TTFT (ms)", "Median TTFT (ms)", "P99 TTFT (ms)", "Mean TPOT (ms)", "P99 ITL (ms)"),
    ]
    assert [label for label in labels if label in expected] == expected
    assert all(
        re.fullmatch(r"[=-].*[=-]", line) for line in done.stdout.splitlines() if line.startswith(("=", "-"))
    )


# ---- failures


@pytest.mark.parametrize(
    ("stub", "kind", "message"),
    [
        (Stub(b'{"error": {"message": "slow down"}}', status=429), "HTTP 429", "slow down"),
        (Stub(b"elsewhere", status=307), "HTTP 307", "elsewhere"),
        (Stub(EVENT, b'data: {"error": {"message": "broken"}}\n\n'), "error event", "broken"),
        (Stub(EVENT), "incomplete stream", "without [DONE]"),
        (Stub(b'{"choices": []}'), "incomplete stream", "without [DONE]"),
        (Stub(EVENT, None), "ClientPayloadError", ""),
        (Stub(END.replace(b'"completion_tokens": 1', b'"completion_tokens": 0')), "no output", "no tokens"),
        (Stub(STOP), "no output", "no text"),
    ],
)
def test_failure_has_a_kind(stub: Stub, kind: str, message: str) -> None:
    with serving(stub) as server:
        options = ("--model", "m", "--num-warmups", 0, "--concurrency", 2, "--num-prompts", 3)
        done = run(server.url, *options)
    assert done.exit_code == 1
    assert f"Failed requests:{'':25}3" in done.stdout
    assert f"Warning: 3 x {kind}: " in done.stdout
    assert message in done.stdout


def test_one_odd_response_does_not_lose_the_others() -> None:
    odd = END.replace(b'"prompt_tokens": 1', b'"prompt_tokens": "1"')
    with serving(TurnsStub([(EVENT, END), (EVENT, odd), (EVENT, b'data: {"usage": "x"}\n\n')])) as server:
        options = ("--model", "m", "--num-warmups", 0, "--concurrency", 1, "--num-prompts", 3)
        [point] = numbers(server.url, *options)
    assert (point["completed"], point["failed"]) == (3, 0)
    assert (point["total_input_tokens"], point["total_output_tokens"]) == (1, 3)
    assert "1 responses have no usage: their events count as tokens" in point["warnings"]


class TurnsStub(Stub):
    """Answers each request with the next parts."""

    def __init__(self, turns: list[tuple[bytes, ...]]) -> None:
        super().__init__()
        self.turns = iter(turns)

    async def wait(self) -> None:
        """Take the next parts."""
        self.parts = next(self.turns)


class SilentStub(Stub):
    """Sends an event, and then nothing for every second request."""

    async def wait(self) -> None:
        """Wait for ever, if it is the turn."""
        if len(self.clients) % 2 == 0:
            await asyncio.Event().wait()


def test_timeout_is_a_failure_of_one_request() -> None:
    with serving(SilentStub(EVENT, END), timeout_graceful_shutdown=1) as server:
        options = ("--model", "m", "--num-warmups", 0, "--concurrency", 1, "--num-prompts", 4)
        done = run(server.url, "--json", *options, "--timeout", 0.2)
    assert done.exit_code == 1
    [point] = json.loads(done.stdout)["points"]
    assert (point["completed"], point["failed"], point["errors"]) == (2, 2, {"timeout": 2})


def test_closed_port_is_a_failure() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    reason = "Connection refused; start it (penstock serve MODEL), or correct --url"
    for options in (("--num-prompts", 1), ("--model", "m")):
        done = run(f"http://127.0.0.1:{port}", *options)
        assert (done.exit_code, done.stderr) == (
            1,
            f"Error: no server at http://127.0.0.1:{port}: {reason}\n",
        )
    done = run("http://no-such-host.invalid:8000")
    assert done.stderr.startswith("Error: no server at http://no-such-host.invalid:8000: ")


def test_api_key_is_sent_and_not_reported(
    engine: penstock.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = penstock.server.ServerSettings(api_keys=("secret",))
    file = tmp_path / "key"
    file.write_text("secret\n")
    with serving(penstock.server.app(engine, settings)) as server:
        done = run(server.url, *SMALL)
        assert done.exit_code == 1
        assert "HTTP 401" in done.stderr
        done = run(server.url, *SMALL, "--num-prompts", 1, "--json", "--api-key-file", file)
        assert done.exit_code == 0, done.output
        assert "secret" not in done.output
        monkeypatch.setenv("PENSTOCK_API_KEY", "secret")
        assert run(server.url, *SMALL, "--num-prompts", 1).exit_code == 0
        monkeypatch.setenv("PENSTOCK_API_KEY", "wrong")
        assert run(server.url, *SMALL, "--num-prompts", 1, "--api-key", "secret").exit_code == 0


@pytest.mark.needs("signals")
def test_ctrl_c_prints_the_numbers_so_far(server: Served, engine: penstock.Engine) -> None:
    before = engine.stats().requests_finished
    process = start_python(
        "from penstock.cli import main; main()",
        *("bench", "serve", "--url", server.url, "--concurrency", 3, "--duration", 600, *SMALL),
    )
    wait_until(lambda: engine.stats().requests_finished > before + 10)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert b"Traceback" not in errors
    assert output.count(b" Serving Benchmark Result ") == 1
    finished = re.search(rb"Successful requests: +(\d+)", output)
    assert finished is not None
    assert int(finished[1]) > 0
    wait_until(lambda: at_rest(engine))


# ---- command line


def test_help_lists_the_options_of_each_group() -> None:
    text = CliRunner().invoke(main, ["bench", "serve", "--help"]).output
    titles = re.findall(r"^(\w.*):$", text, flags=re.MULTILINE)
    assert titles == ["Options", *BENCH_GROUPS]
    for title, names in BENCH_GROUPS.items():
        section = text.partition(f"\n{title}:\n")[2].partition("\n\n")[0]
        assert {f"--{name.replace('_', '-')}" for name in names} <= set(re.findall(r"--[a-z-]+", section))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--goodput", "ttft"), "NAME:MILLISECONDS is expected"),
        (("--goodput", "itl:5"), "--goodput 'itl:5' is not allowed"),
        (("ttft:5",), "Got unexpected extra argument (ttft:5)"),
        (("--concurrency", "1", "--request-rate", "1"), "left out if there is a concurrency"),
        (("--concurrency", "x"), "'x' is not a valid integer"),
        (("--output", "/nowhere/result.json"), "Invalid value for '--output'"),
        (("--plot", "/nowhere/plot.png"), "Invalid value for '--plot'"),
        (("--api-key", "a\nb"), "other characters than printable ASCII"),
        (("--plot", "plot.txt"), "one of .pdf, .png, .svg is expected"),
    ],
)
def test_invalid_option_is_a_usage_error(arguments: tuple[str, ...], message: str) -> None:
    done = run("http://127.0.0.1:1", *arguments)
    assert done.exit_code == 2
    assert message in done.stderr


@pytest.mark.needs("fcntl", "terminal")
def test_chart_is_drawn_on_a_terminal(server: Served) -> None:
    code = "from penstock.cli import main; main()"
    load = ("--concurrency", 2, "--num-prompts", 4, *SMALL)
    with Terminal(code, "bench", "serve", "--url", server.url, *load) as terminal:
        terminal.wait_for("Serving Benchmark Result")
        terminal.wait_for("time to first token, ms: p50, p90, p99")
        terminal.wait_for("2 |█")
        assert terminal.wait() == 0


@pytest.mark.parametrize(("library", "options"), [("aiohttp", ()), ("matplotlib", ("--plot", "plot.png"))])
def test_missing_library_is_named(
    library: str, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    for name in ("serve", "client"):
        monkeypatch.delitem(sys.modules, f"penstock.bench.{name}", raising=False)
    done = run("http://127.0.0.1:1", *options)
    assert done.exit_code == 1
    assert f'needs {library}: install the extra "bench" of penstock-llm' in done.stderr
