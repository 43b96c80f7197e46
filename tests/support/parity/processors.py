"""The probabilities of transformers: each option of sampling with its processor, in the order of `generate`.

transformers computes in float64 here, so that no cutoff depends on rounding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from support.parity.oracle import import_torch
from support.parity.stored import store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


def probabilities(
    logits: NDArray[np.float32], prompt: Sequence[int], generated: Sequence[int], **options: Any
) -> NDArray[np.float64]:
    """The probabilities of the next token."""

    def compute() -> dict[str, Any]:
        return {"probabilities": process(logits, prompt, generated, **options).astype(np.float32)}

    inputs = {"logits": logits, "prompt": list(prompt), "generated": list(generated), "options": options}
    found: NDArray[np.float64] = store().recall("probabilities", inputs, compute)["probabilities"]
    return found.astype(np.float64)


def process(
    logits: NDArray[np.float32], prompt: Sequence[int], generated: Sequence[int], **options: Any
) -> NDArray[np.float64]:
    """The probabilities after the processors of the options."""
    torch = import_torch()
    from transformers import generation as hf

    ends = list(options.get("stop_token_ids", ()))
    skipped = len(prompt) if options.get("repetition_penalty_scope") == "output" else None
    makers: dict[str, Any] = {
        "logit_bias": lambda biases: hf.SequenceBiasLogitsProcessor(
            [[[token], float(bias)] for token, bias in biases.items()]
        ),
        "repetition_penalty": lambda penalty: hf.RepetitionPenaltyLogitsProcessor(penalty, skipped),
        "no_repeat_ngram_size": hf.NoRepeatNGramLogitsProcessor,
        "bad_token_sequences": hf.NoBadWordsLogitsProcessor,
        "min_length": lambda length: hf.MinLengthLogitsProcessor(length, ends),
        "min_tokens": lambda count: hf.MinNewTokensLengthLogitsProcessor(len(prompt), count, ends),
        "bad_token_ids": hf.SuppressTokensLogitsProcessor,
        "temperature": hf.TemperatureLogitsWarper,
        "top_k": hf.TopKLogitsWarper,
        "top_p": hf.TopPLogitsWarper,
        "min_p": hf.MinPLogitsWarper,
        "typical_p": hf.TypicalLogitsWarper,
    }
    unknown = options.keys() - makers.keys() - {"stop_token_ids", "repetition_penalty_scope"}
    assert not unknown, unknown
    scores = torch.tensor(logits[None].astype(np.float64))
    history = torch.tensor([[*prompt, *generated]])
    for name, make in makers.items():
        if name in options:
            scores = make(options[name])(history, scores)
    found: NDArray[np.float64] = scores.softmax(-1)[0].numpy()
    return found
