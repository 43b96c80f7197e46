"""`LLM`, the base class of the loaders, and their exception."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import penstock
from penstock._install import missing_extra
from penstock.compat.dashinfer.allspark.errors import AsError
from penstock.compat.dashinfer.allspark.generation_config import ASGenerationConfigBuilder
from penstock.compat.dashinfer.allspark.runtime_config import (
    AsModelConfig,
    AsModelRuntimeConfigBuilder,
)
from penstock.compat.dashinfer.allspark.tokenizer import LoaderTokenizer
from penstock.compat.dashinfer.allspark.values import read_mapping

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from penstock.compat.dashinfer.allspark.enums import TargetDevice
    from penstock.compat.dashinfer.allspark.model_files import ModelFiles

__all__ = ["LLM", "ModelSerializerException"]

Read = TypeVar("Read")


class ModelSerializerException(Exception):  # noqa: N818 - DashInfer's name
    """A model cannot be read or serialised. `code` is 1; `model_name` is the loader's name of the model."""

    def __init__(self, message: str, code: int = 1, model_name: str = "") -> None:
        super().__init__(message, code, model_name)
        self.code = code
        self.model_name = model_name

    def __str__(self) -> str:
        return f"{self.model_name}: {self.args[0]}" if self.model_name else str(self.args[0])


class LLM(ABC):
    """A model with a tokenizer, defaults for requests, and files for the engine."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._metadata: dict[str, Any] | None = None
        self._files: ModelFiles | None = None
        self.tokenizer: LoaderTokenizer | None = None

    @abstractmethod
    def load_model(self) -> Self:
        """Read the model's configuration."""

    @abstractmethod
    def _find_model(self) -> str | Path:
        """The path or hub id of the model."""

    def _read(self, read: Callable[[str | Path], Read]) -> Read:
        """What `read` returns for the path or hub id of the model."""
        return read(self._find_model())

    def read_model_config(self) -> Self:
        """Read the model's configuration, if `load_model` has not."""
        return self if self._metadata else self.load_model()

    def init_tokenizer(self, padding_side: str = "left") -> Self:
        """Read the model's tokenizer, once; the model need not be loaded."""
        if self.tokenizer is None:
            with self._errors():
                self.tokenizer = self._read(partial(LoaderTokenizer, padding_side=padding_side))
        return self

    def get_tokenizer(self) -> LoaderTokenizer | None:
        """The tokenizer, which is also the attribute `tokenizer`; `None` before `init_tokenizer`."""
        return self.tokenizer

    def get_model_config(self) -> dict[str, Any]:
        """The model's `config.json`, or the same values of a GGUF file."""
        config: dict[str, Any] = self._loaded()["config"]
        return config

    def get_model_context_length(self) -> int:
        """The maximum number of tokens of a sequence: `max_position_embeddings`."""
        length = self.get_model_config().get("max_position_embeddings")
        if type(length) is not int:
            raise ModelSerializerException("config.json has no max_position_embeddings", 1, self.name)
        return length

    def create_reference_runtime_config_builder(
        self,
        engine_model_name: str,
        device_type: TargetDevice | str,
        device_ids: Sequence[int] | None,
        max_batch: int | str,
        max_context_length: int = -1,
    ) -> AsModelRuntimeConfigBuilder:
        """A builder with the model's files, the device, and the model's context length or a smaller one."""
        files = self._serialized()
        length = self.get_model_context_length()
        if max_context_length > 0:
            length = min(length, max_context_length)
        builder = AsModelRuntimeConfigBuilder().model_name(engine_model_name)
        builder.model_file_path(files.graph, files.weights)
        return builder.compute_unit(device_type, device_ids).max_batch(max_batch).max_length(length)

    def create_reference_generation_config_builder(
        self,
        runtimeConfig: AsModelConfig | None = None,
    ) -> ASGenerationConfigBuilder:
        """A builder with the values of the model's `generation_config.json` and its end tokens.

        `max_length` is that of the runtime configuration, if one is given.
        """
        builder = ASGenerationConfigBuilder(self._generation_config())
        if runtimeConfig is not None:
            length = runtimeConfig.engine_max_length
            known = self.get_model_config().get("max_position_embeddings")
            builder.update({"max_length": min(known, length) if type(known) is int else length})
        return builder

    def export_model_diconfig(self, path: str | os.PathLike[str]) -> Self:
        """Write a YAML file that `DashInferModel` reads: `model`, `runtime_config`, `generation_config`.

        Requires `pip install 'penstock-llm[dashinfer]'`.
        """
        try:
            import yaml
        except ImportError as error:
            message = missing_extra("writing YAML", "yaml", "dashinfer")
            raise ImportError(message, name="yaml") from error
        config = self.get_model_config()
        generation = self.create_reference_generation_config_builder().build()
        content = {
            "model": {"name": self.name, "architecture": (config.get("architectures") or [""])[0]},
            "runtime_config": {
                "model_name": self.name,
                "compute_unit": {"device_type": "cpu", "device_ids": [0], "compute_thread_in_device": 0},
                "engine_max_length": self.get_model_context_length(),
                "engine_max_batch": AsModelConfig.engine_max_batch,
            },
            "generation_config": {key: value for key, value in generation.items() if key != "seed"},
        }
        Path(path).write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
        return self

    def _generation_config(self) -> dict[str, Any]:
        metadata = self._loaded()
        known = {key: value for key, value in metadata["generation_config"].items() if value is not None}
        ends = known.pop("eos_token_ids")
        file = Path(metadata["path"]) / "generation_config.json"
        with self._errors():
            known |= read_mapping(file) if file.is_file() else {}
        return {**known, "eos_token_id": ends} if ends else known

    def _serialized(self) -> ModelFiles:
        if self._files is None:
            raise ModelSerializerException("the model is not serialised; call serialize first", 1, self.name)
        return self._files

    def _loaded(self) -> dict[str, Any]:
        """The metadata, which a loader keeps after `free_model`."""
        if self._metadata is None:
            raise ModelSerializerException("the model is not loaded; call load_model first", 1, self.name)
        return self._metadata

    def _errors(self) -> SerializerErrors:
        return SerializerErrors(self.name)


class SerializerErrors:
    """Raises errors of Penstock and of the operating system as `ModelSerializerException`."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, penstock.PenstockError | AsError | OSError):
            raise ModelSerializerException(str(error), 1, self._model_name) from error
