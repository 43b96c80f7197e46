"""The loaders of the DashInfer API: reading, serialised files, tokenizer, templates, state dicts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import penstock
from penstock.compat.dashinfer import allspark
from penstock.compat.dashinfer.allspark import (
    DashInferModel,
    HuggingFaceModel,
    ModelScope,
    ModelSerializerException,
    RoPEScaleMethod,
    TargetDevice,
    model_files,
    torch_models,
)
from penstock.compat.dashinfer.allspark.runtime_config import engine_options
from support.api.checkpoints import in_old_format, make_config, make_weights, write_checkpoint
from support.api.running import compute_logits, random_prompt
from support.parity import oracle

if TYPE_CHECKING:
    from collections.abc import Callable

PROMPT = [10, 20, 30, 40]


def logits(model: Path | str, **options: Any) -> bytes:
    options = {"dtype": "auto", "quantization": "auto", **options}
    prompt = random_prompt(40, vocabulary_size=300)
    return compute_logits(Path(model), prompt, threads=1, **options).tobytes()


def weights_path(loader: allspark.LLM) -> Path:
    config = loader.create_reference_runtime_config_builder("m", TargetDevice.CPU, [0], 2).build()
    return Path(config.weights_path)


def test_missing_model_is_a_serializer_exception_with_code_1() -> None:
    with pytest.raises(ModelSerializerException, match="no such file") as caught:
        HuggingFaceModel("/no/such/model", "m").load_model()
    assert (caught.value.code, caught.value.model_name) == (1, "m")


def test_model_without_weights_is_a_serializer_exception(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny_model / "config.json").read_bytes())
    with pytest.raises(ModelSerializerException, match="safetensors"):
        HuggingFaceModel(tmp_path, "m").load_model()


def test_calls_out_of_order_are_serializer_exceptions(tiny_model: Path, tmp_path: Path) -> None:
    loader = HuggingFaceModel(tiny_model, "m")
    calls: list[Callable[[], object]] = [
        lambda: loader.serialize_to_path(None, tmp_path),
        loader.get_model_config,
        lambda: loader.create_reference_generation_config_builder(None),
    ]
    for call in calls:
        with pytest.raises(ModelSerializerException, match="call load_model first"):
            call()
    loader.load_model()
    with pytest.raises(ModelSerializerException, match="call serialize first"):
        weights_path(loader)
    loader.free_model()
    with pytest.raises(ModelSerializerException, match="call load_model first"):
        loader.serialize_to_path(None, tmp_path)


def test_bad_arguments_are_refused_and_neutral_ones_accepted(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="user_set_data_type is 'int8'"):
        HuggingFaceModel(tiny_model, "m", user_set_data_type="int8")
    loader = HuggingFaceModel(tiny_model, "m", trust_remote_code=True).load_model(trust_remote_code=True)
    loader.load_model(None, None, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="load_format"):
        loader.load_model(load_format="pt")
    with pytest.raises(ValueError, match="model_output_dir"):
        loader.serialize(None)
    with pytest.raises(ValueError, match="model_output_dir"):
        loader.serialize(None, None)
    with pytest.raises(ValueError, match="lora_cfg"):
        loader.serialize(None, tmp_path, lora_cfg={"names": ["a"]})
    with pytest.raises(ValueError, match="customized_quant_config is given without enable_quant"):
        loader.serialize(None, tmp_path, customized_quant_config={"quant_method": "instant_quant"})
    assert loader.serialize(None, tmp_path, lora_cfg={}, customized_quant_config=None) is loader


@pytest.mark.needs("hooks")
def test_serialised_files_have_the_documented_names_and_bits(tiny_model: Path, tmp_path: Path) -> None:
    loader = HuggingFaceModel(tiny_model, "org/m").load_model().read_model_config()
    loader.serialize(None, tmp_path / "new" / "output").free_model()
    output = tmp_path / "new" / "output"
    assert {path.name for path in output.iterdir()} == {"org_m.asgraph", "org_m.asparam"}
    assert logits(output / "org_m.asparam") == logits(tiny_model)


def test_second_serialisation_is_skipped_if_both_files_exist(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def serialise(**arguments: Any) -> list[tuple[int, int]]:
        loader = HuggingFaceModel(**{"hf_model_path": tiny_model, "name": "m", **arguments}).load_model()
        loader.serialize_to_path(None, tmp_path, skip_if_exists=True)
        paths = (tmp_path / "m.asgraph", tmp_path / "m.asparam")
        return [(path.stat().st_ino, path.stat().st_mtime_ns) for path in paths]

    first = serialise()
    assert serialise() == first
    monkeypatch.chdir(tiny_model.parent)
    assert serialise(hf_model_path=tiny_model.name) == first
    other_type = serialise(user_set_data_type="bfloat16")
    assert other_type != first
    assert serialise(user_set_data_type="bfloat16") == other_type
    with (tmp_path / "m.asparam").open("ab") as file:
        file.write(b"x")
    assert serialise(user_set_data_type="bfloat16") != other_type
    (tmp_path / "m.asgraph").write_text("")
    assert serialise(user_set_data_type="bfloat16")
    assert model_files.ModelFiles.named(tmp_path, "m").read().weights == "m.asparam"


@pytest.mark.needs("hooks")
@pytest.mark.parametrize("is_renamed", [False, True])
def test_weights_of_the_same_size_and_time_are_serialised(tmp_path: Path, *, is_renamed: bool) -> None:
    def serialise() -> bytes:
        HuggingFaceModel(model, "m").load_model().serialize_to_path(None, tmp_path, skip_if_exists=True)
        return logits(tmp_path / "m.asparam")

    model = write_checkpoint(tmp_path / "model", make_config("llama"), seed=0)
    other = write_checkpoint(tmp_path / "other", make_config("llama"), seed=1) / "model.safetensors"
    first = serialise()
    weights = model / "model.safetensors"
    before = weights.stat()
    if is_renamed:
        os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
        other.replace(weights)
    else:
        weights.write_bytes(other.read_bytes())
        os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = weights.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert serialise() == logits(model) != first


@pytest.mark.needs("hooks")
def test_serialisation_is_repeated_after_the_model_changes(tmp_path: Path) -> None:
    def serialise(seed: int) -> bytes:
        model = write_checkpoint(tmp_path / "model", make_config("llama"), seed=seed)
        os.utime(model / "model.safetensors", (seed, seed))
        HuggingFaceModel(model, "m").load_model().serialize_to_path(None, tmp_path, skip_if_exists=True)
        return logits(tmp_path / "m.asparam")

    assert serialise(0) != serialise(1)


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "tokenizer_config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
    ],
)
def test_serialisation_is_repeated_after_a_file_changes(name: str, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", make_config("llama"))

    def serialise() -> int:
        loader = HuggingFaceModel(model, "m").load_model()
        loader.serialize_to_path(None, tmp_path / "output", skip_if_exists=True)
        return (tmp_path / "output" / "m.asparam").stat().st_ino

    first = serialise()
    assert serialise() == first
    file = model / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(file.read_text() + " " if file.exists() else "{{ messages }}")
    assert serialise() != first


def test_failed_serialisation_leaves_no_graph(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = HuggingFaceModel(tiny_model, "m").load_model().serialize_to_path(None, tmp_path)

    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fail)
        with pytest.raises(ModelSerializerException, match="disk full"):
            loader.serialize_to_path(None, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["m.asparam"]
    monkeypatch.setattr(penstock, "convert", fail)
    with pytest.raises(ModelSerializerException, match="disk full"):
        loader.serialize_to_path(None, tmp_path / "other")
    assert list((tmp_path / "other").iterdir()) == []


@pytest.mark.parametrize(
    ("owner", "call"), [(penstock, "convert"), (penstock, "describe"), (model_files.ModelGraph, "write")]
)
def test_failed_conversion_keeps_the_former_files(
    owner: object, call: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = HuggingFaceModel(tiny_model, "m").load_model().serialize_to_path(None, tmp_path)
    before = {path.name: path.stat().st_ino for path in tmp_path.iterdir()}

    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(owner, call, fail)
    with pytest.raises(ModelSerializerException, match="disk full"):
        loader.serialize_to_path(None, tmp_path)
    assert {path.name: path.stat().st_ino for path in tmp_path.iterdir()} == before
    model_files.ModelFiles.named(tmp_path, "m").read()


@pytest.mark.needs("hooks")
def test_files_of_overlapping_conversions_match(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = HuggingFaceModel(tiny_model, "m").load_model()
    other = HuggingFaceModel(tiny_model, "m", user_set_data_type="bfloat16").load_model()
    describe = penstock.describe

    def describe_after_the_other(path: Path) -> dict[str, Any]:
        monkeypatch.setattr(penstock, "describe", describe)
        other.serialize_to_path(None, tmp_path)
        return describe(path)

    monkeypatch.setattr(penstock, "describe", describe_after_the_other)
    loader.serialize_to_path(None, tmp_path)
    files = model_files.ModelFiles.named(tmp_path, "m")
    assert files.read().conversion.data_type == "auto"
    assert logits(files.weights) == logits(tiny_model)


def test_threads_that_serialise_a_name_all_succeed(tiny_model: Path, tmp_path: Path) -> None:
    types = ("float32", "bfloat16", "float32", "bfloat16")
    loaders = [HuggingFaceModel(tiny_model, "m", user_set_data_type=kind).load_model() for kind in types]

    def serialise(loader: HuggingFaceModel) -> None:
        for _ in range(5):
            loader.serialize_to_path(None, tmp_path)

    with ThreadPoolExecutor(len(loaders)) as pool:
        list(pool.map(serialise, loaders))
    assert {path.name for path in tmp_path.iterdir()} == {"m.asgraph", "m.asparam"}
    files = model_files.ModelFiles.named(tmp_path, "m")
    expected = HuggingFaceModel(tiny_model, "m", user_set_data_type=files.read().conversion.data_type)
    expected.load_model().serialize_to_path(None, tmp_path / "expected")
    assert (tmp_path / "expected" / "m.asparam").read_bytes() == files.weights.read_bytes()


def test_data_type_of_the_user_is_that_of_weights_and_kv_cache(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", make_config("llama", dtype="float16"))
    loader = HuggingFaceModel(model, "m", user_set_data_type="bfloat16").load_model()
    loader.serialize_to_path(None, tmp_path / "output")
    config = loader.create_reference_runtime_config_builder("m", TargetDevice.CPU, [0], 2).build()
    path, options = engine_options(config)
    with penstock.Engine(path, **options) as engine:
        assert (engine.info.dtype, engine.info.kv_cache_dtype) == ("bfloat16", "bfloat16")


def test_temporary_files_outlive_free_model(tiny_model: Path) -> None:
    loader = HuggingFaceModel(tiny_model, "m").load_model().serialize_to_memory(None).free_model()
    path = weights_path(loader)
    assert path.exists()
    loader.free_memory_serialize_file()
    assert not path.parent.exists()
    assert loader.free_memory_serialize_file() is loader


def test_serialize_follows_in_memory_serialize(tiny_model: Path) -> None:
    loader = HuggingFaceModel(tiny_model, "m", in_memory_serialize=True).load_model().serialize(None)
    assert weights_path(loader).exists()
    loader.free_memory_serialize_file()


@pytest.mark.needs("fork")
def test_temporary_files_are_deleted_at_exit_but_not_by_a_fork(tiny_model: Path) -> None:
    code = """
import os, sys
from penstock.compat.dashinfer import allspark
loader = allspark.HuggingFaceModel(sys.argv[1], "m").load_model().serialize_to_memory(None)
path = loader.create_reference_runtime_config_builder("m", "cpu", [0], 1).build().weights_path
child = os.fork()
if child == 0:
    sys.exit()
os.waitpid(child, 0)
assert os.path.exists(path)
print(path)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, tiny_model], check=True, capture_output=True, text=True, timeout=60
    )
    path = Path(done.stdout.strip())
    assert path.suffix == ".asparam"
    assert not path.parent.exists()


def test_models_are_converted_and_reloaded_without_torch(tiny_model: Path, tmp_path: Path) -> None:
    code = """
import sys
from penstock.compat.dashinfer import allspark
loader = allspark.HuggingFaceModel(sys.argv[1], "m").load_model().serialize_to_path(None, sys.argv[2])
engine = allspark.Engine()
loader = allspark.DashInferModel(sys.argv[2], "m").load_model()
engine.install_model(loader.create_reference_runtime_config_builder("m", "cpu", [0], 1).build())
loader.init_tokenizer().get_tokenizer().apply_chat_template([{"role": "user", "content": "hi"}])
assert not {"torch", "transformers", "numpy", "safetensors", "tokenizers"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code, tiny_model, tmp_path], check=True, timeout=60)


def test_file_information_has_the_versions_of_the_converter(tiny_model: Path, tmp_path: Path) -> None:
    HuggingFaceModel(tiny_model, "m").load_model().serialize_to_path(None, tmp_path)
    info = allspark.Engine().get_file_information(tmp_path / "m.asgraph", tmp_path / "m.asparam")
    version = penstock.__version__
    assert (info.create_version_graph, info.create_version_param) == (version, version)
    assert info.current_version_engine == version
    (tmp_path / "m.asparam").write_bytes(b"")
    with pytest.raises(allspark.AsError, match="ALLSPARK_IO_ERROR"):
        allspark.Engine().get_file_information(tmp_path / "m.asgraph", tmp_path / "m.asparam")


def test_asmodel_is_accepted_in_place_of_asgraph(tiny_model: Path, tmp_path: Path) -> None:
    HuggingFaceModel(tiny_model, "m").load_model().serialize_to_path(None, tmp_path)
    (tmp_path / "m.asgraph").rename(tmp_path / "m.asmodel")
    assert DashInferModel(tmp_path, "m").load_model().get_model_context_length() == 512
    path = tmp_path / "m.asmodel"
    assert allspark.Engine().get_file_information(path, tmp_path / "m.asparam").create_version_graph


def test_serialised_model_is_loaded_by_directory_and_prefix(tiny_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    loader = HuggingFaceModel(tiny_model, "m").load_model().serialize_to_path(None, tmp_path)
    loader.export_model_diconfig(tmp_path / "m.yaml")
    again = DashInferModel(tmp_path, "m", config_file_path=tmp_path / "m.yaml").load_model()
    assert again.get_model_config() == loader.get_model_config()
    config = again.create_reference_runtime_config_builder("x", TargetDevice.CPU, [0], 3).build()
    assert (config.model_name, config.engine_max_batch, config.engine_max_length) == ("x", 3, 512)
    assert engine_options(config)[0] == tmp_path / "m.asparam"
    defaults = again.create_reference_generation_config_builder(config).build()
    expected = loader.create_reference_generation_config_builder(config).build()
    assert {**defaults, "seed": 0} == {**expected, "seed": 0}
    content = {"runtime_config": {"engine_max_batch": 7}, "generation_config": {"top_k": 3}}
    third = DashInferModel(tmp_path, "m", config_content=content).load_model()
    assert third.create_reference_runtime_config_builder().build().engine_max_batch == 7
    assert third.create_reference_generation_config_builder().build()["top_k"] == 3


def test_missing_serialised_model_is_a_serializer_exception(tmp_path: Path) -> None:
    with pytest.raises(ModelSerializerException, match="ALLSPARK_IO_ERROR"):
        DashInferModel(tmp_path, "m").load_model()


def test_reference_length_is_at_most_that_of_the_model(tiny_model: Path, tmp_path: Path) -> None:
    loader = HuggingFaceModel(tiny_model, "m").load_model().serialize_to_path(None, tmp_path)

    def length(*arguments: int) -> int:
        builder = loader.create_reference_runtime_config_builder("m", TargetDevice.CPU, [0], 2, *arguments)
        return builder.build().engine_max_length

    assert (length(), length(-1), length(100), length(10_000)) == (512, 512, 100, 512)


def test_reference_generation_config_has_the_models_values(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", make_config("llama"))
    values = {"eos_token_id": [5, 6], "top_k": 7, "temperature": 0.5, "min_length": 3, "do_sample": True}
    (model / "generation_config.json").write_text(json.dumps(values))
    loader = HuggingFaceModel(model, "m").load_model()
    config = loader.create_reference_generation_config_builder(None).build()
    assert (config["top_k"], config["temperature"], config["min_length"]) == (7, 0.5, 3)
    assert config["eos_token_id"] == 5
    assert [6] in config["stop_words_ids"]
    runtime = allspark.AsModelConfig(engine_max_length=100)
    assert loader.create_reference_generation_config_builder(runtime).build()["max_length"] == 100


def test_gguf_file_is_a_model(demo_model: Path, tmp_path: Path) -> None:
    loader = HuggingFaceModel(demo_model, "demo").load_model().serialize_to_path(None, tmp_path)
    assert loader.get_model_context_length() == 8192
    tokenizer = loader.init_tokenizer().get_tokenizer()
    assert tokenizer is not None
    assert tokenizer.eos_token == "<|im_end|>"  # noqa: S105


def test_tokenizer_is_an_attribute_of_its_loader(tiny_model: Path) -> None:
    loader = HuggingFaceModel(tiny_model, "m")
    assert loader.tokenizer is None
    assert loader.init_tokenizer().tokenizer is loader.get_tokenizer() is not None


def test_tokenizer_has_the_methods_that_the_documents_call(tiny_model: Path) -> None:
    loader = HuggingFaceModel(tiny_model, "m")
    assert loader.get_tokenizer() is None
    tokenizer = loader.init_tokenizer().get_tokenizer()
    assert tokenizer is loader.init_tokenizer().get_tokenizer()
    assert tokenizer is not None
    messages = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert ids == tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert "<|im_end|>" not in tokenizer.decode(ids, skip_special_tokens=True)
    assert tokenizer.decode(np.array(ids)) == text
    assert tokenizer.decode(ids[0]) == "<|im_start|>"
    assert tokenizer.batch_decode([ids, ids]) == [text, text]
    assert tokenizer("hi") == {"input_ids": tokenizer.encode("hi"), "attention_mask": [1, 1]}
    assert tokenizer(["hi", "h"])["attention_mask"] == [[1, 1], [1]]
    assert tokenizer.eos_token_id == 258
    assert len(tokenizer) == tokenizer.vocab_size


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("return_tensors", "pt"),
        ("return_dict", True),
        ("padding", True),
        ("truncation", True),
        ("max_length", 3),
        ("return_assistant_tokens_mask", True),
        ("tokenizer_kwargs", {"padding": True}),
    ],
)
def test_tokenizer_refuses_keywords_of_tensors_by_name(name: str, value: object, tiny_model: Path) -> None:
    tokenizer = HuggingFaceModel(tiny_model, "m").init_tokenizer().get_tokenizer()
    assert tokenizer is not None
    apply: Callable[..., Any] = tokenizer.apply_chat_template
    messages = [{"role": "user", "content": "hi"}]
    encoding: list[Callable[..., Any]] = [tokenizer, tokenizer.encode]
    for call, argument in ((apply, messages), *((call, "hi") for call in encoding)):
        with pytest.raises(ValueError, match=f"{name} is .* None or False"):
            call(argument, **{name: value})
    assert tokenizer("hi", return_tensors=None, padding=False) == tokenizer("hi")
    template = f"{{{{ {name} is defined }}}}"
    for harmless in (None, False):
        assert apply(messages, **{name: harmless}) == apply(messages)
    assert apply(messages, tokenize=False, chat_template=template, **{name: value}) == "False"


def test_decoding_refuses_to_clean_up_spaces(tiny_model: Path) -> None:
    tokenizer = HuggingFaceModel(tiny_model, "m").init_tokenizer().get_tokenizer()
    assert tokenizer is not None
    ids = tokenizer.encode("hi")
    for flag in (None, False):
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=flag) == tokenizer.decode(ids)
        assert tokenizer.batch_decode([ids], clean_up_tokenization_spaces=flag) == [tokenizer.decode(ids)]
    for call in (tokenizer.decode, tokenizer.batch_decode):
        with pytest.raises(ValueError, match="clean_up_tokenization_spaces is True"):
            call([ids[0]], clean_up_tokenization_spaces=True)


def test_chatml_template_has_the_default_system_prompt() -> None:
    assert allspark.PromptTemplate.apply_chatml_template("hi") == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant \n"
    )


@pytest.mark.parametrize("form", ["rope_parameters", "rope_scaling"])
def test_rope_scaling_becomes_an_override_of_the_configuration(form: str, tmp_path: Path) -> None:
    config = make_config("llama")
    config = config if form in config else in_old_format(config)
    loader = HuggingFaceModel(write_checkpoint(tmp_path / "model", config), "m").load_model()

    def generate(method: RoPEScaleMethod, parameters: dict[str, Any]) -> object:
        loader.set_rope_scale_method(method, parameters).serialize_to_path(None, tmp_path)
        runtime = loader.create_reference_runtime_config_builder("m", TargetDevice.CPU, [0], 2).build()
        path, options = engine_options(runtime)
        assert form in (options["config_overrides"] or {})
        with penstock.Engine(path, **options) as engine:
            return engine.blocking.generate(PROMPT, max_tokens=3, logprobs=True, ignore_eos=True).logprobs

    plain = generate(RoPEScaleMethod.NO_SCALE, {})
    parameters = {"factor": 2.0, "original_max_position_embeddings": 256}
    assert generate(RoPEScaleMethod.YaRN, parameters) != plain
    assert generate(RoPEScaleMethod.NTK, {"factor": 2.0})


def test_modelscope_model_is_downloaded_by_its_package(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package: Any = ModuleType("modelscope")
    package.snapshot_download = lambda model_id, revision: str(tiny_model)  # noqa: ARG005
    monkeypatch.setitem(sys.modules, "modelscope", package)
    loader = ModelScope("org/model", "m").load_model()
    assert loader.get_model_context_length() == 512

    def fail(*_: object) -> None:
        raise RuntimeError("no such model")

    package.snapshot_download = fail
    with pytest.raises(ModelSerializerException, match="no such model"):
        ModelScope("org/model", "m").load_model()


def test_id_that_the_hub_lacks_is_looked_up_on_modelscope(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_found(*_: object, **__: object) -> str:
        kind = hub.errors.RepositoryNotFoundError
        raise kind.__new__(kind, "no repository")  # its constructor wants a response of the HTTP library

    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub.HfApi, "model_info", not_found)
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(ModelSerializerException, match="not a local path and not found on the hub"):
        HuggingFaceModel("org/model", "m").load_model()
    package: Any = ModuleType("modelscope")
    package.snapshot_download = lambda model_id, revision: str(tiny_model)  # noqa: ARG005
    monkeypatch.setitem(sys.modules, "modelscope", package)
    loader = HuggingFaceModel("org/model", "m").load_model()
    assert loader.get_model_context_length() == 512
    assert HuggingFaceModel("org/model", "m").init_tokenizer().tokenizer is not None
    package.snapshot_download = not_found
    with pytest.raises(ModelSerializerException, match=r"not found on the hub.*; download from ModelScope"):
        HuggingFaceModel("org/model", "m").load_model()


def test_modelscope_without_its_package_names_the_alternatives(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(ModelSerializerException, match="pip install modelscope"):
        ModelScope("org/model", "m").load_model()
    assert ModelScope(tiny_model, "m").load_model().get_model_context_length() == 512


@pytest.mark.needs("hooks")
def test_state_dict_of_arrays_has_the_bits_of_the_checkpoint(tmp_path: Path) -> None:
    config = make_config("llama")
    model = write_checkpoint(tmp_path / "model", config)
    settings = SimpleNamespace(to_dict=lambda: config)
    engine = allspark.Engine()
    engine.serialize_model_from_torch(
        "m", "LLaMA_v2", dict(make_weights(config, 0)), settings, tmp_path / "output"
    )
    assert logits(tmp_path / "output" / "m.asparam") == logits(model)
    graph, weights = tmp_path / "x.asgraph", tmp_path / "y" / "z.asparam"
    quantization = {"quant_method": "instant_quant", "weight_format": "int8"}
    engine.serialize_model_from_torch(
        "m",
        "",
        dict(make_weights(config, 0)),
        config,
        as_model_path=graph,
        as_weight_path=weights,
        do_dynamic_quantize_convert=True,
        quant_config=quantization,
    )
    assert engine.get_file_information(graph, weights).create_version_param


@pytest.mark.needs("hooks")
def test_logn_attention_of_a_state_dict_is_in_its_configuration(tmp_path: Path) -> None:
    config = make_config("llama")
    expected = write_checkpoint(tmp_path / "model", config | {"use_logn_attn": True, "seq_length": 2})
    torch_models.serialize_model_from_torch(
        "m",
        "",
        dict(make_weights(config, 0)),
        config,
        tmp_path,
        use_logn_attn=True,
        model_sequence_length=2,
    )
    assert logits(tmp_path / "m.asparam") == logits(expected)
    assert logits(expected) != logits(write_checkpoint(tmp_path / "plain", config))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"save_dir": None}, "save_dir"),
        ({"derive_type": "embedding"}, "derive_type"),
        ({"data_type": "int8"}, "data_type"),
        ({"use_dynamic_ntk": True}, "use_dynamic_ntk"),
        ({"torch_model": 5}, "torch_model"),
        ({"torch_model": {}}, "torch_model"),
        ({"model_config": None}, "model_config"),
        ({"quant_config": {"quant_method": "gptq"}}, "do_dynamic_quantize_convert is False and quant_config"),
        ({"do_dynamic_quantize_convert": True}, "do_dynamic_quantize_convert is True and quant_config"),
        ({"as_model_path": "x.asgraph"}, "as_weight_path is None"),
        ({"as_weight_path": "x.asparam"}, "as_model_path is None"),
    ],
)
def test_bad_argument_of_a_state_dict_is_a_value_error(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    arguments: dict[str, Any] = {
        "model_name": "m",
        "model_type": "",
        "torch_model": {"x": np.zeros(1)},
        "model_config": {"a": 1},
        "save_dir": tmp_path,
    }
    with pytest.raises(ValueError, match=message):
        torch_models.serialize_model_from_torch(**{**arguments, **changes})


def test_state_dict_that_is_no_model_is_a_serializer_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serialise = torch_models.serialize_model_from_torch
    with pytest.raises(ModelSerializerException):
        serialise("m", "", {"x": np.zeros(1)}, make_config("llama"), tmp_path)
    assert os.listdir(tmp_path) == []  # noqa: PTH208
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    with pytest.raises(ModelSerializerException, match="pip install"):
        serialise("m", "", {"x": np.zeros(1)}, make_config("llama"), tmp_path)


@pytest.mark.needs("hooks")
@pytest.mark.torch
def test_torch_module_has_the_bits_of_its_checkpoint(tmp_path: Path) -> None:
    config = make_config("llama", tie_word_embeddings=True)
    model = write_checkpoint(tmp_path / "model", config)
    module = oracle.load_model(model)
    serialise = allspark.Engine().serialize_model_from_torch
    serialise("module", "LLaMA_v2", module, module.config, tmp_path)
    serialise("tensors", "LLaMA_v2", module.state_dict(), config, tmp_path)
    expected = logits(model)
    assert logits(tmp_path / "module.asparam") == expected
    assert logits(tmp_path / "tensors.asparam") == expected


def greedy_ids(folder: Path, inputs: Any) -> list[int]:
    """Checks the text of 20 greedy tokens of a model in `folder`, which are returned."""
    loader = HuggingFaceModel(folder / "model", "m").load_model().serialize_to_path(None, folder)
    config = loader.create_reference_runtime_config_builder("m", TargetDevice.CPU, [0], 2).build()
    engine = allspark.Engine()
    engine.install_model(config)
    engine.start_model("m")
    tokens = {"top_k": 1, "early_stopping": False, "max_length": 24}
    _, handle, queue = engine.start_request_ids("m", loader, inputs, tokens)
    assert engine.sync_request("m", handle) is allspark.AsStatus.ALLSPARK_SUCCESS
    assert queue is not None
    elements = queue.Get()
    assert elements is not None
    ids = elements.ids_from_generate
    tokenizer = loader.init_tokenizer().get_tokenizer()
    assert tokenizer is not None
    assert tokenizer.decode(np.array(ids)) == tokenizer.decode(ids)
    return ids


@pytest.mark.oracle
def test_greedy_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", make_config("qwen2"))
    theirs = oracle.load_oracle(model).greedy(PROMPT, 20)
    assert theirs.is_unambiguous
    assert greedy_ids(tmp_path, PROMPT) == theirs.token_ids


@pytest.mark.torch
def test_prompt_can_be_a_tensor_of_torch(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", make_config("qwen2"))
    torch = oracle.import_torch()
    ids = greedy_ids(tmp_path, torch.tensor(PROMPT))
    assert ids == greedy_ids(tmp_path, PROMPT)
    tokenizer = HuggingFaceModel(tmp_path / "model", "m").init_tokenizer().get_tokenizer()
    assert tokenizer is not None
    assert tokenizer.decode(torch.tensor(ids)) == tokenizer.decode(ids)
