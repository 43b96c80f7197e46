"""Requests of the DashInfer API: prompts, generation parameters, and the statuses of refusals."""

from __future__ import annotations

import array
import ctypes
import json
import math
import sys
from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import jsonschema
import numpy as np
import pytest

from penstock.compat.dashinfer.allspark.engine import Engine
from penstock.compat.dashinfer.allspark.enums import AsStatus
from penstock.compat.dashinfer.allspark.errors import AsError
from penstock.compat.dashinfer.allspark.generation_config import ASGenerationConfigBuilder
from penstock.compat.dashinfer.allspark.model_loader import HuggingFaceModel
from penstock.compat.dashinfer.allspark.multimedia import MultiMediaInfo
from support.api.checkpoints import END_OF_TURN, make_config, write_checkpoint
from support.compat.dashinfer import GREEDY, NAME, PROMPT, SUCCESS, generate, install, native, refusal, start

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

PARAM_ERROR = AsStatus.ALLSPARK_PARAM_ERROR
EXCEED_LIMIT = AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR
#: Sampling with a fixed seed.
SAMPLED: Mapping[str, Any] = {"early_stopping": False, "max_length": 44, "seed": 1}


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    engine = Engine()
    install(engine, tiny_model)
    yield engine
    engine.stop_model(NAME)
    assert engine.release_model(NAME) is SUCCESS


def params_of(engine: Engine, config: Mapping[str, Any]) -> Any:
    """The sampling parameters in effect for a generation configuration."""
    handle, _queue = start(engine, config=config)
    params = handle._request.params
    assert engine.release_request(NAME, handle) is SUCCESS
    return params


# ---- prompts


@pytest.mark.parametrize(
    "ids",
    [
        pytest.param(tuple(PROMPT), id="tuple"),
        pytest.param([np.int64(value) for value in PROMPT], id="list of numpy integers"),
        pytest.param(np.array(PROMPT), id="int64"),
        pytest.param(np.array(PROMPT, dtype=np.int32), id="int32"),
        pytest.param(np.array([PROMPT]), id="one row"),
        pytest.param(np.repeat(PROMPT, 3)[::3], id="strided"),
        pytest.param(array.array("q", PROMPT), id="buffer"),
    ],
)
def test_ids_of_every_kind_give_the_result_of_a_list(engine: Engine, ids: object) -> None:
    assert generate(engine, ids) == generate(engine, list(PROMPT))


class Exporter:
    """A tensor that has only `__dlpack__`, as torch's."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def __dlpack__(self, **options: object) -> object:
        return self.values.__dlpack__(**options)


@pytest.mark.parametrize("is_versioned", [False, True])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_dlpack_capsule_gives_the_result_of_a_list(engine: Engine, dtype: Any, *, is_versioned: bool) -> None:
    values = np.repeat(np.array([PROMPT], dtype), 2, axis=1)[:, ::2]
    capsule = values.__dlpack__(max_version=(1, 0)) if is_versioned else values.__dlpack__()
    status, handle, queue = engine.start_request(NAME, {"input_ids": capsule}, GREEDY)
    assert status is SUCCESS
    assert handle is not None
    assert queue is not None
    engine.sync_request(NAME, handle)
    elements = queue.Get()
    assert elements is not None
    assert elements.ids_from_generate == generate(engine) == generate(engine, Exporter(values))


set_capsule_name = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_SetName", ctypes.pythonapi)
)


def test_one_capsule_is_the_prompt_of_many_requests(engine: Engine) -> None:
    values = np.array([PROMPT])
    num_references = sys.getrefcount(values)
    inputs = {"input_ids": values.__dlpack__()}
    queues = []
    for _ in range(3):
        status, _handle, queue = engine.start_request(NAME, inputs, GREEDY)
        assert status is SUCCESS
        assert queue is not None
        queues.append(queue)
    assert engine.sync_request(NAME, None) is SUCCESS
    for queue in queues:
        elements = queue.Get()
        assert elements is not None
        assert elements.ids_from_generate == generate(engine)
    del inputs
    assert sys.getrefcount(values) == num_references


def test_capsule_that_another_library_has_taken_is_refused(engine: Engine) -> None:
    capsule = np.array(PROMPT).__dlpack__()
    set_capsule_name(capsule, b"used_dltensor")
    assert engine.start_request(NAME, {"input_ids": capsule}, GREEDY)[0] is PARAM_ERROR
    set_capsule_name(capsule, b"dltensor")  # or the tensor is not freed


@pytest.mark.parametrize(
    "ids",
    [
        [[1, 2]],
        ["1"],
        [1.0],
        "1",
        b"12",
        7,
        None,
        np.array([1.0]),
        np.zeros((2, 2), int),
        np.array(1),
        {1: 2},
    ],
    ids=repr,
)
def test_ids_of_a_wrong_kind_raise_value_error(engine: Engine, ids: object) -> None:
    with pytest.raises(ValueError, match=r"input_ids|array"):
        engine.start_request_ids(NAME, None, ids, GREEDY)
    assert engine.start_request(NAME, {"input_ids": ids}, GREEDY) == (PARAM_ERROR, None, None)


class Managed(ctypes.Structure):
    """DLPack's `DLManagedTensor`, without its version."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


VALUES = (ctypes.c_int64 * 4)(*PROMPT)
VALID: Mapping[str, Any] = {
    "data": ctypes.addressof(VALUES),
    "device_type": 1,
    "ndim": 1,
    "code": 0,
    "bits": 64,
    "lanes": 1,
    "shape": (ctypes.c_int64 * 4)(4, 1, 1, 1),
}
make_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"data": ctypes.addressof(VALUES) - 8, "byte_offset": 8}, None),
        ({"device_type": 2}, "the tensor is on a device of type 2"),
        ({"code": 2}, "data type of the tensor has code 2, 64 bits, 1 lanes"),
        ({"bits": 16}, "data type of the tensor has code 0, 16 bits"),
        ({"lanes": 4}, "64 bits, 4 lanes"),
        ({"ndim": 0}, "the tensor has 0 dimensions"),
        ({"ndim": -1}, "the tensor has -1 dimensions"),
        ({"ndim": 3}, "the tensor has 3 dimensions"),
        ({"ndim": 2}, "the shape of the array is"),
        ({"shape": (ctypes.c_int64 * 1)(-4)}, "the shape of the array is"),
        ({"shape": (ctypes.c_int64 * 1)(2**62)}, "it may have at most 2147483647 values"),
        ({"shape": None}, "the tensor has dimensions but no shape"),
        ({"byte_offset": 2**64 - 1}, "input_ids must be a list of token ids, or an array"),
        ({"data": None}, "the tensor has values but no data"),
    ],
)
def test_capsule_is_checked_and_stays_as_it_is(
    engine: Engine, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], reason: str | None
) -> None:
    deleted: list[int] = []
    deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(deleted.append)
    managed = Managed(**{**VALID, **changes}, deleter=ctypes.cast(deleter, ctypes.c_void_p))
    capsule = make_capsule(ctypes.addressof(managed), b"dltensor", None)
    for _ in range(2):
        caplog.clear()
        status, _handle, _queue = engine.start_request(NAME, {"input_ids": capsule}, GREEDY)
        assert status is (PARAM_ERROR if reason else SUCCESS)
        assert reason is None or reason in caplog.text
    assert deleted == []


def test_capsule_of_another_kind_or_version_is_refused(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    class Versioned(ctypes.Structure):
        _fields_ = (("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("rest", ctypes.c_uint64 * 16))

    versioned = Versioned(major=2, minor=5)
    for name, address in ((b"other", 8), (b"dltensor_versioned", ctypes.addressof(versioned))):
        capsule = make_capsule(address, name, None)
        assert engine.start_request(NAME, {"input_ids": capsule}, GREEDY)[0] is PARAM_ERROR
    assert "the DLPack version of the tensor is 2.5; it must be 1.x" in caplog.text


@pytest.mark.parametrize("error", [RuntimeError, BufferError, OverflowError, NotImplementedError])
def test_tensor_that_is_not_exported_is_refused(engine: Engine, error: type[Exception]) -> None:
    class Unreadable:
        def __dlpack__(self, **_options: object) -> object:
            raise error("no export")

    assert engine.start_request(NAME, {"input_ids": Unreadable()}, GREEDY) == (PARAM_ERROR, None, None)
    with pytest.raises(ValueError, match=r"the array cannot be exported: .*: no export"):
        engine.start_request_ids(NAME, None, Unreadable(), GREEDY)


@pytest.mark.parametrize("inputs", [None, {}, {"ids": [1]}, [1, 2]])
def test_inputs_without_ids_are_refused(engine: Engine, inputs: Any) -> None:
    assert engine.start_request(NAME, inputs, GREEDY) == (PARAM_ERROR, None, None)


@pytest.mark.parametrize("ids", [[-1], [512], [2**32], [2**80]])
def test_ids_outside_the_vocabulary_are_refused(engine: Engine, ids: list[int]) -> None:
    assert refusal(engine, GREEDY, ids) is PARAM_ERROR


def test_unknown_model_is_refused_without_handle_and_queue(engine: Engine) -> None:
    for name in ("other", "", None, [1]):
        assert engine.start_request_ids(name, None, [1], GREEDY) == (PARAM_ERROR, None, None)  # type: ignore[arg-type]


def test_empty_prompt_exceeds_the_limit(engine: Engine) -> None:
    assert refusal(engine, GREEDY, []) is EXCEED_LIMIT
    assert refusal(engine, GREEDY, np.zeros(0, int)) is EXCEED_LIMIT


def test_prompt_without_room_for_two_tokens_exceeds_the_limit(engine: Engine) -> None:
    assert refusal(engine, {}, [1] * 511) is EXCEED_LIMIT
    assert len(generate(engine, [1] * 510, {**SAMPLED, "max_length": 512})) == 2


def test_long_text_exceeds_the_limit_and_is_not_tokenised(
    engine: Engine, caplog: pytest.LogCaptureFixture, tiny_model: Path
) -> None:
    loader = HuggingFaceModel(tiny_model, NAME).load_model()
    status, handle, _ = engine.start_request_text(NAME, loader, "ab " * 1_000_000, GREEDY)
    assert (status, handle) == (EXCEED_LIMIT, None)
    assert caplog.messages[-1].endswith("the prompt has more than 1024 tokens; engine_max_length is 512")


@pytest.mark.parametrize("length", [513, 10**5000], ids=["513", "5001 digits"])
def test_max_length_above_that_of_the_engine_exceeds_the_limit(engine: Engine, length: int) -> None:
    assert refusal(engine, {"max_length": length}) is EXCEED_LIMIT


class Loader:
    """A loader with the tokenizer of the engine."""

    def __init__(self, engine: Engine) -> None:
        self.encode = native(engine).encode

    def init_tokenizer(self) -> Loader:
        """The loader."""
        return self

    def get_tokenizer(self) -> Loader:
        """The tokenizer, which is this object, too."""
        return self


def test_text_is_encoded_by_the_tokenizer_of_the_loader(engine: Engine) -> None:
    text = "<|im_start|>user\nhello<|im_end|>\n"
    ids = native(engine).encode(text)
    for given in (text, [text]):
        status, handle, queue = engine.start_request_text(NAME, Loader(engine), given, GREEDY)
        assert status is SUCCESS
        assert handle is not None
        assert queue is not None
        assert handle._request.prompt_token_ids == tuple(ids)
        engine.release_request(NAME, handle)


@pytest.mark.parametrize("text", [["a", "b"], [], 7, None, b"text", "\ud800"])
def test_text_of_a_wrong_kind_is_refused(engine: Engine, text: Any) -> None:
    assert engine.start_request_text(NAME, Loader(engine), text, GREEDY) == (PARAM_ERROR, None, None)


def test_text_without_a_loader_is_refused(engine: Engine) -> None:
    assert engine.start_request_text(NAME, None, "text", GREEDY) == (PARAM_ERROR, None, None)
    assert engine.start_request_text("other", None, "text", GREEDY) == (PARAM_ERROR, None, None)


def test_text_is_refused_if_the_tokenizer_cannot_be_read(engine: Engine, tmp_path: Path) -> None:
    loader = HuggingFaceModel(str(tmp_path / "missing"), "missing")
    status = AsStatus.ALLSPARK_IO_ERROR
    assert engine.start_request_text(NAME, loader, "text", GREEDY) == (status, None, None)


def test_defect_of_a_tokenizer_is_not_hidden(engine: Engine) -> None:
    class Defective(Loader):
        def get_tokenizer(self) -> Any:
            raise AttributeError("defect")

    with pytest.raises(AttributeError, match="defect"):
        engine.start_request_text(NAME, Defective(engine), "text", GREEDY)


# ---- generation parameters


@pytest.mark.parametrize(
    "config",
    [
        {"repetition_penalty": 2.5},
        {"repetition_penalty": 0},
        {"presence_penalty": -3},
        {"frequency_penalty": 3},
        {"top_k": -1},
        pytest.param({"top_k": -(10**5000)}, id="top_k of 5001 digits"),
        pytest.param({"seed": 10**5000}, id="seed of 5001 digits"),
        pytest.param({"top_k": 10**5000}, id="top_k of 5001 digits above 0"),
        pytest.param({"eos_token_id": 10**5000}, id="eos_token_id of 5001 digits"),
        {"top_k": 1.5},
        {"top_k": True},
        {"top_p": -0.1},
        {"top_p": 1.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": "hot"},
        {"temperature": 2.5},
        {"max_length": 0},
        {"max_length": "20"},
        {"min_length": -1},
        {"seed": 2**64},
        {"seed": 1.0},
        {"num_beams": 2},
        {"num_return_sequences": 2},
        {"length_penalty": 2.0},
        {"do_sample": "yes"},
        {"early_stopping": np.zeros(3)},
        {"num_beams": np.zeros(3)},
        {"logprobs": True, "top_logprobs": 11},
        {"logprobs": True, "top_logprobs": -1},
        {"eos_token_id": "end"},
        {"eos_token_id": [1.0]},
        {"stop_words_ids": [1, 2]},
        {"stop_words_ids": [[]]},
        {"stop_words_ids": 7},
        {"bad_words_ids": [["word"]]},
        {"no_repeat_ngram_size": -1},
        {"mm_info": MultiMediaInfo()},
        {"response_format": "json"},
        {"response_format": {"type": "xml"}},
        {"response_format": {"type": "json_object", "schema": "{}"}},
        {"response_format": {"json_schema": "{}"}},
        {"response_format": {"type": "json_object", "json_schema": "{"}},
        {"response_format": {"type": "json_object", "json_schema": "[1]"}},
    ],
)
def test_invalid_parameter_is_refused_with_param_error(engine: Engine, config: dict[str, Any]) -> None:
    assert refusal(engine, config) is PARAM_ERROR


def test_refusal_is_logged_with_field_value_and_limit(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    refusal(engine, {"top_p": math.nan})
    assert caplog.messages == ["ALLSPARK_PARAM_ERROR: top_p is nan; it must be a number from 0 to 1"]


def test_config_of_a_wrong_type_is_refused(engine: Engine) -> None:
    for config in (7, [("top_k", 1)], "top_k"):
        assert refusal(engine, config) is PARAM_ERROR  # type: ignore[arg-type]


def test_unknown_parameter_has_no_effect_and_is_logged(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    assert generate(engine, config={**GREEDY, "top_z": 3, "vocab": {}, "uuid": "a"}) == generate(engine)
    assert caplog.messages == ["the generation parameter 'top_z' is unknown and has no effect"]


def test_top_logprobs_without_logprobs_are_accepted(engine: Engine) -> None:
    assert generate(engine, config={**GREEDY, "top_logprobs": 11}) == generate(engine)


def test_unset_parameters_are_never_those_of_the_model(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, make_config("llama"))
    of_model = {"temperature": 0.5, "top_k": 3, "top_p": 0.5, "repetition_penalty": 1.5, "max_new_tokens": 7}
    of_model |= {"eos_token_id": 7, "min_p": 0.5, "typical_p": 0.5, "no_repeat_ngram_size": 3}
    of_model |= {"epsilon_cutoff": 0.5}
    (model / "generation_config.json").write_text(json.dumps(of_model))
    engine = Engine()
    install(engine, model)
    params = params_of(engine, {})
    assert (params.temperature, params.top_k, params.top_p, params.min_p, params.typical_p) == (
        1,
        50,
        1,
        0,
        1,
    )
    assert (params.epsilon_cutoff, params.repetition_penalty, params.no_repeat_ngram_size) == (0, 1, 0)
    assert (params.max_tokens, params.eos_token_ids) == (20 - len(PROMPT), (102,))
    assert not params.logprobs


def test_temperature_near_zero_and_no_sampling_are_greedy(engine: Engine) -> None:
    greedy = generate(engine)
    assert generate(engine, config={**SAMPLED, "temperature": 1e-6}) == greedy
    assert generate(engine, config={**SAMPLED, "do_sample": False}) == greedy
    assert generate(engine, config=SAMPLED) != greedy


def test_top_k_zero_samples_from_the_whole_vocabulary(engine: Engine) -> None:
    params = params_of(engine, {"top_k": 0, "top_p": 0.5})
    assert (params.top_k, params.top_p) == (0, 0.5)
    assert params_of(engine, {"top_p": 0}).top_p == 1.0
    config = {**SAMPLED, "top_k": 0, "temperature": 2.0}
    assert generate(engine, config=config) != generate(engine, config={**config, "top_k": 2})


def test_same_seed_gives_the_same_ids_and_another_does_not(engine: Engine) -> None:
    ids = generate(engine, config=SAMPLED)
    assert generate(engine, config=SAMPLED) == ids
    assert generate(engine, config={**SAMPLED, "seed": 2}) != ids
    assert params_of(engine, {"seed": -1}).seed == 2**64 - 1


def test_seeds_of_builders_and_of_unset_seeds_differ(engine: Engine) -> None:
    builders = {ASGenerationConfigBuilder().build()["seed"] for _ in range(4)}
    assert len(builders) == 4
    assert len({params_of(engine, {}).seed for _ in range(4)}) == 4


def test_max_length_one_above_the_prompt_gives_one_token(engine: Engine) -> None:
    for max_length in (len(PROMPT) + 1, len(PROMPT), 1):
        assert len(generate(engine, config={**GREEDY, "max_length": max_length})) == 1
    assert len(generate(engine)) == 44 - len(PROMPT)


def test_end_token_is_the_last_id_and_early_stopping_decides(engine: Engine) -> None:
    ids = generate(engine)
    eos = ids[5]
    until = ids.index(eos) + 1
    config = {**GREEDY, "eos_token_id": eos}
    assert generate(engine, config={**config, "early_stopping": True}) == ids[:until]
    assert generate(engine, config=config) == ids


def test_each_end_token_of_a_hugging_face_list_ends(engine: Engine) -> None:
    ids = generate(engine)
    for eos in ([ids[3], 500], [500, ids[3]]):
        builder = ASGenerationConfigBuilder({"eos_token_id": eos, "top_k": 1}).max_length(44)
        assert generate(engine, config=builder) == ids[: ids.index(ids[3]) + 1]  # type: ignore[arg-type]
        assert builder.gen_cfg["eos_token_id"] == eos[0]


def test_stop_words_end_the_output_and_are_part_of_it(engine: Engine) -> None:
    ids = generate(engine)
    assert generate(engine, config={**GREEDY, "stop_words_ids": [ids[4:6]]}) == ids[:6]
    assert (
        generate(engine, config={**GREEDY, "stop_words_ids": [[511], [ids[2]]]})
        == ids[: ids.index(ids[2]) + 1]
    )
    # The end of the prompt does not count.
    assert generate(engine, config={**GREEDY, "stop_words_ids": [[PROMPT[-1], ids[0]]]}) == ids


def test_end_token_is_not_generated_below_min_length(engine: Engine) -> None:
    ids = generate(engine)
    config = {**GREEDY, "early_stopping": True, "eos_token_id": ids[3], "min_length": len(PROMPT) + 20}
    longer = generate(engine, config=config)
    assert len(longer) >= 20
    assert ids[3] not in longer[:20]
    assert len(generate(engine, config={**config, "min_length": 1000})) == 44 - len(PROMPT)


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty"])
def test_penalty_lowers_repetition_and_ignores_the_prompt(engine: Engine, penalty: str) -> None:
    loop = [*generate(engine), *PROMPT]
    config = {**GREEDY, "max_length": 300, "top_k": 50, "seed": 1, "temperature": 0.5}
    plain, penalised = (generate(engine, loop, {**config, penalty: value}) for value in (0, 2))
    assert len(Counter(penalised)) > len(Counter(plain))
    only = {**GREEDY, "max_length": len(loop) + 1, penalty: 2}
    assert generate(engine, loop, only) == generate(engine, loop, {**only, penalty: 0})


def test_suppressed_repetition_counts_the_output_only(engine: Engine) -> None:
    params = params_of(engine, {"suppress_repetition_in_generation": True, "repetition_penalty": 1.5})
    assert (params.repetition_penalty, params.repetition_penalty_scope) == (1.5, "output")
    assert params_of(engine, {"repetition_penalty": 1.5}).repetition_penalty_scope == "all"


def test_bad_words_are_not_generated(engine: Engine) -> None:
    ids = generate(engine)
    assert generate(engine, config={**GREEDY, "bad_words_ids": [ids[:1]]})[0] != ids[0]
    assert generate(engine, config={**GREEDY, "bad_words_ids": [ids[1:3]]})[:3] != ids[:3]


def test_no_ngram_occurs_twice(engine: Engine) -> None:
    ids = [*PROMPT, *generate(engine, config={**GREEDY, "no_repeat_ngram_size": 1})]
    assert len(set(ids)) == len(ids)


def test_multimedia_content_is_refused_by_name() -> None:
    info = MultiMediaInfo()
    info.set_multimedia_type(1)
    with pytest.raises(
        AsError, match=r"^ALLSPARK_PARAM_ERROR: multimedia content '151646': .* not supported"
    ):
        info.add_multimedia_content("151646", [])


# ---- structured output

#: A schema with short outputs.
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["a", "b"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 9},
        "is_alive": {"type": "boolean"},
        "tags": {"type": "array", "items": {"enum": ["x"]}, "maxItems": 2},
        "note": {"type": "string", "maxLength": 4},
    },
    "required": ["name", "age", "is_alive", "tags", "note"],
}
GUIDED: Mapping[str, Any] = {"top_k": 1, "max_length": 400, "eos_token_id": END_OF_TURN}


@pytest.mark.parametrize("schema", [SCHEMA, json.dumps(SCHEMA)], ids=["mapping", "text"])
def test_output_matches_the_json_schema(engine: Engine, schema: object) -> None:
    response_format = {"type": "json_object", "json_schema": schema}
    ids = generate(engine, config={**GUIDED, "response_format": response_format})
    jsonschema.validate(json.loads(native(engine).decode(ids)), SCHEMA)


def test_json_object_without_a_schema_parses_as_json(engine: Engine) -> None:
    # Biased towards the closing bracket: the model is random.
    config = {**GUIDED, "response_format": {"type": "json_object"}, "seed": 4, "top_k": 0, "temperature": 2.0}
    for seed in range(20):
        text = native(engine).decode(generate(engine, config={**config, "seed": seed}))
        try:
            value = json.loads(text)
        except ValueError:
            continue  # it reached max_length
        assert isinstance(value, dict)
        return
    pytest.fail("no output ended")


def test_guided_request_leaves_the_others_unchanged(engine: Engine) -> None:
    alone = generate(engine, config=SAMPLED)
    response_format = {"type": "json_object", "json_schema": SCHEMA}
    guided = [start(engine, config={**GUIDED, "response_format": response_format}) for _ in range(3)]
    assert generate(engine, config=SAMPLED) == alone
    for handle, _queue in guided:
        assert engine.sync_request(NAME, handle) is SUCCESS
        engine.release_request(NAME, handle)


@pytest.mark.parametrize("value", [{}, {"type": "text"}, None])
def test_text_format_is_accepted(engine: Engine, value: object) -> None:
    assert generate(engine, config={**GREEDY, "response_format": value}) == generate(engine)


# ---- the builder


def test_builder_chains_setters_of_every_parameter() -> None:
    builder = ASGenerationConfigBuilder(seed=7, eos_token_id=2)
    info = MultiMediaInfo()
    config = (
        builder.do_sample()
        .early_stopping(flag=False)
        .max_length(512)
        .min_length(3)
        .temperature(0.7)
        .top_k(50)
        .top_p(0.9)
        .eos_token_id(3)
        .stop_words_ids([[1]])
        .bad_words_ids([[2]])
        .no_repeat_ngram_size(4)
        .repetition_penalty(1.1)
        .presence_penalty(0.1)
        .frequency_penalty(0.2)
        .suppress_repetition_in_generation()
        .length_penalty(1.0)
        .log_probs(enable=True, top_n=3)
        .lora_name("")
        .with_mm_info(info)
        .response_format({"type": "text"})
        .update({"uuid": "a"})
        .build()
    )
    assert config == {
        "seed": 7,
        "eos_token_id": 3,
        "do_sample": True,
        "early_stopping": False,
        "max_length": 512,
        "min_length": 3,
        "temperature": 0.7,
        "top_k": 50,
        "top_p": 0.9,
        "stop_words_ids": [[1]],
        "bad_words_ids": [[2]],
        "no_repeat_ngram_size": 4,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "suppress_repetition_in_generation": True,
        "length_penalty": 1.0,
        "logprobs": True,
        "top_logprobs": 3,
        "lora_name": "",
        "mm_info": info,
        "response_format": {"type": "text"},
        "uuid": "a",
    }
    assert builder.seed(8).build()["seed"] == 8
    assert config["seed"] == 7  # a copy


@pytest.mark.parametrize("kind", [dict, SimpleNamespace])
def test_builder_reads_a_hugging_face_configuration(kind: Any) -> None:
    values: dict[str, Any] = {
        "top_k": 20,
        "top_p": 0.8,
        "temperature": 0.7,
        "repetition_penalty": 1.05,
        "do_sample": False,
    }
    values |= {"early_stopping": False, "eos_token_id": 5, "max_length": 20, "min_length": None}
    config = ASGenerationConfigBuilder(kind(**values), seed=1).build()
    assert config == {
        "seed": 1,
        "eos_token_id": 5,
        "top_k": 20,
        "top_p": 0.8,
        "temperature": 0.7,
        "repetition_penalty": 1.05,
        "do_sample": True,
        "early_stopping": True,
    }


def test_builder_refuses_several_sequences_and_wrong_types() -> None:
    with pytest.raises(ValueError, match="num_return_sequences is 2; it must be 1"):
        ASGenerationConfigBuilder({"num_return_sequences": 2})
    with pytest.raises(TypeError, match="expected a mapping"):
        ASGenerationConfigBuilder().update(7)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="eos_token_id is an empty list"):
        ASGenerationConfigBuilder({"eos_token_id": []})
