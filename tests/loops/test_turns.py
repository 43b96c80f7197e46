"""The turns of clients that wait."""

from __future__ import annotations

import random
from collections import deque

import pytest

from penstock._client import TurnQueue

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


def test_newcomer_comes_before_the_client_served_last() -> None:
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
