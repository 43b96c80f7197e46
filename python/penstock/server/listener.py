"""Where a server listens: an address or a unix socket, and its certificates."""

from __future__ import annotations

import os
import socket
import ssl
import stat
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import penstock
from penstock._system import AF_UNIX
from penstock.server.tls_records import BoundedContext

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Address", "Tls", "listening", "tls_context"]

#: Connections that the system accepts before the process does.
_BACKLOG = 2048
_CLIENT_CERTS = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}


@dataclass(frozen=True)
class Address:
    """A host and a port, or the path of a unix socket."""

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None


@dataclass(frozen=True)
class Tls:
    """The files of TLS, in PEM format. The key can be in the file of the certificate."""

    certfile: str
    keyfile: str | None = None
    keyfile_password_file: str | None = None
    ca_certs: str | None = None
    client_certs: Literal["none", "optional", "required"] = "none"


def tls_context(tls: Tls) -> ssl.SSLContext:
    """The context of a server, with TLS 1.2 or newer. Raises `ConfigError` for a file that is not valid."""
    context = BoundedContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    file = tls.keyfile_password_file
    try:
        context.load_cert_chain(tls.certfile, tls.keyfile, lambda: _password(file))
    except (OSError, ValueError) as error:
        files = " and ".join(filter(None, (tls.certfile, tls.keyfile)))
        raise _error("tls_certfile", files, "a certificate with its key, as PEM", error) from error
    if tls.client_certs != "none" and tls.ca_certs is None:
        limit = "none without tls_ca_certs"
        message = f"tls_client_certs={tls.client_certs!r} is not allowed: it must be {limit}"
        raise penstock.ConfigError(message, "tls_client_certs", tls.client_certs, limit)
    if tls.ca_certs is not None:
        try:
            context.load_verify_locations(tls.ca_certs)
        except OSError as error:
            raise _error("tls_ca_certs", tls.ca_certs, "certificates, as PEM", error) from error
    context.verify_mode = _CLIENT_CERTS[tls.client_certs]
    return context


def _password(file: str | None) -> bytes:
    if file is None:
        raise ValueError("the key is encrypted, and tls_keyfile_password_file is not given")
    return Path(file).read_bytes().rstrip(b"\r\n")


def _error(field: str, value: str, limit: str, error: Exception) -> penstock.ConfigError:
    return penstock.ConfigError(f"{field}={value!r} must be {limit}: {error}", field, value, limit)


@contextmanager
def listening(address: Address) -> Iterator[socket.socket]:
    """A listening socket, until the block is left."""
    if address.uds is not None and AF_UNIX is None:
        message = f"uds={address.uds!r} is not allowed: Python has no Unix sockets on this system"
        raise penstock.ConfigError(message, "uds", address.uds, "left out on this system")
    listener = _tcp_listener(address) if address.uds is None else _unix_listener(address.uds)
    with listener:
        if address.uds is None:
            yield listener
            return
        identity = _identity(address.uds)
        try:
            yield listener
        finally:
            if _identity(address.uds) == identity:
                Path(address.uds).unlink()


def _tcp_listener(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    return socket.create_server((address.host, address.port), family=family, backlog=_BACKLOG)


def _unix_listener(path: str) -> socket.socket:
    """A unix socket that only this user can open. The socket of a server that has crashed is replaced."""
    with socket.socket(socket.AF_UNIX) as probe, suppress(FileNotFoundError):
        if stat.S_ISSOCK(Path(path).lstat().st_mode):
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                Path(path).unlink()
    listener = socket.socket(socket.AF_UNIX)
    mask = os.umask(0o177)
    try:
        listener.bind(path)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, error.strerror, path) from error
    finally:
        os.umask(mask)
    return listener


def _identity(path: str) -> tuple[int, int] | None:
    with suppress(OSError):
        found = Path(path).lstat()
        return found.st_dev, found.st_ino
    return None
