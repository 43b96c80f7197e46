"""Answers chosen from more than are returned: `best_of`, and the beam search of `num_beams`.

Both are made of ordinary requests, which the engine knows nothing special about, so both are for `generate`
alone: which answers are the best is known when all have ended. What is here waits for nobody; the two faces
of the engine do, each in its way.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from penstock import _beams, _core
from penstock._beams import ClosedBeam
from penstock.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock._beams import Ending
    from penstock._core import Choice, Result, SamplingParams

__all__ = ["BeamSearch", "best_of", "with_candidates"]

#: The length of any answer to this power is a number.
MAX_LENGTH_PENALTY = 32


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

    def __init__(self, native: _core.Engine, prompt: Sequence[int], params: SamplingParams) -> None:
        _check(params)
        self._native = native
        self._prompt = list(prompt)
        self._wanted = native.resolve(params, len(prompt))
        self._endings = _Endings(native, params)
        self._started = time.monotonic()
        self._first: Result | None = None
        self._answers: list[ClosedBeam] = []
        self._search = _beams.search(
            num_beams=params.num_beams,
            length_penalty=params.length_penalty,
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
        may_end = len(self._running[0].token_ids) >= self._wanted.min_tokens
        params = self._wanted.replace(
            n=None,
            num_beams=None,
            length_penalty=None,
            max_tokens=1,
            max_length=None,
            min_tokens=0 if may_end else 1,
            temperature=0.0,
            stop=None,
            stop_sequences_ids=None,
            logprobs=True,
            top_logprobs=None,
            logprobs_mode="processed",
        )
        num_likeliest = max(2 * self._wanted.num_beams, self._wanted.top_logprobs or 0)
        for beam in self._running:
            prompt = [*self._prompt, *beam.token_ids]
            yield self._native.start_beam(prompt, params, port, num_likeliest=num_likeliest)

    def advance(self, results: Sequence[Result]) -> None:
        """Takes the results of those requests, in their order."""
        if self._first is None:
            self._first = results[0]
        for result in results:
            if result.finish_reason in ("cancelled", "interrupted"):
                self._break_off(result.finish_reason)
                return
        try:
            self._running = self._search.send([_likeliest(result) for result in results])
        except StopIteration as done:
            self._running, self._answers = [], done.value

    def _break_off(self, finish_reason: str) -> None:
        """Nothing more can be asked: what there is of the running beams is the answer, like any other's."""
        penalty = self._wanted.length_penalty
        running, self._running = self._running, []
        self._answers = [ClosedBeam(beam, beam.score(penalty), (finish_reason, None)) for beam in running]

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

    def __init__(self, native: _core.Engine, params: SamplingParams) -> None:
        self._native = native
        self._params = params
        self._ids = {*params.stop_token_ids, *(() if params.ignore_eos else native.eos_token_ids)}
        # Each character has at most four tokens, so a stop string that the last token completes lies in here.
        self._window = 4 * max(map(len, params.stop), default=0) + 4

    def __call__(self, token_ids: Sequence[int]) -> Ending | None:
        if token_ids[-1] in self._ids:
            return "stop", token_ids[-1]
        for sequence in self._params.stop_sequences_ids:
            if tuple(token_ids[-len(sequence) :]) == tuple(sequence):
                return "stop", tuple(sequence)
        found = self._find_stop(self._decode(token_ids[-self._window :])) if self._params.stop else None
        return ("stop", found[0]) if found else None

    def text(self, token_ids: Sequence[int], ending: Ending) -> str:
        """The answer's text, cut where it stops."""
        _finish_reason, stop_reason = ending
        keeps_stop = self._params.include_stop_in_output
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


def _check(params: SamplingParams) -> None:
    """Refuses what a beam search cannot honour: its requests know one token each, not the answer so far."""
    if abs(params.length_penalty) > MAX_LENGTH_PENALTY:
        limit = f"a number from -{MAX_LENGTH_PENALTY} to {MAX_LENGTH_PENALTY}"
        raise _refusal("length_penalty", params.length_penalty, limit)
    unsupported = {
        "presence_penalty": params.presence_penalty != 0,
        "frequency_penalty": params.frequency_penalty != 0,
        "suppress_repetition_in_generation": params.suppress_repetition_in_generation,
        "logits_processors": bool(params.logits_processors),
        "response_format": params.response_format is not None,
        "regex": params.regex is not None,
        "choice": params.choice is not None,
        "grammar": params.grammar is not None,
        "tools": params.tools is not None,
        "prompt_logprobs": params.prompt_logprobs is not None,
        "echo": params.echo,
        "output_logits": params.output_logits is not None,
        "output_hidden_states": params.output_hidden_states is not None,
    }
    for field, is_given in unsupported.items():
        if is_given:
            raise _refusal(field, getattr(params, field), "left out where num_beams is above 1")


def _refusal(field: str, value: object, limit: str) -> InvalidRequest:
    return InvalidRequest(f"{field}={value!r} is not allowed: it must be {limit}", field, value, limit)


def _with(value: Any, **changes: object) -> Any:
    """A value of the native half with some fields changed."""
    _none, fields = value.__getnewargs_ex__()
    return type(value)(**{**fields, **changes})
