"""The public names of the package, and the modules that importing it loads."""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import subprocess
import sys
from types import ModuleType

import pytest

import penstock

PUBLIC = {
    "Adapter",
    "AdapterConflictError",
    "AdapterLimitError",
    "AdapterLoadError",
    "AdapterNotFoundError",
    "AllBlocksCleared",
    "Batch",
    "BatchChunk",
    "BatchItem",
    "BatchStream",
    "BlockRemoved",
    "BlockStored",
    "Blocking",
    "BlockingBatch",
    "BlockingBatchStream",
    "BlockingRequest",
    "BlockingStream",
    "Choice",
    "Chunk",
    "ConfigError",
    "CudaDevice",
    "CudaInfo",
    "DeadlineError",
    "DeviceUnavailableError",
    "Embeddings",
    "Engine",
    "EngineConfig",
    "EngineOptions",
    "EngineStoppedError",
    "GenerationError",
    "InvalidRequestError",
    "KvEventStream",
    "LogitsProcessor",
    "Health",
    "Histogram",
    "Host",
    "HostTierInfo",
    "MemoryInfo",
    "ModelInfo",
    "ModelLoadError",
    "NumaInfo",
    "OutOfMemoryError",
    "OverloadedError",
    "PenstockError",
    "ProfileRow",
    "Prompt",
    "Ranking",
    "Relevance",
    "Request",
    "RequestError",
    "RequestOptions",
    "Reranker",
    "Result",
    "SamplingOptions",
    "SamplingParams",
    "Score",
    "Stats",
    "Stream",
    "Tensor",
    "Timings",
    "Tokenizer",
    "ToolCall",
    "ToolCallDelta",
    "Usage",
    "WeightFormatInfo",
    "__version__",
    "convert",
    "cuda_info",
    "demo",
    "describe",
}
NOT_CLASSES = {"LogitsProcessor", "Prompt", "__version__", "convert", "cuda_info", "demo", "describe"}
HEAVY = {"torch", "numpy", "transformers", "jinja2", "tqdm", "huggingface_hub", "click", "trio", "uvloop"}


def modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    return set(json.loads(done.stdout))


def test_all_lists_exactly_the_public_names() -> None:
    assert len(penstock.__all__) == len(PUBLIC)
    assert set(penstock.__all__) == PUBLIC
    unlisted = {
        name
        for name, value in vars(penstock).items()
        if not name.startswith("_") and name not in PUBLIC and not isinstance(value, ModuleType)
    }
    assert unlisted == set()


@pytest.mark.parametrize("name", sorted(PUBLIC - NOT_CLASSES))
def test_public_class_has_a_docstring_and_a_public_module(name: str) -> None:
    value = getattr(penstock, name)
    assert inspect.isclass(value)
    assert value.__doc__
    assert value.__module__.partition(".")[0] == "penstock"
    assert not value.__module__.partition(".")[2].startswith("_")


def test_every_error_is_a_penstock_error() -> None:
    classes = [getattr(penstock, name) for name in PUBLIC - NOT_CLASSES]
    errors = [value for value in classes if issubclass(value, Exception)]
    assert len(errors) == 15
    assert all(issubclass(error, penstock.PenstockError) for error in errors)


def test_demo_is_an_attribute_of_the_package() -> None:
    statement = "import penstock; path = penstock.demo.model_path()"
    subprocess.run([sys.executable, "-W", "error", "-c", statement], check=True, timeout=60)


def test_import_of_the_package_imports_nothing_heavy() -> None:
    assert not HEAVY & modules_after("import penstock")


def test_version_is_that_of_the_installed_package() -> None:
    assert importlib.metadata.version("penstock-llm") == penstock.__version__


@pytest.mark.parametrize("is_imported", [False, True])
def test_sub_interpreter_cannot_import_penstock(*, is_imported: bool) -> None:
    code = """
import importlib, sys
for name in ("_interpreters", "_xxsubinterpreters"):
    try:
        interpreters = importlib.import_module(name)
        break
    except ImportError:
        pass
else:
    sys.exit("none")
if sys.argv[1] == "True":
    import penstock
attempt = "try:\\n    import penstock\\nexcept ImportError as error:\\n    print(error, flush=True)"
interpreters.run_string(interpreters.create(), attempt)
import penstock
"""
    command = [sys.executable, "-c", code, str(is_imported)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.stderr.strip() == "none":
        pytest.skip("this Python has no module for sub-interpreters")
    assert (done.returncode, done.stderr) == (0, "")
    assert "does not support sub-interpreters" in done.stdout
