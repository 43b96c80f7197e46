"""An engine in which adapters are loaded, or refused without an effect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import penstock
from support.api.running import random_prompt

if TYPE_CHECKING:
    from pathlib import Path

PROMPT = random_prompt(20)
PARAMS = penstock.SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logprobs=True)


class AdapterEngine:
    """An engine, and its output without an adapter."""

    def __init__(self, engine: penstock.Engine) -> None:
        self.engine = engine
        self.base = self.run()

    def run(self, adapter: str | None = None) -> Any:
        """Tokens and log probabilities."""
        result = self.engine.blocking.generate(PROMPT, PARAMS, adapter=adapter)
        return result.token_ids, result.logprobs

    def load(self, name: str, folder: str | Path) -> None:
        """Load an adapter."""
        self.engine.blocking.load_adapter(name, folder)

    def unload(self, name: str) -> None:
        """Unload an adapter."""
        self.engine.blocking.unload_adapter(name)

    def refusal(self, folder: str | Path) -> str:
        """The message of the error of a load; the engine computes as before."""
        with pytest.raises(penstock.AdapterLoadError) as caught:
            self.load("damaged", folder)
        self.check_unchanged()
        message = str(caught.value)
        assert len(message) < 1000
        assert message.isprintable()
        return message

    def check_unchanged(self) -> None:
        """Check that no adapter is loaded, and that the engine computes as before."""
        assert self.engine.adapters == {}
        assert self.run() == self.base
