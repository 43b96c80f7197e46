"""`Engine`: installs, starts, stops and releases models, and starts requests."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import warnings
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import penstock
from penstock import PenstockError
from penstock._shown import shown
from penstock.compat.dashinfer.allspark import adapters, environment
from penstock.compat.dashinfer.allspark.enums import (
    AsCacheMode,
    AsEvictionStrategy,
    AsMHAPrefill,
    AsSchedulingStrategy,
    AsStatus,
    GenerateRequestStatus,
    RoPEScaleMethod,
    TargetDevice,
)
from penstock.compat.dashinfer.allspark.errors import AsError, as_error, check_process
from penstock.compat.dashinfer.allspark.generation_config import ASGenerationConfigBuilder, sampling_options
from penstock.compat.dashinfer.allspark.inputs import encode, text_of, token_ids_of, token_ids_of_inputs
from penstock.compat.dashinfer.allspark.installed_model import InstalledModel, ModelState, RequestHandle
from penstock.compat.dashinfer.allspark.model_files import AsFileInfo, get_file_information
from penstock.compat.dashinfer.allspark.multimedia import MultiMediaInfo
from penstock.compat.dashinfer.allspark.result_queue import GeneratedElements, ResultQueue
from penstock.compat.dashinfer.allspark.runtime_config import (
    AsModelConfig,
    AsModelRuntimeConfigBuilder,
    RuntimeConfig,
    engine_options,
)
from penstock.compat.dashinfer.allspark.statistics import AsEngineStat, RequestStatInfo, profile_text
from penstock.compat.dashinfer.allspark.torch_models import serialize_model_from_torch

__all__ = [
    "ASGenerationConfigBuilder",
    "AsCacheMode",
    "AsEngineStat",
    "AsEvictionStrategy",
    "AsFileInfo",
    "AsMHAPrefill",
    "AsModelConfig",
    "AsModelRuntimeConfigBuilder",
    "AsSchedulingStrategy",
    "AsStatus",
    "Engine",
    "GenerateRequestStatus",
    "GeneratedElements",
    "MultiMediaInfo",
    "RequestHandle",
    "RequestStatInfo",
    "ResultQueue",
    "RoPEScaleMethod",
    "RuntimeConfig",
    "TargetDevice",
]

logger = logging.getLogger("penstock.dashinfer")

GenerationConfig: TypeAlias = Mapping[str, Any] | ASGenerationConfigBuilder
Started: TypeAlias = "tuple[AsStatus, RequestHandle | None, ResultQueue | None]"

SUCCESS = AsStatus.ALLSPARK_SUCCESS
PARAM_ERROR = AsStatus.ALLSPARK_PARAM_ERROR


class Engine:
    """Any number of models, each with a name, and their requests.

        engine = Engine()
        engine.install_model(config)
        engine.start_model("model")
        status, handle, queue = engine.start_request_ids("model", loader, token_ids, generation_config)
        engine.sync_request("model", handle)
        elements = queue.Get()
        engine.release_request("model", handle)
        engine.stop_model("model")
        engine.release_model("model")

    A model is installed, then running, stopped, perhaps running again, and released. Methods that return an
    `AsStatus` do not raise: they return `ALLSPARK_PARAM_ERROR` for a model that is not installed,
    `ALLSPARK_INVALID_CALL_ERROR` for a call that the state of the model does not allow, and the reason is
    logged to the Python logger `penstock.dashinfer`. All methods can be called from any thread; none blocks
    calls for other requests. Models are released when the engine is garbage-collected, which interrupts their
    requests, and when the process ends. In the child of a fork, methods return `ALLSPARK_REQUEST_DENIED` or
    raise `AsError`; a new engine can be created there.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._process = os.getpid()
        self._models: dict[str, InstalledModel | None] = {}  # None while a model is being installed
        self._finalizer = weakref.finalize(self, _close_models, self._models)
        logger.info("AllSpark Init with Version: %s", self.get_version_full())

    # ---- models

    def install_model(self, as_model_config: AsModelConfig) -> AsStatus:
        """Load a model; `start_model` lets it take requests. Returns `ALLSPARK_SUCCESS`.

        The memory of the model is allocated and tried out here. The files are not read afterwards, except by
        `load_device_mem`. `model_name` must be unique in this engine.

        Raises `AsError` with the status `ALLSPARK_PARAM_ERROR` for an invalid field, `ALLSPARK_IO_ERROR` for
        missing or invalid files, `ALLSPARK_MEMORY_ERROR` if the model does not fit.
        """
        if not isinstance(as_model_config, AsModelConfig):
            kind = type(as_model_config).__name__
            raise AsError(PARAM_ERROR, f"expected an AsModelConfig, got {kind}; call build() of the builder")
        name = as_model_config.model_name
        path, options = engine_options(as_model_config)
        options["profile"] = environment.is_profiling()
        with self._lock:
            if name in self._models:
                raise AsError(PARAM_ERROR, f"model_name is {name!r}; a model of this name is installed")
            self._models[name] = None
        model = None
        try:
            engine = penstock.Engine(path, **options)
            engine.blocking.start()
            installed = InstalledModel(as_model_config, engine, Path(path))
            adapters.load_named_adapters(installed)
            model = installed
        except PenstockError as error:
            raise as_error(error) from error
        finally:
            with self._lock:
                if model is None:
                    del self._models[name]
                else:
                    self._models[name] = model
        return SUCCESS

    def build_model_from_config_struct(self, as_model_config: AsModelConfig) -> AsStatus:
        """Deprecated: use `install_model`."""
        _warn("build_model_from_config_struct", "install_model")
        return self.install_model(as_model_config)

    def start_model(self, model_name: str) -> AsStatus:
        """Let an installed or stopped model take requests."""
        try:
            self._change_state(model_name, ("installed", "stopped"), "running")
        except AsError as error:
            return _log(error)
        return SUCCESS

    def stop_model(self, model_name: str) -> AsStatus:
        """Refuse new requests of a running model, and wait until its requests have ended.

        Requests need not be released before. Ctrl-C ends the wait; then the call can be repeated.
        """
        try:
            model = self._change_state(model_name, ("running", "stopping"), "stopping")
        except AsError as error:
            return _log(error)
        ended: set[RequestHandle] = set()
        while model.state == "stopping":
            for handle in self._handles(model) - ended:
                handle.wait()
                ended.add(handle)
            with self._lock:
                # Another thread may have stopped it, started it again, and be stopping it once more.
                if model.state == "stopping" and model.handles <= ended:
                    model.state = "stopped"
        return SUCCESS

    def release_model(self, model_name: str) -> AsStatus:
        """Free the memory of a model, which is not running. Results that were not read stay readable."""
        try:
            model = self._change_state(model_name, ("installed", "stopped"), "released")
        except AsError as error:
            return _log(error)
        model.engine.close()
        return SUCCESS

    def unload_device_mem(self, model_name: str) -> AsStatus:
        """Free the memory of a model until `load_device_mem`; waits until its requests have ended.

        Meanwhile requests are refused with `ALLSPARK_REQUEST_DENIED`. The prefix cache is emptied, and the
        counters of `get_as_engine_stat` begin at 0 again. Raises `AsError` if `swap_threshold` is negative,
        and if the files of the model were deleted.
        """
        model = self._model(model_name)
        if model.config.swap_threshold < 0:
            reason = (
                f"swap_threshold is {model.config.swap_threshold}; it must be at least 0 to unload a model"
            )
            raise AsError(AsStatus.ALLSPARK_INVALID_CALL_ERROR, reason)
        adapter_paths = (Path(adapter.path) for adapter in model.engine.adapters.values())
        for path in (model.weights, *adapter_paths):
            if not path.exists():
                reason = f"{path} was deleted, and load_device_mem has to read it"
                raise AsError(AsStatus.ALLSPARK_IO_ERROR, reason)
        try:
            model.engine.blocking.sleep(drain=math.inf)
        except PenstockError as error:
            raise as_error(error) from error
        return SUCCESS

    def load_device_mem(self, model_name: str) -> AsStatus:
        """Load a model again after `unload_device_mem`, with the same outputs. Raises `AsError`."""
        model = self._model(model_name)
        try:
            model.engine.blocking.wake()
        except PenstockError as error:
            raise as_error(error) from error
        except RuntimeError as error:  # another thread is loading it
            raise AsError(AsStatus.ALLSPARK_INVALID_CALL_ERROR, str(error)) from error
        return SUCCESS

    def load_lora(self, model_name: str, lora_name: str) -> AsStatus:
        """Load a LoRA adapter; requests name it by `lora_name`. The model computes its requests meanwhile.

        `lora_name` is the name of an adapter beside the model's files, `<lora_name>.aslora`, which
        `serialize` with `lora_cfg` writes. Or it is the absolute path of such a directory, or of any adapter
        in PEFT's layout: the name is then its last part, without `.aslora`.

        Returns `ALLSPARK_LORA_ALREADY_LOADED` if an adapter of this name is loaded,
        `ALLSPARK_LORA_NUM_EXCEED_LIMIT_ERROR` if `lora_max_num` are, `ALLSPARK_LORA_RANK_EXCEED_LIMIT_ERROR`
        for a rank above `lora_max_rank`, `ALLSPARK_IO_ERROR` for missing or invalid files and an adapter that
        does not fit the model, `ALLSPARK_PARAM_ERROR` for an invalid name, and `ALLSPARK_INVALID_CALL_ERROR`
        if the model was serialised without `lora_cfg`.
        """
        try:
            adapters.load_adapter(self._model(model_name), lora_name)
        except AsError as error:
            return _log(error)
        return SUCCESS

    def unload_lora(self, model_name: str, lora_name: str) -> AsStatus:
        """Remove a LoRA adapter and free its memory.

        Returns `ALLSPARK_LORA_IN_USE` while a request with the adapter runs or waits, unless it was stopped
        or released; `ALLSPARK_LORA_NOT_FOUND` if no adapter has the name. If a request with the adapter
        starts at the same time, waits until it has ended.
        """
        try:
            model = self._model(model_name)
            adapters.unload_adapter(model, lora_name, self._handles(model))
        except AsError as error:
            return _log(error)
        return SUCCESS

    # ---- requests

    def start_request(
        self, model_name: str, inputs: Mapping[str, Any], generate_config: GenerationConfig | None = None
    ) -> Started:
        """Start a request. Returns its status, handle and queue; the last two are `None` if it is refused.

        `inputs["input_ids"]` has the token ids: a DLPack capsule or an array in CPU memory, int32 or int64,
        of shape `(1, n)` or `(n,)`. `generate_config` is a mapping; docs/dashinfer.md lists the keys.

        Statuses of refused requests: `ALLSPARK_PARAM_ERROR`; `ALLSPARK_EXCEED_LIMIT_ERROR` for an empty
        prompt and for lengths above `engine_max_length`; `ALLSPARK_REQUEST_DENIED` unless the model is
        running; `ALLSPARK_LORA_NOT_FOUND` if `lora_name` is not loaded.
        """
        try:
            return self._start(model_name, token_ids_of_inputs(inputs), generate_config)
        except AsError as error:
            return _log(error), None, None

    def start_request_ids(
        self, model_name: str, model: object, input_ids: Any, generate_config_builder: GenerationConfig
    ) -> Started:
        """Start a request with token ids; see `start_request`.

        `input_ids` is a list, or an array or tensor in CPU memory of shape `(n,)` or `(1, n)`. `model`, the
        loader, is not used. Raises `ValueError` if `input_ids` has another type or shape.
        """
        del model
        token_ids = token_ids_of(input_ids)
        try:
            return self._start(model_name, token_ids, generate_config_builder)
        except AsError as error:
            return _log(error), None, None

    def start_request_text(
        self,
        model_name: str,
        model: Any,
        input_str_or_array: str | Sequence[str],
        generate_config_builder: GenerationConfig,
    ) -> Started:
        """Start a request with a text, or a list of one text; see `start_request`.

        The tokenizer of `model`, the loader, encodes the text with the special tokens that begin a prompt. No
        chat template is applied.
        """
        try:
            text = text_of(input_str_or_array)
            installed = self._model(model_name)
            token_ids = encode(model, text, installed.max_model_len)
            return self._start(model_name, token_ids, generate_config_builder)
        except AsError as error:
            return _log(error), None, None

    def stop_request(self, model_name: str, request_handle: RequestHandle | None) -> AsStatus:
        """Cancel a request; never waits. Its output stays readable, its status becomes `GenerateFinished`.

        Has no effect on a request that has ended. Returns `ALLSPARK_EMPTY_REQUEST` for `None`,
        `ALLSPARK_ILLEGAL_REQUEST_ID` for a handle that was released or is not one of this model.
        """
        try:
            self._request(model_name, request_handle).cancel()
        except AsError as error:
            return _log(error)
        return SUCCESS

    def release_request(self, model_name: str, request_handle: RequestHandle | None) -> AsStatus:
        """Cancel a request and forget its handle; never waits. Its queue keeps the output.

        Returns statuses as `stop_request` does.
        """
        try:
            handle = self._request(model_name, request_handle)
            with self._lock:
                self._find(model_name).handles.discard(handle)
        except AsError as error:
            return _log(error)
        handle.cancel()
        return SUCCESS

    def sync_request(self, model_name: str, request_handle: RequestHandle | None) -> AsStatus:
        """Wait until a request has ended, or with `None` all requests of the model that were not released.

        Output need not be read meanwhile. Returns `ALLSPARK_RUNTIME_ERROR` if a request failed, see
        `ResultQueue.error`; `ALLSPARK_ILLEGAL_REQUEST_ID` as `stop_request` does.
        """
        try:
            if request_handle is None:
                handles = self._handles(self._model(model_name))
            else:
                handles = {self._request(model_name, request_handle)}
        except AsError as error:
            return _log(error)
        succeeded = [handle.wait() for handle in handles]
        for handle in handles:
            handle.report_end()
        return SUCCESS if all(succeeded) else AsStatus.ALLSPARK_RUNTIME_ERROR

    def get_no_wait(self, model_name: str, result_queue: ResultQueue) -> list[int]:
        """Deprecated: use `ResultQueue.GetNoWait`. Raises `AsError` for another type than a queue."""
        del model_name
        _warn("get_no_wait", "ResultQueue.GetNoWait")
        elements = _queue(result_queue).GetNoWait()
        return [] if elements is None else elements.ids_from_generate

    def get_wait(self, model_name: str, result_queue: ResultQueue) -> list[int]:
        """Deprecated: use `ResultQueue.Get`. Raises `AsError` for another type than a queue."""
        del model_name
        _warn("get_wait", "ResultQueue.Get")
        elements = _queue(result_queue).Get()
        return [] if elements is None else elements.ids_from_generate

    def get_request_status(self, model_name: str, result_queue: ResultQueue) -> GenerateRequestStatus:
        """Deprecated: use `ResultQueue.GenerateStatus`. Raises `AsError` for another type than a queue."""
        del model_name
        _warn("get_request_status", "ResultQueue.GenerateStatus")
        return _queue(result_queue).GenerateStatus()

    # ---- information

    def get_as_engine_stat(self, model_name: str) -> AsEngineStat:
        """A snapshot of the numbers of a model. Raises `AsError` if it is not installed."""
        model = self._model(model_name)
        try:
            return model.recorder.snapshot(model.engine.info, model.engine.stats())
        except PenstockError as error:
            raise as_error(error) from error

    def get_op_profiling_info(self, model_name: str) -> str:
        """A table of the time in each operation of a model, in milliseconds.

        It is empty unless `AS_PROFILE=ON` was set when the model was installed. Raises `AsError` if the model
        is not installed.
        """
        engine = self._model(model_name).engine
        try:
            return profile_text(engine.profile()) if engine.config.profile else ""
        except PenstockError as error:
            raise as_error(error) from error

    def get_model_info(self, model_name: str) -> str:
        """The architecture, inputs and outputs of a model. Raises `AsError` if it is not installed."""
        try:
            info = self._model(model_name).engine.info
        except PenstockError as error:
            raise as_error(error) from error
        return (
            f"model_type: {info.architecture}\n"
            f"inputs:\n  input_ids: int64, shape [1, n], n from 1 to {info.max_model_len - 2}\n"
            f"outputs:\n  generated_ids: int64, shape [1, n], ids from 0 to {info.vocabulary_size - 1}\n"
        )

    def get_file_information(
        self, graph_path: str | os.PathLike[str], param_path: str | os.PathLike[str]
    ) -> AsFileInfo:
        """The versions of Penstock that wrote the files of a serialised model. Raises `AsError`."""
        return get_file_information(graph_path, param_path)

    serialize_model_from_torch = staticmethod(serialize_model_from_torch)

    def get_rank_id(self) -> int:
        """0: there is one rank, which has the output."""
        return 0

    def get_version_full(self) -> str:
        """The version, as in "0.1.0/(GitSha1:unknown)"; the commit is not recorded."""
        return f"{penstock.__version__}/(GitSha1:unknown)"

    def is_allspark_work_as_service(self) -> bool:
        """False: the models are in this process."""
        return False

    def __repr__(self) -> str:
        return f"<allspark.Engine {self.get_version_full()}>"

    # ---- internals

    @property
    def _lock(self) -> threading.Lock:
        """Guards the models and their state; never held during a wait. Raises `AsError` after a fork."""
        check_process(self._process)
        return self._mutex

    def _find(self, model_name: str) -> InstalledModel:
        """The model of this name. Raises `AsError`."""
        model = self._models.get(model_name) if isinstance(model_name, str) else None
        if model is None:
            raise AsError(
                PARAM_ERROR, f"model_name is {model_name!r}; there is no installed model of this name"
            )
        return model

    def _model(self, model_name: str) -> InstalledModel:
        with self._lock:
            return self._find(model_name)

    def _handles(self, model: InstalledModel) -> set[RequestHandle]:
        """The requests that were not released."""
        with self._lock:
            return set(model.handles)

    def _change_state(self, model_name: str, old: tuple[ModelState, ...], new: ModelState) -> InstalledModel:
        """Change the state of a model, which must be one of `old`. Raises `AsError`."""
        with self._lock:
            model = self._find(model_name)
            if model.state not in old:
                reason = f"the model {model_name!r} is {model.state}; it must be {' or '.join(old)}"
                raise AsError(AsStatus.ALLSPARK_INVALID_CALL_ERROR, reason)
            model.state = new
            if new == "released":
                del self._models[model_name]
            return model

    def _request(self, model_name: str, handle: object) -> RequestHandle:
        """The handle of a request that was not released. Raises `AsError`."""
        with self._lock:
            model = self._find(model_name)
            if handle is None:
                raise AsError(AsStatus.ALLSPARK_EMPTY_REQUEST, "the request handle is None")
            if not isinstance(handle, RequestHandle) or handle not in model.handles:
                reason = f"{shown(handle)} was released, or is not a request of the model {model_name!r}"
                raise AsError(AsStatus.ALLSPARK_ILLEGAL_REQUEST_ID, reason)
            return handle

    def _start(self, model_name: str, token_ids: list[int], config: GenerationConfig | None) -> Started:
        """Start a request. Raises `AsError`."""
        arrival = time.monotonic()
        model = self._model(model_name)
        if model.state != "running":
            raise _not_running(model_name, model.state)
        values = config.build() if isinstance(config, ASGenerationConfigBuilder) else config
        if values is not None and not isinstance(values, Mapping):
            reason = f"expected a generation config builder or a mapping, got {type(values).__name__}"
            raise AsError(PARAM_ERROR, reason)
        options = sampling_options(
            values or {},
            num_prompt_tokens=len(token_ids),
            max_model_len=model.max_model_len,
            vocabulary_size=model.vocabulary_size,
        )
        try:
            request = model.engine.blocking.start_request(token_ids, **options)
        except PenstockError as error:
            raise as_error(error) from error
        queue = ResultQueue(request, arrival)
        handle = RequestHandle(request, queue)
        with self._lock:
            if model.state == "running":
                model.handles.add(handle)
                return SUCCESS, handle, queue
        handle.cancel()
        raise _not_running(model_name, model.state)


def _close_models(models: dict[str, InstalledModel | None]) -> None:
    """Release all models of an engine that is no longer used."""
    while models:
        _name, model = models.popitem()
        if model is not None:
            model.engine.close()


def _not_running(model_name: str, state: str) -> AsError:
    reason = f"the model {model_name!r} is {state}; call start_model before requests"
    return AsError(AsStatus.ALLSPARK_REQUEST_DENIED, reason)


def _log(error: AsError) -> AsStatus:
    """Log a refusal, and return its status."""
    logger.warning("%s", error)
    return error.status


def _queue(value: object) -> ResultQueue:
    """`value`, which must be a queue. Raises `AsError`."""
    if not isinstance(value, ResultQueue):
        raise AsError(
            PARAM_ERROR, f"result_queue is of type {type(value).__name__}; it must be a ResultQueue"
        )
    return value


def _warn(name: str, replacement: str) -> None:
    warnings.warn(f"{name} is deprecated; use {replacement}", DeprecationWarning, stacklevel=3)
