"""`/v1/rerank` and `/v1/score`, as vLLM, Jina and Cohere define them."""

from __future__ import annotations

from typing import Annotated

import msgspec

__all__ = ["RerankRequest", "ScoreRequest", "TextObject"]


class TextObject(msgspec.Struct):
    """A document as an object."""

    text: str


class RerankRequest(msgspec.Struct):
    """A request for a ranking of documents; `null` equals an omitted field."""

    query: str
    documents: list[str | TextObject]
    model: str | None = None
    top_n: Annotated[int, msgspec.Meta(ge=0)] | None = None
    return_documents: bool = True
    instruction: str | None = None
    priority: int = 0


class ScoreRequest(msgspec.Struct):
    """A request for scores of pairs; `queries` and `documents` are other names of the two texts."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    model: str | None = None
    instruction: str | None = None
    priority: int = 0
