"""The fields of a request that concern the chat template."""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["TemplateFields"]


class TemplateFields(msgspec.Struct, kw_only=True):
    """The fields that chat completions and `/tokenize` have; other APIs set some of them."""

    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
