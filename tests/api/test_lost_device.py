"""A lost device stops the engine; every request ends with the device's message."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest

import penstock
from support import hooks
from support.api.engines import LONG, PROMPT, SHORT, make_engine

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.needs("hooks")

LOSING_TOKEN = 77
MESSAGE = "token 77 was to lose the device"


def make_losing_engine(model: Path, **options: object) -> penstock.Engine:
    """An open engine whose device is lost when it computes `LOSING_TOKEN`."""
    engine = make_engine(model, **options)
    engine._session.adopt(hooks.losing_engine(model, engine.config, LOSING_TOKEN))
    return engine


@pytest.mark.anyio
async def test_lost_device_ends_all_requests_and_the_engine(tiny_model: Path) -> None:
    async with make_losing_engine(tiny_model) as engine:
        await engine.generate(PROMPT, SHORT)
        running = await engine.start_request(PROMPT, LONG, bad_token_ids=[LOSING_TOKEN], max_tokens=400)
        await anext(running)
        with anyio.fail_after(20):
            with pytest.raises(penstock.EngineStoppedError, match=MESSAGE):
                await engine.generate([*PROMPT, LOSING_TOKEN], SHORT)
            with pytest.raises(penstock.EngineStoppedError, match=MESSAGE):
                await running.result()
            with pytest.raises(penstock.EngineStoppedError, match=MESSAGE):
                await engine.start_request(PROMPT, SHORT)
        with pytest.raises(penstock.EngineStoppedError, match=MESSAGE):
            engine.reset_prefix_cache()
        assert engine.stats().running == 0


def test_lost_device_is_an_error_without_an_event_loop(tiny_model: Path) -> None:
    with make_losing_engine(tiny_model) as engine:
        for _ in range(2):
            with pytest.raises(penstock.EngineStoppedError, match=MESSAGE):
                engine.blocking.generate([*PROMPT, LOSING_TOKEN], SHORT)
