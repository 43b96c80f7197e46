"""`Response`: the result of a prompt."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

from penstock.compat.lmdeploy.outputs import joined

if TYPE_CHECKING:
    from typing import Self

__all__ = ["Response"]


@dataclasses.dataclass
class Response:
    """The result of a prompt, or a part of it in a stream.

    `finish_reason` is `stop` at a stop token or stop word, `length` at a maximum length, `abort` if the
    request was cancelled, `error` if it failed; it is `None` in a part that is not the last one.
    `logprobs` has a mapping of token ids to log probabilities for each token. `logits` and
    `last_hidden_state` are tensors of torch. `index` is the position of the prompt in the list.
    With `GenerationConfig.n` above 1, `other_choices` has the outputs after the first; `choice` is the number
    of each.
    """

    text: str
    generate_token_len: int
    input_token_len: int
    finish_reason: Literal["stop", "length", "error", "abort"] | None = None
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[dict[int, float]] | None = None
    logits: Any = None
    last_hidden_state: Any = None
    index: int = 0
    choice: int = 0
    other_choices: list[Response] = dataclasses.field(default_factory=list)
    routed_experts: Any = None
    cached_tokens: int = 0
    error_code: str | None = None
    error_message: str | None = None

    @property
    def session_id(self) -> int:
        """The same as `index`, by its name in earlier versions."""
        return self.index

    def __str__(self) -> str:
        return f"text={self.text}\n{self._other_fields()}"

    def __repr__(self) -> str:
        return f"text={self.text!r}\n{self._other_fields()}"

    def extend(self, other: Response) -> Self:
        """Append the next part of the same result, with its tokens and their rows; return `self`."""
        self.text += other.text
        self.token_ids += other.token_ids
        if other.logprobs:
            self.logprobs = (self.logprobs or []) + other.logprobs
        self.logits = joined(self.logits, other.logits)
        self.last_hidden_state = joined(self.last_hidden_state, other.last_hidden_state)
        for name in _OF_THE_LAST_PART:
            setattr(self, name, getattr(other, name))
        return self

    def _other_fields(self) -> str:
        lines = [
            f"input_token_len={self.input_token_len}",
            f"generate_token_len={self.generate_token_len}",
            f'finish_reason="{self.finish_reason}"',
            f"token_ids={self.token_ids}",
            f"logprobs={self.logprobs}",
        ]
        for name in ("logits", "last_hidden_state", "routed_experts"):
            value = getattr(self, name)
            if hasattr(value, "shape"):
                lines.append(f"{name}.shape={value.shape}")
            lines.append(f"{name}={value}")
        if self.error_code is not None:
            lines += [f"error_code={self.error_code}", f"error_message={self.error_message}"]
        return "\n".join(lines)


_OF_THE_LAST_PART = (
    "generate_token_len",
    "input_token_len",
    "finish_reason",
    "index",
    "cached_tokens",
    "error_code",
    "error_message",
)
