"""The demo model against transformers reading the same file in float32: template, ids, 200 greedy tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import penstock
from support.api.running import compute_logits, generate_greedily
from support.parity.compare import assert_close, assert_greedy
from support.parity.oracle import Oracle, TokenizerOracle, load_oracle

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.oracle, pytest.mark.timeout(600)]

NUM_TOKENS = 200
#: No answer has a token that rounding chooses.
QUESTIONS = (
    "Why is the sky blue?",
    "Write a haiku about autumn.",
    "List the planets of the solar system.",
    "What is 17 times 23? Show each step.",
    "Translate to French: The cat sleeps on the warm stone.",
    "Explain recursion to a young child.",
    "def fibonacci(n):\n    # complete this function\n",
    "Who wrote Don Quixote?",
    "Give me three names for a grey horse.",
    "Summarise: It rained all day, so we stayed in, read books and baked bread.",
    "¿Cuál es la capital de España?",
    "日本の首都はどこですか。",
    "What does HTTP status 418 mean?",
    'Answer in JSON with the keys "city" and "country": where is the Eiffel Tower?',
    "How do I boil an egg? 🥚",
    "Tell me a story that begins with a locked door.",
    "y",
    "Is a tomato a fruit?   \n\n  Answer yes or no.",
    "Compare iron and copper. " * 12,
    "What happens when water freezes?",
)
CONVERSATIONS: list[list[dict[str, str]]] = [
    *([{"role": "user", "content": question}] for question in QUESTIONS[:-1]),
    [
        {"role": "system", "content": "You answer in one sentence."},
        {"role": "user", "content": "Who are you?"},
        {"role": "assistant", "content": "I am a small language model."},
        {"role": "user", "content": QUESTIONS[-1]},
    ],
]


@pytest.fixture(scope="module")
def oracle(demo_model: Path) -> Oracle:
    return load_oracle(demo_model)


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> TokenizerOracle:
    return TokenizerOracle(demo_model)


@pytest.fixture(scope="module")
def results(demo_model: Path) -> list[penstock.Result]:
    """All twenty results, generated concurrently."""
    return generate_greedily(
        demo_model,
        CONVERSATIONS,
        NUM_TOKENS,
        threads=2,
        dtype="float32",
        quantization="none",
        max_model_len=1024,
    )


def test_rendered_templates_match_transformers(demo_model: Path, tokenizer: TokenizerOracle) -> None:
    with penstock.Engine(str(demo_model)) as engine:
        for conversation in CONVERSATIONS:
            assert engine.apply_chat_template(conversation) == tokenizer.render(conversation)


def test_prompt_ids_match_transformers(results: list[penstock.Result], tokenizer: TokenizerOracle) -> None:
    for conversation, result in zip(CONVERSATIONS, results, strict=True):
        assert list(result.prompt_token_ids) == tokenizer.prompt_ids(conversation)


@pytest.mark.parametrize("index", range(len(CONVERSATIONS)))
def test_two_hundred_greedy_tokens_match_transformers(
    index: int, results: list[penstock.Result], oracle: Oracle
) -> None:
    result = results[index]
    assert len(result.token_ids) == NUM_TOKENS
    assert result.logprobs is not None
    assert_greedy(result.token_ids, result.logprobs, oracle.greedy(result.prompt_token_ids, NUM_TOKENS))


def test_decoded_text_matches_transformers(
    results: list[penstock.Result], tokenizer: TokenizerOracle
) -> None:
    for result in results:
        assert result.text == tokenizer.decode(result.token_ids)


@pytest.mark.needs("hooks")
def test_logits_of_a_long_prompt_match_transformers(
    demo_model: Path, results: list[penstock.Result], oracle: Oracle
) -> None:
    token_ids = [token for result in results[:3] for token in (*result.prompt_token_ids, *result.token_ids)]
    ours = compute_logits(demo_model, token_ids, threads=2, chunk=256)
    assert_close(ours, oracle.logits(token_ids))
