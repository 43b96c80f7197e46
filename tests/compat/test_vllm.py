"""vLLM's `LLM`: the examples of its documents, and results beside those of the engine."""

from __future__ import annotations

import gc
import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import penstock
from penstock.compat.vllm import (
    LLM,
    BeamSearchParams,
    EngineArgs,
    LoRARequest,
    PoolingParams,
    SamplingParams,
    StructuredOutputsParams,
    TextPrompt,
    TokensPrompt,
)
from penstock.compat.vllm.config import PoolerConfig
from support.api.adapters import write_adapter
from support.api.checkpoints import make_config

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROMPTS = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]
CONVERSATION = [
    {"role": "system", "content": "You are a helpful assistant"},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello! How can I assist you today?"},
    {"role": "user", "content": "Write an essay about the importance of higher education."},
]
GREEDY = SamplingParams(temperature=0.0)
SQL = """
root ::= select_statement
select_statement ::= "SELECT " column " from " table " where " condition
column ::= "col_1 " | "col_2 "
table ::= "table_1 " | "table_2 "
condition ::= column "= " number
number ::= "1 " | "2 "
"""


@pytest.fixture(scope="module")
def llm(demo_model: Path) -> LLM:
    return LLM(model=str(demo_model), max_model_len=512, seed=5)


@pytest.fixture(scope="module")
def engine(demo_model: Path) -> Iterator[penstock.Engine]:
    with penstock.Engine(demo_model, max_model_len=512) as engine:
        yield engine


def texts_of(outputs: Any) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_outputs_are_those_of_the_engine_in_order(llm: LLM, engine: penstock.Engine) -> None:
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95, seed=3)
    outputs = llm.generate(PROMPTS, sampling_params)
    assert [output.prompt for output in outputs] == PROMPTS
    for output in outputs:
        expected = engine.blocking.generate(output.prompt, temperature=0.8, top_p=0.95, seed=3, max_tokens=16)
        (choice,) = output.outputs
        assert (choice.text, choice.token_ids) == (expected.text, list(expected.token_ids))
        assert choice.finish_reason == expected.finish_reason
        assert choice.finished()
        assert output.finished
        assert output.prompt_token_ids == list(expected.prompt_token_ids)
        assert (choice.logprobs, choice.cumulative_logprob, output.prompt_logprobs) == (None, None, None)


def test_chats_are_rendered_by_the_template(llm: LLM, engine: penstock.Engine) -> None:
    expected = engine.blocking.generate(CONVERSATION, temperature=0, max_tokens=16)
    (output,) = llm.chat(CONVERSATION, GREEDY, use_tqdm=False)
    assert texts_of([output]) == [expected.text]
    assert output.prompt == engine.apply_chat_template(CONVERSATION)
    assert output.prompt_token_ids == list(expected.prompt_token_ids)
    assert texts_of(llm.chat([CONVERSATION] * 3, GREEDY, use_tqdm=True)) == [expected.text] * 3
    (bare,) = llm.chat(CONVERSATION, GREEDY, add_generation_prompt=False)
    assert bare.prompt == engine.apply_chat_template(CONVERSATION, add_generation_prompt=False)
    (continued,) = llm.chat(
        CONVERSATION[:3], GREEDY, add_generation_prompt=False, continue_final_message=True
    )
    assert (continued.prompt or "").endswith("assist you today?")


def test_chat_template_and_tools_are_in_the_prompt(llm: LLM, demo_model: Path, tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.content }}|{% endfor %}{{ tools[0].function.name if tools }}{{ x }}"
    )
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    (output,) = llm.chat(
        CONVERSATION[1:2], GREEDY, chat_template=template, tools=tools, chat_template_kwargs={"x": "y"}
    )
    assert output.prompt == "Hello|fy"
    (tmp_path / "template.jinja").write_text(template)
    for given in (template, str(tmp_path / "template.jinja"), tmp_path / "template.jinja"):
        other = LLM(str(demo_model), chat_template=given, max_model_len=64)
        assert other.chat(CONVERSATION[1:2], GREEDY)[0].prompt == "Hello|"


@pytest.mark.parametrize(
    ("format_", "options"),
    [
        ({"choice": ["Positive", "Negative"]}, {"choice": ["Positive", "Negative"]}),
        ({"regex": r"\w+@\w+\.com\n"}, {"regex": r"\w+@\w+\.com\n"}),
        ({"grammar": SQL}, {"grammar": SQL}),
        ({"json_object": True}, {"response_format": {"type": "json_object"}}),
    ],
    ids=["choice", "regex", "grammar", "json_object"],
)
def test_output_has_the_format_of_the_engine(
    format_: Any, options: Any, llm: LLM, engine: penstock.Engine
) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=40, structured_outputs=StructuredOutputsParams(**format_)
    )
    expected = engine.blocking.generate("Answer: ", temperature=0, max_tokens=40, **options)
    assert texts_of(llm.generate("Answer: ", sampling_params=params)) == [expected.text]


@pytest.mark.parametrize("form", [dict, json.dumps])
def test_output_has_the_json_schema(form: Any, llm: LLM) -> None:
    properties = {"brand": {"type": "string", "maxLength": 8}, "car_type": {"enum": ["sedan", "SUV"]}}
    schema: Any = {"type": "object", "properties": properties, "required": ["brand", "car_type"]}
    structured = StructuredOutputsParams(json=form(schema), disable_additional_properties=True)
    params = SamplingParams(temperature=0, max_tokens=100, structured_outputs=structured)
    (output,) = llm.generate("The most iconic car from the 90's, as JSON: ", params)
    found = json.loads(output.outputs[0].text)
    assert found.keys() == properties.keys()
    assert found["car_type"] in ("sedan", "SUV")


def test_additional_properties_are_allowed_by_default(llm: LLM) -> None:
    prompt = 'A JSON object: {"a": 1, "b": 2}\nA JSON object: '
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}, "required": ["a"]}
    found = []
    for closed in (False, True):
        structured = StructuredOutputsParams(json=schema, disable_additional_properties=closed)
        (output,) = llm.generate(prompt, SamplingParams(temperature=0, structured_outputs=structured))
        found.append(output.outputs[0].text)
    assert json.loads(found[1]).keys() == {"a"}
    assert '"b"' in found[0]


def test_each_prompt_has_its_parameters(llm: LLM) -> None:
    limits = [1, 5, 3, 7]
    params = [SamplingParams(temperature=0, max_tokens=limit, ignore_eos=True) for limit in limits]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == limits
    assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * 4
    with pytest.raises(ValueError, match="sampling_params has 4 items; it must have 1"):
        llm.generate(PROMPTS[0], params)
    whole = llm.generate([5] * 500, SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
    assert len(whole[0].outputs[0].token_ids) == 12


def test_choices_differ_by_their_seeds(llm: LLM, engine: penstock.Engine) -> None:
    (output,) = llm.generate(PROMPTS[0], SamplingParams(n=3, seed=8))
    expected = engine.blocking.generate(PROMPTS[0], n=3, seed=8, temperature=1.0, max_tokens=16)
    assert [choice.text for choice in output.outputs] == [choice.text for choice in expected.choices]
    assert [choice.index for choice in output.outputs] == [0, 1, 2]


def test_seed_of_the_model_decides_requests_without_one(tiny_model: Path) -> None:
    params = SamplingParams(ignore_eos=True)

    def sampled(seed: int) -> list[Any]:
        llm = LLM(str(tiny_model), seed=seed)
        return [llm.generate([[1, 2, 3]] * 2, params)[index].outputs[0].token_ids for index in (0, 1)]

    first = sampled(0)
    assert first == sampled(0)
    assert first != sampled(1)
    assert first[0] != first[1]


def test_prompts_are_texts_tokens_and_dicts(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode(PROMPTS[0])
    forms: list[Any] = [
        PROMPTS[0],
        ids,
        TextPrompt(prompt=PROMPTS[0]),
        TokensPrompt(prompt_token_ids=ids),
        TokensPrompt(prompt_token_ids=ids, prompt="shown"),
    ]
    outputs = llm.generate(forms, GREEDY)
    assert len(set(texts_of(outputs))) == 1
    assert [output.prompt for output in outputs] == [PROMPTS[0], None, PROMPTS[0], None, "shown"]
    assert all(output.prompt_token_ids == ids for output in outputs)
    assert texts_of(llm.generate(ids, GREEDY)) == texts_of(outputs[:1])
    with pytest.raises(ValueError, match=r"prompt is 5; it must be text, token ids"):
        llm.generate([PROMPTS[0], 5], GREEDY)  # type: ignore[arg-type]


def test_cached_tokens_are_counted_by_salt(llm: LLM) -> None:
    text = "one two three four five six seven eight nine ten " * 4
    for salt, is_cached in ((None, False), (None, True), ("a", False), ("a", True)):
        prompt: Any = {"prompt": text} if salt is None else {"prompt": text, "cache_salt": salt}
        (output,) = llm.generate(prompt, GREEDY)
        assert bool(output.num_cached_tokens) == is_cached


def test_logprobs_have_ranks_and_texts(llm: LLM, engine: penstock.Engine) -> None:
    (output,) = llm.generate(PROMPTS[2], SamplingParams(seed=2, logprobs=3, prompt_logprobs=2))
    score = engine.blocking.score(PROMPTS[2])
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    pairs = zip(score.token_ids, score.logprobs, output.prompt_logprobs, strict=True)
    for token_id, logprob, position in list(pairs)[1:]:
        assert position is not None
        assert next(iter(position)) == token_id
        assert position[token_id].logprob == logprob
        assert len(position) == (2 if position[token_id].rank else 3)
    (choice,) = output.outputs
    whole = engine.blocking.generate(
        PROMPTS[2], seed=2, temperature=1.0, max_tokens=16, output_logits="generation"
    )
    logits = np.asarray(memoryview(whole.logits)).astype(float)  # type: ignore[arg-type]
    exact = logits - np.log(np.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True))
    exact -= logits.max(axis=1, keepdims=True)
    total = 0.0
    for row, token_id, found in zip(exact, choice.token_ids, choice.logprobs or [], strict=True):
        assert found is not None
        best = {int(token): rank for rank, token in enumerate(np.argsort(-row, kind="stable")[:3], start=1)}
        assert found.keys() == best.keys() | {token_id}
        for token, entry in found.items():
            assert entry.logprob == pytest.approx(row[token], abs=1e-4)
            assert entry.rank == best.get(token)
            assert entry.decoded_token == engine.decode([token], skip_special_tokens=False)
        total += row[token_id]
    assert choice.cumulative_logprob == pytest.approx(total, abs=1e-3)


def test_all_logprobs_of_the_vocabulary(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), max_logprobs=-1, logprobs_mode="processed_logprobs")
    params = SamplingParams(logprobs=-1, max_tokens=1, logit_bias={7: 100.0})
    (output,) = llm.generate([1, 2, 3], params)
    (position,) = output.outputs[0].logprobs or []
    assert position is not None
    assert len(position) == 512
    assert position[7].rank == 1
    assert position[7].logprob == pytest.approx(0.0, abs=1e-3)


def test_stop_reason_is_the_stop_string_or_token(llm: LLM, engine: penstock.Engine) -> None:
    free = engine.blocking.generate(PROMPTS[2], temperature=0, max_tokens=16)
    word = engine.decode([free.token_ids[1]])
    (stopped,) = llm.generate(PROMPTS[2], SamplingParams(temperature=0, stop=word))[0].outputs
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", word)
    assert free.text.startswith(stopped.text)
    assert word not in stopped.text
    params = SamplingParams(temperature=0, stop_token_ids=[free.token_ids[1]])
    (stopped,) = llm.generate(PROMPTS[2], params)[0].outputs
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", free.token_ids[1])
    assert stopped.token_ids == list(free.token_ids[:2])
    eos = engine.info.eos_token_ids[0]
    (stopped,) = llm.generate(PROMPTS[2], SamplingParams(logit_bias={eos: 100.0}))[0].outputs
    assert (stopped.finish_reason, stopped.stop_reason, stopped.token_ids) == ("stop", None, [eos])


def test_outputs_without_texts(llm: LLM) -> None:
    params = SamplingParams(temperature=0, detokenize=False, logprobs=1)
    (choice,) = llm.generate(PROMPTS[0], params)[0].outputs
    assert choice.text == ""
    assert len(choice.token_ids) == 16
    assert {entry.decoded_token for found in choice.logprobs or [] for entry in (found or {}).values()} == {
        None
    }


def test_special_tokens_begin_texts_but_not_chats(tiny_model: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    begin = tokenizer["added_tokens"][0]
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": begin["content"], "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [],
        "special_tokens": {
            begin["content"]: {"id": begin["content"], "ids": [begin["id"]], "tokens": [begin["content"]]}
        },
    }
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    llm = LLM(str(model), chat_template="{{ messages[0].content }}")
    (text,) = llm.generate("ab", GREEDY)
    (bare,) = llm.generate("ab", GREEDY, tokenization_kwargs={"add_special_tokens": False})
    (chat,) = llm.chat([{"role": "user", "content": "ab"}], GREEDY)
    assert bare.prompt_token_ids is not None
    assert text.prompt_token_ids == [begin["id"], *bare.prompt_token_ids]
    assert chat.prompt_token_ids == bare.prompt_token_ids
    assert llm.embed("ab")[0].prompt_token_ids == text.prompt_token_ids


@pytest.mark.parametrize("width", [1, 4])
def test_beams_are_those_of_the_engine(width: int, llm: LLM, engine: penstock.Engine) -> None:
    params = BeamSearchParams(beam_width=width, max_tokens=6, length_penalty=0.5)
    (output,) = llm.beam_search([{"prompt": PROMPTS[0]}], params)
    options: Any = {"length_penalty": 0.5} if width > 1 else {"temperature": 0}
    expected = engine.blocking.generate(
        PROMPTS[0], num_beams=width, n=width, max_tokens=6, logprobs=True, **options
    )
    assert len(output.sequences) == width
    ids = engine.encode(PROMPTS[0])
    for beam, choice in zip(output.sequences, expected.choices, strict=True):
        assert beam.tokens == [*ids, *choice.token_ids]
        assert beam.text == PROMPTS[0] + choice.text
        assert beam.cum_logprob == pytest.approx(choice.cumulative_logprob)
        assert [len(position or {}) for position in beam.logprobs] == [2 * width] * len(beam.logprobs)
        chosen = [
            (found or {})[token].logprob for found, token in zip(beam.logprobs, choice.token_ids, strict=True)
        ]
        assert sum(chosen) == pytest.approx(beam.cum_logprob)


def test_embeddings_are_those_of_the_engine(llm: LLM, engine: penstock.Engine, demo_model: Path) -> None:
    outputs = llm.embed(PROMPTS)
    expected = np.asarray(memoryview(engine.blocking.embed(PROMPTS).tensor))
    np.testing.assert_array_equal([output.outputs.embedding for output in outputs], expected)
    assert outputs[0].outputs.hidden_size == engine.info.hidden_size
    assert outputs[0].prompt_token_ids == engine.encode(PROMPTS[0])
    (tensor,) = llm.encode(PROMPTS[0], pooling_task="embed")
    np.testing.assert_array_equal(memoryview(tensor.outputs.data), expected[0])
    last = LLM(str(demo_model), max_model_len=64, pooler_config=PoolerConfig(pooling_type="LAST"))
    options = [PoolingParams(), PoolingParams(dimensions=8), PoolingParams(use_activation=False)]
    found = [output.outputs.embedding for output in last.embed(PROMPTS[:3], pooling_params=options)]
    for text, embedding, keywords in zip(
        PROMPTS, found, ({}, {"dimensions": 8}, {"normalize": False}), strict=False
    ):
        exact = engine.blocking.embed(text, pooling="last", **keywords)  # type: ignore[arg-type]
        np.testing.assert_array_equal([embedding], memoryview(exact.tensor))


def test_scores_are_cosines_of_embeddings(llm: LLM, engine: penstock.Engine) -> None:
    vectors = np.asarray(memoryview(engine.blocking.embed(PROMPTS, normalize=True).tensor))
    one = llm.score(PROMPTS[0], PROMPTS[1:])
    np.testing.assert_allclose([pair.outputs.score for pair in one], vectors[1:] @ vectors[0], rtol=1e-5)
    two = llm.score(PROMPTS[:2], PROMPTS[2:])
    expected = [vectors[0] @ vectors[2], vectors[1] @ vectors[3]]
    np.testing.assert_allclose([pair.outputs.score for pair in two], expected, rtol=1e-5)
    assert one[0].prompt_token_ids == engine.encode(PROMPTS[0]) + engine.encode(PROMPTS[1])
    with pytest.raises(ValueError, match="data_1 has 2 texts; it must have 1, or 3 as data_2"):
        llm.score(PROMPTS[:2], PROMPTS[:3])


def test_adapters_are_loaded_by_their_requests(tiny_model: Path, tmp_path: Path) -> None:
    config = make_config("llama")
    paths = [write_adapter(tmp_path / str(seed), config, seed=seed) for seed in range(3)]
    requests = [LoRARequest("sql-lora", index + 1, str(path)) for index, path in enumerate(paths)]
    llm = LLM(str(tiny_model), enable_lora=True, max_loras=1, max_lora_rank=8, max_cpu_loras=2)
    prompts = [[1, 2, 3]] * 4
    found = llm.generate(prompts, GREEDY, lora_request=[*requests, None])  # type: ignore[list-item]
    ids = [output.outputs[0].token_ids for output in found]
    with penstock.Engine(tiny_model, max_adapters=3) as engine:
        for path in paths:
            engine.blocking.load_adapter(path.name, path)
        for index, name in enumerate(["0", "1", "2", None]):
            expected = engine.blocking.generate([1, 2, 3], temperature=0, max_tokens=16, adapter=name)
            assert ids[index] == list(expected.token_ids)
    assert len({tuple(one) for one in ids}) == 4
    assert [output.lora_request for output in found] == [*requests, None]
    shutil.rmtree(paths[0])  # a loaded adapter is not read again
    assert llm.generate([1, 2, 3], GREEDY, lora_request=requests[0])[0].outputs[0].token_ids == ids[0]
    moved = LoRARequest("sql-lora", 1, str(paths[1]), load_inplace=True)
    assert llm.generate([1, 2, 3], GREEDY, lora_request=moved)[0].outputs[0].token_ids == ids[1]
    assert moved == requests[0]
    assert hash(moved) == hash(requests[0])


def test_tokenizer_has_the_names_of_transformers(llm: LLM, demo_model: Path) -> None:
    tokenizer, exact = llm.get_tokenizer(), penstock.Tokenizer(demo_model)
    messages = [[{"role": "user", "content": text}] for text in PROMPTS[:2]]
    texts = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert texts == [exact.apply_chat_template(chat) for chat in messages]
    ids = tokenizer.apply_chat_template(messages[0], add_generation_prompt=True)
    assert ids == exact.encode(texts[0], add_special_tokens=False)
    assert tokenizer.decode(ids) == texts[0]
    assert tokenizer.decode(ids[0], skip_special_tokens=True) == ""
    assert tokenizer(PROMPTS[0])["input_ids"] == tokenizer.encode(PROMPTS[0])
    assert tokenizer(PROMPTS)["input_ids"][1] == exact.encode(PROMPTS[1])
    assert tokenizer.convert_ids_to_tokens(ids[:2]) == exact.token_names(ids[:2])
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (exact.bos_token_id, exact.eos_token_ids[0])
    assert len(tokenizer) == tokenizer.vocab_size == exact.vocabulary_size


def test_defaults_of_the_files_apply_without_parameters(tiny_model: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    defaults = {"temperature": 0.5, "top_k": 3, "repetition_penalty": 1.2, "max_new_tokens": 5}
    defaults["epsilon_cutoff"] = 0.5
    (model / "generation_config.json").write_text(json.dumps(defaults))
    llm = LLM(str(model), override_generation_config={"top_p": 0.9, "top_k": 4}, max_model_len=64)
    params = llm.get_default_sampling_params()
    expected = SamplingParams(temperature=0.5, top_k=4, top_p=0.9, repetition_penalty=1.2, max_tokens=5)
    assert params == expected
    params.max_tokens = 2  # is not kept
    (output,) = llm.generate([1, 2, 3])
    assert len(output.outputs[0].token_ids) <= 5
    assert llm.get_default_sampling_params() == expected
    (unlimited,) = llm.generate([1, 2, 3], SamplingParams(max_tokens=None, ignore_eos=True))
    assert len(unlimited.outputs[0].token_ids) == 61
    plain = LLM(str(model), generation_config="vllm")
    assert plain.get_default_sampling_params() == SamplingParams()
    (explicit,) = llm.generate([1, 2, 3], SamplingParams(seed=1, ignore_eos=True, max_tokens=12))
    (other,) = plain.generate([1, 2, 3], SamplingParams(seed=1, ignore_eos=True, max_tokens=12))
    assert explicit.outputs == other.outputs


def test_progress_bar_has_a_step_for_each_prompt(llm: LLM) -> None:
    calls: list[Any] = []

    class Bar:
        def __init__(self, **options: Any) -> None:
            calls.append(options["total"])

        def update(self, count: int) -> None:
            calls.append(count)

        def close(self) -> None:
            calls.append("closed")

    llm.generate(PROMPTS, GREEDY, use_tqdm=Bar)
    assert calls == [4, 1, 1, 1, 1, "closed"]


def test_arguments_are_options_of_the_engine(tiny_model: Path) -> None:
    args = EngineArgs(
        model=str(tiny_model),
        dtype="half",
        max_model_len=64,
        max_num_seqs=3,
        block_size=32,
        num_gpu_blocks_override=9,
        enable_prefix_caching=False,
        kv_cache_dtype="float16",
        enforce_eager=True,
        tensor_parallel_size=1,
        speculative_config={"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 5},
        max_num_queued_reqs=7,
        long_prefill_token_threshold=5,
    )
    llm = LLM.from_engine_args(args)
    info = llm._engine.info
    assert (info.dtype, info.kv_cache_dtype) == ("float16", "float16")
    assert (info.max_model_len, info.max_num_seqs, info.max_waiting) == (64, 3, 7)
    assert (info.block_size, info.num_blocks) == (32, 9)
    config = llm._engine.config
    assert (config.prefix_cache, config.speculation, config.num_speculative_tokens) == (False, "ngram", 2)
    assert config.max_prefill_chunk == 5
    assert EngineArgs("owner/name").engine_config().max_prefill_chunk is None
    options = EngineArgs("owner/name", revision="v1", gpu_memory_utilization=0.5, kv_offloading_size=0.5)
    assert options.model_name == "owner/name@v1"
    assert options.engine_config().memory_ratio == 0.5
    assert options.engine_config().host_cache_bytes == 1 << 29


def test_model_sleeps_and_wakes(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model))
    before = llm.generate([1, 2, 3], GREEDY)[0].outputs
    llm.sleep(level=2)
    with pytest.raises(penstock.EngineStoppedError):
        llm.generate([1, 2, 3], GREEDY)
    assert llm.wake_up()
    assert llm.reset_prefix_cache()
    assert llm.generate([1, 2, 3], GREEDY)[0].outputs == before


@pytest.mark.filterwarnings("error")
def test_model_that_is_dropped_is_closed(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model))
    engine = llm._engine
    assert "LLM(model=" in repr(llm)
    del llm
    gc.collect()
    with pytest.raises(penstock.EngineStoppedError):
        engine.blocking.generate([1, 2, 3])


def test_error_of_a_prompt_ends_the_call(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), max_model_len=32)
    with pytest.raises(ValueError, match="at most 31 ids"):
        llm.generate([[1, 2, 3], [5] * 40], GREEDY)
    assert llm.generate([1, 2, 3], GREEDY)[0].finished


def test_priorities_apply_with_their_policy(tiny_model: Path) -> None:
    for policy, expected in (("fcfs", 0), ("priority", -3)):
        llm = LLM(str(tiny_model), scheduling_policy=policy)
        jobs = llm._jobs([[1, 2]], GREEDY, None, -3, None)
        assert [job.params.priority for job in jobs] == [expected]
