"""The life cycle of an engine: opening, closing, resources, configuration, `info` and tokenizer."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
import re
import shutil
import threading
import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import pytest

import penstock
from penstock._options import EngineOptions, SamplingOptions
from support.api.checkpoints import make_config, write_checkpoint
from support.api.engines import (
    BACKENDS,
    LONG,
    PROMPT,
    SHORT,
    assert_at_rest,
    assert_at_rest_blocking,
    bytes_of_blocks,
    engine_threads,
    make_engine,
    resident_bytes,
    resources,
    run_in_threads,
)

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.loops


@pytest.mark.anyio
async def test_engine_is_running_from_start_to_close(tiny_model: Path) -> None:
    engine = make_engine(tiny_model)
    assert not engine.is_running
    async with engine:
        assert engine.is_running
    assert not engine.is_running


@pytest.mark.anyio
async def test_engine_opens_generates_and_closes(tiny_model: Path) -> None:
    engine = make_engine(tiny_model, max_num_seqs=3)
    assert "new" in repr(engine)
    async with engine as entered:
        assert entered is engine
        assert "open" in repr(engine)
        await engine.start()
        await assert_at_rest(engine)
    assert "closed" in repr(engine)


@pytest.mark.anyio
async def test_close_is_idempotent_at_any_time(tiny_model: Path) -> None:
    never_opened = make_engine(tiny_model)
    await never_opened.aclose()
    never_opened.close()
    with pytest.raises(penstock.EngineStoppedError, match="closed"):
        await never_opened.start()
    engine = make_engine(tiny_model)
    await engine.start()
    async with anyio.create_task_group() as group:
        for _ in range(5):
            group.start_soon(engine.aclose)
    await engine.aclose()
    engine.close()
    with pytest.raises(penstock.EngineStoppedError, match="closed"):
        await engine.start()


@pytest.mark.anyio
async def test_engine_that_is_not_open_rejects_requests(tiny_model: Path) -> None:
    engine = make_engine(tiny_model)
    with pytest.raises(penstock.EngineStoppedError, match="not open"):
        await engine.start_request(PROMPT)
    with pytest.raises(penstock.EngineStoppedError, match="not open"):
        engine.stats()
    async with engine:
        pass
    with pytest.raises(penstock.EngineStoppedError, match="closed"):
        await engine.generate(PROMPT)
    with pytest.raises(penstock.EngineStoppedError, match="closed"):
        engine.blocking.generate(PROMPT)
    assert engine.stats().running == 0
    assert engine.info.architecture == "LlamaForCausalLM"


@pytest.mark.anyio
async def test_closed_engine_cancels_open_requests(tiny_model: Path) -> None:
    engine = make_engine(tiny_model, max_num_seqs=4)
    await engine.start()
    requests = [await engine.start_request(PROMPT, LONG) for _ in range(12)]
    reasons: list[str] = []

    async def collect(request: penstock.Request) -> None:
        reasons.append((await request.result()).finish_reason)

    async with anyio.create_task_group() as group:
        for request in requests[1:8]:
            group.start_soon(collect, request)
        await anext(requests[0])
        await engine.aclose()
        with pytest.raises(penstock.EngineStoppedError):
            await engine.start_request(PROMPT)
    reasons += [(await request.result()).finish_reason for request in (requests[0], *requests[8:])]
    assert reasons == ["cancelled"] * 12


@pytest.mark.anyio
async def test_close_starts_no_thread(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        message = "can't start new thread"
        raise RuntimeError(message)

    engine = make_engine(tiny_model)
    engine.blocking.start()
    request = await engine.start_request(PROMPT, LONG)
    monkeypatch.setattr(threading.Thread, "start", start)
    await engine.aclose()
    assert not engine._session.native.is_running
    assert (await request.result()).finish_reason == "cancelled"


@pytest.mark.anyio
async def test_close_makes_an_unfinished_generate_raise(tiny_model: Path) -> None:
    engine = make_engine(tiny_model)
    await engine.start()
    request = await engine.start_request(PROMPT, LONG)
    first = await anext(request)
    async with anyio.create_task_group() as group:

        async def generate(**options: Any) -> None:
            with pytest.raises(penstock.EngineStoppedError, match="closed before the request finished"):
                await engine.generate(PROMPT, LONG, **options)

        group.start_soon(generate)
        group.start_soon(partial(generate, best_of=2))
        while engine.stats().running < 4:
            await anyio.lowlevel.checkpoint()
        await engine.aclose()
    result = await request.result()
    assert result.finish_reason == "cancelled"
    assert result.token_ids[: len(first.token_ids)] == first.token_ids


@pytest.mark.anyio
async def test_close_cannot_be_cancelled(tiny_model: Path) -> None:
    engine = make_engine(tiny_model)
    await engine.start()
    with anyio.CancelScope() as scope:
        async with engine:
            scope.cancel()
            await anyio.lowlevel.checkpoint()
    assert scope.cancelled_caught
    with pytest.raises(penstock.EngineStoppedError):
        await engine.start_request(PROMPT)


@pytest.mark.anyio
async def test_progress_rises_to_the_total(tiny_model: Path) -> None:
    seen: list[tuple[int, int]] = []
    async with make_engine(tiny_model, progress=lambda done, total: seen.append((done, total))) as engine:
        weight_bytes = engine.info.memory.weights
    assert seen == sorted(seen)
    assert seen[-1] == (weight_bytes, weight_bytes)


@pytest.mark.anyio
async def test_exception_from_progress_stops_loading(tiny_model: Path) -> None:
    def fail(_done: int, _total: int) -> None:
        message = "enough"
        raise KeyError(message)

    engine = make_engine(tiny_model, progress=fail)
    with pytest.raises(KeyError, match="enough"):
        await engine.start()
    with pytest.raises(penstock.EngineStoppedError):
        await engine.start()


@pytest.mark.anyio
async def test_cancelled_task_stops_loading(tiny_model: Path) -> None:
    reached, release = threading.Event(), threading.Event()

    def progress(_done: int, _total: int) -> None:
        reached.set()
        release.wait()

    engine = make_engine(tiny_model, progress=progress)
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:

            async def cancel_while_loading() -> None:
                await anyio.to_thread.run_sync(reached.wait)
                scope.cancel()
                release.set()

            group.start_soon(cancel_while_loading)
            await engine.start()
    assert scope.cancelled_caught
    await engine.aclose()
    with pytest.raises(penstock.EngineStoppedError):
        await engine.start()


def test_dropped_engine_warns_and_ends_its_threads(tiny_model: Path) -> None:
    engine = make_engine(tiny_model)
    engine.blocking.start()
    with pytest.warns(ResourceWarning, match="without being closed"):
        del engine


@pytest.mark.needs("proc")
def test_ten_engines_leave_no_resources(tiny_model: Path) -> None:
    def live() -> None:
        with make_engine(tiny_model) as engine:
            assert_at_rest_blocking(engine)

    def live_on_a_loop() -> None:
        async def main() -> None:
            async with make_engine(tiny_model) as engine:
                await assert_at_rest(engine)

        anyio.run(main)

    for life in (live, live_on_a_loop):
        life()
        before, memory = resources(), resident_bytes()
        for _ in range(10):
            life()
        assert resources() == before
        # An engine of this model uses 30 MB; ten leaked engines would use 300 MB.
        assert resident_bytes() - memory < 20 << 20


@pytest.mark.needs("proc")
@pytest.mark.needs("uvloop")
def test_engines_on_many_loops_and_threads_run_concurrently(tiny_model: Path) -> None:
    """Each engine is opened, used and closed by different tasks; all kinds of loops run at the same time."""
    with make_engine(tiny_model) as engine:
        expected = [engine.blocking.generate(PROMPT, LONG, seed=seed).token_ids for seed in range(4)]
    answers: list[tuple[int, ...]] = []

    def live() -> None:
        with make_engine(tiny_model) as engine:
            answers.extend(engine.blocking.generate(PROMPT, LONG, seed=seed).token_ids for seed in range(4))

    async def live_on_a_loop() -> None:
        engines = [make_engine(tiny_model) for _ in range(2)]

        async def ask(engine: penstock.Engine, seed: int) -> None:
            answers.append((await engine.generate(PROMPT, LONG, seed=seed)).token_ids)

        async with anyio.create_task_group() as group:
            for engine in engines:
                group.start_soon(engine.start)
        async with anyio.create_task_group() as group:
            for engine in engines:
                for seed in range(4):
                    group.start_soon(ask, engine, seed)
        async with anyio.create_task_group() as group:
            for engine in engines:
                group.start_soon(engine.aclose)

    def run(how: dict[str, Any] | None) -> None:
        if how is None:
            live()
        else:
            anyio.run(live_on_a_loop, **how)

    kinds: list[dict[str, Any] | None] = [None, *BACKENDS]
    for how in kinds:
        run(how)  # resources that a kind of loop opens once per process are open now
    answers.clear()
    before = resources()
    run_in_threads(run, kinds * 2)
    assert len(answers) == 2 * 4 + 6 * 2 * 4
    assert Counter(answers) == Counter(dict.fromkeys(expected, 14))
    assert engine_threads() == []
    assert resources() == before


def test_idle_engine_uses_almost_no_cpu(tiny_model: Path) -> None:
    with make_engine(tiny_model, threads=2) as engine:
        assert_at_rest_blocking(engine)
        before = time.process_time()
        assert not threading.Event().wait(5)
        assert time.process_time() - before < 0.05


def test_repr_of_value_class_evaluates_to_an_equal_object(tiny_model: Path) -> None:
    with make_engine(tiny_model, profile=True) as engine:
        result = engine.blocking.generate(PROMPT, SHORT, logprobs=True, stop="x")
        request = engine.blocking.start_request(PROMPT, SHORT, logprobs=True)
        values = [
            engine.config,
            engine.info,
            engine.stats(),
            engine.profile()[0],
            request.params,
            next(request),
            result,
            result.usage,
            result.timings,
            penstock.SamplingParams(),
            penstock.EngineConfig(),
        ]
        request.result()
    for value in values:
        printed = eval(repr(value), vars(penstock))  # noqa: S307 - evaluates the repr under test
        pickled = pickle.loads(pickle.dumps(value))  # noqa: S301 - made here
        for other in (printed, pickled, copy.deepcopy(value)):
            assert other == value
            assert hash(other) == hash(value)
            assert other is not value
        with pytest.raises(TypeError):
            type(value)(1)  # type: ignore[call-arg]
        field = next(name for name in dir(value) if not name.startswith("_") and name != "replace")
        with pytest.raises(AttributeError):
            setattr(value, field, None)


def test_value_objects_with_a_different_field_are_unequal() -> None:
    params = penstock.SamplingParams(max_tokens=5)
    assert params.replace(max_tokens=6) != params
    assert params.replace(max_tokens=None) == penstock.SamplingParams()
    assert params.replace() == params
    assert params != "params"


@pytest.mark.parametrize(
    ("options", "fields"),
    [(EngineOptions, penstock.EngineConfig), (SamplingOptions, penstock.SamplingParams)],
)
def test_typed_keywords_match_the_fields(options: Any, fields: Any) -> None:
    assert list(options.__annotations__) == list(inspect.signature(fields).parameters)
    defaults = fields()
    for name, parameter in inspect.signature(fields).parameters.items():
        assert getattr(defaults, name) == parameter.default, name


def test_none_means_the_default() -> None:
    for fields in (penstock.EngineConfig, penstock.SamplingParams):
        names = inspect.signature(fields).parameters
        assert fields(**dict.fromkeys(names)) == fields()


@pytest.mark.anyio
async def test_engine_options_are_applied(tiny_model: Path) -> None:
    expected = {
        "max_model_len": 100,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 48,
        "max_waiting": 5,
        "max_paused": 7,
        "max_output_bytes": 1 << 20,
        "max_unfinished": 1000,
        "block_size": 32,
        "threads": 2,
        "dtype": "bfloat16",
        "kv_cache_dtype": "float16",
    }
    async with penstock.Engine(tiny_model, config=penstock.EngineConfig(threads=1), **expected) as engine:  # type: ignore[arg-type]
        info = engine.info
        assert {name: getattr(info, name) for name in expected} == expected
        assert info.num_blocks == 2 * 3 * 4  # doubled for the prefix cache
        assert info.memory.kv_cache > 0
        await assert_at_rest(engine)


@pytest.mark.anyio
async def test_chunks_of_a_prompt_do_not_change_the_output(tiny_model: Path) -> None:
    prompt, steps, outputs = list(range(1, 51)), [], []
    for chunk in (None, 10):
        async with penstock.Engine(tiny_model, threads=1, max_prefill_chunk=chunk) as engine:
            outputs.append((await engine.generate(prompt, max_tokens=8, temperature=0)).token_ids)
            steps.append(engine.stats().steps)
    assert outputs[0] == outputs[1]
    assert steps[1] == steps[0] + 4


@pytest.mark.anyio
async def test_environment_sets_threads_unless_given(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_THREADS", "2")
    async with penstock.Engine(tiny_model) as engine:
        assert engine.info.threads == 2
    async with penstock.Engine(tiny_model, threads=1) as engine:
        assert engine.info.threads == 1
    monkeypatch.setenv("PENSTOCK_THREADS", "many")
    with pytest.raises(penstock.ConfigError, match="PENSTOCK_THREADS"):
        await penstock.Engine(tiny_model).start()


@pytest.mark.parametrize("option", ["kv_cache_bytes", "kv_cache_blocks"])
def test_max_model_len_reduced_by_the_kv_cache_logs_a_warning(
    tiny_model: Path, option: str, caplog: pytest.LogCaptureFixture
) -> None:
    size = {option: bytes_of_blocks(tiny_model, 2) if option == "kv_cache_bytes" else 2}
    with caplog.at_level("WARNING", logger="penstock"):
        with make_engine(tiny_model, **size) as engine:
            engine.stats()
            assert engine.info.max_model_len == 32
        with make_engine(tiny_model, **size, max_model_len=32) as engine:
            engine.stats()
    [record] = caplog.records
    assert "max_model_len reduced from 512 to 32" in record.getMessage()
    assert f"raise {option} to get more" in record.getMessage()


def test_caches_sized_in_blocks_have_that_many(tiny_model: Path) -> None:
    sizes = {"kv_cache_blocks": 7, "host_cache_blocks": 3, "preemption_mode": "swap"}
    with make_engine(tiny_model, **sizes) as engine:
        info = engine.info
    block = info.memory.kv_cache // 7
    assert (info.num_blocks, info.memory.host_cache, info.max_model_len) == (
        7,
        3 * block,
        7 * info.block_size,
    )


def test_kv_cache_ratio_is_a_share_of_the_memory_left(tiny_model: Path) -> None:
    with make_engine(tiny_model, memory_ratio=0.01, kv_cache_ratio=0.001, prefix_cache=False) as engine:
        memory = engine.info.memory
    share = 0.001 * (memory.limit - memory.weights - memory.workspace - memory.inputs)
    block = bytes_of_blocks(tiny_model, 1)
    assert min(share, 64 * 32 * block) - block < memory.kv_cache <= share


def test_too_many_blocks_error_names_the_number_that_fits(tiny_model: Path) -> None:
    with pytest.raises(
        penstock.OutOfMemoryError, match=r"kv_cache_blocks=\d+ exceeds .* hold (\d+) blocks"
    ) as caught:
        make_engine(tiny_model, memory_ratio=0.005, kv_cache_blocks=2**31 - 1).blocking.start()
    match = re.search(r"hold (\d+) blocks", str(caught.value))
    assert match is not None
    with make_engine(tiny_model, memory_ratio=0.005, kv_cache_blocks=int(match[1]) // 2) as engine:
        assert engine.info.num_blocks == int(match[1]) // 2


def test_model_without_head_is_that_with_a_tied_one(tmp_path: Path) -> None:
    config = make_config("qwen3", tie_word_embeddings=True)
    whole = write_checkpoint(tmp_path / "whole", config)
    base = shutil.copytree(whole, tmp_path / "base")
    config |= {"architectures": ["Qwen3Model"], "tie_word_embeddings": False}
    (base / "config.json").write_text(json.dumps(config))
    weights = base / "model.safetensors"
    data = weights.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = {name.removeprefix("model."): tensor for name, tensor in json.loads(data[8:end]).items()}
    assert "embed_tokens.weight" in header
    text = json.dumps(header).encode()
    weights.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])
    results = []
    for model in (whole, base):
        with make_engine(model) as engine:
            results.append(engine.blocking.generate(PROMPT, max_tokens=4, temperature=0.0, logprobs=True))
    assert results[0].token_ids == results[1].token_ids
    assert results[0].logprobs == results[1].logprobs


def test_unused_head_is_a_warning_that_names_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = write_checkpoint(tmp_path, make_config("llama", tie_word_embeddings=False))
    config = json.loads((model / "config.json").read_text()) | {"tie_word_embeddings": True}
    (model / "config.json").write_text(json.dumps(config))
    with caplog.at_level("WARNING", logger="penstock"), make_engine(model) as engine:
        engine.stats()
    assert "lm_head.weight is not used: tie_word_embeddings is true" in caplog.text


OVERRIDES = {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}, "max_position_embeddings": 2048}


@pytest.mark.anyio
async def test_config_overrides_equal_an_edited_file(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "edited")
    config = json.loads((tiny_model / "config.json").read_text())
    config["rope_parameters"] |= OVERRIDES["rope_parameters"]
    config["max_position_embeddings"] = OVERRIDES["max_position_embeddings"]
    (tmp_path / "edited" / "config.json").write_text(json.dumps(config))
    results = []
    for path, options in ((tmp_path / "edited", {}), (tiny_model, {"config_overrides": OVERRIDES})):
        async with make_engine(path, **options) as engine:
            assert engine.info.max_model_len == 8192
            results.append(await engine.generate(range(200), max_tokens=8, temperature=0.0, logprobs=True))
    assert results[0].logprobs == results[1].logprobs
    async with make_engine(tiny_model) as engine:
        plain = await engine.generate(range(200), max_tokens=8, temperature=0.0, logprobs=True)
    assert plain.logprobs != results[0].logprobs


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ({"max_positions": 9}, "max_positions"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "facto": 3.0}}, "rope_parameters.facto"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "rope_parameters.factor"),
        ({"hidden_size": "wide"}, "hidden_size"),
    ],
)
def test_override_without_effect_is_an_error(overrides: dict[str, Any], name: str, tiny_model: Path) -> None:
    with pytest.raises(penstock.ConfigError, match=rf"config_overrides=.*\b{name}\b") as caught:
        make_engine(tiny_model, config_overrides=overrides).blocking.start()
    assert caught.value.field == "config_overrides"


def test_config_overrides_are_copied_and_compared() -> None:
    overrides: dict[str, Any] = {"rope_scaling": {"factor": 2.0}}
    config = penstock.EngineConfig(config_overrides=overrides)
    overrides["rope_scaling"]["factor"] = 3.0
    assert config.config_overrides == {"rope_scaling": {"factor": 2.0}}
    assert copy.deepcopy(config) == config


def test_info_reports_memory_by_use(tiny_model: Path) -> None:
    with make_engine(tiny_model, kv_cache_dtype="float16", memory_ratio=0.5) as engine:
        memory, block_size = engine.info.memory, engine.info.block_size
        assert engine.info.host_tier is None
    # Two layers of two heads of 32 dimensions, keys and values, 2 bytes each.
    assert memory.kv_cache == engine.info.num_blocks * block_size * 2 * 2 * 2 * 32 * 2
    assert 0 < memory.inputs < memory.workspace
    assert 4 * engine.info.parameters <= memory.weights < 4.4 * engine.info.parameters
    assert memory.host_cache == 0
    assert memory.peak == memory.weights + memory.workspace + memory.kv_cache
    assert memory.peak + memory.inputs <= memory.limit
    assert engine.info.warm_up_seconds > 0


def test_info_reports_host_tier_memory(tiny_model: Path) -> None:
    with make_engine(tiny_model, host_cache_bytes=1 << 20) as engine:
        tier, memory = engine.info.host_tier, engine.info.memory
        assert tier is not None
        assert 0.9 * (1 << 20) < memory.host_cache <= 1 << 20
        assert memory.peak == memory.weights + memory.workspace + memory.kv_cache + memory.host_cache
        assert tier.save_seconds > 0
        assert tier.keeps_prefixes == (tier.load_seconds < tier.recompute_seconds)
        assert (engine.stats().host_blocks_total > 0) == tier.keeps_prefixes


@pytest.mark.parametrize("variable", ["PENSTOCK_MEMORY_RATIO", "BFC_MEM_RATIO"])
def test_environment_sets_memory_ratio_unless_given(
    variable: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def limit(**options: float) -> int:
        with make_engine(tiny_model, **options) as engine:
            return engine.info.memory.limit

    whole = limit(memory_ratio=1.0)
    monkeypatch.setenv(variable, "0.25")
    # The available memory changes while the tests run, but less than this.
    assert 0.15 < limit() / whole < 0.35
    assert 0.4 < limit(memory_ratio=0.5) / whole < 0.6
    for value in ("0", "1.5", "half", ""):
        monkeypatch.setenv(variable, value)
        with pytest.raises(penstock.ConfigError, match=f"{variable}=.* above 0 and at most 1"):
            limit()


def test_first_of_two_memory_ratio_variables_wins(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_MEMORY_RATIO", "0.5")
    monkeypatch.setenv("BFC_MEM_RATIO", "7")
    with make_engine(tiny_model):
        pass


def test_reserved_memory_is_left_free(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BFC_LEFTOVER_MB", str(1 << 30))
    with pytest.raises(penstock.ConfigError, match=r"BFC_LEFTOVER_MB=\d+ .* available"):
        make_engine(tiny_model).blocking.start()
    monkeypatch.setenv("BFC_LEFTOVER_MB", "some")
    with pytest.raises(penstock.ConfigError, match=r"BFC_LEFTOVER_MB=.* mebibytes"):
        make_engine(tiny_model).blocking.start()


@pytest.mark.anyio
async def test_tokenizer_option_replaces_the_models_tokenizer(tiny_model: Path, tmp_path: Path) -> None:
    for path in (tiny_model, tiny_model / "tokenizer.json"):
        async with make_engine(tiny_model, tokenizer=path) as engine:
            assert engine.decode(engine.encode("Hello")) == "Hello"
    with pytest.raises(penstock.ConfigError, match="tokenizer"):
        await make_engine(tiny_model, tokenizer=tmp_path).start()


@pytest.mark.anyio
async def test_encode_then_decode_restores_the_text(tiny_model: Path) -> None:
    async with make_engine(tiny_model) as engine:
        for text in ("", "Hello", "naïve ☕ 日本", "<|im_end|>"):
            token_ids = engine.encode(text)
            assert engine.decode(token_ids, skip_special_tokens=False) == text
        assert engine.decode(engine.encode("a<|im_end|>b")) == "ab"
