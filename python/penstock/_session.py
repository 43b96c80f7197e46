"""The state of an engine, shared by its asynchronous and its blocking API. Nothing here waits.

    new ── must_start, open ──> open ── drain ──> draining
                                 ▲                    │ stop_to_sleep
                                 └─ must_wake, open ─ asleep

`close` is possible in every phase, and a closed session cannot be opened again. A first load that fails or is
cancelled closes the session, and the loading thread stops when it sees that; after a failed `reopen` the
session is asleep.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
import weakref
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias
from weakref import WeakValueDictionary

from penstock import _core, _hub
from penstock._chat_costs import weight
from penstock._checks import check_adapter_name, check_flag, check_path
from penstock._client import client, deadline
from penstock._core import Host
from penstock._cuda import cuda_folders
from penstock._options import merge
from penstock._renderer import is_source
from penstock._shown import shown
from penstock._system import after_fork_in_child
from penstock.chat import Chat, has_messages, is_large, prompt_of, read_template
from penstock.errors import (
    AdapterLoadError,
    ConfigError,
    EngineStoppedError,
    InvalidRequestError,
    ModelLoadError,
)
from penstock.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from penstock._core import EngineConfig, SamplingParams
    from penstock._kv_publisher import KvPublisher
    from penstock._options import BatchPrompt, Prompt

    PreparedPrompt: TypeAlias = str | Sequence[int] | Chat


logger = logging.getLogger("penstock")

#: Longer texts, in characters, are prepared in a worker thread: they take more than about 2 ms.
LONG_TEXT = 2048
#: Number of tokens of an output above which a missing `max_tokens` is logged.
_LONG_OUTPUT = 4096
#: Parameters with a grammar, which is compiled before the request starts.
_GRAMMAR_PARAMETERS = ("response_format", "regex", "choice", "grammar", "tools")


_default_host = Host()


def default_host() -> Host:
    """The host of engines that are given none. The child of a fork has another one than its parent."""
    return _default_host


def _replace_default_host() -> None:
    global _default_host  # noqa: PLW0603
    _default_host = Host()


after_fork_in_child(_replace_default_host)


class TrackedRequest(Protocol):
    """A request that `Session.abort` finds by its id."""

    @property
    def id(self) -> int: ...

    @property
    def finish_reason(self) -> str | None: ...

    def cancel(self) -> None: ...


class Session:
    """The model, its configuration, and the native engine once it is open."""

    def __init__(
        self,
        model: str | os.PathLike[str] | bytes | bytearray | memoryview,
        config: EngineConfig | None,
        options: dict[str, Any],
        host: Host | None,
        progress: Callable[[int, int], object] | None,
    ) -> None:
        if host is not None and not isinstance(host, Host):
            message = f"expected Host or None for `host`, not {type(host).__name__}"
            raise TypeError(message)
        self._host = host
        self.model = _hub.model_argument(model)
        self.config = merge(_core.EngineConfig, config, options)
        self._progress = progress
        self._native: _core.Engine | None = None
        self._cuda_folders: Sequence[Path] = ()
        self._path: str | bytes = ""  # the model's files, once it was opened
        self._tokenizer: Tokenizer  # of `_native`
        self._phase: Literal["new", "starting", "open", "draining", "asleep", "waking"] = "new"
        self._is_closed = False  # in any phase
        self._warns_of_length = False
        #: With the option `kv_events`, once it was opened.
        self.publisher: KvPublisher | None = None
        #: The requests that callers have, by id.
        self._requests: WeakValueDictionary[int, TrackedRequest] = WeakValueDictionary()

    @property
    def host(self) -> Host:
        """The host of the engine."""
        return self._host or default_host()

    @property
    def name(self) -> str:
        """The model as given; empty for bytes."""
        return self.model if isinstance(self.model, str) else ""

    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """The token ids of a text."""
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens, max_tokens=max_tokens)

    # ---- opening and closing

    def must_start(self) -> bool:
        """Whether the caller has to call `open`; false if the engine is open."""
        if self._is_open_for("new"):
            return False
        self._phase = "starting"
        return True

    def check_device(self) -> None:
        """Find the device, before a model is downloaded for it; slow, can run in any thread."""
        if self.config.device != "cpu":
            self._cuda_folders = cuda_folders()
        _core.resolve_device(self.config, self._cuda_folders)

    def must_wake(self) -> bool:
        """Whether the caller has to call `reopen`; false if the engine is open."""
        if self._is_open_for("asleep"):
            return False
        self._phase = "waking"
        return True

    def _is_open_for(self, phase: str) -> bool:
        """Whether the engine is open; raises unless it is or can be opened from this phase."""
        if self._is_closed:
            raise EngineStoppedError(_CLOSED)
        if self._phase in ("starting", "waking"):
            message = "the engine is already being started by another task or thread"
            raise RuntimeError(message)
        if self._phase == phase:
            return False
        self.check_open()
        return True

    def reopen(self, check_cancelled: Callable[[], None] | None = None) -> None:
        """Load the model again after `sleep`; if that fails the session is asleep."""
        try:
            adapters = self._native.adapters() if self._native is not None else ()
            if self._native is not None and not self._native.is_forked:
                self._native.shutdown()  # its memory is free now
            self.open(self._path, check_cancelled, adapters)
        except BaseException:
            self.stay_asleep()
            raise

    def open(
        self,
        path: str | bytes,
        check_cancelled: Callable[[], None] | None = None,
        adapters: Sequence[_core.Adapter] = (),
    ) -> None:
        """Load the model and `adapters`; slow, can run in any thread. `check_cancelled` raises to stop it."""

        def on_progress(done: int, total: int) -> None:
            if self._is_closed:
                raise EngineStoppedError(_CLOSED)
            if check_cancelled is not None:
                check_cancelled()
            if self._progress is not None:
                self._progress(done, total)

        config = self.config
        self._open_publisher()
        if config.tokenizer is not None:
            config = config.replace(tokenizer=os.path.expanduser(config.tokenizer))  # noqa: PTH111 - never raises
        template = None if config.chat_template is None else read_template(config.chat_template)
        native = _core.Engine.open(path, config, self.host, on_progress, self._cuda_folders, template)
        try:
            for adapter in adapters:
                native.load_adapter(adapter.name, adapter.path, check_cancelled=check_cancelled)
        except BaseException:
            native.shutdown()
            raise
        self.adopt(native, path)
        if self._is_closed:  # closed while the last weights were loaded
            native.shutdown()
            raise EngineStoppedError(_CLOSED)

    def _open_publisher(self) -> None:
        """Open the sockets of KV events; they stay open while the engine sleeps."""
        options = self.config.kv_events
        if options is not None and options["endpoint"] is not None and self.publisher is None:
            from penstock._kv_publisher import KvPublisher

            self.publisher = KvPublisher(options)
            weakref.finalize(self, self.publisher.stop).atexit = False

    def adopt(self, native: _core.Engine, path: str | bytes = "") -> None:
        """Use an engine that was opened from `path`."""
        self._warns_of_length = native.info.max_model_len > _LONG_OUTPUT
        self._tokenizer = Tokenizer._of(native.tokenizer, self.model)  # noqa: SLF001 - not for users
        self._native, self._path, self._phase = native, path, "open"
        if self.publisher is not None:
            self.publisher.attach(native)

    def drain(self) -> _core.Engine | None:
        """Refuse new requests while the open ones may finish; returns the engine, which then ends by itself.

        None if there is nothing to wait for. Raises `RuntimeError` in a logits processor.
        """
        _core.Engine.check_may_wait()
        if self._is_closed or self._phase not in ("open", "draining"):
            return None
        if self._native is None or self._native.is_forked:
            return None
        self._phase = "draining"
        self._native.drain()
        return self._native

    def check_may_sleep(self) -> _core.Engine | None:
        """The engine to stop; raises `EngineStoppedError` unless it is open, draining or asleep."""
        if self._is_closed or self._phase not in ("draining", "asleep"):
            self.check_open()
        return self._native

    def stop_to_sleep(self, native: _core.Engine | None) -> _core.Engine | None:
        """Tell the engine's threads to stop; returns the engine to wait for. It can be woken at once.

        `native` is the engine when the call began: if another caller has put it to sleep and woken the
        session since, there is nothing to do.
        """
        _core.Engine.check_may_wait()
        if self._is_closed or self._phase == "waking" or native is not self._native:
            return None
        if native is None or native.is_forked:
            return None
        self._phase = "asleep"
        native.stop()
        return native

    def stay_asleep(self) -> None:
        """Take `must_wake` back: the engine was not loaded."""
        if self._phase == "waking":
            self._phase = "asleep"

    def close(self) -> _core.Engine | None:
        """Mark the session as closed and tell the engine's threads to stop; returns the engine to wait for.

        In the child of a fork there is nothing to stop: the threads are in the parent. Never waits, so an
        interruption of the caller's wait leaves no thread running. Raises `RuntimeError` in a logits
        processor, before any state has changed.
        """
        _core.Engine.check_may_wait()
        self._is_closed = True
        if self.publisher is not None:
            self.publisher.stop()
        if self._native is None or self._native.is_forked:
            return None
        self._native.stop()
        return self._native

    # ---- the open engine

    @property
    def is_running(self) -> bool:
        """Whether requests can be started."""
        return (
            self._native is not None
            and not self._is_closed
            and self._phase == "open"
            and self._native.is_running
        )

    def health(self) -> _core.Health:
        """The state of the engine; raises `EngineStoppedError` if it does not work."""
        if self._is_closed:
            raise EngineStoppedError(_CLOSED)
        if self._phase in ("asleep", "waking"):
            return _core.Health(state="asleep", running=0, waiting=0, step_age=None)
        return self.native.health("draining" if self._phase == "draining" else "open")

    @property
    def native(self) -> _core.Engine:
        """The native engine, for queries; also after it was closed."""
        if self._native is None:
            raise EngineStoppedError(_CLOSED if self._is_closed else _NOT_OPEN)
        self._native.check_process()
        return self._native

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer and the chat templates; also after the engine was closed."""
        _ = self.native  # raises if there is none
        return self._tokenizer

    def check_adapter(self, name: str, path: str | os.PathLike[str]) -> None:
        """Check the arguments of `load_adapter`, before a download."""
        check_adapter_name(name)
        check_path("path", path)
        self.check_open().check_adapter_name(name)

    def load_adapter(
        self,
        name: str,
        path: str | os.PathLike[str],
        *,
        replace: bool,
        progress: Callable[[int, int], object] | None,
        check_cancelled: Callable[[], None] | None = None,
    ) -> _core.Adapter:
        """Load an adapter from a directory; slow, can run in any thread."""

        def on_progress(done: int, total: int) -> None:
            if check_cancelled is not None:
                check_cancelled()
            if progress is not None:
                progress(done, total)

        return self.check_open().load_adapter(
            name, path, replace=replace, progress=on_progress, check_cancelled=check_cancelled
        )

    def unload_adapter(self, name: str, port: _core.Port, *, force: bool) -> None:
        """Remove an adapter, also while asleep: `wake` fails if an adapter cannot be loaded."""
        check_adapter_name(name)
        check_flag("force", force)
        is_asleep = self._phase == "asleep" and not self._is_closed
        native = self.native if is_asleep else self.check_open()
        native.unload_adapter(name, port, force=force)

    @property
    def adapters(self) -> dict[str, _core.Adapter]:
        """The loaded adapters by name."""
        return {adapter.name: adapter for adapter in self.native.adapters()}

    def check_open(self) -> _core.Engine:
        """The native engine, for requests; raises `EngineStoppedError` if it is not open."""
        if self._is_closed:
            raise EngineStoppedError(_CLOSED)
        if self._phase in _PHASES:
            raise EngineStoppedError(_PHASES[self._phase])
        return self.native

    def is_large_chat(
        self, prompt: Prompt | None, params: SamplingParams | None, options: dict[str, Any]
    ) -> bool:
        """Whether a prompt is a chat that is not copied and rendered on the event loop, or beside another."""
        prompt = options.get("messages") if prompt is None else prompt
        if prompt is None or not has_messages(prompt):
            return False
        tools = options.get("tools") or (params and params.tools)
        return is_large(prompt, tools, options.get("chat_template_kwargs"), options.get("documents"))

    def prepare(
        self, prompt: BatchPrompt | None, params: SamplingParams | None, options: dict[str, Any]
    ) -> tuple[PreparedPrompt, SamplingParams]:
        """The arguments of `submit`: a prompt, of which messages are copied, and the merged parameters."""
        self.check_open()
        prompt = prompt_of(prompt, options)
        chat_options = Chat.take_options(options)
        params = merge(_core.SamplingParams, params, options)
        if isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], str):
            message = "prompt is a sequence of strings; pass one prompt per call, or use generate_many()"
            raise InvalidRequestError(message, "prompt", None, "one prompt per call")
        if has_messages(prompt):
            return Chat(prompt, **chat_options), params
        if isinstance(prompt, (list, tuple)) and prompt and has_messages(prompt[0]):
            message = "prompt is a sequence of chats; pass one prompt per call, or use generate_many()"
            raise InvalidRequestError(message, "prompt", None, "one prompt per call")
        for name, value in chat_options.items():
            limit = "left out when the prompt is not a chat"
            message = f"{name}={shown(value)} is not allowed: it must be {limit}"
            raise InvalidRequestError(message, name, value, limit)
        return prompt, params

    def prepare_scoring(
        self, text: str | Sequence[int], adapter: str | None, cache_salt: str | None, priority: int
    ) -> SamplingParams:
        """The parameters of a scoring request."""
        self.check_open()
        if has_messages(text):
            message = (
                "prompt is a list of messages; scoring takes text or token ids (see apply_chat_template)"
            )
            raise InvalidRequestError(message, "prompt", None, "text or token ids")
        return _core.SamplingParams(
            max_tokens=1, prompt_logprobs=0, adapter=adapter, cache_salt=cache_salt, priority=priority
        )

    def _start(self, check_cancelled: Callable[[], None] | None) -> Callable[..., _core.Request]:
        """The start of a request, for the task of the caller."""
        return partial(self.check_open().start_request, **_task_options(), check_cancelled=check_cancelled)

    def submit(
        self,
        prompt: PreparedPrompt,
        params: SamplingParams,
        port: _core.Port,
        check_cancelled: Callable[[], None] | None = None,
    ) -> _core.Request:
        """Submit a request to the native engine; slow if `should_offload`.

        `check_cancelled` raises once the caller has been cancelled.
        """
        start = self._start(check_cancelled)
        if should_offload(prompt, params):
            self.check_room()
        if isinstance(prompt, Chat):
            request = start(self._render(prompt, params, check_cancelled), params, port, is_chat=True)
        else:
            request = start(prompt, params, port)
        if self._warns_of_length and params.max_tokens is None:
            self._warn_of_length(request.params)
        return request

    def _warn_of_length(self, params: SamplingParams) -> None:
        """Log once that a request without `max_tokens` can generate very much."""
        limit = params.max_tokens
        if limit is not None and limit > _LONG_OUTPUT and params.choice is None:
            self._warns_of_length = False
            logger.warning("a request without max_tokens can generate %d tokens: set max_tokens", limit)

    def submit_scoring(
        self,
        text: str | Sequence[int],
        params: SamplingParams,
        port: _core.Port,
        check_cancelled: Callable[[], None] | None = None,
    ) -> _core.Request:
        """Submit a scoring request: the prompt without a generated token."""
        start = self._start(check_cancelled)
        if should_offload(text, params):
            self.check_room()
        return start(text, params, port, is_scoring=True)

    def search_beams(
        self,
        prompt: PreparedPrompt,
        params: SamplingParams,
        check_cancelled: Callable[[], None] | None = None,
    ) -> _core.BeamSearch:
        """Begin a beam search; slow if `should_offload`."""
        search: Callable[..., _core.BeamSearch] = partial(
            self.check_open().search_beams, **_task_options(), check_cancelled=check_cancelled
        )
        if should_offload(prompt, params):
            self.check_room()
        if isinstance(prompt, Chat):
            return search(self._render(prompt, params, check_cancelled), params, is_chat=True)
        return search(prompt, params)

    def _render(self, chat: Chat, params: SamplingParams, check_cancelled: Callable[[], None] | None) -> str:
        """The text of a chat, with the tools if its template presents them.

        Raises `InvalidRequestError` if it does not and the model may choose a tool. A required call is
        possible without, so it only logs a warning, for the first one with each template of the model.
        """
        tools = params.tools
        template = self.tokenizer._template(chat, tools)  # noqa: SLF001 - see `adopt`
        text = chat.render(template, tools=tools, check_cancelled=check_cancelled)
        if not tools or params.tool_choice == "none":
            return text
        may_choose = params.tool_choice in (None, "auto")
        if may_choose:
            # Messages may have the names, so a text with them counts for templates that present tools.
            is_clear = template.presents_tools and all(tool["function"]["name"] in text for tool in tools)
        else:
            is_given = bool(chat.template and is_source(chat.template))
            is_clear = is_given or template.presents_tools is not None
        if is_clear:
            return text
        template.presents_tools = text != chat.render(template, check_cancelled=check_cancelled)
        if not template.presents_tools:
            if may_choose:
                raise _tools_not_rendered(tools)
            logger.warning("the model cannot see the tools of a required call: %s", _TOOLS_NOT_RENDERED)
        return text

    def track(self, request: TrackedRequest) -> None:
        """Make a request known to `abort` until it is dropped."""
        self._requests[request.id] = request

    def abort(self, request_id: int) -> bool:
        """Cancel the request with this id; false if there is none, or it has ended."""
        request = self._requests.get(request_id)
        if request is None or request.finish_reason is not None:
            return False
        request.cancel()
        return True

    def check_room(self) -> None:
        """Raise `OverloadedError` if too many requests wait; called before the slow part of a submission."""
        self.check_open().check_room(client.get())

    def __repr__(self) -> str:
        is_open = self._native is not None and not self._native.is_forked
        state = (
            "closed"
            if self._is_closed
            else "new"
            if self._native is None
            else self._phase
            if is_open
            else "forked"
        )
        model = repr(self.model) if isinstance(self.model, str) else f"of {len(self.model)} bytes"
        return f"<Engine {model} {state}>"

    def __del__(self) -> None:
        """Warn if the engine was not closed; dropping the native engine frees the model."""
        native = getattr(self, "_native", None)
        if native is not None and native.is_running:
            warnings.warn(
                f"{self!r} was dropped without being closed; use `async with`, `with`, or aclose()",
                ResourceWarning,
                stacklevel=1,
                source=self,
            )


def _task_options() -> dict[str, Any]:
    """The client of the task of the caller, and the seconds that are left of its deadline."""
    until = deadline.get()
    return {"client": client.get(), "time_left": None if until is None else until - time.monotonic()}


def should_offload(prompt: PreparedPrompt, params: SamplingParams) -> bool:
    """Whether submitting this request takes too long for an event loop and belongs in a worker thread."""
    texts = [*params.bad_words, *params.stop, prompt if isinstance(prompt, str) else ""]
    return (
        isinstance(prompt, Chat)
        or sum(map(len, texts)) > LONG_TEXT
        or any(getattr(params, field) is not None for field in _GRAMMAR_PARAMETERS)
    )


def num_chars(prompt: PreparedPrompt) -> int:
    """About the number of characters of a prompt that is text or a chat; 0 for token ids."""
    if isinstance(prompt, Chat):
        return weight(prompt.messages)
    return len(prompt) if isinstance(prompt, str) else 0


@contextmanager
def adapter_errors(name: str) -> Iterator[None]:
    """Errors of finding the files of an adapter, as `AdapterLoadError`."""
    try:
        yield
    except ModelLoadError as error:
        message = f"adapter {name!r} cannot be loaded: {error}"
        raise AdapterLoadError(message) from error


def check_seconds(
    name: str, seconds: float, error: type[ConfigError | InvalidRequestError] = ConfigError
) -> float:
    """A duration that an argument of this name gives."""
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not is_number or not seconds >= 0:
        limit = "a number of seconds from 0, or math.inf"
        raise error(f"{name}={shown(seconds)} is not allowed: it must be {limit}", name, seconds, limit)
    return float(seconds)


def _tools_not_rendered(tools: Sequence[Mapping[str, Any]] | None) -> InvalidRequestError:
    limit = "omitted, or used with tool_choice='required' or a named function"
    message = f"{_TOOLS_NOT_RENDERED}; they must be {limit}"
    return InvalidRequestError(message, "tools", tools, limit)


_TOOLS_NOT_RENDERED = "this model's chat template does not render tools"
_NOT_OPEN = "the engine is not open; use `async with engine`, or `with engine` without an event loop"
_CLOSED = "the engine was closed; create a new one"
#: The errors for requests in the phases of an engine that was opened and takes none.
_PHASES = {
    "draining": "the engine is closing: it finishes open requests and takes no new ones",
    "asleep": "the engine is asleep; call wake() first",
    "waking": "the engine is asleep; wait until wake() has returned",
}
