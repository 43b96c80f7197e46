"""`lmdeploy.turbomind`: the earlier configuration of the TurboMind engine."""

from penstock.compat.lmdeploy.engine_configs import EarlyTurbomindConfig as EngineConfig
from penstock.compat.lmdeploy.errors import not_provided

__all__ = ["EngineConfig"]

__getattr__ = not_provided(
    "lmdeploy.turbomind",
    dict.fromkeys(
        ("TurboMind", "TurboMindInstance", "update_parallel_config"),
        "use lmdeploy.pipeline, or its get_generator for token ids",
    ),
)
