"""Writes the models of the benchmark suite, each once: random weights in the formats of all engines.

Speed does not depend on the values. `half-billion` has the shapes of Qwen2.5 0.5B (494 million parameters),
`tiny` 4.5 million parameters; `demo` is the GGUF file of the demo model.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import numpy as np
    from numpy.typing import NDArray

REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class Shape:
    """The parameters that products read: those of the layers and those of the head."""

    layers: int
    head: int
    kv_width: int = 0
    kv_layers: int = 0


SHAPES = {
    "half-billion": Shape(layers=357_826_560, head=136_134_656, kv_width=128, kv_layers=24),
    "demo": Shape(layers=106_168_320, head=28_311_552),
    "tiny": Shape(layers=3_686_400, head=786_432),
}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "half-billion": (
        "qwen2",
        {
            "vocab_size": 151_936,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "max_position_embeddings": 32_768,
            "max_window_layers": 24,
            "sliding_window": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "tie_word_embeddings": True,
            "dtype": "bfloat16",
        },
    ),
    "tiny": (
        "llama",
        {
            "vocab_size": 3072,
            "hidden_size": 256,
            "intermediate_size": 704,
            "num_hidden_layers": 5,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 32,
            "max_position_embeddings": 1024,
            "tie_word_embeddings": True,
        },
    ),
}


class Models:
    """A folder of models. `python` is the interpreter with the converters of the other engines."""

    def __init__(self, folder: Path, python: Path, penstock: Path) -> None:
        self._folder = folder
        self._python = python
        self._penstock = str(penstock)

    def demo(self) -> Path:
        """The demo model's file."""
        code = "from penstock.demo import model_path; print(model_path())"
        return Path(_run(self._penstock, "-c", code).strip())

    def checkpoint(self, name: str) -> Path:
        """The model as a Hugging Face checkpoint."""

        def write(directory: Path) -> None:
            support = _test_support()
            family, changes = CONFIGS[name]
            support.write_checkpoint(directory, support.make_config(family, **changes))

        return self._once(name, write)

    def gguf(self, name: str, kind: str) -> Path:
        """The same weights as a GGUF file; every matrix has type `kind`."""
        source = self.checkpoint(name)
        return self._once(f"{name}-{kind}.gguf", lambda file: write_gguf(source, file, kind))

    def openvino(self, name: str, weights: str) -> Path:
        """The same weights for OpenVINO: int8 per channel, or int4 in groups of 128."""
        options = ["--group-size", "128", "--ratio", "1.0"] if weights == "int4" else []
        command = ["export", "openvino", "--model", str(self.checkpoint(name)), "--sym", *options]
        task = ["--task", "text-generation-with-past", "--weight-format", weights]
        tool = str(self._python.parent / "optimum-cli")
        return self._once(f"{name}-openvino-{weights}", lambda out: _run(tool, *command, *task, str(out)))

    def ctranslate2(self, name: str, weights: str) -> Path:
        """The same weights for CTranslate2."""
        tool = str(self._python.parent / "ct2-transformers-converter")
        options = ["--model", str(self.checkpoint(name)), "--quantization", weights, "--output_dir"]

        def convert(out: Path) -> None:
            _run(tool, *options, str(out))
            config = json.loads((out / "config.json").read_text())
            for token in ("bos_token", "eos_token", "unk_token"):  # must not be null
                config[token] = config[token] or "<|endoftext|>"
            (out / "config.json").write_text(json.dumps(config))

        return self._once(f"{name}-ctranslate2-{weights}", convert)

    def onnxruntime(self, name: str, weights: str) -> Path:
        """The same weights for ONNX Runtime GenAI."""
        command = ["-m", "onnxruntime_genai.models.builder", "-i", str(self.checkpoint(name)), "-e", "cpu"]
        options = ["--extra_options", "int4_accuracy_level=4", "int4_block_size=32"]

        def build(out: Path) -> None:
            cache = str(out.with_suffix(".cache"))
            _run(str(self._python), *command, "-p", weights, "-c", cache, "-o", str(out), *options)
            shutil.rmtree(cache, ignore_errors=True)

        return self._once(f"{name}-onnxruntime-{weights}", build)

    def converted(self, name: str, weights: str, options: Mapping[str, object]) -> Path:
        """The model with Penstock's packed weights. `options` are those of `quantization`."""
        source = self.checkpoint(name)
        quantization = json.dumps({"type": weights, **options})
        code = "import json, sys, penstock\n"
        code += "penstock.convert(sys.argv[1], sys.argv[2], quantization=json.loads(sys.argv[3]))"
        return self._once(
            "-".join([name, "penstock", weights, *map(str, options.values())]),
            lambda out: _run(self._penstock, "-c", code, str(source), str(out), quantization),
        )

    def _once(self, name: str, write: Callable[[Path], object]) -> Path:
        path = self._folder / name
        if not path.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            unfinished = self._folder / f"unfinished-{name}"
            if unfinished.is_dir():
                shutil.rmtree(unfinished)
            unfinished.unlink(missing_ok=True)
            print(f"writing {path}", file=sys.stderr, flush=True)
            write(unfinished)
            unfinished.rename(path)
        return path


def write_gguf(source: Path, file: Path, kind: str) -> None:
    """Convert a checkpoint of the tests' writer. Rotary pairs are not reordered: the values mean nothing."""
    import gguf
    import numpy as np

    config = json.loads((source / "config.json").read_text())
    family = config["model_type"]
    writer = gguf.GGUFWriter(file, family)
    add_metadata(writer, config)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, family.upper()), config["num_hidden_layers"])
    type_ = gguf.GGMLQuantizationType[kind]
    for name, values in read_safetensors(source / "model.safetensors"):
        new = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if values.ndim == 1:
            writer.add_tensor(new, values)
        else:
            writer.add_tensor(new, gguf.quants.quantize(np.ascontiguousarray(values), type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_metadata(writer: Any, config: dict[str, Any]) -> None:
    """The metadata of a model of this `config.json`, with one token per byte and fillers."""
    import gguf
    from tokenizers import pre_tokenizers

    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    size = config["vocab_size"]
    writer.add_vocab_size(size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    fillers = [f"Ġword{index}" for index in range(len(bytes_) + 1, size - 1)]
    writer.add_token_list([*bytes_, "ab", *fillers, "<end>"])
    writer.add_token_types([gguf.TokenType.NORMAL] * (size - 1) + [gguf.TokenType.CONTROL])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(size - 1)
    writer.add_add_bos_token(value=False)


def read_safetensors(file: Path) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Every tensor of a file of bfloat16 or float32, as float32."""
    import numpy as np

    with file.open("rb") as source:
        size = int.from_bytes(source.read(8), "little")
        header = json.loads(source.read(size))
    data = np.memmap(file, mode="r", offset=8 + size)
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, end = entry["data_offsets"]
        raw = data[start:end]
        if entry["dtype"] == "BF16":
            values = (raw.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
        else:
            values = raw.view(np.float32)
        yield name, values.reshape(entry["shape"])


def _test_support() -> Any:
    tests = str(REPOSITORY / "tests")
    if tests not in sys.path:
        sys.path.insert(0, tests)
    from support.api import checkpoints

    return checkpoints


def _run(*command: str) -> str:
    result = subprocess.run(command, check=False, capture_output=True, text=True)  # noqa: S603 - a converter
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {result.stderr[-2000:]}")
    return result.stdout
