"""The fields of LMDeploy's results: text of complete characters, stop words, log probabilities, tensors."""

from __future__ import annotations

import codecs
import itertools
import math
import random
import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tokenizers

import penstock
from penstock import Chunk
from penstock.compat.lmdeploy import GenerationConfig, Pipeline
from penstock.compat.lmdeploy.generation import Ask, prepare
from penstock.compat.lmdeploy.outputs import Reader
from penstock.compat.lmdeploy.tokenizer import Tokenizer
from support.api.engines import wait_until
from support.compat.lmdeploy import GREEDY, config, open_pipeline

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock import SamplingParams
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
    """Parameters that give this text, by its bytes."""
    schema = {"type": "regex_schema", "regex_schema": text}
    return GenerationConfig(max_new_tokens=max_new_tokens, response_format=schema, **fields)


def test_choices_of_a_prompt_are_those_of_their_seeds(pipe: Pipeline) -> None:
    def seeded(seed: int | None, n: int = 1) -> GenerationConfig:
        return GenerationConfig(n=n, do_sample=True, random_seed=seed, max_new_tokens=8, ignore_eos=True)

    plain, several = pipe.infer(["a", "b"], [seeded(5), seeded(7, n=3)], **RAW)
    assert plain.other_choices == []
    assert [choice.choice for choice in several.other_choices] == [1, 2]
    for seed, response in enumerate((several, *several.other_choices), 7):
        assert (response.index, response.finish_reason) == (1, "length")
        assert response.token_ids == pipe.infer("b", seeded(seed), **RAW).token_ids
    random_ones = pipe.infer("b", seeded(None, n=2), **RAW)
    assert random_ones.token_ids != random_ones.other_choices[0].token_ids
    [*_, last] = streamed(pipe, "b", seeded(7, n=3))
    assert (last.generate_token_len, last.other_choices) == (8, [])


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
    assert demo.tokenizer.decode(ids) == "The quick"  # the stop word begins in the next token


def partitions(count: int) -> Iterator[list[int]]:
    """The lengths of chunks: one token each, all at once, two halves at each place, and random ones."""
    yield [1] * count
    yield [count]
    yield from ([place, count - place] for place in range(1, count))
    chance = random.Random(5)
    for _ in range(20):
        lengths: list[int] = []
        while sum(lengths) < count:
            lengths.append(min(chance.randint(1, 6), count - sum(lengths)))
        yield lengths


def chunk_of(text: str, **fields: Any) -> Chunk:
    values: dict[str, Any] = {"content": text, "reasoning": "", "tool_calls": (), "index": 0}
    values |= dict.fromkeys(("finish_reason", "stop_reason", "logits", "hidden_states", "embeddings"))
    return Chunk(text=text, **values | fields)


def chunks_of_tokens(pipe: Pipeline, prompt: str, params: SamplingParams) -> list[Chunk]:
    """One chunk for each token, as a reader that waits for every token gets them."""
    result = pipe.engine.blocking.generate(prompt, params)
    chunks, start = [], 0
    for count in range(1, len(result.token_ids) + 1):
        text = pipe.tokenizer.decode(result.token_ids[:count]).rstrip("\ufffd")
        held = 0
        for stop in () if params.include_stop_str_in_output else params.stop or ():
            held = max(held, *(size for size in range(len(stop)) if text.endswith(stop[:size])))
        end, fields = len(text) - held, {}
        if count == len(result.token_ids):
            text, end = result.text, len(result.text)
            fields = {"finish_reason": result.finish_reason, "stop_reason": result.stop_reason}
        chunk = chunk_of(
            text[start:end],
            token_ids=[result.token_ids[count - 1]],
            logprobs=(result.logprobs or ())[count - 1 : count],
            top_logprobs=(result.top_logprobs or ())[count - 1 : count],
            **fields,
        )
        chunks.append(chunk)
        start = end
    return chunks


def merged(parts: list[Chunk]) -> Chunk:
    """The chunk that a slower reader gets."""
    fields: dict[str, Any] = {
        name: [one for part in parts for one in getattr(part, name)]
        for name in ("token_ids", "logprobs", "top_logprobs")
    }
    fields |= {name: getattr(parts[-1], name) for name in ("finish_reason", "stop_reason")}
    return chunk_of("".join(part.text for part in parts), **fields)


@pytest.mark.parametrize(
    ("text", "fields", "kept"),
    [
        ("The quick brown fox jumps", {"stop_words": ["own fox"]}, "The quick"),
        ("one two three four five six", {"stop_words": ["three four five si"]}, "one two"),
        ("\u4f60\u597d\u4e16\u754c", {"stop_words": ["\u4e16\u754c"]}, "\u4f60\u597d"),
        ("a " * 30 + "b c", {"stop_words": ["a b c"]}, ("a " * 29)[:-1]),
        ("The quick brown", {"stop_words": ["quick"], "include_stop_str_in_output": True}, "The"),
        ("no such word", {"stop_words": ["such worlds"]}, "no such word"),
        ("Hello", {"stop_words": ["zzz"], "max_new_tokens": 3}, None),
    ],
)
def test_ids_do_not_depend_on_the_chunks(text: str, fields: Any, kept: str | None, demo: Pipeline) -> None:
    gen_config = regex(text, logprobs=1, **fields)
    _, params, _ = prepare(demo._context(), Ask("a", gen_config, do_preprocess=False), None)
    tokens = chunks_of_tokens(demo, "a", params)
    whole, session = None, None
    for lengths in partitions(len(tokens)):
        reader, places = Reader(demo.tokenizer, gen_config, params), iter(tokens)
        *head, tail = [merged(list(itertools.islice(places, length))) for length in lengths]
        parts = [part for chunk in head if (part := reader.read(chunk)) is not None]
        assert all(part.text or part.ids for part in parts)
        last, num_stored = reader.read_last(tail)
        parts.append(last)
        ids = [token for part in parts for token in part.ids]
        assert [
            token in one for part in parts for token, one in zip(part.ids, part.logprobs or (), strict=True)
        ]
        whole, session = whole or ids, session or reader.ids[:num_stored]
        assert (ids, reader.ids[:num_stored]) == (whole, session)
        assert reader.num_returned == len(ids)
    response = demo.infer("a", gen_config, **RAW)
    assert response.token_ids == whole
    if kept is not None:
        assert session is not None
        assert demo.tokenizer.decode(session) == kept


@pytest.mark.parametrize(
    "output",
    [
        b"\xe2" * 3000,
        b"\x80" * 3000,
        b"\xf0\x9f" * 1500,
        "\U0001f600".encode() * 700 + b"\xf0\x9f" * 700,
        "caf\u00e9 \u4f60".encode() * 300,
    ],
)
def test_ids_of_a_long_output_are_found_in_linear_time(output: bytes, demo: Pipeline) -> None:
    tokenizer = demo.tokenizer.model
    ids_of_bytes = {text: token for token, text in enumerate(tokenizer.token_bytes(range(49_000)))}
    ids = [ids_of_bytes[output[place : place + 1]] for place in range(len(output))]
    num_decoded = 0

    def decode(ids: list[int], **_: Any) -> str:
        nonlocal num_decoded
        num_decoded += len(ids)
        return tokenizer.decode(ids)

    counting: Any = SimpleNamespace(model=SimpleNamespace(decode=decode))
    reader = Reader(counting, GREEDY, penstock.SamplingParams(stop="no such word"))
    decoder, first = codecs.getincrementaldecoder("utf-8")("replace"), 0
    for place, token in enumerate(ids):
        text = decoder.decode(output[place : place + 1])
        part = reader.read(chunk_of(text, token_ids=[token], logprobs=None, top_logprobs=None))
        if part is not None:
            assert part.ids == ids[first : first + len(part.ids)]
            first += len(part.ids)
            assert len(tokenizer.decode(ids[:first])) - 1 <= len(tokenizer.decode(ids[: place + 1]))
    assert first >= len(ids) - 4
    assert num_decoded < 400 * len(ids)


def test_slow_reader_gets_the_ids_of_a_fast_one(demo: Pipeline) -> None:
    gen_config = regex("one two three four five", stop_words=["three four fi"])
    whole = demo.infer("a", gen_config, **RAW)
    parts = demo.stream_infer("a", gen_config=gen_config, **RAW)
    received = []
    for part in parts:
        received.append(part)
        wait_until(lambda: demo.engine.stats().running == 0)  # the other tokens are one chunk
    assert joined(received) == (whole.text, whole.token_ids)
    assert all(part.text or part.token_ids for part in received[:-1])


@pytest.mark.parametrize("stop", [None, "brown"])
def test_session_is_stored_without_a_stop_that_is_returned(stop: str | None, demo: Pipeline) -> None:
    fields: dict[str, Any] = {"include_stop_str_in_output": True, "skip_special_tokens": False}
    gen_config = regex("The quick brown", stop_words=[stop] if stop else None, **fields)
    session = demo.session()
    answer: Any = demo.chat("a", session, gen_config).response
    assert answer.text.startswith("The quick brown")
    stored = demo.sessions._states[session.session_id].ids
    assert demo.tokenizer.decode(stored, skip_special_tokens=False).endswith(
        "The quick" if stop else "The quick brown"
    )
    assert session.step == len(stored) < answer.input_token_len + answer.generate_token_len
    demo.chat("b", session, gen_config)
    assert session.step > len(stored) + 2
    session.close()


@pytest.mark.parametrize("text", ["\u4f60\u597d", "a\u4f60", "\U0001f600"])
def test_part_of_a_character_by_byte_fallback_is_left_out(text: str, tmp_path: Path) -> None:
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "a"]
    vocabulary = {name: token for token, name in enumerate(names)}
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocabulary, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True)  # noqa: S106
    )
    tokenizer.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    facade = Tokenizer(penstock.Tokenizer(tmp_path))
    ids = facade.encode(text)
    for length in range(1, len(ids) + 1):
        reader = Reader(facade, GREEDY, penstock.SamplingParams())
        chunk = chunk_of(
            facade.decode(ids[:length]),
            token_ids=ids[:length],
            finish_reason="length",
            logprobs=None,
            top_logprobs=None,
        )
        data = b"".join(facade.model.token_bytes(ids[:length]))
        assert reader.read_last(chunk)[0].text == data.decode(errors="ignore")


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
    assert parts[-1].token_ids[-1] == ids[-1]
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

    def cat(self, tensors: Any) -> Any:
        return np.concatenate(tensors)


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
@pytest.mark.parametrize("scope", ["generation", "all"])
def test_logits_have_the_rows_of_the_ids_beside_stop_words(scope: Any, demo: Pipeline) -> None:
    gen_config = regex("one two three four five", stop_words=["three four fi"], output_logits=scope)
    whole = demo.infer("ab", gen_config, **RAW)
    parts = streamed(demo, "ab", gen_config)
    num_before = 0 if scope == "generation" else whole.input_token_len - 1
    assert len(whole.logits) == num_before + len(whole.token_ids)
    num_rows = [0 if part.logits is None else len(part.logits) for part in parts]
    num_rows[0] -= num_before
    assert num_rows == [len(part.token_ids) for part in parts]
    rows = np.concatenate([part.logits for part in parts if part.logits is not None])
    assert np.array_equal(rows, whole.logits)


@pytest.mark.usefixtures("_torch")
def test_logits_have_no_row_of_the_stop_token(demo: Pipeline) -> None:
    whole = demo.infer("a", regex("Hello", output_logits="generation"), **RAW)
    assert (whole.finish_reason, len(whole.logits)) == ("stop", len(whole.token_ids))


def test_logits_without_torch_are_a_typed_error(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match='the extra "lmdeploy" of penstock-llm'):
        pipe.get_logits([1, 2, 3])
    response = pipe.infer("ab", config(output_logits="generation"), **RAW)
    assert (response.finish_reason, response.error_code) == ("error", "unsupported_feature")
    assert 'the extra "lmdeploy" of penstock-llm' in str(response.error_message)


def test_reader_of_plain_outputs_makes_no_copies(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hot path of a stream takes the chunks of these parameters as they are."""
    from penstock import SamplingParams

    for fields, is_plain in (({}, True), ({"stop": ["a"]}, False), ({"logprobs": True}, False)):
        assert Reader(pipe.tokenizer, GREEDY, SamplingParams(**fields)).is_plain == is_plain
    num_read = 0
    read = Reader.read

    def counted(reader: Reader, chunk: Chunk) -> Any:
        nonlocal num_read
        num_read += 1
        return read(reader, chunk)

    monkeypatch.setattr(Reader, "read", counted)
    plain = streamed(pipe, "ab", config(64))
    assert num_read == 0

    def other_is_read() -> bool:
        assert joined(streamed(pipe, "ab", config(64, logprobs=1))) == joined(plain)
        return num_read > 0  # the last chunk is read otherwise, and can be the only one

    wait_until(other_is_read)
