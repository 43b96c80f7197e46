"""llama-cpp-python's `llama_speculative`: draft tokens by prompt lookup."""

from __future__ import annotations

import dataclasses

__all__ = ["LlamaPromptLookupDecoding"]


@dataclasses.dataclass
class LlamaPromptLookupDecoding:
    """The `draft_model` of n-gram drafts: the engine's `speculation="ngram"`.

    `num_pred_tokens` is `num_speculative_tokens`; the engine chooses the n-grams itself, so `max_ngram_size`
    has no effect. Neither changes the output.
    """

    max_ngram_size: int = 2
    num_pred_tokens: int = 10
