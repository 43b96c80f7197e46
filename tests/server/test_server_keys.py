"""Requests with different API keys: prefix cache, priority, and the number of their outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import penstock.server
from support.api.engines import make_engine, wait_until
from support.server.serving import Served, held, post, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PATH = "/v1/completions"
SHORT: dict[str, Any] = {"prompt": [1], "max_tokens": 1}


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    with make_engine(tiny_model) as engine:
        yield engine


@pytest.fixture(autouse=True)
def empty_cache(engine: penstock.Engine) -> None:
    engine.reset_prefix_cache()


def with_keys(engine: penstock.Engine, *keys: str, **settings: Any) -> Any:
    """A server with these keys, and one of an administrator."""
    chosen = penstock.server.ServerSettings(api_keys=keys, admin_api_keys=("boss",), **settings)
    return serving(penstock.server.app({"tiny": engine}, chosen))


def cached(server: Served, key: str, **fields: Any) -> int:
    """The number of cached tokens of a request with this key."""
    fields = {"prompt": list(range(64)), "max_tokens": 1, **fields}
    status, answer, _ = server.ask(PATH, fields, headers={"X-Api-Key": key})
    assert status == 200
    found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


# ---- the prefix cache


def test_key_does_not_see_the_prompts_of_another(engine: penstock.Engine) -> None:
    with with_keys(engine, "a", "b") as server:
        assert [cached(server, key) for key in ("a", "b", "boss")] == [0, 0, 0]
        assert cached(server, "a") > 0
        assert cached(server, "b") > 0


def test_salt_of_a_request_separates_within_a_key(engine: penstock.Engine) -> None:
    with with_keys(engine, "a", "b") as server:
        assert [cached(server, key, cache_salt="x") for key in ("a", "b", "a")] == [0, 0, 48]
        assert [cached(server, "a", **fields) for fields in ({}, {"cache_salt": "y"})] == [0, 0]


def test_keys_share_the_prefix_cache_if_it_is_set(engine: penstock.Engine) -> None:
    with with_keys(engine, "a", "b", share_prefix_cache=True) as server:
        assert cached(server, "a") == 0
        assert cached(server, "b") > 0


def test_one_key_shares_the_prefix_cache_with_the_process(engine: penstock.Engine) -> None:
    prompt = list(range(64))
    engine.blocking.generate(prompt, max_tokens=1)
    settings = penstock.server.ServerSettings(api_keys=("a",))
    with serving(penstock.server.app(engine, settings)) as server:
        assert cached(server, "a") > 0


def test_salt_is_removed_from_the_cache_for_all_keys(engine: penstock.Engine) -> None:
    with with_keys(engine, "a", "b") as server:
        for key in ("a", "b"):
            cached(server, key, cache_salt="x")
            cached(server, key)
        boss = {"X-Api-Key": "boss"}
        assert server.ask("/reset_prefix_cache", {"cache_salt": "x"}, headers=boss)[0] == 200
        assert [cached(server, key, cache_salt="x") for key in ("a", "b")] == [0, 0]
        assert cached(server, "a") > 0
        assert server.ask("/reset_prefix_cache", method="POST", headers=boss)[0] == 200
        assert [cached(server, key) for key in ("a", "b")] == [0, 0]
        assert server.ask("/reset_prefix_cache", {"cache_salt": ""}, headers=boss)[0] == 400


def test_request_without_prefix_cache_needs_no_salt(engine: penstock.Engine) -> None:
    with with_keys(engine, "a", "b") as server:
        assert cached(server, "a", use_prefix_cache=False) == 0
        assert cached(server, "a", use_prefix_cache=False) == 0


# ---- priority


@pytest.mark.parametrize(
    ("key", "priority", "trust", "status"),
    [
        ("a", -1, False, 400),
        ("a", 0, False, 200),
        ("a", 5, False, 200),
        ("a", -1, True, 200),
        ("boss", -1, False, 200),
    ],
)
def test_only_administrators_have_an_urgent_priority(
    engine: penstock.Engine, key: str, priority: int, *, trust: bool, status: int
) -> None:
    with with_keys(engine, "a", trust_priority=trust) as server:
        fields = {**SHORT, "priority": priority}
        found, answer, _ = server.ask(PATH, fields, headers={"X-Api-Key": key})
        assert found == status
        assert status == 200 or answer["error"]["param"] == "priority"


def test_only_its_key_and_administrators_abort_a_request(engine: penstock.Engine) -> None:
    with with_keys(engine, "a", "b") as server:
        for key, count in (("a", 1), ("boss", 1)):
            body = post(PATH, {**SHORT, "max_tokens": 400, "ignore_eos": True})
            with held(engine), server.send(body.replace(b"\r\nHost:", b"\r\nX-Api-Key: a\r\nHost:")):
                wait_until(lambda: bool(server.application.state.calls.generations))
                [name] = server.application.state.calls.generations
                for asking, found in (("b", 0), (key, count)):
                    answer = server.ask("/abort", {"request_id": name}, headers={"X-Api-Key": asking})[1]
                    assert answer == {"aborted": found}
            wait_until(lambda: not server.application.state.calls.generations)


# ---- outputs


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 5}, "n"),
        ({"best_of": 5}, "best_of"),
        ({"num_beams": 5}, "num_beams"),
        ({"n": 5, "use_beam_search": True}, "n"),
        ({"prompt": [[1], [2]], "n": 3}, "n"),
        ({"prompt": [[1], [2], [3], [4], [5]]}, "prompt"),
        ({"prompt": [[1], [2], [3], [4], [5]], "n": 2}, "prompt"),
        ({"prompt": [[1], [2], [3]], "best_of": 2}, "best_of"),
    ],
)
def test_outputs_that_are_not_returned_count(
    engine: penstock.Engine, fields: dict[str, Any], param: str
) -> None:
    settings = penstock.server.ServerSettings(max_outputs=4)
    with serving(penstock.server.app(engine, settings)) as server:
        status, answer, _ = server.ask(PATH, {**SHORT, **fields})
        assert (status, answer["error"]["param"]) == (400, param)
        assert server.ask(PATH, {**SHORT, "best_of": 4})[0] == 200


def test_bound_of_a_key_counts_outputs(engine: penstock.Engine) -> None:
    settings = penstock.server.ServerSettings(max_outputs_per_key=4)
    with serving(penstock.server.app(engine, settings)) as server:
        with held(engine), server.send(post(PATH, {**SHORT, "prompt": [[1], [2], [3]]})):
            wait_until(lambda: engine.stats().running == 4)
            status, answer, headers = server.ask(PATH, {**SHORT, "best_of": 2})
            assert (status, answer["error"]["code"], headers["retry-after"]) == (
                429,
                "too_many_requests",
                "1",
            )
            assert server.ask("/v1/models")[0] == 200
        wait_until(lambda: not server.application.state.calls.generations)
        assert server.ask(PATH, {**SHORT, "best_of": 4})[0] == 200
        assert server.ask(PATH, {**SHORT, "n": 5})[1]["error"]["param"] == "n"
