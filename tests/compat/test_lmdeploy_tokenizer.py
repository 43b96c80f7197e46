"""LMDeploy's `Tokenizer` on Penstock's."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import pytest
import tokenizers
import tokenizers.processors

import penstock
from penstock.compat.lmdeploy.tokenizer import DetokenizeState, Tokenizer
from support.api.checkpoints import SPECIAL_TOKENS, make_config, write_checkpoint
from support.parity import oracle

if TYPE_CHECKING:
    from pathlib import Path

TEXT = "Don't stop 👩‍👩‍👧 mé 北京的天气怎么样 now 🇩🇪!"
END_ID = 2


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Tokenizer:
    return Tokenizer(demo_model)


def test_properties_are_those_of_the_model(tokenizer: Tokenizer) -> None:
    model = tokenizer.model
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (model.bos_token_id, END_ID)
    assert tokenizer.vocab_size == model.vocabulary_size
    assert tokenizer.get_vocab()["<|im_end|>"] == END_ID
    assert tokenizer.get_vocab()[" and"] == 284
    assert len(tokenizer.get_vocab()) > 49_000


def test_text_survives_encoding(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    assert ids == tokenizer(TEXT).input_ids == tokenizer([TEXT, ""])["input_ids"][0]
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.decode(ids, offset=3) == tokenizer.decode(ids[3:])
    assert tokenizer.decode([*ids, END_ID]) == TEXT
    assert tokenizer.decode([*ids, END_ID], skip_special_tokens=False) == f"{TEXT}<|im_end|>"


def test_beginning_token_is_added_once(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model", make_config("llama"))
    file = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    bos = file.token_to_id(SPECIAL_TOKENS[0])
    file.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{SPECIAL_TOKENS[0]} $A", special_tokens=[(SPECIAL_TOKENS[0], bos)]
    )
    file.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": SPECIAL_TOKENS[0]}))
    tokenizer = Tokenizer(path)
    assert tokenizer.bos_token_id == bos
    ids = tokenizer.encode("ab")
    assert ids == [bos, *tokenizer.encode("ab", add_bos=False)]
    assert ids[1:] == tokenizer.encode("ab", add_special_tokens=False)
    assert tokenizer.encode(f"{SPECIAL_TOKENS[0]}ab") == ids


@pytest.mark.parametrize("prompt_length", [0, 4])
@pytest.mark.parametrize("interval", [1, 3, 0])
def test_incremental_text_equals_the_whole_text(
    tokenizer: Tokenizer, interval: int, prompt_length: int
) -> None:
    generator = random.Random(0)
    ids = tokenizer.encode(TEXT)
    assert len(ids) > 30
    state = DetokenizeState(ids_offset=prompt_length)
    parts, end = [], prompt_length
    while end < len(ids):
        end = min(end + (interval or generator.randint(1, 5)), len(ids))
        text, state = tokenizer.detokenize_incrementally(ids[:end], state)
        assert "\N{REPLACEMENT CHARACTER}" not in text
        parts.append(text)
    assert "".join(parts) == tokenizer.decode(ids)[len(tokenizer.decode(ids[:prompt_length])) :]
    assert state.as_tuple()[0] == len(ids)


def test_tokens_that_contain_a_text_are_found(tokenizer: Tokenizer) -> None:
    ids = tokenizer.indexes_containing_token("<|im_end|>")
    assert ids == [END_ID]
    decode = tokenizer.model.decode
    for text in (" Paris", "ing"):
        indexes = tokenizer.indexes_containing_token(text)
        assert 0 < len(indexes) <= 5
        assert all(text in decode([token]) for token in indexes)


def test_text_of_several_tokens_is_in_no_token(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    assert tokenizer.indexes_containing_token("the capital of France") == []
    assert "has several tokens" in caplog.text


def test_special_tokens_are_not_part_of_texts(tokenizer: Tokenizer) -> None:
    assert tokenizer.special_token_ids == tuple(range(17))


def test_tokenizer_is_made_of_an_open_one(demo_model: Path) -> None:
    model = penstock.Tokenizer(demo_model)
    assert Tokenizer(model).model is model
    with pytest.raises(penstock.ModelLoadError):
        Tokenizer("/none")


@pytest.mark.oracle
def test_ids_equal_those_of_transformers(demo_model: Path, tokenizer: Tokenizer) -> None:
    theirs = oracle.TokenizerOracle(demo_model)
    assert tokenizer.encode(TEXT) == theirs.encode(TEXT)
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids[:7]) == theirs.decode(ids[:7])
