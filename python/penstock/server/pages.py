"""The lists of OpenAI's API, which clients read in pages."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.server.errors import invalid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.server.http import Exchange

__all__ = ["Page", "read_page"]


class Page(NamedTuple):
    """The part of a list that a request asks for: at most `limit` items, after the one with this id."""

    limit: int
    order: str
    after: str | None

    def of(self, ids: Sequence[str], values: Sequence[Any]) -> dict[str, Any]:
        """The page of the list with these ids and values, the oldest first."""
        step = 1 if self.order == "asc" else -1
        ids, values = ids[::step], values[::step]
        first = 0
        if self.after is not None:
            if self.after not in ids:
                raise invalid("after", self.after, "the id of an item of the list")
            first = ids.index(self.after) + 1
        end = first + self.limit
        listed = ids[first:end]
        return {
            "object": "list",
            "data": values[first:end],
            "first_id": listed[0] if listed else None,
            "last_id": listed[-1] if listed else None,
            "has_more": end < len(ids),
        }


def read_page(exchange: Exchange, *, default: int = 20, most: int = 100) -> Page:
    """The page that the query asks for; by default, the newest items."""
    query = exchange.query()
    limit, order = query.get("limit", str(default)), query.get("order", "desc")
    number = int(limit) if re.fullmatch("[0-9]{1,5}", limit) else 0
    if not 1 <= number <= most:
        raise invalid("limit", limit, f"a number from 1 to {most}")
    if order not in ("asc", "desc"):
        raise invalid("order", order, "asc or desc")
    return Page(number, order, query.get("after"))
