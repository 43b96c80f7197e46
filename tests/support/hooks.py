"""Test hooks of the extension module: `penstock._core._testing`, which wheels do not have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock import _core
from penstock._cuda import cuda_folders

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    import penstock

#: Tests that use it have the mark `needs("hooks")`.
_hooks: Any = vars(_core).get("_testing")


def logits(
    path: str | os.PathLike[str],
    token_ids: Sequence[int],
    *,
    dtype: str = "float32",
    quantization: str | Mapping[str, Any] = "none",
    kv_cache_dtype: str = "auto",
    threads: int = 1,
    chunk: int = 512,
) -> bytes:
    """Logits after each token, little-endian float32 of shape `[tokens, vocabulary]`."""
    options = {
        "dtype": dtype,
        "quantization": quantization,
        "kv_cache_dtype": kv_cache_dtype,
        "threads": threads,
        "chunk": chunk,
    }
    result: bytes = _hooks.logits(path, token_ids, **options)
    return result


def probabilities(
    logits: bytes,
    params: penstock.SamplingParams,
    *,
    prompt: Sequence[int],
    generated: Sequence[int] = (),
    mask: Sequence[int] | None = None,
) -> bytes:
    """Probabilities of the next token, 0 for filtered ids.

    Logits and probabilities are little-endian float32. Each word of `mask` covers 32 ids.
    """
    result: bytes = _hooks.probabilities(logits, params, prompt=prompt, generated=generated, mask=mask)
    return result


def failing_engine(
    path: str | os.PathLike[str],
    config: penstock.EngineConfig,
    failing_token: int | None = None,
    *,
    failing_position: int | None = None,
    refused_details: int | None = None,
) -> _core.Engine:
    """An engine in which every step that computes `failing_token`, or `failing_position`, fails.

    A device that returns tokens late may compute a generated token before the host knows it. Memory for the
    details of a row is refused from `refused_details` values on.
    """
    arguments = failing_token, failing_position, refused_details, cuda_folders()
    engine: _core.Engine = _hooks.failing_engine(path, config, *arguments)
    return engine


def losing_engine(
    path: str | os.PathLike[str], config: penstock.EngineConfig, losing_token: int
) -> _core.Engine:
    """An engine whose device is lost in the first step that computes `losing_token`."""
    engine: _core.Engine = _hooks.losing_engine(path, config, losing_token)
    return engine


def fake_engine(path: str | os.PathLike[str], config: penstock.EngineConfig) -> _core.Engine:
    """An engine with an executor that does not compute but returns tokens and outputs by simple rules."""
    engine: _core.Engine = _hooks.fake_engine(path, config)
    return engine


def log_records(level: str, count: int) -> None:
    """Log `count` records on a thread that is not attached to the interpreter."""
    _hooks.log_records(level, count)


def tensor(path: str | os.PathLike[str], name: str) -> bytes:
    """A dequantised tensor by its Hugging Face name, little-endian float32; its codes have these values."""
    result: bytes = _hooks.tensor(path, name)
    return result


def cuda_kernels() -> list[str]:
    """The names of the CUDA kernels' files."""
    names: list[str] = _hooks.cuda_kernels(cuda_folders())
    return names


def cuda_compile_options() -> list[str]:
    """The options of the compiler of CUDA kernels, besides the architecture."""
    options: list[str] = _hooks.cuda_compile_options()
    return options


def compile_cuda_kernel(name: str, architecture: str) -> bytes:
    """The image of a CUDA kernel's file for an architecture, by the compiler that the engine finds."""
    image: bytes = _hooks.compile_cuda_kernel(cuda_folders(), name, architecture)
    return image


def archive_cuda_kernel(name: str, variant: str, architecture: str) -> None:
    """Compile a CUDA kernel's file for an architecture, and add the image to ``PENSTOCK_KERNEL_ARCHIVE``."""
    _hooks.archive_cuda_kernel(cuda_folders(), name, variant, architecture)


def cuda_rms_norm(x: Sequence[float], weight: Sequence[float]) -> list[float]:
    """The norms of the rows of `x` by a kernel on the first CUDA device; each kind of object is used once."""
    result: list[float] = _hooks.cuda_rms_norm(cuda_folders(), x, weight)
    return result


def cuda_program(name: str) -> None:
    """Run a program of the CUDA crate on the first device."""
    _hooks.cuda_program(cuda_folders(), name)
