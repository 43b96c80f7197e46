"""`EngineContext`: the parts of an `AsyncEngine` that the modules below it use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import penstock
    from penstock.compat.lmdeploy.generation_config import GenerationConfig
    from penstock.compat.lmdeploy.sessions import SessionTable
    from penstock.compat.lmdeploy.tokenizer import Tokenizer

__all__ = ["EngineContext"]


@dataclass(frozen=True, slots=True)
class EngineContext:
    """An engine as requests use it.

    The functions are methods of the `AsyncEngine`: a request that runs keeps it from being dropped, and so
    closed. The engine itself must not hold a context, or only the garbage collector would free it.

    - `max_concurrency`: Most prompts of one list that are computed at the same time.
    - `uses_prefix_cache`: Requests without a session share computed blocks.
    - `batches`: The lists of prompts that run, which `stop_all_session` cancels.
    - `template_of_adapter`: Returns the chat template for the name of an adapter.
    - `check_sampling`: Logs once that parameters of sampling have no effect.
    - `check_open`: Raises `penstock.EngineStoppedError` if the engine is closed.
    """

    engine: penstock.Engine
    tokenizer: Tokenizer
    sessions: SessionTable
    session_len: int
    max_concurrency: int
    uses_prefix_cache: bool
    batches: set[Any]
    template_of_adapter: Callable[[str | None], Any]
    check_sampling: Callable[[GenerationConfig], None]
    check_open: Callable[[], None]
    is_closed: Callable[[], bool]
