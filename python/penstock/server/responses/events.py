"""The events of a streamed response."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from penstock.server.errors import ApiError
from penstock.server.events import Events, split_calls
from penstock.server.logprobs import Tokens
from penstock.server.responses.output import OutputItem, is_complete, text_logprobs, usage_of
from penstock.server.sse import json_bytes, named_event

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import penstock
    from penstock.server.responses.output import Answer

__all__ = ["ResponseEvents"]

#: The part of a delta between its text and its sequence number, by the type of the item.
_MIDDLES = {
    "message": b',"logprobs":[],"sequence_number":',
    "reasoning": b',"sequence_number":',
    "function_call": b',"sequence_number":',
}
_END = b"}\n\n"
#: The log probabilities of a response are in four events at its end, which the event loop makes.
_MAX_LOGPROB_BYTES = 16 << 20


class ResponseEvents(Events):
    """Makes the events of one response. Deltas without log probabilities are made of constant parts.

    `keep` is called with the status and the text of the response object when it has all output. `hold` counts
    the memory of log probabilities, which the last events repeat.
    """

    def __init__(
        self,
        answer: Answer,
        engine: penstock.Engine,
        keep: Callable[[str, bytes], None],
        hold: Callable[[int], None],
    ) -> None:
        self._answer = answer
        self._keep = keep
        self._hold = hold
        self._tokens = Tokens(engine)
        self._is_started = False
        self._sequence_number = 0
        #: The complete items.
        self._output: list[dict[str, Any]] = []
        self._open: OutputItem | None = None
        #: The parts of a delta of the open item before its text, and after it.
        self._head = self._middle = b""
        #: Log probabilities of tokens without text so far, and the bytes of all.
        self._logprobs: list[msgspec.Raw] = []
        self._num_logprob_bytes = 0
        self._num_reasoning_tokens = 0
        self._finish_reason: str | None = None

    def of(self, chunk: penstock.Chunk, prompt: int, request: penstock.Request) -> bytes:  # noqa: ARG002
        """The events of a chunk; the first ones begin the response."""
        if chunk.logprobs is not None:
            self._add_logprobs(chunk)  # raises before an event has a number
        parts = [] if self._is_started else [self._start()]
        if chunk.reasoning:
            self._num_reasoning_tokens += len(chunk.token_ids)
            parts += [self._opened("reasoning"), self._delta(chunk.reasoning)]
        continued, begun = split_calls(chunk)
        parts += [self._delta(call.arguments) for call in continued]
        if chunk.content:
            parts += [self._opened("message"), self._delta(chunk.content)]
        for call in begun:
            if call.id is not None:
                parts.append(self._begin("function_call", call.id, call.name or ""))
            if call.arguments:
                parts.append(self._delta(call.arguments))
        if chunk.finish_reason is not None:
            self._finish_reason = chunk.finish_reason
            if self._open is None:
                parts.append(self._begin("message"))
            parts.append(self._close("completed" if is_complete(chunk.finish_reason) else "incomplete"))
        return b"".join(parts)

    def _add_logprobs(self, chunk: penstock.Chunk) -> None:
        """Raises if the events at the end would have too many."""
        found = text_logprobs(self._tokens, chunk)
        size = sum(map(len, found))
        self._num_logprob_bytes += size
        if self._num_logprob_bytes > _MAX_LOGPROB_BYTES:
            message = f"the log probabilities have more than {_MAX_LOGPROB_BYTES} bytes: ask for fewer"
            raise ApiError(400, message, param="top_logprobs")
        self._hold(size)
        self._logprobs += found

    def end(self, requests: Sequence[penstock.Request]) -> bytes:
        """The event of the complete response object."""
        usage = usage_of(requests[0].usage, self._num_reasoning_tokens)
        response = self._answer.ended(self._finish_reason, self._output, usage)
        status, body = response["status"], json_bytes(response)
        self._keep(status, body)
        return self._event(f"response.{status}", response=msgspec.Raw(body))

    def error(self, error: ApiError) -> bytes:
        """The events of an error, which end the stream."""
        found = error.body()["error"]
        fields = {name: found[name] for name in ("code", "message", "param")}
        begin = b"" if self._is_started else self._start()
        response = self._answer.failed(found["message"], self._output, None)
        return begin + self._event("error", **fields) + self._event("response.failed", response=response)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number = self._sequence_number
        self._sequence_number += 1
        return named_event({"type": kind, **fields, "sequence_number": number})

    def _start(self) -> bytes:
        self._is_started = True
        response = self._answer.begun()
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def _opened(self, kind: str) -> bytes:
        """The events that begin an item of this type, unless it is open."""
        return b"" if self._open is not None and self._open.kind == kind else self._begin(kind)

    def _begin(self, kind: str, call_id: str = "", name: str = "") -> bytes:
        """The events that end the open item and begin this one."""
        closed = self._close("completed")
        item = OutputItem(kind, self._answer.id, len(self._output), call_id, name)
        self._open = item
        place = _place(item)
        delta = named_event({"type": f"{item.event}.delta", **place, "delta": ""})
        self._head, self._middle = delta.removesuffix(b'""' + _END), _MIDDLES[kind]
        body = item.body("in_progress")
        begun = self._event("response.output_item.added", output_index=item.index, item=body)
        if kind != "function_call":
            begun += self._event("response.content_part.added", **place, part=item.part())
        return closed + begun

    def _delta(self, text: str) -> bytes:
        item = self._open
        if item is None:  # the first part of a call begins its item
            return b""
        middle = self._middle
        if self._logprobs and item.kind == "message":
            middle = b',"logprobs":' + json_bytes(self._logprobs) + _MIDDLES["reasoning"]
            item.add(text, self._logprobs)
            self._logprobs = []
        else:
            item.add(text)
        number = self._sequence_number
        self._sequence_number = number + 1
        return b"".join((self._head, json_bytes(text), middle, str(number).encode(), _END))

    def _close(self, status: str) -> bytes:
        """The events that end the open item."""
        item, self._open = self._open, None
        if item is None:
            return b""
        place = _place(item)
        if item.kind == "message":
            item.add("", self._logprobs)  # of tokens that end the output
            self._logprobs = []
        ends = []
        if item.kind == "function_call":
            ends.append(self._event(f"{item.event}.done", **place, name=item.name, arguments=item.text))
        else:
            part = item.part()
            fields = {name: part[name] for name in ("text", "logprobs") if name in part}
            ends.append(self._event(f"{item.event}.done", **place, **fields))
            ends.append(self._event("response.content_part.done", **place, part=part))
        body = item.body(status)
        self._output.append(body)
        ends.append(self._event("response.output_item.done", output_index=item.index, item=body))
        return b"".join(ends)


def _place(item: OutputItem) -> dict[str, Any]:
    """The fields of an event that name the item."""
    place = {"item_id": item.id, "output_index": item.index}
    return place if item.kind == "function_call" else place | {"content_index": 0}
