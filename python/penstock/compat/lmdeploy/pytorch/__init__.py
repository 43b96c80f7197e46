"""`lmdeploy.pytorch`: the earlier configuration of the PyTorch engine."""

from penstock.compat.lmdeploy.engine_configs import EarlyPytorchConfig as EngineConfig

__all__ = ["EngineConfig"]
