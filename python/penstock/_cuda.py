"""`cuda_info`: the NVIDIA driver, its devices, and the compiler of CUDA kernels."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from penstock import _core

__all__ = ["cuda_info", "nvrtc_folders"]

#: The packages of the compiler, newest first.
_PACKAGES = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")


def nvrtc_folders() -> list[Path]:
    """The folders where Python packages have installed the compiler."""
    return [folder for package in _PACKAGES for folder in _folders(package)]


def _folders(package: str) -> list[Path]:
    """The folder of a package's library. A relative path depends on the current directory and is left out."""
    try:
        files = metadata.files(package) or ()
    except metadata.PackageNotFoundError:
        return []
    libraries = [Path(file.locate()) for file in files if file.name.startswith("libnvrtc.so.")]
    return list(dict.fromkeys(library.parent for library in libraries if library.is_absolute()))


def cuda_info() -> _core.CudaInfo:
    """Describe CUDA: the driver, the devices and the compiler of kernels, or the reasons why there is none.

    Loads the driver and creates a context on each device for a moment, which can take seconds. Children that
    the process forks afterwards cannot use CUDA.
    """
    return _core.cuda_info(nvrtc_folders())
