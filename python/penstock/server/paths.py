"""Paths of routes, and paths of files that requests name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["forms_of", "path_to_use", "within"]

_CHATS, _COMPLETIONS, _EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
#: Paths of llama-server and ollama, and those of OpenAI's API without `/v1`. What differs is in
#: docs/guide/move-from-another-engine.md.
_OTHER_PATHS = {
    "/api/chat": _CHATS,
    "/api/embed": _EMBEDDINGS,
    "/api/embeddings": _EMBEDDINGS,
    "/api/generate": _COMPLETIONS,
    "/api/ps": "/health",
    "/api/show": "/v1/models",
    "/api/tags": "/v1/models",
    "/api/version": "/version",
    "/apply-template": "/tokenize",
    "/chat/completions": _CHATS,
    "/completion": _COMPLETIONS,
    "/completions": _COMPLETIONS,
    "/embedding": _EMBEDDINGS,
    "/embeddings": _EMBEDDINGS,
    "/infill": _COMPLETIONS,
    "/models": "/v1/models",
    "/props": "/v1/models",
    "/reranking": "/v1/rerank",
    "/slots": "/metrics",
    "/v1/reranking": "/v1/rerank",
}


def forms_of(path: str) -> tuple[str, ...]:
    """The forms of a route's path, which is the same with a slash at its end.

    A redirect to one form could lose the body or the key. The form with the slash is first: a parameter at
    the end of a path may have any text.
    """
    return (path,) if path.endswith("/") else (f"{path}/", path)


def within(path: str | Path, roots: Iterable[Path]) -> Path | None:
    """The path without links and dots, if it is one of these folders or below."""
    try:
        found = Path(path).resolve()
        return found if any(found.is_relative_to(root.resolve()) for root in roots) else None
    except (OSError, RuntimeError, ValueError):  # too long, a loop of links, a NUL
        return None


def path_to_use(path: str) -> str | None:
    """The route for a path that llama-server, ollama, or a client without `/v1` has."""
    return _OTHER_PATHS.get(path.rstrip("/"))
