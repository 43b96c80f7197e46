"""A tokenizer that maps the token ids a random model generates to the texts that a test needs."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import penstock
from support.api.engines import make_engine

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

#: The token of every word of a prompt.
UNKNOWN = 0

MESSAGES = [{"role": "user", "content": "What is the weather?"}]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
DRAWN = penstock.SamplingParams(temperature=2.0, ignore_eos=True, tools=TOOLS)


class Script(NamedTuple):
    """A seed, and the ids that the tiny model generates with it for `MESSAGES` and `DRAWN`."""

    seed: int
    token_ids: tuple[int, ...]


def showing_tools(model: Path, folder: Path) -> Path:
    """A copy of a model in this folder, with a chat template that renders tools."""
    copy = shutil.copytree(model, folder)
    file = copy / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config["chat_template"] += "{% if tools %} {% endif %}"
    file.write_text(json.dumps(config))
    return copy


def find_script(model: Path, file: Path) -> Script:
    """A script of different ids for a model of `showing_tools`; `file` is for a tokenizer."""
    tokenizer = write_tokenizer(file, 512, {})
    with make_engine(model, tokenizer=tokenizer, tool_parser="hermes") as engine:
        choices = engine.blocking.generate(MESSAGES, DRAWN, max_tokens=16, seed=0, n=128).choices
    for choice in choices:
        if len({UNKNOWN, *choice.token_ids}) == 17:
            return Script(choice.seed, choice.token_ids)
    raise AssertionError("no seed draws different tokens alone")


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
