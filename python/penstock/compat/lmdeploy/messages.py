"""`lmdeploy.messages`: configurations and results."""

import dataclasses

from penstock.compat.lmdeploy.engine_configs import PytorchEngineConfig, QuantPolicy, TurbomindEngineConfig
from penstock.compat.lmdeploy.generation_config import (
    EngineGenerationConfig,
    GenerationConfig,
    LogitsProcessor,
)
from penstock.compat.lmdeploy.instances import EngineOutput, ResponseType
from penstock.compat.lmdeploy.response import Response

__all__ = [
    "EngineGenerationConfig",
    "EngineOutput",
    "GenerationConfig",
    "LogitsProcessor",
    "PytorchEngineConfig",
    "QuantPolicy",
    "Response",
    "ResponseType",
    "SpeculativeConfig",
    "TurbomindEngineConfig",
    "VisionConfig",
]


@dataclasses.dataclass
class VisionConfig:
    """The configuration of a vision model. Pipelines refuse it: images are not supported yet."""

    max_batch_size: int = 1
    thread_safe: bool = False


@dataclasses.dataclass
class SpeculativeConfig:
    """The configuration of a draft model. Pipelines refuse it: draft models are not supported."""

    method: str
    model: str = ""
    num_speculative_tokens: int = 1
