"""`Pipeline`: what `lmdeploy.pipeline` returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.compat.lmdeploy.serve.async_engine import AsyncEngine

if TYPE_CHECKING:
    import os

    from penstock.compat.lmdeploy.engine_configs import AnyEngineConfig
    from penstock.compat.lmdeploy.model import ChatTemplateConfig

__all__ = ["Pipeline"]


class Pipeline(AsyncEngine):
    """The engine that `pipeline` returns: an `AsyncEngine` with calls that return `Response` objects.

    They return text if it has arguments of LMDeploy's first pipeline, such as `backend`; docs/lmdeploy.md
    lists them.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        backend_config: AnyEngineConfig | None = None,
        chat_template_config: ChatTemplateConfig | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs = {"backend": None, "instance_num": None, "tp": None, **kwargs}
        super().__init__(
            model_path, backend_config=backend_config, chat_template_config=chat_template_config, **kwargs
        )

    @property
    def async_engine(self) -> AsyncEngine:
        """The pipeline itself."""
        return self
