"""Marks of the tests of kernels: each gate runs most of them with checked kernels, in other processes."""

from __future__ import annotations

import pytest

from support.kernels import cuda


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that `test_kernels_cuda_checked.py` runs."""
    if not (cuda.CHECKED or cuda.ON_GPU):
        for item in items:
            if item.path.stem in set(cuda.CHECKED_FILES).difference(cuda.SLOWLY_CHECKED_FILES):
                item.add_marker(pytest.mark.rare)
