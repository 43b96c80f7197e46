"""Helpers of the tests of the LMDeploy API: pipelines of small models, and the items of requests."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest

from penstock.compat.lmdeploy import GenerationConfig, Pipeline
from support.parity.oracle import import_torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    import penstock
    from penstock.compat.lmdeploy.generation import GenOut

#: Greedy, and no token ends the output.
GREEDY = GenerationConfig(max_new_tokens=8, ignore_eos=True)
LONG = GenerationConfig(max_new_tokens=400, ignore_eos=True)
#: Deterministic prompts of the tiny model.
PROMPT: Sequence[int] = (10, 20, 30, 40)


#: The library of tensors: torch, or numpy in its place, which needs no torch.
LIBRARIES = ["numpy", pytest.param("torch", marks=pytest.mark.torch)]


def library_of(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A library of `LIBRARIES`, which the API finds as torch."""
    if name == "torch":
        return import_torch()
    functions = {"tensor": np.array, "cat": np.concatenate, "Tensor": np.ndarray}
    same = {name: getattr(np, name) for name in ("arange", "from_dlpack", "where")}
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(**functions, **same))
    return sys.modules["torch"]


def open_pipeline(model: str | Path, **options: Any) -> Pipeline:
    """A pipeline with one thread."""
    with mock.patch.dict(os.environ, PENSTOCK_THREADS="1"):
        return Pipeline(model, **options)


def config(max_new_tokens: int | None = 8, **fields: Any) -> GenerationConfig:
    """Greedy parameters of which no token ends the output."""
    return GenerationConfig(**{"max_new_tokens": max_new_tokens, "ignore_eos": True, **fields})


async def read(
    pipe: Pipeline,
    ids: Iterable[int],
    session_id: int | None = None,
    gen_config: GenerationConfig = GREEDY,
    **options: Any,
) -> tuple[list[int], GenOut]:
    """The ids of a request, and its last item."""
    items = [
        item async for item in pipe.generate(None, session_id, gen_config, input_ids=list(ids), **options)
    ]
    assert [item.finish_reason for item in items[:-1]] == [None] * (len(items) - 1)
    return [token for item in items for token in item.token_ids or ()], items[-1]


def expected_ids(pipe: Pipeline, ids: Iterable[int], max_tokens: int = 8) -> list[int]:
    """The greedy output of a stateless request."""
    result = pipe.engine.blocking.generate(
        list(ids), max_tokens=max_tokens, temperature=0.0, ignore_eos=True, use_prefix_cache=False
    )
    return list(result.token_ids)


def finished(stats: penstock.Stats) -> bool:
    """Whether no request runs or waits."""
    return stats.running == 0 and stats.waiting == 0
