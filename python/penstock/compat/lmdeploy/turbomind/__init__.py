"""`lmdeploy.turbomind`: the earlier configuration of the TurboMind engine."""

from penstock.compat.lmdeploy.engine_configs import EarlyTurbomindConfig as EngineConfig

__all__ = ["EngineConfig"]
