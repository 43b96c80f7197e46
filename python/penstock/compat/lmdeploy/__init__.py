"""LMDeploy's Python API on Penstock: `from penstock.compat import lmdeploy`."""

from penstock.compat.lmdeploy import messages, model, pytorch, serve, turbomind, utils, vl
from penstock.compat.lmdeploy.api import pipeline
from penstock.compat.lmdeploy.errors import not_provided
from penstock.compat.lmdeploy.messages import (
    EngineGenerationConfig,
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
    "EngineGenerationConfig",
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
    "utils",
    "version_info",
    "vl",
]

__getattr__ = not_provided(
    "lmdeploy",
    {
        "client": "use a client of OpenAI's API; `penstock serve MODEL` is the server",
        "lite": "models are quantised when they are loaded: penstock.Engine(quantization=...)",
    },
)
