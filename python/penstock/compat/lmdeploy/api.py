"""`pipeline`: opens a model."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Literal

from penstock.compat.lmdeploy.checks import place, refuse
from penstock.compat.lmdeploy.engine_configs import AnyEngineConfig
from penstock.compat.lmdeploy.model import ChatTemplateConfig
from penstock.compat.lmdeploy.pipeline import Pipeline

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

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
    (`model_name`, `backend`, `backend_config`), of later ones (`model_name`, `backend_config`,
    `chat_template_config`) or of its present one (`backend_config`, `chat_template_config`); their types
    select the order. Other keywords are fields of the configuration, as in `session_len=4096`.

    `log_level` is that of the Python logger `penstock`. Raises `ArgumentError` for a value that is refused,
    and what `penstock.Engine` raises.
    """
    given: dict[str, Any] = {
        "model_name": model_name,
        "backend": backend,
        "backend_config": backend_config,
        "chat_template_config": chat_template_config,
        "instance_num": instance_num,
        "tp": tp,
        "log_level": log_level,
    }
    place("pipeline", args, _order_of(args), given)
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
_MIDDLE_ORDER = ("model_name", "backend_config", "chat_template_config", "log_level")
_PRESENT_ORDER = ("backend_config", "chat_template_config", "log_level")


def _order_of(args: Sequence[Any]) -> Sequence[str]:
    """The names of positional arguments, by the types of their values."""
    if _fits_present(args) or not isinstance(next(iter(args), None), str | None):
        return _PRESENT_ORDER
    return _MIDDLE_ORDER if _fits_present(args[1:]) else _EARLY_ORDER


def _fits_present(args: Sequence[Any]) -> bool:
    """Whether a value is where the present order has one of its type."""
    kinds = (AnyEngineConfig, ChatTemplateConfig, str | int)
    return any(isinstance(value, kind) for value, kind in zip(args, kinds, strict=False))


def _set_level(level: object) -> None:
    number = _LEVELS.get(level.upper()) if isinstance(level, str) else level
    if isinstance(number, bool) or not isinstance(number, int):
        refuse("log_level", level, f"one of {', '.join(_LEVELS)}")
    logging.getLogger("penstock").setLevel(number)
