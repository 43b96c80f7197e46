"""The plugin of pytest that selects tests: those of each gate, and those of a share."""

from __future__ import annotations

import pytest

from support import shares
from support.marks import ASYNCIO
from support.paths import TESTS


def pytest_addoption(parser: pytest.Parser) -> None:
    """The choice of tests."""
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
