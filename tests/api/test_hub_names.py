"""Names of models on the hub: their form, aliases, and the file of a repository that a name selects."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import TYPE_CHECKING

import pytest

import penstock
from penstock import _hub
from penstock._hub_aliases import aliases, default_alias, nearest_alias
from penstock._hub_files import ADAPTER_FILES, MODEL_FILES, TOKENIZER_FILES, gguf_of, select
from penstock._hub_ids import HubModel, parse_hub_model

if TYPE_CHECKING:
    from pathlib import Path

#: Names as repositories of GGUF files have them.
FILES = (
    "README.md",
    "config.json",
    "Model-7B-Q4_0.gguf",
    "Model-7B-Q4_K_M.gguf",
    "Model-7B-Q4_K_S.gguf",
    "Model-7B-UD-Q4_K_XL.gguf",
    "Model-7B-IQ4_XS.gguf",
    "Model-7B-f16.gguf",
    "Model-7B-Q8_0-00001-of-00002.gguf",
    "Model-7B-Q8_0-00002-of-00002.gguf",
    "mmproj-Model-7B-f16.gguf",
)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("acme/m", ("acme/m", None, None, None)),
        ("acme/m@v1", ("acme/m", "v1", None, None)),
        ("acme/m:Q4_K_M", ("acme/m", None, "Q4_K_M", None)),
        ("acme/m@refs/pr/1:q8_0", ("acme/m", "refs/pr/1", "q8_0", None)),
        ("acme/m/x-Q8_0.gguf", ("acme/m", None, None, "x-Q8_0.gguf")),
        ("acme/m/Q8_0/x.GGUF@v1", ("acme/m", "v1", None, "Q8_0/x.GGUF")),
    ],
)
def test_name_of_a_model_has_its_parts(text: str, parts: tuple[str, ...]) -> None:
    assert parse_hub_model(text) == HubModel(*parts)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "model",
        "./acme/m",
        "/acme/m",
        "acme/m:",
        "acme/m:Q4:Q5",
        "acme/m:Q4@v1",
        "acme/m/file.bin",
        "acme/m/x.gguf:Q4_0",
        "acme/../m/x.gguf",
        "https://huggingface.co/acme/m",
        "acme/m\n",
    ],
)
def test_other_texts_name_no_model(text: str) -> None:
    assert parse_hub_model(text) is None


@pytest.mark.parametrize(
    ("text", "file"),
    [
        ("acme/m:Q4_K_M", "Model-7B-Q4_K_M.gguf"),
        ("acme/m:q4_0", "Model-7B-Q4_0.gguf"),
        ("acme/m:F16", "Model-7B-f16.gguf"),
        ("acme/m:ud-q4_k_xl", "Model-7B-UD-Q4_K_XL.gguf"),
        ("acme/m:IQ4_XS", "Model-7B-IQ4_XS.gguf"),
        ("acme/m", "Model-7B-Q4_K_M.gguf"),
        ("acme/m/Model-7B-Q4_K_S.gguf", "Model-7B-Q4_K_S.gguf"),
    ],
)
def test_name_selects_one_gguf_file(text: str, file: str) -> None:
    source = parse_hub_model(text)
    assert source is not None
    for files in (MODEL_FILES, TOKENIZER_FILES):
        assert select(text, source, FILES, files) == [file]


@pytest.mark.parametrize(
    ("text", "names", "hint"),
    [
        ("acme/m:Q5_K_M", FILES, "Q5_K_M; there are IQ4_XS, Q4_0, Q4_K_M, Q4_K_S, UD-Q4_K_XL, f16"),
        ("acme/m:Q4", FILES, "acme/m has no GGUF file of the quantisation Q4; there are "),
        ("acme/m:K_M", FILES, "acme/m has no GGUF file of the quantisation K_M; there are "),
        ("acme/m:Q8_0", FILES, "acme/m has no GGUF file of the quantisation Q8_0; there are "),
        ("acme/m/x.gguf", FILES, "acme/m has no file x.gguf; there are "),
        ("acme/m", FILES[8:], "its GGUF files are parts of models, which llama-gguf-split --merge makes one"),
        ("acme/m:Q8_0", ["config.json"], "there is no GGUF file"),
        ("acme/m", ["a-Q4_0.gguf", "a-Q8_0.gguf"], "2 GGUF files, none of them Q4_K_M; name one, such as"),
        ("acme/m:Q4_0", ["a-Q4_0.gguf", "b-Q4_0.gguf"], "name one: acme/m/a-Q4_0.gguf, acme/m/b-Q4_0.gguf"),
        ("acme/m", ["README.md"], "no config.json and no GGUF file"),
    ],
)
def test_name_that_selects_no_file_lists_the_files(text: str, names: list[str], hint: str) -> None:
    source = parse_hub_model(text)
    assert source is not None
    with pytest.raises(penstock.ModelLoadError) as caught:
        select(text, source, names, MODEL_FILES)
    assert str(caught.value).startswith(f"{text}: ")
    assert hint in str(caught.value)


def test_single_gguf_file_needs_no_quantisation() -> None:
    for name in ("model.gguf", "model-Q2_K.gguf"):
        assert select("m", HubModel("acme/m", None, None, None), [name, "config.json"], MODEL_FILES) == [name]


@pytest.mark.parametrize("weights", ["model.safetensors", "model-00001-of-00002.safetensors"])
def test_safetensors_take_precedence_over_gguf_files(weights: str) -> None:
    names = [*FILES, weights, "tokenizer.json", "pytorch_model.bin"]
    source = HubModel("acme/m", None, None, None)
    assert select("m", source, names, MODEL_FILES) == ["config.json", weights, "tokenizer.json"]
    assert select("m", source, names, TOKENIZER_FILES) == ["config.json", "tokenizer.json"]
    assert gguf_of(select("m", HubModel("acme/m", None, "Q4_0", None), names, MODEL_FILES)) == FILES[2]


def test_adapter_is_never_a_gguf_file() -> None:
    source = HubModel("acme/m", None, None, None)
    assert select("m", source, [*FILES, "adapter_config.json"], ADAPTER_FILES) == ["adapter_config.json"]
    with pytest.raises(penstock.ModelLoadError, match="no adapter_config"):
        select("m", source, FILES, ADAPTER_FILES)


def test_aliases_name_models_of_the_hub() -> None:
    assert 12 <= len(aliases()) <= 20
    assert default_alias() in aliases()
    assert len(set(aliases().values())) == len(aliases())
    for alias, target in aliases().items():
        assert parse_hub_model(alias) is None
        assert parse_hub_model(target) is not None


@pytest.mark.parametrize(
    ("name", "alias"),
    [
        ("qwen3-06b", "qwen3-0.6b"),
        ("Qwen3:0.6B", "qwen3-0.6b"),
        ("meta-llama/Llama-3.2-1B", "llama3.2-1b"),
        ("unknown", None),
    ],
)
def test_nearest_alias_of_a_name(name: str, alias: str | None) -> None:
    assert nearest_alias(name) == alias


def test_unknown_name_is_an_error_with_the_nearest_alias() -> None:
    with pytest.raises(penstock.ModelLoadError, match=r"^qwen3-06b: no such file .* mean qwen3-0\.6b\?$"):
        penstock.Engine("qwen3-06b").blocking.start()
    with pytest.raises(penstock.ModelLoadError, match=r"^models/none\.gguf: no such file or directory$"):
        _hub.resolve("models/none.gguf", MODEL_FILES)


@pytest.mark.needs("symlinks")
def test_alias_hides_no_local_path(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    (tmp_path / default_alias()).symlink_to(tiny_model)
    assert _hub.resolve(default_alias()) == default_alias()
    assert _hub.plan(default_alias()) == default_alias()
    with penstock.Engine(default_alias(), threads=1) as engine:
        assert engine.info.architecture == "LlamaForCausalLM"


def test_adapters_have_no_aliases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for name in (default_alias(), "qwen3-06b", "acme/m:Q4_0", "acme/m/x.gguf"):
        with pytest.raises(penstock.ModelLoadError, match=r"no such file or directory$"):
            _hub.resolve(name, ADAPTER_FILES)


def test_engine_that_cannot_be_opened_is_dropped() -> None:
    engine = penstock.Engine("no such model")
    with pytest.raises(penstock.ModelLoadError):
        engine.blocking.start()
    dropped = weakref.ref(engine)
    del engine
    gc.collect()
    assert dropped() is None
