"""`to_dict` of the value classes: what `json.dumps` writes of a result."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest

import penstock
from support.api.engines import PROMPT, SHORT, make_engine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CALL = penstock.ToolCall(id="call_1", name="weather", arguments='{"city": "Bern"}')


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    with make_engine(tiny_model, profile=True) as engine:
        yield engine


def written(value: Any) -> Any:
    """The dict of a value, after it was written and read as strict JSON."""
    return json.loads(json.dumps(value.to_dict(), allow_nan=False))


def plain(value: Any) -> Any:
    """The JSON form of a property."""
    return [plain(item) for item in value] if isinstance(value, tuple) else value


def test_dict_of_a_result_has_every_field(engine: penstock.Engine) -> None:
    result = engine.blocking.generate(
        PROMPT, SHORT, n=2, logprobs=True, top_logprobs=2, prompt_logprobs=1, stop_token_sequences=[[1, 2]]
    )
    dict_ = written(result)
    assert list(dict_) == [
        "choices",
        "prompt_token_ids",
        "prompt_logprobs",
        "prompt_top_logprobs",
        "adapter",
        "usage",
        "timings",
    ]
    assert dict_["prompt_token_ids"] == list(PROMPT)
    assert dict_["prompt_logprobs"] == plain(result.prompt_logprobs)
    for choice, entry in zip(result.choices, dict_["choices"], strict=True):
        assert {name: entry[name] for name in entry} == {name: plain(getattr(choice, name)) for name in entry}
        assert entry["text"] == choice.text
    assert dict_["timings"] == result.timings.to_dict()


def test_dict_of_a_batch_item_has_the_result_or_the_message(engine: penstock.Engine) -> None:
    good, bad = engine.blocking.generate_many([PROMPT, [10**9]], SHORT)
    assert good.result is not None
    assert written(good) == {"index": 0, "result": written(good.result), "error": None}
    assert written(bad) == {"index": 1, "result": None, "error": str(bad.error)}


def test_dict_has_no_tensors(engine: penstock.Engine) -> None:
    options: penstock.SamplingParams = SHORT.replace(output_logits="all", output_hidden_states="generation")
    result = engine.blocking.generate(PROMPT, options)
    assert result.logits is not None
    assert not {"logits", "hidden_states", "embeddings"} & written(result.choices[0]).keys()


def test_usage_has_the_total_of_tokens() -> None:
    usage = penstock.Usage(prompt_tokens=5, completion_tokens=7, cached_tokens=3, cached_host_tokens=1)
    assert usage.total_tokens == 12
    assert usage.to_dict() == {
        "prompt_tokens": 5,
        "completion_tokens": 7,
        "cached_tokens": 3,
        "cached_host_tokens": 1,
        "total_tokens": 12,
    }


def test_tool_calls_have_the_form_of_openai() -> None:
    function = {"name": "weather", "arguments": '{"city": "Bern"}'}
    assert CALL.to_dict() == {"id": "call_1", "type": "function", "function": function}
    delta = penstock.ToolCallDelta(index=1, id="call_1", name="weather", arguments="")
    first = {"index": 1, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ""}}
    assert delta.to_dict() == first
    delta = penstock.ToolCallDelta(index=1, id=None, name=None, arguments='{"a')
    assert delta.to_dict() == {"index": 1, "function": {"arguments": '{"a'}}


def test_numbers_that_json_lacks_are_none() -> None:
    score = penstock.Score(token_ids=(1, 2, 3), logprobs=(None, -math.inf, -1.0), perplexity=math.inf)
    assert written(score) == {"token_ids": [1, 2, 3], "logprobs": [None, None, -1.0], "perplexity": None}


def test_every_value_class_has_a_dict(engine: penstock.Engine) -> None:
    score = engine.blocking.score("Hello")
    chunk = next(engine.blocking.start_request(PROMPT, max_tokens=1))
    stats, health = engine.stats(), engine.health()
    for value in (engine.info, stats, stats.queue_time, health, engine.profile()[0], score, chunk):
        dict_ = written(value)
        names = {name for name, item in _properties(value)}
        tensors = {"logits", "hidden_states", "embeddings"} if value is chunk else set()
        assert tensors <= names
        assert dict_.keys() == names - tensors
    assert written(engine.info)["memory"] == engine.info.memory.to_dict()


def test_finished_requests_are_counted_by_reason(tiny_model: Path) -> None:
    with make_engine(tiny_model) as engine:
        result = engine.blocking.generate(PROMPT, SHORT)
        engine.blocking.generate(PROMPT, SHORT, stop_token_ids=[result.token_ids[2]])
        stats = engine.stats()
        assert (stats.finished_length, stats.finished_stop, stats.requests_finished) == (1, 1, 2)
        assert 258 in engine.info.eos_token_ids


def _properties(value: object) -> list[tuple[str, object]]:
    cls = type(value)
    return [(name, item) for name, item in vars(cls).items() if type(item).__name__ == "getset_descriptor"]


def test_token_bytes_join_to_the_text(engine: penstock.Engine) -> None:
    ids = engine.encode("naïve 🌍")
    pieces = engine.token_bytes(ids)
    assert [type(piece) for piece in pieces] == [bytes] * len(ids)
    assert b"".join(pieces).decode() == "naïve 🌍"
    assert engine.token_bytes([]) == []
    assert engine.token_bytes([2**32 - 1]) == [b""]
    with pytest.raises(penstock.InvalidRequestError, match="token_ids"):
        engine.token_bytes([-1])


def test_logit_bias_takes_string_keys(engine: penstock.Engine) -> None:
    params = penstock.SamplingParams(logit_bias=json.loads(json.dumps({7: 100, 300: -1.5})))
    assert params == penstock.SamplingParams(logit_bias={7: 100, 300: -1.5})
    assert params.logit_bias == {7: 100.0, 300: -1.5}
    result = engine.blocking.generate(PROMPT, SHORT, logit_bias={"7": 100}, temperature=0)
    assert set(result.token_ids) == {7}
