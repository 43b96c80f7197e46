"""Answers chosen from more than are returned: `best_of`, and the beam search of `num_beams`.

Both are made of ordinary requests, which the engine knows nothing special about, so both are for `generate`
alone: which answers are the best is known when all have ended. What is here waits for nobody; the two faces
of the engine do, each in its way.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from penstock import _beams, _core
from penstock._beams import BrokenOff

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock._beams import Beam, ClosedBeam, Ending
    from penstock._core import Choice, Result, SamplingParams, StopSearch

__all__ = ["BeamSearch", "best_of", "with_candidates"]

# ---- best_of


def with_candidates(params: SamplingParams) -> SamplingParams:
    """The parameters of the request from whose answers `best_of` chooses."""
    if params.best_of is None:
        return params
    return params.replace(n=params.best_of, best_of=None, logprobs=True)


def best_of(result: Result, params: SamplingParams) -> Result:
    """The `n` answers whose tokens have the highest mean log probability, best first; that is their score.

    The usage stays that of all candidates: they have been computed.
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
    """A beam search in an engine: while it runs, `requests` starts a step and `advance` takes what it gave.

    Each step asks for one token of every running beam. What a beam has computed is found in the prefix cache
    by those that continue it, so a step computes little more than the new tokens.
    """

    def __init__(self, native: _core.Engine, beams: _core.Beams) -> None:
        self._beams = beams
        self._wanted = beams.params
        self._endings = _Endings(native, beams)
        self._started = time.monotonic()
        self._first: Result | None = None
        self._answers: list[ClosedBeam] = []
        self._search = _beams.search(
            num_beams=self._wanted.num_beams,
            length_penalty=self._wanted.length_penalty,
            max_tokens=self._wanted.max_tokens or 1,
            ending_of=self._endings,
        )
        self._running = next(self._search)

    @property
    def is_running(self) -> bool:
        """Whether there is something left to ask."""
        return bool(self._running)

    def requests(self, port: _core.Port) -> Iterator[_core.Request]:
        """The requests of the next step, each started when it is taken."""
        for beam in self._running:
            yield self._beams.start(beam.token_ids, port)

    def advance(self, results: Sequence[Result]) -> None:
        """Takes the results of those requests, in their order."""
        if self._first is None:
            self._first = results[0]
        reasons = [result.finish_reason for result in results]
        broken = [reason for reason in reasons if reason in ("cancelled", "interrupted")]
        try:
            if broken:
                # Nothing more can be asked, and what there is of the running beams may be an answer.
                self._running = self._search.send(BrokenOff(broken[0]))
            else:
                self._running = self._search.send([_likeliest(result) for result in results])
        except StopIteration as done:
            self._running, self._answers = [], done.value
        self._endings.keep(self._running)

    def result(self) -> Result:
        """What was found, the best first; fewer than `n` where there are no more."""
        first = self._first
        if first is None:
            message = "a beam search that asked nothing has no result; this is a bug in penstock"
            raise AssertionError(message)
        answers = self._answers[: self._wanted.n]
        return _core.Result(
            choices=[self._choice(index, answer) for index, answer in enumerate(answers)],
            prompt_token_ids=first.prompt_token_ids,
            prompt_logprobs=None,
            prompt_top_logprobs=None,
            usage=_with(first.usage, completion_tokens=sum(len(answer.beam.token_ids) for answer in answers)),
            timings=_with(first.timings, total=time.monotonic() - self._started),
        )

    def _choice(self, index: int, answer: ClosedBeam) -> Choice:
        beam, wanted = answer.beam, self._wanted
        text = self._endings.text(beam.token_ids, answer.ending)
        tops = tuple(top[: wanted.top_logprobs] for top in beam.tops)
        finish_reason, stop_reason = answer.ending
        return _core.Choice(
            index=index,
            text=text,
            token_ids=beam.token_ids,
            logprobs=beam.logprobs if wanted.logprobs else None,
            top_logprobs=tops if wanted.top_logprobs is not None else None,
            cumulative_logprob=beam.total if wanted.logprobs else None,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            seed=0,  # nothing is drawn
            score=answer.score,
            content=text,
            reasoning="",
            tool_calls=(),
            logits=None,
            hidden_states=None,
        )


class _Endings:
    """Where an answer ends, and what its text is then; as of a request with these parameters."""

    def __init__(self, native: _core.Engine, beams: _core.Beams) -> None:
        self._native = native
        self._params = params = beams.params
        self._ids = {*params.stop_token_ids, *(() if params.ignore_eos else native.eos_token_ids)}
        # How far the text of each running beam, and of those that continue one, has come in the stop strings.
        self._searches: dict[tuple[int, ...], StopSearch] = {}
        if params.stop:
            self._searches[()] = beams.stop_search()

    def __call__(self, token_ids: tuple[int, ...]) -> Ending | None:
        params, last = self._params, token_ids[-1]
        # A stop token is chosen when so many are there, and a sequence ends with the last of them.
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
        """Forgets whatever no running beam needs."""
        if self._searches:
            self._searches = {beam.token_ids: self._searches[beam.token_ids] for beam in running}

    def text(self, token_ids: Sequence[int], ending: Ending) -> str:
        """The answer's text, cut where it stops."""
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
        """The stop string that is complete first, the longest of several, and its place."""

        def matches() -> Iterator[tuple[int, int, str]]:
            for stop in self._params.stop:
                start = text.find(stop)
                if start >= 0:
                    yield start + len(stop), start, stop

        end, start, stop = min(matches(), default=(0, 0, ""))
        return (stop, start, end) if stop else None


def _likeliest(result: Result) -> _beams.Top:
    """The likeliest tokens after a prompt."""
    tops = result.top_logprobs
    return tops[0] if tops else ()


def _with(value: Any, **changes: object) -> Any:
    """A value of the native half with some fields changed."""
    _none, fields = value.__getnewargs_ex__()
    return type(value)(**{**fields, **changes})
