"""From the name of a model to its files: a path, or an id on the Hugging Face hub, then fetched."""

from __future__ import annotations

import re
from pathlib import Path

from penstock.errors import ModelLoadError

#: What makes up a model; weights in other formats, and in other precisions beside them, stay on the hub.
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
    """The directory or file of `model`; takes as long as a download if it must. Raises `ModelLoadError`.

    A hub id may name a revision: `owner/name@revision`.
    """
    path = Path(model).expanduser()
    if model and path.exists():
        return str(path)
    hub_id = _HUB_ID.fullmatch(model)
    if hub_id is None or path.suffix == ".gguf":
        message = f"{model}: no such file or directory"
        raise ModelLoadError(message)
    return _fetch(hub_id["id"], hub_id["revision"])


def _fetch(hub_id: str, revision: str | None) -> str:
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError:
        message = (
            f"{hub_id}: no such directory, and fetching it from the Hugging Face hub needs an extra: "
            "pip install 'penstock[hub]'"
        )
        raise ModelLoadError(message) from None
    name = hub_id if revision is None else f"{hub_id}@{revision}"
    try:
        folder = huggingface_hub.snapshot_download(hub_id, revision=revision, allow_patterns=FILES)
    except errors.GatedRepoError as error:
        message = f"{name}: the hub asks you to accept its terms and to log in: hf auth login"
        raise ModelLoadError(message) from error
    except errors.RepositoryNotFoundError as error:
        message = f"{name}: neither a path here nor a model on the hub (private ones need: hf auth login)"
        raise ModelLoadError(message) from error
    except errors.RevisionNotFoundError as error:
        message = f"{name}: the model on the hub has no revision {revision}"
        raise ModelLoadError(message) from error
    except Exception as error:  # also those of its HTTP library, which differs between its versions
        cause = error.__cause__ if isinstance(error.__cause__, errors.HfHubHTTPError) else error
        if isinstance(cause, errors.LocalEntryNotFoundError):
            command = f"hf download {hub_id}" + (f" --revision {revision}" if revision else "")
            message = f"{name}: not in the local cache and the hub is offline; first run: {command}"
        else:
            reason = str(cause).strip().partition("\n")[0] or type(cause).__name__
            message = f"{name}: cannot be fetched from the hub: {reason}"
        raise ModelLoadError(message) from error
    if not (Path(folder) / "config.json").exists():
        message = f"{name}: it has no config.json; of GGUF files, hf download one and open its path"
        raise ModelLoadError(message)
    return folder
