"""Generation parameters of LMDeploy's pipeline: several requests at once, and results."""

from __future__ import annotations

import copy
import re
from typing import TYPE_CHECKING

import numpy as np
import pytest

from penstock.compat.lmdeploy import ChatTemplateConfig, GenerationConfig, pipeline
from penstock.compat.lmdeploy.messages import Response
from support.compat.lmdeploy import LIBRARIES, library_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.compat.lmdeploy import Pipeline

QUESTION = "Tell me about Paris"
CALL_ME = {"type": "regex_schema", "regex_schema": "call me [A-Z][a-z]{1,9}"}


@pytest.fixture(scope="module")
def pipe(demo_model: Path) -> Iterator[Pipeline]:
    with pipeline(demo_model, max_batch_size=32, session_len=160) as pipe:
        yield pipe


def test_seeded_request_is_the_same_in_any_batch(pipe: Pipeline) -> None:
    config = GenerationConfig(max_new_tokens=8, do_sample=True, random_seed=5, ignore_eos=True)
    others = [GenerationConfig(max_new_tokens=8, do_sample=True, ignore_eos=True) for _ in range(31)]
    alone = pipe(QUESTION, gen_config=config).token_ids
    assert pipe([QUESTION] * 32, gen_config=[*others[:16], config, *others[16:]])[16].token_ids == alone


def test_requests_without_a_seed_differ(pipe: Pipeline) -> None:
    config = GenerationConfig(max_new_tokens=16, top_k=0, temperature=1.5, ignore_eos=True)
    texts = {response.text for response in pipe([QUESTION] * 3, gen_config=config)}
    assert len(texts) == 3


def test_each_request_of_a_batch_has_its_own_format(pipe: Pipeline) -> None:
    free, guided = GenerationConfig(max_new_tokens=16), GenerationConfig(response_format=CALL_ME)
    without = GenerationConfig(max_new_tokens=16, bad_words=["Paris"])
    invalid = GenerationConfig(response_format={"type": "regex_schema", "regex_schema": "("})
    alone = pipe(QUESTION, gen_config=free).text
    responses = pipe([QUESTION] * 5, gen_config=[free, guided, invalid, without, free])
    assert [response.text for response in (responses[0], responses[4])] == [alone, alone]
    assert re.fullmatch(CALL_ME["regex_schema"], responses[1].text)
    assert (responses[2].finish_reason, responses[2].error_code) == ("error", "invalid_request")
    assert "regex_schema='('" in responses[2].error_message
    assert "Paris" in alone
    assert "Paris" not in responses[3].text


def test_unsupported_parameter_is_an_error_of_its_request(pipe: Pipeline) -> None:
    configs = [GenerationConfig(max_new_tokens=4), GenerationConfig(return_ppl=True)]
    good, bad = pipe([QUESTION] * 2, gen_config=configs)
    assert good.finish_reason == "length"
    assert (bad.finish_reason, bad.error_code) == ("error", "unsupported_feature")
    assert "return_ppl is True" in bad.error_message


def test_stop_words_of_the_template_end_an_answer(demo_model: Path) -> None:
    config = ChatTemplateConfig("internlm-chat-7b", stop_words=["Fantasy"], meta_instruction="Be brief.")
    with pipeline(demo_model, chat_template_config=config) as pipe:
        response = pipe(QUESTION, gen_config=GenerationConfig(stop_words=["zebra"], max_new_tokens=64))
        ignoring = pipe(QUESTION, gen_config=GenerationConfig(ignore_eos=True, max_new_tokens=64))
    assert response.finish_reason == "stop"
    assert "Fantasy" not in response.text
    assert "Fantasy" in ignoring.text
    assert (ignoring.finish_reason, ignoring.generate_token_len) == ("length", 64)


def test_last_answer_of_a_chat_is_continued(pipe: Pipeline) -> None:
    messages = [{"role": "user", "content": "Count to five."}, {"role": "assistant", "content": "1, 2, 3,"}]
    assert pipe(messages, gen_config=GenerationConfig(max_new_tokens=4)).text.lstrip().startswith("4")


def test_maximum_length_none_is_what_the_session_has_left(pipe: Pipeline) -> None:
    response = pipe(QUESTION, gen_config=GenerationConfig(max_new_tokens=None, ignore_eos=True))
    assert response.input_token_len + response.generate_token_len == 160
    assert response.finish_reason == "length"


def test_logprobs_are_finite_and_have_the_token(pipe: Pipeline) -> None:
    response = pipe(
        QUESTION, gen_config=GenerationConfig(max_new_tokens=8, logprobs=10, top_k=0, random_seed=1)
    )
    assert len(response.logprobs) == len(response.token_ids) == 8
    for token, logprobs in zip(response.token_ids, response.logprobs, strict=True):
        assert 10 <= len(logprobs) <= 11
        assert token in logprobs
        assert all(-100 < value <= 0 for value in logprobs.values())


def test_logprobs_can_be_more_than_twenty(pipe: Pipeline) -> None:
    response = pipe(QUESTION, gen_config=GenerationConfig(max_new_tokens=2, logprobs=1024))
    assert [len(logprobs) for logprobs in response.logprobs] == [1024, 1024]


def test_parts_of_a_response_are_joined() -> None:
    first = Response("Hel", 1, 5, token_ids=[1], logprobs=[{1: -0.5}])
    second = Response("lo", 2, 5, "stop", token_ids=[2], logprobs=[{2: -0.25}], index=3, cached_tokens=4)
    joined = copy.deepcopy(first).extend(second)
    assert joined == Response(
        "Hello", 2, 5, "stop", [1, 2], [{1: -0.5}, {2: -0.25}], index=3, cached_tokens=4
    )
    assert first.extend(Response("", 1, 5, "length")).logprobs == [{1: -0.5}]


@pytest.mark.parametrize("library", LIBRARIES)
def test_rows_of_joined_parts_are_those_of_the_whole(
    library: str, pipe: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    library_of(library, monkeypatch)
    config = GenerationConfig(max_new_tokens=6, output_logits="all", output_last_hidden_state="generation")
    whole = pipe(QUESTION, gen_config=config)
    parts = list(pipe.stream_infer(QUESTION, gen_config=config))
    joined = parts[0]
    for part in parts[1:]:
        joined.extend(part)
    assert joined.token_ids == whole.token_ids
    np.testing.assert_array_equal(joined.logits, whole.logits)
    np.testing.assert_array_equal(joined.last_hidden_state, whole.last_hidden_state)
    assert len(whole.last_hidden_state) == 6


def test_text_of_a_response_has_its_fields() -> None:
    response = Response("a\nb", 2, 5, "stop", token_ids=[1, 2])
    assert repr(response).startswith("text='a\\nb'\ninput_token_len=5\ngenerate_token_len=2\n")
    assert str(response).startswith("text=a\nb\ninput_token_len=5\n")
    assert 'finish_reason="stop"\ntoken_ids=[1, 2]\nlogprobs=None' in str(response)
    failed = Response("", 0, 0, "error", error_code="invalid_request", error_message="n is 0")
    assert str(failed).endswith("error_code=invalid_request\nerror_message=n is 0")
