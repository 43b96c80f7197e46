"""The prompts of a request of which only a number or a vector is returned: one result after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from penstock.server.errors import ApiError, invalid

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import penstock
    from penstock.server.calls import Generation
    from penstock.server.state import State

__all__ = ["PromptBatch"]


class PromptBatch:
    """The prompts of one HTTP request. A result is dropped as soon as it was used.

    `field` is the field of the request that has the prompts.
    """

    def __init__(self, state: State, generation: Generation, field: str) -> None:
        self._state = state
        self._generation = generation
        self._field = field
        self.num_tokens = 0

    async def run(self, use: Callable[[int, penstock.Result], Awaitable[None]], *, concurrency: int) -> None:
        """Compute all results. `use` is called with the index of a prompt and its result, in any order."""
        with anyio.CancelScope() as scope:
            self._generation.add(scope)
            await self._state.adapters.restore(self._generation)
            await self._compute(use, concurrency)
        if scope.cancelled_caught:
            raise ApiError(503, "the request was aborted", code="aborted")

    async def _compute(
        self, use: Callable[[int, penstock.Result], Awaitable[None]], concurrency: int
    ) -> None:
        call = self._generation.call
        items = self.engine.generate_many(call.prompts, call.params, concurrency=concurrency, ordered=False)
        async with items:
            async for item in items:
                if item.result is None:
                    raise self._generation.error_of(item.error or AssertionError(), self.place(item.index))
                self._generation.end(item.result)
                self._count(item.result.usage.prompt_tokens)
                await use(item.index, item.result)

    @property
    def engine(self) -> penstock.Engine:
        """The engine that computes them."""
        return self._generation.model.engine

    def place(self, index: int) -> str:
        """The place of a prompt in the request."""
        return self._field if len(self._generation.call.prompts) == 1 else f"{self._field}[{index}]"

    def _count(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        limit = self._state.settings.max_embedding_tokens
        if self.num_tokens > limit:
            raise invalid(self._field, f"{self.num_tokens} tokens or more", f"at most {limit} tokens in all")

    def usage(self) -> dict[str, int]:
        """The token counts of the response."""
        return {"prompt_tokens": self.num_tokens, "total_tokens": self.num_tokens}
