"""The response object and the items of its output."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.server.logprobs import Tokens, chat_logprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    import penstock
    from penstock.server.calls import Generation
    from penstock.server.protocol.openai_responses import ResponsesRequest

__all__ = ["Answer", "OutputItem", "is_complete", "text_logprobs"]

#: For each type of item, the prefix of its ids, and the name of its text in the events.
_KINDS = {
    "message": ("msg", "output_text"),
    "reasoning": ("rs", "reasoning_text"),
    "function_call": ("fc", "function_call_arguments"),
}


def is_complete(finish_reason: str | None) -> bool:
    """Whether an output with this finish reason is complete."""
    return finish_reason in ("stop", "tool_calls")


class OutputItem:
    """An item of the output, which receives its text in parts."""

    def __init__(self, kind: str, response_id: str, index: int, call_id: str = "", name: str = "") -> None:
        prefix, text = _KINDS[kind]
        self.kind = kind
        self.id = f"{prefix}_{response_id.rpartition('_')[2]}_{index}"
        self.index = index
        #: The common part of the names of the events of its text.
        self.event = f"response.{text}"
        self._call_id = call_id
        self.name = name
        self._texts: list[str] = []
        self._logprobs: list[msgspec.Raw] = []

    def add(self, text: str, logprobs: Sequence[msgspec.Raw] = ()) -> None:
        """Add text, and the log probabilities of its tokens."""
        self._texts.append(text)
        self._logprobs += logprobs

    @property
    def text(self) -> str:
        """The text so far: that of a message or of reasoning, or the arguments of a call."""
        return "".join(self._texts)

    def part(self) -> dict[str, Any]:
        """The only part of the content of a message or of reasoning."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self._logprobs}

    def body(self, status: str) -> dict[str, Any]:
        """The item as an object."""
        fields: dict[str, Any] = {"id": self.id, "type": self.kind, "status": status}
        if self.kind == "function_call":
            return fields | {"call_id": self._call_id, "name": self.name, "arguments": self.text}
        fields["content"] = [] if status == "in_progress" else [self.part()]
        if self.kind == "reasoning":
            return fields | {"summary": [], "encrypted_content": None}
        return fields | {"role": "assistant"}


class Answer:
    """The response object of one request, in each of its states."""

    def __init__(self, generation: Generation, request: ResponsesRequest, *, is_stored: bool) -> None:
        self.id = generation.id
        self._engine = generation.model.engine
        params = generation.call.params
        form = request.text.format if request.text is not None else None
        effort = request.reasoning.effort if request.reasoning is not None else None
        self._fields: dict[str, Any] = {
            "id": generation.id,
            "object": "response",
            "created_at": generation.created,
            "background": False,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": request.max_tool_calls,
            "metadata": request.metadata or {},
            "model": generation.name,
            "parallel_tool_calls": request.parallel_tool_calls,
            "previous_response_id": request.previous_response_id,
            "prompt_cache_key": request.prompt_cache_key,
            "reasoning": {"effort": effort, "summary": None},
            "safety_identifier": request.safety_identifier,
            "service_tier": "default",
            "store": is_stored,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"} if form is None else _given(form)},
            "tool_choice": "auto" if request.tool_choice is None else request.tool_choice,
            "tools": [_given(tool) for tool in request.tools or ()],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": request.truncation,
            "user": request.user,
        }

    def begun(self) -> dict[str, Any]:
        """The object before there is output."""
        return self._object("in_progress", [], None)

    def ended(
        self, finish_reason: str | None, output: list[dict[str, Any]], usage: dict[str, Any]
    ) -> dict[str, Any]:
        """The object with all output."""
        if is_complete(finish_reason):
            return self._object("completed", output, usage) | {"completed_at": int(time.time())}
        if finish_reason == "length":
            details = {"reason": "max_output_tokens"}
            return self._object("incomplete", output, usage) | {"incomplete_details": details}
        return self.failed("the request was aborted", output, usage)

    def failed(
        self, message: str, output: list[dict[str, Any]], usage: dict[str, Any] | None
    ) -> dict[str, Any]:
        """The object of a request that failed."""
        error = {"code": "server_error", "message": message}
        return self._object("failed", output, usage) | {"error": error}

    def _object(
        self, status: str, output: list[dict[str, Any]], usage: dict[str, Any] | None
    ) -> dict[str, Any]:
        return {
            **self._fields,
            "status": status,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "output": output,
            "usage": usage,
        }

    def of(self, result: penstock.Result, num_reasoning_tokens: int) -> dict[str, Any]:
        """The object of a complete result."""
        items: list[OutputItem] = []
        if result.reasoning:
            items.append(OutputItem("reasoning", self.id, 0))
            items[-1].add(result.reasoning)
        if result.content or not (items or result.tool_calls):
            items.append(OutputItem("message", self.id, len(items)))
            items[-1].add(result.content, text_logprobs(Tokens(self._engine), result))
        for call in result.tool_calls:
            items.append(OutputItem("function_call", self.id, len(items), call.id, call.name))
            items[-1].add(call.arguments)
        output = [item.body("completed") for item in items]
        if not is_complete(result.finish_reason):
            output[-1]["status"] = "incomplete"
        return self.ended(result.finish_reason, output, usage_of(result.usage, num_reasoning_tokens))


def _given(structure: msgspec.Struct) -> dict[str, Any]:
    """The fields of a structure that are not `None`."""
    fields: dict[str, Any] = msgspec.to_builtins(structure)
    return {name: value for name, value in fields.items() if value is not None}


def usage_of(usage: penstock.Usage, num_reasoning_tokens: int) -> dict[str, Any]:
    """Token counts in the form of this API."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }


def text_logprobs(tokens: Tokens, output: penstock.Result | penstock.Chunk) -> list[msgspec.Raw]:
    """The log probabilities of the tokens of an output, as JSON texts."""
    if output.logprobs is None:
        return []
    logprobs = chat_logprobs(tokens, output.token_ids, output.logprobs, output.top_logprobs)
    content: list[msgspec.Raw] = logprobs["content"]
    return content
