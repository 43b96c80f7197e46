"""The names of DashInfer's extension module, from which programs import enumerations and results."""

from penstock.compat.dashinfer.allspark.enums import (
    AsCacheMode,
    AsEvictionStrategy,
    AsMHAPrefill,
    AsSchedulingStrategy,
    AsStatus,
    GenerateRequestStatus,
    VocabType,
)
from penstock.compat.dashinfer.allspark.model_files import AsFileInfo
from penstock.compat.dashinfer.allspark.multimedia import MultiMediaInfo
from penstock.compat.dashinfer.allspark.result_queue import GeneratedElements, ResultQueue
from penstock.compat.dashinfer.allspark.runtime_config import AsModelConfig
from penstock.compat.dashinfer.allspark.statistics import AsEngineStat

__all__ = [
    "AsCacheMode",
    "AsEngineStat",
    "AsEvictionStrategy",
    "AsFileInfo",
    "AsMHAPrefill",
    "AsModelConfig",
    "AsSchedulingStrategy",
    "AsStatus",
    "GenerateRequestStatus",
    "GeneratedElements",
    "MultiMediaInfo",
    "ResultQueue",
    "VocabType",
]
