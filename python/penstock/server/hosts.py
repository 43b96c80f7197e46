"""Checks of `Host` and `Origin`: a web page in a browser cannot use a server that its author cannot reach."""

from __future__ import annotations

import ipaddress
import shlex
from typing import TYPE_CHECKING

from penstock.server.errors import ApiError

if TYPE_CHECKING:
    from starlette.datastructures import Headers

    from penstock.server.settings import ServerSettings

__all__ = ["Hosts", "names_this_machine"]

_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


class Hosts:
    """The names of the server, and the origins of other sites that may use it."""

    def __init__(self, settings: ServerSettings) -> None:
        names = settings.allowed_hosts
        self._allows_all = "*" in names or (bool(settings.api_keys) and not names)
        self._names = _LOOPBACK | {_normalised(name) for name in names}
        self._origins = frozenset(settings.cors_origins)

    def add(self, name: str) -> None:
        """Add the name at which the server listens."""
        self._names |= {_normalised(name)}

    def check(self, headers: Headers) -> None:
        """Raise for a request to another name, and for one by a web page of another site.

        A name that a page's author has bound to an address of this machine (DNS rebinding) is in `Host`. An
        address is allowed, because no page has it as its name. Only clients that are no browsers omit `Host`.
        """
        hosts = headers.getlist("host")
        if not self._allows_all:
            for host in hosts:
                if not self._is_allowed(host):
                    message = f"the host {host[:64]!r} is not one of the server's allowed_hosts"
                    remedy = _remedy(_without_port(host)[:64], "allowed_hosts", "--allowed-host")
                    raise ApiError(403, f"{message}; {remedy}", code="host_not_allowed")
        if "origin" not in headers or "*" in self._origins:
            return
        for origin in headers.getlist("origin"):
            if origin not in self._origins and origin.partition("://")[2].lower() not in map(
                str.lower, hosts
            ):
                message = f"the origin {origin[:64]!r} is not one of the server's cors_origins"
                remedy = _remedy(origin[:64], "cors_origins", "--cors-origin")
                raise ApiError(403, f"{message}; {remedy}", code="origin_not_allowed")

    def _is_allowed(self, host: str) -> bool:
        name = _normalised(_without_port(host))
        if name in self._names or name.endswith(".localhost"):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def names_this_machine(host: str) -> bool:
    """Whether this value of `Host` is localhost or a loopback address."""
    name = _normalised(_without_port(host))
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _remedy(name: str, setting: str, option: str) -> str:
    return (
        f"if it is yours, add it to {setting} of ServerSettings, or start penstock serve with "
        f"{option} {shlex.quote(name)}"
    )


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _normalised(name: str) -> str:
    return name.lower().removesuffix(".")
