"""Beam search: an approximate search for the outputs with the highest probability.

Each step takes the most likely next tokens of every running beam and keeps the best continuations. The
algorithm does no I/O: `search` is a generator that yields the running beams and is sent their next tokens. So
tasks and threads share it, and a test can replace the model.

It is the search of Hugging Face's `generate` with `early_stopping=False`, with the same scores:

- The score of a beam is the sum of its tokens' log probabilities divided by `length ** length_penalty`. The
  length is the number of generated tokens. The token that ends a beam counts in the sum and in the length.
- Continuations are ranked by their sums. Ended continuations among the best `num_beams` become closed beams,
  other ended continuations are dropped, and the best `num_beams` of the rest become the running beams.
- The best `num_beams` closed beams by score are kept. The search ends when there are `num_beams` of them and
  the current score of the best running beam is not above the worst of theirs. At `max_tokens` all beams are
  closed.

Sums are in double precision. Among equal values the first one found wins, so the result is deterministic.
"""

from __future__ import annotations

import math
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

#: Ids and log probabilities of the most likely next tokens, in descending order.
Top: TypeAlias = "tuple[tuple[int, float], ...]"
#: The finish reason of an output, and the stop string, token or sequence that ended it.
Ending: TypeAlias = "tuple[str, str | int | tuple[int, ...] | None]"

_LENGTH: Ending = ("length", None)


class Beam(NamedTuple):
    """An unfinished output: its tokens, their log probabilities, and the alternatives at each position."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    tops: tuple[Top, ...] = ()
    total: float = 0.0

    def score(self, length_penalty: float) -> float:
        """The score, comparable between beams of different lengths; 0 for an empty beam."""
        return self.total / math.pow(max(len(self.token_ids), 1), length_penalty)


class Interrupted(NamedTuple):
    """Sent to `search` when a step was cancelled or interrupted; the search then ends."""

    finish_reason: str


class ClosedBeam(NamedTuple):
    """A finished output."""

    beam: Beam
    score: float
    ending: Ending


def search(
    *,
    num_beams: int,
    length_penalty: float,
    max_tokens: int,
    ending_of: Callable[[tuple[int, ...]], Ending | None],
) -> Generator[list[Beam], Sequence[Top] | Interrupted, list[ClosedBeam]]:
    """Returns up to `num_beams` finished outputs, best first.

    For each beam that it yields, it is sent the `2 * num_beams` most likely next tokens: enough to continue
    `num_beams` beams if the others end. `ending_of` returns the ending of an output, or `None` if its last
    token does not end it; it is called for every prefix first. If `Interrupted` is sent instead, the running
    beams are returned as well.
    """
    running, closed = [Beam()], list[ClosedBeam]()
    for length in range(1, max_tokens + 1):
        tops = yield running
        if isinstance(tops, Interrupted):
            interruption = (tops.finish_reason, None)
            closed += [ClosedBeam(beam, beam.score(length_penalty), interruption) for beam in running]
            closed.sort(key=lambda answer: answer.score, reverse=True)
            return closed
        continuations = [
            (beam.total + logprob, beam, token, logprob, top)
            for beam, top in zip(running, tops, strict=True)
            for token, logprob in top
            if logprob > -math.inf
        ]
        continuations.sort(key=itemgetter(0), reverse=True)
        running = []
        for rank, (total, parent, token, logprob, top) in enumerate(continuations):
            beam = Beam((*parent.token_ids, token), (*parent.logprobs, logprob), (*parent.tops, top), total)
            ending = ending_of(beam.token_ids)
            if ending is None and length == max_tokens:
                ending = _LENGTH
            if ending is None:
                running.append(beam)
            elif rank < num_beams:
                closed.append(ClosedBeam(beam, beam.score(length_penalty), ending))
            if len(running) == num_beams:
                break
        closed.sort(key=lambda answer: answer.score, reverse=True)
        del closed[num_beams:]
        is_full = len(closed) == num_beams
        if not running or (is_full and running[0].score(length_penalty) <= closed[-1].score):
            break
    return closed
