"""llama-cpp-python's `llama_grammar`: `LlamaGrammar`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock._json import loads

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from penstock import SamplingOptions

__all__ = ["LlamaGrammar"]


class LlamaGrammar:
    """A grammar of outputs: GBNF, or a JSON schema. It is compiled when a request uses it.

    A grammar that is invalid or not supported is a `penstock.InvalidRequestError` of that request, which
    names the rule.
    """

    def __init__(self, _grammar: str, _response_format: Mapping[str, Any] | None = None) -> None:
        self._grammar = _grammar
        self._response_format = _response_format

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
        """The grammar of JSON that is valid under a schema, or of a response format of type `json_schema`.

        Both are JSON text; raises `ValueError` if it is none.
        """
        schema = loads(json_schema)
        if isinstance(schema, dict) and schema.get("type") == "json_schema":
            return cls.from_response_format(schema)
        return cls.from_response_format({"type": "json_schema", "json_schema": {"schema": schema}})

    @classmethod
    def from_response_format(cls, response_format: Mapping[str, Any]) -> LlamaGrammar:
        """The grammar of a response format of type `json_schema`; llama-cpp-python has no such method."""
        return cls(_grammar="", _response_format=response_format)

    def options(self) -> SamplingOptions:
        """The sampling parameters with which an output has the format."""
        if self._response_format is None:
            return {"grammar": self._grammar}
        return {"response_format": self._response_format}
