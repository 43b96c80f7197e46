"""A tokenizer that maps the token ids a random model generates to the texts that a test needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

#: The token of every word of a prompt.
UNKNOWN = 0


def write_tokenizer(
    file: Path, vocabulary_size: int, pieces: Mapping[int, str], special: Collection[str] = ()
) -> Path:
    """Write a `tokenizer.json` that decodes ids to `pieces`; those in `special` are special tokens.

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
