"""The engine, the loaders and the configuration of DashInfer's API.

- `Engine` runs models; `ResultQueue` and `GeneratedElements` are the output of a request.
- `HuggingFaceModel`, `ModelScope` and `DashInferModel` read models.
- `AsModelRuntimeConfigBuilder` configures a model, `ASGenerationConfigBuilder` a request.
"""

from penstock.compat.dashinfer.allspark import _allspark as _allspark
from penstock.compat.dashinfer.allspark import engine, model_loader, prompt_utils
from penstock.compat.dashinfer.allspark.engine import Engine
from penstock.compat.dashinfer.allspark.enums import (
    AsCacheMode,
    AsEvictionStrategy,
    AsMHAPrefill,
    AsSchedulingStrategy,
    AsStatus,
    GenerateRequestStatus,
    RoPEScaleMethod,
    TargetDevice,
    VocabType,
)
from penstock.compat.dashinfer.allspark.errors import AsError
from penstock.compat.dashinfer.allspark.generation_config import ASGenerationConfigBuilder
from penstock.compat.dashinfer.allspark.model_files import AsFileInfo
from penstock.compat.dashinfer.allspark.model_loader import (
    LLM,
    DashInferModel,
    HuggingFaceModel,
    ModelScope,
    ModelSerializerException,
)
from penstock.compat.dashinfer.allspark.multimedia import MultiMediaInfo
from penstock.compat.dashinfer.allspark.prompt_utils import PromptTemplate
from penstock.compat.dashinfer.allspark.quantization import (
    QUANT_CONFIG_MAP,
    GPTQSettings,
    IQSettings,
    QuantizationSettings,
    get_quant_settings_cls,
)
from penstock.compat.dashinfer.allspark.result_queue import GeneratedElements, ResultQueue
from penstock.compat.dashinfer.allspark.runtime_config import (
    AsModelConfig,
    AsModelRuntimeConfigBuilder,
    RuntimeConfig,
)
from penstock.compat.dashinfer.allspark.statistics import AsEngineStat, RequestStatInfo

__all__ = [
    "LLM",
    "QUANT_CONFIG_MAP",
    "ASGenerationConfigBuilder",
    "AsCacheMode",
    "AsEngineStat",
    "AsError",
    "AsEvictionStrategy",
    "AsFileInfo",
    "AsMHAPrefill",
    "AsModelConfig",
    "AsModelRuntimeConfigBuilder",
    "AsSchedulingStrategy",
    "AsStatus",
    "DashInferModel",
    "Engine",
    "GPTQSettings",
    "GenerateRequestStatus",
    "GeneratedElements",
    "HuggingFaceModel",
    "IQSettings",
    "ModelScope",
    "ModelSerializerException",
    "MultiMediaInfo",
    "PromptTemplate",
    "QuantizationSettings",
    "RequestStatInfo",
    "ResultQueue",
    "RoPEScaleMethod",
    "RuntimeConfig",
    "TargetDevice",
    "VocabType",
    "engine",
    "get_quant_settings_cls",
    "model_loader",
    "prompt_utils",
]
