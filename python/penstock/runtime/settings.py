"""`RuntimeSettings`: the options of the runtime, and the environment variables of AIBrix's."""

from __future__ import annotations

import ipaddress
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import penstock
from penstock.runtime.downloader.ownership import private_folder
from penstock.runtime.truth import truth_of

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["RuntimeSettings", "settings_of_environment"]

_TEMPORARY = private_folder()


@dataclass(frozen=True, kw_only=True)
class RuntimeSettings:
    """Options of the runtime. Times are in seconds, sizes in bytes.

    The string of each field is its help text on the command line. Raises `ConfigError` for an invalid value.
    """

    engine: Annotated[
        str,
        "Kind of the engine: penstock, vllm, sglang, trtllm, or another name for an engine without adapters "
        "and renamed metrics. Environment: INFERENCE_ENGINE.",
    ] = "vllm"
    engine_version: Annotated[str, "Version of the engine. Environment: INFERENCE_ENGINE_VERSION."] = "0.6.1"
    engine_endpoint: Annotated[str, "URL of the engine. Environment: INFERENCE_ENGINE_ENDPOINT."] = (
        "http://localhost:8000"
    )
    engine_timeout: Annotated[float, "Time for a request to the engine."] = 30.0
    scrape_path: Annotated[str, "Path of the engine's metrics. Environment: METRIC_SCRAPE_PATH."] = "/metrics"
    scrape_timeout: Annotated[float, "Time for a scrape of the engine's metrics."] = 1.0
    max_metrics_bytes: Annotated[int, "Maximum size of the engine's metrics."] = 1 << 20
    rename_metrics: Annotated[
        bool,
        "Add the engine's metrics under aibrix: names. Default: on. Environment: "
        "METRICS_ENABLE_TRANSFORMATION.",
    ] = True
    raw_metrics: Annotated[
        bool, "Return the engine's metrics as they are. Environment: METRICS_RAW_PASSTHROUGH_MODE."
    ] = False
    tokens: Annotated[
        tuple[str, ...],
        "Token that requests need, except /healthz, /ready and /metrics; repeat the option for several. "
        "Without one, only clients of this machine can change anything, and no one can start engines.",
    ] = field(default=(), repr=False)
    engine_key: Annotated[
        str | None,
        "Key of the engine, sent for clients that may change something and have no other key.",
    ] = field(default=None, repr=False)
    open_changes: Annotated[
        bool,
        "Without tokens, let clients of other machines load and unload adapters and download models.",
    ] = False
    model_dir: Annotated[str, "Folder of downloaded models. Environment: DOWNLOADER_LOCAL_DIR."] = str(
        _TEMPORARY / "models"
    )
    adapter_dir: Annotated[str, "Folder of downloaded adapters, which the engine must see as well."] = str(
        _TEMPORARY / "adapters"
    )
    allowed_roots: Annotated[
        tuple[str, ...],
        "Folder beside those of models and adapters that requests may name; repeat the option for several.",
    ] = ()
    artifact_hosts: Annotated[
        tuple[str, ...],
        "Host from which requests may download by http or https, or that they may name as an endpoint; * for "
        "all; repeat the option for several.",
    ] = ()
    secret_dir: Annotated[str, "Folder of credentials, with one file per key, or folders of these."] = (
        "/var/run/secrets/aibrix"  # noqa: S105 - a folder
    )
    max_downloads: Annotated[
        int, "Maximum number of downloads of models at the same time, and of adapters."
    ] = 4
    download_timeout: Annotated[
        float, "Time for a download of an adapter or a model; the same request resumes it after that."
    ] = 3600.0
    ready_checks_engine: Annotated[bool, "/ready has status 503 while the engine is down."] = False
    strict_compat: Annotated[
        bool, "Errors and answers exactly as AIBrix's runtime has them, where this runtime differs."
    ] = False
    max_body_bytes: Annotated[int, "Maximum size of a request's body."] = 64 << 10
    receive_timeout: Annotated[float, "Time within which a client must send a request."] = 30.0
    enable_fastapi_docs: Annotated[bool, "Describe the routes at /openapi.json and /docs."] = False
    engine_command: Annotated[
        str | None,
        "Command of the engines that /v1/runtime/models/activate starts, such as 'vllm serve'. Default: this "
        "installation's `penstock serve`.",
    ] = None
    sglang_command: Annotated[
        str | None,
        "Command of the engines of the kind sglang, such as 'python -m sglang.launch_server'. Default: none, "
        "and requests for this kind are refused.",
    ] = None
    engine_flags: Annotated[
        tuple[str, ...],
        "Further flag that requests may give to such an engine; repeat the option for several.",
    ] = ()
    engines_host: Annotated[str, "Address at which such engines listen."] = "127.0.0.1"
    open_engines: Annotated[
        bool,
        "Let engines of --engine-command and --sglang-command listen at an address that other machines "
        "reach. Their routes for sleep and development need no key.",
    ] = False
    max_engines: Annotated[int, "Maximum number of such engines; 0 closes /v1/runtime."] = 8
    registry_path: Annotated[
        str, "File of the running engines. Environment: AIBRIX_ENGINE_REGISTRY_PATH."
    ] = str(_TEMPORARY / "engines.json")

    def __post_init__(self) -> None:
        for name in ("tokens", "allowed_roots", "artifact_hosts", "engine_flags"):
            values = getattr(self, name)
            if not isinstance(values, tuple) or not all(isinstance(value, str) and value for value in values):
                raise _error(name, None if name == "tokens" else values, "texts that are not empty")
        for name in ("engine_timeout", "scrape_timeout", "download_timeout", "receive_timeout"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise _error(name, value, "a finite number above 0")
        for name in ("max_metrics_bytes", "max_body_bytes", "max_downloads"):
            value = getattr(self, name)
            if value < 1:
                raise _error(name, value, "at least 1")
        if self.max_engines < 0:
            raise _error("max_engines", self.max_engines, "at least 0")
        is_foreign = self.engine_command is not None or self.sglang_command is not None
        if is_foreign and not self.open_engines and not _is_local(self.engines_host):
            limit = "an address of this machine with other engines, unless open_engines is on"
            raise _error("engines_host", self.engines_host, limit)
        url = urlsplit(self.engine_endpoint)
        if self.engine_endpoint and (url.scheme not in ("http", "https") or not url.hostname):
            raise _error("engine_endpoint", self.engine_endpoint, "a URL with http or https")
        if self.strict_compat and self.ready_checks_engine:
            raise _error("ready_checks_engine", "on", "off with strict_compat")

    @property
    def roots(self) -> tuple[Path, ...]:
        """The folders that requests may name: that of models, that of adapters, and the others."""
        return tuple(Path(root).resolve() for root in (self.model_dir, self.adapter_dir, *self.allowed_roots))


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _error(name: str, value: object, limit: str) -> penstock.ConfigError:
    shown = name if value is None else f"{name}={value!r}"
    return penstock.ConfigError(f"{shown} is not allowed: it must be {limit}", name, value, limit)


def settings_of_environment(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The fields that AIBrix's environment variables set."""
    texts = {
        "INFERENCE_ENGINE": "engine",
        "INFERENCE_ENGINE_VERSION": "engine_version",
        "INFERENCE_ENGINE_ENDPOINT": "engine_endpoint",
        "METRIC_SCRAPE_PATH": "scrape_path",
        "DOWNLOADER_LOCAL_DIR": "model_dir",
        "AIBRIX_ENGINE_REGISTRY_PATH": "registry_path",
    }
    flags = {
        "METRICS_ENABLE_TRANSFORMATION": "rename_metrics",
        "METRICS_RAW_PASSTHROUGH_MODE": "raw_metrics",
    }
    found: dict[str, Any] = {name: environment[key] for key, name in texts.items() if key in environment}
    for key, name in flags.items():
        if text := environment.get(key, "").strip():
            found[name] = truth_of(text)
            if found[name] is None:
                raise _error(key, text, "1 or 0")
    return found
