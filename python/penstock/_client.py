"""The client that a task works for, such as an API key of a server."""

from contextvars import ContextVar

__all__ = ["client"]

#: Identifies the client by a number below 2^64. Clients take turns where their requests wait for one another.
client: ContextVar[int | None] = ContextVar("penstock.client", default=None)
