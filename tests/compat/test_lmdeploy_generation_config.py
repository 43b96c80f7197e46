"""LMDeploy's `GenerationConfig`: its checks, and the outputs of requests with it."""

from __future__ import annotations

import itertools
import json
import re
import sys
from typing import TYPE_CHECKING, Any

import pytest

import penstock
from penstock.compat.lmdeploy import sampling
from penstock.compat.lmdeploy.errors import ArgumentError, UnsupportedError
from penstock.compat.lmdeploy.messages import EngineGenerationConfig, GenerationConfig
from penstock.compat.lmdeploy.model import best_template
from penstock.compat.lmdeploy.tokenizer import Tokenizer
from support.compat.lmdeploy import LIBRARIES, library_of
from support.parity import oracle

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

QUESTION = "Tell me about Paris"
PROMPT = "Once upon a time"
END = "<|im_end|>"
#: The tokens of the demo model.
END_ID, SPECIAL_ID = 2, 5
CALL_ME = {"type": "regex_schema", "regex_schema": "call me [A-Z][a-z]{1,9}"}


@pytest.fixture(scope="module")
def engine(demo_model: Path) -> Iterator[penstock.Engine]:
    with penstock.Engine(demo_model, max_logprobs=1024) as engine:
        yield engine


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Tokenizer:
    return Tokenizer(demo_model)


class Model:
    """Requests to the demo model."""

    def __init__(self, engine: penstock.Engine, tokenizer: Tokenizer) -> None:
        self.engine = engine
        self.tokenizer = tokenizer

    def options(self, config: GenerationConfig, **changes: Any) -> penstock.SamplingOptions:
        """The sampling parameters of a configuration."""
        values: dict[str, Any] = {"max_tokens": config.max_new_tokens, "seed": config.random_seed or 0}
        return sampling.options(config, tokenizer=self.tokenizer, **values | changes)

    def generate(self, prompt: str = PROMPT, **values: Any) -> penstock.Result:
        """The result of a request with these fields of `GenerationConfig`."""
        config = GenerationConfig(**{"max_new_tokens": 32, **values})
        return self.engine.blocking.generate(prompt, **self.options(config))

    def answer(self, question: str = QUESTION, **values: Any) -> penstock.Result:
        """The result of a chat with one message."""
        return self.generate(best_template(self.tokenizer).get_prompt(question), **values)


@pytest.fixture(scope="module")
def model(engine: penstock.Engine, tokenizer: Tokenizer) -> Model:
    return Model(engine, tokenizer)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_p", -0.01),
        ("top_p", 1.01),
        ("top_p", float("nan")),
        ("temperature", -1),
        ("temperature", 2.01),
        ("top_k", -1),
        ("n", 0),
        ("n", -1),
        ("n", True),
        ("min_p", 1.1),
        ("max_new_tokens", -1),
        ("max_new_tokens", "16"),
        ("min_new_tokens", -1),
        ("repetition_penalty", 0),
        ("random_seed", 2**64),
        ("random_seed", 0.5),
        ("logprobs", 1025),
        ("ignore_eos", "no"),
        ("ignore_eos", 1),
        ("do_sample", 0),
        ("do_sample", "no"),
        ("do_sample", 0.8),
        *((name, 0) for name in ("return_ppl", "with_cache", "preserve_cache", "return_routed_experts")),
        ("output_logits", "prompt"),
        ("stop_words", "abc"),
        ("stop_words", {"abc"}),
        ("stop_token_ids", 3),
        ("bad_words", 3),
        ("logits_processors", len),
        ("response_format", "json_object"),
    ],
)
def test_invalid_value_is_refused_by_the_constructor(field: str, value: Any) -> None:
    with pytest.raises(AssertionError, match=f"{field} is .*; it must be ") as error:
        GenerationConfig(**{field: value})
    assert repr(value) in str(error.value)
    assert isinstance(error.value, ArgumentError)
    assert isinstance(error.value, ValueError)


def test_positional_values_have_the_documented_order() -> None:
    config = GenerationConfig(1, 64, 0.7, 5, 0.9, 1.1, True, 3, ["a"], ["b"])  # noqa: FBT003
    assert config == GenerationConfig(
        n=1,
        max_new_tokens=64,
        top_p=0.7,
        top_k=5,
        temperature=0.9,
        repetition_penalty=1.1,
        ignore_eos=True,
        random_seed=3,
        stop_words=["a"],
        bad_words=["b"],
    )
    with pytest.raises(ArgumentError, match="top_p is True"):
        GenerationConfig(1, 64, True)  # noqa: FBT003 - the order of later versions


@pytest.mark.parametrize(
    ("kind", "field", "value", "part"),
    [
        (GenerationConfig, "bad_words", ["a", ""], "bad_words[1] is ''"),
        (GenerationConfig, "stop_words", [3], "stop_words[0] is 3"),
        (EngineGenerationConfig, "stop_words", ["a"], "stop_words[0] is 'a'"),
        (GenerationConfig, "stop_token_ids", [1, "2"], "stop_token_ids[1] is '2'"),
        (GenerationConfig, "bad_token_ids", [-1], "bad_token_ids[0] is -1"),
        (GenerationConfig, "logits_processors", [len, None], "logits_processors[1] is None"),
        (GenerationConfig, "response_format", {"type": "xml"}, "the type of response_format is 'xml'"),
        (GenerationConfig, "response_format", {}, "the type of response_format is None"),
        (
            GenerationConfig,
            "response_format",
            {"type": "json_schema", "json_schema": "city"},
            "json_schema of response_format is 'city'",
        ),
        (
            GenerationConfig,
            "response_format",
            {"type": "regex_schema"},
            "regex_schema of response_format is None",
        ),
    ],
)
def test_invalid_item_is_refused_by_the_constructor(kind: Any, field: str, value: Any, part: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{re.escape(part)}; it must be "):
        kind(**{field: value})


@pytest.mark.parametrize(("size", "threshold"), [(-1, -2), (3, 0), (0, 3), (-1, 3), (3, -1)])
def test_half_of_a_repetition_ngram_rule_becomes_zero(size: int, threshold: int) -> None:
    config = GenerationConfig(repetition_ngram_size=size, repetition_ngram_threshold=threshold)
    assert (config.repetition_ngram_size, config.repetition_ngram_threshold) == (0, 0)


@pytest.mark.parametrize(
    ("values", "temperature", "top_k"),
    [
        ({}, 0.0, 1),
        ({"top_p": 0.8}, 0.0, 1),
        ({"top_k": 40}, 0.8, 40),
        ({"top_k": 0}, 0.8, 0),
        ({"do_sample": True}, 0.8, 50),
        ({"do_sample": True, "top_k": 3, "temperature": 1.5}, 1.5, 3),
        ({"do_sample": False, "top_k": 40}, 0.0, 40),
        ({"do_sample": True, "top_k": 1}, 0.0, 1),
        ({"do_sample": True, "temperature": 0}, 0.0, 50),
        ({"do_sample": True, "top_p": 0}, 0.0, 50),
    ],
)
def test_sampling_applies_if_the_parameters_allow_it(
    model: Model, values: dict[str, Any], temperature: float, top_k: int
) -> None:
    options = model.options(GenerationConfig(**values))
    assert (options["temperature"], options["top_k"]) == (temperature, top_k)


def test_no_parameter_is_left_to_the_files_of_the_model(model: Model) -> None:
    """The fields with the default "the model's", except for the end tokens."""
    params = penstock.SamplingParams(**model.options(GenerationConfig()))
    defaults = penstock.SamplingParams()
    fields = [name for name in penstock.SamplingOptions.__annotations__ if hasattr(params, name)]
    unset = {name for name in fields if getattr(params, name) is None}
    for name in ("max_tokens", "temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff"):
        assert getattr(defaults, name) is None
        assert name not in unset
    assert not {"repetition_penalty", "no_repeat_ngram_size", "seed"} & unset


def test_greedy_output_equals_that_of_the_engine(model: Model) -> None:
    native = model.engine.blocking.generate(PROMPT, max_tokens=32, temperature=0.0, ignore_eos=True)
    assert model.generate(ignore_eos=True).token_ids == native.token_ids
    sampled = model.generate(top_k=40, top_p=0.8, random_seed=7, ignore_eos=True)
    values = {"temperature": 0.8, "top_k": 40, "top_p": 0.8, "seed": 7, "ignore_eos": True}
    native = model.engine.blocking.generate(PROMPT, max_tokens=32, **values)  # type: ignore[arg-type]
    assert sampled.token_ids == native.token_ids


def test_seed_determines_a_sampled_output(model: Model) -> None:
    texts = [model.generate(do_sample=True, random_seed=seed).text for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert model.options(GenerationConfig(random_seed=-1))["seed"] == 2**64 - 1


def test_repetition_penalty_applies_to_greedy_outputs(model: Model) -> None:
    def distinct(penalty: float) -> int:
        values: dict[str, Any] = {
            "repetition_penalty": penalty,
            "do_sample": False,
            "ignore_eos": True,
            "max_new_tokens": 32,
        }
        return len(set(model.generate(**values).token_ids))

    assert distinct(1.3) > distinct(1.0) > distinct(0.01)


@pytest.mark.parametrize("word", ["the capital", "apital of Fr", " City"])
def test_output_ends_before_a_stop_word(model: Model, word: str) -> None:
    whole = model.answer()
    result = model.answer(stop_words=["never said", word])
    assert result.text == whole.text.partition(word)[0] != whole.text
    assert result.finish_reason == "stop"
    kept = model.answer(stop_words=[word], include_stop_str_in_output=True)
    assert kept.text == result.text + word


def test_special_token_as_a_stop_word_is_a_token_id(model: Model) -> None:
    options = model.options(GenerationConfig(stop_words=["and", "<|im_start|>", END]))
    assert (options["stop"], options["stop_token_ids"]) == (["and"], [1, END_ID])
    options = model.options(GenerationConfig(stop_words=[f"{END}\n"]))
    assert options["stop_token_sequences"] == [[END_ID, 198]]


def test_words_that_are_tokenised_have_a_limit(model: Model) -> None:
    words: Any = [f"w{number}" for number in range(1025)]
    for config in (GenerationConfig(stop_words=words), GenerationConfig(bad_words=words)):
        with pytest.raises(ValueError, match="it must be a list of at most 1024"):
            model.options(config)


def test_stop_ids_and_words_of_the_template_add_up(model: Model) -> None:
    config = GenerationConfig(stop_words=["and"], stop_token_ids=[9, 1])
    options = model.options(config, template_stop_words=["<|im_start|>", "or"])
    assert (options["stop"], options["stop_token_ids"]) == (["and", "or"], [9, 1])
    config.ignore_eos = True
    options = model.options(config, template_stop_words=[END, "or"])
    assert (options["stop"], options["stop_token_ids"]) == (["and"], [9, 1])


def test_minimum_length_applies_although_the_answer_is_short(model: Model) -> None:
    assert len(model.answer("Say hi.", max_new_tokens=64).token_ids) < 50
    assert len(model.answer("Say hi.", max_new_tokens=64, min_new_tokens=50).token_ids) >= 50
    assert model.options(GenerationConfig(min_new_tokens=50), max_tokens=8)["min_tokens"] == 8


@pytest.mark.parametrize("ignore_eos", ["ignored", ""])
def test_maximum_length_is_exact(model: Model, ignore_eos: str) -> None:
    result = model.answer(max_new_tokens=5, ignore_eos=bool(ignore_eos))
    assert (len(result.token_ids), result.finish_reason) == (5, "length")


def test_bad_word_cannot_appear_across_token_borders(model: Model) -> None:
    """Each word begins in one token of the output without it and ends in the next one."""
    whole = model.answer()
    texts = [model.engine.decode([token]) for token in whole.token_ids]
    words = [f"{left[-2:]}{right[:3]}" for left, right in itertools.pairwise(texts)]
    assert len(words) > 20
    for word in words[::10]:
        assert word in whole.text
        assert word not in model.answer(bad_words=[word]).text
    for seed in range(2):
        values: dict[str, Any] = {"top_k": 0, "temperature": 1.5, "random_seed": seed, "max_new_tokens": 40}
        assert "e" not in model.answer(bad_words=["zebra", "e"], **values).text


@pytest.mark.parametrize("word", ["a/b", 'say "hi"', "\\n", "[x]", "line\nbreak", "é", "日本", "."])
def test_bad_word_with_any_characters_is_valid(model: Model, word: str) -> None:
    assert word not in model.answer(bad_words=[word], max_new_tokens=16).text


def test_bad_words_leave_special_tokens_possible(model: Model) -> None:
    def force(token_ids: list[int], logits: penstock.Tensor) -> None:
        if len(token_ids) % 4 == 0:
            values: Any = memoryview(logits)
            values[SPECIAL_ID] = 1e4

    config = GenerationConfig(bad_words=["city"], max_new_tokens=16)
    options = model.options(config) | {"logits_processors": [force]}
    result = model.engine.blocking.generate(PROMPT, **options)
    assert result.token_ids.count(SPECIAL_ID) == 4
    assert "city" in model.generate(max_new_tokens=16).text


def test_bad_words_allow_the_end_of_an_answer(model: Model) -> None:
    result = model.answer("Say hi.", bad_words=["zebra"], max_new_tokens=64)
    assert result.finish_reason == "stop"


def test_bad_special_token_is_not_generated(model: Model) -> None:
    result = model.answer("Say hi.", bad_words=[END], max_new_tokens=64)
    assert END_ID not in result.token_ids
    assert model.options(GenerationConfig(bad_words=[END], bad_token_ids=[7]))["bad_token_ids"] == [7, END_ID]


def test_bad_word_across_tokens_is_forbidden_without_an_end(model: Model) -> None:
    """The word is no token sequence of the model: its letters begin in one token and end in the next."""
    whole = model.answer(ignore_eos=True, max_new_tokens=12)
    texts = [model.engine.decode([token]) for token in whole.token_ids]
    words = [f"{left[-2:]}{right[:3]}" for left, right in itertools.pairwise(texts)]
    for word in words[2:10:3]:
        assert word in whole.text
        result = model.answer(bad_words=[word], ignore_eos=True, max_new_tokens=12)
        assert word not in result.text
        assert (len(result.token_ids), result.finish_reason) == (12, "length")


def test_bad_words_with_ignore_eos_keep_the_rules_of_the_end(model: Model) -> None:
    ignored = {"bad_words": ["zebra"], "ignore_eos": True, "max_new_tokens": 24}
    result = model.answer("Say hi.", **ignored)
    assert END_ID not in result.token_ids
    assert (len(result.token_ids), result.finish_reason) == (24, "length")
    stopped = model.answer("Say hi.", stop_token_ids=[END_ID], **ignored)
    assert stopped.finish_reason == "stop"
    rule = {"repetition_ngram_size": 1, "repetition_ngram_threshold": 2}
    repeated = model.generate("one one one one one one", **ignored, **rule)
    assert repeated.finish_reason == "stop"
    assert len(repeated.token_ids) < 24


@pytest.mark.parametrize("values", [{"response_format": CALL_ME}])
def test_bad_words_beside_another_format_are_token_sequences(model: Model, values: dict[str, Any]) -> None:
    options = model.options(GenerationConfig(bad_words=["Paris"], **values))
    assert options["bad_words"] == ["Paris"]
    assert "grammar" not in options
    assert "Paris" not in model.answer(bad_words=["Paris"], **values).text


def test_output_has_the_response_format(model: Model) -> None:
    assert model.answer(response_format=CALL_ME).text.startswith("call me ")
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}
    json_schema = {"name": "number", "schema": schema}
    text = model.answer(response_format={"type": "json_schema", "json_schema": json_schema}).text
    assert json.loads(text)["n"] <= 9
    assert model.options(GenerationConfig(response_format={"type": "json_object"}))["response_format"] == {
        "type": "json_object"
    }
    assert "response_format" not in model.options(GenerationConfig(response_format={"type": "text"}))


@pytest.mark.parametrize(
    "response_format",
    [{}, {"type": "xml"}, {"type": "json_schema"}, {"type": "regex_schema"}, "json", [1]],
)
def test_invalid_response_format_is_refused(model: Model, response_format: Any) -> None:
    with pytest.raises(ArgumentError, match="response_format"):
        model.options(GenerationConfig(response_format=response_format))


def test_logprobs_have_each_token_and_the_likeliest_ones(model: Model) -> None:
    result = model.answer(logprobs=10, bad_words=["Paris"])
    choice = result.choices[0]
    assert choice.logprobs is not None
    assert choice.top_logprobs is not None
    assert len(choice.logprobs) == len(choice.top_logprobs) == len(result.token_ids)
    assert all(len(top) == 10 for top in choice.top_logprobs)


def test_special_tokens_are_in_the_text_if_they_are_not_skipped(model: Model) -> None:
    values = {"stop_words": [END], "include_stop_str_in_output": True, "max_new_tokens": 64}
    assert END not in model.answer("Say hi.", **values).text
    for spaces in (False, True):
        changes = {"skip_special_tokens": False, "spaces_between_special_tokens": spaces}
        assert model.answer("Say hi.", **values, **changes).text.endswith(f" {END}" if spaces else END)


@pytest.mark.parametrize("ignore_eos", ["ignored", ""])
def test_output_ends_at_a_repeated_ngram(model: Model, ignore_eos: str) -> None:
    size, threshold = 2, 4
    values = {"max_new_tokens": 48, "ignore_eos": bool(ignore_eos)}
    whole = model.generate("one one one one one one", **values).token_ids
    rule = {"repetition_ngram_size": size, "repetition_ngram_threshold": threshold}
    result = model.generate("one one one one one one", **values, **rule)
    pairs = list(itertools.pairwise(whole))
    end = next(end for end in range(len(pairs)) if pairs[: end + 1].count(pairs[end]) == threshold)
    assert result.finish_reason == "stop"
    assert result.token_ids == (*whole[: end + 2], END_ID)


def test_repeated_ngram_before_the_minimum_length_has_no_effect(model: Model) -> None:
    rule = {"repetition_ngram_size": 1, "repetition_ngram_threshold": 2, "min_new_tokens": 30}
    assert len(model.generate("one one one one", max_new_tokens=40, **rule).token_ids) >= 30


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"return_ppl": True}, "return_ppl"),
        ({"with_cache": True}, "with_cache"),
        ({"preserve_cache": True}, "preserve_cache"),
        ({"migration_request": object()}, "migration_request"),
        ({"return_routed_experts": True}, "return_routed_experts"),
        (
            {"repetition_ngram_size": 2, "repetition_ngram_threshold": 2, "response_format": CALL_ME},
            "repetition_ngram_size",
        ),
    ],
)
def test_unsupported_parameter_is_refused_with_a_reason(
    model: Model, values: dict[str, Any], field: str
) -> None:
    with pytest.raises(UnsupportedError, match=f"{field} is .*; it is not supported"):
        model.options(GenerationConfig(**values))


@pytest.mark.parametrize("field", ["stop_words", "bad_words"])
@pytest.mark.parametrize("words", ["word", [""], [1.5], {"a": 1}])
def test_words_of_another_type_are_refused(model: Model, field: str, words: Any) -> None:
    with pytest.raises(ArgumentError, match=field):
        model.options(GenerationConfig(**{field: words}))


def test_choices_of_a_stream_are_one_with_a_warning(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    assert "n" not in model.options(GenerationConfig(n=3))
    assert "n is 3; streams and sessions have one choice" in caplog.text


def test_ids_of_words_are_those_of_single_tokens(tokenizer: Tokenizer) -> None:
    config = GenerationConfig(stop_words=[END, " and"], bad_words=["several words"], top_k=3)
    with_ids = EngineGenerationConfig.From(config, tokenizer)
    assert (with_ids.stop_words, with_ids.bad_words, with_ids.top_k) == ([END_ID, 284], None, 3)
    options = sampling.options(with_ids, max_tokens=8, tokenizer=tokenizer, seed=0)
    assert options["stop_token_ids"] == [END_ID, 284]


def test_processors_without_torch_name_the_extra(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UnsupportedError, match="logits_processors needs torch: install the extra"):
        model.options(GenerationConfig(logits_processors=[lambda _ids, logits: logits]))


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("in_place", ["in_place", ""])
def test_processors_get_tensors_of_torch(
    library: str, in_place: str, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = library_of(library, monkeypatch)
    lengths = []

    def process(token_ids: Any, logits: Any) -> Any:
        assert isinstance(token_ids, torch.Tensor)
        lengths.append(len(token_ids))
        if in_place:
            logits[: SPECIAL_ID + 400] = float("-inf")
            return logits
        return torch.where(torch.arange(len(logits)) < SPECIAL_ID + 400, float("-inf"), logits)

    result = model.generate(logits_processors=[process], max_new_tokens=8)
    assert min(result.token_ids) >= SPECIAL_ID + 400
    assert lengths == list(range(lengths[0], lengths[0] + 8))


@pytest.mark.oracle
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_greedy_output_equals_that_of_transformers(tiny_model: Path, penalty: float) -> None:
    prompt = list(range(10, 30))
    config = GenerationConfig(max_new_tokens=24, repetition_penalty=penalty, ignore_eos=True)
    options = sampling.options(config, max_tokens=24, tokenizer=Tokenizer(tiny_model), seed=0)
    with penstock.Engine(tiny_model, threads=1) as engine:
        ours = engine.blocking.generate(prompt, **options).token_ids
    theirs = oracle.load_oracle(tiny_model).generate(prompt, 24, repetition_penalty=penalty)
    assert theirs.is_unambiguous
    assert list(ours) == theirs.token_ids


@pytest.mark.parametrize(
    ("given", "ends", "tokenizer_end", "expected"),
    [
        (None, None, None, []),
        ([7], 3, 5, [7, 5, 3]),
        ([7], [5, 9], 5, [7, 5, 9]),
    ],
)
def test_end_tokens_of_a_model_are_added_to_stop_tokens(
    given: list[int] | None, ends: object, tokenizer_end: int | None, expected: list[int]
) -> None:
    config = GenerationConfig(stop_token_ids=given)
    config.update_from_hf_gen_cfg({} if ends is None else {"eos_token_id": ends}, tokenizer_end)
    assert config.stop_token_ids == expected


def test_most_choices_are_those_of_a_request() -> None:
    for most in (GenerationConfig, penstock.SamplingParams):
        most(n=128)
        with pytest.raises(ValueError, match="n"):
            most(n=129)
