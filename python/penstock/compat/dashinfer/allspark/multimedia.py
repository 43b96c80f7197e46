"""`MultiMediaInfo`: images and audio of a request, which are not supported yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.compat.dashinfer.allspark.enums import AsStatus
from penstock.compat.dashinfer.allspark.errors import AsError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

__all__ = ["MultiMediaInfo"]


class MultiMediaInfo:
    """Embeddings of images or audio. A request with them is refused: there are no such models yet."""

    def set_multimedia_type(self, _kind: int) -> None:
        """Has no effect; deprecated in DashInfer."""

    def add_multimedia_content(self, key: str, _tensors: Sequence[object]) -> NoReturn:
        """Raises `AsError`: images and audio are not supported yet."""
        reason = f"multimedia content {key!r}: images and audio are not supported yet"
        raise AsError(AsStatus.ALLSPARK_PARAM_ERROR, reason)
