"""The oracle: transformers and torch in float32, from token ids to logits.

torch is imported on first use, not with this module: the quick tests run without it.
"""

from __future__ import annotations

import functools
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

# Two logits closer than this may be swapped by rounding; either token is then correct.
TIE = 1e-3


class Oracle(NamedTuple):
    """A model loaded by transformers in float32."""

    model: Any

    def logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """`[tokens, vocabulary]`: the logits after each prefix of `token_ids`, in one forward pass."""
        torch = import_torch()
        with torch.inference_mode():
            logits: NDArray[np.float32] = self.model(torch.tensor([token_ids])).logits[0].numpy()
        return logits

    def embeddings(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """`[tokens, hidden]`: the rows of the embedding table."""
        torch = import_torch()
        with torch.inference_mode():
            rows: NDArray[np.float32] = self.model.get_input_embeddings()(torch.tensor(token_ids)).numpy()
        return rows

    def stepwise_logits(self, prompt: Sequence[int], output: Sequence[int]) -> NDArray[np.float32]:
        """`[len(output), vocabulary]`: logits as in generation, the prompt in one pass, then token by token.

        Differs from `logits` only if the rotation depends on the current length of the sequence.
        """
        torch = import_torch()
        from transformers import DynamicCache

        rows, cache, inputs = [], DynamicCache(config=self.model.config), list(prompt)
        with torch.inference_mode():
            for token in output:
                # The cache is the fourth parameter: its name depends on the version of transformers.
                answer = self.model(torch.tensor([inputs]), None, None, cache, use_cache=True)
                rows.append(answer.logits[0, -1].numpy())
                inputs = [token]
        return np.stack(rows)


@functools.cache
def import_torch() -> Any:
    """Import torch, without the warnings of its import, and use all CPUs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return torch


def load_oracle(checkpoint: Path, **overrides: Any) -> Oracle:
    """Load a Hugging Face directory, with overrides of its configuration, or a GGUF file."""
    torch = import_torch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM

        if checkpoint.suffix == ".gguf":
            model = AutoModelForCausalLM.from_pretrained(
                checkpoint.parent, gguf_file=checkpoint.name, dtype=torch.float32
            )
        else:
            model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, **overrides)
    return Oracle(model.eval())


def load_tokenizer(checkpoint: Path) -> Any:
    """Load the tokenizer with transformers."""
    import_torch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoTokenizer

        if checkpoint.suffix == ".gguf":
            return AutoTokenizer.from_pretrained(checkpoint.parent, gguf_file=checkpoint.name)
        return AutoTokenizer.from_pretrained(checkpoint)


def assert_close(ours: NDArray[np.float32], theirs: NDArray[np.float32], *, relative: float = 1e-4) -> None:
    """Check that no logit differs by more than `relative` times the largest one."""
    assert ours.shape == theirs.shape
    limit = relative * float(np.abs(theirs).max())
    worst = float(np.abs(ours - theirs).max())
    row, token = np.unravel_index(np.argmax(np.abs(ours - theirs)), ours.shape)
    assert worst <= limit, f"position {row}, token {token}: off by {worst:.2e}, allowed {limit:.2e}"


def assert_greedy(
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    theirs: NDArray[np.float32],
    *,
    relative: float = 1e-4,
) -> None:
    """Check that each of `token_ids` is the oracle's greedy token after its predecessors, logprobs included.

    `theirs` are the oracle's logits after the prompt and all earlier `token_ids`; by induction, both greedy
    outputs are equal. If the oracle's top two tokens tie, either is accepted.
    """
    assert len(token_ids) == len(theirs)
    limit = relative * float(np.abs(theirs).max())
    for position, (token, logprob, row) in enumerate(zip(token_ids, logprobs, theirs, strict=True)):
        best = int(row.argmax())
        assert token == best or row[best] - row[token] < TIE, (
            f"token {position}: chose {token} ({row[token]:.4f}), the oracle {best} ({row[best]:.4f})"
        )
        wide = row.astype(np.float64)
        expected = wide[token] - wide.max() - np.log(np.exp(wide - wide.max()).sum())
        assert abs(logprob - expected) <= limit, f"token {position}: logprob {logprob}, the oracle {expected}"
