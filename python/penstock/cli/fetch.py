"""`penstock download`: a model by its name on the hub, or by a URI."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from penstock import _hub
from penstock.cli.download import confirm_download, yes_option
from penstock.cli.options import Command
from penstock.runtime.downloader.command import download as download_uri

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["download"]


def _uri_options() -> Iterator[click.Parameter]:
    """The options of the downloader; without its default model, because a name can be given instead."""
    for option in map(copy.copy, download_uri.params):
        if isinstance(option, click.Option) and option.name == "model_uri":
            option.default, option.show_default = None, False
        yield option


@click.command("download", cls=Command, params=[*_uri_options()])
@click.argument("model", required=False)
@yes_option
@click.pass_context
def download(ctx: click.Context, /, model: str | None, *, assume_yes: bool, **options: Any) -> None:
    """Download MODEL, or the model of a URI, and print its path.

    MODEL is a name of the Hugging Face hub, as in the other commands, which find it in the cache of the hub.
    --model-uri copies a model to a directory. All options but --yes belong to it, as do the environment
    variables DOWNLOADER_NUM_THREADS, AWS_ACCESS_KEY_ID and others that docs/downloader.md lists.

    An interrupted download resumes.
    """
    if model is None:
        if options["model_uri"] is None:
            raise click.UsageError("Missing argument 'MODEL', or --model-uri")
        ctx.invoke(download_uri, **options)
        return
    for option in download_uri.params:
        if ctx.get_parameter_source(str(option.name)) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{option.opts[0]} excludes MODEL; give --model-uri in place of MODEL")
    if "://" in model:
        raise click.UsageError(f"{model}: MODEL is no URI; give --model-uri {model}")
    click.echo(_hub.find(confirm_download(model, {"assume_yes": assume_yes}, is_loaded=False)))
