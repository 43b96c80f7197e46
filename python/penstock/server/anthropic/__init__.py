"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's API, with the code of chat completions."""

from penstock.server.anthropic.handlers import count_tokens, messages

__all__ = ["count_tokens", "messages"]
