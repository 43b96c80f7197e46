"""The events of a stream: what all APIs have, and the common part of chats and completions."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from penstock.server.errors import invalid
from penstock.server.sse import DONE, event, json_bytes
from penstock.server.usage import usage_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import penstock
    from penstock.server.calls import Generation
    from penstock.server.errors import ApiError
    from penstock.server.protocol.openai_chat import StreamOptions

__all__ = ["Events", "OpenAIEvents", "split_calls"]


def split_calls(
    chunk: penstock.Chunk,
) -> tuple[Sequence[penstock.ToolCallDelta], Sequence[penstock.ToolCallDelta]]:
    """The deltas that continue a call of an earlier chunk, and the others.

    For APIs with ordered parts: the content of a chunk with several tokens follows the first ones.
    """
    calls = chunk.tool_calls
    begin = next((index for index, call in enumerate(calls) if call.id is not None), len(calls))
    return calls[:begin], calls[begin:]


class Events:
    """Makes the events of one stream."""

    def of(self, chunk: penstock.Chunk, prompt: int, request: penstock.Request) -> bytes:
        """The events of a chunk of the request of this prompt."""
        raise NotImplementedError

    def end(self, requests: Sequence[penstock.Request]) -> bytes:
        """The events after the last chunk."""
        raise NotImplementedError

    def error(self, error: ApiError) -> bytes:
        """The event of an error, which ends the stream."""
        raise NotImplementedError


class OpenAIEvents(Events):
    """Makes the events of a stream of OpenAI's chats or completions.

    `before` and `after` enclose the text in the JSON of a choice. An event that has only text is made of
    constant parts; `chunk` makes the others.
    """

    def __init__(
        self, generation: Generation, kind: str, options: StreamOptions | None, *, before: bytes, after: bytes
    ) -> None:
        if options is not None and options.include_obfuscation:
            limit = "false: the server adds no random characters"
            raise invalid("stream_options.include_obfuscation", options.include_obfuscation, limit)
        self._common = {
            "id": generation.id,
            "object": kind,
            "created": generation.created,
            "model": generation.name,
        }
        self.has_usage = options is not None and bool(options.include_usage)
        self.has_continuous_usage = self.has_usage and bool(options and options.continuous_usage_stats)
        self._begin = b"data: " + json_bytes(self._common)[:-1] + b',"choices":[{"index":'
        self._before = before
        self._end = after + b"}]" + (b',"usage":null' if self.has_usage else b"") + b"}\n\n"
        #: The part of an event before the text, for each index that had an event.
        self._heads: dict[int, bytes] = {}
        #: The tokens of each request in the events so far.
        self._num_tokens: Counter[penstock.Request] = Counter()

    def is_first(self, index: int) -> bool:
        """Whether no event of this index was made; one follows."""
        if index in self._heads:
            return False
        self._heads[index] = self._begin + str(index).encode() + self._before
        return True

    def text(self, index: int, text: str) -> bytes:
        """An event that has only text."""
        return self._heads[index] + json_bytes(text) + self._end

    def chunk(
        self, choice: dict[str, Any], request: penstock.Request, num_tokens: int, **fields: object
    ) -> bytes:
        """An event of a choice that has this number of tokens, with further fields beside the choice."""
        value = {**self._common, "choices": [choice], **fields}
        if self.has_continuous_usage:
            # `request.usage` counts tokens that later events have.
            self._num_tokens[request] += num_tokens
            value["usage"] = usage_of(request.usage, completion_tokens=self._num_tokens[request])
        elif self.has_usage:
            value["usage"] = None
        return event(value)

    def end(self, requests: Sequence[penstock.Request]) -> bytes:
        """The events after the last chunk, with the usage if it is wanted."""
        if not self.has_usage:
            return DONE
        usage = usage_of(*(request.usage for request in requests))
        return event({**self._common, "choices": [], "usage": usage}) + DONE

    def error(self, error: ApiError) -> bytes:
        """The event of an error, which ends the stream."""
        return event(error.body())
