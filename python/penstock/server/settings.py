"""`ServerSettings`: the limits and options of the server, in one place."""

from __future__ import annotations

import ipaddress
import math
import sys
from collections.abc import Mapping  # noqa: TC003 - read at run time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

import penstock

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["ServerSettings", "check_keys"]


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Limits and options of the server. Times are in seconds, sizes in bytes.

    The string of each field is its help text on the command line of `penstock serve`. Raises `ConfigError`
    for a number that is not above 0, and for a key that no request can have.
    """

    api_keys: Annotated[tuple[str, ...], "Key that requests need; repeat the option for several."] = field(
        default=(), repr=False
    )
    admin_api_keys: Annotated[
        tuple[str, ...],
        "Key of the administrative routes, which are closed without one; repeat the option for several.",
    ] = field(default=(), repr=False)
    max_outputs_per_key: Annotated[
        int | None,
        "Maximum number of unfinished outputs of requests with the same key, or of all if there are no keys. "
        "Default: no bound.",
    ] = None
    share_prefix_cache: Annotated[bool, "Share cached prefixes between API keys."] = False
    trust_priority: Annotated[
        bool,
        "Accept a priority below 0, which is served first, from all clients; else from administrators only.",
    ] = False
    allowed_hosts: Annotated[
        tuple[str, ...],
        "Name in the header Host for which the server answers, beside localhost, addresses and --host; * for "
        "all, which is the default with API keys; repeat the option for several.",
    ] = ()
    cors_origins: Annotated[
        tuple[str, ...],
        "Origin of web pages that may use the server, such as https://example.com, or * for all; repeat the "
        "option for several.",
    ] = ()
    forwarded_allow_ips: Annotated[
        str | None,
        "Addresses and networks of proxies, with commas between them, from which `penstock serve` takes the "
        "client's address, for the log and for its share, out of X-Forwarded-For; * for all. Default: none.",
    ] = None
    max_body_bytes: Annotated[
        int | None,
        "Maximum size of a request's body. Default: 1K for each token of the longest sequence of a model, at "
        "least 2M and at most 32M.",
    ] = None
    max_total_body_bytes: Annotated[
        int,
        "Maximum size of the bodies of all unfinished requests, of the stored items that they read, with the "
        "memory of their values, of log probabilities and of large responses that are not yet sent.",
    ] = 256 << 20
    max_header_bytes: Annotated[int, "Maximum size of a request's headers."] = 64 << 10
    max_connections: Annotated[
        int,
        "Maximum number of open connections, of `penstock serve`. An address has at most three quarters of "
        "them. At the limit, idle ones of the address that has the most make room for others.",
    ] = 4096
    keep_alive_timeout: Annotated[
        float, "Time for which `penstock serve` keeps a connection open between two requests."
    ] = 75.0
    receive_timeout: Annotated[float, "Time within which a client must send a request."] = 30.0
    request_timeout: Annotated[
        float | None, "Time within which a request must be computed. Default: no bound."
    ] = None
    send_timeout: Annotated[float, "Time for which a client may leave a response unread before it ends."] = (
        60.0
    )
    keep_alive_interval: Annotated[float, "Interval of the comments that keep an idle stream open."] = 15.0
    stall_timeout: Annotated[float, "Age of a step after which the engine counts as stuck."] = 60.0
    probe_timeout: Annotated[float, "Time for the step that /health?deep=1 sees."] = 5.0
    max_prompts: Annotated[int, "Maximum number of prompts of a request."] = 1024
    max_outputs: Annotated[
        int, "Maximum number of outputs of a request: prompts times n, best_of or beams."
    ] = 1024
    max_logprobs_per_request: Annotated[
        int, "Maximum number of log probabilities of a request, those of alternatives included."
    ] = 1 << 20
    max_embedding_tokens: Annotated[
        int, "Maximum number of tokens of a request for embeddings or scores."
    ] = 300_000
    rerank: Annotated[
        Literal["qwen3"] | Mapping[str, str] | None,
        "Prompts and answers of /v1/rerank and /v1/score: qwen3, with which Qwen3-Reranker was trained, or a "
        "JSON object with prompt, positive and negative. Default: those of models with Qwen3-Reranker in "
        "their names.",
    ] = None
    store_responses: Annotated[bool, "Keep responses in memory, for previous_response_id. Default: on."] = (
        True
    )
    max_stored_responses: Annotated[int, "Maximum number of stored responses of an API key."] = 1000
    max_stored_bytes: Annotated[int, "Maximum size of the stored responses of an API key."] = 32 << 20
    files_dir: Annotated[
        str | None,
        "Folder for the files of /v1/files and /v1/batches, which only this server uses. Default: none, and "
        "these routes are closed.",
    ] = None
    max_file_bytes: Annotated[int, "Maximum size of a file that a client uploads."] = 200 << 20
    max_files: Annotated[int, "Maximum number of files of an API key, and of its batches."] = 1000
    max_total_file_bytes: Annotated[int, "Maximum size of all files of an API key."] = 4 << 30
    max_batch_requests: Annotated[
        int, "Maximum number of lines of the input of a batch, blank ones included."
    ] = 50_000
    request_templates: Annotated[bool, "Accept chat templates in requests."] = False
    lora_roots: Annotated[
        tuple[str, ...],
        "Folder below which /v1/load_lora_adapter finds LoRA adapters; repeat the option for several. "
        "Default: the folders of --lora-modules.",
    ] = ()
    allow_lora_downloads: Annotated[
        bool, "Let /v1/load_lora_adapter download adapters from the Hugging Face hub."
    ] = False
    lora_timeout: Annotated[
        float, "Time for /v1/load_lora_adapter, and for /v1/unload_lora_adapter to wait for requests."
    ] = 25.0
    chat_page: Annotated[
        bool, "Serve a chat page at / (default). The page needs no key, its requests do."
    ] = True
    otlp_traces_endpoint: Annotated[
        str | None,
        "URL of an OpenTelemetry collector, such as http://localhost:4318/v1/traces. Default: that of the "
        "OTEL_EXPORTER_OTLP variables, for `penstock serve`.",
    ] = None
    legacy_metrics: Annotated[bool, "Add former names of vLLM's metrics to /metrics."] = False

    def __post_init__(self) -> None:
        for name in ("api_keys", "admin_api_keys"):
            keys = getattr(self, name)
            if not isinstance(keys, tuple):
                message = f"{name} is not allowed: it must be a tuple of keys"
                raise penstock.ConfigError(message, name, None, "a tuple of keys")
            check_keys(name, keys)
        for name in ("allowed_hosts", "cors_origins", "lora_roots"):
            values = getattr(self, name)
            limit = "a tuple of texts"
            if not isinstance(values, tuple) or not all(isinstance(value, str) and value for value in values):
                message = f"{name}={values!r} is not allowed: it must be {limit}"
                raise penstock.ConfigError(message, name, values, limit)
        if self.forwarded_allow_ips is not None and not _are_proxies(self.forwarded_allow_ips):
            limit = "addresses and networks with commas between them, or *"
            message = f"forwarded_allow_ips={self.forwarded_allow_ips!r} is not allowed: it must be {limit}"
            raise penstock.ConfigError(message, "forwarded_allow_ips", self.forwarded_allow_ips, limit)
        if self.request_templates and sys.platform != "linux":
            limit = "False on this system, which has no limit on the memory of a process"
            message = f"request_templates=True is not allowed: it must be {limit}"
            raise penstock.ConfigError(message, "request_templates", True, limit)  # noqa: FBT003
        if self.rerank is not None:
            try:
                penstock.Reranker.check_family(self.rerank)
            except penstock.InvalidRequestError as error:
                message = str(error).replace("family", "rerank", 1)
                raise penstock.ConfigError(message, "rerank", error.value, error.limit) from error
        for name, value in vars(self).items():
            if isinstance(value, (int, float)) and not isinstance(value, bool) and not 0 < value < math.inf:
                message = f"{name}={value!r} is not allowed: it must be a finite number above 0"
                raise penstock.ConfigError(message, name, value, "a finite number above 0")


def check_keys(source: str, keys: Iterable[object]) -> None:
    """Raise if no request can have one of these keys, which come from `source`."""
    limit = "printable ASCII characters without blanks"
    for key in keys:
        if not _is_key(key):
            fault = "an empty key" if key == "" else "a key with other characters"
            raise penstock.ConfigError(f"{source} has {fault}: a key must be {limit}", source, None, limit)


def _are_proxies(text: str) -> bool:
    try:
        return text == "*" or bool([ipaddress.ip_network(item.strip()) for item in text.split(",")])
    except ValueError:
        return False


def _is_key(key: object) -> bool:
    return isinstance(key, str) and key.isascii() and key.isprintable() and key != "" and " " not in key
