"""The turns of clients that wait, and the slots that they wait for."""

from __future__ import annotations

import random
from collections import deque

import anyio
import pytest

from penstock._client import TurnLimiter, TurnQueue, client

CLIENTS = (None, 1, 2, 3, 4)


@pytest.mark.parametrize("seed", range(20))
def test_each_client_has_a_turn_between_two_of_another(seed: int) -> None:
    """A client that waits when another is served, or comes right after it, is served before its next turn."""
    generator = random.Random(seed)
    queue, items = TurnQueue[int](), {number: deque[int]() for number in CLIENTS}
    #: The number of the last turn of a client, and the number of turns when it began to wait.
    served, since, num_turns = dict.fromkeys(CLIENTS, -1), dict.fromkeys(CLIENTS, 0), 0
    for item in range(2000):
        number, kind = generator.choice(CLIENTS), generator.randrange(9)
        if kind < 5:
            if not items[number]:
                since[number] = num_turns
            queue.push(number, item)
            items[number].append(item)
        elif kind < 6 and items[number]:
            removed = generator.choice(items[number])
            queue.remove(number, removed)
            items[number].remove(removed)
        elif kind >= 6 and any(items.values()):
            found = queue.pop()
            number = next(owner for owner, own in items.items() if own and own[0] == found)
            for other in CLIENTS:
                if other != number and items[other]:
                    assert since[other] > served[number] or served[other] > served[number]
            items[number].popleft()
            num_turns += 1
            served[number] = num_turns
        assert len(queue) == sum(map(len, items.values()))


def test_new_client_comes_before_the_one_served_last() -> None:
    queue, order = TurnQueue[str](), list[str]()
    for item in ("a1", "a2", "a3"):
        queue.push(1, item)
    for item in ("b1", "b2"):
        order.append(queue.pop())
        queue.push(2, item)
        order.append(queue.pop())
    queue.push(None, "c1")
    queue.push(2, "b3")
    order += [queue.pop() for _ in range(3)]
    assert order == ["a1", "b1", "a2", "b2", "a3", "c1", "b3"]
    with pytest.raises(IndexError):
        queue.pop()


@pytest.mark.anyio
@pytest.mark.loops
async def test_client_that_has_a_slot_waits_for_the_others() -> None:
    """The first task of a client takes the free slot, which counts as its turn."""
    limiter, order, may_end = TurnLimiter(1), list[str](), anyio.Event()

    async def work(number: int, name: str) -> None:
        client.set(number)
        async with limiter:
            order.append(name)
            await may_end.wait()

    async with anyio.create_task_group() as group:
        for number, name in ((1, "a1"), (1, "a2"), (1, "a3"), (2, "b1")):
            group.start_soon(work, number, name)
            await anyio.wait_all_tasks_blocked()
        assert (limiter.num_free, limiter.num_waiting) == (0, 3)
        may_end.set()
    assert order == ["a1", "b1", "a2", "a3"]
    assert limiter.num_free == 1


@pytest.mark.anyio
@pytest.mark.loops
@pytest.mark.parametrize("has_slot", [False, True])
async def test_cancelled_task_leaves_its_slot_to_another(*, has_slot: bool) -> None:
    """Cancelled while it waits, or just before it gets the slot."""
    limiter, scope, order = TurnLimiter(1), anyio.CancelScope(), list[str]()

    async def work(name: str) -> None:
        async with limiter:
            order.append(name)

    async def work_cancelled() -> None:
        with scope:
            await work("cancelled")

    async with anyio.create_task_group() as group, limiter:
        group.start_soon(work_cancelled)
        await anyio.wait_all_tasks_blocked()
        group.start_soon(work, "other")
        await anyio.wait_all_tasks_blocked()
        scope.cancel()
        if not has_slot:
            await anyio.wait_all_tasks_blocked()
            assert limiter.num_waiting == 1
    assert order == ["other"]
    assert (limiter.num_free, limiter.num_waiting) == (1, 0)
