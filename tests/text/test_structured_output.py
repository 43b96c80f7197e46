"""Structured output: every output is valid, and hostile grammars are rejected."""

from __future__ import annotations

import collections
import contextlib
import datetime as dt
import enum
import itertools
import json
import re
import subprocess
import sys
import time
import traceback
import uuid
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import anyio
import jsonschema
import pydantic
import pytest

import penstock
from penstock import _workers
from penstock._client import client
from penstock.demo import model_path
from support.api.checkpoints import make_config, write_checkpoint
from support.api.engines import PROMPT, assert_at_rest, limit_threads, make_engine, wait_until
from support.paths import DATA

if TYPE_CHECKING:
    from collections.abc import Iterator

#: `true` and `false` are schemas, too, but not allowed in a response format.
SCHEMAS = [
    entry
    for entry in json.loads((DATA / "json_schemas.json").read_text())
    if isinstance(entry["schema"], dict)
]
CHAT = [{"role": "user", "content": "Answer in JSON."}]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Iterator[penstock.Engine]:
    """An engine with random weights and the vocabulary of a real model."""
    del demo_model  # it must be installed
    config = make_config("llama", vocab_size=49152, max_position_embeddings=4096, eos_token_id=2)
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("random"), config)
    with make_engine(checkpoint, tokenizer=model_path(), max_num_seqs=64, tool_parser="none") as engine:
        yield engine


def as_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


async def ask_all(engine: penstock.Engine, requests: list[dict[str, Any]]) -> list[penstock.Result]:
    """Run all requests concurrently."""
    results: dict[int, penstock.Result] = {}

    async def ask(index: int) -> None:
        results[index] = await engine.generate(
            CHAT[0]["content"], **{"temperature": 1.0, "seed": index, **requests[index]}
        )

    async with anyio.create_task_group() as group:
        for index in range(len(requests)):
            group.start_soon(ask, index)
    return [results[index] for index in range(len(requests))]


@pytest.fixture(scope="module")
def closers(engine: penstock.Engine) -> dict[int, float]:
    """A logit bias towards tokens that close strings, lists and objects; random weights rarely close them."""
    liked = ['"', '"}', '"]', "}", "]", "}}", "]}", '",', "0"]
    ids = {tuple(engine.encode(text, add_special_tokens=False)) for text in liked}
    return {token: 6.0 for (token, *rest) in ids if not rest}


@pytest.mark.anyio
async def test_every_output_is_valid_under_its_schema(
    engine: penstock.Engine, closers: dict[int, float]
) -> None:
    results = await ask_all(
        engine,
        [
            {"response_format": as_format(entry["schema"]), "max_tokens": 600, "logit_bias": closers}
            for entry in SCHEMAS
        ],
    )
    ended = [result.finish_reason == "stop" for result in results]
    assert sum(ended) >= 150, "too many outputs were truncated"
    for entry, result in zip(SCHEMAS, results, strict=True):
        if result.finish_reason == "stop":
            jsonschema.validate(json.loads(result.text), entry["schema"])
    await assert_at_rest(engine)


@pytest.mark.anyio
async def test_strict_schema_is_closed_at_every_level(engine: penstock.Engine) -> None:
    inner = {"type": "object", "properties": {"properties": {"enum": [1]}}, "required": ["properties"]}
    one_of = {"type": "array", "items": inner, "minItems": 1, "maxItems": 1}
    schema = {
        "type": "object",
        "properties": {"one": {"$ref": "#/$defs/inner"}, "all": one_of},
        "required": ["one", "all"],
        "$defs": {"inner": inner},
    }
    named = {"name": "answer", "schema": schema, "strict": True}
    request = {"response_format": {"type": "json_schema", "json_schema": named}, "max_tokens": 100}
    for result in await ask_all(engine, [request] * 4):
        assert json.loads(result.text) == {"one": {"properties": 1}, "all": [{"properties": 1}]}


class Tree(pydantic.BaseModel):
    """A model that refers to itself."""

    label: Annotated[str, pydantic.Field(max_length=10)]
    children: Annotated[list[Tree], pydantic.Field(max_length=1)] = []


POINT = pydantic.create_model("Point", x=(int, ...), y=(float, ...))
NAMED = pydantic.create_model("Named", name=(str, ...))
Colour = enum.Enum("Colour", {"RED": "red", "BLUE": "blue"})
SHORT_LIST = pydantic.Field(min_length=1, max_length=2)
FIELDS: dict[str, dict[str, Any]] = {
    "Optional": {"note": (str | None, None), "count": (int | None, ...)},
    "Bounded": {"age": (int, pydantic.Field(ge=0, le=120)), "share": (float, pydantic.Field(ge=0, le=1))},
    "Listed": {"tags": (list[str], SHORT_LIST), "points": (list[POINT], SHORT_LIST)},  # type: ignore[valid-type]
    "Nested": {"start": (POINT, ...), "end": (POINT | None, ...)},
    "Chosen": {"colour": (Colour, ...), "size": (Literal["small", "large"], ...)},
    "Mapped": {"scores": (dict[str, int], pydantic.Field(max_length=2))},
    "Paired": {"pair": (tuple[int, str], ...)},
    "Timed": {"time": (dt.time, ...), "identifier": (uuid.UUID, ...)},
    "Flagged": {"is_open": (bool, True), "ratio": (float, 0.5)},
    "Alternatives": {"value": (int | bool | POINT, ...)},
}
MODELS: list[type[pydantic.BaseModel]] = [
    *(POINT, NAMED, Tree, pydantic.create_model("Inherited", __base__=NAMED, point=(POINT, ...))),
    *(pydantic.create_model(name, **fields) for name, fields in FIELDS.items()),
]


@pytest.mark.anyio
async def test_answers_validate_under_their_pydantic_models(
    engine: penstock.Engine, closers: dict[int, float]
) -> None:
    bias = dict.fromkeys(closers, 20.0)
    requests = [{"response_format": model, "max_tokens": 1000, "logit_bias": bias} for model in MODELS]
    for model, result in zip(MODELS, await ask_all(engine, requests), strict=True):
        assert result.finish_reason == "stop", (model, result.text[:200])
        model.model_validate_json(result.text)
        assert json.loads(result.text).keys() <= model.model_fields.keys()


@pytest.mark.anyio
async def test_unsupported_keyword_is_ignored_only_on_request(engine: penstock.Engine) -> None:
    schema = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "maxItems": 2}
    message = (
        r'^response_format: keywords that are not supported: \["uniqueItems"\]; .*"ignore_unsupported": true'
    )
    with pytest.raises(penstock.InvalidRequestError, match=message) as caught:
        await engine.generate("List:", response_format=schema)
    assert (caught.value.field, caught.value.value) == ("response_format", schema)
    holder = {"schema": schema, "ignore_unsupported": True}
    result = await engine.generate(
        "List:", response_format={"type": "json_schema", "json_schema": holder}, max_tokens=20
    )
    assert len(json.loads(result.text)) <= 2


@pytest.mark.anyio
@pytest.mark.parametrize("keyword", ["if", "not", "contains", "propertyNames", "unevaluatedProperties"])
async def test_schema_of_an_unsupported_keyword_alone_is_named(engine: penstock.Engine, keyword: str) -> None:
    with pytest.raises(penstock.InvalidRequestError, match=f'^response_format: .*"{keyword}"'):
        await engine.generate("List:", response_format={keyword: {}})


@pytest.mark.anyio
async def test_json_object_format_allows_any_object(
    engine: penstock.Engine, closers: dict[int, float]
) -> None:
    request = {"response_format": {"type": "json_object"}, "max_tokens": 400, "logit_bias": closers}
    for result in await ask_all(engine, [request] * 8):
        assert result.finish_reason == "stop"
        assert isinstance(json.loads(result.text), dict)


@pytest.mark.anyio
async def test_regex_matches_the_whole_output(engine: penstock.Engine) -> None:
    patterns = [
        r"[0-9]{4}-(0[1-9]|1[0-2])-[0-9]{2}",
        r"(yes|no), (because|although) [a-z]{3,20}\.",
        r"[A-ZÄÖÜ][a-zäöü]{2,8}( [A-ZÄÖÜ][a-zäöü]{2,8})?",
        r"a{40}b{3}",
    ]
    results = await ask_all(engine, [{"regex": pattern, "max_tokens": 100} for pattern in patterns * 4])
    for pattern, result in zip(patterns * 4, results, strict=True):
        assert result.finish_reason == "stop"
        assert re.fullmatch(pattern, result.text)


@pytest.mark.anyio
async def test_choice_output_is_one_of_the_texts(engine: penstock.Engine) -> None:
    texts = ["yes", "no", "yes and no", "(a|b)*", "ünï 👩‍🚀"]
    results = await ask_all(engine, [{"choice": texts}] * 24)
    assert {result.text for result in results} <= set(texts)
    assert len({result.text for result in results}) > 1
    assert {result.finish_reason for result in results} == {"stop"}


@pytest.mark.anyio
async def test_output_follows_the_grammar(engine: penstock.Engine) -> None:
    source = 'start: pair ("," pair){0,5}\npair: /[a-z]{1,5}/ "=" /[0-9]{1,3}/\n'
    for result in await ask_all(engine, [{"grammar": source, "max_tokens": 300}] * 8):
        assert result.finish_reason == "stop"
        assert re.fullmatch(r"[a-z]{1,5}=[0-9]{1,3}(,[a-z]{1,5}=[0-9]{1,3}){0,5}", result.text)


HOSTILE: dict[str, dict[str, Any]] = {
    "nesting": {"response_format": as_format(json.loads('{"items":' * 90 + "{}" + "}" * 90))},
    "a schema that is none": {"response_format": as_format({"type": "banana"})},
    "the smallest integer of 64 bits": {"response_format": as_format({"const": -(2**63)})},
    "an integer that is not a float": {"response_format": as_format({"enum": [1234567890123456789]})},
    "nothing is valid": {"response_format": as_format({"enum": []})},
    "a reference to nowhere": {"response_format": as_format({"$ref": "#/$defs/nowhere"})},
    "a reference to somewhere else": {"response_format": as_format({"$ref": "http://localhost/x.json"})},
    "a broken expression": {"regex": "a(b"},
    "an expression that is too complex": {"regex": "x{100000}"},
    "a grammar that is none": {"grammar": "what is this?"},
    "a grammar without its root": {"grammar": 'answer ::= "yes" | "no"'},
    "a huge alternative": {"choice": [str(number) * 1000 for number in range(1000)] + ["x" * 600_000]},
}


@pytest.mark.anyio
@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_grammar_is_rejected_while_streams_continue(engine: penstock.Engine, name: str) -> None:
    field = next(iter(HOSTILE[name]))
    async with engine.stream(PROMPT, max_tokens=300, ignore_eos=True) as request:
        await anext(aiter(request))
        with pytest.raises(penstock.InvalidRequestError) as raised:
            await engine.generate("x", max_tokens=5, **HOSTILE[name])
        assert raised.value.field == field
        assert len(str(raised.value)) < 2000
        assert "\n" not in str(raised.value)
        assert "start:" not in str(raised.value)
        await anext(aiter(request))
    await assert_at_rest(engine)


@pytest.mark.anyio
async def test_grammar_that_explodes_while_matching_ends_its_request(engine: penstock.Engine) -> None:
    params = penstock.SamplingParams(max_tokens=200, ignore_eos=True, seed=1, logprobs=True)
    alone = await engine.generate(PROMPT, params)
    async with engine.stream(PROMPT, params) as request:
        for _ in range(3):
            with contextlib.suppress(penstock.InvalidRequestError, penstock.GenerationError):
                explosion = "((((a{1,500}){1,500}){1,500}){1,500}){1,500}"
                result = await engine.generate("x", max_tokens=20, regex=explosion)
                assert set(result.text) <= {"a"}
        assert (await request.result()).logprobs == alone.logprobs
    await assert_at_rest(engine)


@pytest.mark.anyio
async def test_event_loop_runs_while_a_grammar_compiles(engine: penstock.Engine) -> None:
    schema = {
        "type": "object",
        "properties": {f"field{index}": {"type": "string", "pattern": "[a-z]{1,40}"} for index in range(60)},
    }
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as group:
        group.start_soon(count)
        before = turns
        request = await engine.start_request("x", max_tokens=1, response_format=as_format(schema))
        assert turns > before + 1
        group.cancel_scope.cancel()
    request.cancel()
    await assert_at_rest(engine)


@pytest.mark.anyio
async def test_truncated_output_is_a_prefix_of_a_valid_one(engine: penstock.Engine) -> None:
    options: dict[str, Any] = {"regex": "[0-9]{200}", "temperature": 1.0, "seed": 4}
    short = await engine.generate("x", max_tokens=20, **options)
    whole = await engine.generate("x", max_tokens=400, **options)
    assert short.finish_reason == "length"
    assert whole.text.startswith(short.text)
    assert re.fullmatch("[0-9]{200}", whole.text)


_numbers = itertools.count()


def slow_format() -> dict[str, Any]:
    """A new response format that compiles slowly."""
    number = next(_numbers)
    return as_format({"properties": {f"{number}_{index}": {"type": "null"} for index in range(900)}})


def num_submitting() -> int:
    """The number of worker threads that are submitting a request."""
    stacks = [traceback.walk_stack(frame) for frame in sys._current_frames().values()]
    return sum(any(frame.f_code.co_name == "submit" for frame, _ in stack) for stack in stacks)


@pytest.mark.anyio
async def test_cancelled_compilation_keeps_no_thread_and_no_slot(engine: penstock.Engine) -> None:
    started = time.perf_counter()
    await engine.generate("x", max_tokens=1, response_format=slow_format())
    seconds = time.perf_counter() - started
    async with anyio.create_task_group() as group:
        for _ in range(30):
            group.start_soon(partial(engine.generate, "x", max_tokens=1, response_format=slow_format()))
        while num_submitting() < _workers.MAX_THREADS:
            await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()
    # Two threads compile for all, so the formats of the worker threads would take longer.
    wait_until(lambda: num_submitting() == 0, seconds * _workers.MAX_THREADS / 4)
    assert (await engine.generate("x", max_tokens=9, regex="[bc]{3}")).finish_reason == "stop"
    await assert_at_rest(engine)


@pytest.mark.anyio
async def test_callers_that_wait_for_grammars_take_no_slot(
    engine: penstock.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_threads(monkeypatch, 1)
    begin_wait = _workers.SlowCall.begin_wait
    waits: list[_workers.SlowCall] = []
    answers: list[penstock.Result] = []

    def recorded(call: _workers.SlowCall) -> None:
        begin_wait(call)
        waits.append(call)

    async def ask() -> None:
        answers.append(await engine.generate("x", max_tokens=1, response_format=slow_format()))

    monkeypatch.setattr(_workers.SlowCall, "begin_wait", recorded)
    async with anyio.create_task_group() as group:
        for _ in range(12):
            group.start_soon(ask)
        while len(waits) < 12:
            await anyio.lowlevel.checkpoint()
        assert len(answers) <= 6  # not one after the other
        result = await engine.generate("word " * 1000, max_tokens=1, ignore_eos=True)
        assert result.finish_reason == "length"
        group.cancel_scope.cancel()
    await assert_at_rest(engine)


@pytest.mark.anyio
async def test_number_of_callers_that_wait_is_limited(
    engine: penstock.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_workers, "MAX_WAITING_OF_CLIENT", 2)
    ends = collections.Counter[str]()

    async def ask() -> None:
        try:
            await engine.generate("x", max_tokens=1, response_format=slow_format())
            ends["answered"] += 1
        except penstock.OverloadedError as error:
            ends[str(error)] += 1

    for number in (None, 1):
        client.set(number)
        ends.clear()
        async with anyio.create_task_group() as group:
            for _ in range(6):
                group.start_soon(ask)
        if number is None:
            assert ends == {"answered": 6}  # the application waits for its own calls
    assert ends["answered"] >= 2
    assert (
        ends["too many requests wait for grammars or chat templates; try again later"]
        == 6 - ends["answered"]
        > 0
    )
    await assert_at_rest(engine)


@pytest.mark.anyio
async def test_grammars_of_clients_are_compiled_in_turns(engine: penstock.Engine) -> None:
    ends = collections.Counter[str]()

    async def ask() -> None:
        client.set(1)
        try:
            await engine.generate("x", max_tokens=1, response_format=slow_format())
            ends["answered"] += 1
        except penstock.OverloadedError:
            ends["limited"] += 1

    async with anyio.create_task_group() as group:
        for _ in range(30):
            group.start_soon(ask)
        while not ends["limited"]:
            await anyio.lowlevel.checkpoint()
        client.set(2)
        assert (await engine.generate("x", max_tokens=9, regex="[bd]{3}")).finish_reason == "stop"
        assert ends["answered"] < 16  # most of the grammars of the first client still wait
        group.cancel_scope.cancel()
    await assert_at_rest(engine)


@pytest.mark.needs("proc")
def test_closed_engine_ends_its_compile_threads(tiny_model: Path) -> None:
    def threads() -> set[str]:
        found = set()
        for task in Path("/proc/self/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                if (task / "comm").read_text().startswith("penstock-guidan"):
                    found.add(task.name)
        return found

    before = threads()  # those of earlier engines may end meanwhile
    with make_engine(tiny_model) as engine:
        engine.blocking.generate(PROMPT, max_tokens=1, regex="[0-9]+")
        own = threads() - before
        assert len(own) == 1
    wait_until(lambda: not own & threads())


CONSTRAIN_WITHOUT_THREADS = """
import resource, sys
import penstock

with penstock.Engine(sys.argv[1], kv_cache_bytes=1 << 20) as engine:
    generate = engine.blocking.generate
    generate("a", max_tokens=4)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (128 << 20), hard))
    try:
        generate("a", regex="[ab]{4}", max_tokens=8)
    except penstock.OverloadedError as error:
        print(error)
    print(generate("a", max_tokens=4).finish_reason)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    print(generate("a", regex="[ab]{4}", max_tokens=8).finish_reason)
"""


@pytest.mark.needs("memory_limit", "proc", "resource")
def test_grammar_is_refused_while_no_thread_can_be_started(tiny_model: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CONSTRAIN_WITHOUT_THREADS, str(tiny_model)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    refused, *reasons = done.stdout.splitlines()
    assert "cannot start a thread" in refused
    assert reasons == ["length", "stop"]
