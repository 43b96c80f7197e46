"""LoRA adapters of the models: finding their files, and loading and unloading them under unique names."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

import penstock
from penstock._client import TurnLimiter
from penstock._hub_ids import parse_hub_id
from penstock.server.errors import ApiError, invalid
from penstock.server.paths import within

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

    from penstock.server.calls import Generation
    from penstock.server.models import Model
    from penstock.server.settings import ServerSettings

__all__ = ["Adapters"]

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
#: Loads at the same time. Their threads are those in which the engine tokenises long prompts, too.
_MAX_LOADS = 2
#: Status codes of a hub that does not have an adapter, or not for this server.
_REFUSALS = frozenset({401, 403, 404})


class Adapters:
    """Loads and unloads the adapters of the models of a server."""

    def __init__(
        self,
        models: Sequence[Model],
        names: Sequence[str],
        generations: Mapping[str, Generation],
        settings: ServerSettings,
    ) -> None:
        self._models = models
        #: Those that run.
        self._generations = generations
        #: The names of the models themselves.
        self._names = frozenset(names)
        self._settings = settings
        self._roots = tuple(map(Path, settings.lora_roots))
        self._slots = TurnLimiter(_MAX_LOADS)
        self._threads = anyio.CapacityLimiter(_MAX_LOADS)
        #: Loads by name and model.
        self._loads: Counter[tuple[str, Model]] = Counter()

    @property
    def models(self) -> list[Model]:
        """The models that can have adapters."""
        return [model for model in self._models if model.engine.config.max_adapters]

    async def load(self, model: Model, name: str, path: str, *, replace: bool) -> None:
        """Load the adapter that a request names, within the time of the settings.

        If there is no room, adapters without requests make room, the least recently used one first.
        """
        if model not in self.models:
            raise ApiError(400, f"the model {model.name!r} takes no adapters", param="model")
        evicted = model.evicted.get(name)
        if evicted is not None and evicted.root != path and not replace:
            raise _conflict(name)
        seconds = self._settings.lora_timeout
        with self._reserved(name, model), anyio.move_on_after(seconds):
            async with self._slots:
                found = await anyio.to_thread.run_sync(
                    self._find, name, path, abandon_on_cancel=True, limiter=self._threads
                )
                with _load_errors(name, path, found):
                    load = partial(model.load_adapter, name, found, root=path, replace=replace)
                    await self._with_room(model, name, load)
            return
        raise _late(name, seconds)

    async def restore(self, generation: Generation) -> None:
        """Load the adapter of a generation again if it has made room. It stays until the generation ends."""
        model, name = generation.model, generation.call.params.adapter
        if name is None:
            return
        model.use_adapter(name)
        if (source := model.evicted.get(name)) is None:
            return
        seconds = self._settings.lora_timeout
        with anyio.move_on_after(seconds):
            async with self._slots:
                try:
                    await self._with_room(model, name, partial(model.restore_adapter, name))
                except penstock.AdapterLoadError as error:
                    reason = str(error).replace(source.path, source.root)
                    raise _unavailable(f"the adapter cannot be loaded again: {reason}") from error
            return
        raise _late(name, seconds)

    async def _with_room(self, model: Model, name: str, load: Callable[[], Awaitable[None]]) -> None:
        """Load the adapter of this name, and let others make room for it."""
        while True:
            try:
                await load()
            except penstock.AdapterLimitError:
                used = {generation.call.params.adapter for generation in self._generations.values()}
                if not await model.evict_adapter({*used, name}):
                    raise
            else:
                return

    @contextmanager
    def _reserved(self, name: str, model: Model) -> Iterator[None]:
        """Keep other models from loading an adapter of this name."""
        if name in self._names:
            raise invalid("lora_name", name, "another name than those of the models")
        others = [other for other in self._models if other is not model]
        if any((name, other) in self._loads or name in other.adapter_names for other in others):
            message = f"the lora adapter {name!r} is one of another model"
            raise ApiError(409, message, param="lora_name", code="conflict")
        self._loads[name, model] += 1
        try:
            yield
        finally:
            self._loads[name, model] -= 1
            if not self._loads[name, model]:
                del self._loads[name, model]

    def _find(self, name: str, given: str) -> str:
        """The folder of a path, or the path if it is an id of the hub; reads the file system."""
        paths = (Path(given), *(root / given for root in self._roots))
        inside = [found for path in paths if (found := within(path, self._roots)) is not None]
        for folder in inside:
            if _is_file(folder / _CONFIG):
                for file in (_CONFIG, _WEIGHTS):
                    target = within(folder / file, self._roots)
                    if target is None or (target.exists() and not target.is_file()):
                        raise invalid("lora_path", given, f"a folder with a file {file} of its own")
                return str(folder)
        if parse_hub_id(given) and not Path(given).exists():
            if self._settings.allow_lora_downloads:
                return given
            limit = "a folder in one of lora_roots: allow_lora_downloads is off"
            raise invalid("lora_path", given, limit)
        if not inside:
            raise invalid("lora_path", given, "a folder in one of lora_roots")
        raise _not_found(name, given)

    async def unload(self, name: str, *, force: bool) -> None:
        """Unload an adapter, and wait for its requests for the time of the settings.

        The adapter of a former call that waits is not in the list, and can be unloaded with `force`.
        """
        for model in sorted(self.models, key=lambda model: name not in model.adapter_names):
            try:
                with anyio.move_on_after(self._settings.lora_timeout):
                    await model.unload_adapter(name, force=force)
            except penstock.AdapterNotFoundError:
                continue
            return
        message = f"The lora adapter '{name[:64]}' cannot be found."
        raise ApiError(404, message, param="lora_name", code="adapter_not_found")


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # its folder cannot be read
        return False


def _unavailable(reason: str) -> ApiError:
    """The response for a load that can succeed later. AIBrix tries again because of the words."""
    return ApiError(503, f"service unavailable: {reason}", code="unavailable", retry_after=5)


def _late(name: str, seconds: float) -> ApiError:
    return _unavailable(f"{name!r} was not loaded within {seconds:g} seconds (timeout); try again")


def _conflict(name: str) -> ApiError:
    message = (
        f"The lora adapter '{name}' has already been loaded with other contents: unload it, or set "
        "load_inplace."
    )
    return ApiError(409, message, param="lora_name", code="conflict")


def _not_found(name: str, path: str) -> ApiError:
    message = f"Loading lora {name[:64]} failed: No adapter found for {path[:256]}"
    return ApiError(404, message, param="lora_path", code="adapter_not_found")


@contextmanager
def _load_errors(name: str, path: str, found: str) -> Iterator[None]:
    try:
        yield
    except penstock.ConfigError as error:
        raise invalid("lora_name", name, error.limit or "a name") from error
    except penstock.AdapterLoadError as error:
        raise _load_error(error, name, path, found) from error
    except penstock.EngineStoppedError as error:
        raise _unavailable("the model is not open") from error


def _load_error(error: penstock.AdapterLoadError, name: str, path: str, found: str) -> ApiError:
    """The response for an adapter that is not loaded; its path is the one of the request."""
    if isinstance(error, penstock.AdapterConflictError):
        return _conflict(name)
    message = str(error).replace(f"{found}/", "").replace(found, path)
    if isinstance(error, penstock.AdapterLimitError):
        return _unavailable(message)
    if isinstance(error.__cause__, penstock.ModelLoadError):  # of the download
        response = getattr(error.__cause__.__cause__, "response", None)
        if getattr(response, "status_code", None) in _REFUSALS:
            return _not_found(name, path)
        return _unavailable(message)
    return ApiError(400, message, param="lora_path")
