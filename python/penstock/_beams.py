"""Beam search: of all answers to a prompt, the likeliest as a whole, as far as a narrow search finds them.

Each step asks for the likeliest next tokens of every running beam, and of all the continuations keeps the
best. The algorithm asks nobody itself: `search` yields the beams that are to be continued and is sent what
may follow them. So it is the same for tasks and for threads, and a test can be the model.

It is the search of Hugging Face's `generate` with `early_stopping=False`, score for score:

- A beam's score is the sum of its tokens' log probabilities divided by `length ** length_penalty`. The length
  is that of what was generated; the token that ends a beam counts, in the sum and in the length.
- Continuations are ranked by their sums. Those among the best `num_beams` that end are closed; whatever ends
  further down is dropped; the best `num_beams` of the others run on.
- `num_beams` closed beams are kept, the best ones by score. The search is over when there are so many and
  the best running beam, scored at the length it has, is no better than the worst of them, or at `max_tokens`,
  where every beam is closed.

Sums are in double precision. Of equals the one found first is better, so nothing is left to chance.
"""

from __future__ import annotations

import math
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

#: Ids and log probabilities of the likeliest next tokens, the likeliest first.
Top: TypeAlias = "tuple[tuple[int, float], ...]"
#: How an answer ended: the finish reason, and the string, token or sequence that it stopped at.
Ending: TypeAlias = "tuple[str, str | int | tuple[int, ...] | None]"

_LENGTH: Ending = ("length", None)


class Beam(NamedTuple):
    """A beginning of an answer: its tokens, the log probability of each, what else could have stood there."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    tops: tuple[Top, ...] = ()
    total: float = 0.0

    def score(self, length_penalty: float) -> float:
        """How good it is beside beams of other lengths; 0 of nothing."""
        return self.total / math.pow(max(len(self.token_ids), 1), length_penalty)


class BrokenOff(NamedTuple):
    """That nothing more can be asked, as a finish reason."""

    finish_reason: str


class ClosedBeam(NamedTuple):
    """A whole answer."""

    beam: Beam
    score: float
    ending: Ending


def search(
    *,
    num_beams: int,
    length_penalty: float,
    max_tokens: int,
    ending_of: Callable[[tuple[int, ...]], Ending | None],
) -> Generator[list[Beam], Sequence[Top] | BrokenOff, list[ClosedBeam]]:
    """Returns the answers, best first: `num_beams` of them, or all there are if those are fewer.

    Is sent, for each beam it yields, what may follow: `2 * num_beams` tokens, so that enough of them go on
    where others end. `ending_of` says whether token ids end an answer with their last, and has been
    asked of every beginning of them. Is sent `BrokenOff` instead where nothing more can be asked: then the
    running beams are answers, too.
    """
    running, closed = [Beam()], list[ClosedBeam]()
    for length in range(1, max_tokens + 1):
        tops = yield running
        if isinstance(tops, BrokenOff):
            broken = (tops.finish_reason, None)
            closed += [ClosedBeam(beam, beam.score(length_penalty), broken) for beam in running]
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
