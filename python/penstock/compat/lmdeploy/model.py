"""`ChatTemplateConfig`, and the chat templates of a pipeline."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.compat.lmdeploy.tokenizer import Tokenizer

__all__ = ["ChatTemplateConfig", "ModelTemplate", "best_template"]


@dataclasses.dataclass
class ChatTemplateConfig:
    """The chat template of a pipeline."""

    model_name: str | None = None
    model_path: str | None = None
    system: str | None = None
    meta_instruction: str | None = None
    eosys: str | None = None
    user: str | None = None
    eoh: str | None = None
    assistant: str | None = None
    eoa: str | None = None
    tool: str | None = None
    eotool: str | None = None
    separator: str | None = None
    capability: str | None = None
    stop_words: list[str] | None = None


class ModelTemplate:
    """The model's own chat template."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer.model
        self.stop_words: list[str] | None = None

    def get_prompt(self, prompt: str, sequence_start: bool = True) -> str:
        """The text of a prompt for one message of the user."""
        return self.messages2prompt([{"role": "user", "content": prompt}], sequence_start)

    def messages2prompt(
        self, messages: str | Sequence[Mapping[str, Any]], sequence_start: bool = True, **kwargs: Any
    ) -> str:
        """The text of a prompt for a chat; a last message of the assistant is continued."""
        if isinstance(messages, str):
            return self.get_prompt(messages, sequence_start)
        continues = bool(messages) and messages[-1].get("role") == "assistant"
        return self._tokenizer.apply_chat_template(
            messages, continue_final_message=continues, chat_template_kwargs=kwargs or None
        )


def best_template(
    tokenizer: Tokenizer,
    *,
    model_path: str = "",
    model_name: str | None = None,
    config: ChatTemplateConfig | None = None,
) -> ModelTemplate:
    """The chat template of a pipeline."""
    return ModelTemplate(tokenizer)
