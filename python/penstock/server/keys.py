"""API keys, kept as hashes."""

from __future__ import annotations

import hashlib
import hmac
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["Keys", "client_number", "digest_of"]


class Keys:
    """API keys. Only their hashes are kept; all are compared, each in constant time."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple(digest_of(key.encode()) for key in keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._digests)

    def __contains__(self, digest: bytes) -> bool:
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(known, digest)
        return found


def digest_of(key: bytes) -> bytes:
    """The hash of a key."""
    return hashlib.sha256(key).digest()


def client_number(digest: bytes) -> int:
    """The number of the client with this hash, by which the engine divides its work."""
    return int.from_bytes(digest[:8])
