"""vLLM's `lora.request`: `LoRARequest`."""

from __future__ import annotations

import dataclasses

__all__ = ["LoRARequest"]


@dataclasses.dataclass(eq=False)
class LoRARequest:
    """The LoRA adapter of a request: its name, a positive id of its own, and its directory or hub id.

    The adapter is loaded by the first request with its id, and again by each with `load_inplace`. Two are
    equal if their names are. Raises `ValueError` for an id below 1 or an empty path.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False

    def __post_init__(self) -> None:
        if self.lora_int_id < 1:
            message = f"lora_int_id is {self.lora_int_id}; it must be at least 1"
            raise ValueError(message)
        if not self.lora_path:
            message = "lora_path is empty; it must be a directory, or an id on the Hugging Face hub"
            raise ValueError(message)

    @property
    def adapter_id(self) -> int:
        """The id."""
        return self.lora_int_id

    @property
    def name(self) -> str:
        """The name."""
        return self.lora_name

    @property
    def path(self) -> str:
        """The directory or hub id."""
        return self.lora_path

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LoRARequest) and self.lora_name == other.lora_name

    def __hash__(self) -> int:
        return hash(self.lora_name)
