"""KV events: the changes of the prefix cache, for code that routes requests by their prefixes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import anyio
import anyio.lowlevel

from penstock._core import Port

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, Self

    from penstock import _core

__all__ = ["AllBlocksCleared", "BlockRemoved", "BlockStored", "KvEventStream"]


@dataclass(frozen=True, kw_only=True)
class BlockStored:
    """Blocks of tokens can be reused by requests that begin with the same tokens.

    A hash depends on the tokens of the block and on all before them, on the name of the adapter, and on the
    salt. It is the same in every engine with the same `hash_key` and block size.
    """

    block_hashes: Sequence[int]
    parent_block_hash: int | None
    token_ids: Sequence[int]
    block_size: int
    tier: Literal["device", "host"]
    adapter: str | None
    adapter_id: int | None
    cache_salt: str | None

    __slots__ = {  # noqa: RUF023 - in the order of the fields
        "block_hashes": "The hashes of blocks that follow each other, of 64 bits.",
        "parent_block_hash": "The hash of the block before the first; `None` if that begins a sequence.",
        "token_ids": "The tokens of all blocks, `block_size` for each.",
        "block_size": "The number of tokens of a block.",
        "tier": "The memory that holds the blocks.",
        "adapter": "The name of the adapter of requests that find the blocks.",
        "adapter_id": "A number that no other adapter of the process has.",
        "cache_salt": "The salt of requests that find the blocks.",
    }


@dataclass(frozen=True, kw_only=True)
class BlockRemoved:
    """Blocks have left the memory of a tier. A block that moves is stored in the other one first."""

    block_hashes: Sequence[int]
    tier: Literal["device", "host"]

    __slots__ = {
        "block_hashes": "The hashes of the blocks, in no order.",
        "tier": "The memory that held the blocks.",
    }


@dataclass(frozen=True)
class AllBlocksCleared:
    """No block can be reused any more. Also the first event of a stream."""

    __slots__ = ()


KvEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class KvEventStream:
    """The events of `Engine.kv_events`: an async iterator, for one task at a time."""

    def __init__(self, native: _core.Engine) -> None:
        self._port = Port()
        self._events = native.kv_events(self._port)
        self._unread: deque[KvEvent] = deque()
        self._has_ended = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> KvEvent:
        while not self._unread:
            if self._has_ended:
                raise StopAsyncIteration
            self._port.drain()
            events = self._events.read()
            if events is None:
                self._has_ended = True
                self._unread.append(AllBlocksCleared())
            elif events:
                self._unread.extend(self._event(*fields) for fields in events)
                await anyio.lowlevel.checkpoint()
            else:
                await anyio.wait_readable(self._port.fileno())
        return self._unread.popleft()

    def _event(self, *fields: Any) -> KvEvent:
        match fields:
            case ():
                return AllBlocksCleared()
            case (hashes, tier):
                return BlockRemoved(block_hashes=hashes, tier=tier)
        hashes, parent, tokens, tier, adapter, adapter_id, salt = fields
        return BlockStored(
            block_hashes=hashes,
            parent_block_hash=parent,
            token_ids=tokens,
            block_size=self._events.block_size,
            tier=tier,
            adapter=adapter,
            adapter_id=adapter_id,
            cache_salt=salt,
        )
