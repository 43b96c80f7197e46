"""The objects of responses, for the OpenAPI document. The routes make dictionaries, which tests compare."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

__all__ = [
    "Aborted",
    "AnthropicMessage",
    "Batch",
    "BatchList",
    "ChatCompletion",
    "Completion",
    "DeletedFile",
    "DeletedResponse",
    "Detokenized",
    "Embeddings",
    "Error",
    "File",
    "FileList",
    "Health",
    "InputItems",
    "InputTokens",
    "ModelList",
    "ModelRow",
    "Ping",
    "Ranking",
    "Response",
    "Scores",
    "Tokenized",
    "Version",
]


class ErrorDetails(msgspec.Struct):
    """The cause of an error; `param` is the field at fault."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class Error(msgspec.Struct):
    """An error. In Anthropic's API, `type` is `error`, and the details have no `param` and no `code`."""

    error: ErrorDetails
    type: Literal["error"] = "error"


class Usage(msgspec.Struct):
    """Token counts."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: dict[str, int] = {}


class ChatMessage(msgspec.Struct):
    """The output of a chat."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] = []


class ChatChoice(msgspec.Struct):
    """One output of a chat."""

    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls", "abort"]
    stop_reason: str | int | list[int] | None = None


class ChatCompletion(msgspec.Struct):
    """The response to a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class CompletionChoice(msgspec.Struct):
    """One output of a completion."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "abort"]
    stop_reason: str | int | list[int] | None = None


class Completion(msgspec.Struct):
    """The response to prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class OutputItem(msgspec.Struct):
    """An item of the output of a response, with the fields of all types."""

    id: str
    type: Literal["message", "reasoning", "function_call"]
    status: Literal["completed", "incomplete"]
    role: Literal["assistant"] = "assistant"
    content: list[dict[str, Any]] = []
    summary: list[dict[str, Any]] = []
    call_id: str = ""
    name: str = ""
    arguments: str = ""


class ResponseUsage(msgspec.Struct):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class Response(msgspec.Struct):
    """A response. It also has the fields of its request."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["completed", "incomplete", "failed"]
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage


class DeletedResponse(msgspec.Struct):
    """A response that was removed."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class File(msgspec.Struct):
    """A file."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: None
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]


class FileList(msgspec.Struct):
    """Files."""

    object: Literal["list"]
    data: list[File]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(msgspec.Struct):
    """A file that was removed."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


class BatchError(msgspec.Struct):
    """An error because of which a batch has failed; `line` counts from 1."""

    code: str
    message: str
    line: int | None
    param: str | None


class BatchErrors(msgspec.Struct):
    """The first errors of a batch."""

    object: Literal["list"]
    data: list[BatchError]


class BatchCounts(msgspec.Struct):
    """The numbers of requests of a batch."""

    total: int
    completed: int
    failed: int


class Batch(msgspec.Struct):
    """A batch of requests."""

    id: str
    object: Literal["batch"]
    endpoint: str
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating",
        "failed",
        "in_progress",
        "finalizing",
        "completed",
        "expired",
        "cancelling",
        "cancelled",
    ]
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    errors: BatchErrors | None
    output_file_id: str | None
    error_file_id: str | None
    request_counts: BatchCounts
    metadata: dict[str, str] | None


class BatchList(msgspec.Struct):
    """Batches."""

    object: Literal["list"]
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputItems(msgspec.Struct):
    """Items of the input of a response."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class MessageUsage(msgspec.Struct):
    """Token counts of a message."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int


class AppliedEdits(msgspec.Struct):
    """The edits of the context that were made: none."""

    applied_edits: list[dict[str, Any]]


class OriginalTokens(msgspec.Struct):
    """The number of tokens before edits of the context."""

    original_input_tokens: int


class AnthropicMessage(msgspec.Struct):
    """A message in Anthropic's API."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: str
    stop_sequence: str | None
    usage: MessageUsage
    #: Only if the request has the field.
    context_management: AppliedEdits | None = None


class InputTokens(msgspec.Struct):
    """The number of tokens of a prompt."""

    input_tokens: int
    #: Only if the request has the field.
    context_management: OriginalTokens | None = None


class Embedding(msgspec.Struct):
    """An embedding: numbers, or the base64 text of 32-bit floats."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(msgspec.Struct):
    """The embeddings of the input."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: Usage


class RankedText(msgspec.Struct):
    """A document."""

    text: str


class RankedDocument(msgspec.Struct):
    """The relevance of a document for the query, from 0 to 1."""

    index: int
    relevance_score: float
    document: RankedText | None = None


class Ranking(msgspec.Struct):
    """The documents, the most relevant one first."""

    id: str
    model: str
    usage: Usage
    results: list[RankedDocument]


class Score(msgspec.Struct):
    """The score of a pair of texts, from 0 to 1."""

    index: int
    object: Literal["score"]
    score: float


class Scores(msgspec.Struct):
    """The scores of the pairs in order."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: Usage


class Tokenized(msgspec.Struct):
    """The token ids of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(msgspec.Struct):
    """The text of token ids."""

    prompt: str


class Aborted(msgspec.Struct):
    """The number of requests that were ended."""

    aborted: int


class Version(msgspec.Struct):
    """The version of Penstock."""

    version: str


class ModelRow(msgspec.Struct):
    """A model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None
    chat_sampling: dict[str, float] | None


class ModelList(msgspec.Struct):
    """The models of the server."""

    object: Literal["list"]
    data: list[ModelRow]


class Health(msgspec.Struct):
    """The state of the server and of its models."""

    status: str
    models: dict[str, dict[str, Any]]


class Ping(msgspec.Struct):
    """Whether the process works."""

    status: Literal["ok", "broken"]
