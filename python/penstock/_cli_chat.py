"""The interactive chat of the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

import penstock

if TYPE_CHECKING:
    from collections.abc import Callable

    Messages = list[dict[str, Any]]
    Answer = Callable[[Messages], penstock.Result]

__all__ = ["chat"]

HELP = """\
/help   show this list
/clear  forget the conversation; the system prompt stays
/bye    leave
Ctrl-C  stop the answer or clear the line; twice: leave
Ctrl-D  leave"""
INTERRUPTED = "(Ctrl-C again, Ctrl-D or /bye to leave)"


def chat(messages: Messages, answer: Answer) -> None:
    """Asks for lines and answers each, until the user leaves. `messages` is the conversation so far.

    `answer` prints the answer to a conversation and returns its result, also if Ctrl-C stopped it.
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
        result = answer(messages)
    except penstock.RequestError as error:
        click.echo(f"Error: {one_line(error)}", err=True)
        messages.pop()
        return False
    except KeyboardInterrupt:  # before the first chunk
        click.echo()
        messages.pop()
        return True
    was_interrupted = result.finish_reason == "cancelled"
    if result.text:
        messages.append({"role": "assistant", "content": result.content})
    else:
        messages.pop()
    return was_interrupted


def one_line(error: BaseException) -> str:
    """The message of an error without line breaks."""
    return " ".join(str(error).split())
