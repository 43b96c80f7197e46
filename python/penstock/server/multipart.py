"""The parts of a body of the type `multipart/form-data`, read as it arrives."""

from __future__ import annotations

from email.message import Message
from email.parser import HeaderParser
from typing import TYPE_CHECKING, NamedTuple

from penstock.server.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["Multipart", "Part"]

_MAX_BOUNDARY = 70  # of RFC 2046
#: Bytes of headers: the time that the parser takes grows with their square.
_MAX_CONTENT_TYPE = 256
_MAX_HEADERS = 1 << 10
_MAX_PARTS = 16
_HEADERS_END = b"\r\n\r\n"


class Part(NamedTuple):
    """The names of a part; one without a file has no file name."""

    name: str
    filename: str | None


def _parameter(headers: Message, name: str, header: str) -> str | None:
    """A parameter of a header, also in the form of RFC 2231, `name*=charset''value`.

    Other charsets than UTF-8 are ignored: Python keeps each name that it looks up, also of unknown ones.
    Raises for a value in that form that has characters outside of Latin-1, which it must encode.
    """
    value = headers.get_param(name, header=header)
    if isinstance(value, tuple):
        charset, _, text = value
        try:
            encoded = text.encode("latin-1")
        except UnicodeEncodeError:
            message = f"a header of the form has a value of {name}* with characters that are not encoded"
            raise ApiError(400, message) from None
        return encoded.decode(errors="replace") if (charset or "").lower() == "utf-8" else text
    return value


class Multipart:
    """The parts of a body. At most one piece of the body is in memory, and the end of the one before."""

    def __init__(self, content_type: str, next_piece: Callable[[], Awaitable[bytes | None]]) -> None:
        """`next_piece` returns the next piece of the body, or nothing after the last one."""
        if len(content_type) > (limit := _MAX_CONTENT_TYPE):
            raise ApiError(415, f"the content type is too long: the limit is {limit} bytes")
        header = Message()
        header["content-type"] = content_type
        boundary = (_parameter(header, "boundary", "content-type") or "").rstrip()
        if header.get_content_type() != "multipart/form-data" or not 1 <= len(boundary) <= _MAX_BOUNDARY:
            raise ApiError(415, "the content type must be multipart/form-data, with a boundary")
        self._delimiter = b"\r\n--" + boundary.encode(errors="replace")
        self._next_piece = next_piece
        self._buffer = bytearray(b"\r\n")  # a body can begin with a delimiter, without the line break
        self._is_in_part = True  # before the first delimiter, as in a part, to skip what is there
        self._num_parts = 0

    async def next_part(self) -> Part | None:
        """The next part, or nothing after the last one. The rest of the part before is skipped."""
        while await self.read():
            pass
        while len(self._buffer) < len(b"--"):
            await self._fill()
        if self._buffer.startswith(b"--"):
            while await self._next_piece() is not None:
                pass
            return None
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            raise ApiError(400, f"the body has too many parts: the limit is {_MAX_PARTS}")
        end = await self._find_end_of_headers()
        headers = HeaderParser().parsestr(self._buffer[:end].decode(errors="replace").lstrip())
        del self._buffer[: end + len(_HEADERS_END)]
        self._is_in_part = True
        name = _parameter(headers, "name", "content-disposition")
        if name is None:
            raise ApiError(400, "a part of the body has no name")
        return Part(name, _parameter(headers, "filename", "content-disposition"))

    async def _find_end_of_headers(self) -> int:
        most = _MAX_HEADERS + len(_HEADERS_END)
        while (end := self._buffer.find(_HEADERS_END, 0, most)) < 0:
            if len(self._buffer) >= most:
                raise ApiError(400, f"the headers of a part are too large: the limit is {_MAX_HEADERS} bytes")
            await self._fill()
        return end

    async def read(self) -> bytes:
        """The next bytes of the current part; empty at its end."""
        while self._is_in_part:
            end = self._buffer.find(self._delimiter)
            self._is_in_part = end < 0
            # A delimiter can begin in the last bytes.
            size = max(len(self._buffer) - len(self._delimiter) + 1, 0) if self._is_in_part else end
            found = bytes(self._buffer[:size])
            del self._buffer[: size if self._is_in_part else size + len(self._delimiter)]
            if found:
                return found
            if self._is_in_part:
                await self._fill()
        return b""

    async def _fill(self) -> None:
        piece = await self._next_piece()
        if piece is None:
            raise ApiError(400, "the body ends within a part")
        self._buffer += piece
