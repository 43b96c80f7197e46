"""Names the files of models on the hub, and selects those of one model from a repository's files."""

from __future__ import annotations

import fnmatch
import re
from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock._hub_ids import HubModel

__all__ = ["ADAPTER_FILES", "MODEL_FILES", "TOKENIZER_FILES", "FileSet", "gguf_of", "is_certain", "select"]

#: The quantisation of a GGUF file if the repository has several and the name has none.
_DEFAULT = "Q4_K_M"
#: The end of the name of a GGUF file: its quantisation.
_QUANTIZATION = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d(?:_[A-Z\d]+)*|TQ\d_\d|MXFP4(?:_MOE)?|BF16|FP?16|FP?32))$", re.IGNORECASE
)
#: The end of the name of one part of a GGUF model in several files.
_PART = re.compile(r"-\d+-of-\d+$")
#: GGUF files that are not models of text.
_OTHERS = re.compile(r"mmproj|imatrix", re.IGNORECASE)


class FileSet(NamedTuple):
    """Files that are downloaded from a repository of the hub."""

    patterns: tuple[str, ...]
    required: tuple[str, ...]
    """A repository must have one of these."""
    before_gguf: tuple[str, ...]
    """Patterns of files that are used before a GGUF file; empty if GGUF files are not used."""
    hint: str
    """The end of the error for a repository without them."""
    kind: str = "model"


_MODEL_HINT = "no config.json and no GGUF file"

#: The files of a tokenizer and of chat templates, also those in a converted model.
TOKENIZER_FILES = FileSet(
    patterns=(
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "additional_chat_templates/*.jinja",
        "model.penstock",
    ),
    required=("config.json", "model.penstock", "tokenizer.json"),
    before_gguf=("model.penstock", "tokenizer.json"),
    hint=_MODEL_HINT,
)
_WEIGHTS = (
    "model.safetensors",
    "model-*-of-*.safetensors",
    "weights.safetensors",
)
#: The files of a model; weights in other formats or precisions are not downloaded.
MODEL_FILES = FileSet(
    patterns=(
        *TOKENIZER_FILES.patterns,
        "quantize_config.json",
        "modules.json",
        "*_Pooling/config.json",
        "model.safetensors.index.json",
        *_WEIGHTS,
    ),
    required=("config.json", "model.penstock"),
    before_gguf=("model.penstock", *_WEIGHTS),
    hint=_MODEL_HINT,
)

#: The files of a LoRA adapter; an index of weights in several files, which are refused.
ADAPTER_FILES = FileSet(
    patterns=(
        "adapter_config.json",
        "adapter_model.safetensors",
        "adapter_model.safetensors.index.json",
        "model.safetensors.index.json",
    ),
    required=("adapter_config.json",),
    before_gguf=(),
    hint="no adapter_config.json; it is not a LoRA adapter in PEFT's layout",
    kind="adapter",
)


def select(name: str, source: HubModel, names: Iterable[str], files: FileSet) -> list[str]:
    """The names of the files to download: one GGUF file, or those of the set.

    `name` is that of the model in messages. Raises `ModelLoadError` if the repository does not have them.
    """
    names = sorted(names)
    found = [file for file in names if any(fnmatch.fnmatchcase(file, each) for each in files.patterns)]
    if not files.before_gguf:
        is_gguf = False
    elif source.file is not None or source.quantization is not None:
        is_gguf = True
    else:
        has_model = any(fnmatch.fnmatchcase(file, each) for file in found for each in files.before_gguf)
        is_gguf = not has_model and any(file.lower().endswith(".gguf") for file in names)
    if is_gguf:
        return [_select_gguf(name, source, names)]
    if not any(required in names for required in files.required):
        raise ModelLoadError(f"{name}: {files.hint}")
    return found


def gguf_of(names: Iterable[str]) -> str | None:
    """The GGUF file of a selection; None if the model is a directory."""
    return next((name for name in names if name.lower().endswith(".gguf")), None)


def is_certain(source: HubModel, found: Iterable[str]) -> bool:
    """Whether the selection can be the same if the repository has other files, which are not known.

    A name without a file or a quantisation stands for one GGUF file of several only if that has the default.
    """
    gguf = gguf_of(found)
    is_named = source.file is not None or source.quantization is not None
    return gguf is None or is_named or _quantization(gguf).upper() == _DEFAULT


def _select_gguf(name: str, source: HubModel, names: Iterable[str]) -> str:
    if source.file is not None:
        if source.file not in names:
            raise ModelLoadError(f"{name}: {source.name} has no file {source.file}; {_listed(names)}")
        return source.file
    models = {file: _quantization(file) for file in names if _is_model(file)}
    wanted = source.quantization
    if wanted is None:
        if len(models) == 1:
            return next(iter(models))
        wanted = _DEFAULT
    matches = [file for file, found in models.items() if found.upper() == wanted.upper()]
    if len(matches) == 1:
        return matches[0]
    if matches:
        choices = ", ".join(f"{source.name}/{file}" for file in matches)
        problem = f"{len(matches)} files have the quantisation {wanted}; name one: {choices}"
    elif source.quantization is None:
        problem = f"{len(models)} GGUF files, none of them {_DEFAULT}; name one, such as {source.name}:Q8_0"
        problem += f"; {_listed(names)}"
    else:
        problem = f"{source.name} has no GGUF file of the quantisation {wanted}; {_listed(names)}"
    raise ModelLoadError(f"{name}: {problem}")


def _is_model(file: str) -> bool:
    stem = file.rpartition("/")[2][: -len(".gguf")]
    return file.lower().endswith(".gguf") and not _PART.search(stem) and not _OTHERS.search(stem)


def _quantization(file: str) -> str:
    """The quantisation that a file is named after; empty if its name has none."""
    found = _QUANTIZATION.search(file[: -len(".gguf")])
    return found[1] if found else ""


def _listed(names: Iterable[str]) -> str:
    """The models that a repository has, for messages."""
    models = [file for file in names if _is_model(file)]
    choices = dict.fromkeys(_quantization(file) or file for file in models)
    if choices:
        return f"there are {', '.join(choices)}"
    if any(file.lower().endswith(".gguf") for file in names):
        return "its GGUF files are parts of models, which llama-gguf-split --merge makes one file"
    return "there is no GGUF file"
