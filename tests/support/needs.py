"""The plugin of pytest for what tests need of the system, of the installation and of the checkout.

`@pytest.mark.needs("proc", "fork")` skips a test where one of its needs is missing, with a reason that
names it; `--without fork` treats a need as missing. `NEEDS` has all needs, `FILES` those of whole files.
The sign of a need is a pattern of the source of tests that have it; `tests/docs/test_needs.py` compares it
with the marks.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import socket
import sys
import tempfile
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.paths import ROOT, TESTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

#: PENSTOCK_TEST_GPU=1: programs of the tests run on the first device of the system's driver.
ON_GPU = os.environ.get("PENSTOCK_TEST_GPU") == "1"


def has_hooks() -> bool:
    from penstock import _core

    return "_testing" in vars(_core)


def has_compiler() -> bool:
    """In CI, the tests fail without it, and are not skipped."""
    is_found = shutil.which(os.environ.get("CXX", "g++")) is not None
    return sys.platform == "linux" and (is_found or "CI" in os.environ)


def has_device() -> bool:
    return ON_GPU or is_here("emulator")


def has_module(*names: str) -> Callable[[], bool]:
    return lambda: all(importlib.util.find_spec(name) is not None for name in names)


def can_link() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        try:
            Path(folder, "link").symlink_to("target")
        except OSError:  # Windows asks for a privilege
            return False
    return True


@dataclass(frozen=True)
class Need:
    """Something that a test needs: in words, whether it is here, and its sign."""

    description: str
    is_here: Callable[[], bool]
    sign: str


NEEDS = {
    "proc": Need(
        "the files of /proc",
        Path("/proc/self/stat").exists,
        r"/proc/|/sys/devices|\bsched_getaffinity\b|\bprctl\b",
    ),
    "devices": Need("the files of /dev", Path("/dev/full").exists, r"/dev/(full|null|zero)"),
    "fork": Need("os.fork", lambda: hasattr(os, "fork"), r"\bos\.fork\b"),
    "signals": Need(
        "signals to a process, as POSIX has them",
        lambda: os.name == "posix",
        r"\bsend_signal\(|\bos\.kill\(|\bkillpg\b|\braise_signal\b|\bsetitimer\b|\bSIGKILL\b",
    ),
    "unix_sockets": Need(
        "Unix sockets", lambda: hasattr(socket, "AF_UNIX"), r"\bsocket\.AF_UNIX\b|--uds\b|\bAddress\(uds="
    ),
    "terminal": Need("a pseudo-terminal", has_module("pty"), r"\bpty\.|\bimport pty\b"),
    "symlinks": Need("symbolic links", can_link, r"\.symlink_to\(|\bos\.symlink\b"),
    "named_pipes": Need("os.mkfifo", lambda: hasattr(os, "mkfifo"), r"\bmkfifo\b"),
    "permissions": Need(
        "owners and permissions of files, as POSIX has them",
        lambda: hasattr(os, "geteuid"),
        r"\.chmod\(|\bos\.gete?uid\b",
    ),
    "refusals": Need(
        "a user whom permissions of files can refuse them, not root",
        lambda: getattr(os, "geteuid", lambda: 0)() != 0,
        r"\.chmod\(0\)",
    ),
    "resource": Need(
        "the module `resource`", has_module("resource"), r"\bimport resource\b|\bresource\.(g|s)etrlimit\b"
    ),
    "fcntl": Need("the module `fcntl`", has_module("fcntl"), r"\bfcntl\.|\bimport fcntl\b"),
    "memory_limit": Need(
        "a limit on the memory of a process",
        lambda: sys.platform == "linux",
        r"\brequest_templates=True\b|--request-templates\b|\bRLIMIT_AS\b",
    ),
    "runtime": Need("the runtime of AIBrix, which is for Linux", lambda: sys.platform == "linux", r"(?!)"),
    "hooks": Need(
        "the test hooks of the extension module, which wheels do not have",
        has_hooks,
        r"\"_testing\"|\bhooks\.\w",
    ),
    "sources": Need(
        "the sources of the project",
        (ROOT / "Cargo.toml").exists,
        r"(?<!build\.)\bROOT\b|\bfrom support.tools\b",
    ),
    "emulator": Need(
        "the emulated CUDA driver, which g++ compiles", lambda: not ON_GPU and has_compiler(), r"(?!)"
    ),
    "cuda": Need(
        "a CUDA device: an emulated one, or with PENSTOCK_TEST_GPU=1 that of the system",
        has_device,
        r"(?!)",
    ),
    "server": Need(
        "the packages of the extra `server`",
        has_module("starlette", "uvicorn", "msgspec", "prometheus_client"),
        r"(?!)",
    ),
    "uvloop": Need("uvloop", has_module("uvloop"), r"\bimport uvloop\b"),
}

#: The needs of all tests of some files. Such a file is not even imported where one is missing.
FILES = {
    "docs/*": ["sources"],
    "emu/*": ["emulator", "sources"],
    "kernels/test_gpu_*": ["sources"],
    "kernels/test_kernels_*": ["cuda", "hooks", "sources"],
    "cuda/test_cuda_engine_*": ["cuda", "sources", "hooks"],
    "server/*": ["server"],
    "runtime/*": ["runtime", "proc", "devices", "fork", "signals", "symlinks", "named_pipes", "permissions"],
}

_without: set[str] = set()


@functools.cache
def is_here(name: str) -> bool:
    """Whether a need is met; it is looked for once, by the first test that has it."""
    return name not in _without and NEEDS[name].is_here()


def reason_of(names: Iterable[str]) -> str:
    """The first missing need in words; an empty text if all are met."""
    return next((f"needs {name}: {NEEDS[name].description}" for name in names if not is_here(name)), "")


@functools.cache
def needs_of_file(path: Path) -> list[str]:
    """The needs of all tests of a file."""
    name = path.relative_to(TESTS).as_posix() if path.is_relative_to(TESTS) else ""
    return [need for pattern, found in FILES.items() if fnmatchcase(name, pattern) for need in found]


def needs_of(item: pytest.Item) -> Iterator[str]:
    """The needs of a test, of its parameters and of its file."""
    yield from needs_of_file(item.path)
    for mark in item.iter_markers("needs"):
        yield from mark.args


class MissingFile(pytest.Module):
    """A file of tests whose needs are not met."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        """Skip all of it."""
        pytest.skip(reason_of(needs_of_file(self.path)), allow_module_level=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    """The needs that are treated as missing."""
    parser.addoption(
        "--without",
        action="append",
        default=[],
        choices=sorted(NEEDS),
        metavar="NEED",
        help="skip the tests that need this: " + ", ".join(sorted(NEEDS)),
    )


def pytest_configure(config: pytest.Config) -> None:
    """Note what is treated as missing."""
    _without.update(config.getoption("--without"))
    is_here.cache_clear()


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Skip a file whose needs are not met."""
    if reason_of(needs_of_file(module_path)):
        module: pytest.Module = MissingFile.from_parent(parent, path=module_path)
        return module
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Check the names of needs."""
    unknown = {(name, item.nodeid) for item in items for name in needs_of(item) if name not in NEEDS}
    if unknown:
        raise pytest.UsageError(f"unknown needs: {sorted(unknown)}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose needs are not met, before its fixtures."""
    if reason := reason_of(needs_of(item)):
        pytest.skip(reason)
