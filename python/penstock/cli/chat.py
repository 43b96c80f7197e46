"""The interactive chat of the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import click

import penstock
from penstock.cli.output import message_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Messages = list[dict[str, Any]]
    Answer = Callable[[Messages], "Reply"]

__all__ = ["Reply", "interact"]

HELP = """\
/help   show this list
/clear  forget the conversation; the system prompt stays
/bye    leave
Ctrl-C  stop the answer or clear the line; twice: leave
Ctrl-D  leave"""
INTERRUPTED = "(Ctrl-C again, Ctrl-D or /bye to leave)"


@dataclass
class Reply:
    """An answer and its numbers. `content` has no reasoning and no tool calls; times are in seconds."""

    content: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    first_token: float | None = None
    total: float = 0.0

    @classmethod
    def of(cls, result: penstock.Result) -> Self:
        """The reply of an engine."""
        return cls(
            result.content,
            result.reasoning,
            result.finish_reason,
            result.usage.prompt_tokens,
            result.usage.completion_tokens,
            result.timings.first_token,
            result.timings.total,
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields of `Result.to_dict` that an answer of a server has."""
        choice = {"content": self.content, "reasoning": self.reasoning, "finish_reason": self.finish_reason}
        return {
            "choices": [{"index": 0, **choice}],
            "usage": {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.output_tokens},
            "timings": {"first_token": self.first_token, "total": self.total},
        }

    @property
    def is_cancelled(self) -> bool:
        """Whether Ctrl-C stopped the answer."""
        return self.finish_reason == "cancelled"

    def statistics(self, limits: Mapping[str, Any], other_limit: str) -> str:
        """The line below the answer.

        `limits` are the sampling parameters that the user has set; `other_limit` names the limit of an answer
        that none of them has ended.
        """
        parts = []
        if self.output_tokens is not None:
            parts += [f"{self.prompt_tokens} prompt tokens", f"{self.output_tokens} output tokens"]
        if self.first_token is not None:
            parts.append(f"time to first token {self.first_token:.2f} s")
            if (self.output_tokens or 0) > 1 and self.total > self.first_token:
                rate = ((self.output_tokens or 0) - 1) / (self.total - self.first_token)
                parts.append(f"{rate:.1f} tokens/s")
        if self.finish_reason == "length":
            parts.append(f"ended by the limit{self._limit(limits, other_limit)}")
        return ", ".join(parts)

    def _limit(self, limits: Mapping[str, Any], other_limit: str) -> str:
        """The limit that ended the answer."""
        if self.output_tokens is None or self.prompt_tokens is None:
            return ""
        if self.output_tokens == limits.get("max_tokens"):
            return f" of {self.output_tokens} tokens (--max-tokens)"
        total = self.prompt_tokens + self.output_tokens
        option = "--max-length" if total == limits.get("max_length") else other_limit
        return f" of {total} tokens with the prompt ({option})"


def interact(messages: Messages, answer: Answer) -> None:
    """Asks for lines and answers each, until the user leaves. `messages` is the conversation so far.

    `answer` prints the answer to a conversation and returns it, also if Ctrl-C stopped it.
    """
    start = len(messages)
    was_interrupted = False
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            click.echo()
            return
        except KeyboardInterrupt:
            click.echo()
            if was_interrupted:
                return
            click.echo(INTERRUPTED, err=True)
            was_interrupted = True
            continue
        was_interrupted = False
        if line == "/bye":
            return
        if line == "/clear":
            del messages[start:]
        elif line.startswith("/"):
            if line != "/help":
                click.echo(f"Unknown command {line}", err=True)
            click.echo(HELP, err=True)
        elif line:
            messages.append({"role": "user", "content": line})
            was_interrupted = _take_turn(messages, answer)


def _take_turn(messages: Messages, answer: Answer) -> bool:
    """Answers the last message; returns whether Ctrl-C stopped the answer."""
    try:
        reply = answer(messages)
    except (penstock.RequestError, click.ClickException) as error:
        click.echo(f"Error: {message_of(error)}", err=True)
        messages.pop()
        return False
    except KeyboardInterrupt:  # before the first chunk
        click.echo()
        messages.pop()
        return True
    if reply.content:
        messages.append({"role": "assistant", "content": reply.content})
    else:
        messages.pop()
    return reply.is_cancelled
