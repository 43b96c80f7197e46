"""Chat templates that transformers renders."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from support.parity.oracle import import_torch
from support.parity.stored import store

if TYPE_CHECKING:
    from collections.abc import Mapping


def render(
    source: str, messages: list[dict[str, Any]], tokens: Mapping[str, str], **variables: Any
) -> str | None:
    """The text of a conversation; none if the template rejects it.

    Where transformers fails for messages without content, empty content is given instead.
    """

    def compute() -> dict[str, Any]:
        import_torch()
        import jinja2
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **tokens)
        silent = [{**message, "content": message["content"] or ""} for message in messages]
        for given in (messages, silent):
            with contextlib.suppress(jinja2.TemplateError, TypeError):
                return {
                    "text": tokenizer.apply_chat_template(
                        given, chat_template=source, tokenize=False, **variables
                    )
                }
        return {"text": None}

    inputs = {"source": source, "messages": messages, "tokens": dict(tokens), "variables": variables}
    text: str | None = store().recall("chat template", inputs, compute)["text"]
    return text
