"""The HTTP parser of httptools without upgrades."""

from __future__ import annotations

from typing import Any

import httptools

__all__ = ["Parser"]


class Parser(httptools.HttpRequestParser):
    """A parser that ignores the header `Upgrade`.

    httptools ends a request that offers an upgrade at its head, and would parse the body as the next request.
    Here such a head is parsed again without the header, so the body belongs to the request.
    """

    def __init__(self, receiver: Any) -> None:
        """Call this protocol of uvicorn."""
        self._receiver = receiver
        self._begin()

    def _begin(self) -> None:
        super().__init__(self._receiver)
        # uvicorn responds to pipelined requests until the one that closes the connection.
        self.set_dangerous_leniencies(lenient_data_after_close=True)

    def feed_data(self, data: Any) -> None:
        """Parse the next bytes of the connection."""
        while True:
            try:
                super().feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                if self.get_method() == b"CONNECT":
                    raise httptools.HttpParserError("the server is no proxy") from None
                data = self._head() + data[upgrade.args[0] :]
                self._begin()
            else:
                return

    def _head(self) -> bytes:
        """The newest head, without the header `Upgrade`."""
        lines = [b"%s %s HTTP/%s" % (self.get_method(), self._receiver.url, self.get_http_version().encode())]
        lines += [b"%s: %s" % header for header in self._receiver.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])
