"""Sessions: `Session` for programs, and the table of token ids that `sequence_start` and `step` refer to.

The engine has no sessions. The table keeps the ids that a session has computed; a request sends them again
before its new ones, with a cache salt of its session, so that the prefix cache holds what was computed. After
an eviction the engine computes them again.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import threading
from array import array
from collections import deque
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

import penstock
from penstock.compat.lmdeploy.checks import check_integer, refuse
from penstock.compat.lmdeploy.errors import ErrorCode
from penstock.compat.lmdeploy.generation_config import GenerationConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.compat.lmdeploy.response import Response

__all__ = ["Session", "SessionTable"]

_log = logging.getLogger("penstock.lmdeploy")

#: The ids of sessions that the engine creates begin here, so that they differ from a program's own.
_FIRST_ID = 1 << 31


class RequestFailed(Exception):  # noqa: N818 - never raised to programs
    """A request ends with the reason `error`, this code and this message."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class _State:
    """The tokens of one session."""

    __slots__ = ("cancel", "ids", "is_ended", "salt", "seed")

    def __init__(self, salt: str, seed: int) -> None:
        self.ids = array("i")
        self.salt = salt
        self.seed = seed
        self.cancel: Callable[[], None] | None = None  # that of the request that runs
        self.is_ended = False


class Lease:
    """The use of a session by one request."""

    __slots__ = ("_state", "_table", "ends", "is_new", "is_stateless", "past", "salt", "seed", "session_id")

    def __init__(
        self, table: SessionTable, session_id: int, state: _State, past: array[int], *, start: bool, end: bool
    ) -> None:
        self._table = table
        self._state: _State | None = state
        self.session_id = session_id
        self.past = past
        self.ends = end
        self.is_new = start
        self.is_stateless = start and end
        self.salt = state.salt
        self.seed = state.seed + len(past)

    def release(self, new: Sequence[int] | None) -> None:
        """End the use. `new` are the ids that were computed after `past`; `None` changes nothing."""
        state, self._state = self._state, None
        if state is not None:
            self._table._release(self, state, new)  # noqa: SLF001 - of this module


class SessionTable:
    """The sessions of one engine, for any number of threads. Its lock is held for moments only.

    The garbage collector can drop a stream in a thread that holds the lock. A release therefore never waits
    for it: releases are queued, and every holder of the lock applies them first.
    """

    def __init__(self, forget: Callable[[str], None]) -> None:
        self._forget = forget
        self._lock = threading.Lock()
        self._released: deque[tuple[Lease, _State, Sequence[int] | None]] = deque()
        self._states: dict[int, _State] = {}
        self._salt = secrets.token_hex(8)
        self._epochs = itertools.count()
        self._ids = itertools.count(_FIRST_ID)

    def new_id(self) -> int:
        """An id that no session has."""
        return next(self._ids)

    def id_of(self, session: int | Session | None) -> int:
        """The session's id, a new one for `None`. Raises `ArgumentError` for other values."""
        if session is None:
            return self.new_id()
        if isinstance(session, Session):
            return session.session_id
        if isinstance(session, bool) or not isinstance(session, int):
            refuse("session_id", session, "an integer or a Session")
        return session

    def acquire(
        self, session_id: int, cancel: Callable[[], None], *, start: bool, end: bool, step: int
    ) -> Lease:
        """Begin the use of a session; raises `RequestFailed`. `cancel` is called by `stop`, in any thread."""
        dropped = None
        with self._locked() as states:
            state = states.get(session_id)
            if state is not None and state.cancel is not None:
                message = f"session {session_id} has an unfinished request"
                raise RequestFailed(ErrorCode.REQUEST_CONFLICT, message)
            if start:
                dropped = state
                salt = f"{self._salt}:{next(self._epochs)}"
                state = states[session_id] = _State(salt, secrets.randbits(63))
            elif state is None:
                message = f"session {session_id} does not exist; start it with sequence_start=True"
                raise RequestFailed(ErrorCode.SESSION_NOT_EXIST, message)
            length = len(state.ids)
            past = state.ids[: step if 0 < step < length else length]
            state.cancel = cancel
        if dropped is not None:
            _log.warning(
                "session %d is started again: its %d tokens are dropped", session_id, len(dropped.ids)
            )
            self._forget(dropped.salt)
        if step > length:
            _log.warning("session %d has %d tokens; step=%d is lowered to it", session_id, length, step)
        return Lease(self, session_id, state, past, start=start, end=end)

    def _release(self, lease: Lease, state: _State, new: Sequence[int] | None) -> None:
        self._released.append((lease, state, new))
        self._settle()

    def _settle(self) -> None:
        """Apply the queued releases, unless the lock is held: its holder then does."""
        while self._released and self._lock.acquire(blocking=False):
            forgotten: list[str] = []
            try:
                self._apply(forgotten)
            finally:
                self._lock.release()
            for salt in forgotten:
                self._forget(salt)

    def _apply(self, forgotten: list[str]) -> None:
        """Apply the queued releases; adds the salts of the sessions that are over."""
        while self._released:
            lease, state, new = self._released.popleft()
            state.cancel = None
            if new is not None and not lease.ends:
                state.ids = lease.past
                state.ids.extend(new)
            is_over = (lease.ends and (new is not None or lease.is_new)) or state.is_ended or not state.ids
            if is_over and self._states.get(lease.session_id) is state:
                del self._states[lease.session_id]
            if is_over and not lease.is_stateless:
                forgotten.append(state.salt)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[dict[int, _State]]:
        """The sessions, with the lock held and all releases applied."""
        forgotten: list[str] = []
        try:
            with self._lock:
                self._apply(forgotten)
                yield self._states
        finally:
            for salt in forgotten:
                self._forget(salt)
            self._settle()  # what was released meanwhile

    def stop(self, session_id: int) -> None:
        """Cancel the request of a session, if there is one."""
        with self._locked() as states:
            state = states.get(session_id)
            cancel = None if state is None else state.cancel
        if cancel is not None:
            cancel()

    def end(self, session_id: int, *, only_idle: bool = False) -> None:
        """Forget a session; its request is cancelled, or with `only_idle` nothing is done."""
        with self._locked() as states:
            state = states.get(session_id)
            if state is None or (only_idle and state.cancel is not None):
                return
            del states[session_id]
            state.is_ended = True
            cancel = state.cancel
        if cancel is not None:
            cancel()  # `_release` forgets the blocks
        else:
            self._forget(state.salt)

    def stop_all(self) -> None:
        """Cancel all requests."""
        with self._locked() as states:
            cancels = [state.cancel for state in states.values() if state.cancel is not None]
        for cancel in cancels:
            cancel()

    def is_busy(self, session_id: int) -> bool:
        """Whether a request of a session runs."""
        with self._locked() as states:
            state = states.get(session_id)
            return state is not None and state.cancel is not None

    def length(self, session_id: int) -> int:
        """Number of tokens of a session; 0 if there is none."""
        with self._locked() as states:
            state = states.get(session_id)
            return 0 if state is None else len(state.ids)


class SessionOwner(Protocol):
    """An engine as its `Session` objects use it."""

    def stop_session(self, session_id: int) -> object:
        """Cancel the request of the session that runs."""

    def end_session(self, session_id: int) -> object:
        """Forget the tokens of the session."""


class Session:
    """A conversation: `Pipeline.chat` adds a turn to it.

    - `session_id`: The session's number, unique within its engine.
    - `prompt`, `response`: The last turn; `response` is `None` while it runs.
    - `history`: Pairs of a prompt and its answer, without turns that failed or were cancelled.
    - `step`: Number of tokens of the turns in `history`.
    - `gen_config`: The parameters of turns that have none of their own.

    A program can change `history`; the next turn then begins with it.
    """

    def __init__(self, session_id: int, engine: SessionOwner | None = None, **values: Any) -> None:
        self._engine = engine
        self.session_id = session_id
        self.prompt: Any = None
        self.response: Response | None = None
        self.history: list[tuple[Any, str]] = []
        self.gen_config: GenerationConfig | None = None
        self.step = 0
        self._computed: list[tuple[Any, str]] = []  # the turns that the first `step` tokens are
        self._rendering: object = None  # that of these turns
        self.update(**values)

    def bind(self, engine: SessionOwner) -> None:
        """Use the session with this engine. Raises `ArgumentError` if it belongs to another one."""
        if self._engine is not None and self._engine is not engine:
            refuse("session", self, "a session of this engine")
        self._engine = engine

    def update(self, **values: Any) -> None:
        """Set `prompt`, `response`, `gen_config` or `step`.

        Raises `ArgumentError` for a value of a wrong type, `TypeError` for another name.
        """
        config = values.get("gen_config")
        if not isinstance(config, GenerationConfig | None):
            refuse("gen_config", config, "a GenerationConfig or None")
        check_integer(SimpleNamespace(step=values.get("step", 0)), "step")
        for name, value in values.items():
            if name not in ("prompt", "response", "gen_config", "step"):
                message = f"unexpected keyword argument {name!r}"
                raise TypeError(message)
            setattr(self, name, value)

    def abort(self) -> None:
        """Cancel the turn that runs, if there is one."""
        if self._engine is not None:
            self._engine.stop_session(self.session_id)

    def close(self) -> None:
        """Forget the conversation; the turn that runs is cancelled."""
        if self._engine is not None:
            self._engine.end_session(self.session_id)
        self.reset()

    async def async_abort(self) -> None:
        """The same as `abort`."""
        self.abort()

    async def async_close(self) -> None:
        """The same as `close`."""
        self.close()

    def reset(self) -> None:
        """Return to the state of a new session; the id remains."""
        self.prompt = self.response = self.gen_config = None
        self.history, self._computed = [], []
        self._rendering = None
        self.step = 0

    def is_changed(self, rendering: object) -> bool:
        """Whether the program has changed `history` since the last turn, or the turn had another rendering.

        `rendering` is the chat template with its variables.
        """
        return self.history != self._computed or self._rendering not in (None, rendering)

    def set_computed(self, step: int, rendering: object) -> None:
        """The first `step` tokens of the session are the turns in `history`, in this rendering."""
        self.step = step
        self._computed = [*self.history]
        self._rendering = rendering

    def __repr__(self) -> str:
        return (
            f"Session(session_id={self.session_id}, step={self.step}, history_len={len(self.history)}, "
            f"has_response={self.response is not None}, has_gen_config={self.gen_config is not None})"
        )

    def __str__(self) -> str:
        lines = [f"Session(id={self.session_id}, step={self.step})"]
        if self.history:
            lines.append("History:")
        lines += [f"USER: \n{prompt}\nASSISTANT: \n{answer}\n" for prompt, answer in self.history]
        return "\n".join(lines)


def forgetter(engine: penstock.Engine) -> Callable[[str], None]:
    """Removes the blocks of a salt from the engine's prefix cache; does nothing once it is closed."""

    def forget(salt: str) -> None:
        with contextlib.suppress(penstock.PenstockError, RuntimeError):  # also in a logits processor
            engine.reset_prefix_cache(cache_salt=salt)

    return forget
