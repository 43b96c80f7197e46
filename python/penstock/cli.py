"""The command line: `penstock`, or `python -m penstock`.

Uses the public blocking API only.

Generated text goes to standard output; progress, statistics and errors go to standard error. Exit status: 0
on success, 1 on an error, 2 on invalid usage, 130 after Ctrl-C.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any

import click

import penstock
from penstock import demo
from penstock._cli_bench import bench
from penstock._cli_chat import Reply, chat, one_line
from penstock._cli_engine import lora_modules_option, open_engine, progress_bar, sampling_fields
from penstock._cli_options import (
    Command,
    api_key,
    convert_options,
    engine_options,
    given,
    json_option,
    key_options,
    sampling_options,
)
from penstock._cli_remote import RemoteModel, check_source
from penstock._cli_runtime import runtime
from penstock._cli_serve import serve
from penstock._options import FILTERS, EngineOptions, Prompt, SamplingOptions
from penstock.runtime.downloader.command import download

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from penstock._cli_chat import Answer

__all__ = ["main"]

INTERRUPTED = 130
BENCH_PROMPT = 512
BENCH_OUTPUT = 64
BENCH_BATCHES = (1, 8, 32)


#: Errors of writing to a disk, a pipe or a terminal.
OUTPUT_ERRORS = {errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}


class _InvalidUsage(click.ClickException):
    exit_code = 2


class _OutputError(click.ClickException):
    """Standard output cannot be written: the disk is full, or the reader of a pipe is gone."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"standard output: {error.strerror}")
        # Otherwise the interpreter writes the rest again when it exits.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)

    def show(self, file: IO[Any] | None = None) -> None:
        with suppress(OSError):
            super().show(file)


@contextmanager
def _system_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in OUTPUT_ERRORS and error.filename is None:
            raise _OutputError(error) from error
        raise click.ClickException(one_line(error)) from error


class _Group(click.Group):
    """Reports errors of Penstock and of the system as one line, without a traceback."""

    command_class = Command

    def make_context(self, *arguments: Any, **keywords: Any) -> click.Context:
        with _system_errors():  # of `--help`
            return super().make_context(*arguments, **keywords)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _system_errors():
                return super().invoke(ctx)
        except penstock.PenstockError as error:
            failure = _InvalidUsage if isinstance(error, ValueError) else click.ClickException
            raise failure(one_line(error)) from error
        except KeyboardInterrupt:
            click.echo(err=True)
            ctx.exit(INTERRUPTED)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(penstock.__version__, prog_name="penstock")
def main() -> None:
    """Penstock: LLM inference from the command line.

    MODEL is a Hugging Face model directory, a GGUF file, a converted model, or the id of a model on the
    Hugging Face hub.
    """


# ---- shared by the commands


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
        _print_json(fields)
    else:
        click.echo()
        click.echo(reply.statistics(), err=True)


def _print_json(value: object) -> None:
    click.echo(json.dumps(value, ensure_ascii=False))


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


# ---- commands


@main.command("demo")
@click.argument("question", default="Why is the sky blue?")
@json_option
@lora_modules_option
@sampling_options
@engine_options
def _demo(question: str, *, as_json: bool, **options: Any) -> None:
    """Ask the demo model a QUESTION."""
    if options["max_tokens"] is None:
        options["max_tokens"] = 256
    if not any(options[name] is not None for name in ("temperature", *FILTERS)):
        options["temperature"] = 0.0  # a small model gives poor answers when sampling
    messages = [{"role": "user", "content": question}]
    _answer_once(str(demo.model_path()), messages, options, as_json=as_json)


@main.command("generate")
@click.argument("model")
@click.argument("prompt", required=False)
@json_option
@lora_modules_option
@sampling_options
@engine_options
def _generate(model: str, prompt: str | None, *, as_json: bool, **options: Any) -> None:
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


@main.command("chat")
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
def _chat(
    model: str | None, prompt: str | None, system: str | None, *, as_json: bool, **options: Any
) -> None:
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
            chat(messages, answer)
        elif answer(messages).is_cancelled:
            sys.exit(INTERRUPTED)


@main.command("convert")
@click.argument("model")
@click.option("-o", "--output", required=True, help="New directory, or archive if it ends with .tar.")
@click.option("--overwrite", is_flag=True, help="Replace a converted model.")
@convert_options
def _convert(model: str, output: str, *, overwrite: bool, **options: Any) -> None:
    """Write MODEL with packed weights, which open in a fraction of a second."""
    with progress_bar("converting") as show_progress:
        settings: dict[str, Any] = given(EngineOptions, options)
        path = penstock.convert(model, output, overwrite=overwrite, progress=show_progress, **settings)
    click.echo(path)


@main.command("info")
@click.argument("model")
@json_option
def _info(model: str, *, as_json: bool) -> None:
    """Show model metadata, without loading the weights, and what of the model is not supported."""
    metadata = penstock.describe(model)
    config = metadata["config"]
    facts = {
        "architectures": config.get("architectures") or [],
        "format": metadata["format"],
        "files": [str(file) for file in metadata["files"]],
        "bytes": metadata["bytes"],
        "tensors": metadata["tensors"],
        "elements": dict(metadata["storage"]),
        "quantization": metadata["quantization"],
        "max_position_embeddings": config.get("max_position_embeddings"),
        "vocab_size": config.get("vocab_size"),
        "has_tokenizer": metadata["has_tokenizer"],
        "has_chat_template": metadata["has_chat_template"],
        "unsupported": metadata["unsupported"],
    }
    if as_json:
        _print_json(facts)
        return
    lines: dict[str, object] = {
        "architecture": ", ".join(facts["architectures"]) or "unknown",
        "format": facts["format"],
        "files": "\n".join(facts["files"]),
        "size": f"{facts['bytes']:,} bytes in {facts['tensors']:,} tensors",
        "elements": ", ".join(f"{elements:,} {kind}" for kind, elements in facts["elements"].items()),
        "quantization": facts["quantization"] or "none",
        "context": f"{facts['max_position_embeddings'] or 'unknown'} tokens",
        "vocabulary": f"{facts['vocab_size'] or 'unknown'} tokens",
        "tokenizer": "yes" if facts["has_tokenizer"] else "no",
        "chat template": "yes" if facts["has_chat_template"] else "no",
        "not supported": "\n".join(facts["unsupported"]) or "nothing found",
    }
    for name, value in lines.items():
        click.echo(f"{name:14} {value}".replace("\n", "\n" + " " * 15))


main.add_command(serve)
main.add_command(runtime)
main.add_command(download)
main.add_command(bench)


@bench.command("engine")
@click.argument("model")
@json_option
@engine_options
def _bench_engine(model: str, *, as_json: bool, **options: Any) -> None:
    """Benchmark MODEL. Prints tokens per second of a 512-token prefill, and of decode batches 1, 8 and 32."""
    with open_engine(model, options) as engine:
        info = engine.info
        report: dict[str, Any] = {
            "architecture": info.architecture,
            "dtype": info.dtype,
            "weight_formats": [item.to_dict() for item in info.weight_formats],
            "threads": info.threads,
            "isa": info.isa,
            "prefill": {},
            "decode": {},
        }

        def show(line: str) -> None:
            if not as_json:
                click.echo(line)

        show(f"{info.architecture}, {info.dtype}, {info.threads} threads, {info.isa}")
        length = min(BENCH_PROMPT, info.max_model_len - 1)
        _run_together(engine, 1, length, 1)  # warm-up
        [first] = _run_together(engine, 1, length, 1)
        assert first.timings.first_token is not None  # noqa: S101 - one token was generated
        rate = length / first.timings.first_token
        report["prefill"][length] = rate
        show(f"prefill, {length} tokens: {rate:10.1f} tokens/s")
        output = min(BENCH_OUTPUT, info.max_model_len - 1)
        for batch in BENCH_BATCHES:
            if batch <= info.max_num_seqs:
                results = _run_together(engine, batch, 1, output)
                rate = batch * output / max(result.timings.total for result in results)
                report["decode"][batch] = rate
                show(f"decode, batch {batch}: {rate:10.1f} tokens/s")
    if as_json:
        _print_json(report)


def _run_together(engine: penstock.Engine, batch: int, prompt: int, output: int) -> list[penstock.Result]:
    """Run `batch` requests of `prompt` arbitrary tokens; each generates exactly `output` tokens."""
    vocabulary = engine.info.vocabulary_size
    requests = [
        engine.blocking.start_request(
            [(7919 * position + number) % vocabulary for position in range(1, prompt + 1)],
            max_tokens=output,
            temperature=0.0,
            ignore_eos=True,
            use_prefix_cache=False,
        )
        for number in range(batch)
    ]
    return [request.result() for request in requests]
