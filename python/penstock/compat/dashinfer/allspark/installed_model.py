"""A model of an engine, and the handles of its requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

from penstock.compat.dashinfer.allspark.statistics import StatRecorder

if TYPE_CHECKING:
    from pathlib import Path

    from penstock import BlockingRequest, Engine
    from penstock.compat.dashinfer.allspark.result_queue import ResultQueue
    from penstock.compat.dashinfer.allspark.runtime_config import AsModelConfig

__all__ = ["InstalledModel", "ModelState", "RequestHandle"]

ModelState: TypeAlias = Literal["installed", "running", "stopping", "stopped", "released"]


class RequestHandle:
    """Names a request in the calls of `Engine`; opaque."""

    __slots__ = ("_is_cancelled", "_queue", "_request")

    def __init__(self, request: BlockingRequest, queue: ResultQueue) -> None:
        self._request = request
        self._queue = queue
        self._is_cancelled = False

    def cancel(self) -> None:
        """Cancel the request."""
        self._is_cancelled = True
        self._queue.cancel()

    def wait(self) -> bool:
        """Wait for the end of the request; false if it failed."""
        return self._queue.wait()

    def uses_adapter(self, name: str) -> bool:
        """Whether the request has this adapter, was not cancelled and has not ended."""
        if self._is_cancelled or self._request.params.adapter != name:
            return False
        return self._request.finish_reason is None

    def report_end(self) -> None:
        """See `ResultQueue.report_end`."""
        self._queue.report_end()

    def __repr__(self) -> str:
        return f"<RequestHandle {self._request.id}>"


class InstalledModel:
    """An installed model. The lock of its engine guards `state` and `handles`."""

    def __init__(self, config: AsModelConfig, engine: Engine, weights: Path) -> None:
        self.config = config
        self.engine = engine
        self.weights = weights.absolute()  # the file or directory that `wake` reads
        self.state: ModelState = "installed"
        self.handles: set[RequestHandle] = set()  # requests that were not released
        self.recorder = StatRecorder(config.model_name)
        info = engine.info
        self.max_model_len, self.vocabulary_size = info.max_model_len, info.vocabulary_size
