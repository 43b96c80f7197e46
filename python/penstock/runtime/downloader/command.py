"""`penstock download`, which is also `aibrix_download` and `python -m aibrix.downloader`.

The path of the model alone goes to standard output; progress, log records and errors go to standard error.
Exit status: 0 on success, 1 on an error, 2 on invalid usage, 130 after Ctrl-C.
"""

from __future__ import annotations

import json
import logging
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import click

from penstock._install import missing_extra

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

__all__ = ["download"]

INTERRUPTED = 130


class _InvalidUsage(click.ClickException):
    exit_code = 2


def _json_object(_context: click.Context, _option: click.Parameter, text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):  # the text can have credentials
        raise click.BadParameter("a JSON object is expected")
    return found


def _records_above_bar(logger: logging.Logger) -> AbstractContextManager[None]:
    """Print the records of a logger above the progress bar, which is the last line."""
    from tqdm.contrib.logging import logging_redirect_tqdm

    return logging_redirect_tqdm([logger])


@click.command("download")
@click.option(
    "--model-uri",
    default="deepseek-ai/deepseek-coder-6.7b-instruct",
    show_default=True,
    help="org/name of the hub, huggingface://, hf://, s3://, tos://, http(s)://, file:// or a path.",
)
@click.option(
    "--local-dir",
    type=click.Path(file_okay=False),
    help="Directory of models. Default: DOWNLOADER_LOCAL_DIR.",
)
@click.option(
    "--model-name",
    help="Directory of the model in it. Default: org/name of the hub, else the last part of the URI.",
)
@click.option("--enable-progress-bar", is_flag=True, help="Show the progress.")
@click.option(
    "--allow-pattern", "allow_patterns", multiple=True, help="Download only matching files; repeatable."
)
@click.option(
    "--ignore-pattern", "ignore_patterns", multiple=True, help="Leave matching files out; repeatable."
)
@click.option(
    "--download-extra-config",
    callback=_json_object,
    metavar="JSON",
    help='Options that override environment variables, such as {"num_threads": 16}.',
)
@click.option(
    "--log-level",
    default="info",
    show_default=True,
    type=click.Choice(["debug", "info", "warning", "error"]),
    help="Least level of log records.",
)
def download(
    model_uri: str,
    local_dir: str | None,
    model_name: str | None,
    allow_patterns: Sequence[str],
    ignore_patterns: Sequence[str],
    **options: Any,
) -> None:
    """Download a model, and print its path.

    An interrupted download resumes. Environment variables set the options: DOWNLOADER_NUM_THREADS,
    DOWNLOADER_ALLOW_FILE_SUFFIX, HF_TOKEN, AWS_ACCESS_KEY_ID and others; docs/downloader.md lists them.
    """
    try:
        import urllib3  # noqa: F401 - is the extra installed?

        from penstock.runtime.downloader.errors import DownloadError, InvalidArgumentError
        from penstock.runtime.downloader.model import download_model
    except ModuleNotFoundError as error:
        message = missing_extra("the downloader", error.name, "runtime")
        raise click.ClickException(message) from error
    # Only Penstock's records: those of libraries can have signed URLs.
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("penstock.runtime")
    logger.handlers[:] = [handler]
    logger.setLevel(options["log_level"].upper())
    patterns = {"allow_patterns": allow_patterns, "ignore_patterns": ignore_patterns}
    extra = {name: value for name, value in patterns.items() if value} | options["download_extra_config"]
    try:
        with _records_above_bar(logger) if options["enable_progress_bar"] else nullcontext():
            path = download_model(model_uri, local_dir, model_name, extra, options["enable_progress_bar"])
    except InvalidArgumentError as error:
        raise _InvalidUsage(str(error)) from error
    except DownloadError as error:
        raise click.ClickException(str(error)) from error
    except Exception as error:  # noqa: BLE001 - messages of libraries can have credentials
        raise click.ClickException(f"the download failed: {type(error).__name__}") from None
    except KeyboardInterrupt:
        click.echo(err=True)
        sys.exit(INTERRUPTED)
    click.echo(path)
