"""Selection of the best outputs of a request: `best_of`, and beam search with `num_beams`.

Both run ordinary requests. The best outputs are known only when all requests have finished, so both work with
`generate` only. This module does not wait; the asynchronous and the blocking API do.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from penstock import _beams, _core
from penstock._beams import Interrupted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock._beams import Beam, ClosedBeam, Ending
    from penstock._core import Choice, Result, SamplingParams, StopSearch

__all__ = ["BeamSearch", "best_of", "with_candidates"]

# ---- best_of


def with_candidates(params: SamplingParams) -> SamplingParams:
    """The parameters of the request that generates the candidates of `best_of`."""
    if params.best_of is None:
        return params
    return params.replace(n=params.best_of, best_of=None, logprobs=True)


def best_of(result: Result, params: SamplingParams) -> Result:
    """The `n` choices with the highest mean log probability, which becomes their score, best first.

    The usage counts the tokens of all candidates.
    """
    if params.best_of is None:
        return result
    scored = [(_mean_logprob(choice), choice) for choice in result.choices]
    scored.sort(key=lambda candidate: candidate[0], reverse=True)
    choices = []
    for index, (score, choice) in enumerate(scored[: params.n]):
        changes = {} if params.logprobs else {"logprobs": None, "cumulative_logprob": None}
        choices.append(_with(choice, index=index, score=score, **changes))
    selected: Result = _with(result, choices=choices)
    return selected


def _mean_logprob(choice: Choice) -> float:
    logprobs = choice.logprobs
    return sum(logprobs) / len(logprobs) if logprobs else float("-inf")


# ---- num_beams


class BeamSearch:
    """A running beam search: `requests` starts the requests of a step, `advance` takes their results.

    A step generates one token of every running beam. The beams' common prefixes are in the prefix cache, so a
    step computes little more than the new tokens.
    """

    def __init__(self, native: _core.Engine, beams: _core.Beams) -> None:
        self._beams = beams
        self._params = beams.params
        self._stop_checker = _StopChecker(native, beams)
        self._started = time.monotonic()
        self._first: Result | None = None
        self._finished: list[ClosedBeam] = []
        self._search = _beams.search(
            num_beams=self._params.num_beams,
            length_penalty=self._params.length_penalty,
            max_tokens=self._params.max_tokens or 1,
            ending_of=self._stop_checker,
        )
        self._running = next(self._search)

    @property
    def is_running(self) -> bool:
        """Whether another step follows."""
        return bool(self._running)

    def requests(self, port: _core.Port) -> Iterator[_core.Request]:
        """The requests of the next step. The iterator starts each request when it yields it."""
        for beam in self._running:
            yield self._beams.start(beam.token_ids, port)

    def advance(self, results: Sequence[Result]) -> None:
        """Takes the results of the step's requests, in their order."""
        if self._first is None:
            self._first = results[0]
        reasons = [result.finish_reason for result in results]
        broken = [reason for reason in reasons if reason in ("cancelled", "interrupted")]
        try:
            if broken:
                self._running = self._search.send(Interrupted(broken[0]))
            else:
                self._running = self._search.send([_most_likely(result) for result in results])
        except StopIteration as done:
            self._running, self._finished = [], done.value
        self._stop_checker.keep(self._running)

    def result(self) -> Result:
        """The best outputs, best first; fewer than `n` if the search found fewer."""
        first = self._first
        if first is None:
            message = "a beam search without a step has no result; this is a bug in penstock"
            raise AssertionError(message)
        answers = self._finished[: self._params.n]
        return _core.Result(
            choices=[self._choice(index, answer) for index, answer in enumerate(answers)],
            prompt_token_ids=first.prompt_token_ids,
            prompt_logprobs=None,
            prompt_top_logprobs=None,
            usage=_with(first.usage, completion_tokens=sum(len(answer.beam.token_ids) for answer in answers)),
            timings=_with(first.timings, total=time.monotonic() - self._started),
        )

    def _choice(self, index: int, answer: ClosedBeam) -> Choice:
        beam, params = answer.beam, self._params
        text = self._stop_checker.text(beam.token_ids, answer.ending)
        tops = tuple(top[: params.top_logprobs] for top in beam.tops)
        finish_reason, stop_reason = answer.ending
        return _core.Choice(
            index=index,
            text=text,
            token_ids=beam.token_ids,
            logprobs=beam.logprobs if params.logprobs else None,
            top_logprobs=tops if params.top_logprobs is not None else None,
            cumulative_logprob=beam.total if params.logprobs else None,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            seed=0,  # nothing is sampled
            score=answer.score,
            content=text,
            reasoning="",
            tool_calls=(),
            logits=None,
            hidden_states=None,
        )


class _StopChecker:
    """The stop conditions of a beam and its text, the same as those of a request with these parameters."""

    def __init__(self, native: _core.Engine, beams: _core.Beams) -> None:
        self._native = native
        self._params = params = beams.params
        self._ids = {*params.stop_token_ids, *(() if params.ignore_eos else native.eos_token_ids)}
        # The progress of each running beam, and of its continuations, in the stop strings.
        self._searches: dict[tuple[int, ...], StopSearch] = {}
        if params.stop:
            self._searches[()] = beams.stop_search()

    def __call__(self, token_ids: tuple[int, ...]) -> Ending | None:
        params, last = self._params, token_ids[-1]
        # A stop token counts after `min_tokens` other tokens, a sequence if it ends at `min_tokens` or later.
        is_stop_token = last in self._ids and len(token_ids) > params.min_tokens
        if params.stop and (params.include_stop_str_in_output or not is_stop_token):
            search, stop = self._searches[token_ids[:-1]].push(last)
            if stop is not None:
                return "stop", stop
            self._searches[token_ids] = search
        if is_stop_token:
            return "stop", last
        if len(token_ids) >= params.min_tokens:
            for sequence in params.stop_token_sequences:
                if token_ids[-len(sequence) :] == sequence:
                    return "stop", sequence
        return None

    def keep(self, running: Sequence[Beam]) -> None:
        """Removes the state of beams that no longer run."""
        if self._searches:
            self._searches = {beam.token_ids: self._searches[beam.token_ids] for beam in running}

    def text(self, token_ids: Sequence[int], ending: Ending) -> str:
        """The text of an output, without its stop string, token or sequence unless those are included."""
        _finish_reason, stop_reason = ending
        keeps_stop = self._params.include_stop_str_in_output
        if isinstance(stop_reason, str):
            text = self._decode(token_ids)
            _stop, start, end = self._find_stop(text) or ("", len(text), len(text))
            return text[: end if keeps_stop else start]
        if stop_reason is None or keeps_stop:
            return self._decode(token_ids)
        length = len(stop_reason) if isinstance(stop_reason, tuple) else 1
        return self._decode(token_ids[:-length])

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._native.decode(
            token_ids,
            skip_special_tokens=self._params.skip_special_tokens,
            spaces_between_special_tokens=self._params.spaces_between_special_tokens,
        )

    def _find_stop(self, text: str) -> tuple[str, int, int] | None:
        """The stop string that ends first in the text, the longest of several, with its start and end."""

        def matches() -> Iterator[tuple[int, int, str]]:
            for stop in self._params.stop:
                start = text.find(stop)
                if start >= 0:
                    yield start + len(stop), start, stop

        end, start, stop = min(matches(), default=(0, 0, ""))
        return (stop, start, end) if stop else None


def _most_likely(result: Result) -> _beams.Top:
    """The most likely tokens after the prompt of a request."""
    tops = result.top_logprobs
    return tops[0] if tops else ()


def _with(value: Any, **changes: object) -> Any:
    """A copy of a native value object with some fields changed."""
    _none, fields = value.__getnewargs_ex__()
    return type(value)(**{**fields, **changes})
