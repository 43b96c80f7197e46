"""`cuda_info`: the NVIDIA driver, its devices, the compiler of CUDA kernels, and cuBLASLt."""

from __future__ import annotations

from pathlib import Path

from penstock import _core

__all__ = ["cuda_folders", "cuda_info"]

#: The packages of the compiler and of cuBLASLt, newest first, with the names of their libraries.
_PACKAGES = {
    "nvidia-cuda-nvrtc": "libnvrtc.so.",
    "nvidia-cuda-nvrtc-cu12": "libnvrtc.so.",
    "nvidia-cublas": "libcublasLt.so.",
    "nvidia-cublas-cu12": "libcublasLt.so.",
}


def cuda_folders() -> list[Path]:
    """The folders where Python packages have installed the compiler and cuBLASLt."""
    found = (folder for package, library in _PACKAGES.items() for folder in _folders(package, library))
    return list(dict.fromkeys(found))


def _folders(package: str, library: str) -> list[Path]:
    """The folder of a package's library. A relative path depends on the current directory and is left out."""
    from importlib import metadata  # slow to import

    try:
        files = metadata.files(package) or ()
    except metadata.PackageNotFoundError:
        return []
    libraries = [Path(file.locate()) for file in files if file.name.startswith(library)]
    return [path.parent for path in libraries if path.is_absolute()]


def cuda_info() -> _core.CudaInfo:
    """Describe CUDA: the driver, the devices, the compiler of kernels and cuBLASLt, or why there is none.

    Loads the driver and creates a context on each device for a moment, which can take seconds. Children that
    the process forks afterwards cannot use CUDA.
    """
    return _core.cuda_info(cuda_folders())
