"""`engine.embed`: values, defaults of the model's files, bounds and failures.

The tests of `/v1/embeddings` compare both with transformers.
"""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest

import penstock
from support.api.engines import assert_at_rest, make_engine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

TEXTS = ["The sky is blue.", "Rain", "The sky is blue. " * 8, "Ünïcödé 世界", "a"]
SIZE = 128
TRANSFORMERS = "sentence_transformers.models"


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    with make_engine(tiny_model, max_num_batched_tokens=64) as engine:
        yield engine


def rows_of(embeddings: penstock.Embeddings) -> NDArray[np.float32]:
    """The embeddings, `[texts, size]`."""
    return np.asarray(embeddings.tensor)


def unit(vector: NDArray[Any]) -> NDArray[Any]:
    """The vector divided by its length."""
    divided: NDArray[Any] = vector / np.sqrt((vector**2).sum())
    return divided


def with_modules(
    model: Path, folder: Path, pooling: dict[str, Any] | None, modules: list[str]
) -> penstock.ModelInfo:
    """The properties of a copy of a model with these files of sentence-transformers."""
    shutil.copytree(model, folder)
    listed = [
        {"idx": index, "name": str(index), "path": f"{index}_{name}" if index else "", "type": kind}
        for index, kind in enumerate(modules)
        for name in [kind.rpartition(".")[2]]
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    with make_engine(folder) as engine:
        return engine.info


# ---- values


def test_arguments_select_pooling_length_and_size(engine: penstock.Engine) -> None:
    embed = engine.blocking.embed
    result = engine.blocking.generate(TEXTS[0], max_tokens=1, output_hidden_states="prompt")
    states = np.asarray(result.hidden_states).astype(np.float64)
    for embeddings, expected in (
        (embed(TEXTS[0]), unit(states.mean(axis=0))),
        (embed(TEXTS[0], normalize=False), states.mean(axis=0)),
        (embed(TEXTS[0], pooling="last", normalize=False), states[-1]),
        (embed(TEXTS[0], dimensions=16), unit(states.mean(axis=0)[:16])),
    ):
        np.testing.assert_allclose(rows_of(embeddings)[0], expected, rtol=1e-6, atol=1e-7)


@pytest.mark.anyio
async def test_blocking_and_token_ids_give_the_same_bits(engine: penstock.Engine) -> None:
    embeddings = await engine.embed(TEXTS)
    assert engine.blocking.embed(TEXTS) == embeddings
    assert await engine.embed([engine.encode(text) for text in TEXTS]) == embeddings
    alone = [rows_of(await engine.embed(text))[0] for text in TEXTS]
    assert np.array(alone).tobytes() == bytes(embeddings.tensor)


def test_usage_counts_the_texts_and_no_generated_token(engine: penstock.Engine) -> None:
    usage = engine.blocking.embed(TEXTS).usage
    assert usage == penstock.Usage(prompt_tokens=sum(engine.count_tokens(text) for text in TEXTS))


def test_embedding_adds_nothing_to_the_prefix_cache(engine: penstock.Engine) -> None:
    text = "remember " * 20
    engine.blocking.embed(text)
    assert engine.blocking.generate(text, max_tokens=1).usage.cached_tokens == 0


# ---- the model's files


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "last"),
        ({"pooling_mode_mean_tokens": True, "include_prompt": True}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": True}, "max_tokens+mean"),
        (None, "mean"),
    ],
)
def test_pooling_of_the_files_is_the_default(
    tiny_model: Path, tmp_path: Path, pooling: dict[str, Any] | None, expected: str
) -> None:
    modules = [f"{TRANSFORMERS}.Transformer", f"{TRANSFORMERS}.Pooling"]
    info = with_modules(tiny_model, tmp_path / "model", pooling, modules)
    assert (info.pooling, info.normalize) == (expected, False)
    assert info.hidden_size == SIZE


def test_normalize_module_makes_normalisation_the_default(tiny_model: Path, tmp_path: Path) -> None:
    modules = [f"{TRANSFORMERS}.{name}" for name in ("Transformer", "Pooling", "Normalize")]
    info = with_modules(tiny_model, tmp_path / "model", {"pooling_mode_lasttoken": True}, modules)
    assert (info.pooling, info.normalize) == ("last", True)


def test_pooling_that_is_not_supported_must_be_replaced(tiny_model: Path, tmp_path: Path) -> None:
    modules = [f"{TRANSFORMERS}.{name}" for name in ("Transformer", "Pooling", "Dense")]
    with_modules(tiny_model, tmp_path / "model", {"pooling_mode_mean_tokens": True}, modules)
    with make_engine(tmp_path / "model") as engine:
        with pytest.raises(penstock.InvalidRequestError, match="'Dense', which the model's files") as raised:
            engine.blocking.embed("a")
        assert raised.value.field == "pooling"
        assert engine.blocking.embed("a", pooling="mean").tensor.shape == (1, SIZE)


def test_model_without_such_files_has_documented_defaults(engine: penstock.Engine) -> None:
    assert (engine.info.pooling, engine.info.normalize) == ("mean", True)


def test_converted_model_keeps_the_pooling(tiny_model: Path, tmp_path: Path) -> None:
    modules = [f"{TRANSFORMERS}.Transformer", f"{TRANSFORMERS}.Pooling"]
    with_modules(tiny_model, tmp_path / "model", {"pooling_mode_lasttoken": True}, modules)
    penstock.convert(tmp_path / "model", tmp_path / "converted")
    with make_engine(tmp_path / "converted") as engine:
        assert (engine.info.pooling, engine.info.normalize) == ("last", False)


# ---- bounds and failures


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("texts", "options", "field"),
    [
        (["a", "b" * 600], {}, "texts[1]"),
        (["a", ""], {}, "texts[1]"),
        (["a", [600]], {}, "texts[1]"),
        ([7], {}, "texts[0]"),
        (7, {}, "texts"),
        ("a", {"pooling": "max"}, "pooling"),
        ("a", {"dimensions": SIZE + 1}, "dimensions"),
        ("a", {"dimensions": 0}, "dimensions"),
        ("a", {"adapter": "none"}, "adapter"),
    ],
)
async def test_invalid_argument_is_named(
    engine: penstock.Engine, texts: Any, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(penstock.InvalidRequestError) as raised:
        await engine.embed(texts, **options)
    assert raised.value.field == field
    assert field in str(raised.value)
    await assert_at_rest(engine)


def test_no_texts_are_no_rows(engine: penstock.Engine) -> None:
    embeddings = engine.blocking.embed([])
    assert embeddings.tensor.shape == (0, SIZE)
    assert embeddings.usage.prompt_tokens == 0


@pytest.mark.anyio
async def test_texts_beyond_the_output_memory_are_computed_in_turn(tiny_model: Path) -> None:
    longest = 512 * SIZE * 4
    async with make_engine(tiny_model, max_output_bytes=longest) as engine:
        embeddings = await engine.embed(["a" * 500] * 6)
    assert embeddings.tensor.shape == (6, SIZE)
    assert len({row.tobytes() for row in rows_of(embeddings)}) == 1


@pytest.mark.anyio
@pytest.mark.loops
async def test_cancelling_the_task_ends_all_requests(engine: penstock.Engine) -> None:
    with anyio.move_on_after(0.01) as scope:
        await engine.embed(["The sky is blue. " * 20] * 400)
    assert scope.cancelled_caught
    await assert_at_rest(engine)
