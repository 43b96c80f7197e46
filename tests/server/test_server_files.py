"""`/v1/files`: uploads, lists, contents and removal; limits; clients do not see files of each other."""

from __future__ import annotations

import codecs
import io
import os
from email import message_from_bytes
from typing import TYPE_CHECKING, Any

import anyio
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock
import penstock.server
from penstock.server.multipart import Multipart
from support.api.engines import wait_until
from support.server.serving import Served, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from email.message import Message
    from pathlib import Path

KEYS = ("first", "second")
TEXT = b'{"custom_id": "a"}\n'
LIMITS: dict[str, Any] = {"max_file_bytes": 3_000_000, "max_files": 4, "max_total_file_bytes": 4_000_000}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "files"


@pytest.fixture
def server(tiny_model: Path, folder: Path) -> Iterator[Served]:
    settings = penstock.server.ServerSettings(api_keys=KEYS, files_dir=str(folder), **LIMITS)
    application = penstock.server.app(penstock.Engine(tiny_model), settings)
    with serving(application, lifespan="on") as server:
        yield server


def client_of(server: Served, key: str = "first") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with client_of(server) as client:
        yield client


def form(*parts: tuple[str, str | None, bytes], boundary: str = "b") -> bytes:
    """A body with these parts: a name, the name of a file, contents."""
    found = b""
    for name, filename, content in parts:
        header = f'Content-Disposition: form-data; name="{name}"'
        header += "" if filename is None else f'; filename="{filename}"'
        found += f"--{boundary}\r\n{header}\r\n\r\n".encode() + content + b"\r\n"
    return found + f"--{boundary}--\r\n".encode()


def post(server: Served, body: bytes, kind: str = "multipart/form-data; boundary=b") -> tuple[int, Any]:
    """The status of an upload, and the field at fault or the answer."""
    headers = {"Authorization": "Bearer first", "Content-Type": kind}
    status, answer, _ = server.ask("/v1/files", body, headers=headers)
    return status, answer["error"]["param"] if "error" in answer else answer


def head(length: int) -> bytes:
    """The head of an upload with a body of this length."""
    lines = (
        "POST /v1/files HTTP/1.1",
        "Host: localhost",
        "Authorization: Bearer first",
        "Content-Type: multipart/form-data; boundary=b",
        f"Content-Length: {length}",
    )
    return "\r\n".join((*lines, "", "")).encode()


def data_of(folder: Path) -> list[Path]:
    """The files with contents of clients."""
    return [path for path in folder.glob("*/file-*") if not path.suffix]


FILE, PURPOSE = ("file", "a.jsonl", TEXT), ("purpose", None, b"batch")


# ---- the client of OpenAI


def test_client_stores_reads_and_deletes_a_file(client: openai.OpenAI, folder: Path) -> None:
    made = client.files.create(file=("ä b.jsonl", TEXT), purpose="batch")
    assert (made.filename, made.bytes, made.purpose, made.status) == ("ä b.jsonl", 19, "batch", "processed")
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).content == TEXT
    assert client.files.delete(made.id).deleted
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError) as caught:
            call(made.id)
        assert caught.value.param == "file_id"
    assert data_of(folder) == []


def test_charset_of_a_file_name_is_not_looked_up(server: Served) -> None:
    sought: list[str] = []
    codecs.register(sought.append)
    names = []
    try:
        for value in ("utf-8''%C3%A4", "unknown-1''a", "unknown-2''%ff"):
            file = (
                f"--b\r\nContent-Disposition: form-data; name=file; filename*={value}\r\n\r\nx\r\n".encode()
            )
            names.append(post(server, file + form(PURPOSE))[1]["filename"])
    finally:
        codecs.unregister(sought.append)
    assert names == ["ä", "a", "ÿ"]
    assert not [name for name in sought if "unknown" in name]


@pytest.mark.parametrize("name", ["name", "filename"])
def test_value_that_must_be_encoded_is_status_400(name: str, server: Served) -> None:
    header = f"Content-Disposition: form-data; {name}*=utf-8''漢"
    assert post(server, f"--b\r\n{header}\r\n\r\nx\r\n".encode() + form(PURPOSE)) == (400, None)


def test_large_file_is_the_same_after_its_way(client: openai.OpenAI) -> None:
    contents = os.urandom(2_900_000)
    made = client.files.create(file=("a", io.BytesIO(contents)), purpose="batch")
    assert made.bytes == len(contents)
    assert client.files.content(made.id).content == contents


def test_files_are_listed_in_pages(client: openai.OpenAI) -> None:
    made = [client.files.create(file=(str(index), TEXT), purpose="batch") for index in range(3)]
    assert list(client.files.list()) == made[::-1]
    assert list(client.files.list(order="asc", limit=2)) == made
    assert list(client.files.list(after=made[1].id)) == [made[0]]
    assert list(client.files.list(purpose="batch_output")) == []


def test_files_are_those_of_the_key(client: openai.OpenAI, server: Served, folder: Path) -> None:
    made = client.files.create(file=("a", TEXT), purpose="batch")
    with client_of(server, "second") as other:
        assert list(other.files.list()) == []
        for call in (other.files.retrieve, other.files.content, other.files.delete):
            with pytest.raises(openai.NotFoundError):
                call(made.id)
        with pytest.raises(openai.NotFoundError) as caught:
            other.batches.create(input_file_id=made.id, endpoint="/v1/completions", completion_window="24h")
        assert caught.value.param == "input_file_id"
    assert client.files.content(made.id).content == TEXT
    assert folder.stat().st_mode & 0o77 == 0


@pytest.mark.parametrize("file_id", ["..%2F..%2Flock", "..", "%2e%2e", "file-", "lock", "file-%00"])
def test_ids_are_never_paths(file_id: str, server: Served) -> None:
    headers = {"Authorization": "Bearer first"}
    for path in (f"/v1/files/{file_id}", f"/v1/files/{file_id}/content", f"/v1/batches/{file_id}"):
        assert server.ask(path, headers=headers)[0] == 404


def test_files_outlive_the_server(tiny_model: Path, folder: Path) -> None:
    settings = penstock.server.ServerSettings(files_dir=str(folder))
    engine = penstock.Engine(tiny_model)
    with serving(penstock.server.app(engine, settings), lifespan="on") as server, client_of(server) as client:
        made = client.files.create(file=("a", TEXT), purpose="batch")
    (data_of(folder)[0].parent / "file-0").write_text("an upload that has not ended")
    with serving(penstock.server.app(engine, settings), lifespan="on") as server, client_of(server) as client:
        assert list(client.files.list()) == [made]
        assert client.files.content(made.id).content == TEXT
        assert [path.name for path in data_of(folder)] == [made.id]


# ---- settings and limits


def test_routes_without_a_folder_name_the_setting(tiny_model: Path) -> None:
    with serving(penstock.server.app(penstock.Engine(tiny_model))) as server:
        for method, path in (("GET", "/v1/files"), ("POST", "/v1/files"), ("GET", "/v1/batches/b")):
            status, answer, _ = server.ask(path, method=method)
            assert (status, "files_dir" in answer["error"]["message"]) == (403, True)


def test_folder_has_one_server(tiny_model: Path, server: Served, folder: Path) -> None:
    settings = penstock.server.ServerSettings(files_dir=str(folder))
    application = penstock.server.app(penstock.Engine(tiny_model), settings)
    batches = application.state.batches
    assert batches is not None
    with pytest.raises(penstock.ConfigError, match=r"files_dir=.*no other process uses"):
        anyio.run(batches.run)
    assert server.ask("/v1/files", headers={"Authorization": "Bearer first"})[0] == 200


def test_number_and_size_of_files_have_limits(server: Served, client: openai.OpenAI, folder: Path) -> None:
    large = ("file", "a", bytes(2_500_000))
    assert post(server, form(PURPOSE, ("file", "a", bytes(3_000_001)))) == (413, "file")
    status, first = post(server, form(PURPOSE, large))
    assert status == 200
    assert post(server, form(PURPOSE, large)) == (400, "file")  # of all files
    assert [path.name for path in data_of(folder)] == [first["id"]]
    for _ in range(3):
        assert post(server, form(PURPOSE, FILE))[0] == 200
    assert post(server, form(PURPOSE, FILE)) == (400, "file")
    client.files.delete(first["id"])
    assert post(server, form(PURPOSE, large))[0] == 200


def test_body_that_is_announced_as_too_large_is_not_read(server: Served) -> None:
    with server.send(head(1_000_000_000)) as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


# ---- the form


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (form(FILE, PURPOSE), 200),
        (form(PURPOSE), "file"),
        (form(FILE), "purpose"),
        (form(FILE, ("purpose", None, b"fine-tune")), "purpose"),
        (form(FILE, PURPOSE, ("expires_after[seconds]", None, b"3600")), "expires_after[seconds]"),
        (form(FILE, FILE, PURPOSE), "file"),
        (form(PURPOSE, ("a", None, b"a" * 300)), "a"),
        (form(*[PURPOSE] * 20, FILE), None),
        (form(FILE, PURPOSE)[:-8], None),
        (b"", None),
        (b"--b\r\n\r\n\r\n--b--", None),
        (b"--b\r\n" + b"a" * 10_000 + form(FILE, PURPOSE), None),
    ],
)
def test_form_has_a_file_and_its_purpose(body: bytes, expected: object, server: Served, folder: Path) -> None:
    status, answer = post(server, body)
    assert (status if status == 200 else answer) == expected
    assert len(data_of(folder)) == (status == 200)
    assert status in (200, 400)


@pytest.mark.parametrize(
    "kind", ["application/json", "multipart/form-data", "multipart/form-data; boundary="]
)
def test_upload_needs_a_form(kind: str, server: Served) -> None:
    assert post(server, form(FILE, PURPOSE), kind)[0] == 415


@pytest.mark.parametrize(("excess", "status"), [(0, 200), (1, 415)])
def test_content_type_of_a_form_has_a_limit(excess: int, status: int, server: Served) -> None:
    kind = "multipart/form-data; boundary=b"
    assert post(server, form(FILE, PURPOSE), kind + ";" * (256 + excess - len(kind)))[0] == status


@pytest.mark.parametrize(("excess", "status"), [(0, 200), (1, 400)])
def test_headers_of_a_part_have_a_limit(excess: int, status: int, server: Served) -> None:
    rest = form(FILE, PURPOSE).removeprefix(b"--b")
    size = 1024 + excess - rest.index(b"\r\n\r\n")
    body = b"--b" + rest.replace(b"\r\n\r\n", b";" * size + b"\r\n\r\n", 1)
    assert post(server, body)[0] == status


def test_upload_that_is_broken_off_leaves_no_file(server: Served, folder: Path) -> None:
    body = form(PURPOSE, ("file", "a", bytes(2_000_000)))
    with server.send(head(len(body)) + body[:-1000]):
        wait_until(lambda: bool(data_of(folder)))
    wait_until(lambda: not data_of(folder))
    wait_until(lambda: server.application.state.body_bytes.total == 0)


def test_slow_upload_ends_with_an_error(tiny_model: Path, folder: Path) -> None:
    settings = penstock.server.ServerSettings(files_dir=str(folder), receive_timeout=0.2)
    application = penstock.server.app(penstock.Engine(tiny_model), settings)
    with serving(application, lifespan="on") as server:
        body = form(PURPOSE, ("file", "a", bytes(10_000)))
        with server.send(head(len(body)) + body[:-1000]) as connection:
            assert connection.recv(100).startswith(b"HTTP/1.1 408")
    assert data_of(folder) == []


NAMES = st.text(
    st.characters(codec="ascii", exclude_characters='"\\', categories=["L", "N", "P"]), min_size=1
)
PARTS = st.lists(st.tuples(NAMES, st.none() | NAMES, st.binary(max_size=40)), min_size=1, max_size=4)


@given(PARTS, st.binary(max_size=5), st.integers(1, 30))
def test_parts_are_those_that_the_email_package_reads(
    parts: list[tuple[str, str | None, bytes]], preamble: bytes, size: int
) -> None:
    body = preamble + b"\r\n" + form(*parts, boundary="----x")
    message = message_from_bytes(b'Content-Type: multipart/form-data; boundary="----x"\r\n\r\n' + body)
    expected = [_read(part) for part in message.get_payload()]  # type: ignore[arg-type]
    pieces = iter([body[begin : begin + size] for begin in range(0, len(body), size)])

    async def next_piece() -> bytes | None:
        return next(pieces, None)

    async def read() -> list[tuple[str, str | None, bytes]]:
        reader = Multipart("multipart/form-data; boundary=----x", next_piece)
        found = []
        while (part := await reader.next_part()) is not None:
            content = b""
            while piece := await reader.read():
                content += piece
            found.append((part.name, part.filename, content))
        return found

    assert anyio.run(read) == expected == [(name, file, content) for name, file, content in parts]


def _read(part: Message) -> tuple[object, object, object]:
    name = part.get_param("name", header="content-disposition")
    return name, part.get_filename(), part.get_payload(decode=True)
