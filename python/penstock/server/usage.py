"""Token counts and finish reasons in the form of OpenAI's API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import penstock

__all__ = ["finish_reason", "usage_of"]

#: The reasons that have another name in the API.
_REASONS = {"cancelled": "abort", "interrupted": "abort", "unread": "abort"}


def finish_reason(reason: str | None) -> str | None:
    """The finish reason of a choice."""
    return reason if reason is None else _REASONS.get(reason, reason)


def usage_of(*usages: penstock.Usage, completion_tokens: int | None = None) -> dict[str, Any]:
    """The sum of token counts, with this count of generated tokens if it is given."""
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = completion_tokens
    if completion is None:
        completion = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)},
    }
