"""The requests of the load generator: random prompts, datasets, and settings that are out of range."""

from __future__ import annotations

import itertools
import json
import math
from typing import TYPE_CHECKING, Any

import pytest

import penstock
from penstock.bench.prompts import bodies
from penstock.bench.serve import Benchmark
from penstock.bench.settings import BenchSettings

if TYPE_CHECKING:
    from pathlib import Path

URL = "http://127.0.0.1:1"


def fields_of(count: int, **fields: Any) -> list[dict[str, Any]]:
    return [
        json.loads(body.content)
        for body in itertools.islice(bodies(BenchSettings(url=URL, **fields), "m"), count)
    ]


def test_random_prompts_have_the_lengths_and_share_the_prefix() -> None:
    options: dict[str, Any] = {
        "input_len": 20,
        "output_len": 10,
        "random_range_ratio": 0.5,
        "random_prefix_len": 7,
        "random_vocab_size": 50,
    }
    rows = fields_of(400, **options)
    prompts = [row["prompt"] for row in rows]
    assert {len(prompt) - 7 for prompt in prompts} == set(range(10, 31))
    assert {row["max_tokens"] for row in rows} == set(range(5, 16))
    assert len({tuple(prompt[:7]) for prompt in prompts}) == 1
    assert len({tuple(prompt[7:12]) for prompt in prompts}) > 390
    assert {token for prompt in prompts for token in prompt} == set(range(50))
    assert fields_of(400, **options) == rows
    assert fields_of(400, **options, seed=1) != rows


def test_chats_and_texts_have_random_words() -> None:
    [chat] = fields_of(1, endpoint="chat", input_len=12)
    [text] = fields_of(1, random_text=True, input_len=12)
    assert [message["role"] for message in chat["messages"]] == ["user"]
    assert len(chat["messages"][0]["content"].split()) == 12
    assert len(text["prompt"].split()) == 12


def test_request_asks_for_usage_and_takes_more_fields() -> None:
    [default] = fields_of(1, prompt="Hi")
    assert default["temperature"] == 0.0
    [fields] = fields_of(1, prompt="Hi", ignore_eos=True, extra_body={"temperature": 0.5, "top_k": 3})
    assert fields == {
        "model": "m",
        "prompt": "Hi",
        "max_tokens": 128,
        "temperature": 0.5,
        "top_k": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }


ROWS = [{"prompt": "Hi", "output_tokens": 3}, {"conversations": [{"from": "human", "value": "Ho"}]}]


@pytest.mark.parametrize("is_array", [False, True])
def test_dataset_has_vllms_and_sharegpts_fields(tmp_path: Path, *, is_array: bool) -> None:
    file = tmp_path / "data"
    file.write_text(json.dumps(ROWS) if is_array else "\n".join(map(json.dumps, ROWS)))
    rows = fields_of(3, dataset_path=str(file), output_len=5)
    assert [(row["prompt"], row["max_tokens"]) for row in rows] == [("Hi", 3), ("Ho", 5), ("Hi", 3)]


@pytest.mark.parametrize("size", [None, 1, 2])
def test_repeated_prompts_are_known(tmp_path: Path, size: int | None) -> None:
    file = tmp_path / "data"
    file.write_text(json.dumps(ROWS))
    sources: dict[int | None, dict[str, Any]] = {
        None: {},
        1: {"prompt": "Hi"},
        2: {"dataset_path": str(file)},
    }
    made = itertools.islice(bodies(BenchSettings(url=URL, **sources[size]), "m"), 4)
    assert [body.is_repeated for body in made] == [size is not None and index >= size for index in range(4)]


def test_dataset_that_is_no_text_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(b"\x93NUMPY\xff\x00")
    with pytest.raises(penstock.ConfigError, match="not JSON: 'utf-8' codec"):
        fields_of(1, dataset_path=str(file))


def test_dataset_of_messages_is_for_chats(tmp_path: Path) -> None:
    file = tmp_path / "data"
    messages = [{"role": "user", "content": "Hi"}]
    file.write_text(json.dumps({"messages": messages}))
    assert fields_of(1, dataset_path=str(file), endpoint="chat")[0]["messages"] == messages
    with pytest.raises(penstock.ConfigError, match="does not fit the endpoint completions"):
        fields_of(1, dataset_path=str(file))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no entries"),
        ("[]", "no entries"),
        ("{", "not JSON"),
        ("3", "entry 1: not an object"),
        ('{"prompt": "a"}\n{}', "entry 2: no prompt, messages or conversations"),
        ('{"prompt": 3}', "entry 1: the prompt is neither"),
        ('{"prompt": "a", "output_tokens": 0}', "entry 1: output_tokens is 0"),
    ],
)
def test_dataset_that_cannot_be_used_is_an_error(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "data"
    file.write_text(content)
    with pytest.raises(penstock.ConfigError, match=message):
        fields_of(1, dataset_path=str(file))


@pytest.mark.parametrize("path", ["", "/", "/a@b/v1"])
def test_shown_address_has_no_password(path: str) -> None:
    settings = BenchSettings(url=f"http://me:pass@word@host:80{path}")
    assert settings.shown_url == f"http://host:80{path}"
    assert Benchmark(settings).result()["settings"]["url"] == f"http://host:80{path}"


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"url": "127.0.0.1"}, "url"),
        ({"endpoint": "embeddings"}, "endpoint"),
        ({"concurrency": [0]}, "concurrency"),
        ({"num_prompts": 0}, "num_prompts"),
        ({"request_rate": [1.0, -1.0]}, "request_rate"),
        ({"concurrency": [1], "request_rate": [1.0]}, "request_rate"),
        ({"request_rate": [math.inf], "duration": 1.0}, "num_prompts"),
        ({"duration": 1.0}, "num_prompts"),
        ({"random_range_ratio": 1.0}, "random_range_ratio"),
        ({"metric_percentiles": [101]}, "metric_percentiles"),
        ({"goodput": {"itl": 5}}, "goodput"),
        ({"goodput": {"ttft": math.nan}}, "goodput"),
        ({"timeout": math.nan}, "timeout"),
        ({"prompt": "a", "dataset_path": "b"}, "prompt"),
    ],
)
def test_setting_out_of_range_is_an_error(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(penstock.ConfigError) as error:
        BenchSettings(**{"url": URL, **fields})
    assert error.value.field == name
