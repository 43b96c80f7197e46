"""A program that samples with every parameter, for the comparison of devices."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

import penstock

if TYPE_CHECKING:
    from collections.abc import Sequence

PROMPT = "one two one two one two three"


def halve(_: Sequence[int], logits: Any) -> None:
    """A logits processor."""
    values = np.asarray(memoryview(logits))
    values[::2] /= 2


REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "logprobs": True, "top_logprobs": 5},
    {"temperature": 0.5, "logprobs": True, "top_logprobs": 3, "logprobs_mode": "processed"},
    {"temperature": 2.0},
    {"top_k": 1},
    {"top_k": 5, "temperature": 1.5},
    {"top_p": 0.5},
    {"top_p": 0.95, "temperature": 1.2, "prompt_logprobs": 4},
    {"min_p": 0.1},
    {"typical_p": 0.6},
    {"top_n_sigma": 1.0},
    {"epsilon_cutoff": 0.003},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.9, "top_n_sigma": 2.5, "temperature": 1.5},
    {"logit_bias": {7: 4.0, 90: -100, 333: 3.5}},
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.6, "repetition_penalty_scope": "output"},
    {"presence_penalty": 1.5, "frequency_penalty": 0.7},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2, "temperature": 0},
    {"allowed_token_ids": [5, 6, 7, 300, 511]},
    {"bad_token_ids": list(range(0, 500, 2))},
    {"bad_token_sequences": [[3], [5, 6], [101, 32]], "allowed_token_ids": [3, 5, 6, 32, 101]},
    {"allowed_token_ids": [5, 6, 7], "stop_token_ids": [6], "min_tokens": 7, "ignore_eos": False},
    {"stop_token_ids": list(range(0, 512, 3)), "ignore_eos": False},
    {"regex": "[a-z]{4} [0-9]{5}", "ignore_eos": False},
    {"regex": "(yes|no) [a-c]+", "repetition_penalty": 1.4, "ignore_eos": False, "logprobs": True},
    {"logits_processors": [halve], "logit_bias": {3: 1.0}, "logprobs": True},
    {"n": 3, "logprobs": True, "top_logprobs": 2, "temperature": 1.3},
    # The most likely token is one that the prompt excludes.
    {"prompt": [5, 6, 7, 5], "no_repeat_ngram_size": 2, "logit_bias": {6: 90.0, 8: 80.0}, "max_tokens": 1},
    {"prompt": [5, 6], "bad_token_sequences": [[6, 7]], "logit_bias": {7: 90.0, 8: 80.0}, "max_tokens": 1},
]


def summary(result: penstock.Result) -> dict[str, Any]:
    """The outputs of a request, as JSON has them."""
    tops = [position for choice in result.choices for position in choice.top_logprobs or ()]
    tops += [position or () for position in result.prompt_top_logprobs or ()]
    logprobs = [logprob for choice in result.choices for logprob in choice.logprobs or ()]
    logprobs += [logprob for logprob in result.prompt_logprobs or () if logprob is not None]
    pairs = [pair for position in tops for pair in position]
    return {
        "tokens": [list(choice.token_ids) for choice in result.choices],
        "ends": [choice.finish_reason for choice in result.choices],
        "top_tokens": [token for token, _ in pairs],
        "logprobs": logprobs + [logprob for _, logprob in pairs],
    }


def sampled(model: str, device: str, speculation: str = "") -> list[dict[str, Any]]:
    """The outputs of all requests, which run at the same time."""
    options: dict[str, Any] = {"speculation": speculation} if speculation else {}
    with penstock.Engine(model, device=device, max_num_seqs=8, **options) as engine:

        def run(number: int) -> dict[str, Any]:
            request = {"max_tokens": 12, "ignore_eos": True, "seed": number} | REQUESTS[number]
            prompt = request.pop("prompt", PROMPT)
            return summary(engine.blocking.generate(prompt, penstock.SamplingParams(**request)))

        with ThreadPoolExecutor(len(REQUESTS)) as threads:
            return list(threads.map(run, range(len(REQUESTS))))


#: Requests that are admitted in two steps, so one of them admits half of them or more.
ADMITTED = 18


def lists_of(number: int) -> dict[str, Any]:
    """Parameters with lists of a slot: short ones, or ones of which a buffer of admissions holds few."""
    likely = range(20 + 25 * number, 45 + 25 * number)
    if number % 2:
        return {"allowed_token_ids": list(likely), "stop_token_ids": list(likely[::3])}
    pairs = [[token, other] for token in likely for other in range(likely[0], likely[0] + 15)]
    bias = {token: 50.0 if token in likely else -1.0 for token in range(500)}
    return {"logit_bias": bias, "bad_token_sequences": pairs, "repetition_penalty": 1.2}


def admitted_together(model: str, device: str) -> list[Any]:
    """The number of steps of an engine, and the tokens of requests that are admitted together.

    A logits processor of an earlier request holds its step back until all others have been started. The next
    step may have been planned meanwhile.
    """
    is_held, is_released = threading.Event(), threading.Event()

    def hold(_: Sequence[int], __: Any) -> None:
        is_held.set()
        is_released.wait(60)

    options: dict[str, Any] = {"max_num_seqs": ADMITTED + 1, "max_num_batched_tokens": 64}
    with penstock.Engine(model, device=device, max_model_len=64, prefix_cache=False, **options) as engine:
        start = engine.blocking.start_request
        first = start([1], max_tokens=1, logits_processors=[hold])
        is_held.wait(60)
        requests = [
            start([number + 1] * 3, max_tokens=5, ignore_eos=False, seed=number, **lists_of(number))
            for number in range(ADMITTED)
        ]
        is_released.set()
        tokens = [list(request.result().token_ids) for request in (first, *requests)]
        return [engine.stats().steps, tokens[1:]]
