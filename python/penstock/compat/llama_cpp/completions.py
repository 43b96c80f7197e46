"""Completions: the responses of llama-cpp-python for results and chunks of Penstock."""

from __future__ import annotations

import dataclasses
import itertools
import time
import uuid
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import penstock

__all__ = ["Completion"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """A request and the fields that all its responses share."""

    engine: penstock.Engine
    tokenizer: penstock.Tokenizer
    prompt: Sequence[int]
    params: penstock.SamplingParams
    model: str
    #: Number of characters before the output, or of tokens if the prompt is a list of them.
    offset: int
    id: str = dataclasses.field(default_factory=lambda: f"cmpl-{uuid.uuid4()}")
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    def response(self, echo: str = "") -> dict[str, Any]:
        """The complete output; `echo` is the text before it."""
        result = self.engine.blocking.generate(self.prompt, self.params)
        choice = result.choices[0]
        num_tokens = len(_without_end(choice.token_ids, choice.stop_reason))
        logprobs = None
        if choice.logprobs is not None:
            offset = 0 if echo else self.offset
            logprobs = self._logprobs(choice, choice.stop_reason, offset)
        response = self._body(echo + choice.text, logprobs, choice.finish_reason)
        return response | {"usage": usage(len(self.prompt), num_tokens)}

    def stream(self) -> Iterator[dict[str, Any]]:
        """The parts of the output as they arrive, and then one without text, with the reason of the end."""
        offset = self.offset
        with self.engine.blocking.stream(self.prompt, self.params) as request:
            for chunk in request:
                logprobs = None
                if chunk.logprobs:
                    logprobs = self._logprobs(chunk, chunk.stop_reason, offset)
                if chunk.text or (logprobs and logprobs["tokens"]):
                    yield self._body(chunk.text, logprobs, None)
                offset += len(chunk.text)
                if chunk.finish_reason is not None:
                    yield self._body("", None, chunk.finish_reason)

    def _body(self, text: str, logprobs: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
        choice = {"text": text, "index": 0, "logprobs": logprobs, "finish_reason": reason}
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": [choice],
        }

    def _logprobs(
        self, part: penstock.Choice | penstock.Chunk, stop_reason: object, offset: int
    ) -> dict[str, Any]:
        """The log probabilities of the tokens, without an end token."""
        token_ids = _without_end(part.token_ids, stop_reason)
        tokens = self._texts(token_ids)
        found: dict[str, Any] = {
            "tokens": tokens,
            "text_offset": list(itertools.accumulate(map(len, tokens), initial=offset))[:-1],
            "token_logprobs": list(part.logprobs or ())[: len(tokens)],
            "top_logprobs": [],
        }
        for token, logprob, top in zip(
            tokens, found["token_logprobs"], part.top_logprobs or (), strict=False
        ):
            texts = self._texts([other for other, _ in top])
            alternatives = dict(zip(texts, (value for _, value in top), strict=True))
            found["top_logprobs"].append(alternatives | {token: logprob})
        return found

    def _texts(self, token_ids: Sequence[int]) -> list[str]:
        return [text.decode(errors="ignore") for text in self.tokenizer.token_bytes(token_ids)]


def usage(num_prompt: int, num_completion: int) -> dict[str, int]:
    """The `usage` of a response."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
    }


def _without_end(token_ids: Sequence[int], stop_reason: object) -> Sequence[int]:
    """The tokens without the end token, if the output ends with one."""
    return token_ids[:-1] if isinstance(stop_reason, int) else token_ids
