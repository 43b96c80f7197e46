"""`pipeline`: opens a model."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Literal

from penstock.compat.lmdeploy.checks import refuse
from penstock.compat.lmdeploy.pipeline import Pipeline

if TYPE_CHECKING:
    import os

    from penstock.compat.lmdeploy.engine_configs import AnyEngineConfig
    from penstock.compat.lmdeploy.model import ChatTemplateConfig

__all__ = ["pipeline"]

_LEVELS = {
    "CRITICAL": logging.CRITICAL,
    "FATAL": logging.CRITICAL,
    "ERROR": logging.ERROR,
    "WARNING": logging.WARNING,
    "WARN": logging.WARNING,
    "INFO": logging.INFO,
    "DEBUG": logging.DEBUG,
    "TRACE": logging.DEBUG,
}


def pipeline(
    model_path: str | os.PathLike[str],
    *args: Any,
    model_name: str | None = None,
    backend: Literal["turbomind", "pytorch"] | None = None,
    backend_config: AnyEngineConfig | None = None,
    chat_template_config: ChatTemplateConfig | None = None,
    instance_num: int | None = None,
    tp: int | None = None,
    log_level: str | int | None = None,
    **kwargs: Any,
) -> Pipeline:
    """Open a model.

        pipe = pipeline("internlm/internlm-chat-7b")
        print(pipe(["Hi", "Say this is a test"]))

    `model_path` is a model as `penstock.Engine` takes it: a directory, a `.gguf` file, or the id of a model
    on the Hugging Face hub. Positional arguments after it are those of LMDeploy's first pipeline
    (`model_name`, `backend`, `backend_config`) or of its present one (`backend_config`,
    `chat_template_config`). Other keywords are fields of the configuration, as in `session_len=4096`.

    `log_level` is that of the Python logger `penstock`. Raises `ArgumentError` for a value that is refused,
    and what `penstock.Engine` raises.
    """
    names = _EARLY_ORDER if args and (args[0] is None or isinstance(args[0], str)) else _PRESENT_ORDER
    if len(args) > len(names):
        message = f"pipeline() takes at most {len(names) + 1} positional arguments"
        raise TypeError(message)
    given: dict[str, Any] = {
        "model_name": model_name,
        "backend": backend,
        "backend_config": backend_config,
        "chat_template_config": chat_template_config,
        "instance_num": instance_num,
        "tp": tp,
        "log_level": log_level,
    }
    for name, value in zip(names, args, strict=False):
        if given[name] is not None:
            message = f"pipeline() got multiple values for argument {name!r}"
            raise TypeError(message)
        given[name] = value
    level = given.pop("log_level")
    if level is not None:
        _set_level(level)
    return Pipeline(model_path, **given, **kwargs)


_EARLY_ORDER = (
    "model_name",
    "backend",
    "backend_config",
    "chat_template_config",
    "instance_num",
    "tp",
    "log_level",
)
_PRESENT_ORDER = ("backend_config", "chat_template_config", "log_level")


def _set_level(level: object) -> None:
    number = _LEVELS.get(level.upper()) if isinstance(level, str) else level
    if isinstance(number, bool) or not isinstance(number, int):
        refuse("log_level", level, f"one of {', '.join(_LEVELS)}")
    logging.getLogger("penstock").setLevel(number)
