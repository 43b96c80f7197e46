"""Fixtures of all tests: event loops, levels of loggers, and models."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import pytest

from penstock.demo import model_path
from penstock.errors import ModelLoadError
from support.api.checkpoints import make_config, write_checkpoint
from support.marks import ASYNCIO

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Engines, also those of child processes, check all their parts against each other whenever they are idle.
os.environ.setdefault("PENSTOCK_CHECK_INTEGRITY", "1")
pytest_plugins = ["support.needs", "support.selection", "support.parity.modes"]


@pytest.fixture(
    params=[
        pytest.param(ASYNCIO, id="asyncio"),
        pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop", marks=pytest.mark.needs("uvloop")),
        pytest.param(("trio", {}), id="trio"),
    ]
)
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """Run a test marked `anyio` once on each event loop; in each gate, only those marked `loops`."""
    backend: tuple[str, dict[str, Any]] = request.param
    return backend


@pytest.fixture(autouse=True)
def levels_of_loggers() -> Iterator[None]:
    """Restore the levels that a command has set: records of later tests do not depend on their order."""
    loggers = [logging.getLogger(), logging.getLogger("penstock")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's GGUF file."""
    try:
        return model_path()
    except ModelLoadError as error:
        from support.kernels import cuda

        if cuda.ON_GPU:
            pytest.skip("needs the demo model")
        pytest.fail(f"{error}; `make test` and `make demo` do", pytrace=False)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama checkpoint of a few hundred kilobytes: 512 tokens, 512 positions, a byte tokenizer."""
    return write_checkpoint(tmp_path_factory.mktemp("tiny-llama"), make_config("llama"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """The lengths of the soak test and of the storm."""
    parser.addoption("--soak-waves", type=int, default=60, help="bursts of requests in the soak test")
    parser.addoption(
        "--storm-operations", type=int, default=200, help="operations of each thread in the storm"
    )
