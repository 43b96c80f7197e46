"""`penstock chat --url`: answers of a running server, its errors, Ctrl-C."""

from __future__ import annotations

import json
import signal
import socket
import threading
import unicodedata
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner, Result

import penstock.server
from penstock.cli import main
from support.api.engines import make_engine, start_python, wait_until
from support.api.terminal import CTRL_C, CTRL_D, Terminal
from support.server.serving import Served, at_rest, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MAIN = "from penstock.cli import main; main()"
OPTIONS = ("--max-tokens", 8, "--temperature", 0, "--ignore-eos")
FIELDS: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    longer = {"max_position_embeddings": 8192}
    with make_engine(tiny_model, config_overrides=longer) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine: penstock.Engine) -> Iterator[Served]:
    settings = penstock.server.ServerSettings(api_keys=("secret",))
    with serving(penstock.server.app({"first": engine, "second": engine}, settings)) as server:
        yield server


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_API_KEY", "secret")


def chat(*arguments: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, ["chat", *map(str, arguments)], input=stdin)


def content(engine: penstock.Engine, *texts: str) -> str:
    """The answer to a conversation without the server."""
    roles = ("user", "assistant") * len(texts)
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return engine.blocking.generate(messages, **FIELDS).content


# ---- one answer


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_question_is_answered_with_statistics(server: Served, engine: penstock.Engine, suffix: str) -> None:
    done = chat("--url", server.url + suffix, "Hi", *OPTIONS)
    assert (done.exit_code, done.stdout) == (0, content(engine, "Hi") + "\n")
    assert "8 output tokens, time to first token" in done.stderr
    assert done.stderr.rstrip().endswith("tokens/s, ended by the limit of 8 tokens (--max-tokens)")


def test_limit_of_the_server_is_named(server: Served) -> None:
    done = chat("--url", server.url, "Hi", "--temperature", 0, "--ignore-eos")
    assert done.stderr.rstrip().endswith(" tokens with the prompt (set by the server)")


def test_question_is_the_same_as_a_prompt_or_a_pipe(
    server: Served, engine: penstock.Engine, tiny_model: Path
) -> None:
    remote = chat("--url", server.url, *OPTIONS, stdin="Hi")
    assert remote.stdout == content(engine, "Hi") + "\n"
    local = chat(tiny_model, "--question", "Hi", *OPTIONS, "--threads", 1)
    assert (local.exit_code, local.stdout) == (0, remote.stdout)
    assert local.stdout == chat(tiny_model, "Hi", *OPTIONS, "--threads", 1).stdout


def test_json_has_the_answer_and_its_counts(server: Served, engine: penstock.Engine) -> None:
    done = chat("--url", server.url, "-q", "Hi", "--json", *OPTIONS)
    answer = json.loads(done.stdout)
    [choice] = answer["choices"]
    expected = {"index": 0, "content": content(engine, "Hi"), "reasoning": "", "finish_reason": "length"}
    assert choice == expected
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["usage"]["prompt_tokens"] > 0
    assert 0 < answer["timings"]["first_token"] < answer["timings"]["total"]
    assert done.stderr == ""
    local = engine.blocking.generate([{"role": "user", "content": "Hi"}], **FIELDS).to_dict()
    for fields, others in ((answer, local), (choice, local["choices"][0])):
        assert fields.keys() <= others.keys()
    for name in ("usage", "timings"):
        assert answer[name].keys() <= local[name].keys()


def test_request_has_the_model_and_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_API_KEY")
    event = {"choices": [{"delta": {"content": "Yes"}, "finish_reason": "stop"}]}
    with scripted(ok(f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n")) as (url, requests):
        options = ("--seed", 3, "--stop", "x", "--regex", "Y.*", "--system", "Be brief.")
        done = chat("--url", url, "--model", "m", "--api-key", "k", "-q", "Hi", *options)
    assert (done.exit_code, done.stdout) == (0, "Yes\n")
    head, _, body = requests[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
    assert b"Authorization: Bearer k" in head
    assert json.loads(body) == {
        "model": "m",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "seed": 3,
        "stop": ["x"],
        "structured_outputs": {"regex": "Y.*"},
    }


@pytest.mark.parametrize("name", [(), ("--model", "m")])
@pytest.mark.parametrize("options", [(), ("--temperature", 1), ("--top-k", 5)])
def test_sampling_of_the_server_applies_by_default(
    name: tuple[str, ...], options: tuple[object, ...]
) -> None:
    event = {"choices": [{"delta": {"content": "Yes"}, "finish_reason": "stop"}]}
    card = {"id": "m", "chat_sampling": {"temperature": 0.7, "min_p": 0.05, "other": 1, "top_k": "x"}}
    stream = ok(f"data: {json.dumps(event)}\n\n")
    with scripted(stream, models=[{"id": "other"}, card] if name else [card]) as (url, requests):
        done = chat("--url", url, *name, "Hi", *options)
    body = json.loads(requests[-1].partition(b"\r\n\r\n")[2])
    found = {field: body[field] for field in ("temperature", "min_p", "top_k", "other") if field in body}
    if options:
        assert found.keys() == {str(options[0])[2:].replace("-", "_")}
        assert "0.7" not in done.stderr
    else:
        assert found == {"temperature": 0.7, "min_p": 0.05}
        assert done.stderr.startswith("m: temperature 0.7, min_p 0.05\n")


def test_reasoning_goes_to_standard_error() -> None:
    deltas = [{"reasoning_content": "I think"}, {"reasoning": " so."}, {"content": "Yes"}]
    events = [{"choices": [{"delta": delta}]} for delta in deltas]
    stream = "".join(f": comment\n\ndata: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    with scripted(ok(stream)) as (url, _):
        done = chat("--url", url, "--model", "m", "-q", "Hi")
    assert done.stdout == "Yes\n"
    assert done.stderr.startswith("I think so.")
    with scripted(ok(stream)) as (url, _):
        done = chat("--url", url, "--model", "m", "-q", "Hi", "--json")
    assert json.loads(done.stdout)["choices"][0]["reasoning"] == "I think so."


@pytest.mark.parametrize("end", ["data: [DONE]", "data:[DONE]\n", "event: done\ndata: [DONE]\n\n", "", "\n"])
def test_answer_with_a_finish_reason_is_complete(end: str) -> None:
    event = {"choices": [{"delta": {"content": "Yes"}, "finish_reason": "stop"}]}
    with scripted(ok(f"data: {json.dumps(event)}\n\n{end}")) as (url, _):
        done = chat("--url", url, "--model", "m", "Hi")
    assert (done.exit_code, done.stdout) == (0, "Yes\n")


@pytest.mark.needs("fcntl", "terminal")
def test_terminal_gets_no_control_characters_of_a_server() -> None:
    text = "\x1b]0;title\x07A\x1b[2J\x9bB\tC\nD\x7f"
    event = {"choices": [{"delta": {"reasoning": "\x1b[8m?", "content": text}, "finish_reason": "stop"}]}
    stream = ok(f"data: {json.dumps(event)}\n\n")
    with scripted(stream) as (url, _), Terminal(MAIN, "chat", "--url", url, "--model", "m", "Hi") as terminal:
        terminal.wait_for("time to first token")
        assert terminal.wait() == 0
        assert "\x1b]" not in terminal.screen
        assert "\x1b[2J" not in terminal.screen
        assert "\x1b[8m" not in terminal.screen
        assert "[8m?" in terminal.screen
        assert "]0;titleA[2JB\tC\r\nD" in terminal.screen
    with scripted(stream) as (url, _):
        assert chat("--url", url, "--model", "m", "Hi").stdout.startswith("\x1b]0;title\x07A")
    refusal = b"HTTP/1.1 400 No\r\n\r\n" + json.dumps({"error": {"message": text}}).encode()
    with scripted(refusal) as (url, _):
        assert "]0;titleA[2JB" in chat("--url", url, "--model", "m", "Hi").stderr


# ---- the interactive chat


@pytest.mark.needs("fcntl", "terminal")
def test_conversation_continues_until_it_is_cleared(server: Served, engine: penstock.Engine) -> None:
    first = content(engine, "One")
    second = content(engine, "One", first, "Two")
    third = content(engine, "Three")
    with Terminal(MAIN, "chat", "--url", server.url, "--model", "second", *OPTIONS) as terminal:
        for line, answer in (("One", first), ("Two", second), ("/clear", None), ("Three", third)):
            terminal.wait_for("> ")
            terminal.type(f"{line}\n")
            terminal.wait_for(f"{line}\r\n")
            if answer is not None:
                shown = terminal.wait_for("output tokens").rpartition("\r\n")[0]
                printed = (c for c in answer if c in "\n\t" or unicodedata.category(c) != "Cc")
                assert shown == "".join(printed).replace("\n", "\r\n")
        terminal.wait_for("> ")  # before, the terminal may lose it when the prompt changes its mode
        terminal.type(CTRL_D)
        assert terminal.wait() == 0


@pytest.mark.needs("fcntl", "terminal")
def test_ctrl_c_ends_the_request_and_not_the_chat(server: Served, engine: penstock.Engine) -> None:
    long = ("--max-tokens", 8000, "--ignore-eos", "--seed", 1)
    with Terminal(MAIN, "chat", "--url", server.url, *long) as terminal:
        terminal.wait_for("> ")
        terminal.type("Tell me a story\n")
        wait_until(lambda: engine.stats().generation_tokens > 0 and engine.stats().running == 1)
        terminal.wait_for("story\r\n")
        terminal.wait_for(" ")  # the answer has begun
        terminal.type(CTRL_C)
        terminal.wait_for("time to first token")
        wait_until(lambda: at_rest(engine))
        terminal.wait_for("> ")
        terminal.type("/bye\n")
        assert terminal.wait() == 0
        assert "Traceback" not in terminal.screen


@pytest.mark.needs("signals")
def test_ctrl_c_ends_one_answer_with_status_130(server: Served, engine: penstock.Engine) -> None:
    long = ("--max-tokens", 8000, "--ignore-eos", "--seed", 1)
    process = start_python(MAIN, "chat", "--url", server.url, "-q", "Tell me a story", *long)
    assert process.stdout is not None
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, log = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in log
    wait_until(lambda: at_rest(engine))


@pytest.mark.needs("fcntl", "terminal")
def test_refused_question_does_not_end_the_chat(server: Served) -> None:
    with Terminal(MAIN, "chat", "--url", server.url, "--top-p", 7) as terminal:
        for _ in range(2):
            terminal.wait_for("> ")
            terminal.type("Hi\n")
            terminal.wait_for("Error: the server refused the request (400): top_p=7")
        terminal.wait_for("> ")
        terminal.type(CTRL_D)
        assert terminal.wait() == 0


# ---- errors


def test_refusal_is_one_line_and_status_1(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    done = chat("--url", server.url, "-q", "Hi", "--top-p", 7)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("Error: the server refused the request (400): top_p=7")
    done = chat("--url", server.url, "--model", "none", "-q", "Hi")
    assert done.exit_code == 1
    assert "(404): the model 'none' does not exist" in done.stderr
    monkeypatch.setenv("PENSTOCK_API_KEY", "wrong")
    done = chat("--url", server.url, "-q", "Hi")
    assert (done.exit_code, done.stderr.count("\n")) == (1, 1)
    assert "(401): a valid API key is required" in done.stderr


def test_key_of_a_file_is_sent(
    server: Served, engine: penstock.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "key"
    file.write_text("secret\n")
    monkeypatch.setenv("PENSTOCK_API_KEY", "wrong")
    done = chat("--url", server.url, "Hi", "--api-key-file", file, *OPTIONS)
    assert (done.exit_code, done.stdout) == (0, content(engine, "Hi") + "\n")


def test_server_that_is_absent_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    done = chat("--url", f"http://127.0.0.1:{port}", "-q", "Hi")
    assert done.exit_code == 1
    assert done.stderr == "Error: the server cannot be reached: [Errno 111] Connection refused\n"


@pytest.mark.parametrize(
    ("url", "arguments", "message"),
    [
        ("file:///etc/passwd", ["-q", "Hi"], "an address such as"),
        ("127.0.0.1:8000", ["-q", "Hi"], "an address such as"),
        ("http://[::1", ["Hi"], "an address such as"),
        ("http://x:99999", ["Hi"], "an address such as"),
        ("http://x/ü", ["Hi"], "an address such as"),
        ("http://x", ["model", "Hi"], "--url excludes MODEL"),
        ("http://x", ["model", "-q", "Hi"], "--question excludes PROMPT"),
        ("http://x", ["Hi", "--api-key", "a\nb"], "other characters than printable ASCII"),
        ("http://x", ["Hi", "--api-key", "€"], "other characters than printable ASCII"),
        ("http://x", ["Hi", "--api-key", "k", "--api-key-file", __file__], "excludes --api-key-file"),
        (None, ["model", "Hi", "--api-key-file", __file__], "--api-key-file has no effect without --url"),
        ("http://x", ["-q", "Hi", "--threads", "1"], "--threads has no effect with --url"),
        (None, ["model", "-q", "Hi", "--api-key", "k"], "--api-key has no effect without --url"),
        (None, ["model", "-q", "Hi", "--model", "m"], "--model has no effect without --url"),
        (None, ["model", "Hi", "-q", "Hi"], "--question excludes PROMPT"),
        (None, ["-q", "Hi"], "Missing argument 'MODEL', or --url"),
        ("http://x", ["-q", ""], "The prompt is empty"),
    ],
)
def test_options_that_exclude_each_other_are_invalid(
    url: str | None, arguments: list[str], message: str
) -> None:
    done = chat(*([] if url is None else ["--url", url]), *arguments)
    assert done.exit_code == 2
    assert message in done.stderr


BROKEN = {
    "no event": ("data: 1\n\n", "is not a JSON object"),
    "no JSON": ("data: {\n\n", "is not a JSON object"),
    "no API": ('data: {"choices": [1]}\n\n', "is not one of OpenAI's API"),
    "end": ('data: {"choices": [{"delta": {"content": "Half"}}]}\n\n', "the answer ended early"),
    "error": ('data: {"error": {"message": "out of memory"}}\n\n', "the answer ended early: out of memory"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_stream_that_breaks_off_is_an_error(name: str) -> None:
    stream, message = BROKEN[name]
    with scripted(ok(stream)) as (url, _):
        done = chat("--url", url, "--model", "m", "-q", "Hi")
    assert done.exit_code == 1
    assert message in done.stderr
    assert done.stdout == ("Half" if name == "end" else "")


def test_key_does_not_follow_a_redirection() -> None:
    with scripted(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}") as (target, followed):
        moved = f"HTTP/1.1 307 Moved\r\nLocation: {target}\r\nContent-Length: 0\r\n\r\n".encode()
        with scripted(moved) as (url, requests):
            done = chat("--url", url, "--model", "m", "-q", "Hi")
    assert done.exit_code == 1
    assert "(307)" in done.stderr
    assert (len(requests), followed) == (1, [])


def ok(stream: str) -> bytes:
    """A response that ends with its connection."""
    return b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + stream.encode()


@contextmanager
def scripted(
    response: bytes, models: list[dict[str, Any]] | None = None
) -> Iterator[tuple[str, list[bytes]]]:
    """The address of a server that lists these models and answers one request, and its requests."""
    requests: list[bytes] = []

    def answer() -> None:
        while not requests:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(60)
                received = connection.recv(1 << 16)
                if not received:
                    return
                if received.startswith(b"GET "):
                    connection.sendall(ok(json.dumps({"data": models})))
                    continue
                while b"\r\n\r\n" not in received or not received.endswith(b"}"):
                    received += connection.recv(1 << 16)
                requests.append(received)
                connection.sendall(response)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield f"http://127.0.0.1:{address[1]}", requests
        finally:
            socket.create_connection(address).close()  # ends a server without a request
            thread.join()
