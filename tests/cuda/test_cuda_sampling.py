"""Sampling on the emulated CUDA device: with every parameter, the tokens of the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from support.cuda.sampled import ADMITTED, REQUESTS, admitted_together, sampled
from support.kernels.emulator import run_program

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.timeout(600), pytest.mark.needs("cuda")]


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[dict[str, Any]]:
    return sampled(str(tiny_model), "cpu")


def check(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(found) == len(expected) == len(REQUESTS)
    for request, on_cuda, on_cpu in zip(REQUESTS, found, expected, strict=True):
        for name in ("tokens", "ends", "top_tokens"):
            assert on_cuda[name] == on_cpu[name], (request, name)
        assert on_cuda["logprobs"] == pytest.approx(on_cpu["logprobs"], abs=1e-4), request


@pytest.mark.parametrize("speculation", ["", "ngram"])
def test_every_parameter_gives_the_tokens_of_the_cpu(
    tiny_model: Path, expected: list[dict[str, Any]], speculation: str
) -> None:
    ended = run_program(sampled, tiny_model, "cuda", speculation)
    check(ended.result, expected)
    assert ended.findings == []


@pytest.mark.rare
def test_sampling_accesses_its_own_memory_in_order(tiny_model: Path, expected: list[dict[str, Any]]) -> None:
    ended = run_program(sampled, tiny_model, "cuda", "ngram", checked=True)
    check(ended.result, expected)
    assert ended.findings == []


def test_slots_that_are_admitted_together_have_their_own_lists(tiny_model: Path) -> None:
    """Copies to the device are late, so a buffer that is filled again too early changes the tokens."""
    steps, tokens = run_program(admitted_together, tiny_model, "cuda", EMU_DELAY_US="2000").result
    assert steps <= 1 + 1 + 5  # the last are admitted in the third step
    assert len({tuple(ids) for ids in tokens}) == ADMITTED
    assert tokens == admitted_together(str(tiny_model), "cpu")[1]
