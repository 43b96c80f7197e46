"""Converted models: the bits of the original, from a directory, an archive and bytes; memory; failures."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

import penstock
from penstock.cli import main
from support.api.checkpoints import make_config, write_checkpoint
from support.api.engines import PROMPT, bits_of, make_engine
from support.api.ggufs import TYPES, write_gguf
from support.api.running import compute_logits, random_prompt

if TYPE_CHECKING:
    from pathlib import Path

QUANTIZATIONS = ("auto", "none", "int8", "int4", "w8a16")
FILES = {"model.penstock", "weights.safetensors"}


def convert(model: Path, output: Path, **options: Any) -> Path:
    return penstock.convert(model, output, threads=1, **options)


def logits(model: Path, **options: Any) -> bytes:
    options = {"dtype": "auto", "quantization": "auto", **options}
    return compute_logits(model, random_prompt(40, vocabulary_size=300), threads=1, **options).tobytes()


@pytest.mark.needs("hooks")
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen2", {"tie_word_embeddings": True, "dtype": "bfloat16"}),
        ("qwen3", {"vocab_size": 500}),
        ("mistral", {"sliding_window": 16}),
    ],
)
def test_converted_checkpoint_has_the_bits_of_the_original(
    family: str, changes: dict[str, Any], quantization: str, tmp_path: Path
) -> None:
    model = write_checkpoint(tmp_path / "model", make_config(family, **changes))
    converted = convert(model, tmp_path / "converted", quantization=quantization)
    assert {file.name for file in converted.iterdir()} == FILES
    assert logits(converted) == logits(model, quantization=quantization)


@pytest.mark.needs("hooks")
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q6_K"])
def test_converted_gguf_file_has_the_bits_of_the_original(kind: str, tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    write_gguf(model, TYPES[kind])
    assert logits(convert(model, tmp_path / "converted.tar")) == logits(model)


def test_demo_model_answers_the_same_from_every_form(demo_model: Path, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Name three colours."}]

    def answer(model: Any) -> tuple[object, ...]:
        with penstock.Engine(model, threads=2, kv_cache_blocks=64, max_model_len=512) as engine:
            result = engine.blocking.generate(messages, max_tokens=12, temperature=0.0, logprobs=True)
            texts = engine.encode("Grüße, 你好"), engine.apply_chat_template(messages)
            return bits_of(result), texts, engine.info.dtype

    expected = answer(demo_model)
    archive = penstock.convert(demo_model, tmp_path / "demo.tar", threads=2)
    content = archive.read_bytes()
    assert answer(archive) == expected
    for model in (content, bytearray(content), memoryview(content)):
        assert answer(model) == expected
    assert answer(penstock.convert(demo_model, tmp_path / "demo", threads=2)) == expected


@pytest.mark.anyio
async def test_engine_from_bytes_sleeps_and_wakes(tiny_model: Path, tmp_path: Path) -> None:
    content = convert(tiny_model, tmp_path / "tiny.tar").read_bytes()
    async with penstock.Engine(content, threads=1) as engine:
        assert repr(engine) == f"<Engine of {len(content)} bytes open>"
        first = await engine.generate(PROMPT, max_tokens=4, temperature=0.0)
        await engine.sleep()
        await engine.wake()
        assert bits_of(await engine.generate(PROMPT, max_tokens=4, temperature=0.0)) == bits_of(first)


def test_options_that_contradict_the_conversion_are_errors(tiny_model: Path, tmp_path: Path) -> None:
    converted = convert(tiny_model, tmp_path / "converted", quantization="int8")
    with pytest.raises(penstock.ConfigError, match="must be auto or int8") as caught:
        make_engine(converted, quantization="int4").blocking.start()
    assert caught.value.field == "quantization"
    with pytest.raises(penstock.ConfigError, match="must be auto or float32"):
        make_engine(converted, dtype="bfloat16").blocking.start()
    with make_engine(converted, quantization="int8", dtype="float32") as engine:
        assert engine.info.dtype == "float32"


def test_existing_output_is_replaced_only_on_request(tiny_model: Path, tmp_path: Path) -> None:
    output = convert(tiny_model, tmp_path / "converted")
    with pytest.raises(penstock.ConfigError, match=r"output=.* a new path") as caught:
        convert(tiny_model, output)
    assert caught.value.field == "output"
    convert(tiny_model, output, quantization="int8", overwrite=True)
    with pytest.raises(penstock.ConfigError, match="a converted model"):
        convert(tiny_model, tiny_model, overwrite=True)
    with pytest.raises(penstock.ModelLoadError, match="converted already"):
        convert(output, tmp_path / "again")
    assert [path.name for path in tmp_path.iterdir()] == ["converted"]


@pytest.mark.needs("resource")
@pytest.mark.parametrize("name", ["converted", "converted.tar"])
def test_conversion_that_fails_leaves_nothing_behind(name: str, tiny_model: Path, tmp_path: Path) -> None:
    def stop(done: int, _total: int) -> None:
        if done:
            raise LookupError

    with pytest.raises(LookupError):
        convert(tiny_model, tmp_path / name, progress=stop)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(OSError, match=r"Not a directory|File exists") as caught:
        convert(tiny_model, file / name)
    assert caught.value.filename is not None
    import resource

    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            convert(tiny_model, tmp_path / name)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert str(tmp_path) in str(caught.value.filename)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_progress_of_a_conversion_ends_with_its_total(tiny_model: Path, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    converted = convert(tiny_model, tmp_path / "converted", progress=lambda *call: calls.append(call))
    done, total = calls[-1]
    assert done == total
    assert 0 <= (converted / "weights.safetensors").stat().st_size - total < 10_000


def test_damaged_weights_raise_model_load_error_with_the_file(tiny_model: Path, tmp_path: Path) -> None:
    converted = convert(tiny_model, tmp_path / "converted")
    weights = converted / "weights.safetensors"
    content = bytearray(weights.read_bytes())
    content[-100_000] ^= 1
    weights.write_bytes(content)
    with pytest.raises(penstock.ModelLoadError, match=r"weights\.safetensors: checksum of bytes .* damaged"):
        make_engine(converted).blocking.start()
    with pytest.raises(penstock.ModelLoadError, match="is not a converted model"):
        make_engine(b"no archive").blocking.start()  # type: ignore[arg-type]


def test_weights_are_a_safetensors_file_of_aligned_tensors(tiny_model: Path, tmp_path: Path) -> None:
    from safetensors import safe_open

    weights = convert(tiny_model, tmp_path / "converted", quantization="int4") / "weights.safetensors"
    with safe_open(weights, framework="numpy") as file:
        names = set(file.keys())
    layer = "model.layers.0.self_attn"
    assert f"{layer}.q_proj.weight+{layer}.k_proj.weight+{layer}.v_proj.weight" in names
    content = weights.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    starts = [tensor["data_offsets"][0] for tensor in header.values() if tensor["dtype"] == "U8"]
    assert all((8 + length + start) % 64 == 0 for start in starts)


@pytest.mark.needs("proc")
def test_conversion_memory_is_near_that_of_the_largest_tensor(tmp_path: Path) -> None:
    """The file has 16 layers of 8 MB, and an embedding table of 34 MB."""
    changes = {
        "vocab_size": 32768,
        "hidden_size": 256,
        "intermediate_size": 2048,
        "num_hidden_layers": 16,
        "tie_word_embeddings": True,
    }
    model = write_checkpoint(tmp_path / "model", make_config("llama", **changes))
    code = """
import re, sys, penstock
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
before = peak()
penstock.convert(sys.argv[1], sys.argv[2], quantization="int8", threads=1)
print(peak() - before)
"""
    command = [sys.executable, "-c", code, str(model), str(tmp_path / "converted")]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    size = (model / "model.safetensors").stat().st_size
    assert size > 120 << 20
    assert int(done.stdout) < 34 * 2**20 + (32 << 20)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the cache of packed weights."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "weights"


def weights_of(model: Path, **options: Any) -> tuple[Any, int]:
    """The output for a prompt, and the bytes of the arena."""
    with make_engine(model, kv_cache_blocks=40, max_model_len=512, **options) as engine:
        result = engine.blocking.generate(PROMPT, max_tokens=4, temperature=0.0, logprobs=True)
        return bits_of(result), engine.info.memory.peak


def test_cache_of_packed_weights_is_used_when_it_is_enabled(tiny_model: Path, cache: Path) -> None:
    direct = weights_of(tiny_model)
    assert not cache.exists()
    for _ in range(2):
        cached = weights_of(tiny_model, weights_cache_bytes=1 << 30)
        assert cached[0] == direct[0]
        assert cached[1] < direct[1], "the weights are mapped"
        assert len(list(cache.iterdir())) == 1
    int8 = weights_of(tiny_model, weights_cache_bytes=1 << 30, quantization="int8")
    assert int8[0] == weights_of(tiny_model, quantization="int8")[0]
    assert len(list(cache.iterdir())) == 2


def test_cache_entry_that_is_damaged_or_old_is_replaced(
    tiny_model: Path, cache: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    expected = weights_of(model, weights_cache_bytes=1 << 30)
    [entry] = cache.iterdir()
    weights = entry / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert weights_of(model, weights_cache_bytes=1 << 30) == expected
    assert list(cache.iterdir()) == [entry]
    # Other weights under the same name.
    shutil.rmtree(model)
    write_checkpoint(model, make_config("llama"), seed=9)
    other = weights_of(model, weights_cache_bytes=1 << 30)
    assert other[0] == weights_of(model)[0] != expected[0]


def test_cache_distinguishes_weights_of_the_same_size_and_time(
    tiny_model: Path, cache: Path, tmp_path: Path
) -> None:
    model, other = tmp_path / "model", tmp_path / "other"
    shutil.copytree(tiny_model, model)
    write_checkpoint(other, make_config("llama"), seed=9)
    expected = weights_of(model, weights_cache_bytes=1 << 30)
    weights = model / "model.safetensors"
    before = weights.stat()
    weights.write_bytes((other / "model.safetensors").read_bytes())
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (weights.stat().st_size, weights.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    replaced = weights_of(model, weights_cache_bytes=1 << 30)
    assert replaced[0] == weights_of(model)[0] != expected[0]
    assert len(list(cache.iterdir())) == 2


@pytest.mark.needs("permissions")
def test_cache_that_others_may_write_to_is_not_used(
    tiny_model: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    direct = weights_of(tiny_model)
    with caplog.at_level("WARNING", logger="penstock"):
        assert weights_of(tiny_model, weights_cache_bytes=1 << 30) == direct
    assert not list(cache.iterdir())
    assert f"weights are not cached in {cache}: other users may write to it" in caplog.text


@pytest.mark.needs("permissions")
@pytest.mark.parametrize("name", [".", "weights.safetensors"])
def test_cache_entry_that_others_may_change_is_replaced(
    name: str, tiny_model: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = weights_of(tiny_model, weights_cache_bytes=1 << 30)
    [entry] = cache.iterdir()
    changed = entry / name
    changed.chmod(0o777)
    with caplog.at_level("WARNING", logger="penstock"):
        assert weights_of(tiny_model, weights_cache_bytes=1 << 30) == expected
    assert list(cache.iterdir()) == [entry]
    assert changed.stat().st_mode & 0o022 == 0
    assert "other users may write to it" in caplog.text


def test_cache_keeps_to_its_size(tiny_model: Path, cache: Path) -> None:
    weights_of(tiny_model, weights_cache_bytes=1 << 30)
    [first] = cache.iterdir()
    size = sum(file.stat().st_size for file in first.iterdir())
    weights_of(tiny_model, weights_cache_bytes=size + 1000, dtype="bfloat16")
    [second] = cache.iterdir()
    assert second != first
    weights_of(tiny_model, weights_cache_bytes=1000)  # too small for any entry: loaded as without a cache
    assert list(cache.iterdir()) == [second]


def test_cache_is_shared_by_concurrent_processes(tiny_model: Path, cache: Path) -> None:
    code = """
import sys, penstock
with penstock.Engine(sys.argv[1], threads=1, weights_cache_bytes=1 << 30) as engine:
    print(engine.blocking.generate([1, 2, 3], max_tokens=4, temperature=0.0).token_ids)
"""
    command = [sys.executable, "-W", "error", "-c", code, str(tiny_model)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(4)]
    outputs = {process.communicate()[0] for process in processes}
    assert len(outputs) == 1
    assert [process.returncode for process in processes] == [0] * 4
    assert len(list(cache.iterdir())) == 1


def test_cache_that_cannot_be_written_is_not_used(tiny_model: Path, cache: Path) -> None:
    cache.parent.mkdir()
    cache.touch()
    assert weights_of(tiny_model, weights_cache_bytes=1 << 30) == weights_of(tiny_model)


@pytest.mark.needs("hooks")
def test_renamed_archive_is_recognised_by_its_content(tiny_model: Path, tmp_path: Path) -> None:
    archive = convert(tiny_model, tmp_path / "model.tar")
    for name in ("model.asparam", "model", "model.bin2"):
        renamed = tmp_path / "renamed" / name
        renamed.parent.mkdir(exist_ok=True)
        shutil.copy(archive, renamed)
        assert logits(renamed) == logits(archive)
        assert penstock.Tokenizer(renamed).encode("a") == penstock.Tokenizer(archive).encode("a")
    renamed.write_bytes(archive.read_bytes()[:1000])
    with pytest.raises(penstock.ModelLoadError, match=r"model\.bin2"):
        penstock.describe(renamed)


def test_description_has_configuration_and_defaults(tiny_model: Path, tmp_path: Path) -> None:
    plain = penstock.describe(tiny_model)
    converted = penstock.describe(convert(tiny_model, tmp_path / "converted", quantization="int8"))
    assert plain["config"] == converted["config"]
    assert plain["config"]["architectures"] == ["LlamaForCausalLM"]
    assert plain["generation_config"] == converted["generation_config"]
    assert plain["generation_config"]["eos_token_ids"] == [258]
    assert (plain["writer_version"], converted["writer_version"]) == (None, penstock.__version__)
    assert (plain["path"], plain["format"]) == (str(tiny_model), "safetensors")
    assert plain["unsupported"] == []
    with pytest.raises(penstock.ModelLoadError, match="no such file"):
        penstock.describe(tmp_path / "none")


def test_command_converts_and_describes_a_model(tiny_model: Path, tmp_path: Path) -> None:
    output = tmp_path / "converted"
    arguments = ["convert", str(tiny_model), "-o", str(output), "--quantization", "int8", "--threads", "1"]
    done = CliRunner().invoke(main, arguments)
    assert (done.exit_code, done.stdout) == (0, f"{output}\n")
    again = CliRunner().invoke(main, arguments)
    assert again.exit_code == 2
    assert "--overwrite" in again.stderr
    assert CliRunner().invoke(main, [*arguments, "--overwrite"]).exit_code == 0
    info = json.loads(CliRunner().invoke(main, ["info", str(output), "--json"]).stdout)
    assert (info["format"], info["quantization"]) == ("converted, version 1", "int8")
    assert info["architectures"] == ["LlamaForCausalLM"]
    assert info["unsupported"] == []
