"""`/v1/completions`: prompts as texts and token ids, batches, echo, log probabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import pytest

import penstock.server
from penstock.server.completions import UNSUPPORTED
from penstock.server.protocol.openai_completions import CompletionRequest
from penstock.server.sampling import LABELS, SAMPLING_FIELDS
from support.api.engines import make_engine, wait_until
from support.server.serving import Served, at_rest, held, post, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PATH = "/v1/completions"
FIELDS: dict[str, Any] = {"max_tokens": 5, "seed": 1, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    with make_engine(tiny_model) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine: penstock.Engine) -> Iterator[Served]:
    with serving(penstock.server.app(engine)) as server:
        yield server


def texts_of(events: list[Any]) -> dict[int, str]:
    """The text of each choice of a stream."""
    texts: dict[int, str] = {}
    for event in events[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


def test_completion_has_16_tokens_by_default(server: Served) -> None:
    status, answer, _ = server.ask(PATH, {"prompt": "Hello", "ignore_eos": True})
    assert status == 200
    assert answer["object"] == "text_completion"
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"


def test_completion_of_token_ids_equals_the_engine(server: Served, engine: penstock.Engine) -> None:
    token_ids = engine.encode("ABC")
    expected = engine.blocking.generate(token_ids, max_tokens=5, seed=1, ignore_eos=True)
    for prompt in (token_ids, "ABC"):
        _, answer, _ = server.ask(PATH, {"prompt": prompt, **FIELDS, "return_token_ids": True})
        assert tuple(answer["choices"][0]["token_ids"]) == expected.token_ids
        assert answer["choices"][0]["text"] == expected.text


def test_null_for_every_optional_field_equals_an_omitted_one(server: Served) -> None:
    names = {*SAMPLING_FIELDS, *LABELS, *UNSUPPORTED, *CompletionRequest.__struct_fields__}
    body = {"prompt": "ABC", **FIELDS}
    _, plain, _ = server.ask(PATH, body)
    status, answer, _ = server.ask(PATH, {**dict.fromkeys(names), **body})
    assert (status, answer["choices"]) == (200, plain["choices"])


def test_batch_with_n_groups_the_choices_by_prompt(server: Served) -> None:
    single = [server.ask(PATH, {"prompt": prompt, "n": 2, **FIELDS})[1] for prompt in ([1, 2], [3])]
    _, answer, _ = server.ask(PATH, {"prompt": [[1, 2], [3]], "n": 2, **FIELDS})
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == [choice["text"] for one in single for choice in one["choices"]]
    assert answer["usage"]["prompt_tokens"] == 3
    streamed = texts_of(server.events(PATH, {"prompt": [[1, 2], [3]], "n": 2, **FIELDS}))
    assert streamed == dict(enumerate(texts))


def test_echo_begins_with_the_prompt(server: Served) -> None:
    _, plain, _ = server.ask(PATH, {"prompt": "ABC", **FIELDS})
    _, answer, _ = server.ask(PATH, {"prompt": "ABC", **FIELDS, "echo": True})
    assert answer["choices"][0]["text"] == "ABC" + plain["choices"][0]["text"]
    streamed = texts_of(server.events(PATH, {"prompt": "ABC", **FIELDS, "echo": True}))
    assert streamed[0] == answer["choices"][0]["text"]


def test_scoring_has_each_prompt_token_and_one_more(server: Served, engine: penstock.Engine) -> None:
    prompt = [65, 66, 67, 300, 301]
    scored = engine.blocking.score(prompt)
    fields = {
        "prompt": [prompt],
        "max_tokens": 1,
        "logprobs": 1,
        "echo": True,
        "temperature": 0,
        "seed": 1234,
    }
    _, answer, _ = server.ask(PATH, fields)
    logprobs = answer["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(prompt) + 1
    assert logprobs["token_logprobs"][:-1] == list(scored.logprobs)
    assert logprobs["top_logprobs"][0] is None
    for token, logprob, tops in list(
        zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    )[1:]:
        assert tops[token] == logprob
        assert max(tops.values()) >= logprob
    offsets = logprobs["text_offset"]
    text = answer["choices"][0]["text"]
    for token, offset in zip(logprobs["tokens"], offsets, strict=True):
        assert text[offset : offset + len(token)] == token


def test_echo_without_output_scores_the_prompt_only(server: Served) -> None:
    _, answer, _ = server.ask(PATH, {"prompt": "ABC", "max_tokens": 0, "logprobs": 0, "echo": True})
    [choice] = answer["choices"]
    assert choice["text"] == "ABC"
    assert choice["logprobs"]["tokens"] == ["A", "B", "C"]
    assert answer["usage"]["completion_tokens"] == 0


def test_streamed_logprobs_join_to_those_of_the_response(server: Served) -> None:
    fields = {"prompt": "ABC", **FIELDS, "logprobs": 2}
    _, answer, _ = server.ask(PATH, fields)
    joined: dict[str, list[Any]] = {}
    for event in server.events(PATH, fields)[:-1]:
        for name, values in (event["choices"][0]["logprobs"] or {}).items():
            joined.setdefault(name, []).extend(values)
    assert joined == answer["choices"][0]["logprobs"]


def test_negative_seed_is_taken_modulo_the_range(server: Served) -> None:
    answers = [server.ask(PATH, {**FIELDS, "prompt": "A", "seed": seed})[1] for seed in (-1, 2**64 - 1)]
    assert answers[0]["choices"] == answers[1]["choices"]


def test_prompt_is_truncated_from_the_left(server: Served, engine: penstock.Engine) -> None:
    fields = {**FIELDS, "return_token_ids": True, "truncate_prompt_tokens": 2}
    for prompt in ("ABCD", engine.encode("ABCD")):
        _, answer, _ = server.ask(PATH, {"prompt": prompt, **fields})
        assert answer["choices"][0]["prompt_token_ids"] == engine.encode("CD")


def test_beam_search_and_best_of_return_n_choices(server: Served, engine: penstock.Engine) -> None:
    _, answer, _ = server.ask(PATH, {"prompt": "ABC", "max_tokens": 4, "n": 2, "use_beam_search": True})
    expected = engine.blocking.generate("ABC", max_tokens=4, num_beams=2, n=2)
    assert [choice["text"] for choice in answer["choices"]] == [choice.text for choice in expected.choices]
    _, answer, _ = server.ask(PATH, {"prompt": "ABC", **FIELDS, "best_of": 3})
    best = engine.blocking.generate("ABC", max_tokens=5, seed=1, ignore_eos=True, best_of=3)
    first = engine.blocking.generate("ABC", max_tokens=5, seed=1, ignore_eos=True)
    assert [choice["text"] for choice in answer["choices"]] == [best.text] != [first.text]


def test_official_client_completes_and_streams(server: Served) -> None:
    body = {"ignore_eos": True}
    keywords: Any = {"model": "default", "prompt": "ABC", "max_tokens": 5, "seed": 1, "extra_body": body}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        answer = client.completions.create(**keywords)
        chunks = client.completions.create(**keywords, stream=True, stream_options={"include_usage": True})
        *parts, last = list(chunks)
    assert "".join(part.choices[0].text for part in parts) == answer.choices[0].text
    assert last.usage.prompt_tokens == answer.usage.prompt_tokens == 3
    assert last.usage.completion_tokens == answer.usage.completion_tokens == 5


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [[1]] * 1025}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [512]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": "a" * 600}, "prompt"),
        ({"prompt": [[1]] * 100, "n": 100}, "n"),
        ({"prompt": "a", "n": 1_000_000}, "n"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "logprobs": -1}, "logprobs"),
        ({"prompt": "a", "stop": ["a"] * 65}, "stop"),
        ({"prompt": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"prompt": "a", "echo": True, "logprobs": 1, "stream": True}, "echo"),
        ({"prompt": "a", "best_of": 2, "stream": True}, "best_of"),
        ({"prompt": "a", "stop_token_ids": [-1]}, "stop_token_ids"),
        ({"prompt": "a", "allowed_token_ids": [512]}, "allowed_token_ids"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        ({}, "prompt"),
    ],
)
def test_invalid_field_is_status_400_with_its_name(
    server: Served, fields: dict[str, Any], param: str
) -> None:
    status, answer, _ = server.ask(PATH, fields)
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert len(answer["error"]["message"]) < 500


@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_in_a_batch_frees_the_blocks(
    server: Served, engine: penstock.Engine, *, stream: bool
) -> None:
    with held(engine):
        body = {"prompt": [[1], [2], [3]], "max_tokens": 400, "ignore_eos": True, "stream": stream}
        connection = server.send(post(PATH, body))
        wait_until(lambda: engine.stats().running == 4)
        connection.close()
        wait_until(lambda: not server.application.state.calls.generations)
    wait_until(lambda: at_rest(engine))
