"""`/v1/batches`: answers, errors, cancellation, priority, and a server that was killed."""

from __future__ import annotations

import json
import signal
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import anyio
import msgspec
import openai
import pytest

import penstock.server
from penstock.server.batch.answers import answer_line
from penstock.server.batch.attempts import Attempts
from penstock.server.batch.lines import Line, Requester
from penstock.server.batch.store import Folder
from penstock.server.errors import ApiError
from penstock.server.protocol import objects
from support.api.engines import make_engine, wait_until
from support.server.process import Process, started
from support.server.serving import serving as serving_here

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from openai.types import Batch

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES: list[Any] = [{"role": "user", "content": "Hello"}]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8}
LONG: dict[str, Any] = {"prompt": [1, 2], "max_tokens": 500, "ignore_eos": True}
LONGER = '{"max_position_embeddings": 8192}'
KEY = {"Authorization": "Bearer key"}


@contextmanager
def serving(
    model: Path, folder: Path, *options: object, **process: Any
) -> Iterator[tuple[Process, openai.OpenAI]]:
    arguments = ("--files-dir", folder, "--api-key", "key", "--served-model-name", "tiny", *options)
    with (
        started(model, *arguments, **process) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="key", max_retries=0) as client,
    ):
        yield server, client


@pytest.fixture(scope="module")
def client(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    with serving(tiny_model, tmp_path_factory.mktemp("files")) as (_, client):
        yield client


def request(custom_id: str, url: str = CHAT, /, **body: Any) -> dict[str, Any]:
    body = body or {"model": "tiny", "messages": MESSAGES, **GREEDY}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def create(client: openai.OpenAI, lines: list[Any], endpoint: Any = CHAT, **fields: Any) -> Batch:
    text = b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines)
    file = client.files.create(file=("in.jsonl", text), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **fields)


def ended(client: openai.OpenAI, batch_id: str) -> Batch:
    """The batch, once it has ended."""
    states = ("completed", "failed", "expired", "cancelled")
    wait_until(lambda: client.batches.retrieve(batch_id).status in states)
    return client.batches.retrieve(batch_id)


def lines_of(client: openai.OpenAI, file_id: str | None) -> list[Any]:
    """The answers in a file, read as most clients do. `str.splitlines` also ends lines at U+0085."""
    if file_id is None:
        return []
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def codes_of(batch: Batch) -> list[tuple[str | None, int | None]]:
    """The codes and the lines of the errors of a batch that has failed."""
    assert batch.status == "failed"
    assert batch.errors is not None
    return [(error.code, error.line) for error in batch.errors.data or ()]


def counts(batch: Batch) -> tuple[int, int, int]:
    assert batch.request_counts is not None
    return batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed


# ---- answers


def test_batch_answers_as_the_engine_does(client: openai.OpenAI, tiny_model: Path) -> None:
    made = create(client, [request("a"), request("b")], metadata={"for": "me"})
    assert (made.status, made.endpoint, made.metadata) == ("validating", CHAT, {"for": "me"})
    assert made.expires_at == made.created_at + 24 * 60 * 60
    batch = ended(client, made.id)
    assert (batch.status, counts(batch), batch.error_file_id) == ("completed", (2, 2, 0), None)
    assert batch.created_at <= (batch.in_progress_at or 0) <= (batch.finalizing_at or 0)
    lines = lines_of(client, batch.output_file_id)
    assert {line["custom_id"] for line in lines} == {"a", "b"}
    with make_engine(tiny_model) as engine:
        content = engine.blocking.generate(MESSAGES, **GREEDY).content
    for line in lines:
        assert (line["response"]["status_code"], line["error"]) == (200, None)
        assert line["response"]["body"]["choices"][0]["message"]["content"] == content
    file = client.files.retrieve(batch.output_file_id or "")
    assert (file.purpose, file.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    assert client.files.list(purpose="batch_output").data[0] == file


def test_answer_with_line_separators_is_one_line(client: openai.OpenAI) -> None:
    name = "a\x85b\u2028c\u2029d"
    batch = ended(client, create(client, [request(name)]).id)
    assert [line["custom_id"] for line in lines_of(client, batch.output_file_id)] == [name]


def test_failed_requests_are_in_the_error_file(client: openai.OpenAI) -> None:
    hot = request("hot", CHAT, model="tiny", messages=MESSAGES, temperature=9)
    batch = ended(
        client,
        create(client, [request("a"), hot, request("other", CHAT, model="gpt-5", messages=MESSAGES)]).id,
    )
    assert (batch.status, counts(batch)) == ("completed", (3, 1, 2))
    found = {line["custom_id"]: line for line in lines_of(client, batch.error_file_id)}
    assert {name: line["response"]["status_code"] for name, line in found.items()} == {
        "hot": 400,
        "other": 404,
    }
    assert found["hot"]["response"]["body"]["error"]["param"] == "temperature"
    assert [line["custom_id"] for line in lines_of(client, batch.output_file_id)] == ["a"]


@pytest.mark.parametrize(
    ("lines", "codes"),
    [
        ([b"{\n", request("a")], [("invalid_json_line", 1)]),
        ([request("a"), request("a"), request("b", "/v1/images")],
         [("duplicate_custom_id", 2), ("mismatched_endpoint", 3)]),
        ([request("a", COMPLETIONS, prompt="a")], [("mismatched_endpoint", 1)]),
        ([request("a") | {"method": "GET"}], [("invalid_method", 1)]),
        ([b"\n"], [("empty_file", None)]),
        ([request("a" * 256), request("ä" * 257)], [("invalid_custom_id", 2)]),
        ([b"{" * 1000] * 30, [("invalid_json_line", 1)]),
    ],
)  # fmt: skip
def test_invalid_file_fails_the_batch(client: openai.OpenAI, lines: list[Any], codes: list[Any]) -> None:
    batch = ended(client, create(client, lines).id)
    assert codes_of(batch) == codes
    assert (batch.failed_at is None, batch.output_file_id, batch.error_file_id) == (False, None, None)


def test_invalid_batch_is_refused(client: openai.OpenAI) -> None:
    file = client.files.create(file=("a", b"a"), purpose="batch")
    valid: dict[str, Any] = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
    for field, value in (
        ("endpoint", "/v1/images/generations"),
        ("completion_window", "1h"),
        ("output_expires_after", {"anchor": "created_at", "seconds": 3600}),
        ("metadata", {"a" * 65: "b"}),
        ("metadata", {str(index): "a" for index in range(17)}),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.batches.create(**{**valid, field: value})
        assert (caught.value.param or "").startswith(field)


def test_batches_are_listed_in_pages_as_documented(client: openai.OpenAI) -> None:
    made = [create(client, [request("a")]).id for _ in range(3)]
    for batch_id in made:
        ended(client, batch_id)
    assert [batch.id for batch in client.batches.list(limit=2)][:3] == made[::-1]
    for path, kind in (
        ("/batches", objects.BatchList),
        (f"/batches/{made[0]}", objects.Batch),
        ("/files", objects.FileList),
    ):
        answer = client.get(path, cast_to=object)
        assert msgspec.to_builtins(msgspec.convert(answer, kind)).keys() == answer.keys()  # type: ignore[attr-defined]
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve("batch_0")


def test_batch_shares_no_prefix_with_other_keys(tiny_model: Path, tmp_path: Path) -> None:
    body: dict[str, Any] = {"model": "tiny", "prompt": list(range(100, 180)), "max_tokens": 1}
    with serving(tiny_model, tmp_path, "--api-key", "other") as (_, client):
        batch = ended(client, create(client, [request("a", COMPLETIONS, **body)], COMPLETIONS).id)
        assert batch.status == "completed"
        used = []
        for key in ("other", "key"):
            usage = client.with_options(api_key=key).completions.create(**body).usage
            assert usage is not None
            assert usage.prompt_tokens_details is not None
            used.append(usage.prompt_tokens_details.cached_tokens)
        assert used[0] == 0 < used[1]


# ---- limits


def test_batch_has_limits_of_requests_and_of_bytes(tiny_model: Path, tmp_path: Path) -> None:
    options = ("--max-batch-requests", 20, "--max-total-file-bytes", 6000, "--max-files", 4)
    with serving(tiny_model, tmp_path, *options) as (_, client):
        lines = [request(str(index), COMPLETIONS, prompt="a", max_tokens=1) for index in range(21)]
        batch = ended(client, create(client, lines, COMPLETIONS).id)
        assert codes_of(batch) == [("too_many_requests", None)]
        batch = ended(client, create(client, lines[:20], COMPLETIONS).id)
        assert codes_of(batch) == [("storage_limit_exceeded", None)]
        found = lines_of(client, batch.output_file_id)
        assert 0 < len(found) < 20
        # The oldest batch that has ended makes room for a new one.
        fields: dict[str, Any] = {"endpoint": COMPLETIONS, "completion_window": "24h"}
        made = [client.batches.create(input_file_id=batch.input_file_id, **fields).id for _ in range(4)]
        for batch_id in made:
            ended(client, batch_id)
        assert [found.id for found in client.batches.list()] == made[::-1]


def test_client_with_max_files_creates_no_batch(tiny_model: Path, tmp_path: Path) -> None:
    with serving(tiny_model, tmp_path, "--max-files", 3) as (_, client):
        lines = [request("a", COMPLETIONS, prompt="a", max_tokens=1)]
        batch = create(client, lines, COMPLETIONS)
        fields: dict[str, Any] = {"endpoint": COMPLETIONS, "completion_window": "24h"}
        ended(client, batch.id)
        ended(client, client.batches.create(input_file_id=batch.input_file_id, **fields).id)
        with pytest.raises(openai.BadRequestError, match="you have 3 files, which is the limit") as caught:
            client.batches.create(input_file_id=batch.input_file_id, **fields)
        assert caught.value.param == "input_file_id"


def test_batch_makes_room_once_its_record_is_written(tmp_path: Path) -> None:
    settings = penstock.server.ServerSettings(api_keys=("a",), files_dir=str(tmp_path), max_files=2)
    folder = Folder(tmp_path / "client", settings)
    first, second = (folder.add({"created_at": number, "status": "completed"}) for number in range(2))
    with folder.saving(first):
        third = folder.add({"created_at": 2, "status": "completed"})
        assert list(folder.batches) == [first.id, third.id]
        with folder.saving(third), pytest.raises(ApiError, match="the limit"):
            folder.add({"created_at": 3, "status": "completed"})
    assert second.id not in folder.batches
    folder.add({"created_at": 3, "status": "completed"})
    assert first.id not in folder.batches


def test_request_that_the_server_refuses_now_is_repeated(tiny_model: Path, tmp_path: Path) -> None:
    with serving(tiny_model, tmp_path, "--max-outputs-per-key", 1, "--max-num-seqs", 2) as (_, client):
        lines = [request(str(index), COMPLETIONS, **LONG) for index in range(5)]
        assert counts(ended(client, create(client, lines, COMPLETIONS).id)) == (5, 5, 0)


def run_line(engine: penstock.Engine, **fields: Any) -> tuple[bytes, int]:
    """The answer to a line in a server without room for large bodies, and the number of repeats."""
    state = penstock.server.app(engine, penstock.server.ServerSettings(max_total_body_bytes=60_000)).state
    body = {"model": "default", "prompt": "a", "ignore_eos": True, **fields}
    line = Line("a", COMPLETIONS, msgspec.Raw(json.dumps(body).encode()))
    repeats: list[None] = []
    answer = anyio.run(answer_line, state, line, Requester(), lambda: repeats.append(None))
    assert not answer.is_ok
    return answer.text, len(repeats)


def test_request_that_never_fits_is_not_repeated(tiny_model: Path) -> None:
    with make_engine(tiny_model) as engine:
        text, num_repeats = run_line(engine, logprobs=20, max_tokens=60)
    assert (b'"status_code":413' in text, num_repeats) == (True, 0)


def test_response_without_room_is_computed_three_times(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(*_: object) -> None:
        raise ApiError(503, "no room", retry_after=0)

    monkeypatch.setattr("penstock.server.completions.send_choices", full)
    with make_engine(tiny_model) as engine:
        text, num_repeats = run_line(engine, max_tokens=1)
    assert (b'"status_code":503' in text, num_repeats) == (True, 2)


def test_unexpected_error_ends_its_batch_only(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = Folder.publish_results

    def fail(_folder: Folder, _batch: object) -> None:
        monkeypatch.setattr(Folder, "publish_results", publish)
        raise ValueError("an error that no code expects")

    monkeypatch.setattr(Folder, "publish_results", fail)
    settings = penstock.server.ServerSettings(api_keys=("key",), files_dir=str(tmp_path / "files"))
    with (
        make_engine(tiny_model) as engine,
        serving_here(penstock.server.app({"tiny": engine}, settings), lifespan="on") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="key", max_retries=0) as client,
    ):
        for status in ("failed", "completed"):
            assert ended(client, create(client, [request("a")]).id).status == status


def test_input_of_an_unfinished_batch_cannot_be_deleted(tiny_model: Path, tmp_path: Path) -> None:
    with serving(tiny_model, tmp_path, "--max-num-seqs", 1) as (_, client):
        made = create(client, [request(str(index), COMPLETIONS, **LONG) for index in range(100)], COMPLETIONS)
        with pytest.raises(openai.BadRequestError, match="has not ended"):
            client.files.delete(made.input_file_id)
        client.batches.cancel(made.id)
        ended(client, made.id)
        assert client.files.delete(made.input_file_id).deleted


# ---- the life of a batch


def test_cancelled_batch_keeps_its_answers(tiny_model: Path, tmp_path: Path) -> None:
    with serving(tiny_model, tmp_path, "--max-num-seqs", 2) as (server, client):
        lines = [request(str(index), COMPLETIONS, **LONG) for index in range(300)]
        made, waiting = (create(client, lines, COMPLETIONS) for _ in range(2))
        wait_until(lambda: counts(client.batches.retrieve(made.id))[1] >= 2)
        assert client.batches.retrieve(waiting.id).status == "validating"
        assert client.batches.cancel(waiting.id).status == "cancelled"
        assert client.batches.cancel(made.id).status in ("cancelling", "cancelled")
        batch = ended(client, made.id)
        assert (batch.status, batch.cancelling_at is None) == ("cancelled", False)
        found = lines_of(client, batch.output_file_id)
        assert 2 <= len(found) == counts(batch)[1] < 300
        wait_until(lambda: b'penstock:running{engine="0",model_name="tiny"} 0.0' in metrics(server))
        with pytest.raises(openai.BadRequestError, match="cannot be cancelled"):
            client.batches.cancel(made.id)


def metrics(server: Process) -> bytes:
    text: bytes = server.ask("/metrics", headers=KEY)[1]
    return text


def test_interactive_request_is_served_before_a_batch(tiny_model: Path, tmp_path: Path) -> None:
    options = ("--max-num-seqs", 1, "--max-waiting", 1, "--config-overrides", LONGER)
    with serving(tiny_model, tmp_path, *options) as (_, client):
        lines = [request(str(index), COMPLETIONS, **{**LONG, "max_tokens": 4000}) for index in range(2)]
        made = create(client, lines, COMPLETIONS)
        wait_until(lambda: client.batches.retrieve(made.id).status == "in_progress")
        for _ in range(3):
            client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=1)
        assert counts(client.batches.retrieve(made.id)) == (2, 0, 0)
        assert counts(ended(client, made.id)) == (2, 2, 0)


@pytest.mark.needs("signals")
def test_killed_server_continues_its_batches(tiny_model: Path, tmp_path: Path) -> None:
    lines = [request(str(index), COMPLETIONS, **LONG) for index in range(60)]
    lines.append(request("hot", COMPLETIONS, prompt="a", temperature=9))
    with serving(tiny_model, tmp_path, "--max-num-seqs", 2) as (server, client):
        first, second = (create(client, lines, COMPLETIONS) for _ in range(2))
        wait_until(lambda: counts(client.batches.retrieve(first.id))[1] >= 5)
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
    [output] = [
        path for path in tmp_path.glob("*/file-*") if path.read_bytes().startswith(b'{"id":"batch_req')
    ]
    before = output.read_bytes()
    with output.open("ab") as file:
        file.write(before[:50])  # as a power failure can leave it
    with serving(tiny_model, tmp_path) as (_, client):
        for made in (first, second):
            batch = ended(client, made.id)
            assert (batch.status, counts(batch)) == ("completed", (61, 60, 1))
            found = lines_of(client, batch.output_file_id)
            assert sorted(int(line["custom_id"]) for line in found) == list(range(60))
            assert [line["custom_id"] for line in lines_of(client, batch.error_file_id)] == ["hot"]
    assert output.read_bytes().startswith(before + b'{"id":"batch_req_')


#: A request that kills its server.
DEADLY = """
import os, signal
from penstock.server import application
answer_line = application.answer_line
async def answer_or_die(state, line, *rest):
    if line.custom_id == "deadly":
        os.kill(os.getpid(), signal.SIGKILL)
    return await answer_line(state, line, *rest)
application.answer_line = answer_or_die
"""


def has_ended(server: Process) -> bool:
    return server.process.poll() is not None


@pytest.mark.needs("signals")
def test_request_that_always_kills_the_server_is_an_error(tiny_model: Path, tmp_path: Path) -> None:
    names = ["a", "b", "deadly", "c", "d", "e"]
    lines = [request(name, COMPLETIONS, prompt="a", max_tokens=4) for name in names]
    options = ("--max-num-seqs", 2)
    with serving(tiny_model, tmp_path, *options, setup=DEADLY) as (server, client):
        with suppress(openai.APIConnectionError):
            create(client, lines, COMPLETIONS)
        server.process.wait()
    for _ in range(2):
        with serving(tiny_model, tmp_path, *options, setup=DEADLY, is_ready=has_ended):
            pass
    [output] = [
        path for path in tmp_path.glob("*/file-*") if path.read_bytes().startswith(b'{"id":"batch_req')
    ]
    assert output.read_bytes().count(b"\n") == 5  # the request was the last one
    with serving(tiny_model, tmp_path, *options, setup=DEADLY) as (_, client):
        [made] = client.batches.list()
        batch = ended(client, made.id)
        assert (batch.status, counts(batch)) == ("completed", (6, 5, 1))
        [line] = lines_of(client, batch.error_file_id)
        assert (line["custom_id"], line["response"], line["error"]["code"]) == (
            "deadly",
            None,
            "server_error",
        )
        assert "ended 3 times while this request ran" in line["error"]["message"]
    assert not list(tmp_path.glob("*/*.attempts"))


@pytest.mark.needs("signals")
def test_terminated_server_counts_no_attempt(tiny_model: Path, tmp_path: Path) -> None:
    names = [str(index) for index in range(40)]
    with serving(tiny_model, tmp_path, "--max-num-seqs", 1) as (server, client):
        made = create(client, [request(name, COMPLETIONS, **LONG) for name in names], COMPLETIONS)
        wait_until(lambda: counts(client.batches.retrieve(made.id))[1] >= 1)
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0
    [path] = tmp_path.glob("*/*.attempts")
    assert path.stat().st_size > 0
    output = "".join(path.read_text() for path in tmp_path.glob("*/file-*") if not path.suffix)
    unanswered = [name for name in names if f'"custom_id":"{name}"' not in output]
    assert unanswered
    attempts = Attempts(path)
    assert [attempts.num_interrupted(name) for name in unanswered] == [0] * len(unanswered)
    attempts.close()


#: Names the operations on files of clients that are made in the thread of the event loop.
WATCHING = """
import sys, threading
def watch(event, arguments):
    if event in ("open", "os.remove") and threading.current_thread() is threading.main_thread():
        if "/file-" in str(arguments[0]):
            sys.stderr.write(f"{event} in the event loop\\n")
sys.addaudithook(watch)
"""


@pytest.mark.needs("signals")
def test_event_loop_opens_no_file_of_a_client(tiny_model: Path, tmp_path: Path) -> None:
    with serving(tiny_model, tmp_path, setup=WATCHING) as (server, client):
        batch = ended(client, create(client, [request("a")]).id)
        assert len(lines_of(client, batch.output_file_id)) == 1
        client.files.delete(batch.input_file_id)
        with pytest.raises(openai.BadRequestError):
            client.files.create(file=("a", b"a" * 1000), purpose="vision")
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0
        assert b"in the event loop" not in server.log()


@pytest.mark.needs("signals")
def test_terminated_server_leaves_batches_for_the_next(tiny_model: Path, tmp_path: Path) -> None:
    with serving(tiny_model, tmp_path, "--max-num-seqs", 1) as (server, client):
        made = create(client, [request(str(index), COMPLETIONS, **LONG) for index in range(40)], COMPLETIONS)
        wait_until(lambda: counts(client.batches.retrieve(made.id))[1] >= 1)
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0
    record = next(tmp_path.glob("*/batch_*.json"))
    fields = json.loads(record.read_text())
    assert fields["fields"]["status"] == "in_progress"
    fields["fields"]["expires_at"] = 0
    record.write_text(json.dumps(fields))
    with serving(tiny_model, tmp_path) as (_, client):
        batch = ended(client, made.id)
        assert (batch.status, batch.expired_at is None) == ("expired", False)
        total, completed, failed = counts(batch)
        assert (total, completed + failed) == (40, 40)
        errors = lines_of(client, batch.error_file_id)
        assert len(errors) == failed > 0
        assert {line["error"]["code"] for line in errors} == {"batch_expired"}
        assert all(line["response"] is None for line in errors)


def test_unchecked_or_answered_batch_has_no_expired_lines(tiny_model: Path, tmp_path: Path) -> None:
    lines = [request(str(index), COMPLETIONS, prompt="a", max_tokens=1) for index in range(3)]
    with serving(tiny_model, tmp_path) as (_, client):
        made = [ended(client, create(client, lines, COMPLETIONS).id) for _ in range(2)]
    # As a server leaves them that is killed when it begins, and after the last request.
    for batch, status in zip(made, ("validating", "finalizing"), strict=True):
        record = next(tmp_path.glob(f"*/{batch.id}.json"))
        fields = json.loads(record.read_text())
        fields["fields"] |= {"status": status, "expires_at": 0}
        record.write_text(json.dumps(fields))
        if status == "validating":
            for file_id in (batch.output_file_id, f"{batch.output_file_id}.json"):
                next(tmp_path.glob(f"*/{file_id}")).unlink()
            next(tmp_path.glob(f"*/{batch.input_file_id}")).write_text("no request")
    with serving(tiny_model, tmp_path) as (_, client):
        unchecked, answered = (ended(client, batch.id) for batch in made)
        assert (unchecked.status, unchecked.errors) == ("expired", None)
        assert (answered.status, len(lines_of(client, answered.output_file_id))) == ("completed", 3)


def test_folder_that_cannot_be_used_ends_the_server(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with started(
        tiny_model, "--files-dir", file, is_ready=lambda server: server.process.poll() is not None
    ) as server:
        assert b"--files-dir " in server.log()
        assert server.process.wait() == 2
