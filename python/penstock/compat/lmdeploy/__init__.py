"""LMDeploy's Python API on Penstock: `from penstock.compat import lmdeploy`."""

from penstock.compat.lmdeploy import messages, model, pytorch, serve, turbomind
from penstock.compat.lmdeploy.api import pipeline
from penstock.compat.lmdeploy.messages import (
    GenerationConfig,
    PytorchEngineConfig,
    TurbomindEngineConfig,
    VisionConfig,
)
from penstock.compat.lmdeploy.model import ChatTemplateConfig
from penstock.compat.lmdeploy.pipeline import Pipeline
from penstock.compat.lmdeploy.tokenizer import Tokenizer
from penstock.compat.lmdeploy.version import __version__, version_info

__all__ = [
    "ChatTemplateConfig",
    "GenerationConfig",
    "Pipeline",
    "PytorchEngineConfig",
    "Tokenizer",
    "TurbomindEngineConfig",
    "VisionConfig",
    "__version__",
    "messages",
    "model",
    "pipeline",
    "pytorch",
    "serve",
    "turbomind",
    "version_info",
]
