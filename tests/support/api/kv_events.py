"""Readers of KV events: a copy of the cache, and decoders of messages as strict as those of routers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

import penstock

if TYPE_CHECKING:
    from collections.abc import Iterable

#: (hash of the parent, tokens, adapter, salt) by (hash, tier).
Blocks = dict[tuple[int, str], tuple[int | None, tuple[int, ...], str | None, str | None]]


def update(blocks: Blocks, events: Iterable[object]) -> None:
    """Apply events of `Engine.kv_events`. A parent must be known, and a block not stored or removed twice."""
    for event in events:
        match event:
            case penstock.AllBlocksCleared():
                blocks.clear()
            case penstock.BlockRemoved(block_hashes=hashes, tier=tier):
                for block in hashes:
                    del blocks[block, tier]
            case penstock.BlockStored():
                size, parent = event.block_size, event.parent_block_hash
                assert len(event.token_ids) == size * len(event.block_hashes)
                for index, block in enumerate(event.block_hashes):
                    assert parent is None or any(known == parent for known, _ in blocks)
                    assert (block, event.tier) not in blocks
                    tokens = tuple(event.token_ids[index * size : (index + 1) * size])
                    blocks[block, event.tier] = (parent, tokens, event.adapter, event.cache_salt)
                    parent = block
            case _:
                raise AssertionError(event)


@dataclass
class LlmD:
    """The blocks that llm-d indexes: an array of three, events as arrays that begin with a known name.

    Fields may be missing at the end. A hash is an integer of 64 bits, or 8 bytes or more.
    """

    blocks: set[tuple[int, str]] = field(default_factory=set)
    num_unknown_parents: int = 0

    def take(self, payload: bytes) -> None:
        """Read a message."""
        batch = msgspec.msgpack.decode(payload)
        assert isinstance(batch, list)
        timestamp, events, *rank = batch
        assert isinstance(timestamp, float)
        assert not rank or rank[0] is None or isinstance(rank[0], int)
        for name, *fields in events:
            match name:
                case "BlockStored":
                    hashes, parent, tokens, size, *others = fields
                    lora_id, medium = [*others, None, None][:2]
                    assert isinstance(lora_id, int | None)
                    assert len(tokens) == size * len(hashes)
                    assert all(0 <= token < 1 << 32 for token in tokens)
                    known = {block for block, _ in self.blocks}
                    self.num_unknown_parents += parent is not None and self._hash(parent) not in known
                    self.blocks |= {(self._hash(block), (medium or "gpu").lower()) for block in hashes}
                case "BlockRemoved":
                    hashes, *others = fields
                    medium = others[0] if others else None
                    self.blocks -= {(self._hash(block), (medium or "gpu").lower()) for block in hashes}
                case "AllBlocksCleared":
                    assert fields == []
                    self.blocks.clear()
                case _:
                    raise AssertionError(name)

    def _hash(self, value: object) -> int:
        if isinstance(value, bytes):
            return int.from_bytes(value[-8:], "big")
        assert isinstance(value, int)
        assert -(1 << 63) <= value < 1 << 64
        return value % (1 << 64)


def aibrix_events(payload: bytes) -> list[dict[str, Any]]:
    """The events of a message as AIBrix reads them: the rank is missing or an integer, never nil."""
    batch = msgspec.msgpack.decode(payload)
    assert isinstance(batch, list)
    assert len(batch) in (2, 3)
    assert isinstance(batch[0], float)
    assert len(batch) == 2 or type(batch[2]) is int
    names = {
        "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
        "BlockRemoved": ("block_hashes", "medium"),
        "AllBlocksCleared": (),
    }
    events = []
    for name, *fields in batch[1]:
        event = dict(zip(names[name], fields, strict=False))
        for value in (*event.get("block_hashes", ()), event.get("parent_block_hash")):
            assert value is None or type(value) is int or (type(value) is bytes and len(value) >= 8)
        events.append({"type": name, **event})
    return events


def salt_of_dynamo(extra_keys: list[list[str] | None] | None, lora_name: str | None) -> str | None:
    """The salt that Dynamo finds in the extra keys of the first block."""
    keys = (extra_keys or [None])[0] or []
    if lora_name in keys:
        keys = [key for index, key in enumerate(keys) if index != keys.index(lora_name)]
    salts = [key.removeprefix("dynamo-cache-salt:") for key in keys if key.startswith("dynamo-cache-salt:")]
    return salts[0] if salts else None
