"""vLLM's `config`: `PoolerConfig`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from penstock.compat.errors import refuse, refuse_all
from penstock.compat.vllm.pooling_params import UNSUPPORTED as _OF_REQUESTS
from penstock.compat.vllm.pooling_params import check_task

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["PoolerConfig"]

_LENGTH = "a text has at most max_model_len tokens"
_CLASSES = "models with a head for classes or rewards are not supported yet"

#: Fields with the only value that is accepted, and the reason.
UNSUPPORTED: Mapping[str, tuple[Any, str]] = {
    "enable_chunked_processing": (False, _LENGTH),
    "logit_mean": (None, _CLASSES),
    "logit_sigma": (None, _CLASSES),
    "max_embed_len": (None, _LENGTH),
    "returned_token_ids": _OF_REQUESTS["returned_token_ids"],
    "step_tag_id": _OF_REQUESTS["step_tag_id"],
    "tok_pooling_type": (None, "a text has one embedding"),
}
#: Fields without an effect on results.
WITHOUT_EFFECT = {"enable_flash_late_interaction"}

_POOLINGS = {None: None, "LAST": "last", "MEAN": "mean"}


@dataclasses.dataclass
class PoolerConfig:
    """The pooling of embeddings: `LAST` or `MEAN`; `None` is that of the model's files.

    Raises `UnsupportedError` for a value that is not supported.
    """

    task: str | None = None
    pooling_type: str | None = None
    seq_pooling_type: str | None = None
    tok_pooling_type: str | None = None
    use_activation: bool | None = None
    enable_flash_late_interaction: bool = True
    dimensions: int | None = None
    enable_chunked_processing: bool = False
    max_embed_len: int | None = None
    logit_mean: float | None = None
    logit_sigma: float | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None

    def __post_init__(self) -> None:
        refuse_all(vars(self), UNSUPPORTED)
        check_task("task", self.task)
        if self.pooling_type is not None:
            self.seq_pooling_type = self.pooling_type
        if self.seq_pooling_type not in _POOLINGS:
            refuse("seq_pooling_type", self.seq_pooling_type, "it must be LAST or MEAN")

    @property
    def pooling(self) -> Any:
        """The argument of `penstock.Engine.embed`."""
        return _POOLINGS[self.seq_pooling_type]
