"""Token ids match Hugging Face tokenizers, on written text and on hostile strings."""

from __future__ import annotations

import time
import unicodedata
from typing import TYPE_CHECKING

import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

import penstock
from support.api.checkpoints import make_config, write_checkpoint
from support.api.texts import FAMILY, HOSTILE, any_code_points, python_sources
from support.marks import rare_except
from support.parity.oracle import TokenizerOracle, digest_of
from support.parity.stored import Mode, store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

VOCABULARY = 2000
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def byte_level() -> Tokenizer:
    """A tokenizer like those of Qwen and Llama 3: NFC, a word pattern, byte-level BPE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 3,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(python_sources(1_000_000), trainer)
    return tokenizer


def sentence_pieces() -> Tokenizer:
    """A tokenizer like those of Llama 2 and Mistral: a symbol for spaces, byte fallback."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))  # noqa: S106
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 3,
        show_progress=False,
        limit_alphabet=500,
        max_token_length=12,
        special_tokens=["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))],
    )
    words = (word for text in python_sources(1_000_000) for word in text.split(" "))
    tokenizer.train_from_iterator(words, trainer)
    return tokenizer


@pytest.fixture(scope="module", params=[byte_level, sentence_pieces])
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[penstock.Engine, Tokenizer]]:
    """An engine with a tokenizer.json, and the same file loaded by the Python library."""
    tokenizer: Tokenizer = request.param()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    start = tokenizer.token_to_id("<|im_start|>")
    assert start is not None
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", start)]
    )
    folder = tmp_path_factory.mktemp("trained")
    config = make_config("llama", vocab_size=tokenizer.get_vocab_size(), eos_token_id=start + 1)
    checkpoint = write_checkpoint(folder / "model", config)
    tokenizer.save(str(folder / "tokenizer.json"))
    with penstock.Engine(str(checkpoint), tokenizer=str(folder / "tokenizer.json")) as engine:
        yield engine, tokenizer


@pytest.fixture(scope="module")
def demo_engine(demo_model: Path) -> Iterator[penstock.Engine]:
    with penstock.Engine(str(demo_model)) as engine:
        yield engine


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_strings_give_the_ids_of_tokenizers(
    name: str, trained: tuple[penstock.Engine, Tokenizer]
) -> None:
    engine, tokenizer = trained
    for special in (True, False):
        expected = tokenizer.encode(HOSTILE[name], add_special_tokens=special).ids
        assert list(engine.encode(HOSTILE[name], add_special_tokens=special)) == expected


@pytest.mark.parametrize("length", [500_000, pytest.param(3_000_000, marks=pytest.mark.rare)])
def test_megabytes_of_text_round_trip_with_the_same_ids(
    length: int, trained: tuple[penstock.Engine, Tokenizer]
) -> None:
    engine, tokenizer = trained
    total = 0
    for text in python_sources(length):
        ids = tokenizer.encode(text).ids
        assert list(engine.encode(text)) == ids
        assert engine.decode(ids) == tokenizer.decode(ids)
        total += len(text)
    assert total > length


def test_arbitrary_code_points_give_the_same_ids(trained: tuple[penstock.Engine, Tokenizer]) -> None:
    engine, tokenizer = trained
    for seed in range(200):
        text = any_code_points(100, seed)
        assert list(engine.encode(text)) == tokenizer.encode(text).ids, ascii(text)


@pytest.mark.oracle
@pytest.mark.timeout(600)  # megabytes of text in live runs
def test_demo_model_ids_match_transformers(demo_model: Path, demo_engine: penstock.Engine) -> None:
    # The file names its pre-tokenizer, `smollm`; transformers ignores that and uses the one of GPT-2, which
    # does not split numbers.
    oracle = TokenizerOracle(demo_model, splits_digits=True)
    # Every version of Python has these code points.
    old = unicodedata.ucd_3_2_0
    texts = [*HOSTILE.values(), *(any_code_points(100, seed, database=old) for seed in range(200))]
    for text, digest in zip(texts, oracle.digests(texts), strict=True):
        assert digest_of(demo_engine.encode(text)) == digest, ascii(text[:200])
    if store().mode is Mode.LIVE:  # the sources depend on the version of Python
        for text in python_sources(3_000_000):
            expected = oracle.tokenizer(text, add_special_tokens=False).input_ids
            assert list(demo_engine.encode(text)) == expected, ascii(text[:200])


@pytest.mark.parametrize("text", ["\ud800", "before \udc80 after", "\ud83d alone", "\udfff\ud800"])
def test_lone_surrogates_are_rejected(text: str, demo_engine: penstock.Engine) -> None:
    with pytest.raises(penstock.InvalidRequestError, match="prompt"):
        demo_engine.encode(text)


@pytest.mark.parametrize(
    "unit", rare_except(["a", "ab", "7", " ", "\n", "日", FAMILY, "x!", "\u0301", "Aa1"], "日")
)
def test_tokenisation_time_is_linear_in_the_text(unit: str, demo_engine: penstock.Engine) -> None:
    def work(length: int) -> float:
        text = unit * (length // len(unit))
        times = []
        for _ in range(3):
            start = time.thread_time()
            demo_engine.encode(text)
            times.append(time.thread_time() - start)
        return min(times)

    # Four times the text: a ratio of 4 if the time is linear, 16 if it is quadratic.
    assert work(1_000_000) < 9 * work(250_000) + 0.01
