"""The plugin of pytest that chooses where results of torch and transformers come from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.parity import stored

if TYPE_CHECKING:
    from collections.abc import Generator


def pytest_addoption(parser: pytest.Parser) -> None:
    """The results of the oracle."""
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
