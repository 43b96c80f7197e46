"""`penstock generate`, `penstock chat` and `penstock demo`: answers of a model."""

from __future__ import annotations

import os
import shlex
import stat
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import penstock
from penstock._chat_sampling import CHAT_MIN_P, CHAT_TEMPERATURE
from penstock._options import FILTERS, Prompt, SamplingOptions
from penstock.cli.chat import Reply, interact
from penstock.cli.download import default_model, yes_option
from penstock.cli.engine import lora_modules_option, open_engine, sampling_fields
from penstock.cli.options import (
    Command,
    api_key,
    engine_options,
    given,
    json_option,
    key_options,
    sampling_options_with,
)
from penstock.cli.output import INTERRUPTED, print_json, program
from penstock.cli.remote import RemoteModel, check_source

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from penstock.cli.chat import Answer

__all__ = ["chat", "demo", "generate"]

#: Sampling parameters of commands, if neither the options nor the files of the model set any. Small models
#: continue a text best without sampling.
_CHAT: SamplingOptions = {"temperature": CHAT_TEMPERATURE, "min_p": CHAT_MIN_P}
_GREEDY: SamplingOptions = {"temperature": 0.0}
#: Default of `max_tokens` where the model answers once.
_MAX_TOKENS = 256
#: The last of the commands to try after the demo.
_LARGER = """\
  {program} chat qwen3-1.7b
      a larger model of the Hugging Face hub, with the extra "hub\""""
#: The defaults in help texts.
_ONCE_HELP = {"max_tokens": _MAX_TOKENS, "temperature": "the model's, else 0, or 1.0 with a filter"}
_CHAT_HELP = {
    "temperature": f"the model's, else {CHAT_TEMPERATURE}, or 1.0 with a filter",
    "min_p": f"the model's, else {CHAT_MIN_P}, or 0.0 with --temperature or another filter",
}
#: Number of weights of a model that answers so badly that the commands say so.
_TOY = 300_000_000


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
    limits = {"max_tokens": params.max_tokens, "max_length": params.max_length}
    end = Reply.of(result).statistics(limits, "the context, see --max-model-len")
    _print_end(end, result.to_dict() if as_json else None)
    return result


def _print_end(statistics: str, fields: Mapping[str, Any] | None) -> None:
    """Print these fields as JSON, or the end of an answer that has been printed."""
    if fields is not None:
        print_json(fields)
    else:
        click.echo()
        click.echo(statistics, err=True)


@contextmanager
def _open(
    model: str, options: Mapping[str, Any], defaults: SamplingOptions
) -> Iterator[tuple[penstock.Engine, penstock.SamplingParams]]:
    """An engine and the sampling parameters, which are checked before the model is loaded.

    `defaults` apply if neither the options nor the files of the model have parameters for sampling. A line
    about the model and its parameters goes to standard error.
    """
    fields = sampling_fields(options)
    params = penstock.SamplingParams(**fields)
    with open_engine(model, options) as engine:
        names = [name for name in ("temperature", *FILTERS) if name in fields]
        if not names and not engine.info.has_sampling_defaults:
            params = params.replace(**defaults)
            names = list(defaults)
        shown = _shown({name: getattr(params, name) for name in names})
        click.echo(f"{_summary(model, engine.info)}; {shown or 'sampled as its files say'}", err=True)
        yield engine, params


def _shown(fields: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in fields.items())


def _summary(model: str, info: penstock.ModelInfo) -> str:
    """The name and the size of a model, and a warning for one that is too small to answer well."""
    name = Path(model).name if Path(model).exists() else model
    number = f"{info.parameters / 1e6:,.0f} million" if info.parameters >= 1e6 else f"{info.parameters:,}"  # noqa: PLR2004
    size = f"{name}: {number} parameters, {info.memory.weights / 1e6:,.0f} MB"
    return size if info.parameters >= _TOY else f"{size}, a toy that is often wrong"


def _answer_once(
    model: str, prompt: Prompt, options: Mapping[str, Any], defaults: SamplingOptions, *, as_json: bool
) -> None:
    with _open(model, options, defaults) as (engine, params):
        result = _answer(engine, prompt, params, as_json=as_json)
    if result.finish_reason == "cancelled":
        sys.exit(INTERRUPTED)


def _text_of(prompt: str | None) -> str:
    """The prompt; `-` or no prompt is the text of standard input, and a pipe or a file follows a prompt."""
    if prompt is None and sys.stdin.isatty():
        raise click.UsageError("Missing argument 'PROMPT'.")
    text = sys.stdin.read() if prompt in (None, "-") else prompt
    if not text:
        raise click.UsageError("The prompt is empty.")
    if prompt in (None, "-") or not _is_redirected():
        return text
    piped = sys.stdin.read()
    return f"{text}\n\n{piped}" if piped else text


def _is_redirected() -> bool:
    """Whether standard input is a pipe or a file, not a terminal, a device or closed."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


@click.command("demo", cls=Command)
@click.argument("question", default="Why is the sky blue?")
@json_option
@lora_modules_option
@sampling_options_with(_ONCE_HELP)
@engine_options
def demo(question: str, *, as_json: bool, **options: Any) -> None:
    """Ask the demo model a QUESTION."""
    messages = [{"role": "user", "content": question}]
    model = str(penstock.demo.model_path())
    _answer_once(model, messages, _limited(options), _GREEDY, as_json=as_json)
    if not as_json:
        click.echo(f"{_next_commands(model)}\n{_LARGER.format(program=program())}", err=True)


def _limited(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with a limit of the output."""
    has_limit = options["max_tokens"] is not None or options["max_length"] is not None
    return {**options} if has_limit else {**options, "max_tokens": _MAX_TOKENS}


def _next_commands(model: str) -> str:
    """Commands to try after one answer."""
    command, model = program(), shlex.quote(model)
    return f"""
Next:
  {command} chat {model}
      a conversation
  {command} serve {model}
      OpenAI's API and a chat page, with the extra "server\""""


@click.command("generate", cls=Command)
@click.argument("model")
@click.argument("prompt", required=False)
@json_option
@yes_option
@lora_modules_option
@sampling_options_with(_ONCE_HELP)
@engine_options
def generate(model: str, prompt: str | None, *, as_json: bool, **options: Any) -> None:
    """Continue the text PROMPT as it is, without a chat template.

    `-`, or no PROMPT, reads the text from standard input; text from a pipe or a file follows a PROMPT after
    a blank line. By default, the text ends after 256 tokens, and the most likely token is selected if the
    files of the model have no parameters for sampling.
    """
    _answer_once(model, _text_of(prompt), _limited(options), _GREEDY, as_json=as_json)


@contextmanager
def _answers(model: str | None, options: Mapping[str, Any], *, as_json: bool) -> Iterator[Answer]:
    """The source of a chat's answers: an engine, or a server."""
    if model is not None:
        with _open(model, options, _CHAT) as (engine, params):
            yield lambda messages: Reply.of(_answer(engine, messages, params, as_json=as_json))
        return
    key = api_key(options["api_key"], options["api_key_file"])
    fields = given(SamplingOptions, options)
    remote = RemoteModel(options["url"], options["served_name"], key, fields)
    if remote.chat_sampling:
        click.echo(f"{remote.label}: {_shown(remote.chat_sampling)}", err=True)

    def answer(messages: list[dict[str, Any]]) -> Reply:
        reply = remote.answer(messages, is_silent=as_json)
        end = reply.statistics(fields, "set by the server")
        _print_end(end, reply.to_dict() if as_json else None)
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
@yes_option
@lora_modules_option
@sampling_options_with(_CHAT_HELP)
@engine_options
def chat(model: str | None, prompt: str | None, system: str | None, *, as_json: bool, **options: Any) -> None:
    """Chat with MODEL, or with a model of a server, or answer one PROMPT.

    Without MODEL, a model that was downloaded answers, or a small one is offered for download.

    With a PROMPT, or text from a pipe or a file, the model answers once; the text follows a PROMPT after a
    blank line. `-` as PROMPT reads standard input. Otherwise the chat is interactive: /help lists its
    commands, Ctrl-C stops an answer, Ctrl-D leaves. If the files of MODEL have no parameters for sampling,
    the temperature is 0.7 and min-p 0.05; with --url, the parameters are those that the server lists for
    chats with its model.
    """
    if options["url"] is not None and prompt is None:
        model, prompt = None, model
    if model is None and options["url"] is None:
        model = default_model(assume_yes=options["assume_yes"])
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
            interact(messages, answer)
        elif answer(messages).is_cancelled:
            sys.exit(INTERRUPTED)
        elif model is not None and not as_json and sys.stderr.isatty():
            click.echo(_next_commands(model), err=True)
