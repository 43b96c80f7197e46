"""`describe`: the metadata of a model, read without its weights."""

from __future__ import annotations

import json
import os
from typing import Any

from penstock import _core, _hub

__all__ = ["describe"]


def describe(model: str | os.PathLike[str]) -> dict[str, Any]:
    """The metadata of a model, read from the headers of its files.

    `model` is a path, or a model of the Hugging Face hub, which is downloaded. The keys:

    - `path`: the local directory or file; `files`: the files of the weights.
    - `format`: `safetensors`, `GGUF version 3` or `converted, version 1`; `writer_version`: the version of
      Penstock that converted the model, or `None`.
    - `config`: the model's `config.json`, or the same values of a GGUF file.
    - `generation_config`: the defaults of requests, with `eos_token_ids`; values that the model does not
      have are `None`.
    - `parameters`: the number of weights, or `None` if the architecture is not supported.
    - `quantization`: the quantisation of the files, such as `GPTQ, 4 bits, groups of 128` or `Q4_K, Q6_K`, or
      `None`; `storage`: pairs of a stored type and its number of elements; `tensors`, `elements` and `bytes`:
      totals of the weights.
    - `memory`: the least RAM of an engine on the CPU with default options, in bytes: `weights`, `workspace`,
      and `kv_cache` for one sequence of `max_model_len` tokens, the model's maximum; `None` if the engine
      cannot load the weights.
    - `has_tokenizer`, `has_chat_template`; `unsupported`: reasons why the engine cannot open the model.

    Raises `ModelLoadError`.
    """
    path = _hub.find(os.fspath(model))
    metadata = _core.describe(path)
    config, generation = metadata["config"], metadata["generation_config"]
    return {
        **metadata,
        "path": path,
        "config": json.loads(config),
        "generation_config": json.loads(generation),
    }
