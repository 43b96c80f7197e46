"""`EngineBase`: the sessions and the end of an `AsyncEngine`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import penstock
from penstock.compat.lmdeploy import prompts as forms
from penstock.compat.lmdeploy.sessions import Session, SessionTable

if TYPE_CHECKING:
    from collections.abc import Generator
    from types import TracebackType
    from typing import Self

__all__ = ["Done", "EngineBase"]

#: Time for the step that runs to end when the engine is closed, in seconds.
_DRAIN = 5.0


class EngineBase:
    """The methods that stop and end sessions and close the engine."""

    engine: penstock.Engine
    sessions: SessionTable

    def __init__(self) -> None:
        self._is_closed = False
        self.batches: set[Any] = set()  # the calls with many prompts that run

    def stop_session(self, session_id: int | Session) -> Done:
        """Cancel the session's request, if there is one; the session can be continued. Never waits."""
        self.sessions.stop(self.sessions.id_of(session_id))
        return Done()

    def end_session(self, session_id: int | Session) -> Done:
        """Forget the session and its cached blocks; its request is cancelled. Never waits."""
        self.sessions.end(self.sessions.id_of(session_id))
        return Done()

    def stop_all_session(self) -> Done:
        """Cancel all requests, those that wait included; their last items have the reason `abort`."""
        for batch in list(self.batches):
            batch.cancel()
        self.sessions.stop_all()
        return Done()

    stop_all = stop_all_session

    def session(self) -> Session:
        """A new session, for `chat`."""
        return Session(self.sessions.new_id(), self)

    def _session_ids(self, sessions: Any, num_prompts: int) -> list[int] | None:
        if sessions is None:
            return None
        given = list(sessions) if isinstance(sessions, (list, tuple)) else [sessions]
        forms.check_count("sessions", len(given), "session", num_prompts)
        return [self.sessions.id_of(session) for session in given]

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    def check_open(self) -> None:
        """Raise `penstock.EngineStoppedError` if the engine is closed."""
        if self._is_closed:
            message = "the engine was closed; create a new one"
            raise penstock.EngineStoppedError(message)

    def close(self) -> None:
        """Cancel all requests, stop the engine's threads and free the model. Can be called repeatedly.

        Readers get the output so far, and the reason `abort`.
        """
        if not self._is_closed:
            self._is_closed = True
            engine = getattr(self, "engine", None)
            if engine is not None:
                self.stop_all_session()
                engine.close(drain=_DRAIN)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_is_closed"):
            self.close()


class Done:
    """The return value of a method that has finished and that LMDeploy's later versions await."""

    def __await__(self) -> Generator[None, None, None]:
        return
        yield
