"""`lmdeploy.pytorch`: the earlier configuration of the PyTorch engine."""

from penstock.compat.lmdeploy.engine_configs import EarlyPytorchConfig as EngineConfig
from penstock.compat.lmdeploy.errors import not_provided

__all__ = ["EngineConfig"]

__getattr__ = not_provided(
    "lmdeploy.pytorch",
    dict.fromkeys(("engine",), "use lmdeploy.pipeline, or its get_generator for token ids"),
)
