"""`/v1/embeddings`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

__all__ = ["EmbeddingsRequest"]


class EmbeddingsRequest(msgspec.Struct):
    """A request for embeddings; `null` equals an omitted field."""

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, msgspec.Meta(ge=1)] | None = None
    pooling: Literal["mean", "last"] | None = None
    normalize: bool | None = None
    use_activation: bool | None = None  # vLLM's name
    priority: int = 0
