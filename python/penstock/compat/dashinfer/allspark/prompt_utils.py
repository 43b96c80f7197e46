"""`PromptTemplate`: prompts of chat models as text."""

from __future__ import annotations

__all__ = ["PromptTemplate"]


class PromptTemplate:
    """Templates that do not depend on a model's files."""

    @staticmethod
    def apply_chatml_template(input_str: str) -> str:
        """A chat in ChatML: DashInfer's system prompt, the user's message, and the start of the answer."""
        return (
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
            f"<|im_start|>user\n{input_str}<|im_end|>\n"
            "<|im_start|>assistant \n"
        )
