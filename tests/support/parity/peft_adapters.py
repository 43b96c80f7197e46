"""Adapters that PEFT saves, and PEFT as the oracle of adapters: loaded from disk, in float32.

torch, transformers and peft are imported on first use, as in `support.parity.oracle`.
"""

from __future__ import annotations

import functools
import json
import warnings
from typing import TYPE_CHECKING, Any

from support.parity.oracle import Oracle, import_torch, load_oracle

if TYPE_CHECKING:
    from pathlib import Path


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
    peft, torch = import_peft(), import_torch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = peft.LoraConfig(task_type="CAUSAL_LM", **config)
        model = peft.get_peft_model(load_oracle(base).model, settings, adapter_name=adapter_name)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".lora_" in name and parameter.ndim == 2:
                    gain = parameter.shape[1] ** -0.5
                    parameter.copy_(gain * torch.randn(parameter.shape, generator=generator))
                    parameter.data = parameter.data.to(getattr(torch, dtype))
        model.save_pretrained(directory)
    return directory if adapter_name == "default" else directory / adapter_name


def load_adapted(base: Path, adapter: Path) -> Oracle:
    """A model with an adapter that PEFT loads from disk."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Oracle(import_peft().PeftModel.from_pretrained(load_oracle(base).model, adapter).eval())


def save_merged(base: Path, adapter: Path, directory: Path) -> Path:
    """Save a checkpoint of the base with the adapter merged by PEFT, and the tokenizer of the base."""
    model = load_adapted(base, adapter).model.merge_and_unload()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(directory)
    for file in base.glob("tokenizer*.json"):
        (directory / file.name).write_bytes(file.read_bytes())
    return directory


def edit_config(adapter: Path, **changes: Any) -> None:
    """Change fields of the saved configuration; the keys of objects keep the order given."""
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
