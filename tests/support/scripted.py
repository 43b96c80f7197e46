"""A tokenizer with which a model says what a test wants: the ids it generates anyway get the wanted texts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

#: What every word of a prompt is, whatever the script.
UNKNOWN = 0


def write_tokenizer(
    file: Path, vocabulary_size: int, pieces: Mapping[int, str], special: Collection[str] = ()
) -> Path:
    """Writes a `tokenizer.json` in which ids say `pieces`, and those in `special` are special tokens.

    A piece such as `<0xC3>` is one byte.
    """
    texts = [pieces.get(id_, f"[{id_}]") for id_ in range(vocabulary_size)]
    vocabulary = {text: id_ for id_, text in enumerate(texts)}
    assert len(vocabulary) == vocabulary_size, "texts are of different ids"
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=texts[UNKNOWN]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.save(str(file))
    return file
