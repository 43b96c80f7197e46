"""Modules of a crate do not use each other in circles."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import pytest

from support.crates import Crate, paths_of
from support.paths import ROOT

CRATES = sorted(manifest.parent.name for manifest in ROOT.glob("rust/*/Cargo.toml"))


def circle_of(name: str) -> list[str]:
    """The modules of a circle, if there is one."""
    try:
        TopologicalSorter(Crate(name).graph()).prepare()
    except CycleError as error:
        return ["::".join(module) for module in error.args[1]]
    return []


@pytest.mark.parametrize("name", CRATES)
def test_modules_of_a_crate_have_no_circle(name: str) -> None:
    assert circle_of(name) == []


def test_uses_are_read_as_trees() -> None:
    found = set(paths_of("crate::{a::{self, B as C}, d}"))
    assert found == {("crate", "a", "self"), ("crate", "a", "B"), ("crate", "d")}


def test_uses_of_re_exported_names_are_found() -> None:
    graph = Crate("engine").graph()
    assert ("limits", "limits") in graph["engine_core",]
    assert ("limits", "request_check") in graph["start_error",]
