"""The events of a streamed message."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.server.errors import ApiError
from penstock.server.events import Events, split_calls
from penstock.server.sse import json_bytes, named_event

if TYPE_CHECKING:
    from collections.abc import Sequence

    import penstock
    from penstock.server.calls import Generation
    from penstock.server.protocol.anthropic import MessagesRequest

__all__ = ["MessageEvents", "edits_of", "is_thinking_shown", "stop_of", "usage_of"]

_PING = named_event({"type": "ping"})
_STOP = named_event({"type": "message_stop"})
#: For each type of block, the type of its deltas and the field of their text.
_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
#: The part of a delta after its text.
_TAIL = b"}}\n\n"


class MessageEvents(Events):
    """Makes the events of one message. Those that have only text are made of constant parts.

    Thinking has an empty signature: nothing verifies it. A chunk without output is a ping.
    """

    def __init__(self, generation: Generation, request: MessagesRequest) -> None:
        self._generation = generation
        self._shows_thinking = is_thinking_shown(request)
        self._edits = edits_of(request)
        self._is_started = False
        #: The type of the open block, and the number of blocks that were opened.
        self._open: str | None = None
        self._num_blocks = 0
        #: The part of a delta of the open block before its text.
        self._head = b""
        #: The last chunk.
        self._ended: penstock.Chunk | None = None

    def of(self, chunk: penstock.Chunk, prompt: int, request: penstock.Request) -> bytes:  # noqa: ARG002
        """The events of a chunk; the first ones begin the message."""
        content = chunk.content
        is_plain = self._open == "text" and content and chunk.finish_reason is None
        if is_plain and not chunk.reasoning and not chunk.tool_calls:
            return self._head + json_bytes(content) + _TAIL
        parts: list[bytes] = []
        if not self._is_started:
            self._is_started = True
            parts.append(self._start(request))
        if self._shows_thinking and chunk.reasoning:
            if self._open != "thinking":
                parts.append(self._begin({"type": "thinking", "thinking": "", "signature": ""}))
            parts.append(self._delta(chunk.reasoning))
        continued, begun = split_calls(chunk)
        parts += [self._delta(call.arguments) for call in continued]
        if content:
            if self._open != "text":
                parts.append(self._begin({"type": "text", "text": ""}))
            parts.append(self._delta(content))
        for call in begun:
            if call.id is not None:
                parts.append(self._begin(tool_use(call.id, call.name, {})))
            if call.arguments:
                parts.append(self._delta(call.arguments))
        if chunk.finish_reason is not None:
            parts.append(self._close())
            self._ended = chunk
        return b"".join(parts) or _PING

    def end(self, requests: Sequence[penstock.Request]) -> bytes:
        """The events after the last chunk: the reason for the end, and the usage. An abort is an error."""
        try:
            stop = stop_of(self._ended)
        except ApiError as error:
            return self.error(error)
        usage = usage_of(requests[0].usage)
        return named_event({"type": "message_delta", "delta": stop, "usage": usage, **self._edits}) + _STOP

    def error(self, error: ApiError) -> bytes:
        """The event of an error, which ends the stream."""
        return named_event(error.anthropic_body())

    def _start(self, request: penstock.Request) -> bytes:
        message: dict[str, Any] = {
            "id": self._generation.id,
            "type": "message",
            "role": "assistant",
            "model": self._generation.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_of(request.usage),
        }
        return named_event({"type": "message_start", "message": message}) + _PING

    def _begin(self, block: dict[str, Any]) -> bytes:
        """The events that end the open block and begin this one."""
        closed = self._close()
        index = self._num_blocks
        self._num_blocks += 1
        self._open = block["type"]
        kind, field = _DELTAS[block["type"]]
        delta = {"type": "content_block_delta", "index": index, "delta": {"type": kind, field: ""}}
        self._head = named_event(delta).removesuffix(b'""' + _TAIL)
        begun = {"type": "content_block_start", "index": index, "content_block": block}
        return closed + named_event(begun)

    def _delta(self, text: str) -> bytes:
        return self._head + json_bytes(text) + _TAIL

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        index = self._num_blocks - 1
        stop = named_event({"type": "content_block_stop", "index": index})
        if self._open == "thinking":
            signature = {"type": "signature_delta", "signature": ""}
            stop = named_event({"type": "content_block_delta", "index": index, "delta": signature}) + stop
        self._open = None
        return stop


def tool_use(call_id: str, name: str | None, arguments: dict[str, Any]) -> dict[str, Any]:
    """The block of a call. Its id has the prefix of Anthropic's API."""
    tool_use_id = f"toolu_{call_id.removeprefix('call_')}"
    return {"type": "tool_use", "id": tool_use_id, "name": name, "input": arguments}


def edits_of(request: MessagesRequest) -> dict[str, Any]:
    """The report of edits of the context for a request that names some: the server has made none."""
    return {} if request.context_management is None else {"context_management": {"applied_edits": []}}


def is_thinking_shown(request: MessagesRequest) -> bool:
    """Whether a message has the reasoning of the model."""
    thinking = request.thinking
    return thinking is None or (thinking.type != "disabled" and thinking.display != "omitted")


def stop_of(ended: penstock.Chunk | penstock.Result | None) -> dict[str, str | None]:
    """The reason for the end of a message, and the stop sequence if it is one.

    Anthropic's API has no reason for a message that was aborted or interrupted: it is an error, which clients
    repeat.
    """
    reason = None if ended is None else ended.finish_reason
    if ended is not None and reason == "stop":
        if isinstance(ended.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": ended.stop_reason}
        return {"stop_reason": "end_turn", "stop_sequence": None}
    reasons = {"tool_calls": "tool_use", "length": "max_tokens"}
    if reason not in reasons:
        raise ApiError(503, "the request was aborted", code="aborted")
    return {"stop_reason": reasons[reason], "stop_sequence": None}


def usage_of(usage: penstock.Usage) -> dict[str, int]:
    """Token counts. As in Anthropic's API, `input_tokens` are those that were not in the prefix cache."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
