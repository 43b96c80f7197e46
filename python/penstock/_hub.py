"""Finds the files of a model: a local path, or an id on the Hugging Face hub, which is downloaded."""

from __future__ import annotations

import os
import re
from pathlib import Path

from penstock.errors import ModelLoadError

#: The files of a model; weights in other formats or precisions are not downloaded.
FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
]

_HUB_ID = re.compile(r"(?P<id>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w./-]+))?")


def resolve(model: str) -> str:
    """The local directory or file of `model`, downloaded if necessary. Raises `ModelLoadError`.

    A hub id can name a revision: `owner/name@revision`.
    """
    path = Path(os.path.expanduser(model))  # noqa: PTH111 - never raises
    if model and path.exists():
        return str(path)
    hub_id = _HUB_ID.fullmatch(model)
    if hub_id is None or path.suffix == ".gguf":
        message = f"{model or repr(model)}: no such file or directory"
        raise ModelLoadError(message)
    return _fetch(hub_id["id"], hub_id["revision"])


def _fetch(hub_id: str, revision: str | None) -> str:
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError:
        message = (
            f"{hub_id}: no such directory; downloading it from the Hugging Face hub requires an extra: "
            "pip install 'penstock[hub]'"
        )
        raise ModelLoadError(message) from None
    name = hub_id if revision is None else f"{hub_id}@{revision}"
    try:
        folder = huggingface_hub.snapshot_download(hub_id, revision=revision, allow_patterns=FILES)
    except errors.GatedRepoError as error:
        message = (
            f"{name}: access is restricted; accept the terms on the model's hub page and run: hf auth login"
        )
        raise ModelLoadError(message) from error
    except errors.RepositoryNotFoundError as error:
        message = (
            f"{name}: not a local path and not found on the hub (for a private model, run: hf auth login)"
        )
        raise ModelLoadError(message) from error
    except errors.RevisionNotFoundError as error:
        message = f"{name}: revision {revision} not found on the hub"
        raise ModelLoadError(message) from error
    except Exception as error:  # includes errors of its HTTP library, which depends on its version
        cause = error.__cause__ if isinstance(error.__cause__, errors.HfHubHTTPError) else error
        if isinstance(cause, errors.LocalEntryNotFoundError):
            command = f"hf download {hub_id}" + (f" --revision {revision}" if revision else "")
            message = f"{name}: not in the local cache, and the hub is offline; run this first: {command}"
        else:
            reason = str(cause).strip().partition("\n")[0] or type(cause).__name__
            message = f"{name}: download from the hub failed: {reason}"
        raise ModelLoadError(message) from error
    if not (Path(folder) / "config.json").exists():
        message = (
            f"{name}: no config.json; to use a GGUF file, download it with hf download and open its path"
        )
        raise ModelLoadError(message)
    return folder
