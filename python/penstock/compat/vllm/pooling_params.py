"""vLLM's `pooling_params`: `PoolingParams`, and the pooling of a model in `config`."""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING, Any

from penstock.compat.errors import refuse, refuse_all
from penstock.compat.vllm.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

__all__ = ["PoolingParams"]

_TOKENS = (
    "a text has one embedding; penstock.Engine.generate(output_hidden_states=...) has one for each token"
)
_HEADS = "models with a head for classes or rewards are not supported yet"

#: Fields of `PoolingParams` with the only value that is accepted, and the reason.
UNSUPPORTED: Mapping[str, tuple[Any, str]] = {
    "extra_kwargs": (None, "there are no plugins that read it"),
    "late_chunking_params": (None, _TOKENS),
    "late_interaction_params": (None, _TOKENS),
    "returned_token_ids": (None, _HEADS),
    "step_tag_id": (None, _HEADS),
}
#: Fields without an effect on results.
WITHOUT_EFFECT = {"output_kind", "requires_token_ids", "skip_reading_prefix_cache"}


@dataclasses.dataclass
class PoolingParams:
    """The parameters of an embedding: whether it has length 1, and the number of values that are kept.

    Raises `UnsupportedError` for a value that is not supported.
    """

    use_activation: bool | None = None
    dimensions: int | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    task: str | None = None
    requires_token_ids: bool = False
    skip_reading_prefix_cache: bool | None = None
    late_interaction_params: Any = None
    extra_kwargs: dict[str, Any] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY
    late_chunking_params: Any = None

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raise `UnsupportedError` for a value that is not supported."""
        refuse_all(vars(self), UNSUPPORTED)
        check_task("task", self.task)

    def clone(self) -> Self:
        """A copy."""
        return copy.deepcopy(self)


def check_task(name: str, task: str | None) -> None:
    """Refuse a pooling task other than embeddings of texts."""
    if task not in (None, "embed"):
        refuse(name, task, _TOKENS if task == "token_embed" else _HEADS)
