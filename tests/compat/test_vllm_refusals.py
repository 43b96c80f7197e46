"""vLLM's API: its names and signatures, what is without effect, and what is refused by name.

`tests/data/peers/vllm_signatures.json` has the fields and methods of vLLM 0.33.0 with their defaults.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
from typing import TYPE_CHECKING, Any

import pytest

import penstock
from penstock.compat import vllm
from penstock.compat.vllm import (
    LLM,
    AsyncLLM,
    BeamSearchParams,
    EngineArgs,
    LoRARequest,
    PoolingParams,
    SamplingParams,
    StructuredOutputsParams,
    UnsupportedError,
    config,
    inputs,
    pooling_params,
    sampling_params,
)
from penstock.compat.vllm.engine import arg_utils
from penstock.compat.vllm.entrypoints import llm as llm_module
from penstock.compat.vllm.logprobs import Logprob
from penstock.compat.vllm.outputs import BeamSearchSequence
from penstock.compat.vllm.v1.engine import async_llm as async_module
from support.paths import DATA, ROOT

if TYPE_CHECKING:
    from pathlib import Path

PEER: dict[str, Any] = json.loads((DATA / "peers" / "vllm_signatures.json").read_text())
NO_LITERAL, REQUIRED = "(no literal)", "(required)"
CLASSES: dict[str, Any] = {
    cls.__name__: cls
    for cls in (
        *(BeamSearchParams, BeamSearchSequence, LoRARequest, Logprob, PoolingParams, SamplingParams),
        *(StructuredOutputsParams, config.PoolerConfig, vllm.CompletionOutput, vllm.PoolingRequestOutput),
        vllm.RequestOutput,
    )
}
MODULES = (
    *("engine.arg_utils", "engine.async_llm_engine", "entrypoints.llm", "inputs", "logprobs", "config"),
    *("lora.request", "outputs", "pooling_params", "sampling_params", "v1.engine.async_llm"),
)


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM(str(tiny_model))


def defaults_of(function: Any) -> dict[str, Any]:
    """The parameters of a signature, in order, as the stored data has them."""
    parameters = inspect.signature(function).parameters
    return {
        name: REQUIRED if parameter.default is parameter.empty else parameter.default
        for name, parameter in parameters.items()
        if name != "self" and parameter.kind is not parameter.VAR_KEYWORD
    }


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(found) == list(expected)
    assert {name: found[name] for name, value in expected.items() if value != NO_LITERAL} == {
        name: value for name, value in expected.items() if value != NO_LITERAL
    }


@pytest.mark.parametrize("name", CLASSES)
def test_fields_of_a_class_are_those_of_the_peer(name: str) -> None:
    assert_same(defaults_of(CLASSES[name]), PEER["fields"][name])


@pytest.mark.parametrize("name", ["LLM", "AsyncLLM"])
def test_methods_are_those_of_the_peer_or_refused(name: str) -> None:
    cls: Any = {"LLM": LLM, "AsyncLLM": AsyncLLM}[name]
    refused = {"LLM": llm_module.NOT_PROVIDED, "AsyncLLM": async_module.NOT_PROVIDED}[name]
    methods = PEER["methods"][name]
    present = {method for method in methods if hasattr(cls, method)}
    assert present | refused.keys() >= methods.keys()
    assert not present & refused.keys()
    for method in present:
        if callable(getattr(cls, method)):
            assert_same(defaults_of(getattr(cls, method)), methods[method])


def test_every_argument_of_an_engine_is_in_one_table() -> None:
    peer = PEER["fields"]["AsyncEngineArgs"]
    tables = (arg_utils.HONOURED, arg_utils.UNSUPPORTED, arg_utils.WITHOUT_EFFECT)
    assert sorted(name for table in tables for name in table) == sorted(peer)
    assert PEER["arguments"]["LLM"].keys() - peer.keys() == {"chat_template"}
    accepted = {name: value for name, (value, _) in arg_utils.UNSUPPORTED.items()} | dict(arg_utils.HONOURED)
    for name, value in accepted.items():
        assert value is None if peer[name] == NO_LITERAL else value == peer[name]
    literal = {name: value for name, value in peer.items() if value != NO_LITERAL}
    assert EngineArgs(**literal).engine_config() == EngineArgs().engine_config()


def test_keys_of_prompts_are_those_of_the_peer() -> None:
    for name, keys in PEER["keys"].items():
        assert sorted(getattr(inputs, name).__annotations__) == keys


def test_names_are_those_of_the_peer_or_refused() -> None:
    assert vllm.__version__ == PEER["version"]
    for name in set(PEER["names"]) - set(vllm.__all__):
        with pytest.raises(ImportError, match=rf"vllm\.{name} is not provided: "):
            getattr(vllm, name)
    assert all(hasattr(vllm, name) for name in vllm.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        vllm.nothing  # noqa: B018


@pytest.mark.parametrize("name", MODULES)
def test_modules_have_the_names_of_the_peer(name: str) -> None:
    module = importlib.import_module(f"penstock.compat.vllm.{name}")
    assert all(hasattr(module, exported) for exported in module.__all__)


@pytest.mark.parametrize("name", arg_utils.UNSUPPORTED)
def test_argument_of_an_engine_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"^{name} is 77; it is not supported: "):
        EngineArgs("none", **{name: 77})


def test_arguments_without_effect_are_accepted(tiny_model: Path) -> None:
    arguments: dict[str, Any] = dict.fromkeys(arg_utils.WITHOUT_EFFECT, True)
    llm = LLM(str(tiny_model), **arguments)
    assert llm.get_world_size() == 1
    with pytest.raises(TypeError, match=r"argument 'max_num_seq'; did you mean max_num_seqs\?$"):
        LLM(str(tiny_model), max_num_seq=1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("convert", "classify"),
        ("device_ids", [0, 1]),
        ("dtype", "float64"),
        ("generation_config", "folder"),
        ("hf_overrides", print),
        ("hf_overrides", {"is_original_qwen3_reranker": True}),
        ("load_format", "dummy"),
        ("logprobs_mode", "raw_logits"),
        ("quantization", "bitsandbytes"),
        ("scheduling_policy", "lifo"),
        ("speculative_config", {"method": "eagle"}),
        ("structured_outputs_config", {"disable_any_whitespace": True}),
        ("tokenizer_mode", "slow"),
    ],
)
def test_value_of_an_argument_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(UnsupportedError, match=f"^{name} is "):
        EngineArgs("none", **{name: value})


@pytest.mark.parametrize(
    ("cls", "fields"),
    [
        (SamplingParams, sampling_params.UNSUPPORTED),
        (PoolingParams, pooling_params.UNSUPPORTED),
        (config.PoolerConfig, config.UNSUPPORTED),
        (StructuredOutputsParams, sampling_params.UNSUPPORTED_FORMATS),
        (BeamSearchParams, sampling_params.UNSUPPORTED_OF_BEAMS),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_fields_of_parameters_are_refused_by_name(cls: Any, fields: Any) -> None:
    required = {"beam_width": 2, "max_tokens": 1} if cls is BeamSearchParams else {}
    for name in fields:
        with pytest.raises(UnsupportedError, match=rf"^{name} is 77; it is not supported: "):
            cls(**required, **{name: 77})


def test_field_that_is_set_later_is_refused(llm: LLM) -> None:
    params = SamplingParams()
    params.extra_args = {"a": 1}
    with pytest.raises(UnsupportedError, match=r"^extra_args is "):
        llm.generate([1, 2], params)
    pooling = PoolingParams()
    pooling.step_tag_id = 1
    with pytest.raises(UnsupportedError, match=r"^step_tag_id is 1"):
        llm.embed([1, 2], pooling_params=pooling)


def test_long_text_is_refused_before_all_of_it_is_tokenised(llm: LLM) -> None:
    text, longest = "ab " * 1_000_000, llm._requests.engine.info.max_model_len
    message = f"the prompt has more than {2 * longest} tokens; max_model_len is {longest}"
    with pytest.raises(ValueError, match=message):
        llm.embed(text)
    with pytest.raises(ValueError, match=message):
        llm.generate(text, tokenization_kwargs={"add_special_tokens": False})


def test_fields_without_effect_are_accepted(llm: LLM) -> None:
    params = SamplingParams(temperature=0, ignore_eos=True)
    expected = llm.generate([1, 2], params)[0].outputs
    for name in sampling_params.WITHOUT_EFFECT:
        one: Any = {name: 1}
        assert llm.generate([1, 2], dataclasses.replace(params, **one))[0].outputs == expected


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SamplingParams(temperature=3), "temperature=3"),
        (lambda: SamplingParams(top_p=0), "top_p=0"),
        (lambda: SamplingParams(max_tokens=0), "max_tokens=0"),
        (lambda: BeamSearchParams(beam_width=0, max_tokens=1), "beam_width=0 .*1 to 32"),
        (lambda: EngineArgs(gpu_memory_utilization=2), "gpu_memory_utilization=2"),
        (lambda: EngineArgs(kv_cache_dtype="fp8"), "kv_cache_dtype='fp8'"),
        (StructuredOutputsParams, "0 of json, regex"),
        (lambda: StructuredOutputsParams(regex="a", choice=["b"]), "2 of json, regex"),
        (
            lambda: SamplingParams(structured_outputs=StructuredOutputsParams(json=" " * (1 << 20) + "{}")),
            "json has 1048578 characters; the limit is 1048576",
        ),
        (lambda: LoRARequest("a", 0, "path"), "lora_int_id is 0"),
        (lambda: LoRARequest("a", 1), "lora_path is empty"),
        (lambda: PoolingParams(task="classify"), "task is 'classify'"),
        (lambda: config.PoolerConfig(pooling_type="CLS"), "seq_pooling_type is 'CLS'"),
    ],
)
def test_invalid_value_is_an_error_at_once(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_optional_values_have_defaults() -> None:
    given = SamplingParams.from_optional(temperature=None, top_p=0.5, max_tokens=None, seed=-1)
    assert given == SamplingParams(top_p=0.5, max_tokens=None)
    assert given.clone() == given
    assert SamplingParams(stop="a").stop == ["a"]


@pytest.mark.parametrize("name", inputs.UNSUPPORTED)
def test_key_of_a_prompt_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"^{name} is "):
        inputs.parse({"prompt": "a", name: {"image": 1}})
    assert inputs.parse({"prompt": "a", name: None}) == ("a", None, None)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate("a", mm_processor_kwargs={"a": 1}), "mm_processor_kwargs is"),
        (lambda llm: llm.generate("a", lora_request=LoRARequest("sql", 1, "p")), "lora_request is 'sql'"),
        (lambda llm: llm.chat([], chat_template_content_format="openai"), "chat_template_content_format is"),
        (lambda llm: llm.encode("a", pooling_task="token_embed"), "pooling_task is 'token_embed'"),
        (lambda llm: llm.score("a", "b", chat_template="t"), "chat_template is 't'"),
        (lambda llm: llm.sleep(level=0), "level is 0"),
        (lambda llm: llm.sleep(mode="keep"), "mode is 'keep'"),
        (lambda llm: llm.wake_up(tags=["weights"]), r"tags is \['weights'\]"),
        (lambda llm: llm.reset_prefix_cache(reset_running_requests=True), "reset_running_requests is True"),
        (lambda llm: llm.reset_prefix_cache(reset_connector=True), "reset_connector is True"),
    ],
)
def test_argument_of_a_method_is_refused_by_name(call: Any, message: str, llm: LLM) -> None:
    with pytest.raises(UnsupportedError, match=rf"^{message}"):
        call(llm)


def test_method_that_is_refused_has_an_alternative(llm: LLM, tiny_model: Path) -> None:
    with pytest.raises(AttributeError, match=r"LLM has no attribute 'llm_engine': the engine runs in"):
        llm.llm_engine  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ValueError, match="pooling_task is None"):
        llm.encode("a")
    other = AsyncLLM.from_engine_args(EngineArgs(str(tiny_model)))
    with pytest.raises(AttributeError, match=r"AsyncLLM has no attribute 'add_request': use generate"):
        other.add_request  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(UnsupportedError, match=r"^stat_loggers is "):
        AsyncLLM.from_engine_args(EngineArgs(str(tiny_model)), stat_loggers=[print])
    other.shutdown()


def test_model_that_cannot_be_loaded_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(penstock.ModelLoadError, match="none"):
        LLM(str(tmp_path / "none"))


@pytest.mark.needs("sources")
def test_document_names_what_has_an_effect_or_is_refused() -> None:
    text = (ROOT / "docs" / "vllm.md").read_text()
    fields = [name for cls in (SamplingParams, BeamSearchParams, PoolingParams) for name in defaults_of(cls)]
    names = {*fields, *arg_utils.HONOURED}
    assert [name for name in sorted(names) if f"`{name}" not in text] == []


def test_structured_outputs_of_another_type_are_refused() -> None:
    with pytest.raises(penstock.InvalidRequestError, match=r"^structured_outputs=5 is not allowed"):
        SamplingParams(structured_outputs=5)  # type: ignore[arg-type]
