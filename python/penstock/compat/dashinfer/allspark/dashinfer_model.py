"""`DashInferModel`, the loader of serialised models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import penstock
from penstock.compat.dashinfer.allspark.llm import LLM
from penstock.compat.dashinfer.allspark.model_files import ModelFiles
from penstock.compat.dashinfer.allspark.runtime_config import AsModelConfig, AsModelRuntimeConfigBuilder
from penstock.compat.dashinfer.allspark.values import read_mapping

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from penstock.compat.dashinfer.allspark.enums import TargetDevice
    from penstock.compat.dashinfer.allspark.generation_config import ASGenerationConfigBuilder

__all__ = ["DashInferModel"]


class DashInferModel(LLM):
    """A serialised model: `<name>.asgraph` and `<name>.asparam` in a directory.

        loader = DashInferModel("model_output", "qwen").load_model()
        config = loader.create_reference_runtime_config_builder("qwen", TargetDevice.CPU, [0], 8).build()

    `config_file_path` is a YAML or JSON file, and `config_content` its content as a mapping, such as
    `export_model_diconfig` writes. The section `runtime_config` has defaults of the runtime configuration,
    the section `generation_config` those of requests.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        name: str = "model",
        config_file_path: str | os.PathLike[str] | None = None,
        config_content: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(name)
        self._files = ModelFiles.named(path, name)
        content = dict(config_content or {})
        if config_file_path is not None:
            content = {**read_mapping(Path(config_file_path)), **content}
        self._runtime_section = _section(content, "runtime_config")
        self._generation_section = _section(content, "generation_config")

    def load_model(self) -> Self:
        """Check the files and read the model's configuration. Raises `ModelSerializerException`."""
        with self._errors():
            self._serialized().read()
            self._metadata = penstock.describe(self._find_model())
        return self

    def _find_model(self) -> Path:
        return self._serialized().weights

    def serialize(self, *_: object, **__: object) -> Self:
        """Has no effect: the model is serialised."""
        return self

    def free_model(self) -> Self:
        """Has no effect: the loader has no weights in memory."""
        return self

    def free_memory_serialize_file(self) -> Self:
        """Has no effect: the files are not temporary."""
        return self

    def create_reference_runtime_config_builder(
        self,
        engine_model_name: str | None = None,
        device_type: TargetDevice | str | None = None,
        device_ids: Sequence[int] | None = None,
        max_batch: int | str | None = None,
        max_context_length: int = -1,
    ) -> AsModelRuntimeConfigBuilder:
        """A builder with the model's files; arguments take precedence over the section `runtime_config`."""
        section = self._runtime_section
        builder = super().create_reference_runtime_config_builder(
            self.name, "cpu", [0], AsModelConfig.engine_max_batch, max_context_length
        )
        builder.update_from_dict(
            {key: value for key, value in section.items() if key not in ("model_path", "weights_path")}
        )
        if engine_model_name is not None:
            builder.model_name(engine_model_name)
        if device_type is not None:
            builder.compute_unit(device_type, device_ids)
        if max_batch is not None:
            builder.max_batch(max_batch)
        return builder

    def create_reference_generation_config_builder(
        self, runtimeConfig: AsModelConfig | None = None
    ) -> ASGenerationConfigBuilder:
        """A builder with the model's values and those of the section `generation_config`."""
        builder = super().create_reference_generation_config_builder(runtimeConfig)
        builder.update(self._generation_section)
        return builder


def _section(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = content.get(name) or {}
    if not isinstance(section, dict):
        message = f"{name} is {section!r}; it must be a mapping"
        raise ValueError(message)
    return section
