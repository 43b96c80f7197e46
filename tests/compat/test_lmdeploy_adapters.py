"""LoRA adapters in the LMDeploy API: opened with a pipeline, named by requests, in sessions and scores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest

import penstock
from penstock.compat.lmdeploy import GenerationConfig, Pipeline
from penstock.compat.lmdeploy.adapters import adapters_of
from penstock.compat.lmdeploy.engine_options import resolve
from penstock.compat.lmdeploy.errors import ArgumentError
from penstock.compat.lmdeploy.messages import PytorchEngineConfig
from penstock.compat.lmdeploy.model import MODELS, BaseChatTemplate
from support.api.adapters import write_adapter, write_merged
from support.api.checkpoints import make_config, write_checkpoint
from support.api.engines import resources, wait_until
from support.api.running import random_prompt
from support.compat.aliases import ALIASES, run
from support.compat.lmdeploy import GREEDY, PROMPT, open_pipeline, read
from support.parity.oracle import import_torch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.anyio

CONFIG = make_config("llama")
#: Of each request, as the base model is.
NAMES = (None, "one", "two")
LOGPROBS = GenerationConfig(max_new_tokens=8, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("base"), CONFIG)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        "one": write_adapter(root / "one", CONFIG, rank=8, seed=1),
        "two": write_adapter(root / "two", CONFIG, rank=100, seed=2),
    }


@pytest.fixture(scope="module")
def pipe(model: Path, paths: dict[str, Path]) -> Iterator[Pipeline]:
    with open_pipeline(model, backend_config=PytorchEngineConfig(adapters=paths)) as pipe:
        yield pipe


@pytest.fixture(scope="module")
def native(model: Path, paths: dict[str, Path]) -> Iterator[penstock.Engine]:
    """An engine of its own with the same adapters."""
    with penstock.Engine(model, threads=1, max_adapters=2, max_adapter_rank=100) as engine:
        for name, path in paths.items():
            engine.blocking.load_adapter(name, path)
        yield engine


def expected(
    native: penstock.Engine, adapter: str | None, prompt: Any = PROMPT
) -> tuple[list[int], list[float]]:
    """The tokens and log probabilities of the native API."""
    result = native.blocking.generate(
        prompt, max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=True, adapter=adapter
    )
    assert result.adapter == adapter
    return list(result.token_ids), list(result.logprobs or ())


def scored(token_ids: list[int], logprobs: list[dict[int, float]] | None) -> tuple[list[int], list[float]]:
    """The tokens of a response and their log probabilities."""
    assert logprobs is not None
    return token_ids, [row[token] for token, row in zip(token_ids, logprobs, strict=True)]


# ---- outputs


@pytest.mark.parametrize("name", NAMES)
async def test_generate_has_the_output_of_the_native_api(
    pipe: Pipeline, native: penstock.Engine, name: str | None
) -> None:
    items = [
        item async for item in pipe.generate(None, None, LOGPROBS, input_ids=list(PROMPT), adapter_name=name)
    ]
    found = [scored(item.token_ids or [], item.logprobs or []) for item in items]
    tokens = [token for part, _ in found for token in part]
    assert (tokens, [value for _, part in found for value in part]) == expected(native, name)


@pytest.mark.parametrize("name", NAMES)
def test_calls_without_a_loop_have_the_output_of_the_native_api(
    pipe: Pipeline, native: penstock.Engine, name: str | None
) -> None:
    text: dict[str, Any] = {"do_preprocess": False, "adapter_name": name}
    tokens, logprobs = expected(native, name, pipe.tokenizer.encode("ab"))
    response = pipe.infer("ab", LOGPROBS, **text)
    assert scored(response.token_ids, response.logprobs) == (tokens, logprobs)
    parts = list(pipe.stream_infer("ab", gen_config=GREEDY, **text))
    assert [token for part in parts for token in part.token_ids] == tokens
    session = pipe.chat("ab", gen_config=GREEDY, **text)
    assert session.response is not None
    assert session.response.token_ids == tokens


@pytest.mark.parametrize("name", NAMES)
async def test_generator_of_token_ids_has_the_output_of_the_native_api(
    pipe: Pipeline, native: penstock.Engine, name: str | None
) -> None:
    tokens, _ = expected(native, name)
    generator = await pipe.get_generator(stop=False, session_id=1)
    options: dict[str, Any] = {"sequence_end": True, "adapter_name": name}
    outputs = [output async for output in generator.async_stream_infer(1, PROMPT, GREEDY, **options)]
    assert outputs[-1].token_ids == tokens
    assert generator.infer(1, PROMPT, GREEDY, **options).token_ids == tokens


def test_adapters_have_the_outputs_of_merged_weights(
    pipe: Pipeline, native: penstock.Engine, tmp_path: Path
) -> None:
    merged = write_merged(tmp_path, CONFIG, rank=8, seed=1)
    with penstock.Engine(merged, threads=1) as engine:
        result = engine.blocking.generate(PROMPT, max_tokens=8, temperature=0.0, ignore_eos=True)
    generated = [expected(native, name)[0] for name in NAMES]
    assert generated[1] == list(result.token_ids)
    assert len(set(map(tuple, generated))) == 3
    assert pipe.engine.adapters["two"].rank == 100


async def test_concurrent_requests_have_the_output_of_each_alone(
    pipe: Pipeline, native: penstock.Engine
) -> None:
    found: dict[int, list[int]] = {}

    async def request(index: int) -> None:
        found[index], _ = await read(pipe, PROMPT, adapter_name=NAMES[index % 3])

    async with anyio.create_task_group() as tasks:
        for index in range(12):
            tasks.start_soon(request, index)
    assert [found[index] for index in range(12)] == [
        expected(native, NAMES[index % 3])[0] for index in range(12)
    ]


# ---- names


@pytest.mark.parametrize("name", ["three", "", "ONE"])
async def test_unknown_adapter_is_an_error_that_lists_the_loaded_ones(pipe: Pipeline, name: str) -> None:
    found, last = await read(pipe, PROMPT, adapter_name=name)
    assert (found, last.finish_reason, last.error_code) == ([], "error", "invalid_request")
    responses = pipe(["ab", "cd"], GREEDY, do_preprocess=False, adapter_name=name)
    assert [response.error_code for response in responses] == ["invalid_request"] * 2
    assert "one, two" in (last.error_message or "") or not name
    assert "adapter" in (last.error_message or "")


@pytest.mark.parametrize("name", [1, ["one"], b"one"])
async def test_name_of_a_wrong_type_is_refused(pipe: Pipeline, name: Any) -> None:
    generator = await pipe.get_generator(stop=False, session_id=1)
    for call in (
        lambda: pipe.infer("ab", adapter_name=name),
        lambda: pipe.stream_infer("ab", adapter_name=name),
        lambda: pipe.chat("ab", adapter_name=name),
        lambda: pipe.generate("ab", adapter_name=name),
        lambda: generator.infer(1, PROMPT, adapter_name=name),
        lambda: pipe.get_ppl([1, 2], adapter_name=name),
        lambda: pipe.get_logits([1, 2], adapter_name=name),
    ):
        with pytest.raises(ArgumentError, match=r"adapter_name is .*; it must be None or the name of"):
            call()


# ---- the configuration


def test_adapter_without_a_name_is_called_default(
    model: Path, paths: dict[str, Path], native: penstock.Engine
) -> None:
    assert resolve(model, "pytorch", adapters=str(paths["one"])).settings.adapters == {
        "default": str(paths["one"])
    }
    with open_pipeline(model, backend_config=PytorchEngineConfig(adapters=paths["one"])) as pipe:
        ids = pipe.tokenizer.encode("ab")
        response = pipe.infer("ab", GREEDY, do_preprocess=False, adapter_name="default")
        assert response.token_ids == expected(native, "one", ids)[0]


@pytest.mark.parametrize("value", [7, ["a"], {"a": None}, {1: "a"}, {"": "a"}, {"a": ""}], ids=repr)
def test_invalid_adapters_are_refused_by_the_class(value: Any) -> None:
    with pytest.raises(ArgumentError, match=r"adapters is .*; it must be None, a mapping of names to paths"):
        PytorchEngineConfig(adapters=value)


def test_no_adapters_take_no_memory(model: Path) -> None:
    assert adapters_of(None) == adapters_of({}) == {}
    with open_pipeline(model, backend_config=PytorchEngineConfig(adapters={})) as pipe:
        assert pipe.engine.info.memory.adapters == 0


@pytest.mark.needs("proc")
@pytest.mark.parametrize(
    ("name", "path", "error", "reason"),
    [
        ("a", "missing", penstock.AdapterLoadError, "no such file or directory"),
        ("a", "broken", penstock.AdapterLoadError, "use_dora"),
        ("a", "invalid", penstock.AdapterLoadError, "adapter_config.json"),
        ("a,b", "valid", ArgumentError, "without commas"),
    ],
)
def test_adapter_that_cannot_be_loaded_closes_the_engine(
    name: str, path: str, error: type[Exception], reason: str, model: Path, tmp_path: Path
) -> None:
    write_adapter(tmp_path / "valid", CONFIG)
    write_adapter(tmp_path / "broken", CONFIG, use_dora=True)
    invalid = write_adapter(tmp_path / "invalid", CONFIG)
    (invalid / "adapter_config.json").write_text('{"r": ')
    before = resources()
    adapters = {"first": str(tmp_path / "valid"), name: str(tmp_path / path)}
    with pytest.raises(error, match=reason):
        open_pipeline(model, backend_config=PytorchEngineConfig(adapters=adapters))
    assert resources() == before


@pytest.mark.parametrize("changes", [{"r": 3, "rank_pattern": {"q_proj": 70}}, {"r": 70}])
def test_rank_of_the_engine_is_that_of_the_files(
    changes: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    modules = ("q_proj",)
    path = write_adapter(tmp_path / "a", CONFIG, rank=70, modules=modules, **changes)
    with open_pipeline(model, backend_config=PytorchEngineConfig(adapters={"a": path})) as pipe:
        assert pipe.engine.config.max_adapter_rank == pipe.engine.adapters["a"].rank == 70


def test_memory_holds_all_adapters(model: Path, tmp_path: Path) -> None:
    options: list[dict[str, Any]] = [{"rank": rank} for rank in (1, 2, 3, 33, 64)]
    options += [{"rank": 64, "dtype": "bfloat16"}, {"rank": 1, "modules": ("q_proj",)}]
    adapters = {
        f"a{index}": write_adapter(tmp_path / f"a{index}", CONFIG, **option)
        for index, option in enumerate(options)
    }
    with open_pipeline(model, backend_config=PytorchEngineConfig(adapters=adapters)) as pipe:
        for name in adapters:
            assert pipe.infer("ab", GREEDY, adapter_name=name).finish_reason == "length"
        assert all(adapter.on_device for adapter in pipe.engine.adapters.values())


# ---- sessions


async def test_session_that_changes_its_adapter_has_no_stale_blocks(
    pipe: Pipeline, native: penstock.Engine
) -> None:
    history, before = random_prompt(200), pipe.engine.stats().blocks_cached
    turns: list[tuple[str | None, bool]] = [("one", False), ("two", False), (None, False), ("two", True)]
    for index, (name, is_cached) in enumerate(turns):
        prompt = list(PROMPT)
        options: dict[str, Any] = {"sequence_start": index == 0, "sequence_end": False, "adapter_name": name}
        found, last = await read(pipe, prompt if index else history, 9, **options)
        history += prompt if index else []
        assert found == expected(native, name, history)[0]
        assert (last.cached_tokens > 0) == is_cached
        history += found
    pipe.end_session(9)
    wait_until(lambda: pipe.engine.stats().blocks_cached == before)


async def test_prefix_cache_is_not_shared_by_adapters(model: Path, paths: dict[str, Path]) -> None:
    backend_config = PytorchEngineConfig(adapters=paths, enable_prefix_caching=True)
    prompt = random_prompt(200)
    with open_pipeline(model, backend_config=backend_config) as pipe:
        cached = [
            (await read(pipe, prompt, adapter_name=name))[1].cached_tokens
            for name in ("one", "two", None, "one", "two", None)
        ]
    assert cached == [0, 0, 0, 192, 192, 192]


def test_adapter_with_the_name_of_a_template_has_it(model: Path, paths: dict[str, Path]) -> None:
    @MODELS.register_module(name="questions")
    class Questions(BaseChatTemplate):
        """The template of an adapter."""

        def __init__(self, **kwargs: Any) -> None:
            super().__init__(user="Q: ", eoh="\n", assistant="A:", **kwargs)

    adapters = {"questions": paths["one"], "two": paths["two"]}
    with open_pipeline(model, backend_config=PytorchEngineConfig(adapters=adapters)) as pipe:
        rendered = pipe.tokenizer.encode("Q: ab\nA:")
        assert pipe.infer("ab", GREEDY, adapter_name="questions").input_token_len == len(rendered)
        assert pipe.infer("ab", GREEDY, adapter_name="two").input_token_len != len(rendered)
        session = pipe.chat("ab", gen_config=GREEDY, adapter_name="two")
        pipe.chat("cd", session, GREEDY, adapter_name="questions")
        first, _ = session.history
        whole = pipe.tokenizer.encode(f"Q: ab\nA:{first[1]}Q: cd\nA:")
        assert session.response is not None
        assert session.response.input_token_len == len(whole)


# ---- scores


@pytest.mark.parametrize("name", NAMES)
async def test_perplexity_is_that_of_the_adapter(
    pipe: Pipeline, native: penstock.Engine, name: str | None
) -> None:
    texts = [random_prompt(length, seed=length) for length in (2, 40, 512)]
    expected = []
    for ids in texts:
        logprobs = native.blocking.score(ids, adapter=name).logprobs[1:]
        expected.append(-sum(logprob or 0.0 for logprob in logprobs) / len(logprobs))
    assert pipe.get_ppl(texts, adapter_name=name) == expected
    assert await pipe.async_get_ppl(texts, adapter_name=name) == expected
    if name is not None:
        assert expected != pipe.get_ppl(texts)


@pytest.mark.torch
async def test_logits_are_those_of_the_adapter(pipe: Pipeline, native: penstock.Engine) -> None:
    import_torch()
    result = native.blocking.generate(PROMPT, max_tokens=1, output_logits="prompt", adapter="one")
    assert result.logits is not None
    for found in (
        pipe.get_logits(list(PROMPT), adapter_name="one"),
        await pipe.async_get_logits(list(PROMPT), adapter_name="one"),
    ):
        assert np.array_equal(found[0].numpy(), np.from_dlpack(result.logits))


def test_score_with_an_unknown_adapter_raises(pipe: Pipeline) -> None:
    with pytest.raises(penstock.AdapterNotFoundError, match="the loaded adapters are one, two"):
        pipe.get_ppl([1, 2, 3], adapter_name="three")


# ---- the package lmdeploy


@pytest.mark.needs("sources")
def test_program_with_the_package_lmdeploy(
    model: Path, paths: dict[str, Path], native: penstock.Engine
) -> None:
    code = f"""
from lmdeploy import GenerationConfig, PytorchEngineConfig, pipeline
backend_config = PytorchEngineConfig(session_len=256, adapters=dict(one={str(paths["one"])!r}))
gen_config = GenerationConfig(top_k=1, max_new_tokens=8, ignore_eos=True)
with pipeline({str(model)!r}, backend_config=backend_config) as pipe:
    prompts = [[dict(role="user", content="Hi")]]
    for name in (None, "one"):
        response = pipe(prompts, gen_config=gen_config, do_preprocess=False, adapter_name=name)
        print(*response[0].token_ids)
"""
    ids = native.encode("Hi")
    outputs = run(code, ALIASES / "lmdeploy").splitlines()
    assert outputs == [" ".join(map(str, expected(native, name, ids)[0])) for name in (None, "one")]
