"""An engine's life and everything about it that needs no waiting; shared by its async and its blocking face.

    new ── must_start, open ──> open ── close ──> closed

A closed session never opens again, and a loading that fails or is cancelled closes it: so "closed" is also
how whoever loads in a thread learns that nobody wants the model any more.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock import _core
from penstock._options import merge
from penstock._selection import BeamSearch
from penstock.chat import ChatTemplate, checked
from penstock.errors import EngineStoppedError, InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import TypeIs

    from penstock._core import EngineConfig, SamplingParams
    from penstock._options import Prompt


#: Tokenising more characters than this takes longer than a millisecond or two.
LONG_TEXT = 2048
#: What makes a grammar of, which is compiled before the request starts.
_COMPILED = ("response_format", "regex", "choice", "grammar", "tools")


class Session:
    """What was asked for, and the native engine once it is open."""

    def __init__(
        self,
        model: str | os.PathLike[str],
        config: EngineConfig | None,
        options: dict[str, Any],
        progress: Callable[[int, int], object] | None,
    ) -> None:
        self.model = os.fspath(model)
        self.config = merge(_core.EngineConfig, config, options)
        self._progress = progress
        self._native: _core.Engine | None = None
        self._chat_templates: dict[str, ChatTemplate] = {}
        self._is_starting = False
        self._is_closed = False

    # ---- opening and closing

    def must_start(self) -> bool:
        """Whether the caller has to open it; false if it is open."""
        if self._is_closed:
            raise EngineStoppedError(_CLOSED)
        if self._native is not None:
            return False
        if self._is_starting:
            message = "the engine is being opened by somebody else"
            raise RuntimeError(message)
        self._is_starting = True
        return True

    def open(self, path: str, check_cancelled: Callable[[], None] | None = None) -> None:
        """Loads the model; long, for any thread. `check_cancelled` raises when the loading is to stop."""

        def report(done: int, total: int) -> None:
            if self._is_closed:
                raise EngineStoppedError(_CLOSED)
            if check_cancelled is not None:
                check_cancelled()
            if self._progress is not None:
                self._progress(done, total)

        native = _core.Engine.open(path, self.config, report)
        self._native = native
        if self._is_closed:  # while the last weights were loaded
            native.shutdown()
            raise EngineStoppedError(_CLOSED)

    def close(self) -> _core.Engine | None:
        """From now on it is closed and its threads are ending; returns the engine to wait for, if any.

        Never waits, so nothing can come between: whoever is interrupted afterwards leaves nothing running.
        Raises `RuntimeError` inside a logits processor, before anything has changed.
        """
        _core.Engine.check_may_wait()
        self._is_closed = True
        if self._native is not None:
            self._native.stop()
        return self._native

    # ---- the open engine

    @property
    def native(self) -> _core.Engine:
        """For questions, which a closed engine still answers."""
        if self._native is None:
            raise EngineStoppedError(_CLOSED if self._is_closed else _NOT_OPEN)
        return self._native

    def check_open(self) -> _core.Engine:
        """For requests."""
        if self._is_closed:
            raise EngineStoppedError(_CLOSED)
        return self.native

    def prepare(
        self, prompt: Prompt, params: SamplingParams | None, options: dict[str, Any]
    ) -> tuple[Prompt, SamplingParams]:
        """What `submit` needs: messages as copies of what they are now, and the parameters."""
        self.check_open()
        params = merge(_core.SamplingParams, params, options)
        if isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], str):
            limit = "one prompt a call; start several side by side"
            raise InvalidRequestError(
                f"prompt is a sequence of strings; it must be {limit}", "prompt", None, limit
            )
        return (checked(prompt) if _is_chat(prompt) else prompt), params

    def prepare_scoring(
        self, text: str | Sequence[int], cache_salt: str | None, priority: int
    ) -> SamplingParams:
        """The parameters of a request that only reads."""
        self.check_open()
        if _is_chat(text):
            limit = "text or token ids; apply_chat_template makes text of messages"
            raise InvalidRequestError(f"messages cannot be scored: they must be {limit}", "prompt", None, limit)
        return _core.SamplingParams(max_tokens=1, prompt_logprobs=0, cache_salt=cache_salt, priority=priority)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        port: _core.Port,
        check_cancelled: Callable[[], None] | None = None,
    ) -> _core.Request:
        """Hands a request to the native engine; takes long where `takes_long` says so.

        `check_cancelled` raises when nobody wants it any more.
        """
        start = partial(self.check_open().start_request, check_cancelled=check_cancelled)
        if _is_chat(prompt):
            text = self.apply_chat_template(prompt, tools=params.tools)
            if params.tools and params.tool_choice in (None, "auto") and text == self.apply_chat_template(prompt):
                raise _hidden_tools(params.tools)
            return start(text, params, port, is_chat=True)
        return start(prompt, params, port)

    def submit_scoring(
        self,
        text: str | Sequence[int],
        params: SamplingParams,
        port: _core.Port,
        check_cancelled: Callable[[], None] | None = None,
    ) -> _core.Request:
        """Likewise, of a text to which nothing is added."""
        return self.check_open().start_request(
            text, params, port, is_scoring=True, check_cancelled=check_cancelled
        )

    def search(self, prompt: Prompt, params: SamplingParams) -> BeamSearch:
        """Begins a beam search; takes long where `takes_long` says so."""
        native = self.check_open()
        if _is_chat(prompt):
            beams = native.prepare_beams(self.apply_chat_template(prompt), params, is_chat=True)
        else:
            beams = native.prepare_beams(prompt, params)
        return BeamSearch(native, beams)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        template: str = "default",
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Messages as the text that the model was trained to answer."""
        if template not in self._chat_templates:
            sources = self.native.chat_templates
            if template not in sources:
                raise _no_template(template, sorted(sources))
            self._chat_templates[template] = ChatTemplate(sources[template], dict(self.native.special_tokens))
        return self._chat_templates[template].render(messages, tools=tools)

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "new" if self._native is None else "open"
        return f"<Engine {self.model!r} {state}>"

    def __del__(self) -> None:
        """Dropping the native engine frees the model; that it came to this is worth a warning."""
        native = getattr(self, "_native", None)
        if native is not None and native.is_running:
            warnings.warn(
                f"{self!r} was dropped without being closed", ResourceWarning, stacklevel=1, source=self
            )


def takes_long(prompt: Prompt, params: SamplingParams) -> bool:
    """Whether to hand this request over takes longer than an event loop should wait."""
    return (
        _is_chat(prompt)
        or (len(prompt) if isinstance(prompt, str) else 0) + sum(map(len, params.bad_words)) > LONG_TEXT
        or any(getattr(params, field) is not None for field in _COMPILED)
    )


def _is_chat(prompt: Prompt) -> TypeIs[Sequence[Mapping[str, Any]]]:
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _no_template(name: str, names: Sequence[str]) -> InvalidRequestError:
    if not names:
        message = "this model has no chat template: give text or token ids instead of messages"
        return InvalidRequestError(message, "prompt", None, "text or token ids")
    limit = f"one of {', '.join(map(repr, names))}"
    return InvalidRequestError(f"this model has no chat template {name!r}: {limit}", "template", name, limit)


def _hidden_tools(tools: Sequence[Mapping[str, Any]]) -> InvalidRequestError:
    limit = "left out, or called for by tool_choice='required' or a named function, which needs no showing"
    message = f"the chat template does not show tools to the model, which cannot choose: they must be {limit}"
    return InvalidRequestError(message, "tools", tools, limit)


_NOT_OPEN = "the engine is not open: enter it (`async with engine`, or `with engine` without an event loop)"
_CLOSED = "the engine was closed; make a new one"
