"""Options and fixtures of all tests: event loops, models, and where results of the oracle come from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from penstock.demo import model_path
from penstock.errors import ModelLoadError
from support.api.checkpoints import make_config, write_checkpoint
from support.parity import stored

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path


@pytest.fixture(
    params=[
        pytest.param(("asyncio", {"use_uvloop": False}), id="asyncio"),
        pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop"),
        pytest.param(("trio", {}), id="trio"),
    ]
)
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """Run a test marked `anyio` once on each event loop."""
    backend: tuple[str, dict[str, Any]] = request.param
    return backend


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's GGUF file."""
    try:
        return model_path()
    except ModelLoadError as error:
        from support.kernels import cuda

        if cuda.ON_GPU:
            pytest.skip("needs the demo model")
        pytest.fail(f"{error}; `make check` and `make test` do", pytrace=False)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama checkpoint of a few hundred kilobytes: 512 tokens, 512 positions, a byte tokenizer."""
    return write_checkpoint(tmp_path_factory.mktemp("tiny-llama"), make_config("llama"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """The lengths of the soak test and of the storm, and the results of the oracle."""
    parser.addoption("--soak-waves", type=int, default=60, help="bursts of requests in the soak test")
    parser.addoption(
        "--storm-operations", type=int, default=200, help="operations of each thread in the storm"
    )
    parser.addoption(
        "--oracle",
        choices=[mode.value for mode in stored.Mode],
        default=stored.Mode.STORED.value,
        help="read the results of torch and transformers, compute and compare them, or write them",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Choose where the results of the oracle come from."""
    mode = stored.Mode(config.getoption("--oracle"))
    if mode is stored.Mode.WRITE and (config.getoption("keyword") or any("::" in arg for arg in config.args)):
        raise pytest.UsageError("--oracle write replaces whole files: select files of tests, no single tests")
    stored.store().mode = mode


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that need torch, except in live runs."""
    if item.get_closest_marker("torch") and stored.store().mode is not stored.Mode.LIVE:
        pytest.skip("needs torch: pytest --oracle live")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """The results of each file of tests are in a file of their own."""
    stored.store().begin(item.path.stem)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Results beside a failed test are not written."""
    report = yield
    if report.failed:
        stored.store().fail(item.path.stem)
    return report


def pytest_sessionfinish() -> None:
    """Write new results of the oracle."""
    stored.store().save()
