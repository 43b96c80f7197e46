"""llama-cpp-python's `llama_grammar`: `LlamaGrammar`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock import _json

if TYPE_CHECKING:
    import os

    from penstock import SamplingOptions

__all__ = ["LlamaGrammar"]


class LlamaGrammar:
    """A grammar of outputs: GBNF, or a JSON schema. It is compiled when a request uses it.

    A grammar that is invalid or not supported is a `penstock.InvalidRequestError` of that request, which
    names the rule.
    """

    def __init__(self, _grammar: str, _schema: Any = None) -> None:
        self._grammar = _grammar
        self._schema = _schema

    @classmethod
    def from_string(cls, grammar: str, verbose: bool = True) -> LlamaGrammar:
        """The grammar of a text in GBNF."""
        return cls(_grammar=grammar)

    @classmethod
    def from_file(cls, file: str | os.PathLike[str], verbose: bool = True) -> LlamaGrammar:
        """The grammar of a file in GBNF. Raises `OSError` and `UnicodeDecodeError`."""
        return cls.from_string(Path(file).read_text(encoding="utf-8"))

    @classmethod
    def from_json_schema(cls, json_schema: str, verbose: bool = True) -> LlamaGrammar:
        """The grammar of JSON that is valid under a schema, given as JSON text.

        Raises `ValueError` if it is none.
        """
        return cls(_grammar=json_schema, _schema=_json.loads(json_schema))

    def options(self) -> SamplingOptions:
        """The sampling parameters with which an output has the format."""
        if self._schema is None:
            return {"grammar": self._grammar}
        return {"response_format": {"type": "json_schema", "json_schema": {"schema": self._schema}}}
