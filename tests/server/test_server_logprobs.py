"""Log probabilities over HTTP: scoring, positions in the text, tokens that are no text, large responses."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer, decoders, models

import penstock.server
from penstock.server import choices as choices_module
from penstock.server.sse import json_bytes
from support.api.checkpoints import SPECIAL_TOKENS
from support.api.engines import make_engine
from support.server.serving import Served, serving

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

PATH = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hello"}]
#: Characters of two, four and one bytes; the tokens of the tiny model are bytes.
TEXT = "é😀b"
SPELLED = ["\\xc3", "\\xa9", "\\xf0", "\\x9f", "\\x98", "\\x80", "b"]
OFFSETS = [0, 0, 1, 1, 1, 1, 2]


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    with make_engine(tiny_model) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine: penstock.Engine) -> Iterator[Served]:
    with serving(penstock.server.app(engine)) as server:
        yield server


def joined(events: list[Any]) -> dict[str, list[Any]]:
    """The log probabilities of a streamed completion."""
    found: dict[str, list[Any]] = {}
    for event in events[:-1]:
        for name, values in (event["choices"][0]["logprobs"] or {}).items():
            found.setdefault(name, []).extend(values)
    return found


def completion_spelling(texts: list[str]) -> list[str]:
    return [f"bytes:{text}" if text.startswith("\\") else text for text in texts]


# ---- tokens and positions


def test_tokens_of_a_completion_have_exact_positions(server: Served) -> None:
    fields = {"prompt": "a", "max_tokens": 20, "logprobs": 0, "structured_outputs": {"choice": [TEXT]}}
    _, answer, _ = server.ask(PATH, fields)
    [choice] = answer["choices"]
    assert choice["text"] == TEXT
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == [*completion_spelling(SPELLED), SPECIAL_TOKENS[2]]
    assert logprobs["text_offset"] == [*OFFSETS, len(TEXT)]
    assert joined(server.events(PATH, fields)) == logprobs


def test_tokens_of_an_echoed_prompt_have_exact_positions(server: Served, engine: penstock.Engine) -> None:
    special = SPECIAL_TOKENS[0]
    prompt = f"{TEXT}{special}{TEXT}"
    output = {"max_tokens": 20, "structured_outputs": {"choice": [TEXT]}}
    for given, shown in ((engine.encode(prompt), TEXT * 2), (prompt, prompt)):
        _, answer, _ = server.ask(PATH, {"prompt": given, "echo": True, "logprobs": 0, **output})
        [choice] = answer["choices"]
        logprobs = choice["logprobs"]
        assert choice["text"] == shown + TEXT
        spelled = completion_spelling(SPELLED)
        assert logprobs["tokens"] == [*spelled, special, *spelled, *spelled, SPECIAL_TOKENS[2]]
        second, third = ([len(shown) - gap + offset for offset in OFFSETS] for gap in (3, 0))
        assert logprobs["text_offset"] == [*OFFSETS, 3, *second, *third, len(shown) + 3]


def test_shown_special_token_has_a_place_in_the_text(server: Served, engine: penstock.Engine) -> None:
    special = SPECIAL_TOKENS[0]
    token_ids = engine.encode(f"a{special}b")
    fields = {"prompt": token_ids, "echo": True, "max_tokens": 0, "logprobs": 0}
    _, answer, _ = server.ask(PATH, {**fields, "skip_special_tokens": False})
    assert answer["choices"][0]["logprobs"]["text_offset"] == [0, 1, 1 + len(special)]
    _, answer, _ = server.ask(PATH, fields)
    assert answer["choices"][0]["logprobs"]["text_offset"] == [0, 1, 1]


def test_positions_follow_a_tokenizer_that_omits_a_space(tiny_model: Path, tmp_path: Path) -> None:
    vocabulary = {"▁Hello": 0, "▁world": 1, **{f"[{id_}]": id_ for id_ in range(2, 512)}}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with (
        make_engine(tiny_model, tokenizer=tmp_path / "tokenizer.json") as engine,
        serving(penstock.server.app(engine)) as server,
    ):
        fields = {"logprobs": 0, "max_tokens": 2, "allowed_token_ids": [1]}
        _, answer, _ = server.ask(PATH, {"prompt": [0, 1], **fields})
        assert answer["choices"][0]["text"] == "world world"
        assert answer["choices"][0]["logprobs"]["text_offset"] == [0, 5]
        _, answer, _ = server.ask(PATH, {"prompt": [0, 1], "echo": True, **fields, "max_tokens": 0})
        assert answer["choices"][0]["text"] == "Hello world"
        assert answer["choices"][0]["logprobs"]["text_offset"] == [0, 5]


def test_top_logprobs_have_a_name_for_each_token(server: Served) -> None:
    _, answer, _ = server.ask(PATH, {"prompt": "a", "max_tokens": 8, "logprobs": 20, "temperature": 2.0})
    for top in answer["choices"][0]["logprobs"]["top_logprobs"]:
        assert len(top) in (20, 21)


def test_chat_spells_the_bytes_of_tokens_that_are_no_text(server: Served) -> None:
    fields = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 1}
    _, answer, _ = server.ask(CHAT, {**fields, "structured_outputs": {"choice": [TEXT]}})
    content = answer["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content[:-1]] == SPELLED
    assert b"".join(bytes(entry["bytes"]) for entry in content[:-1]).decode() == TEXT
    for entry in content:
        [top] = entry["top_logprobs"]
        assert top["logprob"] >= entry["logprob"]
        assert top["token"] != entry["token"] or top == {
            name: value for name, value in entry.items() if name != "top_logprobs"
        }


# ---- prompts


def scored(choice: Mapping[str, Any], context_length: int) -> tuple[float, bool]:
    """The sum of the log probabilities after the context, and whether greedy decoding continues it so.

    As lm-eval reads a response: the last token is the generated one.
    """
    logprobs = choice["logprobs"]
    places = range(context_length, len(logprobs["tokens"]) - 1)
    total = sum(logprobs["token_logprobs"][place] for place in places)
    tops = logprobs["top_logprobs"]
    return total, all(max(tops[place], key=tops[place].get) == logprobs["tokens"][place] for place in places)


def test_batch_is_scored_as_evaluations_request_it(server: Served, engine: penstock.Engine) -> None:
    greedy = engine.blocking.generate([65, 66], max_tokens=6, temperature=0, ignore_eos=True)
    prompts = [[65, 66, *greedy.token_ids], [67, 300, 5, 7, 195], [65, 66, greedy.token_ids[0], 3]]
    fields = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    status, answer, _ = server.ask(PATH, {"prompt": prompts, **fields})
    assert status == 200
    choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
    for prompt, choice, is_greedy in zip(prompts, choices, (True, False, False), strict=True):
        assert len(choice["logprobs"]["token_logprobs"]) == len(prompt) + 1
        assert choice["logprobs"]["token_logprobs"][0] is None
        expected = sum(value or 0.0 for value in engine.blocking.score(prompt).logprobs[2:])
        total, is_found_greedy = scored(choice, 2)
        assert (total, is_found_greedy) == (expected, is_greedy)
        assert choice["prompt_logprobs"] is None


def test_each_choice_has_the_log_probabilities_of_its_prompt(server: Served) -> None:
    fields = {
        "prompt": ["AB", "C"],
        "n": 2,
        "echo": True,
        "logprobs": 1,
        "max_tokens": 2,
        "seed": 1,
        "ignore_eos": True,
    }
    _, answer, _ = server.ask(PATH, fields)
    choices = [choice["logprobs"] for choice in answer["choices"]]
    assert [len(logprobs["tokens"]) for logprobs in choices] == [4, 4, 3, 3]
    for name in choices[0]:
        assert choices[0][name][:2] == choices[1][name][:2]
        assert choices[2][name][:1] == choices[3][name][:1]
    for choice in answer["choices"]:
        text = choice["text"]
        offsets = choice["logprobs"]["text_offset"]
        for token, offset in zip(choice["logprobs"]["tokens"], offsets, strict=True):
            if not token.startswith("bytes:") and token not in SPECIAL_TOKENS:
                assert text[offset : offset + len(token)] == token


def test_prompt_logprobs_and_echo_have_their_own_numbers(server: Served) -> None:
    fields = {"prompt": "ABC", "echo": True, "max_tokens": 1}
    _, answer, _ = server.ask(PATH, {**fields, "logprobs": 1, "prompt_logprobs": 5})
    [choice] = answer["choices"]
    assert choice["prompt_logprobs"][0] is None
    assert {len(position) for position in choice["prompt_logprobs"][1:]} <= {5, 6}
    assert {len(top) for top in choice["logprobs"]["top_logprobs"][1:]} <= {1, 2}
    _, answer, _ = server.ask(PATH, {**fields, "logprobs": 3, "prompt_logprobs": 0})
    [choice] = answer["choices"]
    assert {len(position) for position in choice["prompt_logprobs"][1:]} == {1}
    assert {len(top) for top in choice["logprobs"]["top_logprobs"][1:]} <= {3, 4}
    assert [entry["decoded_token"] for entry in choice["prompt_logprobs"][1].values()] == ["B"]


def test_chat_returns_prompt_logprobs_if_they_are_asked_for(server: Served) -> None:
    fields = {"messages": MESSAGES, "max_tokens": 1, "return_token_ids": True}
    _, answer, _ = server.ask(CHAT, {**fields, "prompt_logprobs": 1})
    positions = answer["prompt_logprobs"]
    assert len(positions) == len(answer["prompt_token_ids"])
    for token_id, position in zip(answer["prompt_token_ids"][1:], positions[1:], strict=True):
        assert str(token_id) in position
        assert min(entry["rank"] or 99 for entry in position.values()) == 1
    assert server.ask(CHAT, fields)[1]["prompt_logprobs"] is None


@pytest.mark.parametrize("more", [{}, {"echo": True}, {"echo": True, "logprobs": 0}])
def test_prompt_logprobs_of_no_top_tokens_have_each_token(server: Served, more: dict[str, Any]) -> None:
    fields = {"prompt": "ABC", "max_tokens": 1, "return_token_ids": True}
    for body in ({**fields, **more, "prompt_logprobs": 0}, {**fields, **more, "prompt_logprobs": 1}):
        _, answer, _ = server.ask(PATH, body)
        [choice] = answer["choices"]
        token_ids = [str(token_id) for token_id in choice["prompt_token_ids"]]
        first, *others = choice["prompt_logprobs"]
        assert first is None
        if body["prompt_logprobs"] == 0:
            assert [list(position) for position in others] == [[token_id] for token_id in token_ids[1:]]
            own = [entry["logprob"] for position in others for entry in position.values()]
        else:
            assert own == [
                position[token_id]["logprob"]
                for token_id, position in zip(token_ids[1:], others, strict=True)
            ]


def test_chat_returns_prompt_logprobs_without_top_tokens(server: Served) -> None:
    fields = {"messages": MESSAGES, "max_tokens": 1, "return_token_ids": True, "prompt_logprobs": 0}
    _, answer, _ = server.ask(CHAT, fields)
    first, *others = answer["prompt_logprobs"]
    assert first is None
    token_ids = answer["prompt_token_ids"][1:]
    assert [list(position) for position in others] == [[str(token_id)] for token_id in token_ids]


# ---- large responses


def test_large_response_is_made_outside_the_event_loop(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[threading.Thread] = set()

    def encode(value: object) -> bytes:
        threads.add(threading.current_thread())
        return json_bytes(value)

    monkeypatch.setattr(choices_module, "json_bytes", encode)
    prompt = list(range(100, 300))
    server.ask(PATH, {"prompt": prompt, "echo": True, "max_tokens": 1, "logprobs": 1})
    [loop] = threads
    threads.clear()
    _, answer, _ = server.ask(PATH, {"prompt": prompt, "echo": True, "max_tokens": 1, "logprobs": 5})
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == 201
    assert loop not in threads
    assert threads


def test_response_has_a_bound(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices_module, "_MAX_BYTES", 2000)
    fields = {"prompt": [1], "max_tokens": 1, "logprobs": 1}
    assert server.ask(PATH, fields)[0] == 200
    status, answer, _ = server.ask(PATH, {**fields, "n": 20})
    assert (status, answer["error"]["param"]) == (400, "logprobs")
