"""The interface of a chat template, and the renderer of those that requests send.

A server sets `renderer` for the tasks of its requests. Templates of the model are never rendered by it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Protocol, TypeAlias

__all__ = ["CACHED_TEMPLATES", "CompileError", "RenderError", "Renderer", "Template", "is_source", "renderer"]


CACHED_TEMPLATES = 32
"""Number of compiled templates that a process keeps; the least recently used one is evicted."""


class RenderError(Exception):
    """A template has failed. The cause is the error of Jinja or Python, if it is known."""


class CompileError(Exception):
    """A template cannot be compiled. The cause is the error of Jinja or Python, if it is known."""


class Template(Protocol):
    """A chat template. Its errors are `RenderError` and `CompileError`."""

    def render(self, values: dict[str, Any], check_cancelled: Callable[[], None] | None) -> str:
        """The text for the values of the variables, which are JSON's.

        `check_cancelled` is called meanwhile, and raises to stop it.
        """


Renderer: TypeAlias = Callable[[str], Template]

#: Makes the template of a source that a request has; `None` renders it as those of the model.
renderer: ContextVar[Renderer | None] = ContextVar("penstock.renderer", default=None)


def is_source(template: str) -> bool:
    """Whether this is a template, not the name of one."""
    return "{{" in template or "{%" in template
