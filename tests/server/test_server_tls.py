"""TLS and unix sockets of `penstock serve`, with certificates of an own authority."""

from __future__ import annotations

import _ssl
import ctypes
import http.client
import json
import signal
import socket
import ssl
import sys
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio.lowlevel
import pytest
import trustme
from click.testing import CliRunner
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

import penstock
from penstock.cli import main
from penstock.server.listener import Address, Tls, listening, tls_context
from penstock.server.open_connections import Handshakes
from support.api.engines import wait_until
from support.server.process import Process, started
from support.server.serving import post

if TYPE_CHECKING:
    from collections.abc import Callable

PATH = "/v1/completions"


class Files:
    """An authority, and the files of a certificate that it signed."""

    def __init__(self, folder: Path) -> None:
        self.authority = trustme.CA()
        self.certificate = self.authority.issue_cert("127.0.0.1", "localhost")
        self.key, self.cert, self.ca, self.both, self.encrypted, self.password = (
            str(folder / name) for name in ("key", "cert", "ca", "both", "encrypted", "password")
        )
        self.certificate.private_key_pem.write_to_path(self.key)
        self.certificate.cert_chain_pems[0].write_to_path(self.cert)
        self.certificate.private_key_and_cert_chain_pem.write_to_path(self.both)
        self.authority.cert_pem.write_to_path(self.ca)
        key = load_pem_private_key(self.certificate.private_key_pem.bytes(), None)
        encryption = BestAvailableEncryption(b"pass phrase")
        encrypted = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)
        Path(self.encrypted).write_bytes(encrypted)
        Path(self.password).write_text("pass phrase\n")

    def client(self, *, with_certificate: bool = False) -> ssl.SSLContext:
        """The context of a client that trusts the authority."""
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        if with_certificate:
            self.authority.issue_cert("client@example.org").configure_cert(context)
        return context


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("tls"))


def ask(server: Process, context: ssl.SSLContext, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
    """The status and the body of a response over TLS."""
    connection = http.client.HTTPSConnection("127.0.0.1", server.port, timeout=60, context=context)
    path, text = ("/health", None) if body is None else (PATH, json.dumps(body))
    connection.request("GET" if text is None else "POST", path, text, {"Content-Type": "application/json"})
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response.status, content


def answers(server: Process, context: ssl.SSLContext) -> bool:
    """Whether a client with this context gets an answer."""
    try:
        return ask(server, context)[0] == 200
    except OSError:
        return False


@pytest.mark.needs("signals")
def test_https_serves_requests_and_streams(tiny_model: Path, files: Files) -> None:
    tls = ("--tls-certfile", files.cert, "--tls-keyfile", files.encrypted)
    password = ("--tls-keyfile-password-file", files.password)
    with started(tiny_model, *tls, *password, is_ready=trusts(files.client())) as server:
        body = {"prompt": [1, 2], "max_tokens": 20, "ignore_eos": True}
        status, text = ask(server, files.client(), body)
        assert (status, json.loads(text)["usage"]["completion_tokens"]) == (200, 20)
        status, text = ask(server, files.client(), {**body, "stream": True})
        assert (status, text.endswith(b"data: [DONE]\n\n")) == (200, True)
        assert not answers(server, ssl.create_default_context())
        with server.send(b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n") as plain:
            assert b"200" not in plain.recv(1000)
        old = files.client()
        old.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
        with pytest.warns(DeprecationWarning, match="TLS"):
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        assert not answers(server, old)
        with files.client().wrap_socket(server.send(b""), server_hostname="localhost") as connection:
            request = {"prompt": [1], "max_tokens": 400, "ignore_eos": True, "stream": True}
            connection.sendall(post(PATH, request))
            assert connection.recv(1000)
            server.process.send_signal(signal.SIGTERM)
            received = b""
            while not received.endswith(b"0\r\n\r\n") and (data := connection.recv(1 << 16)):
                received += data
            assert b"data: [DONE]" in received
        assert server.end() == 0


def trusts(context: ssl.SSLContext) -> Callable[[Process], bool]:
    """Waits for the server with this context of a client."""
    return lambda server: answers(server, context)


@pytest.mark.parametrize("mode", ["optional", "required"])
def test_client_certificates_are_checked(tiny_model: Path, files: Files, mode: str) -> None:
    tls = ("--tls-certfile", files.both, "--tls-ca-certs", files.ca, "--tls-client-certs", mode)
    with started(tiny_model, *tls, is_ready=trusts(files.client(with_certificate=True))) as server:
        assert answers(server, files.client(with_certificate=True))
        assert answers(server, files.client()) == (mode == "optional")
        stranger = files.client()
        trustme.CA().issue_cert("client@example.org").configure_cert(stranger)
        assert not answers(server, stranger)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--tls-certfile {cert}", "--tls-certfile"),
        ("--tls-certfile {cert} --tls-keyfile {cert}", "--tls-certfile"),
        ("--tls-certfile {cert} --tls-keyfile {ca}", "--tls-certfile"),
        ("--tls-certfile {password}", "--tls-certfile"),
        ("--tls-certfile {cert} --tls-keyfile {encrypted}", "is encrypted"),
        ("--tls-certfile /nowhere/cert", "does not exist"),
        ("--tls-certfile {both} --tls-ca-certs {key}", "--tls-ca-certs"),
        ("--tls-certfile {both} --tls-client-certs required", "--tls-ca-certs"),
        ("--tls-keyfile {key}", "--tls-certfile"),
        ("--tls-client-certs optional", "--tls-certfile"),
    ],
)
def test_invalid_file_is_an_error_before_the_model(files: Files, options: str, message: str) -> None:
    given = options.format(**vars(files)).split()
    result = CliRunner().invoke(main, ["serve", "/nowhere/model", "--port", "0", *given])
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert "nowhere/model" not in result.output


def test_other_password_is_an_error(files: Files) -> None:
    with pytest.raises(penstock.ConfigError, match="tls_certfile"):
        tls_context(Tls(files.cert, files.encrypted, files.ca))


@pytest.mark.parametrize("is_fast", [True, False], ids=["uvloop", "asyncio"])
def test_connection_counts_before_its_handshake(
    tiny_model: Path,
    files: Files,
    is_fast: bool,  # noqa: FBT001
) -> None:
    tls = ("--tls-certfile", files.both, "--max-connections", 8, "--receive-timeout", 3600)
    with (
        started(tiny_model, *tls, is_ready=trusts(files.client()), is_fast=is_fast) as server,
        ExitStack() as stack,
    ):
        silent = [stack.enter_context(server.send(b"")) for _ in range(6)]  # three quarters
        with server.send(b"") as connection:
            assert connection.recv(1) == b""
        silent.pop().close()
        wait_until(lambda: answers(server, files.client()))


@pytest.mark.parametrize("is_fast", [True, False], ids=["uvloop", "asyncio"])
def test_unfinished_handshakes_make_room_for_others(
    tiny_model: Path,
    files: Files,
    is_fast: bool,  # noqa: FBT001
) -> None:
    tls = ("--tls-certfile", files.both, "--receive-timeout", 3600)
    with (
        started(tiny_model, *tls, is_ready=trusts(files.client()), is_fast=is_fast) as server,
        ExitStack() as stack,
    ):
        silent = [stack.enter_context(server.send(b"")) for _ in range(40)]
        assert answers(server, files.client())
        assert all(connection.recv(1) == b"" for connection in silent[:8])
        for connection in silent[9:]:  # each of the nine that waited has ended one
            connection.settimeout(0)
            with pytest.raises(BlockingIOError):
                connection.recv(1)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_freed_slot_ends_no_further_handshake() -> None:
    handshakes = Handshakes()
    connections: list[Any] = [object() for _ in range(34)]  # two more than the slots
    ends = [anyio.Event() for _ in connections]

    async def make(index: int) -> None:
        async with handshakes.slot(connections[index]):
            await ends[index].wait()

    async with anyio.create_task_group() as group:
        for index in range(len(connections)):
            group.start_soon(make, index)
        await anyio.wait_all_tasks_blocked()
        assert [handshakes.must_end(connection) for connection in connections[:3]] == [True, True, False]
        ends[0].set()
        for _ in range(5):  # the waiting task resumes after the slot is free
            await anyio.lowlevel.checkpoint()
            assert not handshakes.must_end(connections[2])
        assert handshakes.must_end(connections[1])
        for end in ends:
            end.set()


class Pair:
    """A server and a client in memory."""

    def __init__(self, files: Files) -> None:
        self.to_server, self.to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = tls_context(Tls(files.both))
        self.server = context.wrap_bio(self.to_server, self.to_client, server_side=True)
        self.client = files.client().wrap_bio(self.to_client, self.to_server, server_hostname="localhost")

    def connect(self) -> None:
        """Make the handshake."""
        for connection in (self.client, self.server, self.client, self.server):
            with suppress(ssl.SSLWantReadError):
                connection.do_handshake()

    def change_keys(self, count: int) -> None:
        """Send records of the client that change its keys, which Python has no function for."""
        try:
            library = ctypes.CDLL(_ssl.__file__)
            change = library.SSL_key_update
        except AttributeError:
            lines = Path("/proc/self/maps").read_text().splitlines()
            library = ctypes.CDLL(next(line.split()[-1] for line in lines if "libssl" in line))
            change = library.SSL_key_update
        # The object has its socket after its head, and then OpenSSL's connection.
        native = id(self.client._sslobj) + object.__basicsize__ + ctypes.sizeof(ctypes.c_void_p)  # type: ignore[attr-defined]
        pointer = ctypes.c_void_p.from_address(native)
        for _ in range(count):
            assert change(pointer, 0) == 1
            assert library.SSL_do_handshake(pointer) == 1


needs_pointer = pytest.mark.skipif(
    sys.implementation.name != "cpython", reason="reads the memory of CPython's objects"
)


@needs_pointer
@pytest.mark.needs("proc")
def test_records_without_data_have_a_limit(files: Files) -> None:
    pair = Pair(files)
    pair.connect()
    for _ in range(3):  # a record with data allows another one without
        pair.change_keys(1)
        pair.client.write(b"data")
        assert pair.server.read() == b"data"
    pair.change_keys(32)
    with pytest.raises(ssl.SSLWantReadError):
        pair.server.read()
    pair.change_keys(1)
    with pytest.raises(ssl.SSLError, match="without data"):
        pair.server.read()


@needs_pointer
@pytest.mark.needs("proc")
def test_records_without_data_end_with_the_connection(files: Files) -> None:
    pair = Pair(files)
    pair.connect()
    pair.change_keys(1000)
    with pytest.raises(ssl.SSLError, match="without data"):
        pair.server.unwrap()


@pytest.mark.needs("proc")
@pytest.mark.parametrize("is_limited", [True, False])
def test_records_of_a_handshake_have_a_limit(files: Files, is_limited: bool) -> None:  # noqa: FBT001
    pair = Pair(files)
    with pytest.raises(ssl.SSLWantReadError):
        pair.client.do_handshake()
    hello = pair.to_server.read()
    head, content = hello[:3], hello[5:]
    size = 1 if is_limited else 30
    for begin in range(0, len(content), size):
        part = content[begin : begin + size]
        pair.to_server.write(head + len(part).to_bytes(2, "big") + part)
    with pytest.raises(ssl.SSLError, match="too many records" if is_limited else "did not complete"):
        pair.server.do_handshake()


# ---- unix sockets


class Connection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=60)
        self.path = path

    def connect(self) -> None:
        """Connect to the socket."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self.path)


def ping(path: str) -> int:
    """The status of a request over a unix socket."""
    connection = Connection(path)
    connection.request("GET", "/health")
    status = connection.getresponse().status
    connection.close()
    return status


@pytest.mark.needs("signals", "unix_sockets")
def test_unix_socket_is_private_and_removed_at_the_end(tiny_model: Path, tmp_path: Path) -> None:
    path = str(tmp_path / "server")
    with socket.socket(socket.AF_UNIX) as crashed:
        crashed.bind(path)  # nothing listens: the server replaces it
    with started(tiny_model, "--uds", path, is_ready=lambda _: ping(path) == 200) as server:
        assert Path(path).stat().st_mode & 0o777 == 0o600
        with pytest.raises(OSError, match="in use"), listening(Address(uds=path)):
            pass
        assert ping(path) == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0
    assert not Path(path).exists()


def metric(path: str, name: str) -> float:
    """A metric of the engine."""
    connection = Connection(path)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    return next(float(line.split()[-1]) for line in lines if line.startswith(name + "{"))


@pytest.mark.needs("signals", "unix_sockets")
def test_stream_that_is_not_read_from_a_unix_socket_ends(tiny_model: Path, tmp_path: Path) -> None:
    path = str(tmp_path / "server")
    options = ("--send-timeout", 0.5, "--config-overrides", '{"max_position_embeddings": 8192}')
    body = {"prompt": [1, 2], "max_tokens": 8000, "ignore_eos": True, "n": 32, "stream": True}
    with (
        started(tiny_model, "--uds", path, *options, is_ready=lambda _: ping(path) == 200) as server,
        socket.socket(socket.AF_UNIX) as connection,
    ):
        connection.connect(path)
        connection.sendall(post(PATH, body))
        wait_until(lambda: metric(path, "penstock:running") == 32)
        wait_until(lambda: metric(path, "penstock:running") == 0)
        assert metric(path, "penstock:generation_tokens_total") < 32 * 8000
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0


@pytest.mark.needs("unix_sockets")
def test_file_in_place_of_a_unix_socket_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("precious")
    with pytest.raises(OSError, match="in use") as caught, listening(Address(uds=str(path))):
        pass
    assert caught.value.filename == str(path)
    assert path.read_text() == "precious"


@pytest.mark.needs("unix_sockets")
def test_socket_of_a_successor_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "server"
    with listening(Address(uds=str(path))) as first:
        path.unlink()
        with listening(Address(uds=str(path))):
            first.close()
            wait_until(partial(path.exists))
    assert not path.exists()
