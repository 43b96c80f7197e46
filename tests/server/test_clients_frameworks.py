"""LangChain and LlamaIndex with a real server: they need the clients dependency group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import pydantic
import pytest

import penstock
import penstock.server
from support.paths import ROOT
from support.server.serving import Served, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("default")]

QUESTION = "Why is the sky blue?"
NUM_TOKENS = 12


class Answer(pydantic.BaseModel):
    """The output that a test asks for."""

    word: Literal["yes", "no"]


@pytest.fixture(scope="module")
def engine(demo_model: Path) -> Iterator[penstock.Engine]:
    with penstock.Engine(demo_model, tool_parser="hermes") as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine: penstock.Engine) -> Iterator[Served]:
    with serving(penstock.server.app({"smol": engine})) as server:
        yield server


@pytest.fixture
def expected(engine: penstock.Engine) -> str:
    """The engine's answer."""
    messages = [{"role": "user", "content": QUESTION}]
    return engine.blocking.generate(messages, max_tokens=NUM_TOKENS, temperature=0).content


def chat_model(server: Served, **options: Any) -> Any:
    """LangChain's chat model."""
    langchain_openai = pytest.importorskip("langchain_openai")
    defaults = {"model": "smol", "api_key": "none", "temperature": 0, "max_tokens": NUM_TOKENS}
    return langchain_openai.ChatOpenAI(base_url=f"{server.url}/v1", **(defaults | options))


def like(server: Served, **options: Any) -> Any:
    """LlamaIndex's model for servers like OpenAI's."""
    openai_like = pytest.importorskip("llama_index.llms.openai_like")
    defaults = {"model": "smol", "api_key": "none", "temperature": 0, "max_tokens": NUM_TOKENS}
    return openai_like.OpenAILike(api_base=f"{server.url}/v1", **(defaults | options))


@pytest.mark.parametrize("uses_responses", [False, True], ids=["chats", "responses"])
def test_langchain_invokes_and_streams(server: Served, expected: str, *, uses_responses: bool) -> None:
    model = chat_model(server, use_responses_api=uses_responses)
    message = model.invoke(QUESTION)
    assert message.text == expected
    assert message.usage_metadata["output_tokens"] == NUM_TOKENS
    chunks = list(model.stream(QUESTION))
    assert len(chunks) > 2
    assert "".join(chunk.text for chunk in chunks) == expected


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_langchain_invokes_asynchronously(server: Served, expected: str) -> None:
    model = chat_model(server)
    assert (await model.ainvoke(QUESTION)).text == expected
    assert "".join([chunk.text async for chunk in model.astream(QUESTION)]) == expected


@pytest.mark.parametrize("uses_responses", [False, True], ids=["chats", "responses"])
def test_langchain_calls_a_tool_and_returns_its_result(server: Served, *, uses_responses: bool) -> None:
    messages = pytest.importorskip("langchain_core.messages")

    def weather(city: Literal["Paris", "Rome"]) -> str:
        """The weather in a city."""
        return city

    model = chat_model(server, use_responses_api=uses_responses, max_tokens=60)
    asking = messages.HumanMessage("What is the weather in Rome?")
    message = model.bind_tools([weather], tool_choice="weather").invoke([asking])
    [call] = message.tool_calls
    assert call["name"] == "weather"
    assert call["args"]["city"] in ("Paris", "Rome")
    result = messages.ToolMessage("21 degrees", tool_call_id=call["id"])
    assert model.invoke([asking, message, result]).text


@pytest.mark.parametrize("uses_responses", [False, True], ids=["chats", "responses"])
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_gets_structured_output(server: Served, method: str, *, uses_responses: bool) -> None:
    model = chat_model(server, use_responses_api=uses_responses, max_tokens=60)
    found = model.with_structured_output(Answer, method=method).invoke("Is the sky blue?")
    assert isinstance(found, Answer)


@pytest.mark.needs("sources")
def test_langchain_embeds_texts_as_the_guide_does(server: Served) -> None:
    pytest.importorskip("langchain_openai")
    text = (ROOT / "docs" / "guide" / "connect-programs.md").read_text()
    code = text.partition("```python\n")[2].partition("```\n")[0]
    for old, new in (("http://127.0.0.1:8000", server.url), ('"qwen"', '"smol"')):
        assert old in code
        code = code.replace(old, new)
    scope: dict[str, Any] = {}
    exec(code, scope)  # noqa: S102
    embeddings = scope["embeddings"]
    first, second = embeddings.embed_documents(["Rain", "Snow"])
    assert embeddings.embed_query("Rain") == first != second
    assert sum(number**2 for number in first) == pytest.approx(1)


def test_llamaindex_chats_and_streams(server: Served, expected: str) -> None:
    core = pytest.importorskip("llama_index.core.llms")
    model, question = like(server, is_chat_model=True), [core.ChatMessage(role="user", content=QUESTION)]
    assert model.chat(question).message.content == expected
    deltas = [response.delta or "" for response in model.stream_chat(question)]
    assert len(deltas) > 2
    assert "".join(deltas) == expected


def test_llamaindex_completes_and_streams(server: Served, engine: penstock.Engine) -> None:
    text = engine.blocking.generate("The sky is", max_tokens=NUM_TOKENS, temperature=0).text
    model = like(server, is_chat_model=False)
    assert model.complete("The sky is").text == text
    assert "".join(response.delta or "" for response in model.stream_complete("The sky is")) == text
