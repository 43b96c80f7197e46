"""Stop strings, stop tokens and stop token sequences, and their effect on the text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import penstock
from support.api.engines import LONG, PROMPT, make_engine
from support.server.scripted import write_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from typing import Unpack

    from penstock._options import SamplingOptions

pytestmark = pytest.mark.anyio

DRAWN = LONG.replace(temperature=1.0, max_tokens=120)
END_OF_TURN = 258


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    with make_engine(tiny_model) as engine:
        yield engine


async def streamed(engine: penstock.Engine, **options: Unpack[SamplingOptions]) -> penstock.Result:
    """The result, after checking that its chunks join to the same."""
    request = await engine.start_request(PROMPT, DRAWN, **options)
    chunks = [chunk async for chunk in request]
    result = await request.result()
    assert "".join(chunk.text for chunk in chunks) == result.text
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == result.token_ids
    return result


def end_of_first(tokens: Sequence[int], sequence: Sequence[int]) -> int:
    """The end of the first occurrence of `sequence`."""
    length = len(sequence)
    return next(
        end for end in range(length, len(tokens) + 1) if tuple(tokens[end - length : end]) == tuple(sequence)
    )


@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("kept", ["kept", ""])
async def test_stop_sequence_is_in_token_ids_but_not_in_text(
    engine: penstock.Engine, length: int, kept: str
) -> None:
    whole = await engine.generate(PROMPT, DRAWN)
    for start in range(0, 100, 9):
        sequence = whole.token_ids[start : start + length]
        end = end_of_first(whole.token_ids, sequence)
        result = await streamed(
            engine, stop_token_sequences=[sequence], include_stop_str_in_output=bool(kept)
        )
        assert (result.finish_reason, result.stop_reason) == ("stop", sequence)
        assert result.token_ids == whole.token_ids[:end]
        assert result.text == engine.decode(whole.token_ids[: end if kept else end - length])


async def test_partial_stop_sequence_is_text(engine: penstock.Engine) -> None:
    whole = await engine.generate(PROMPT, DRAWN)
    tokens = whole.token_ids
    begun = [[*tokens[start : start + length], 511] for start in range(0, 90, 7) for length in (1, 2, 3, 9)]
    assert 511 not in tokens
    result = await streamed(engine, stop_token_sequences=begun)
    assert (result.text, result.token_ids, result.finish_reason) == (whole.text, tokens, "length")


async def test_self_overlapping_stop_sequence_matches_at_its_first_end(engine: penstock.Engine) -> None:
    tokens = (await engine.generate(PROMPT, DRAWN, temperature=0.0)).token_ids
    start = next(start for start in range(100) if len({*tokens[start : start + 4]}) == 1)
    end = next(end for end in range(start, 120) if tokens[end] != tokens[start])
    for length in range(1, end - start + 1):
        sequence = tokens[end - length : end + 1]
        result = await streamed(
            engine, temperature=0.0, stop_token_sequences=[sequence, [*sequence[1:], 511]]
        )
        assert result.token_ids == tokens[: end_of_first(tokens, sequence)]
        assert result.text == engine.decode(result.token_ids[: -length - 1])


async def test_stop_string_matches_where_a_stop_sequence_may_begin(engine: penstock.Engine) -> None:
    whole = await engine.generate(PROMPT, DRAWN)
    for start in range(10, 60, 7):
        stop = engine.decode(whole.token_ids[start : start + 1])
        if not stop or "\ufffd" in stop:
            continue
        plain = await streamed(engine, stop=stop)
        sequence = [*plain.token_ids[-1:], *whole.token_ids[len(plain.token_ids) :][:3], 511]
        held = await streamed(engine, stop=stop, stop_token_sequences=[sequence])
        assert (held.text, held.token_ids) == (plain.text, plain.token_ids)
        assert (held.finish_reason, held.stop_reason) == ("stop", stop)


async def test_include_stop_str_keeps_stop_strings_and_tokens(engine: penstock.Engine) -> None:
    whole = await engine.generate(PROMPT, DRAWN)
    stop = whole.text[40:44]
    result = await streamed(engine, stop=stop, include_stop_str_in_output=True)
    assert result.text == whole.text[: whole.text.index(stop) + len(stop)]
    assert (result.finish_reason, result.stop_reason) == ("stop", stop)
    token = whole.token_ids[20]
    end = whole.token_ids.index(token) + 1
    result = await streamed(engine, stop_token_ids=[token], include_stop_str_in_output=True)
    assert (result.token_ids, result.stop_reason) == (whole.token_ids[:end], token)
    assert result.text == engine.decode(whole.token_ids[:end])


async def test_special_stop_token_is_kept_only_if_special_tokens_shown(
    engine: penstock.Engine,
) -> None:
    choices = (await engine.generate(PROMPT, DRAWN, temperature=2.0, n=32)).choices
    choice = next(choice for choice in choices if END_OF_TURN in choice.token_ids)
    before = engine.decode(choice.token_ids[: choice.token_ids.index(END_OF_TURN)])
    params = DRAWN.replace(temperature=2.0, seed=choice.seed, ignore_eos=False)
    for include, skip, text in [
        (False, True, ""),
        (False, False, ""),
        (True, True, ""),
        (True, False, "<|im_end|>"),
    ]:
        result = await engine.generate(
            PROMPT, params, include_stop_str_in_output=include, skip_special_tokens=skip
        )
        assert (result.text, result.stop_reason) == (before + text, END_OF_TURN)


async def test_characters_before_a_stop_sequence_are_kept(
    engine: penstock.Engine, tiny_model: Path, tmp_path: Path
) -> None:
    for seed in range(100):
        ids = (await engine.generate(PROMPT, DRAWN, temperature=2.0, max_tokens=5, seed=seed)).token_ids
        if len(set(ids)) == 5:
            break
    pieces = dict(zip(ids, ["A", "<0xC3>", "<0xA9>", "end", "<0xC3>of"], strict=True))
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json", 512, pieces)
    async with make_engine(tiny_model, tokenizer=tokenizer) as scripted:
        params = DRAWN.replace(temperature=2.0, seed=seed)
        request = await scripted.start_request(PROMPT, params, stop_token_sequences=[ids[3:]])
        chunks = [chunk async for chunk in request]
        assert "".join(chunk.text for chunk in chunks) == (await request.result()).text == "A\u00e9"


#: The model generates its end of a turn at once.
ENDING = {END_OF_TURN: 100.0}


async def test_eos_token_ids_replace_the_end_tokens_of_the_model(engine: penstock.Engine) -> None:
    plain = await engine.generate(PROMPT, max_tokens=9, logit_bias=ENDING)
    assert (plain.token_ids, plain.stop_reason) == ((END_OF_TURN,), END_OF_TURN)
    none = await engine.generate(PROMPT, max_tokens=9, logit_bias=ENDING, eos_token_ids=[])
    assert (none.token_ids, none.finish_reason) == ((END_OF_TURN,) * 9, "length")
    bias = {END_OF_TURN: 60.0, 7: 100.0}
    other = await engine.generate(
        PROMPT, max_tokens=9, logit_bias=bias, eos_token_ids=[7], min_tokens=3, temperature=0.0
    )
    assert (other.token_ids, other.stop_reason) == ((END_OF_TURN,) * 3 + (7,), 7)
    both = await engine.generate(
        PROMPT, max_tokens=9, logit_bias={8: 100.0}, eos_token_ids=[7], stop_token_ids=[8]
    )
    assert both.stop_reason == 8


@pytest.mark.parametrize("eos", [300, END_OF_TURN])
async def test_structured_output_ends_with_an_eos_token_of_the_request(
    engine: penstock.Engine, eos: int
) -> None:
    result = await engine.generate(PROMPT, choice=["yes", "no"], eos_token_ids=[eos], max_tokens=20)
    assert result.text in {"yes", "no"}
    assert (result.token_ids[-1], result.stop_reason) == (eos, eos)


async def test_eos_token_outside_the_vocabulary_is_refused(engine: penstock.Engine) -> None:
    with pytest.raises(penstock.InvalidRequestError, match=r"eos_token_ids.* below the vocabulary's 512"):
        await engine.generate(PROMPT, eos_token_ids=[512])


async def test_bad_token_sequences_are_never_generated(engine: penstock.Engine) -> None:
    options = DRAWN.replace(temperature=0.0)
    plain = (await engine.generate(PROMPT, options)).token_ids
    first, second, third = plain[:3]
    for bad in (
        [[first]],
        [[PROMPT[-1], first]],
        [[first, second]],
        [[second], [PROMPT[-2], PROMPT[-1], first]],
    ):
        result = await engine.generate(PROMPT, options, bad_token_sequences=bad)
        tokens = (*PROMPT, *result.token_ids)
        for sequence in map(tuple, bad):
            ends = range(len(PROMPT) + 1, len(tokens) + 1)
            assert sequence not in {tokens[end - len(sequence) : end] for end in ends}
        assert result.token_ids != plain
    never = await engine.generate(PROMPT, options, bad_token_sequences=[[first, third, second, 0, 0, 0, 0]])
    assert never.token_ids == plain


async def test_bad_words_and_sequences_share_a_limit(engine: penstock.Engine) -> None:
    with pytest.raises(
        penstock.InvalidRequestError, match=r"at most 1024 ids in all, with those of bad_words"
    ):
        await engine.generate(PROMPT, bad_words=["x" * 200], bad_token_sequences=[[1, 2]] * 400)
