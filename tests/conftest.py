"""Options and fixtures of all tests: event loops, models, and where results of the oracle come from."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest

from penstock.demo import model_path
from penstock.errors import ModelLoadError
from support import shares
from support.api.checkpoints import make_config, write_checkpoint
from support.parity import stored
from support.paths import TESTS

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from pathlib import Path


#: The event loop of tests whose subject is something else.
ASYNCIO = ("asyncio", {"use_uvloop": False})


@pytest.fixture(
    params=[
        pytest.param(ASYNCIO, id="asyncio"),
        pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop"),
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
    """The choice of tests, the lengths of the soak test and of the storm, and the results of the oracle."""
    parser.addoption("--own", action="store_true", help="run the tests of each gate: all but rare ones")
    parser.addoption(
        "--share", type=int, metavar="N", help="run the rare tests of share N, too if --own is given"
    )
    parser.addoption(
        "--whole",
        action="append",
        default=[],
        metavar="PATH",
        help="run all tests of a folder or file",
    )
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


def is_rare(item: pytest.Item) -> bool:
    """Whether a test is marked `rare`, or repeats one on an event loop, which is not its subject."""
    about_loops = item.get_closest_marker("loops") is not None or item.path.parent.name == "loops"
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    on_other_loop = parameters.get("anyio_backend", ASYNCIO) != ASYNCIO
    return item.get_closest_marker("rare") is not None or (on_other_loop and not about_loops)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select the tests of each gate and of a share. Long files come first, so that no process ends late."""
    own, share, whole = (config.getoption(name) for name in ("--own", "--share", "--whole"))
    selected: list[pytest.Item] = []
    deselected: list[pytest.Item] = []
    seconds: dict[pytest.Item, float] = {}
    for item in items:
        file = item.path.relative_to(TESTS).as_posix()
        seconds[item] = -shares.recorded("own").get(file, 0.0)
        chosen = own or share is None
        if is_rare(item):
            unit = shares.unit_of(file, getattr(item, "originalname", item.name))
            item.user_properties.append(("rare", unit))  # for the record of the seconds
            chosen = shares.share_of(unit) == share if share is not None else not own
            chosen = chosen or file in whole or file.partition("/")[0] in whole
        (selected if chosen else deselected).append(item)
    if own:
        selected.sort(key=seconds.__getitem__)
    if deselected:
        config.hook.pytest_deselected(items=deselected)
    items[:] = selected


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
