"""The options of `penstock serve` are those of the engine."""

from __future__ import annotations

from penstock import EngineOptions
from penstock.cli.serve import serve

#: The result of `profile` is that of a method of the engine.
NOT_SERVED = {"profile"}


def test_serve_has_every_option_of_the_engine() -> None:
    options = {param.name for param in serve.params}
    assert EngineOptions.__annotations__.keys() - options == NOT_SERVED
    flags = {flag for param in serve.params for flag in param.opts}
    names = EngineOptions.__annotations__.keys() - NOT_SERVED
    assert {f"--{name.replace('_', '-')}" for name in names} <= flags
