"""The state of a server: its models, its calls, and what else the routes share."""

from __future__ import annotations

import hmac
import secrets
from typing import TYPE_CHECKING

from penstock._client import MAX_WAITING
from penstock.server.adapters import Adapters
from penstock.server.calls import BodyBytes, Calls
from penstock.server.hosts import Hosts
from penstock.server.keys import Keys
from penstock.server.measures import HttpMeasures
from penstock.server.models import Models
from penstock.server.responses.store import ResponseStore
from penstock.server.templates import TemplateProcess
from penstock.server.threads import Threads

if TYPE_CHECKING:
    from collections.abc import Mapping

    import penstock
    from penstock.server.batch.batches import Batches
    from penstock.server.settings import ServerSettings

__all__ = ["State"]

#: The largest body by default: for each token of the longest sequence, with a lower and an upper bound.
_BODY_BYTES_PER_TOKEN = 1 << 10
_MIN_BODY_BYTES = 2 << 20
_MAX_BODY_BYTES = 32 << 20


class State:
    """Everything that the routes of a server share."""

    def __init__(self, engines: Mapping[str, penstock.Engine], settings: ServerSettings) -> None:
        self.models = Models(engines)
        self.settings = settings
        self.keys = Keys(settings.api_keys)
        self.admin_keys = Keys(settings.admin_api_keys)
        #: Whether the prefix cache is separated by key: not if all requests have the same one, or none.
        is_shared = settings.share_prefix_cache or len({*self.keys, *self.admin_keys}) == 1
        self._separates_keys = bool(self.keys) and not is_shared
        self._secret = secrets.token_bytes(32)
        self.calls = Calls(settings)
        self.body_bytes = BodyBytes(settings.max_total_body_bytes)
        self.adapters = Adapters(
            self.models.selected(None), list(self.models), self.calls.generations, settings
        )
        self.hosts = Hosts(settings)
        #: Threads that decode large bodies and that format metrics; they need the interpreter. Bodies that
        #: wait are bounded by their bytes.
        self.body_threads = Threads(1)
        self.metrics_threads = Threads(1, "scrapes")
        #: Threads that tokenise outside of the engine.
        self.tokenizer_threads = Threads(2, "tokenisations")
        #: The process that renders templates of requests, and a thread for each task that can wait for it.
        self.templates = TemplateProcess()
        self.template_threads = Threads(MAX_WAITING, "chat templates")
        #: Threads that make responses of results, and never wait for tokenisation.
        self.response_threads = Threads(2)
        #: Names of request fields that the log has as unknown.
        self.unknown_fields: set[str] = set()
        self.responses = ResponseStore(settings)
        #: If the settings have a folder for files.
        self.batches: Batches | None = None
        self.http = HttpMeasures()

    def max_body_bytes(self) -> int:
        """The setting, or a bound for the largest of the models that are open."""
        if self.settings.max_body_bytes is not None:
            return self.settings.max_body_bytes
        lengths = [model.max_model_len for model in self.models.values()]
        longest = max((length for length in lengths if length is not None), default=None)
        if longest is None:  # all requests get status 503
            return _MAX_BODY_BYTES
        return min(max(longest * _BODY_BYTES_PER_TOKEN, _MIN_BODY_BYTES), _MAX_BODY_BYTES)

    def cache_salt(self, key: bytes, salt: str | None) -> str | None:
        """The salt of the engine for the salt of a request: another one for each key.

        So neither cached tokens nor the time to the first token tell a client about prompts of other keys.
        """
        if not self._separates_keys:
            return salt
        return hmac.new(self._secret, key + (salt or "").encode(errors="surrogatepass"), "sha256").hexdigest()

    def cache_salts(self, salt: str | None) -> list[str | None]:
        """The salts of the engine for the salt of the requests of any key."""
        if salt is None or not self._separates_keys:
            return [salt]
        return [self.cache_salt(key, salt) for key in (*self.keys, *self.admin_keys)]
