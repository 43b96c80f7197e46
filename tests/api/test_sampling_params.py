"""`SamplingParams`: conflicts between fields, stored values, hostile values, model defaults."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
import re
import shutil
import tracemalloc
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest

import penstock
from penstock._session import should_offload
from support.api.checkpoints import make_config, write_checkpoint
from support.api.engines import PROMPT, make_engine

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {}}}},
}
SCHEMA: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {"name": "point", "schema": {"type": "object", "properties": {"y": {}, "x": {}}}},
}
NAMED = {"type": "function", "function": {"name": "weather"}}
NAMED_NEWS = {"type": "function", "function": {"name": "news"}}

CONFLICTS: dict[str, tuple[str, dict[str, Any]]] = {
    "at most max_tokens, 3": ("min_tokens", {"min_tokens": 4, "max_tokens": 3}),
    "at most max_length, 3": ("min_tokens", {"min_tokens": 4, "max_length": 3}),
    "at least n, 3": ("best_of", {"n": 3, "best_of": 2}),
    "left out when num_beams is above 1": ("best_of", {"num_beams": 4, "best_of": 4}),
    "left out when num_beams is 1": ("length_penalty", {"length_penalty": 0.5}),
    "at most num_beams, 2": ("n", {"num_beams": 2, "n": 3}),
    "a beam search does not sample": ("temperature", {"num_beams": 2, "temperature": 0.5}),
    "beam search does not sample": ("top_p", {"num_beams": 2, "top_p": 0.5}),
    "a step of a beam search does not distinguish": (
        "presence_penalty",
        {"num_beams": 2, "presence_penalty": 0.5},
    ),
    "beam search does not support it": ("regex", {"num_beams": 2, "regex": "a+"}),
    "search does not support it": ("echo", {"num_beams": 2, "echo": True}),
    "does not support it": ("tools", {"num_beams": 2, "tools": [TOOL]}),
    "not support it": ("logits_processors", {"num_beams": 2, "logits_processors": [print]}),
    "left out when use_prefix_cache is False": (
        "cache_salt",
        {"cache_salt": "a", "use_prefix_cache": False},
    ),
    "at least one id that is not in bad_token_ids": (
        "allowed_token_ids",
        {"allowed_token_ids": [1, 2], "bad_token_ids": [2, 1]},
    ),
    "left out when logprobs is False": ("top_logprobs", {"top_logprobs": 3}),
    "logprobs is False and prompt_logprobs is not given": ("logprobs_mode", {"logprobs_mode": "processed"}),
    "left out when response_format is given": ("regex", {"response_format": SCHEMA, "regex": "a"}),
    "left out when regex is given: an output": ("choice", {"regex": "a", "choice": ["a"]}),
    "left out when choice is given": ("grammar", {"choice": ["a"], "grammar": "start: A"}),
    "left out when regex is given: an end token": ("ignore_eos", {"regex": "a", "ignore_eos": True}),
    "False when tool_choice requires": (
        "ignore_eos",
        {"tools": [TOOL], "tool_choice": "required", "ignore_eos": True},
    ),
    "left out when ignore_eos is True": ("eos_token_ids", {"eos_token_ids": [3], "ignore_eos": True}),
    "at least one id when choice is given": ("eos_token_ids", {"eos_token_ids": [], "choice": ["a"]}),
    "left out when tools is not given": ("tool_choice", {"tool_choice": "auto"}),
    "when tools is not given": ("parallel_tool_calls", {"parallel_tool_calls": False}),
    "the name of one of the tools": (
        "tool_choice",
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "news"}}},
    ),
    "left out when tools can be called": ("regex", {"tools": [TOOL], "regex": "a"}),
}

TOGETHER: list[dict[str, Any]] = [
    {"n": 3, "best_of": 3},
    {"num_beams": 4, "n": 4, "length_penalty": 0.0, "temperature": 0},
    {"num_beams": 2, "response_format": {"type": "text"}},
    {"spaces_between_special_tokens": True, "skip_special_tokens": False},
    {"prompt_logprobs": 0, "logprobs_mode": "processed"},
    {"logprobs": True, "top_logprobs": 20, "logprobs_mode": "processed"},
    {"response_format": {"type": "text"}, "regex": "a"},
    {"tools": [TOOL], "tool_choice": "none", "regex": "a"},
    {"tools": [TOOL], "response_format": {"type": "text"}, "parallel_tool_calls": False},
    {"top_k": -1, "allowed_token_ids": [1], "bad_token_ids": [2]},
]

VALUES: dict[str, Any] = {
    "logit_bias": {7: -1.5, 2: 100.0},
    "allowed_token_ids": [5, 3, 5],
    "bad_words": ["one", "two"],
    "stop_token_sequences": [[1, 2], [3]],
    "bad_token_sequences": [[4], [1, 2]],
    "eos_token_ids": [],
    "logits_processors": [print, len],
    "response_format": SCHEMA,
    "tools": [
        TOOL,
        {"type": "function", "function": {"name": "news", "strict": True, "description": "é\n\0"}},
    ],
    "tool_choice": NAMED,
    "choice": ["yes", "no"],
    "grammar": 'start: "a"',
    "regex": "[a-z]+",
    "output_logits": "all",
    "seed": 2**64 - 1,
}


@pytest.mark.parametrize("limit", CONFLICTS)
def test_conflicting_parameters_are_named(limit: str) -> None:
    field, options = CONFLICTS[limit]
    with pytest.raises(penstock.InvalidRequestError) as caught:
        penstock.SamplingParams(**options)
    assert caught.value.field == field
    assert limit in str(caught.value.limit)


HINTS: dict[str, tuple[dict[str, Any], str]] = {
    "top_k": ({"top_k": -2}, "an integer from -1"),
    "logit_bias keys": ({"logit_bias": {"-5": 1}}, "token ids (integers from 0) as keys"),
    "logit_bias twice": ({"logit_bias": {"5": 1, 5: 2}}, "a mapping that has token 5 once"),
    "logit_bias": ({"logit_bias": {5: 1, 7: 101}}, "from -100 to 100, the bias of token 7"),
    "stop": ({"stop": b"x"}, "a string or a sequence of strings"),
    "logprobs": ({"logprobs": 5}, "top_logprobs"),
    "top_logprobs": ({"top_logprobs": 2}, "set logprobs=True"),
    "tool_choice name": ({"tools": [TOOL], "tool_choice": NAMED_NEWS}, "one of the tools: 'weather'"),
    "tool_choice": ({"tools": [TOOL], "tool_choice": {"name": "weather"}}, "'function': {'name': ...}"),
    "tools": ({"tools": [{"type": "function", "function": {"name": "a", "strict": 1}}]}, "True or False"),
}


@pytest.mark.parametrize("case", HINTS)
def test_invalid_value_error_names_the_correct_form(case: str) -> None:
    options, hint = HINTS[case]
    with pytest.raises(penstock.InvalidRequestError) as caught:
        penstock.SamplingParams(**options)
    assert caught.value.field == case.partition(" ")[0]
    assert hint in str(caught.value)


UNKNOWN = {
    "max_new_tokens": "a request has no keyword 'max_new_tokens': did you mean max_tokens?",
    "guided_json": "did you mean response_format?",
    "temprature": "did you mean temperature?",
    "stream": "engine.stream",
    "timeout": "put a timeout around the call",
    "threads": "it is an option of Engine",
    "xyzzy": "see help(penstock.SamplingParams)",
}


@pytest.mark.parametrize("keyword", UNKNOWN)
def test_unknown_request_keyword_error_has_a_hint(keyword: str) -> None:
    options: dict[str, Any] = {keyword: 1}
    for call in (
        partial(penstock.SamplingParams, **options),
        partial(penstock.SamplingParams().replace, **options),
    ):
        with pytest.raises(TypeError, match=re.escape(UNKNOWN[keyword])):
            call()


def test_unknown_engine_keyword_error_has_a_hint() -> None:
    for keyword, hint in {
        "gpu_memory_utilization": "no keyword 'gpu_memory_utilization': did you mean memory_ratio?",
        "max_num_seq": "did you mean max_num_seqs?",
        "temperature": "it is a parameter of requests",
        "xyzzy": "see help(penstock.EngineConfig)",
    }.items():
        with pytest.raises(TypeError, match=re.escape(hint)):
            penstock.Engine("model", **{keyword: 1})  # type: ignore[arg-type]


@pytest.mark.parametrize("options", TOGETHER, ids=str)
def test_compatible_parameters_are_accepted(options: dict[str, Any]) -> None:
    assert penstock.SamplingParams(**options) != penstock.SamplingParams()


@pytest.mark.parametrize("field", VALUES)
def test_value_is_kept_and_copies_are_equal(field: str) -> None:
    options = {field: VALUES[field]} | ({"tools": [TOOL]} if field == "tool_choice" else {})
    params = penstock.SamplingParams(**options)
    kept = getattr(params, field)
    assert json.dumps(kept, default=repr) == json.dumps(
        dict(sorted(VALUES[field].items())) if field == "logit_bias" else VALUES[field], default=repr
    )
    copies = [pickle.loads(pickle.dumps(params)), copy.deepcopy(params), params.replace()]  # noqa: S301
    if field != "logits_processors":
        copies.append(eval(repr(params), vars(penstock)))  # noqa: S307 - evaluates the repr under test
    for other in copies:
        assert other == params
        assert hash(other) == hash(params)
    assert params != penstock.SamplingParams()


def test_mappings_are_copied_on_write_and_read() -> None:
    given: dict[str, Any] = copy.deepcopy({"response_format": SCHEMA, "logit_bias": {1: 1.0}})
    params = penstock.SamplingParams(**given)
    given["response_format"]["type"] = "text"
    params.response_format["type"] = "text"  # type: ignore[index]
    params.logit_bias[1] = 2.0  # type: ignore[index]
    assert params.response_format == SCHEMA
    assert params.logit_bias == {1: 1.0}


def test_schema_order_matters_and_bias_order_does_not() -> None:
    def schema(*names: str) -> penstock.SamplingParams:
        properties: dict[str, Any] = {name: {} for name in names}
        wrapped = {"type": "json_schema", "json_schema": {"schema": {"properties": properties}}}
        return penstock.SamplingParams(response_format=wrapped)

    assert schema("x", "y") != schema("y", "x")
    one, other = ({1: 0.0, 2: 1}, {2: 1.0, 1: -0.0})
    assert penstock.SamplingParams(logit_bias=one) == penstock.SamplingParams(logit_bias=other)
    assert hash(penstock.SamplingParams(logit_bias=one)) == hash(penstock.SamplingParams(logit_bias=other))


def test_processors_are_compared_by_python_equality() -> None:
    class Bias:
        def apply(self, token_ids: Any, logits: Any) -> None: ...

    one, other = Bias(), Bias()
    params = penstock.SamplingParams(logits_processors=[one.apply])
    assert params == penstock.SamplingParams(logits_processors=[one.apply])
    assert params != penstock.SamplingParams(logits_processors=[other.apply])
    assert params != penstock.SamplingParams(logits_processors=[one.apply, one.apply])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop_token_ids", itertools.repeat(1)),
        ("bad_token_ids", range(2**60)),
        ("allowed_token_ids", itertools.repeat(1)),
        ("stop", itertools.repeat("x")),
        ("bad_words", itertools.repeat("x")),
        ("choice", itertools.repeat("x")),
        ("stop_token_sequences", [itertools.repeat(1)]),
        ("stop_token_sequences", itertools.repeat([1])),
        ("logits_processors", itertools.repeat(print)),
    ],
)
def test_endless_iterable_is_read_only_up_to_the_limit(field: str, value: Any) -> None:
    with pytest.raises(penstock.InvalidRequestError, match="at most") as caught:
        penstock.SamplingParams(**{field: value})
    assert caught.value.field == field


def shared(depth: int) -> Any:
    """A value that is small in memory and doubles with each level when serialised."""
    value: Any = ["x"]
    for _ in range(depth):
        value = [value, value]
    return value


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": shared(60)},
        {"enum": ["x" * 2**20]},
        {"a": [[[[]]]] * 2**20},
    ],
    ids=["shared", "long text", "many"],
)
def test_oversized_schema_is_rejected_before_serialisation(schema: Any) -> None:
    wrapped = {"type": "json_schema", "json_schema": {"schema": schema}}
    tracemalloc.start()
    try:
        with pytest.raises(penstock.InvalidRequestError, match="1048576 bytes") as caught:
            penstock.SamplingParams(response_format=wrapped)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    assert len(str(caught.value)) < 400


def test_recursive_schema_object_is_rejected() -> None:
    schema: dict[str, Any] = {}
    schema["properties"] = schema
    with pytest.raises(penstock.InvalidRequestError, match="64 nested arrays and objects"):
        penstock.SamplingParams(response_format={"type": "json_schema", "json_schema": {"schema": schema}})


def test_large_value_is_abbreviated_in_the_message() -> None:
    class Large(list[int]):
        def __repr__(self) -> str:
            raise AssertionError

    for value in ([1] * 10**7, "x" * 10**7, b"x" * 10**7, dict.fromkeys(range(10**6))):
        with pytest.raises(penstock.InvalidRequestError) as caught:
            penstock.SamplingParams(temperature=value)  # type: ignore[arg-type]
        assert len(str(caught.value)) < 300
    with pytest.raises(penstock.InvalidRequestError, match="Large"):
        penstock.SamplingParams(temperature=Large())  # type: ignore[arg-type]


def test_exception_while_reading_a_value_propagates() -> None:
    def ids() -> Iterator[int]:
        yield 1
        raise LookupError

    with pytest.raises(LookupError):
        penstock.SamplingParams(stop_token_ids=ids())  # type: ignore[arg-type]


# ---- limits and defaults of the model and the prompt


def write_generation_config(model: Path, **fields: object) -> None:
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, **fields}))


def resolved(
    engine: penstock.Engine, prompt: Sequence[int] = PROMPT, **options: Any
) -> penstock.SamplingParams:
    """The parameters of a request with all defaults filled in."""
    request = engine.blocking.start_request(prompt, **options)
    request.cancel()
    return request.params


@pytest.mark.parametrize("count", [0.5, 1.0, 2.0])
def test_top_n_sigma_samples_near_the_highest_logit(tiny_model: Path, count: float) -> None:
    with make_engine(tiny_model) as engine:
        for seed in range(4):
            result = engine.blocking.generate(
                PROMPT, top_n_sigma=count, temperature=2, seed=seed, max_tokens=16, output_logits="generation"
            )
            rows = np.asarray(result.logits)
            floor = rows.max(axis=1) - count * rows.std(axis=1)
            chosen = rows[np.arange(len(rows)), result.token_ids]
            assert (chosen >= floor - 1e-4).all()
        options: dict[str, Any] = {"temperature": 2, "seed": 1, "max_tokens": 16}
        plain = engine.blocking.generate(PROMPT, **options)
        assert engine.blocking.generate(PROMPT, top_n_sigma=0, **options).token_ids == plain.token_ids
        assert engine.blocking.generate(PROMPT, top_n_sigma=None, **options).token_ids == plain.token_ids
        greedy = engine.blocking.generate(PROMPT, temperature=0, max_tokens=16)
        nearest = engine.blocking.generate(PROMPT, top_n_sigma=1e-6, **options)
        assert nearest.token_ids == greedy.token_ids


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_model, tmp_path / "model")


def test_model_defaults_apply_to_unset_parameters(model: Path) -> None:
    own: dict[str, Any] = {
        "temperature": 0.9,
        "top_k": 7,
        "top_p": 0.8,
        "min_p": 0.1,
        "typical_p": 0.7,
        "epsilon_cutoff": 0.001,
        "repetition_penalty": 1.1,
        "no_repeat_ngram_size": 3,
    }
    write_generation_config(model, **own, max_new_tokens=5, max_length=6)
    with make_engine(model) as engine:
        params = resolved(engine)
        assert {name: getattr(params, name) for name in own} == own
        assert params.max_tokens == 5
        ones: dict[str, Any] = dict.fromkeys(own, 1) | {"epsilon_cutoff": 0}
        params = resolved(engine, **ones, max_tokens=40)
        assert {name: getattr(params, name) for name in own} == ones
        assert params.max_tokens == 40
        assert resolved(engine, max_length=9).max_tokens == 5


def test_max_length_counts_the_prompt(model: Path) -> None:
    write_generation_config(model, max_length=6)
    with make_engine(model) as engine:
        assert resolved(engine).max_tokens == 2
        assert resolved(engine, max_length=7, max_tokens=9).max_tokens == 3
        assert resolved(engine, max_length=7, max_tokens=1).max_tokens == 1
        assert resolved(engine, max_tokens=9).max_tokens == 9
        rejected: list[dict[str, Any]] = [{"max_length": 4}, {"max_length": 3, "max_tokens": 5}]
        for options in rejected:
            with pytest.raises(
                penstock.InvalidRequestError, match="more than the 4 tokens of the prompt"
            ) as caught:
                resolved(engine, **options)
            assert caught.value.field == "max_length"


def test_oversized_logits_request_error_has_the_bytes(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, make_config("llama", vocab_size=8192))  # 32 KiB of logits per position
    with make_engine(model) as engine:
        resolved(engine, [1], n=64, max_tokens=511, output_logits="generation")
        with pytest.raises(penstock.InvalidRequestError, match="would take 1088389120 bytes") as caught:
            resolved(engine, [1], n=65, max_tokens=511, output_logits="generation")
        assert caught.value.field == "output_logits"


def test_endless_prompt_is_read_only_up_to_the_limit(tiny_model: Path) -> None:
    with make_engine(tiny_model) as engine:
        with pytest.raises(penstock.InvalidRequestError, match="at most 511 ids") as caught:
            engine.blocking.start_request(itertools.repeat(1))  # type: ignore[arg-type]
        assert caught.value.field == "prompt"


@pytest.mark.parametrize("options", [{"best_of": 3}, {"num_beams": 3}], ids=str)
def test_best_of_and_beams_cannot_be_streamed(tiny_model: Path, options: Any) -> None:
    with make_engine(tiny_model) as engine:
        with pytest.raises(penstock.InvalidRequestError, match="generate") as caught:
            engine.blocking.start_request(PROMPT, **options)
        assert caught.value.field in options


def test_tools_require_messages(tiny_model: Path) -> None:
    with make_engine(tiny_model) as engine:
        with pytest.raises(penstock.InvalidRequestError) as caught:
            engine.blocking.start_request(PROMPT, tools=[TOOL])
        assert caught.value.field == "tools"


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("regex", "(", "regular expression"),
        ("grammar", "start: undefined_rule", "Lark"),
        ("grammar", 'root ::= item\nitem ::= "a', 'GBNF grammar: line 2, rule "item"'),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"schema": {"type": "number of"}}},
            "schema",
        ),
    ],
)
def test_invalid_grammar_error_names_field_and_reason(
    tiny_model: Path, field: str, value: Any, reason: str
) -> None:
    with make_engine(tiny_model) as engine:
        with pytest.raises(penstock.InvalidRequestError, match=reason) as caught:
            engine.blocking.start_request(PROMPT, **{field: value})
        assert caught.value.field == field


def test_bad_words_of_too_many_tokens_are_rejected(tiny_model: Path) -> None:
    words = [f"{number:03}{'x' * 20}" for number in range(60)]
    with make_engine(tiny_model) as engine:
        with pytest.raises(penstock.InvalidRequestError, match="at most 1024 tokens in all") as caught:
            engine.blocking.start_request(PROMPT, bad_words=words)
        assert caught.value.field == "bad_words"


class Meddling(list[int]):
    """Iteration changes the dict that contains it."""

    schema: ClassVar[dict[str, Any]] = {}

    def __iter__(self) -> Iterator[int]:
        self.schema[f"more{len(self.schema)}"] = 1
        return iter([1, 2])


def test_custom_iteration_does_not_affect_json_serialisation() -> None:
    schema = Meddling.schema
    schema.update({"type": "object", "enum": Meddling([1]), "title": "x"})
    params = penstock.SamplingParams(
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    )
    kept: Any = params.response_format
    assert kept["json_schema"]["schema"] == {"type": "object", "enum": [1], "title": "x"}


class Interrupted:
    """A number whose conversion raises `KeyboardInterrupt`."""

    def __index__(self) -> int:
        raise KeyboardInterrupt

    __float__ = __index__


@pytest.mark.parametrize(
    "field", ["max_tokens", "temperature", "top_k", "priority", "seed", "stop_token_ids"]
)
def test_interrupt_while_reading_a_number_propagates(field: str) -> None:
    value: Any = [Interrupted()] if field == "stop_token_ids" else Interrupted()
    with pytest.raises(KeyboardInterrupt):
        penstock.SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("options", "prefix"),
    [
        ({"stop_token_ids": [1, 2, 1.5]}, "stop_token_ids[2]=1.5"),
        ({"stop": ["a", ""]}, "stop[1]=''"),
        ({"stop_token_sequences": [[1], [2, -3]]}, "stop_token_sequences[1][1]=-3"),
        ({"logits_processors": [print, 3]}, "logits_processors[1]=3"),
    ],
    ids=str,
)
def test_invalid_sequence_item_error_names_its_index(options: dict[str, Any], prefix: str) -> None:
    with pytest.raises(penstock.InvalidRequestError) as caught:
        penstock.SamplingParams(**options)
    assert str(caught.value).startswith(prefix)
    assert caught.value.field == next(iter(options))


def test_many_bad_words_are_tokenised_in_a_worker_thread() -> None:
    words = ["x" * 200] * 12
    assert should_offload(PROMPT, penstock.SamplingParams(bad_words=words))
    assert not should_offload(PROMPT, penstock.SamplingParams(bad_words=words[:2]))


def test_long_stop_lists_are_prepared_in_a_worker_thread() -> None:
    stops = ["x" * 1000] * 3
    assert should_offload(PROMPT, penstock.SamplingParams(stop=stops))
    assert not should_offload(PROMPT, penstock.SamplingParams(stop=stops[:2]))
