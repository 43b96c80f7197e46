"""The command line: `penstock`, or `python -m penstock`.

Uses the public blocking API only.

Generated text goes to standard output; progress, statistics and errors go to standard error. Exit status: 0
on success, 1 on an error, 2 on invalid usage, 130 after Ctrl-C.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import click

import penstock
from penstock import _core, _hub, demo
from penstock._options import FILTERS, EngineOptions, Prompt, SamplingOptions

if TYPE_CHECKING:
    Function = Callable[..., None]

__all__ = ["main"]

INTERRUPTED = 130
BENCH_PROMPT = 512
BENCH_OUTPUT = 64
BENCH_BATCHES = (1, 8, 32)
#: The types of options that can be given several times, and of their items.
SEQUENCES: dict[Any, type] = {Sequence[int]: int, Sequence[str]: str}


class _InvalidUsage(click.ClickException):
    exit_code = 2


class _Group(click.Group):
    """Reports Penstock's errors as one line, without a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except penstock.PenstockError as error:
            failure = _InvalidUsage if isinstance(error, ValueError) else click.ClickException
            raise failure(_one_line(error)) from error
        except KeyboardInterrupt:
            click.echo(err=True)
            ctx.exit(INTERRUPTED)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(penstock.__version__, prog_name="penstock")
def main() -> None:
    """Penstock: LLM inference from the command line.

    MODEL is a Hugging Face model directory, a GGUF file, or the id of a model on the Hugging Face hub.
    """


# ---- options, generated from the typed keywords


def _options_of(fields: type) -> Callable[[Function], Function]:
    def decorate(function: Function) -> Function:
        for name, hint in reversed(get_type_hints(fields, include_extras=True).items()):
            if get_origin(hint) is not Annotated:
                continue  # not a command line option
            kind, help_text = get_args(hint)
            flag = name.replace("_", "-")
            *kinds, _none = get_args(kind)
            if bool in kinds:
                option = click.option(f"--{flag}/--no-{flag}", name, default=None, help=help_text)
            elif item := next((SEQUENCES[kind] for kind in kinds if kind in SEQUENCES), None):
                repeated = f"{help_text} Can be given several times."
                option = click.option(f"--{flag}", name, type=item, multiple=True, help=repeated)
            else:
                plain = next((kind for kind in (int, float) if kind in kinds), str)
                option = click.option(f"--{flag}", name, type=plain, help=help_text)
            function = option(function)
        return function

    return decorate


_engine_options = _options_of(EngineOptions)
_sampling_options = _options_of(SamplingOptions)


def _given(fields: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are fields of the class and were set."""
    return {name: options[name] for name in fields.__annotations__ if options.get(name) not in (None, ())}


# ---- shared by the commands


@contextmanager
def _open(model: str, options: Mapping[str, Any]) -> Iterator[penstock.Engine]:
    """Open an engine, with a progress bar on a terminal while it loads."""
    from tqdm import tqdm

    with tqdm(desc="loading", unit="B", unit_scale=True, leave=False, disable=None) as bar:

        def show_progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        engine = penstock.Engine(model, progress=show_progress, **_given(EngineOptions, options))
        engine.blocking.start()
    with engine:
        yield engine


def _answer(engine: penstock.Engine, prompt: Prompt, options: Mapping[str, Any]) -> penstock.Result:
    """Stream the answer to standard output, then print its statistics. Ctrl-C cancels the request."""
    with engine.blocking.stream(prompt, **_given(SamplingOptions, options)) as request:
        try:
            for chunk in request:
                click.echo(chunk.text, nl=False)
        except KeyboardInterrupt:
            request.cancel()
        click.echo()
        result = request.result()
    click.echo(_statistics(result), err=True)
    return result


def _statistics(result: penstock.Result) -> str:
    usage, timings = result.usage, result.timings
    line = f"{usage.prompt_tokens} prompt tokens, {usage.completion_tokens} output tokens"
    if timings.first_token is not None:
        line += f", time to first token {timings.first_token:.2f} s"
        if usage.completion_tokens > 1 and timings.total > timings.first_token:
            rate = (usage.completion_tokens - 1) / (timings.total - timings.first_token)
            line += f", {rate:.1f} tokens/s"
    return line


def _answer_once(model: str, prompt: Prompt, options: Mapping[str, Any]) -> None:
    with _open(model, options) as engine:
        result = _answer(engine, prompt, options)
    if result.finish_reason == "cancelled":
        sys.exit(INTERRUPTED)


def _text_of(prompt: str) -> str:
    return sys.stdin.read() if prompt == "-" else prompt


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


# ---- commands


@main.command("demo")
@click.argument("question", default="Why is the sky blue?")
@_engine_options
@_sampling_options
def _demo(question: str, **options: Any) -> None:
    """Ask the demo model a QUESTION."""
    if options["max_tokens"] is None:
        options["max_tokens"] = 256
    if not any(options[name] is not None for name in ("temperature", *FILTERS)):
        options["temperature"] = 0.0  # a small model gives poor answers when sampling
    _answer_once(str(demo.model_path()), [{"role": "user", "content": question}], options)


@main.command("generate")
@click.argument("model")
@click.argument("prompt")
@_engine_options
@_sampling_options
def _generate(model: str, prompt: str, **options: Any) -> None:
    """Answer PROMPT as a chat message. `-` reads it from standard input."""
    _answer_once(model, [{"role": "user", "content": _text_of(prompt)}], options)


@main.command("complete")
@click.argument("model")
@click.argument("prompt")
@_engine_options
@_sampling_options
def _complete(model: str, prompt: str, **options: Any) -> None:
    """Continue the text PROMPT. `-` reads it from standard input."""
    _answer_once(model, _text_of(prompt), options)


@main.command("chat")
@click.argument("model")
@click.option("--system", help="System prompt.")
@_engine_options
@_sampling_options
def _chat(model: str, system: str | None, **options: Any) -> None:
    """Chat with MODEL. Ctrl-C stops an answer, Ctrl-D ends the chat."""
    messages = [{"role": "system", "content": system}] if system else []
    with _open(model, options) as engine:
        for question in _questions():
            messages.append({"role": "user", "content": question})
            try:
                result = _answer(engine, messages, options)
            except penstock.RequestError as error:
                click.echo(f"Error: {_one_line(error)}", err=True)
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": result.text})


def _questions() -> Iterator[str]:
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401 - line editing for `input`
    while True:
        try:
            question = input("> " if is_terminal else "").strip()
        except (EOFError, KeyboardInterrupt):
            click.echo(err=is_terminal)
            return
        if question:
            yield question


@main.command("info")
@click.argument("model")
def _info(model: str) -> None:
    """Show model metadata, without loading the weights."""
    metadata = _core.describe(_hub.resolve(model))
    config = json.loads(metadata.pop("config"))
    files = metadata.pop("files")
    stored = ", ".join(f"{elements:,} {kind}" for kind, elements in metadata.pop("storage"))
    lines: dict[str, object] = {
        "architecture": ", ".join(config.get("architectures") or ["unknown"]),
        "format": metadata["format"],
        "files": "\n".join(str(file) for file in files),
        "size": f"{metadata['bytes']:,} bytes in {metadata['tensors']:,} tensors",
        "elements": stored,
        "context": f"{config.get('max_position_embeddings', 'unknown')} tokens",
        "vocabulary": f"{config.get('vocab_size', 'unknown')} tokens",
        "tokenizer": "yes" if metadata["has_tokenizer"] else "no",
        "chat template": "yes" if metadata["has_chat_template"] else "no",
    }
    for name, value in lines.items():
        click.echo(f"{name:14} {value}".replace("\n", "\n" + " " * 15))


@main.command("bench")
@click.argument("model")
@_engine_options
def _bench(model: str, **options: Any) -> None:
    """Benchmark MODEL. Prints tokens per second of a 512-token prefill, and of decode batches 1, 8 and 32."""
    with _open(model, options) as engine:
        info = engine.info
        click.echo(f"{info.architecture}, {info.dtype}, {info.threads} threads, {info.isa}")
        length = min(BENCH_PROMPT, info.max_model_len - 1)
        _run_together(engine, 1, length, 1)  # warm-up
        [first] = _run_together(engine, 1, length, 1)
        assert first.timings.first_token is not None  # noqa: S101 - one token was generated
        click.echo(f"prefill, {length} tokens: {length / first.timings.first_token:10.1f} tokens/s")
        output = min(BENCH_OUTPUT, info.max_model_len - 1)
        for batch in BENCH_BATCHES:
            if batch <= info.max_num_seqs:
                results = _run_together(engine, batch, 1, output)
                seconds = max(result.timings.total for result in results)
                click.echo(f"decode, batch {batch}: {batch * output / seconds:10.1f} tokens/s")


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
