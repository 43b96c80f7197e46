"""The engine for plain threads: `engine.blocking`. No event loop is made behind the scenes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from penstock import _hub
from penstock._core import Port
from penstock.request import BlockingRequest, BlockingStream

if TYPE_CHECKING:
    from typing import Unpack

    from penstock._core import Result, SamplingParams
    from penstock._options import Prompt, SamplingOptions
    from penstock._session import Session

__all__ = ["Blocking"]


class Blocking:
    """The engine's words without await, for any number of threads; Ctrl-C ends a wait.

    Not for the thread of an event loop: it would stand still.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def start(self) -> None:
        """See `Engine.start`."""
        if self._session.must_start():
            try:
                self._session.open(_hub.resolve(self._session.model))
            except BaseException:
                self._session.close()
                raise

    def close(self) -> None:
        """See `Engine.aclose`."""
        native = self._session.close()
        if native is not None:
            native.shutdown()

    def start_request(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[SamplingOptions]
    ) -> BlockingRequest:
        """See `Engine.start_request`."""
        prompt, params = self._session.prepare(prompt, params, dict(options))
        port = Port(blocking=True)
        native = self._session.submit(prompt, params, port)
        request = BlockingRequest(self._session, native, port)
        try:
            request.admission()
        except BaseException:
            request.cancel()
            raise
        return request

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[SamplingOptions]
    ) -> BlockingStream:
        """See `Engine.stream`."""
        return BlockingStream(partial(self.start_request, prompt, params, **options))

    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[SamplingOptions]
    ) -> Result:
        """See `Engine.generate`."""
        with self.stream(prompt, params, **options) as request:
            return request.result()
