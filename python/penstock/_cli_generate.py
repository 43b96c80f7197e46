"""`penstock generate`, `penstock chat` and `penstock demo`: answers of a model."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

import penstock
from penstock import _cli_chat
from penstock._cli_chat import Reply
from penstock._cli_engine import lora_modules_option, open_engine, sampling_fields
from penstock._cli_options import (
    Command,
    api_key,
    engine_options,
    given,
    json_option,
    key_options,
    sampling_options,
)
from penstock._cli_output import INTERRUPTED, print_json
from penstock._cli_remote import RemoteModel, check_source
from penstock._options import FILTERS, Prompt, SamplingOptions

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from penstock._cli_chat import Answer

__all__ = ["chat", "demo", "generate"]


def _answer(
    engine: penstock.Engine, prompt: Prompt, params: penstock.SamplingParams, *, as_json: bool = False
) -> penstock.Result:
    """Stream the answer to standard output, then print its statistics. Ctrl-C cancels the request."""
    with engine.blocking.stream(prompt, params) as request:
        try:
            for chunk in request:
                if not as_json:
                    click.echo(chunk.text, nl=False)
        except KeyboardInterrupt:
            request.cancel()
        result = request.result()
    _print_end(Reply.of(result), result.to_dict() if as_json else None)
    return result


def _print_end(reply: Reply, fields: Mapping[str, Any] | None) -> None:
    """Print these fields as JSON, or the end of an answer that has been printed."""
    if fields is not None:
        print_json(fields)
    else:
        click.echo()
        click.echo(reply.statistics(), err=True)


def _params(options: Mapping[str, Any]) -> penstock.SamplingParams:
    """The sampling parameters, which are checked before the model is loaded."""
    return penstock.SamplingParams(**sampling_fields(options))


def _answer_once(model: str, prompt: Prompt, options: Mapping[str, Any], *, as_json: bool) -> None:
    params = _params(options)
    with open_engine(model, options) as engine:
        result = _answer(engine, prompt, params, as_json=as_json)
    if result.finish_reason == "cancelled":
        sys.exit(INTERRUPTED)


def _text_of(prompt: str | None) -> str:
    """The prompt; `-`, or a pipe without a prompt, is the text on standard input."""
    if prompt is None and sys.stdin.isatty():
        raise click.UsageError("Missing argument 'PROMPT'.")
    text = sys.stdin.read() if prompt in (None, "-") else prompt
    if not text:
        raise click.UsageError("The prompt is empty.")
    return text


@click.command("demo", cls=Command)
@click.argument("question", default="Why is the sky blue?")
@json_option
@lora_modules_option
@sampling_options
@engine_options
def demo(question: str, *, as_json: bool, **options: Any) -> None:
    """Ask the demo model a QUESTION."""
    if options["max_tokens"] is None:
        options["max_tokens"] = 256
    if not any(options[name] is not None for name in ("temperature", *FILTERS)):
        options["temperature"] = 0.0  # a small model gives poor answers when sampling
    messages = [{"role": "user", "content": question}]
    _answer_once(str(penstock.demo.model_path()), messages, options, as_json=as_json)


@click.command("generate", cls=Command)
@click.argument("model")
@click.argument("prompt", required=False)
@json_option
@lora_modules_option
@sampling_options
@engine_options
def generate(model: str, prompt: str | None, *, as_json: bool, **options: Any) -> None:
    """Continue the text PROMPT as it is, without a chat template.

    `-`, or no PROMPT, reads the text from standard input.
    """
    _answer_once(model, _text_of(prompt), options, as_json=as_json)


@contextmanager
def _answers(model: str | None, options: Mapping[str, Any], *, as_json: bool) -> Iterator[Answer]:
    """The source of a chat's answers: an engine, or a server."""
    if model is not None:
        params = _params(options)
        with open_engine(model, options) as engine:
            yield lambda messages: Reply.of(_answer(engine, messages, params, as_json=as_json))
        return
    key = api_key(options["api_key"], options["api_key_file"])
    remote = RemoteModel(options["url"], options["served_name"], key, given(SamplingOptions, options))

    def answer(messages: list[dict[str, Any]]) -> Reply:
        reply = remote.answer(messages, is_silent=as_json)
        _print_end(reply, reply.to_dict() if as_json else None)
        return reply

    yield answer


@click.command("chat", cls=Command)
@click.argument("model", required=False)
@click.argument("prompt", required=False)
@click.option("-q", "--question", help="Text to answer; the same as PROMPT.")
@click.option("--system", help="System prompt.")
@click.option("--url", help="Address of a server with OpenAI's API, which answers in place of MODEL.")
@click.option("--model", "served_name", help="Name of the server's model. Default: its first one.")
@key_options("Options")
@json_option
@lora_modules_option
@sampling_options
@engine_options
def chat(model: str | None, prompt: str | None, system: str | None, *, as_json: bool, **options: Any) -> None:
    """Chat with MODEL, or with a model of a server, or answer one PROMPT.

    With a PROMPT, or text from a pipe, the model answers once. `-` as PROMPT reads standard input. Otherwise
    the chat is interactive: /help lists its commands, Ctrl-C stops an answer, Ctrl-D leaves.
    """
    if options["url"] is not None and prompt is None:
        model, prompt = None, model
    check_source(model, options)
    if prompt is not None and options["question"] is not None:
        raise click.UsageError("--question excludes PROMPT.")
    prompt = options["question"] if prompt is None else prompt
    messages = [{"role": "system", "content": system}] if system else []
    is_interactive = prompt is None and sys.stdin.isatty()
    if is_interactive:
        if as_json:
            raise click.UsageError("--json requires a PROMPT.")
        import readline  # noqa: F401 - line editing for `input`
    else:
        messages.append({"role": "user", "content": _text_of(prompt)})
    with _answers(model, options, as_json=as_json) as answer:
        if is_interactive:
            _cli_chat.chat(messages, answer)
        elif answer(messages).is_cancelled:
            sys.exit(INTERRUPTED)
