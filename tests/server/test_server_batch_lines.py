"""The files of batches are read and checked in pieces, between which other clients have turns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import msgspec
import openai
import pytest

import penstock.server
from penstock.server.batch.lines import PIECE_BYTES, FileCheck, Line, LineReader
from penstock.server.batch.results import Results
from penstock.server.batch.runner import run_lines
from support.api.engines import make_engine, wait_until
from support.server.serving import serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.server.threads import Threads

NUM_LINES, LINE_BYTES = 40, 100 << 10
URL: Any = "/v1/completions"


def line(number: int) -> bytes:
    """A line of `LINE_BYTES` bytes."""
    fields = {"custom_id": str(number), "url": URL, "body": {"prompt": [1], "max_tokens": 1}}
    return msgspec.json.encode(fields).ljust(LINE_BYTES - 1) + b"\n"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A file of 4 MB."""
    path = tmp_path / "in"
    path.write_bytes(b"".join(line(number) for number in range(NUM_LINES)))
    return path


def pieces_of(reader: LineReader) -> Iterator[list[Line]]:
    while (lines := reader.read()) is not None:
        yield lines


def test_requests_are_read_in_pieces(source: Path) -> None:
    pieces = list(pieces_of(LineReader(source)))
    assert [found.custom_id for piece in pieces for found in piece] == [str(n) for n in range(NUM_LINES)]
    assert max(map(len, pieces)) == PIECE_BYTES // LINE_BYTES + 1


def test_piece_of_blank_lines_is_not_the_end(source: Path) -> None:
    source.write_bytes(line(0) + b"\n" * (2 * PIECE_BYTES) + line(1))
    pieces = list(pieces_of(LineReader(source)))
    assert [len(piece) for piece in pieces] == [1, 0, 1]


def test_all_requests_run_a_bounded_number_at_a_time(source: Path) -> None:
    reader = LineReader(source)
    running, most, done = 0, 0, []

    async def read() -> list[Line] | None:
        return reader.read()

    async def work(found: Line) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(10):
            await anyio.lowlevel.checkpoint()
        running -= 1
        done.append(found.custom_id)

    anyio.run(run_lines, read, 3, work)
    assert (most, sorted(done, key=int)) == (3, [str(number) for number in range(NUM_LINES)])


def test_output_of_an_earlier_process_is_read_in_pieces(tmp_path: Path) -> None:
    fields = {"id": "batch_req_a", "response": None, "error": {"message": "a" * LINE_BYTES}}
    lines = [msgspec.json.encode({**fields, "custom_id": str(n)}) + b"\n" for n in range(NUM_LINES)]
    (tmp_path / "out").write_bytes(b"".join(lines))
    with Results(tmp_path / "out") as results:
        assert results.advance()
        assert len(results.custom_ids) == PIECE_BYTES // LINE_BYTES + 1
        while results.advance():
            pass
        assert len(results.custom_ids) == results.num_failed == NUM_LINES


def test_check_stops_at_the_limit_of_lines(source: Path) -> None:
    source.write_bytes(line(0) + b"\n" * PIECE_BYTES)
    check = FileCheck(source, max_lines=100)
    assert not check.advance()
    assert [found.code for found in check.problems] == ["too_many_requests"]


def test_each_piece_of_a_file_is_a_turn(
    source: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = penstock.server.ServerSettings(files_dir=str(tmp_path / "files"))
    turns: list[str] = []
    with make_engine(tiny_model) as engine:
        application = penstock.server.app({"tiny": engine}, settings)
        assert application.state.batches is not None
        threads: Threads = application.state.batches.read_threads
        run = threads.run

        async def counted(work: Any, *arguments: Any) -> Any:
            turns.append(work.__name__)
            return await run(work, *arguments)

        monkeypatch.setattr(threads, "run", counted)
        with (
            serving(application, lifespan="on") as server,
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="any") as client,
        ):
            file = client.files.create(file=source, purpose="batch")
            batch = client.batches.create(input_file_id=file.id, endpoint=URL, completion_window="24h")
            wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")
    num_pieces = -(-NUM_LINES // (PIECE_BYTES // LINE_BYTES + 1))
    assert turns.count("read") == num_pieces + 1  # the last one finds the end
    assert turns.count("advance") == num_pieces + 1  # and that of the output
