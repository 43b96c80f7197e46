"""Responses of the engine's HTTP client, with a limit of the interim ones before them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import aiohttp

if TYPE_CHECKING:
    from aiohttp.connector import Connection

__all__ = ["Response"]

_MAX_INTERIM = 8


class Response(aiohttp.ClientResponse):
    """A response that begins after a few interim ones, or not at all.

    The base class reads any number of them, which keeps the event loop from other work.
    """

    async def start(self, connection: Connection) -> aiohttp.ClientResponse:
        """Called by the session; an error here closes the connection."""
        protocol: Any = connection.protocol
        read, num_left = protocol.read, _MAX_INTERIM + 1

        async def read_next() -> Any:
            nonlocal num_left
            if not num_left:
                raise aiohttp.ClientPayloadError("too many interim responses")
            num_left -= 1
            return await read()

        protocol.read = read_next
        try:
            return await super().start(connection)
        finally:
            del protocol.read
