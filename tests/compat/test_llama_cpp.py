"""llama-cpp-python's `Llama`: the examples of its documents, and results beside those of the engine.

The keys of responses are those that llama-cpp-python 0.3.36 returned for the same calls of the demo model.
"""

from __future__ import annotations

import itertools
import json
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import penstock
from penstock.compat import llama_cpp
from penstock.compat.llama_cpp import Llama, LlamaGrammar, LogitsProcessorList, StoppingCriteriaList
from penstock.compat.llama_cpp.chats import CHAT_FORMATS
from support.api.ggufs import Type, write_gguf

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROMPT = "Q: Name the planets in the solar system? A: "
MESSAGES = [
    {"role": "system", "content": "You are a helpful assistant that outputs in JSON."},
    {"role": "user", "content": "Who won the world series in 2020"},
]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "UserDetail",
        "parameters": {
            "type": "object",
            "title": "UserDetail",
            "properties": {
                "name": {"title": "Name", "enum": ["Jason", "Ann"]},
                "age": {"title": "Age", "type": "integer", "minimum": 0, "maximum": 150},
            },
            "required": ["name", "age"],
        },
    },
}
CALL = {"type": "function", "function": {"name": "UserDetail"}}
USAGE = {"prompt_tokens", "completion_tokens", "total_tokens"}


@pytest.fixture(scope="module")
def llm(demo_model: Path) -> Iterator[Llama]:
    with Llama(model_path=str(demo_model), n_ctx=512, embedding=True, verbose=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def engine(demo_model: Path) -> Iterator[penstock.Engine]:
    engine = penstock.Engine(demo_model, device="cpu", max_model_len=512)
    engine.blocking.start()
    yield engine
    engine.blocking.close()


def content_of(response: dict[str, Any]) -> str:
    text = response["choices"][0]["message"]["content"]
    assert isinstance(text, str)
    return text


def deltas_of(chunks: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    return [chunk["choices"][0]["delta"] for chunk in chunks]


def test_completion_has_the_text_and_keys_of_the_document(llm: Llama, engine: penstock.Engine) -> None:
    output = llm(PROMPT, max_tokens=32, stop=["Q:", "\n"], echo=True, temperature=0)
    assert output.keys() == {"id", "object", "created", "model", "choices", "usage"}
    assert (output["object"], output["model"]) == ("text_completion", llm.model_path)
    (choice,) = output["choices"]
    assert choice.keys() == {"text", "index", "logprobs", "finish_reason"}
    expected = engine.blocking.generate(PROMPT, max_tokens=32, stop=["Q:", "\n"], temperature=0)
    assert choice["text"] == PROMPT + expected.text
    assert choice["finish_reason"] == expected.choices[0].finish_reason == "stop"
    assert output["usage"].keys() == USAGE
    assert output["usage"]["prompt_tokens"] == len(llm.tokenize(PROMPT.encode()))


def test_defaults_are_those_of_llama_cpp_python(llm: Llama, engine: penstock.Engine) -> None:
    filters = {"top_k": 40, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.0, "seed": 7}
    expected = engine.blocking.generate(PROMPT, max_tokens=16, temperature=0.8, **filters)  # type: ignore[arg-type]
    assert llm(PROMPT, seed=7)["choices"][0]["text"] == expected.text
    assert llm.create_completion(PROMPT, None, 16, 0.8, seed=7)["choices"][0]["text"] == expected.text
    chat = engine.blocking.generate(MESSAGES, max_tokens=16, temperature=0.2, **filters)  # type: ignore[arg-type]
    assert content_of(llm.create_chat_completion(MESSAGES, seed=7, max_tokens=16)) == chat.text


def test_requests_without_seed_differ_and_programs_repeat(demo_model: Path) -> None:
    def texts(llm: Llama, *seeds: int | None) -> list[str]:
        found = (llm(PROMPT, max_tokens=16, temperature=1.5, seed=seed) for seed in seeds)
        return [output["choices"][0]["text"] for output in found]

    with Llama(str(demo_model)) as llm:
        first = texts(llm, None, None, None)
        assert len(set(first)) == 3
        llm.set_seed(llama_cpp.LLAMA_DEFAULT_SEED)
        assert texts(llm, None, None) == first[:2]
        after = texts(llm, 7, None)
        assert texts(llm, 8, 7, None)[1:] == after
        llm.set_seed(7)
        assert texts(llm, None) == after[1:]
        streams = [list(itertools.islice(llm.generate([1, 2, 3], temp=1.5), 12)) for _ in range(2)]
        assert streams[0] == streams[1]
    with Llama(str(demo_model), seed=7) as llm:
        assert texts(llm, None) == after[1:]


def test_stream_has_the_text_and_then_the_reason(llm: Llama) -> None:
    whole = llm(PROMPT, max_tokens=12, temperature=0)
    chunks = list(llm(PROMPT, max_tokens=12, temperature=0, stream=True))
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert all(chunk.keys() == {"id", "object", "created", "model", "choices"} for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_logprobs_are_those_of_the_engine(llm: Llama, engine: penstock.Engine) -> None:
    found = llm(PROMPT, max_tokens=4, temperature=0, logprobs=2)["choices"][0]
    expected = engine.blocking.generate(PROMPT, max_tokens=4, temperature=0, logprobs=True, top_logprobs=2)
    logprobs = found["logprobs"]
    assert logprobs.keys() == {"tokens", "text_offset", "token_logprobs", "top_logprobs"}
    assert "".join(logprobs["tokens"]) == found["text"] == expected.text
    assert logprobs["token_logprobs"] == list(expected.choices[0].logprobs or ())
    texts = logprobs["tokens"]
    assert logprobs["text_offset"] == [len(PROMPT + "".join(texts[:index])) for index in range(len(texts))]
    assert [len(top) for top in logprobs["top_logprobs"]] == [2, 2, 2, 2]
    streamed = llm(PROMPT, max_tokens=4, temperature=0, logprobs=2, stream=True)
    parts = [chunk["choices"][0]["logprobs"] for chunk in streamed]
    joined = {name: [value for part in parts if part for value in part[name]] for name in logprobs}
    assert joined == logprobs


def test_chat_has_the_keys_of_a_chat_completion(llm: Llama) -> None:
    output = llm.create_chat_completion(MESSAGES, max_tokens=4, logprobs=True, top_logprobs=1, seed=7)
    assert output.keys() == {"id", "object", "created", "model", "choices", "usage"}
    assert (output["object"], output["id"][:13]) == ("chat.completion", "chatcmpl-" + output["id"][9:13])
    (choice,) = output["choices"]
    assert choice.keys() == {"index", "message", "logprobs", "finish_reason"}
    assert choice["message"].keys() == {"role", "content"}
    entry = choice["logprobs"]["content"][0]
    assert entry.keys() == {"token", "bytes", "logprob", "top_logprobs"}
    assert entry["top_logprobs"][0].keys() == {"token", "bytes", "logprob"}
    first, *others = deltas_of(llm.create_chat_completion(MESSAGES, max_tokens=4, seed=7, stream=True))
    assert (first, others[-1]) == ({"role": "assistant"}, {})
    assert "".join(delta["content"] for delta in others[:-1]) == choice["message"]["content"]


def test_openai_objects_have_the_fields_of_the_dict(llm: Llama) -> None:
    openai = pytest.importorskip("openai.types.chat")
    response = llm.create_chat_completion_openai_v1(MESSAGES, max_tokens=4, seed=7)
    assert isinstance(response, openai.ChatCompletion)
    expected = llm.create_chat_completion(MESSAGES, max_tokens=4, seed=7)
    assert response.choices[0].message.content == content_of(expected)
    *_, last = llm.create_chat_completion_openai_v1(MESSAGES, max_tokens=4, stream=True)
    assert isinstance(last, openai.ChatCompletionChunk)
    assert last.choices[0].finish_reason == "length"


def test_json_mode_returns_an_object(llm: Llama) -> None:
    response = llm.create_chat_completion(MESSAGES[1:], response_format={"type": "json_object"})
    assert isinstance(json.loads(content_of(response)), dict)


@pytest.mark.parametrize("kind", ["json_object", "json_schema", "grammar"])
def test_json_schema_mode_follows_the_schema(llm: Llama, kind: str) -> None:
    schema = {
        "type": "object",
        "properties": {"team_name": {"enum": ["Dodgers", "Rays"]}},
        "required": ["team_name"],
    }
    options: dict[str, Any] = {"response_format": {"type": "json_object", "schema": schema}}
    if kind == "json_schema":
        options = {"response_format": {"type": kind, "json_schema": {"schema": schema}}}
    elif kind == "grammar":
        options = {"grammar": LlamaGrammar.from_json_schema(json.dumps(schema))}
    response = llm.create_chat_completion(MESSAGES, temperature=0.7, **options)
    assert json.loads(content_of(response))["team_name"] in ("Dodgers", "Rays")


def test_remedy_for_an_unsupported_schema_is_accepted(llm: Llama) -> None:
    schema = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "maxItems": 2}
    remedy: Any = {"type": "json_schema", "json_schema": {"schema": schema, "ignore_unsupported": True}}
    with pytest.raises(
        penstock.InvalidRequestError, match=r'pass \{"type": "json_schema", "json_schema": \{'
    ):
        llm("List:", grammar=LlamaGrammar.from_json_schema(json.dumps(schema)))
    text = llm("List:", grammar=LlamaGrammar.from_json_schema(json.dumps(remedy)))["choices"][0]["text"]
    assert len(json.loads(text)) <= 2
    options: Any = {"messages": MESSAGES, "max_tokens": 20}
    with pytest.raises(penstock.InvalidRequestError, match="ignore_unsupported"):
        llm.create_chat_completion(**options, response_format={"type": "json_object", "schema": schema})
    assert len(json.loads(content_of(llm.create_chat_completion(**options, response_format=remedy)))) <= 2


def test_grammar_is_gbnf_of_a_text_or_a_file(llm: Llama, tmp_path: Path) -> None:
    source = 'root ::= answer ("\\n" answer)?\nanswer ::= "yes" | "no"'
    (tmp_path / "answers.gbnf").write_text(source)
    for grammar in (LlamaGrammar.from_string(source), LlamaGrammar.from_file(tmp_path / "answers.gbnf")):
        text = llm("Is it?", grammar=grammar, temperature=1.5)["choices"][0]["text"]
        assert set(text.split("\n")) <= {"yes", "no"}
    with pytest.raises(penstock.InvalidRequestError, match='line 1, rule "root"'):
        llm("Is it?", grammar=LlamaGrammar.from_string('root ::= "a'))


@pytest.mark.parametrize("chat_format", [None, "chatml-function-calling"])
def test_named_function_is_called_with_its_schema(chat_format: str | None, demo_model: Path) -> None:
    with Llama(str(demo_model), n_ctx=512, chat_format=chat_format) as llm:
        options: Any = {"messages": MESSAGES, "max_tokens": 60, "seed": 7}
        output = llm.create_chat_completion(**options, tools=[TOOL], tool_choice=CALL)
        old = llm.create_chat_completion(
            **options, functions=[TOOL["function"]], function_call={"name": "UserDetail"}
        )
        chunks = llm.create_chat_completion(**options, tools=[TOOL], tool_choice=CALL, stream=True)
        deltas = deltas_of(chunks)
    message = output["choices"][0]["message"]
    assert message.keys() == {"role", "content", "function_call", "tool_calls"}
    (call,) = message["tool_calls"]
    assert message["function_call"] == call["function"] == old["choices"][0]["message"]["function_call"]
    arguments = json.loads(call["function"]["arguments"])
    assert arguments["name"] in ("Jason", "Ann")
    assert 0 <= arguments["age"] <= 150
    assert output["choices"][0]["finish_reason"] == "tool_calls"
    parts = [delta["tool_calls"][0]["function"]["arguments"] for delta in deltas if delta["tool_calls"]]
    assert "".join(parts) == call["function"]["arguments"]
    assert all(delta.keys() == {"role", "content", "function_call", "tool_calls"} for delta in deltas)


def test_chat_formats_render_the_messages(demo_model: Path) -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes?"},
        {"role": "user", "content": "go"},
    ]
    tokenizer = penstock.Tokenizer(demo_model)
    render = tokenizer.apply_chat_template
    start, end = "<|im_start|>", "<|im_end|>\n"
    turns = f"{start}user\nhi{end}{start}assistant\nyes?{end}{start}user\ngo{end}{start}assistant\n"
    assert render(messages, chat_template=CHAT_FORMATS["chatml"]) == f"{start}system\n{end}{turns}"
    assert (
        render(messages, chat_template=CHAT_FORMATS["llama-2"])
        == "[INST] hi [/INST] yes? </s><s>[INST] go [/INST]"
    )
    system = [{"role": "system", "content": "S"}, *messages[:1]]
    assert (
        render(system, chat_template=CHAT_FORMATS["llama-2"]) == "[INST] <<SYS>>\nS\n<</SYS>>\n\nhi [/INST]"
    )
    functions = render(system, chat_template=CHAT_FORMATS["chatml-function-calling"], tools=[TOOL])
    assert functions.startswith(f"{start}system\nS\n\nfunctions.UserDetail:\n{{")


@pytest.mark.parametrize("pooling_type", [-1, 0, 1, 3])
def test_embeddings_are_pooled_hidden_states(pooling_type: int, demo_model: Path) -> None:
    with Llama(str(demo_model), embedding=True, pooling_type=pooling_type) as llm:
        response = llm.create_embedding(["Hello, world!", "Goodbye, world!"])
        normalised = llm.embed("Hello, world!", normalize=True)
        size = llm.n_embd()
    with penstock.Engine(demo_model, device="cpu") as engine:
        result = engine.blocking.generate("Hello, world!", max_tokens=1, output_hidden_states="prompt")
        states = np.asarray(memoryview(result.hidden_states))  # type: ignore[arg-type]
    pooled = {1: states.mean(axis=0), 3: states[-1]}.get(pooling_type, states)
    found = [np.array(item["embedding"]) for item in response["data"]]
    assert [item.keys() for item in response["data"]] == [{"object", "embedding", "index"}] * 2
    np.testing.assert_allclose(found[0], pooled, rtol=1e-5, atol=1e-6)
    norms = np.linalg.norm(pooled, axis=-1, keepdims=True)
    np.testing.assert_allclose(normalised, pooled / norms, rtol=1e-5, atol=1e-6)
    assert found[1].shape[-1] == size
    assert response["usage"]["prompt_tokens"] == response["usage"]["total_tokens"] > len(states)


@pytest.mark.parametrize(("pooling", "expected"), [(3, 3), (0, 0), (None, 0)])
def test_pooling_of_the_file_is_the_default(pooling: int | None, expected: int, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file, Type.Q8_0, pooling=pooling)
    with (
        Llama(str(file), embedding=True) as llm,
        Llama(str(file), embedding=True, pooling_type=expected) as other,
    ):
        assert llm.pooling_type() == expected
        assert llm.embed("abc") == other.embed("abc")
        vector = llm.create_embedding("abc")["data"][0]["embedding"]
        assert isinstance(vector[0], float if expected else list)


def test_pooling_of_the_file_can_be_unsupported(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", Type.Q8_0, pooling=2)
    with (
        Llama(str(tmp_path / "model.gguf"), embedding=True) as llm,
        pytest.raises(
            llama_cpp.UnsupportedError, match=r"pooling_type is -1.*ask for cls; pass one of 0, 1, 3"
        ),
    ):
        llm.embed("abc")


def test_tokens_are_those_of_the_tokenizer(llm: Llama, demo_model: Path) -> None:
    tokenizer = penstock.Tokenizer(demo_model)
    for text in ("hi there", "naïve 🙂\n"):
        ids = llm.tokenize(text.encode())
        assert ids == tokenizer.encode(text)
        assert llm.detokenize(ids).decode() == text
    ids = llm.tokenize(b"a<|im_end|>", add_bos=False, special=True)
    assert ids[-1] == llm.token_eos()
    assert (llm.detokenize(ids), llm.detokenize(ids, special=True)) == (b"a", b"a<|im_end|>")
    smile = llm.tokenize("🙂".encode())
    assert llm.detokenize(smile[:-1]) + llm.detokenize(smile[-1:]) == "🙂".encode()
    assert llm.tokenize(b"\n") == [llm.token_nl()]
    assert (llm.token_bos(), llm.n_ctx(), llm.n_vocab()) == (tokenizer.bos_token_id, 512, 49152)
    assert llm.metadata["hidden_size"] == str(llm.n_embd())


def test_model_without_weights_makes_tokens_only(demo_model: Path) -> None:
    with Llama(str(demo_model), vocab_only=True) as llm:
        assert llm.detokenize(llm.tokenize(b"hi")) == b"hi"
        assert llm.n_vocab() == 49152
        with pytest.raises(llama_cpp.UnsupportedError, match="vocab_only is True"):
            llm("hi")


def test_processors_and_criteria_are_called_with_arrays(llm: Llama) -> None:
    token = llm.tokenize(b" planet")[0]
    seen: list[int] = []

    def only(input_ids: Any, scores: Any) -> Any:
        assert (input_ids.dtype, scores.dtype) == (np.intc, np.single)
        scores[:] = -np.inf
        scores[token] = 0
        return scores

    def after_three(input_ids: Any, logits: Any) -> bool:
        assert len(logits) == llm.n_vocab()
        seen.append(len(input_ids))
        return bool(len(input_ids) >= len(llm.tokenize(PROMPT.encode())) + 3)

    output = llm(
        PROMPT,
        max_tokens=8,
        logits_processor=LogitsProcessorList([only]),
        stopping_criteria=StoppingCriteriaList([after_three]),
    )
    (choice,) = output["choices"]
    assert (choice["text"], choice["finish_reason"]) == (" planet" * 3, "stop")
    assert output["usage"]["completion_tokens"] == 3
    assert len(seen) == 4


def test_logit_bias_and_minimum_length_change_the_output(llm: Llama) -> None:
    token = llm.tokenize(b" planet")[0]
    biased = llm(PROMPT, max_tokens=2, temperature=0, logit_bias={token: 100.0})
    assert biased["choices"][0]["text"] == " planet planet"
    processor = llama_cpp.MinTokensLogitsProcessor(3, llm.token_eos())
    criteria = LogitsProcessorList([processor, lambda _, scores: _prefer(scores, llm.token_eos())])
    ended = llm(PROMPT, max_tokens=8, temperature=0, logits_processor=criteria)
    assert ended["choices"][0]["finish_reason"] == "stop"


def _prefer(scores: Any, token: int) -> Any:
    scores[token] = scores.max() + 10
    return scores


def test_generate_yields_the_tokens_up_to_the_end(llm: Llama, engine: penstock.Engine) -> None:
    ids = llm.tokenize(PROMPT.encode())
    expected = engine.blocking.generate(ids, temperature=0, max_tokens=20).choices[0].token_ids
    tokens = llm.generate(ids, temp=0)
    assert [next(tokens) for _ in range(len(expected))] == list(expected)
    tokens.close()  # type: ignore[attr-defined]


def test_threads_share_a_model(llm: Llama) -> None:
    expected = [llm(f"{PROMPT}{index}", max_tokens=6, temperature=0)["choices"] for index in range(6)]
    found: list[Any] = [None] * 6

    def run(index: int) -> None:
        found[index] = llm(f"{PROMPT}{index}", max_tokens=6, temperature=0)["choices"]

    threads = [threading.Thread(target=run, args=[index]) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected


def test_output_fills_the_context_without_a_limit(tiny_model: Path) -> None:
    with Llama(str(tiny_model), n_ctx=32) as llm:
        for limit in (None, 0, -1, 1000):
            output = llm("ab", max_tokens=limit, logit_bias=dict.fromkeys(_ends(llm), -100.0))
            assert output["usage"]["total_tokens"] == 32
        with pytest.raises(ValueError, match="the prompt has 60 tokens; the context has n_ctx=32"):
            llm([5] * 60)
        for text in ("ab " * 200, "ab " * 1_000_000):
            with pytest.raises(ValueError, match="the prompt has more than 64 tokens; n_ctx is 32"):
                llm(text)
            with pytest.raises(ValueError, match="the prompt has more than 64 tokens; n_ctx is 32"):
                llm.create_chat_completion([{"role": "user", "content": text}])


def _ends(llm: Llama) -> list[int]:
    return [llm.token_eos()] if llm.token_eos() >= 0 else []


def test_prompt_lookup_does_not_change_the_output(llm: Llama, demo_model: Path) -> None:
    draft = llama_cpp.llama_speculative.LlamaPromptLookupDecoding(num_pred_tokens=4)
    with Llama(str(demo_model), n_ctx=512, draft_model=draft) as other:
        text = other(PROMPT, max_tokens=24, temperature=0)["choices"][0]["text"]
    assert text == llm(PROMPT, max_tokens=24, temperature=0)["choices"][0]["text"]
