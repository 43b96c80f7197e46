"""Fixtures of the tests of the API: engines with adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.api.adapter_engine import AdapterEngine
from support.api.adapters import write_adapter
from support.api.checkpoints import make_config
from support.api.engines import make_engine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import penstock


@pytest.fixture(scope="session")
def adapter_folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Adapters of `tiny_model` with distinct weights; each fourth has the same rank, the first one 8."""
    root, config = tmp_path_factory.mktemp("adapters"), make_config("llama")
    return [
        write_adapter(root / str(index), config, seed=index, rank=(8, 4, 12, 16)[index % 4])
        for index in range(12)
    ]


@pytest.fixture
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    """`tiny_model` with room for three adapters."""
    with make_engine(tiny_model, max_adapters=3) as engine:
        yield engine


@pytest.fixture(scope="module")
def adapter_engine(tiny_model: Path) -> Iterator[AdapterEngine]:
    """`tiny_model` with room for two adapters."""
    with make_engine(tiny_model, max_adapters=2) as engine:
        yield AdapterEngine(engine)
