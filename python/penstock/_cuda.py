"""`cuda_info`: the NVIDIA driver, its devices, and the compiler of CUDA kernels."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from penstock import _core

__all__ = ["cuda_info", "nvrtc_folders"]

#: The folders of the packages `nvidia-cuda-nvrtc` and `nvidia-cuda-nvrtc-cu12` in the package `nvidia`.
_FOLDERS = ("cu13/lib", "cuda_nvrtc/lib")


def nvrtc_folders() -> list[Path]:
    """The folders where Python packages install the compiler; they may not exist."""
    nvidia = find_spec("nvidia")
    locations = nvidia.submodule_search_locations if nvidia is not None else None
    return [Path(location) / folder for location in locations or () for folder in _FOLDERS]


def cuda_info() -> _core.CudaInfo:
    """Describe CUDA: the driver, the devices and the compiler of kernels, or the reasons why there is none.

    Loads the driver and creates a context on each device for a moment, which can take seconds. Children that
    the process forks afterwards cannot use CUDA.
    """
    return _core.cuda_info(nvrtc_folders())
