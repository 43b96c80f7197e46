"""The S3 server of moto, in threads of the test process."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from moto.moto_server.werkzeug_app import (
    DomainDispatcherApplication,
    MotoRequestHandler,
    create_backend_app,
)
from moto.s3.models import s3_backends
from werkzeug.serving import make_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

#: The account of moto.
ACCOUNT = "123456789012"
BUCKET = "models"
ACCESS = {"ak": "AKIATESTACCESSKEY", "sk": "secret/of+the/tests", "region": "us-east-1"}


class S3Request(NamedTuple):
    """A request."""

    method: str
    path: str
    headers: dict[str, str]


class S3:
    """One bucket. It records the requests, and sends the first status and headers that a fault returns."""

    def __init__(self) -> None:
        self.requests: list[S3Request] = []
        self.faults: list[Callable[[S3Request], tuple[str, list[tuple[str, str]]] | None]] = []
        self._application = DomainDispatcherApplication(create_backend_app)
        self._server = make_server(
            "127.0.0.1", 0, self._answer, threaded=True, request_handler=MotoRequestHandler
        )
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._backend: Any = s3_backends[ACCOUNT]["aws"]
        self._backend.reset()
        self._backend.create_bucket(BUCKET, "us-east-1")

    def put(self, key: str, content: bytes) -> Any:
        """Add an object with any key; returns moto's."""
        return self._backend.put_object(BUCKET, key, content)

    def asked(self, key: str, method: str = "GET") -> list[S3Request]:
        """The requests for a key."""
        path = f"/{BUCKET}/{key}"
        return [request for request in self.requests if (request.method, request.path) == (method, path)]

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        headers = {
            name.removeprefix("HTTP_"): value for name, value in environ.items() if name.startswith("HTTP_")
        }
        request = S3Request(environ["REQUEST_METHOD"], environ["PATH_INFO"], headers)
        self.requests.append(request)
        for fault in self.faults:
            if (sent := fault(request)) is not None:
                start(*sent)
                return []
        answer: Iterable[bytes] = self._application(environ, start)
        return answer

    def run(self) -> None:
        """Serve until `stop`."""
        self._server.serve_forever(poll_interval=0.01)

    def stop(self) -> None:
        """End `run`."""
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def serving_s3() -> Iterator[S3]:
    """A server with an empty bucket; there can be one at a time."""
    server = S3()
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join()
