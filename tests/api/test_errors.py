"""Invalid input raises a typed error with field, value and limit, and the engine continues."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING, Any

import anyio
import pytest

import penstock
from support.api.engines import LONG, PROMPT, SHORT, assert_at_rest, make_engine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NAN, INFINITY = float("nan"), float("inf")

BAD_IDS: list[Any] = [1, "a", [-1], [2**32], [1.0], [1] * 257]
BAD_SEQUENCES: list[Any] = [[[]], [1], "12", [[-1]], [[True]], [[1]] * 65, [[1] * 65], {1: [1]}]
BAD_TOOLS: list[Any] = [
    [],
    "tool",
    [3],
    [{}],
    [{"type": "function"}],
    [{"type": "retrieval", "function": {"name": "f"}}],
    [{"type": "function", "function": {}}],
    [{"type": "function", "function": {"name": ""}}],
    [{"type": "function", "function": {"name": "x" * 129}}],
    [{"type": "function", "function": {"name": "f", "parameters": []}}],
    [{"type": "function", "function": {"name": "f"}}] * 2,
    [{"type": "function", "function": {"name": f"f{number}"}} for number in range(129)],
]

BAD_PARAMS: list[tuple[str, Any]] = [
    *[("temperature", value) for value in (NAN, INFINITY, -INFINITY, -1, -1e-9, 2.001, True, "hot", [1])],
    *[("top_p", value) for value in (0, 0.0, 1.0001, -0.5, NAN, INFINITY, 1e-60, True, "all")],
    *[("min_p", value) for value in (-0.1, 1.1, NAN, INFINITY, False, "some")],
    *[("top_k", value) for value in (-2, 2**32, 10**30, 1.5, True, "many")],
    *[("max_tokens", value) for value in (0, -1, 10**30, 2**32, 1.0, True, "1", NAN)],
    *[("min_tokens", value) for value in (-1, 10**30, 0.5, True, "1")],
    *[("seed", value) for value in (-1, 2**64, 10**30, 0.5, True, "seed")],
    *[
        ("stop", value)
        for value in ("", ["a", ""], "x" * 1025, ["x"] * 65, 3, [3], b"stop", "\ud800", ["\udfff"])
    ],
    *[
        ("stop_token_ids", value)
        for value in (-1, [-1], [2**32], [1.0], [True], "12", b"12", ["1"], {"a": 1}, range(257))
    ],
    *[("ignore_eos", value) for value in (1, "yes", 0.0)],
    *[("logprobs", value) for value in (1, 5, "yes")],
    *[("skip_special_tokens", value) for value in (0, "no")],
    *[("priority", value) for value in (2**31, -(2**31) - 1, 0.5, True, "high")],
    *[("cache_salt", value) for value in ("", "x" * 1025, 7, b"salt", "\ud800")],
    *[("use_prefix_cache", value) for value in (0, "no")],
    *[("n", value) for value in (0, -1, 129, 10**30, 1.0, True, "1")],
    *[("best_of", value) for value in (0, -1, 129, 1.0, True)],
    *[("num_beams", value) for value in (0, -1, 33, 1.0, True)],
    *[("length_penalty", value) for value in (NAN, INFINITY, 32.5, -33, True, "long")],
    *[("max_length", value) for value in (0, -1, 2**32, 1.0, True)],
    *[("typical_p", value) for value in (0, 1.1, -0.5, NAN, 1e-60, True)],
    *[("epsilon_cutoff", value) for value in (1, 1 - 1e-12, -0.1, NAN, INFINITY, True)],
    *[("repetition_penalty", value) for value in (0, -1, NAN, INFINITY, 1e-60, 1e300, True)],
    *[("presence_penalty", value) for value in (-2.1, 2.1, NAN, INFINITY, True)],
    *[("frequency_penalty", value) for value in (-2.1, 2.1, NAN, -INFINITY, True)],
    *[("top_n_sigma", value) for value in (-1, NAN, INFINITY, 1e300, True, "one")],
    *[("no_repeat_ngram_size", value) for value in (-1, 1025, 2**32, 1.5, True)],
    *[("repetition_penalty_scope", value) for value in (0, True, "prompt")],
    *[
        ("logit_bias", value)
        for value in (
            {-1: 0.0},
            {2**32: 0.0},
            {True: 0.0},
            {"-1": 0.0},
            {1: NAN},
            {1: INFINITY},
            {1: 100.1},
            {1: True},
            [(1, 0.0)],
            dict.fromkeys(range(1025), 0.0),
        )
    ],
    *[("allowed_token_ids", value) for value in ([], [-1], [True], "1", [2**32], {1: 2})],
    *[("bad_token_ids", value) for value in ([-1], [True], "1", [2**32], {1: 2})],
    *[("bad_words", value) for value in ("word", [""], [3], ["x" * 257], ["x"] * 129, ["\ud800"], {"a": 1})],
    *[("stop_token_sequences", value) for value in BAD_SEQUENCES],
    *[("include_stop_str_in_output", value) for value in (0, "no")],
    *[("top_logprobs", value) for value in (-1, 2**32, True, 1.0)],
    *[("prompt_logprobs", value) for value in (-1, 2**32, True, 1.0)],
    *[("logprobs_mode", value) for value in ("cooked", "", 1, True)],
    *[("echo", value) for value in (0, "no")],
    *[("spaces_between_special_tokens", value) for value in (0, "no")],
    *[("output_logits", value) for value in ("some", "", True, ["all"])],
    *[("output_hidden_states", value) for value in ("some", "", True)],
    *[("output_embeddings", value) for value in ("some", "", True)],
    *[("bad_token_sequences", value) for value in (*BAD_SEQUENCES[:5], [[1] * 65], [[1]] * 1025)],
    *[("eos_token_ids", value) for value in BAD_IDS],
    *[("logits_processors", value) for value in (print, [3], [None], [print] * 17, "print")],
    *[
        ("response_format", value)
        for value in (
            "json_object",
            {},
            {"type": "xml"},
            {"type": ["text"]},
            {"type": "json_schema"},
            {"type": "json_schema", "json_schema": "object"},
            {"type": "json_schema", "json_schema": {"name": "no schema"}},
            {"type": "json_schema", "json_schema": {"schema": True}},
            {"type": "json_schema", "json_schema": {"schema": {}, "shema": {}}},
            {"type": "json_schema", "json_schema": {"schema": {}}, "strict": True},
            {"type": "json_object", "schema": {"type": "object"}},
            {"type": "text", "json_schema": {"schema": {}}},
            {"type": "json_schema", "json_schema": {"schema": {1: 2}}},
            {"type": "json_schema", "json_schema": {"schema": {"a": NAN}}},
            {"type": "json_schema", "json_schema": {"schema": {"a": {1, 2}}}},
            {"type": "json_schema", "json_schema": {"schema": {"a": "\ud800"}}},
        )
    ],
    *[("regex", value) for value in ("", 3, b"a", "\ud800", "x" * (2**20 + 1))],
    *[("grammar", value) for value in ("", 3, b"a", "\ud800", "x" * (2**20 + 1))],
    *[("choice", value) for value in ([], "yes", [""], [3], ["a"] * 1025, ["x" * 2**20, "x"])],
    *[("tools", value) for value in BAD_TOOLS],
    *[
        ("tool_choice", value)
        for value in ("any", "", 1, True, {}, {"type": "function"}, {"type": "function", "function": {}})
    ],
    *[("parallel_tool_calls", value) for value in (0, "no")],
]

OVERRIDES: list[Any] = [3, (), "{}", {"a": {1}}, {3: 4}, {"a": NAN}]
BAD_CONFIG: list[tuple[str, Any]] = [
    *[("device", value) for value in ("CUDA", "cuda:-1", "cuda:1000", "gpu", "", "cuda" * 99, 0, True)],
    *[("dtype", value) for value in ("int8", "FLOAT32", "", 32)],
    *[("kv_cache_dtype", value) for value in ("int4", "fp8", None.__class__)],
    *[("threads", value) for value in (0, -1, 1025, 1.0, True, "all")],
    *[("max_model_len", value) for value in (0, -1, 10**30, 1.5, True, "long")],
    *[("max_num_seqs", value) for value in (0, -1, 513, 1 << 20, True)],
    *[("max_num_batched_tokens", value) for value in (0, -1, 15, 1 << 21, True)],
    *[(name, value) for name in ("max_waiting", "max_paused", "max_unfinished") for value in (0, -1, True)],
    *[("max_prefill_chunk", value) for value in (0, -1, 1 << 21, True)],
    *[("max_logprobs", value) for value in (-2, 2**31, 1.0, True)],
    *[("block_size", value) for value in (0, -1, 8, 17, 256, 16.0, True, "16")],
    *[("kv_cache_bytes", value) for value in (0, -1, 2**63, 1e9, True)],
    *[("kv_cache_blocks", value) for value in (0, -1, 2**31, 1e3, True)],
    *[("kv_cache_ratio", value) for value in (0, 0.0, -0.1, 1.01, NAN, INFINITY, True, "half")],
    *[("memory_ratio", value) for value in (0, 0.0, -0.1, 1.01, NAN, INFINITY, True, "half")],
    *[("prefix_cache", value) for value in (0, 1, "yes")],
    *[("prefix_cache_ttl", value) for value in (0, 0.0, -1, 1e-12, 1e10, NAN, INFINITY, True, "long")],
    *[("host_cache_bytes", value) for value in (-1, 2**63, 1e9, True)],
    *[("host_cache_blocks", value) for value in (-1, 2**31, 1e3, True)],
    *[("config_overrides", value) for value in OVERRIDES],
    *[("preemption_mode", value) for value in ("abort", "", None.__class__, 1)],
    *[("tokenizer", value) for value in (3, ["path"], "\udcff")],
    *[("speculation", value) for value in ("draft", "", True)],
    *[("num_speculative_tokens", value) for value in (0, -1, 33, 1.0, True)],
    *[("tool_parser", value) for value in ("xml", "", 1)],
    *[("reasoning_parser", value) for value in ("tags", "", 1)],
]

#: Options whose limit depends on the model or on other options; checked when the engine opens.
BAD_FOR_THIS_MODEL: list[tuple[str, Any]] = [
    ("max_model_len", 513),
]


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    with make_engine(tiny_model) as engine:
        yield engine


def describe(case: Any) -> str:
    return ascii(case)[:40]


@pytest.mark.parametrize(("field", "value"), BAD_PARAMS, ids=describe)
def test_invalid_parameter_error_names_the_field(field: str, value: Any) -> None:
    with pytest.raises(penstock.InvalidRequestError) as caught:
        penstock.SamplingParams(**{field: value})
    error = caught.value
    assert error.field == field
    assert error.limit
    assert field in str(error)
    assert error.limit in str(error)
    assert len(str(error)) < 300
    assert isinstance(error, ValueError)


@pytest.mark.parametrize(("field", "value"), BAD_CONFIG, ids=describe)
def test_invalid_option_error_is_raised_before_loading(field: str, value: Any) -> None:
    with pytest.raises(penstock.ConfigError) as caught:
        penstock.Engine("no such model", **{field: value})
    assert caught.value.field == field
    assert caught.value.limit
    assert caught.value.limit in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_conflicting_sizes_error_is_raised_before_loading() -> None:
    conflicts: dict[str, dict[str, Any]] = {
        r"max_num_batched_tokens=32 .* block_size=64": {"block_size": 64, "max_num_batched_tokens": 32},
        r"max_num_seqs=65 .* max_num_batched_tokens=64": {"max_num_seqs": 65, "max_num_batched_tokens": 64},
        r"host_cache_bytes=0 .* preemption_mode is swap": {"preemption_mode": "swap", "host_cache_bytes": 0},
        r"host_cache_bytes=1 .* prefix_cache is False": {"prefix_cache": False, "host_cache_bytes": 1},
        r"host_cache_blocks=1 .* prefix_cache is False": {"prefix_cache": False, "host_cache_blocks": 1},
        r"host_cache_blocks=0 .* preemption_mode is swap": {
            "preemption_mode": "swap",
            "host_cache_blocks": 0,
        },
        r"kv_cache_blocks=9 .* when kv_cache_bytes is given": {"kv_cache_bytes": 9, "kv_cache_blocks": 9},
        r"kv_cache_ratio=0.5 .* when kv_cache_bytes is given": {"kv_cache_bytes": 9, "kv_cache_ratio": 0.5},
        r"kv_cache_ratio=0.5 .* when kv_cache_blocks is given": {"kv_cache_blocks": 9, "kv_cache_ratio": 0.5},
        r"host_cache_blocks=9 .* when host_cache_bytes is given": {
            "host_cache_bytes": 9,
            "host_cache_blocks": 9,
        },
        r"prefix_cache_ttl=9.0 .* prefix_cache is False": {"prefix_cache": False, "prefix_cache_ttl": 9},
        r"num_speculative_tokens=4 .* speculation is not given": {"num_speculative_tokens": 4},
    }
    for message, options in conflicts.items():
        with pytest.raises(penstock.ConfigError, match=message) as caught:
            penstock.EngineConfig(**options)
        assert caught.value.field is not None
        assert caught.value.value == options[caught.value.field]


@pytest.mark.parametrize(("field", "value"), BAD_FOR_THIS_MODEL, ids=describe)
def test_option_unsupported_by_the_model_is_named(tiny_model: Path, field: str, value: Any) -> None:
    with pytest.raises(penstock.ConfigError) as caught:
        make_engine(tiny_model, **{field: value}).blocking.start()
    assert caught.value.field == field
    assert str(value) in str(caught.value)
    assert caught.value.limit


def test_unknown_instruction_set_is_named(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_ISA", "avx9")
    with pytest.raises(penstock.ConfigError, match="PENSTOCK_ISA=avx9") as caught:
        make_engine(tiny_model).blocking.start()
    assert (caught.value.field, caught.value.value) == ("PENSTOCK_ISA", "avx9")
    assert "portable" in str(caught.value.limit)


@pytest.mark.parametrize("keyword", ["quantisation", "max_tokns", "beam_width"])
def test_unknown_keyword_is_named(engine: penstock.Engine, keyword: str) -> None:
    with pytest.raises(TypeError, match=keyword):
        penstock.Engine("no such model", **{keyword: 1})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=keyword):
        engine.blocking.generate(PROMPT, **{keyword: 1})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="SamplingParams"):
        engine.blocking.generate(PROMPT, {"max_tokens": 1})  # type: ignore[arg-type]


BAD_PROMPTS: dict[str, Any] = {
    "empty text": "",
    "empty list": [],
    "empty tuple": (),
    "nothing": None,
    "number": 7,
    "bytes": b"text",
    "id below zero": [1, -1],
    "id beyond the vocabulary": [1, 512],
    "id beyond 32 bits": [2**40],
    "id that is a float": [1.0],
    "id that is a bool": [True],
    "id that is text": ["1"],
    "lone surrogate": "before \ud800 after",
    "one token too many": [1] * 512,
    "long text": "x" * 600,
    "uncounted text": "x" * 2000,
    "text far too long": "x" * 20_000,
    "mapping": {"role": "user", "content": "hi"},
}


@pytest.mark.anyio
@pytest.mark.parametrize("case", BAD_PROMPTS)
async def test_invalid_prompt_error_names_the_prompt(engine: penstock.Engine, case: str) -> None:
    with pytest.raises(penstock.InvalidRequestError) as caught:
        await engine.start_request(BAD_PROMPTS[case])
    assert caught.value.field == "prompt"
    assert caught.value.limit
    assert "prompt" in str(caught.value)


@pytest.mark.anyio
async def test_error_of_a_text_of_two_lengths_names_the_tokens_counted(engine: penstock.Engine) -> None:
    with pytest.raises(penstock.InvalidRequestError) as caught:
        await engine.start_request("x" * 1025)
    assert (caught.value.value, caught.value.limit) == ("more than 1024", "at most 511 tokens")
    assert len(engine.encode("x" * 1025)) == 1025


@pytest.mark.anyio
@pytest.mark.parametrize("case", ["nothing", "number", "bytes", "mapping"])
async def test_wrong_prompt_type_error_lists_the_accepted_types(engine: penstock.Engine, case: str) -> None:
    with pytest.raises(penstock.InvalidRequestError, match=r"text, .* token ids .* messages"):
        await engine.start_request(BAD_PROMPTS[case])


BAD_MESSAGES: dict[str, Any] = {
    "no role": [{"content": "hi"}],
    "role of the wrong type": [{"role": 1, "content": "hi"}],
    "content of the wrong type": [{"role": "user", "content": 3}],
    "text among messages": [{"role": "user", "content": "hi"}, "hi"],
    "lone surrogate": [{"role": "user", "content": "\ud800"}],
}


@pytest.mark.anyio
@pytest.mark.parametrize("case", BAD_MESSAGES)
async def test_malformed_message_error_names_the_message(engine: penstock.Engine, case: str) -> None:
    with pytest.raises(penstock.InvalidRequestError, match="messages"):
        await engine.start_request(BAD_MESSAGES[case])


@pytest.mark.anyio
async def test_request_beyond_the_models_limits_error_has_the_numbers(engine: penstock.Engine) -> None:
    with pytest.raises(penstock.InvalidRequestError) as caught:
        await engine.start_request(PROMPT, stop_token_ids=[512])
    assert caught.value.field == "stop_token_ids"
    with pytest.raises(penstock.InvalidRequestError) as caught:
        await engine.start_request(PROMPT, min_tokens=509)
    assert caught.value.field == "min_tokens"


@pytest.mark.anyio
async def test_rejected_requests_leave_the_engine_unchanged(engine: penstock.Engine) -> None:
    async with engine.stream(PROMPT, LONG) as request:
        for prompt in BAD_PROMPTS.values():
            with pytest.raises(penstock.InvalidRequestError):
                await engine.start_request(prompt)
        assert len((await request.result()).token_ids) == 400
    await assert_at_rest(engine)


@pytest.mark.anyio
async def test_full_waiting_queue_rejects_new_requests_only(tiny_model: Path) -> None:
    options = {"max_num_seqs": 1, "max_waiting": 2, "config_overrides": {"max_position_embeddings": 65536}}
    async with make_engine(tiny_model, **options) as engine:
        outcomes: list[str] = []
        running = await engine.start_request(PROMPT, LONG.replace(max_tokens=60_000))
        await anext(running)

        async def ask() -> None:
            try:
                outcomes.append((await engine.generate(PROMPT, SHORT)).finish_reason)
            except penstock.OverloadedError as error:
                outcomes.append(str(error))
                if len(outcomes) == 8:
                    running.cancel()

        async with anyio.create_task_group() as group:
            for _ in range(10):
                group.start_soon(ask)
        assert outcomes.count("length") == 2
        assert sum("max_waiting" in outcome for outcome in outcomes) == 8
        await assert_at_rest(engine)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("no/such/path", "no such file"),
        ("missing.gguf", "no such file"),
        ("folder/missing.gguf", "no such file"),
        ("/nowhere", "no such file"),
        ("", "no such file"),
        ("a model", "no such file"),
    ],
)
def test_missing_path_is_named(name: str, hint: str) -> None:
    with pytest.raises(penstock.ModelLoadError, match=hint) as caught:
        penstock.Engine(name).blocking.start()
    assert name in str(caught.value)


def test_invalid_model_file_is_named(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.gguf").write_text("not a GGUF file, only its name")
    (tmp_path / "nothing.gguf").touch()
    for path in (
        tmp_path / "empty",
        tmp_path / "text.gguf",
        tmp_path / "nothing.gguf",
        tiny_model / "config.json",
    ):
        with pytest.raises(penstock.ModelLoadError) as caught:
            penstock.Engine(path).blocking.start()
        assert path.name in str(caught.value)
        assert "\n" not in str(caught.value)


def test_git_lfs_pointer_is_named_with_the_remedy(tiny_model: Path, tmp_path: Path) -> None:
    pointer = tmp_path / "tokenizer.json"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 548105171\n")
    for model, tokenizer in ((shutil.copy(pointer, tmp_path / "model.gguf"), None), (tiny_model, pointer)):
        with pytest.raises(penstock.ModelLoadError, match=r"is a git-lfs pointer.*git lfs pull"):
            penstock.Engine(model, tokenizer=tokenizer).blocking.start()


def test_tilde_in_model_and_tokenizer_is_the_home_folder(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny_model, tmp_path / "model")
    shutil.copy(tiny_model / "tokenizer.json", tmp_path / "other.json")
    monkeypatch.setenv("HOME", str(tmp_path))
    with make_engine("~/model", tokenizer="~/other.json") as engine:
        assert engine.config.tokenizer == "~/other.json"
        assert engine.decode(engine.encode("Hello")) == "Hello"


def test_hub_model_without_extra_or_network_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(penstock.ModelLoadError, match='the extra "hub" of penstock-llm: pip install'):
        penstock.Engine("owner/name").blocking.start()


@pytest.mark.anyio
async def test_messages_without_a_chat_template_raise(tiny_model: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    (model / "tokenizer_config.json").unlink()
    async with make_engine(model) as engine:
        with pytest.raises(penstock.InvalidRequestError, match="no chat template"):
            await engine.generate([{"role": "user", "content": "hi"}])


def test_insufficient_memory_error_has_the_numbers(tiny_model: Path) -> None:
    with pytest.raises(penstock.OutOfMemoryError, match="kv_cache_bytes"):
        make_engine(tiny_model, kv_cache_bytes=1 << 50).blocking.start()
    with pytest.raises(penstock.OutOfMemoryError, match="max_model_len"):
        make_engine(tiny_model, kv_cache_bytes=1 << 17, max_model_len=512).blocking.start()


def test_errors_form_one_hierarchy() -> None:
    assert issubclass(penstock.RequestError, penstock.PenstockError)
    for error in (penstock.InvalidRequestError, penstock.OverloadedError, penstock.GenerationError):
        assert issubclass(error, penstock.RequestError)
    assert issubclass(penstock.ConfigError, ValueError)
    assert issubclass(penstock.InvalidRequestError, ValueError)
