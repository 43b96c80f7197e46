"""`resolve`: the options of `penstock.Engine` for the arguments of a pipeline."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.compat.lmdeploy.checks import refuse
from penstock.compat.lmdeploy.engine_configs import (
    AnyEngineConfig,
    EarlyPytorchConfig,
    EarlyTurbomindConfig,
    PytorchEngineConfig,
    TurbomindEngineConfig,
)

if TYPE_CHECKING:
    from penstock import EngineOptions

__all__ = ["Resolved", "Settings", "resolve"]

_BACKENDS = ("turbomind", "pytorch")
_DEFAULT_INSTANCES = 32


@dataclasses.dataclass(frozen=True)
class Settings:
    """The arguments that concern the pipeline itself, not the engine.

    - `config`: the engine's configuration.
    - `returns_text`: calls return text instead of `Response` objects, as LMDeploy did first.
    - `max_concurrency`: the largest number of requests of one call that run at once; `None` for the
      engine's `max_num_seqs`.
    - `enable_prefix_caching`: requests without a session share cached blocks.
    - `model_name`: the name of a chat template, or `None`.
    """

    config: AnyEngineConfig
    returns_text: bool
    max_concurrency: int | None
    enable_prefix_caching: bool
    model_name: str | None


class Resolved(NamedTuple):
    """The arguments of `penstock.Engine`, and the settings of the pipeline."""

    model: str
    options: EngineOptions
    settings: Settings


def resolve(
    model_path: str | os.PathLike[str],
    backend: str | None = None,
    backend_config: AnyEngineConfig | None = None,
    *,
    model_name: str | None = None,
    instance_num: int | None = None,
    tp: int | None = None,
    **arguments: Any,
) -> Resolved:
    """The options of `penstock.Engine` for the arguments of a pipeline; `None` for one that is not given.

    The class of `backend_config` selects the fields, `backend` only the default. Other arguments are fields
    of the configuration, as in `session_len=4096`. Raises `ArgumentError` for a value that is not supported,
    `TypeError` for an unknown argument.
    """
    if backend is not None and backend not in _BACKENDS:
        refuse("backend", backend, "'turbomind' or 'pytorch'")
    if backend_config is None:
        backend_config = PytorchEngineConfig() if backend == "pytorch" else TurbomindEngineConfig()
    is_early = isinstance(backend_config, (EarlyPytorchConfig, EarlyTurbomindConfig))
    options: EngineOptions = {}
    if backend_config.session_len is not None:
        options["max_model_len"] = backend_config.session_len
    if backend_config.max_batch_size is not None:
        options["max_num_seqs"] = backend_config.max_batch_size
    settings = Settings(
        config=backend_config,
        returns_text=is_early or backend is not None or instance_num is not None or tp is not None,
        max_concurrency=instance_num,
        enable_prefix_caching=getattr(backend_config, "enable_prefix_caching", False),
        model_name=model_name or getattr(backend_config, "model_name", None) or None,
    )
    return Resolved(os.fspath(model_path), options, settings)
