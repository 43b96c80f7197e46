"""The fields of LMDeploy's results: text of complete characters, stop words, log probabilities, tensors."""

from __future__ import annotations

import math
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from penstock.compat.lmdeploy import GenerationConfig, Pipeline
from penstock.compat.lmdeploy.outputs import Reader
from support.lmdeploy import GREEDY, config, open_pipeline

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.compat.lmdeploy.messages import Response

RAW: dict[str, Any] = {"do_preprocess": False}


@pytest.fixture(scope="module")
def pipe(tiny_model: Path) -> Iterator[Pipeline]:
    with open_pipeline(tiny_model) as pipe:
        yield pipe


@pytest.fixture(scope="module")
def demo(demo_model: Path) -> Iterator[Pipeline]:
    with Pipeline(demo_model, session_len=512) as pipe:
        yield pipe


def streamed(pipe: Pipeline, prompt: str, gen_config: GenerationConfig) -> list[Response]:
    return list(pipe.stream_infer(prompt, gen_config=gen_config, **RAW))


def joined(parts: list[Response]) -> tuple[str, list[int]]:
    return "".join(part.text for part in parts), [token for part in parts for token in part.token_ids]


def regex(text: str, max_new_tokens: int = 200, **fields: Any) -> GenerationConfig:
    """Parameters whose output is this text, by its bytes."""
    schema = {"type": "regex_schema", "regex_schema": text}
    return GenerationConfig(max_new_tokens=max_new_tokens, response_format=schema, **fields)


@pytest.mark.parametrize(
    "text", ["h\u00e9llo", "\u4f60\u597d\u4e16\u754c", "\U0001f600\U0001f680 ok", "a\ufffdb", "a\ufffd"]
)
def test_parts_have_complete_characters(text: str, demo: Pipeline) -> None:
    whole = demo.infer("a", regex(text), **RAW)
    parts = streamed(demo, "a", regex(text))
    assert whole.text == text == joined(parts)[0]
    assert joined(parts)[1] == whole.token_ids
    assert whole.text == demo.tokenizer.decode(whole.token_ids)


@pytest.mark.parametrize("text", ["\u4f60\u597d\u4e16", "\U0001f600\U0001f680\U0001f600"])
def test_part_of_a_character_at_the_end_is_left_out(text: str, demo: Pipeline) -> None:
    lengths = range(1, len(demo.infer("a", regex(text), **RAW).token_ids) + 1)
    texts = []
    for length in lengths:
        cut = demo.infer("a", regex(text, length), **RAW)
        assert len(cut.token_ids) == cut.generate_token_len == length
        assert text.startswith(cut.text)
        assert joined(streamed(demo, "a", regex(text, length))) == (cut.text, cut.token_ids)
        texts.append(cut.text)
    assert texts[-1] == text
    assert any(demo.tokenizer.decode(demo.tokenizer.encode(text)[:length]) not in texts for length in lengths)


@pytest.mark.parametrize("streams", [False, True])
def test_stop_word_over_tokens_is_in_no_part(streams: bool, demo: Pipeline) -> None:  # noqa: FBT001
    text, stop = "The quick brown fox jumps", "own fox"
    gen_config = regex(text, stop_words=[stop])
    if streams:
        parts = streamed(demo, "a", gen_config)
        found, ids = joined(parts)
        last = parts[-1]
    else:
        last = demo.infer("a", gen_config, **RAW)
        found, ids = last.text, last.token_ids
    assert (found, last.finish_reason) == ("The quick br", "stop")
    assert last.generate_token_len == len(ids)
    # The ids are those of the text, and of the token that the stop word begins in.
    assert demo.tokenizer.decode(ids) in ("The quick br", "The quick brown")


def test_stop_token_is_left_out_unless_asked_for(demo: Pipeline) -> None:
    plain = demo.infer("a", regex("Hello"), **RAW)
    assert (plain.text, plain.finish_reason) == ("Hello", "stop")
    assert demo.tokenizer.decode(plain.token_ids, skip_special_tokens=False) == "Hello"
    assert plain.generate_token_len == len(plain.token_ids)
    fields = dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), False)
    fields["include_stop_str_in_output"] = True
    parts = streamed(demo, "a", regex("Hello", **fields))
    text, ids = joined(parts)
    assert ids[:-1] == plain.token_ids
    assert ids[-1] in demo.engine.info.eos_token_ids
    assert text.startswith("Hello<")
    assert parts[-1].finish_reason == "stop"
    assert parts[-1].token_ids == ids[-1:]
    assert parts[-1].generate_token_len == len(ids) == plain.generate_token_len + 1


@pytest.mark.parametrize("streams", [False, True])
def test_each_token_has_its_log_probabilities(streams: bool, pipe: Pipeline) -> None:  # noqa: FBT001
    gen_config = config(logprobs=5, top_k=0, temperature=2.0, random_seed=1)
    if streams:
        parts = streamed(pipe, "ab", gen_config)
        ids = joined(parts)[1]
        logprobs = [one for part in parts for one in part.logprobs or ()]
    else:
        whole = pipe.infer("ab", gen_config, **RAW)
        ids, logprobs = whole.token_ids, whole.logprobs or []
    assert len(ids) == len(logprobs) == 8
    for token, one in zip(ids, logprobs, strict=True):
        assert token in one
        assert 5 <= len(one) <= 6
        assert all(math.isfinite(value) and value <= 0 for value in one.values())
    assert pipe.infer("ab", GREEDY, **RAW).logprobs is None


class _Torch(ModuleType):
    """The function of torch that is used, with arrays of numpy."""

    def from_dlpack(self, tensor: Any) -> Any:
        return np.from_dlpack(tensor).copy()


@pytest.fixture
def _torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("generation", "outputs"):
        monkeypatch.setattr(f"penstock.compat.lmdeploy.{module}.torch", lambda: _Torch("torch"))


@pytest.mark.usefixtures("_torch")
@pytest.mark.parametrize("scope", ["generation", "all"])
@pytest.mark.parametrize("streams", [False, True])
def test_logits_have_a_row_for_each_position(scope: Any, streams: bool, pipe: Pipeline) -> None:  # noqa: FBT001
    gen_config = config(output_logits=scope, output_last_hidden_state=scope)
    whole = pipe.infer("abc", gen_config, **RAW)
    if streams:
        parts = streamed(pipe, "abc", gen_config)
        logits = np.concatenate([part.logits for part in parts if part.logits is not None])
        states = np.concatenate([part.last_hidden_state for part in parts if part.logits is not None])
        assert np.array_equal(logits, whole.logits)
    else:
        logits, states = whole.logits, whole.last_hidden_state
    rows = 8 if scope == "generation" else whole.input_token_len + 8 - 1
    assert logits.shape == (rows, 512)
    assert states.shape == (rows, 128)
    assert logits[-8:].argmax(axis=1).tolist() == whole.token_ids


@pytest.mark.usefixtures("_torch")
def test_logits_have_no_row_of_the_stop_token(demo: Pipeline) -> None:
    whole = demo.infer("a", regex("Hello", output_logits="generation"), **RAW)
    assert (whole.finish_reason, len(whole.logits)) == ("stop", len(whole.token_ids))


def test_logits_without_torch_are_a_typed_error(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=r"penstock\[lmdeploy\]"):
        pipe.get_logits([1, 2, 3])
    response = pipe.infer("ab", config(output_logits="generation"), **RAW)
    assert (response.finish_reason, response.error_code) == ("error", "unsupported_feature")
    assert "penstock[lmdeploy]" in str(response.error_message)


def test_reader_of_plain_outputs_makes_no_copies(pipe: Pipeline) -> None:
    """The hot path of a stream takes the chunks of these parameters as they are."""
    from penstock import SamplingParams

    for fields, is_plain in (({}, True), ({"stop": ["a"]}, False), ({"logprobs": True}, False)):
        assert Reader(pipe, GREEDY, SamplingParams(**fields)).is_plain == is_plain
