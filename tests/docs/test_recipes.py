"""The guide's FastAPI application in a real server, its deadline, and its migration tables."""

from __future__ import annotations

import ast
import asyncio
import http.client
import inspect
import json
import re
import socket
import textwrap
import threading
from collections import defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import uvicorn

import penstock
from penstock import _keywords
from penstock._options import EngineOptions, SamplingOptions
from penstock.server.application import _ROUTES
from penstock.server.paths import _OTHER_PATHS, path_to_use
from support.api.engines import make_engine, wait_until
from support.paths import ROOT
from support.snippets import with_model

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from pathlib import Path

GUIDE = ROOT / "docs" / "guide"
MIGRATION = GUIDE / "move-from-another-engine.md"
PROMPT = "Once upon a time"
MESSAGES = [{"role": "user", "content": "Tell me a long story."}]


def snippets(chapter: str, heading: str) -> list[str]:
    """The Python snippets of a section of a chapter of the guide."""
    text = (GUIDE / f"{chapter}.md").read_text()
    section = text.partition(f"{heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```$", section, flags=re.MULTILINE | re.DOTALL)


# ---- a batch with an output that continues


def test_batch_recipe_continues_its_output(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = snippets("run-a-batch", "## In a program of yours")[0]
    prompts = [{"id": str(index), "prompt": f"Number {index}"} for index in range(6)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    with penstock.Engine(demo_model, threads=1) as engine:

        def run() -> bytes:
            exec(compile(code, "guide", "exec", dont_inherit=True), {"engine": engine})  # noqa: S102
            return (tmp_path / "results.jsonl").read_bytes()

        lines = run().splitlines(keepends=True)
        assert {json.loads(line)["id"] for line in lines} == {prompt["id"] for prompt in prompts}
        before = b"".join(lines[:2])
        (tmp_path / "results.jsonl").write_bytes(before + lines[2][:-10])
        after = run()
        assert (after.startswith(before + lines[2][:1]), len(after.splitlines())) == (True, 6)
        assert {json.loads(line)["id"] for line in after.splitlines()} == {prompt["id"] for prompt in prompts}


# ---- FastAPI


class Server:
    """An application on a port of its own."""

    def __init__(self, app: Any, engine: Any = None) -> None:
        self.engine = engine
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]})

    @contextmanager
    def run(self) -> Iterator[Server]:
        """Serve until the block is left."""
        self._thread.start()
        wait_until(lambda: self._server.started)
        try:
            yield self
        finally:
            self._server.should_exit = True
            self._thread.join()
            self._socket.close()

    def ask(
        self, path: str = "/chat", **question: object
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Send a request; the body of the response is not read."""
        connection = http.client.HTTPConnection("127.0.0.1", self._socket.getsockname()[1], timeout=30)
        headers = {"Content-Type": "application/json"}
        connection.request("POST", path, body=json.dumps(question), headers=headers)
        return connection, connection.getresponse()


@pytest.fixture
def server(demo_model: Path) -> Iterator[Server]:
    """The application of the guide, with room for one request and one that waits."""
    scope: dict[str, Any] = {"__name__": "application"}
    exec(compile(snippets("build-a-service", "## FastAPI")[0], "guide", "exec", dont_inherit=True), scope)  # noqa: S102
    scope["engine"] = engine = make_engine(demo_model, max_num_seqs=1, max_waiting=1, max_model_len=2048)
    with Server(scope["app"], engine).run() as server:
        yield server


def test_fastapi_route_streams_the_output(server: Server) -> None:
    connection, response = server.ask(messages=MESSAGES, max_tokens=12)
    assert response.status == 200
    assert response.getheader("transfer-encoding") == "chunked"
    assert len(response.read().decode()) > 12
    connection.close()


def test_fastapi_invalid_request_is_status_422_with_the_field(server: Server) -> None:
    good = {"messages": MESSAGES}
    for question, field in (
        ({**good, "max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({}, "messages"),
    ):
        connection, response = server.ask(**question)
        assert response.status == 422
        assert json.loads(response.read())["detail"][0]["loc"] == ["body", field]
        connection.close()


def test_fastapi_disconnected_client_cancels_the_request(server: Server) -> None:
    connection, response = server.ask(messages=MESSAGES, max_tokens=1900)
    assert response.read(1)
    response.close()
    connection.close()
    wait_until(lambda: server.engine.stats().running == 0)
    assert server.engine.stats().finished_cancelled == 1
    assert server.engine.stats().blocks_used == 0


def test_fastapi_full_engine_is_status_503(server: Server) -> None:
    running = server.ask(messages=MESSAGES, max_tokens=1900)
    assert running[1].read(1)
    waiting = server.ask(messages=MESSAGES, max_tokens=1900)
    refused, response = server.ask(messages=MESSAGES)
    assert (response.status, response.getheader("retry-after")) == (503, "1")
    assert "max_waiting" in json.loads(response.read())["detail"]
    for connection in (running[0], waiting[0], refused):
        connection.close()


# ---- the examples of README.md


def readme_examples() -> list[str]:
    return re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL
    )


def test_readme_begins_with_two_commands_and_short_examples() -> None:
    beginning = (ROOT / "README.md").read_text().partition("```")[0]
    assert beginning.count("\n") < 50
    assert re.findall(r"^    (make \w+)", beginning, flags=re.MULTILINE) == ["make demo", "make test"]
    for code in readme_examples():
        assert len([line for line in code.splitlines() if line.strip()]) <= 12, code


def test_first_example_answers_sensibly(demo_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = readme_examples()[0]
    exec(compile(with_model(code, demo_model), "README.md", "exec"), {})  # noqa: S102
    out = capsys.readouterr().out
    assert "light" in out
    assert out.endswith(("tokens, stop\n", "tokens, length\n"))


def test_fastapi_example_of_the_readme_answers(demo_model: Path) -> None:
    [code] = [code for code in readme_examples() if "fastapi" in code]
    code = with_model(code, demo_model).replace("max_tokens=256", "max_tokens=8")
    scope: dict[str, Any] = {"__name__": "application"}
    exec(compile(code, "README.md", "exec", dont_inherit=True), scope)  # noqa: S102
    app = scope["app"]
    with Server(app).run() as server:
        connection, response = server.ask("/ask?question=Name%20a%20colour.")
        assert (response.status, len(json.loads(response.read())) > 1) == (200, True)
        connection.close()
        assert app.state.engine.is_running
    assert not app.state.engine.is_running, "the model is closed when the server stops"


@pytest.mark.parametrize("owner", [penstock, penstock.Engine])
def test_example_of_the_help_streams_an_answer(
    owner: object, demo_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (inspect.getdoc(owner) or "").splitlines()
    source = textwrap.dedent("\n".join(line for line in lines if line.startswith("    ")))
    source = with_model(source, demo_model)
    assert "messages" in source
    code = compile(source, "help", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    asyncio.run(eval(code, {"penstock": penstock, "Engine": penstock.Engine}))  # noqa: S307
    assert capsys.readouterr().out


# ---- a deadline


def test_deadline_returns_the_partial_text(demo_model: Path) -> None:
    scope: dict[str, Any] = {"penstock": penstock}
    [code] = [
        code
        for code in snippets("cancel-requests", "# Cancel requests and set timeouts")
        if "generate_until" in code
    ]
    code = code.partition("\nresult =")[0]
    with make_engine(demo_model) as engine:
        scope["engine"] = engine
        exec(compile(code, "guide", "exec", dont_inherit=True), scope)  # noqa: S102
        generate_until = scope["generate_until"]
        for seconds in (0.5, 2, 8, 32):  # until there is time for a token
            partial = asyncio.run(generate_until(seconds, PROMPT, max_tokens=4000, ignore_eos=True))
            assert partial.finish_reason == "cancelled"
            if partial.text:
                break
        assert partial.text
        complete = asyncio.run(generate_until(60.0, PROMPT, max_tokens=2))
        assert complete.finish_reason == "length"


# ---- recipes of single functions


def recipe(chapter: str, heading: str, **scope: Any) -> dict[str, Any]:
    """Run the only snippet of a section; returns the names that it defines."""
    [source] = snippets(chapter, heading)
    names: dict[str, Any] = {"penstock": penstock, **scope}
    code = compile(source, chapter, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    ended = eval(code, names)  # noqa: S307
    if ended is not None:
        asyncio.run(ended)
    return names


def test_classes_have_the_probabilities_of_their_first_tokens(demo_model: Path) -> None:
    with make_engine(demo_model) as engine:
        names = recipe("classify-texts", "# Classify texts", engine=engine)
        found = asyncio.run(names["classify"]("It broke after a day."))
        question = f"Is this review {', '.join(found)}? Answer in one word.\n\nIt broke after a day."
        result = engine.blocking.generate(
            [{"role": "user", "content": question}], max_tokens=1, output_logits="generation"
        )
        names["CLASSES"] = ("politics", "positive", "weather")
        total = sum(asyncio.run(names["classify"]("Rain.")).values())
        assert 0.9 < total < 1, "a token that begins two classes counts for none"
        [logits] = np.asarray(result.choices[0].logits)
        texts = engine.token_bytes(range(len(logits)))
    weights = np.exp(logits.astype(float) - logits.max())
    expected = {
        name: sum(weights[i] for i, text in enumerate(texts) if text and name.encode().startswith(text))
        for name in found
    }
    total = sum(expected.values())
    assert found == pytest.approx({name: value / total for name, value in expected.items()}, abs=1e-5)


def test_tool_loop_ends_with_an_answer_or_the_rounds() -> None:
    fake = recipe("test-your-program", "## Results in tests")
    call = penstock.ToolCall(id="1", name="add", arguments='{"a": 1, "b": 2}')
    cut_off = penstock.ToolCall(id="2", name="add", arguments='{"a": 1, ')
    asking = [
        penstock.Result(choices=[penstock.Choice(text="", tool_calls=[each], finish_reason="tool_calls")])
        for each in (cut_off, call)
    ]

    def add(a: int, b: int) -> int:
        return a + b

    def ask(*results: penstock.Result, **options: Any) -> tuple[str, list[Any], list[Any]]:
        engine = fake["FakeEngine"](*results)
        messages: list[Any] = [{"role": "user", "content": "1 + 2?"}]
        answer = recipe("call-tools", "## Answer with the results of tools", engine=engine)["answer"]
        return asyncio.run(answer(messages, {"add": add}, **options)), messages, engine.requests

    answer, messages, requests = ask(*asking, penstock.Result(text="3"))
    assert answer == "3"
    assert [message["role"] for message in messages] == ["user", *("assistant", "tool") * 2, "assistant"]
    first, second = (message for message in messages if message["role"] == "tool")
    assert first["content"].startswith("error: JSONDecodeError")
    assert (second["tool_call_id"], second["content"]) == ("1", "3")
    assert all(options["tools"] == [add] for _, options in requests)
    with pytest.raises(RuntimeError, match="no answer after 1 rounds"):
        ask(*asking, max_rounds=1)


def test_replaced_model_loses_no_request(demo_model: Path, tiny_model: Path) -> None:
    Service = recipe("build-a-service", "## Replace a model without downtime")["Service"]  # noqa: N806 - a class

    async def run() -> None:
        service = Service(make_engine(tiny_model))
        await service.engine.start()
        old = service.engine
        has_ended = asyncio.Event()
        answered: dict[Any, asyncio.Event] = defaultdict(asyncio.Event)

        async def streamed(*arguments: Any, **options: Any) -> penstock.Result:
            async with service.stream(*arguments, **options) as request:
                async for _ in request:
                    pass
                result: penstock.Result = await request.result()
                return result

        async def ask(answer: Callable[..., Awaitable[penstock.Result]]) -> None:
            while not has_ended.is_set():
                engine = service.engine
                result = await answer([5, 6], max_tokens=20, ignore_eos=True)
                assert (result.finish_reason, result.usage.completion_tokens) == ("length", 20)
                answered[engine, answer].set()

        async with asyncio.TaskGroup() as group:
            answers = (service.generate, streamed)
            for answer in answers * 4:
                group.create_task(ask(answer))
            for answer in answers:
                await answered[old, answer].wait()
            await service.replace(demo_model, threads=1)
            assert not old.is_running
            for answer in answers:
                await answered[service.engine, answer].wait()
            has_ended.set()
        with pytest.raises(penstock.ModelLoadError):
            await service.replace("missing")
        assert service.engine.is_running
        await service.engine.aclose()
        for answer in answers:
            with pytest.raises(penstock.EngineStoppedError):
                await answer([5])

    asyncio.run(run())


def test_request_refused_by_an_old_engine_starts_in_the_new(tiny_model: Path) -> None:
    Service = recipe("build-a-service", "## Replace a model without downtime")["Service"]  # noqa: N806 - a class
    old = make_engine(tiny_model)

    async def run() -> None:
        async with make_engine(tiny_model) as new:

            class Replaced(Service):  # type: ignore[misc, valid-type]
                """A service of which the engine is replaced after it was read once."""

                engine = property(lambda self: self.old.pop() if self.old else new)

                def __init__(self) -> None:
                    self.old = [old]

            assert (await Replaced().generate([5], max_tokens=1)).finish_reason == "length"
            async with Replaced().stream([5], max_tokens=1) as request:
                assert (await request.result()).finish_reason == "length"

    asyncio.run(run())


# ---- notebooks


def test_notebook_cells_share_an_event_loop(demo_model: Path) -> None:
    cells = snippets("use-threads-or-a-notebook", "## Notebooks")
    assert len(cells) == 2
    scope: dict[str, Any] = {"penstock": penstock}

    async def run_cells() -> None:
        for cell in (*cells, "await engine.aclose()"):
            source = with_model(cell, demo_model)
            await eval(compile(source, "cell", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), scope)  # noqa: S307

    asyncio.run(run_cells())
    assert scope["request"].finish_reason is not None


# ---- the migration tables


def migration_rows(*, of_servers: bool = False) -> list[tuple[str, str]]:
    """Old and new name of each row, in the tables of servers or in the others."""
    sections = re.split(r"^(?=## )", MIGRATION.read_text(), flags=re.MULTILINE)
    chosen = [text for text in sections if text.startswith("## From llama-server or ollama") == of_servers]
    rows = re.findall(r"^\| (.*?) \| (.*?) \|$", "".join(chosen), flags=re.MULTILINE)
    return [(old, new) for old, new in rows if new not in ("Penstock", "---")]


def test_migration_tables_of_servers_lead_to_routes() -> None:
    routes = {path for _, path, _, _ in _ROUTES}
    rows = migration_rows(of_servers=True)
    assert len(rows) > 20
    hints = set()
    for old, new in rows:
        paths = {path for code in names_in(new) for path in re.findall(r"/[\w/-]+", code)}
        assert paths <= routes, new
        for path in (path for code in names_in(old) for path in re.findall(r"/[\w/-]+", code)):
            hint = path_to_use(path)
            hints.add(hint)
            assert hint is None or hint in paths, f"the error for {path} says {hint}"
    assert hints - {None} == set(_OTHER_PATHS.values())


def names_in(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def exists(code: str) -> bool:
    """Whether the names in a piece of code are names of Penstock."""
    owners: dict[str, Any] = {
        "engine": penstock.Engine,
        "request": penstock.Request,
        "result": penstock.Result,
        "score": penstock.Score,
        "usage": penstock.Usage,
    }
    name = re.match(r"--?|[\w.]+", code)
    assert name is not None, code
    first, *rest = name[0].split(".")
    keywords = {**EngineOptions.__annotations__, **SamplingOptions.__annotations__}
    if first in owners and rest:
        value = owners[first]
        for part in rest:
            value = penstock.Blocking if part == "blocking" else getattr(value, part, None)
            if value is None:
                return False
        return True
    return first in keywords or hasattr(penstock, first)


@pytest.mark.parametrize(("old", "new"), migration_rows())
def test_migration_table_leads_to_names_that_exist(old: str, new: str) -> None:
    assert names_in(new), new
    for code in names_in(new):
        assert exists(code), code
    synonyms = {**_keywords.ENGINE_SYNONYMS, **_keywords.REQUEST_SYNONYMS}
    for name in names_in(old):
        if hint := synonyms.get(re.split(r"[=(]", name)[0]):
            assert any(code.startswith(hint) for code in names_in(new)), f"the error for {name} says {hint}"


def test_migration_names_that_are_the_same_exist() -> None:
    text = MIGRATION.read_text()
    texts = re.findall(r"^These have the same name: (.*?)\. ?", text, flags=re.MULTILINE | re.DOTALL)
    assert len(texts) == 2
    for text in texts:
        for name in names_in(text):
            assert exists(name) or exists(f"engine.{name}"), name
