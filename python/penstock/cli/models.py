"""`penstock convert`, `penstock info` and `penstock models`: the files of models, and the machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

import penstock
from penstock._options import EngineOptions
from penstock.cli.download import Memory, confirm_download, list_aliases, shown_size, yes_option
from penstock.cli.engine import progress_bar
from penstock.cli.options import Command, convert_options, given, json_option
from penstock.cli.output import print_json

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["convert", "info", "models"]


@click.command("convert", cls=Command)
@click.argument("model")
@click.option("-o", "--output", required=True, help="New directory, or archive if it ends with .tar.")
@click.option("--overwrite", is_flag=True, help="Replace a converted model.")
@yes_option
@convert_options
def convert(model: str, output: str, *, overwrite: bool, **options: Any) -> None:
    """Write MODEL with packed weights, which open in a fraction of a second."""
    model = confirm_download(model, options, is_loaded=False)
    with progress_bar("converting") as show_progress:
        settings: dict[str, Any] = given(EngineOptions, options)
        path = penstock.convert(model, output, overwrite=overwrite, progress=show_progress, **settings)
    click.echo(path)


@click.command("info", cls=Command)
@click.argument("model", required=False)
@json_option
@yes_option
def info(model: str | None, *, as_json: bool, assume_yes: bool) -> None:
    """Show model metadata, without loading the weights, and what of the model is not supported.

    Without MODEL, show the CUDA devices of the machine, or the reason why there is none.
    """
    if model is None:
        _show_machine(as_json=as_json)
    else:
        model = confirm_download(model, {"assume_yes": assume_yes}, is_loaded=False)
        _show_model(model, as_json=as_json)


def _show_model(model: str, *, as_json: bool) -> None:
    metadata = penstock.describe(model)
    config = metadata["config"]
    facts = {
        "architectures": config.get("architectures") or [],
        "format": metadata["format"],
        "files": [str(file) for file in metadata["files"]],
        "bytes": metadata["bytes"],
        "tensors": metadata["tensors"],
        "elements": dict(metadata["storage"]),
        "packed_bytes": metadata["elements"] - sum(number for _, number in metadata["storage"]),
        "parameters": metadata["parameters"],
        "memory": metadata["memory"],
        "quantization": metadata["quantization"],
        "max_position_embeddings": config.get("max_position_embeddings"),
        "vocab_size": config.get("vocab_size"),
        "has_tokenizer": metadata["has_tokenizer"],
        "has_chat_template": metadata["has_chat_template"],
        "unsupported": metadata["unsupported"],
    }
    if as_json:
        print_json(facts)
        return
    elements = [f"{number:,} {kind}" for kind, number in facts["elements"].items()]
    if facts["packed_bytes"]:
        elements.append(f"the rest in {facts['packed_bytes']:,} bytes of packed weights")
    lines: dict[str, object] = {
        "architecture": ", ".join(facts["architectures"]) or "unknown",
        "format": facts["format"],
        "files": "\n".join(facts["files"]),
        "size": f"{facts['bytes']:,} bytes in {facts['tensors']:,} tensors",
        "elements": ", ".join(elements),
        "parameters": "unknown" if facts["parameters"] is None else f"{facts['parameters']:,}",
        "quantization": facts["quantization"] or "none",
        "RAM": "unknown" if facts["memory"] is None else _needed_memory(**facts["memory"]),
        "context": f"{facts['max_position_embeddings'] or 'unknown'} tokens",
        "vocabulary": f"{facts['vocab_size'] or 'unknown'} tokens",
        "tokenizer": "yes" if facts["has_tokenizer"] else "no",
        "chat template": "yes" if facts["has_chat_template"] else "no",
        "supported": "\n".join(["no", *facts["unsupported"]]) if facts["unsupported"] else "yes",
    }
    _print_lines(lines)


def _needed_memory(weights: int, workspace: int, kv_cache: int, max_model_len: int) -> str:
    total, *parts = (
        f"{size / 2**20:,.0f} MiB" for size in (weights + workspace + kv_cache, weights, workspace, kv_cache)
    )
    return (
        f"{total}: {parts[0]} weights, {parts[1]} workspace, {parts[2]} KV cache of a sequence of "
        f"{max_model_len} tokens"
    )


def _show_machine(*, as_json: bool) -> None:
    cuda = penstock.cuda_info()
    if as_json:
        print_json({"version": penstock.__version__, "cuda": cuda.to_dict()})
        return
    lines = {"version": penstock.__version__, "CUDA": cuda.driver_version or cuda.reason}
    for device in cuda.devices:
        if device.free_memory is None:
            state = device.reason
        else:
            state = f"{device.free_memory / 2**30:.1f} of {device.total_memory / 2**30:.1f} GiB free"
        capability = f"{device.name}, compute capability {device.compute_capability}"
        lines[f"cuda:{device.index}"] = f"{capability}, {state}" if device.name else state
    compiler = f"NVRTC {cuda.compiler_version}, {cuda.compiler_path}"
    lines["CUDA compiler"] = cuda.compiler_reason or compiler
    cublas = f"{cuda.cublas_version}, {cuda.cublas_path}"
    lines["cuBLASLt"] = (cuda.cublas_reason or cublas).removeprefix("cuBLASLt is ")
    _print_lines(lines)


def _print_lines(lines: Mapping[str, object]) -> None:
    for name, value in lines.items():
        click.echo(f"{name:14} {value}".replace("\n", "\n" + " " * 15))


@click.command("models", cls=Command)
@click.option("--sizes", "with_sizes", is_flag=True, help="Ask the hub for sizes and licences.")
@json_option
def models(*, with_sizes: bool, as_json: bool) -> None:
    """List the short names of models, which stand for models of the Hugging Face hub.

    With --sizes, the list says which of them fit well into the memory of this machine.
    """
    found = list_aliases(with_sizes=with_sizes)
    errors = [alias.error for alias in found if alias.error is not None]
    if errors:
        unknown = f"{len(errors)} of {len(found)} sizes are unknown"
        click.echo(f"Warning: {unknown}; the first error is: {errors[0]}", err=True)
    memory = Memory.of({}) if with_sizes else None
    rows = []
    for alias in found:
        row: dict[str, Any] = {"name": alias.name, "model": alias.target, "downloaded": alias.is_downloaded}
        if memory is not None:
            weights = alias.plan.weights if alias.plan else None
            row |= {"bytes": weights, "licence": alias.plan.licence if alias.plan else None}
            row["fits"] = None if weights is None else memory.holds(weights)
        rows.append(row)
    if as_json:
        print_json({"models": rows})
        return
    for row in rows:
        cells = [f"{row['name']:18}"]
        if memory is not None:
            size = "unknown" if row["bytes"] is None else shown_size(row["bytes"])
            fits = {True: "fits", False: "too large", None: ""}[row["fits"]]
            cells.append(f"{size:>8}  {row['licence'] or '':12} {fits:10}")
        cells += [f"{row['model']:56}", "downloaded" if row["downloaded"] else ""]
        click.echo(" ".join(cells).rstrip())
