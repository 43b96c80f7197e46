"""Texts for tokenizer tests: megabytes of Python sources, and hostile strings."""

from __future__ import annotations

import sysconfig
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466"

HOSTILE = {
    "nothing": "",
    "a nul": "a\0b",
    "spaces": " " * 100 + "x" + " " * 3,
    "newlines": "\n\n\r\n\n a\r\r\n\t \n",
    "tabs and spaces": "\t \t  \t\tdef f():\n\t return\n",
    "contractions": "I'm we're they'LL he'd it'S o'clock 'tis don't' '",
    "digits": "1 12 123 1234 12345 1.000.000 ٣٤٥ ²³ ⅷ",
    "a family": FAMILY,
    "many families": FAMILY * 50,
    "flags and skin": "🇩🇪🇫🇷🇯🇵👍🏽👩🏾‍🚀🏳️‍🌈❤️",
    "combining marks": "e\u0301a\u0308\u0323 Z" + "\u0300\u0301\u0302" * 40 + "algo",
    "composed and decomposed": "Å Å é é ﬁ ﷺ",
    "no spaces": "日本語の文章には空白がありません。" * 20,
    "right to left": "שלום עולם مرحبا بالعالم",
    "scripts": "Ελληνικά кириллица हिन्दी தமிழ் ไทย 한국어 ქართული አማርኛ",
    "mathematics": "∀ε>0 ∃δ: |x−a|<δ ⇒ |f(x)−L|<ε  𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
    "invisible": "a\u200bb\u200cc\u200dd\ufeffe\u00adf\u2060g",
    "odd spaces": "a\u00a0b\u2003c\u3000d\u1680e\u2028f\u2029g\u0085h",
    "controls": "".join(map(chr, range(32))) + "\x7f\x80\x9f",
    "last code points": "\U0010ffff\U0010fffe\uffff\ufffe\ufffd",
    "things that look special": "<|im_start|>user\n<|im_end|><|endoftext|> <s></s> <|im_start |> <| im_end|>",
    "mixed words": "HTTPServer2Go_v1.2-beta+build.5@example.com/?q=%20&r=/../",
    "one long word": "a" * 5000,
    "one long number": "1234567890" * 300,
    "one long line of punctuation": "!?.,;:-–—…" * 200,
}


def python_sources(limit: int) -> Iterator[str]:
    """Python's own sources, including tests in many languages, up to `limit` characters."""
    library = Path(sysconfig.get_paths()["stdlib"])
    total = 0
    for file in sorted(library.glob("test/cjkencodings/*utf8.txt")) + sorted(library.rglob("*.py")):
        if "site-packages" in file.parts:
            continue
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        yield text
        total += len(text)
        if total > limit:
            return


def any_code_points(length: int, seed: int, database: Any = unicodedata) -> str:
    """A string of code points of all planes that a database assigns, with occasional spaces."""
    generator = np.random.default_rng(seed)
    planes = ((0x20, 0x250), (0x250, 0x3000), (0x3000, 0xD800), (0xE000, 0x10000), (0x10000, 0x20000))
    characters: list[str] = []
    while len(characters) < length:
        first, end = planes[generator.integers(len(planes))]
        character = chr(generator.integers(first, end))
        if database.category(character) != "Cn":
            characters.append(character if generator.random() < 0.8 else " ")
    return "".join(characters)
