"""Responses that clients can read again and continue, in memory."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.server.settings import ServerSettings

__all__ = ["Items", "ResponseStore", "Stored"]


@dataclass(frozen=True)
class Items:
    """Items of the input as JSON texts, which take less memory than objects, and their ids."""

    ids: tuple[str, ...] = ()
    texts: tuple[bytes, ...] = ()
    #: Number of bytes of both.
    size: int = 0

    @classmethod
    def of(cls, ids: Sequence[str], texts: Sequence[bytes]) -> Items:
        """The items with these ids and texts."""
        return cls(tuple(ids), tuple(texts), sum(map(len, ids)) + sum(map(len, texts)))

    def __add__(self, others: Items) -> Items:
        """These items, and the others after them."""
        return Items(self.ids + others.ids, self.texts + others.texts, self.size + others.size)


class Stored:
    """A response, as a JSON text, and the items of its input."""

    def __init__(self, body: bytes, items: Items) -> None:
        self.body = body
        #: Those of the former responses, which share them, and then its own.
        self.items = items
        #: Number of bytes that it keeps in memory.
        self.size = len(body) + items.size


class ResponseStore:
    """The responses of each API key. Those that were used least recently make room for others.

    The bounds are those of one key, so clients with another key neither see nor displace its responses.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._max_number = settings.max_stored_responses
        self._max_bytes = settings.max_stored_bytes
        self._by_key: dict[bytes, OrderedDict[str, Stored]] = {}
        self._num_bytes: dict[bytes, int] = {}

    def add(self, key: bytes, response_id: str, stored: Stored) -> None:
        """Keep a response, unless it is larger than all may be together."""
        if stored.size > self._max_bytes:
            return
        responses = self._by_key.setdefault(key, OrderedDict())
        responses[response_id] = stored
        self._num_bytes[key] = self._num_bytes.get(key, 0) + stored.size
        while len(responses) > self._max_number or self._num_bytes[key] > self._max_bytes:
            self.remove(key, next(iter(responses)))

    def get(self, key: bytes, response_id: str) -> Stored | None:
        """The response of this id, if there is one."""
        responses = self._by_key.get(key)
        if responses is None or response_id not in responses:
            return None
        responses.move_to_end(response_id)
        return responses[response_id]

    def remove(self, key: bytes, response_id: str) -> None:
        """Remove a response, which exists."""
        self._num_bytes[key] -= self._by_key[key].pop(response_id).size
        if not self._by_key[key]:
            del self._by_key[key], self._num_bytes[key]
