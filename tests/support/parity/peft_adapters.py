"""Adapters that PEFT saves, and PEFT as the oracle of adapters: loaded from disk, in float32.

Stored is how PEFT saves an adapter: its configuration, and the names, types and shapes of tensors. The values
are random numbers of numpy in every run. torch, transformers and peft are imported on first use, as in
`support.parity.oracle`.
"""

from __future__ import annotations

import functools
import json
import warnings
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from support.api.checkpoints import encode, write_safetensors, write_typed_safetensors
from support.parity.oracle import Oracle, import_torch, load_model
from support.parity.stored import Mode, fingerprint, header_of, read_safetensors, store

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

#: The names of types in safetensors.
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
PREFIX = "base_model.model."


@functools.cache
def import_peft() -> Any:
    """Import peft, without the warnings of its import."""
    import_torch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import peft
    return peft


def save_adapter(
    base: Path,
    directory: Path,
    *,
    seed: int = 0,
    dtype: str = "float32",
    adapter_name: str = "default",
    **config: Any,
) -> Path:
    """Save an adapter with PEFT's configuration and random A and B; returns its folder.

    PEFT saves an adapter of another name than `default` to a folder of that name.
    """
    folder = directory if adapter_name == "default" else directory / adapter_name
    inputs = {"base": fingerprint(base), "seed": seed, "dtype": dtype, "name": adapter_name, "config": config}

    def compute() -> dict[str, Any]:
        save_with_peft(base, directory, seed=seed, dtype=dtype, adapter_name=adapter_name, **config)
        file = folder / "adapter_model.safetensors"
        header = header_of(file)
        tensors = []
        for name, values in read_safetensors(file):
            kind, is_random = header[name]["dtype"], False
            if name.endswith((".lora_A.weight", ".lora_B.weight")):
                expected = encode(random_matrix(name, values.shape, seed), DTYPES[kind])
                assert np.array_equal(values, expected), name
                is_random = True
            tensors.append([name, kind, values.shape, is_random])
        return {"config": (folder / "adapter_config.json").read_text(), "tensors": tensors}

    found = store().recall("adapter", inputs, compute)
    if not (folder / "adapter_config.json").exists():  # not computed now
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "adapter_config.json").write_text(found["config"])
        tensors = {}
        for name, kind, shape, is_random in found["tensors"]:
            # The other values are those of adapters that Penstock refuses.
            values = random_matrix(name, shape, seed) if is_random else np.zeros(shape, np.float32)
            tensors[name] = kind, encode(values, DTYPES[kind])
        write_typed_safetensors(folder / "adapter_model.safetensors", tensors)
    return folder


def random_matrix(name: str, shape: tuple[int, ...], seed: int) -> NDArray[np.float32]:
    """The random values of a matrix."""
    generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
    return generator.standard_normal(shape, dtype=np.float32) * np.float32(shape[1] ** -0.5)


def save_with_peft(
    base: Path, directory: Path, *, seed: int, dtype: str, adapter_name: str, **config: Any
) -> None:
    """Save an adapter with PEFT. Lists of modules are sorted, and the folder of the base is left out."""
    peft, torch = import_peft(), import_torch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = peft.LoraConfig(task_type="CAUSAL_LM", **config)
        model = peft.get_peft_model(load_model(base), settings, adapter_name=adapter_name)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".lora_" in name and parameter.ndim == 2:
                    saved = name.replace(f".{adapter_name}", "")
                    parameter.copy_(torch.from_numpy(random_matrix(saved, parameter.shape, seed)))
                    parameter.data = parameter.data.to(getattr(torch, dtype))
        model.save_pretrained(directory)
    for file in directory.rglob("adapter_config.json"):
        content = json.loads(file.read_text())
        content["base_model_name_or_path"] = "base"
        for field in ("target_modules", "exclude_modules"):
            if isinstance(content[field], list):
                content[field] = sorted(content[field])
        file.write_text(json.dumps(content, indent=2))


def load_adapted(base: Path, adapter: Path) -> Oracle:
    """A model with an adapter that PEFT loads from disk."""
    return Oracle(source_of(base, adapter), lambda: load_with_peft(base, adapter).get_base_model())


def load_merged(base: Path, adapter: Path) -> Oracle:
    """A model with an adapter that PEFT merges into its weights."""
    source = {**source_of(base, adapter), "is_merged": True}
    return Oracle(source, lambda: load_with_peft(base, adapter).merge_and_unload())


def source_of(base: Path, adapter: Path) -> dict[str, Any]:
    """The part of keys for an adapter of a base."""
    return {"base": fingerprint(base), "adapter": fingerprint(adapter)}


def load_with_peft(base: Path, adapter: Path) -> Any:
    """A model of PEFT."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_peft().PeftModel.from_pretrained(load_model(base), adapter).eval()


def save_merged(base: Path, adapter: Path, directory: Path) -> Path:
    """Save a checkpoint of the base with the adapter merged, and the tokenizer of the base.

    PEFT merges in live runs, numpy in others.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if store().mode is Mode.STORED:
        merge(base, adapter, directory)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load_with_peft(base, adapter).merge_and_unload().save_pretrained(directory)
    for file in base.glob("tokenizer*.json"):
        (directory / file.name).write_bytes(file.read_bytes())
    return directory


def merge(base: Path, adapter: Path, directory: Path) -> None:
    """Add the products of B and A to the weights of a float32 checkpoint; alpha has no patterns."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert not config["alpha_pattern"]
    weights = dict(read_safetensors(base / "model.safetensors"))
    adapted = read_safetensors(adapter / "adapter_model.safetensors")
    tensors = {name.removeprefix(PREFIX): as_float32(values) for name, values in adapted}
    for name in (name for name in tensors if name.endswith(".lora_A.weight")):
        module = name.removesuffix(".lora_A.weight")
        a, b = tensors[name], tensors[f"{module}.lora_B.weight"]
        divisor = len(a) ** 0.5 if config["use_rslora"] else len(a)
        weights[f"{module}.weight"] = weights[f"{module}.weight"] + config["lora_alpha"] / divisor * (b @ a)
    values = {name: weight.astype(np.float32) for name, weight in weights.items()}
    write_safetensors(directory / "model.safetensors", values, "float32")
    for file in ("config.json", "generation_config.json"):
        (directory / file).write_bytes((base / file).read_bytes())


def as_float32(values: NDArray[Any]) -> NDArray[np.float32]:
    """The values of bits of bfloat16, or of floating-point numbers."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def edit_config(adapter: Path, **changes: Any) -> None:
    """Change fields of the saved configuration; the keys of objects keep the order given."""
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
