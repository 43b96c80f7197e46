"""`penstock batch`: responses, errors, and an output that is continued after the process was killed."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from click.testing import CliRunner, Result

import penstock
from penstock import _system
from penstock.cli import main
from penstock.server import ServerSettings
from penstock.server.batch.answers import answer_line
from penstock.server.batch.lines import Line, Requester
from penstock.server.batch.runner import concurrency
from penstock.server.state import State
from support.api.adapters import write_adapter
from support.api.checkpoints import make_config
from support.api.engines import make_engine, start_python, wait_until
from support.api.terminal import Terminal

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path
    from subprocess import Popen

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
MESSAGES = [{"role": "user", "content": "Hello"}]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8}
MAIN = "from penstock.cli import main; main()"
#: A terminal has no width at first, and so no room for a progress bar.
WIDE = "import termios; termios.tcsetwinsize(0, (24, 80)); "


def request(custom_id: str, url: str = COMPLETIONS, /, **body: Any) -> dict[str, Any]:
    if url == COMPLETIONS:
        body = {"prompt": custom_id, **GREEDY, **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def write_lines(path: Path, lines: Iterable[object]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def output_of(path: Path) -> dict[str, Any]:
    """The lines of an output by the id of the request, which has one line."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines)
    return found


def run(source: Path, target: object, model: object, *options: object) -> Result:
    arguments = ("batch", source, target, "--model", model, "--threads", 1, *options)
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def start(source: Path, target: Path, model: object, *options: object, limit: str = "") -> Popen[bytes]:
    return start_python(limit + MAIN, "batch", source, target, "--model", model, "--threads", 1, *options)


def test_responses_are_those_of_the_engine(tiny_model: Path, tmp_path: Path) -> None:
    lines = [
        request("chat", CHAT, messages=MESSAGES, model=tiny_model.name, **GREEDY),
        request("text", prompt="Hello", n=2, temperature=1.0, seed=5),
        request("vector", EMBEDDINGS, input=["Hello", "Bye"], model=str(tiny_model)),
        request("response", "/v1/responses", input="Hello", max_output_tokens=4),
    ]
    result = run(write_lines(tmp_path / "in", lines), tmp_path / "out", tiny_model)
    assert result.exit_code == 0, result.output
    assert "4 requests: 4 completed, 0 failed (0 of them earlier)" in result.stderr
    found = output_of(tmp_path / "out")
    assert all(line["id"].startswith("batch_req_") and line["error"] is None for line in found.values())
    bodies = {name: line["response"].pop("body") for name, line in found.items()}
    assert all(line["response"]["status_code"] == 200 for line in found.values())
    with make_engine(tiny_model) as engine:
        chat = engine.blocking.generate(MESSAGES, **GREEDY)
        assert bodies["chat"]["choices"][0]["message"]["content"] == chat.content
        text = engine.blocking.generate("Hello", max_tokens=8, n=2, temperature=1.0, seed=5)
        assert [item["text"] for item in bodies["text"]["choices"]] == [item.text for item in text.choices]
        vectors = memoryview(engine.blocking.embed(["Hello", "Bye"]).tensor).tolist()
        assert [item["embedding"] for item in bodies["vector"]["data"]] == vectors
    assert bodies["response"]["object"] == "response"


def test_failed_requests_have_their_error_in_the_output(tiny_model: Path, tmp_path: Path) -> None:
    lines = [
        request("good"),
        request("hot", temperature=9),
        request("other", model="gpt-5"),
        request("stream", stream=True),
        {"custom_id": "list", "method": "POST", "url": COMPLETIONS, "body": [1]},
    ]
    result = run(write_lines(tmp_path / "in", lines), tmp_path / "out", tiny_model)
    assert (result.exit_code, "1 completed, 4 failed" in result.stderr) == (1, True)
    found = output_of(tmp_path / "out")
    for name, status, param in (
        ("hot", 400, "temperature"),
        ("other", 404, "model"),
        ("stream", 400, "stream"),
        ("list", 400, None),
    ):
        response, error = found[name]["response"], found[name]["error"]
        details = response["body"]["error"]
        assert (response["status_code"], details["param"]) == (status, param)
        assert error == {"code": details["code"], "message": details["message"]}
    assert found["good"]["error"] is None


def test_adapter_answers_under_its_name(tiny_model: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", make_config("llama"), rank=2)
    lines = [request("base", prompt="Hello"), request("adapted", prompt="Hello", model="sql")]
    source = write_lines(tmp_path / "in", lines)
    assert run(source, tmp_path / "out", tiny_model, "--lora-modules", f"sql={adapter}").exit_code == 0
    found = output_of(tmp_path / "out")
    with make_engine(tiny_model, max_adapters=1) as engine:
        engine.blocking.load_adapter("sql", adapter)
        for name, used in (("base", None), ("adapted", "sql")):
            expected = engine.blocking.generate("Hello", adapter=used, max_tokens=8, temperature=0.0).text
            assert found[name]["response"]["body"]["choices"][0]["text"] == expected


@pytest.mark.needs("fcntl", "terminal")
def test_terminal_shows_the_progress(tiny_model: Path, tmp_path: Path) -> None:
    lines = [request(f"r{index}", max_tokens=60, ignore_eos=True) for index in range(200)]
    source, target = write_lines(tmp_path / "in", lines), tmp_path / "out"
    with Terminal(WIDE + MAIN, "batch", source, target, "--model", tiny_model, "--threads", 1) as terminal:
        terminal.wait_for("/200 [")
        terminal.wait_for("200 requests: 200 completed")
        assert terminal.wait() == 0


# ---- an output that exists


@pytest.mark.needs("signals")
def test_killed_batch_continues_where_it_was(tiny_model: Path, tmp_path: Path) -> None:
    lines = [request(f"r{index}", max_tokens=60, ignore_eos=True) for index in range(400)]
    source, target = write_lines(tmp_path / "in", lines), tmp_path / "out"
    process = start(source, target, tiny_model, "--max-num-seqs", 4)
    try:
        wait_until(lambda: target.exists() and target.read_bytes().count(b"\n") >= 20)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    before = target.read_bytes()
    assert before.endswith(b"\n")
    num_done = before.count(b"\n")
    assert 20 <= num_done < 400
    target.write_bytes(before + before[:60])  # as a power failure can leave it
    result = run(source, target, tiny_model)
    assert (result.exit_code, f"({num_done} of them earlier)" in result.stderr) == (0, True)
    assert target.read_bytes().startswith(before + b'{"id":"batch_req_')
    assert output_of(target).keys() == {line["custom_id"] for line in lines}


@pytest.mark.needs("resource")
def test_full_disk_leaves_an_output_that_continues(tiny_model: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in", [request(f"r{index}") for index in range(20)])
    target = tmp_path / "out"
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))\n"
    process = start(source, target, tiny_model, limit=limit)
    _, log = process.communicate()
    assert (process.returncode, b"File too large" in log, str(target).encode() in log) == (1, True, True)
    assert target.stat().st_size == 1500
    assert not target.read_bytes().endswith(b"\n")
    assert run(source, target, tiny_model).exit_code == 0
    assert len(output_of(target)) == 20


def test_complete_batch_does_not_load_the_model(tiny_model: Path, tmp_path: Path) -> None:
    source, target = write_lines(tmp_path / "in", [request("a")]), tmp_path / "out"
    assert run(source, target, tiny_model).exit_code == 0
    before = target.read_bytes()
    assert run(source, target, tmp_path / "missing").exit_code == 0
    assert target.read_bytes() == before
    write_lines(source, [request("a"), request("b")])
    assert run(source, target, tiny_model).exit_code == 0
    assert target.read_bytes().startswith(before)
    assert output_of(target).keys() == {"a", "b"}


@pytest.mark.parametrize(
    "contents",
    [b"not a batch", b"a\nb\n", b'{"custom_id": "a"}\n', b'{"id":"x","custom_id":"other","response":null}\n'],
)
def test_other_file_is_refused_and_not_changed(contents: bytes, tmp_path: Path) -> None:
    source, target = write_lines(tmp_path / "in", [request("a")]), tmp_path / "out"
    target.write_bytes(contents)
    result = run(source, target, "missing")
    assert result.exit_code == 2
    assert "not the output of a batch" in result.stderr or "'other'" in result.stderr
    assert target.read_bytes() == contents


@pytest.mark.needs("devices")
def test_input_cannot_be_the_output(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in", [request("a")])
    before = source.read_bytes()
    assert run(source, source, "missing").exit_code == 2
    assert source.read_bytes() == before
    result = run(source, "/dev/null", "missing")
    assert (result.exit_code, "not a regular file" in result.stderr) == (2, True)


def test_two_processes_do_not_write_one_output(tmp_path: Path) -> None:
    source, target = write_lines(tmp_path / "in", [request("a")]), tmp_path / "out"
    with target.open("ab") as file:
        _system.lock_file(file.fileno())
        result = run(source, target, "missing")
    assert (result.exit_code, "another process writes" in result.stderr) == (2, True)


# ---- the input


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: the line is not a request"),
        (
            '{"custom_id": "b", "url": "/v1/completions", "body": {"a": NaN}}',
            "line 2: the line is not a request",
        ),
        ('{"custom_id": "b", "url": "/v1/completions", "body": ' + "[" * 100_000, "maximum recursion depth"),
        ('{"custom_id": "b", "url": "/v1/completions"}', "missing required field `body`"),
        (json.dumps(request("b") | {"method": "GET"}), "line 2: method='GET' is not allowed"),
        (json.dumps(request("b", "/v1/images")), "line 2: url='/v1/images' is not allowed"),
        (json.dumps(request("a")), "line 2: custom_id='a' is not allowed"),
        (json.dumps(request("b" * 257)), "it must be a text of at most 256 characters"),
    ],
)
def test_invalid_line_is_invalid_usage(line: str, message: str, tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text(f"{json.dumps(request('a'))}\n{line}\n")
    result = run(source, target, "missing")
    assert (result.exit_code, message in result.stderr) == (2, True), result.stderr
    assert not target.exists()


def test_blank_lines_are_skipped_and_empty_files_refused(tiny_model: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text(f"\n{json.dumps(request('a'))}\r\n  \n{json.dumps(request('b'))}")
    assert run(source, target, tiny_model).exit_code == 0
    assert output_of(target).keys() == {"a", "b"}
    source.write_text("\n")
    result = run(source, target, tiny_model)
    assert (result.exit_code, "no request" in result.stderr) == (2, True)


# ---- the engine


@pytest.mark.needs("signals")
def test_interruption_keeps_the_lines_so_far(tiny_model: Path, tmp_path: Path) -> None:
    lines = [request(f"r{index}", max_tokens=60, ignore_eos=True) for index in range(400)]
    source, target = write_lines(tmp_path / "in", lines), tmp_path / "out"
    process = start(source, target, tiny_model, "--max-num-seqs", 2)
    wait_until(lambda: target.exists() and target.read_bytes().count(b"\n") >= 2)
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode == 130
    assert 2 <= len(output_of(target)) < 400


def test_stopped_engine_ends_the_batch(tiny_model: Path) -> None:
    with make_engine(tiny_model) as engine:
        state = State({"tiny": engine}, ServerSettings())
        line = Line("a", COMPLETIONS, b'{"prompt": "a"}')  # type: ignore[arg-type]

    async def answer() -> None:
        await answer_line(state, line, Requester(), engine.health)

    with pytest.raises(penstock.EngineStoppedError):
        anyio.run(answer)


@pytest.mark.parametrize("options", [{"max_num_seqs": 8}, {"max_num_seqs": 8, "max_waiting": 2}, {}])
def test_batch_fits_into_the_engine(options: dict[str, Any], tiny_model: Path) -> None:
    with make_engine(tiny_model, **options) as engine:
        info = engine.info
        number = concurrency(info, 1000)
        assert number > info.max_num_seqs
        if info.max_waiting is not None:
            assert number < info.max_num_seqs + info.max_waiting
        assert concurrency(info, 32 << 20) == 2
        assert concurrency(info, 1 << 40) == 1
