"""Models by hub id: real downloads from a local server with the hub's protocol."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import penstock
from support.api.adapters import write_adapter
from support.api.checkpoints import make_config, write_checkpoint
from support.api.engines import PROMPT, SHORT, make_engine
from support.api.hub import (
    BROKEN,
    BUSY,
    GATED,
    MODEL,
    STALLED,
    TOKEN,
    Hub,
    Repository,
    environment_of,
    run_in_process,
    serving,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DECOYS = (
    ".gitattributes",
    "README.md",
    "consolidated.safetensors",
    "model-q8_0.gguf",
    "model.fp16.safetensors",
    "onnx/config.json",
    "onnx/model.safetensors",
    "pytorch_model.bin",
)

#: `huggingface_hub` reads its environment at import time, so each download runs in a new process.
ASK = f"""
import sys
import penstock
try:
    with penstock.Engine(sys.argv[1], threads=1) as engine:
        params = penstock.SamplingParams(max_tokens={SHORT.max_tokens}, ignore_eos=True, seed={SHORT.seed})
        result = engine.blocking.generate({list(PROMPT)}, params)
        print(list(result.token_ids))
except penstock.ModelLoadError as error:
    sys.exit(f"ModelLoadError: {{error}}")
"""


#: Prints the field of the `ConfigError`.
CONVERT = """
import sys
import penstock
try:
    penstock.convert(sys.argv[1], sys.argv[2])
except penstock.ConfigError as error:
    print(error.field)
"""

#: Prints the message of the `AdapterLoadError`.
LOAD_ADAPTER = """
import sys
import penstock
with penstock.Engine(sys.argv[1], max_adapters=1, threads=1) as engine:
    try:
        engine.blocking.load_adapter("a", sys.argv[2])
    except penstock.AdapterLoadError as error:
        print(error)
"""

TOKENIZE = """
import sys
import penstock
print(penstock.Tokenizer(sys.argv[1]).encode("Hello"))
"""

#: Each ends with Ctrl-C during a download that stalls.
INTERRUPTED = {
    "blocking": """
import sys
import penstock
penstock.Engine(sys.argv[1]).blocking.start()
""",
    "async": """
import asyncio
import sys
import penstock
asyncio.run(penstock.Engine(sys.argv[1]).start())
""",
    "cancelled": """
import asyncio
import sys
import penstock


async def main() -> None:
    start = asyncio.create_task(penstock.Engine(sys.argv[1]).start())
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    start.cancel()
    await asyncio.wait([start])
    raise KeyboardInterrupt


asyncio.run(main())
""",
}


@pytest.fixture(scope="module")
def revisions(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Repository]:
    """The tiny model as `main`, other weights as `refs/pr/1`, with decoys; an adapter; a tokenizer alone."""
    main = tmp_path_factory.mktemp("main")
    shutil.copytree(tiny_model, main, dirs_exist_ok=True)
    other = write_checkpoint(tmp_path_factory.mktemp("other"), make_config("llama"), seed=1)
    tokenizer = tmp_path_factory.mktemp("tokenizer")
    shutil.copy(tiny_model / "tokenizer.json", tokenizer)
    for folder in (main, other):
        for name in DECOYS:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(b"not needed")
    sharded = tmp_path_factory.mktemp("sharded")
    write_adapter(sharded, make_config("llama"))
    (sharded / "adapter_model.safetensors").rename(sharded / "adapter_model-00001-of-00002.safetensors")
    (sharded / "adapter_model.safetensors.index.json").write_text("{}")
    folders = {"main": main, "refs/pr/1": other, "tokenizer": tokenizer, "sharded": sharded}
    return {
        name: Repository(folder, f"{number:040x}") for number, (name, folder) in enumerate(folders.items())
    }


@pytest.fixture
def hub(revisions: dict[str, Repository]) -> Iterator[Hub]:
    with serving(revisions) as hub:
        yield hub


def local_answer(folder: Path) -> str:
    with make_engine(folder) as engine:
        return str(list(engine.blocking.generate(PROMPT, SHORT).token_ids))


def ask(hub: Hub, model: str, home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Open `model` in a process with its cache at `home`, which prints the output or the `ModelLoadError`."""
    return run_in_process(hub, ASK, home, model, **environment)


def answer(hub: Hub, model: str, home: Path, **environment: str) -> str:
    done = ask(hub, model, home, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def error_of(hub: Hub, model: str, home: Path, **environment: str) -> str:
    """The message of the `ModelLoadError`, which is one line."""
    done = ask(hub, model, home, **environment)
    assert done.returncode == 1, done.stdout
    _, _, text = done.stderr.rpartition("ModelLoadError: ")
    assert text.count("\n") == 1, done.stderr
    assert len(text) < 300
    return text.strip()


def test_hub_id_loads_like_a_directory_with_minimal_downloads(
    hub: Hub, tiny_model: Path, tmp_path: Path
) -> None:
    assert answer(hub, MODEL, tmp_path) == local_answer(tiny_model)
    assert hub.asked_revisions() == {"main"}
    needed = sorted(path.name for path in tiny_model.iterdir())
    assert hub.asked_files("GET") == needed
    assert set(hub.asked_files("HEAD")) <= set(needed)


def test_token_of_the_environment_opens_a_gated_model(hub: Hub, tiny_model: Path, tmp_path: Path) -> None:
    assert answer(hub, GATED, tmp_path, HF_TOKEN=TOKEN) == local_answer(tiny_model)


def test_conversion_to_existing_output_downloads_nothing(hub: Hub, tmp_path: Path) -> None:
    output = tmp_path / "output"
    output.mkdir()
    done = run_in_process(hub, CONVERT, tmp_path, MODEL, str(output))
    assert done.stdout == "output\n"
    assert hub.requests == []


def test_tokenizer_of_a_hub_model_downloads_no_weights(hub: Hub, tiny_model: Path, tmp_path: Path) -> None:
    done = run_in_process(hub, TOKENIZE, tmp_path, MODEL)
    assert done.stdout == f"{penstock.Tokenizer(tiny_model).encode('Hello')}\n"
    needed = {path.name for path in tiny_model.iterdir()}
    assert set(hub.asked_files("GET")) == needed - {"model.safetensors"}
    hub.requests.clear()
    assert answer(hub, MODEL, tmp_path) == local_answer(tiny_model)
    assert hub.asked_files("GET") == ["model.safetensors"]


def test_repository_of_a_tokenizer_alone_has_one(hub: Hub, tiny_model: Path, tmp_path: Path) -> None:
    done = run_in_process(hub, TOKENIZE, tmp_path, f"{MODEL}@tokenizer")
    assert done.stdout == f"{penstock.Tokenizer(tiny_model).encode('Hello')}\n"


def test_downloaded_files_are_not_downloaded_again(revisions: dict[str, Repository], tmp_path: Path) -> None:
    with serving(revisions) as hub:
        first = answer(hub, MODEL, tmp_path)
        hub.requests.clear()
        assert answer(hub, MODEL, tmp_path) == first
        assert hub.asked_revisions() == {"main"}, "the newest commit is requested"
        assert hub.asked_files("GET") == hub.asked_files("HEAD") == []
    assert answer(hub, MODEL, tmp_path) == first, "the offline flag is not needed"


def test_id_with_a_revision_opens_that_revision(
    hub: Hub, revisions: dict[str, Repository], tmp_path: Path
) -> None:
    expected = {name: local_answer(revisions[name].folder) for name in ("main", "refs/pr/1")}
    assert expected["main"] != expected["refs/pr/1"]
    assert answer(hub, f"{MODEL}@refs/pr/1", tmp_path) == expected["refs/pr/1"]
    assert hub.asked_revisions() == {"refs/pr/1"}
    assert answer(hub, f"{MODEL}@{revisions['main'].sha}", tmp_path) == expected["main"]


@pytest.mark.parametrize(
    ("model", "hint"),
    [
        pytest.param("acme/nothing", "not a local path and not found on the hub", id="unknown"),
        pytest.param(
            GATED,
            "accept the terms on the model's hub page, and set HF_TOKEN or run: hf auth login",
            id="gated",
        ),
        pytest.param(f"{MODEL}@v2", "revision v2 not found on the hub", id="unknown revision"),
        pytest.param(f"{MODEL}@tokenizer", "no config.json and no GGUF file", id="no supported format"),
        pytest.param(BROKEN, "download from the hub failed: ", id="broken connection"),
        pytest.param(BUSY, "429", id="too many requests"),
    ],
)
def test_hub_error_is_one_line_with_id_and_hint(hub: Hub, tmp_path: Path, model: str, hint: str) -> None:
    text = error_of(hub, model, tmp_path)
    assert text.startswith(f"{model}: ")
    assert hint in text


@pytest.mark.parametrize(
    ("adapter", "hint"),
    [
        pytest.param(
            "acme/nothing", "(for a private adapter, set HF_TOKEN or run: hf auth login)", id="unknown"
        ),
        pytest.param(f"{GATED}@sharded", "accept the terms on the adapter's hub page", id="gated"),
        pytest.param(MODEL, "no adapter_config.json; it is not a LoRA adapter in PEFT's layout", id="model"),
        pytest.param(f"{MODEL}@sharded", "adapters in several files are not supported", id="sharded"),
    ],
)
def test_hub_error_of_an_adapter_has_hints_for_adapters(
    hub: Hub, tiny_model: Path, tmp_path: Path, adapter: str, hint: str
) -> None:
    done = run_in_process(hub, LOAD_ADAPTER, tmp_path, str(tiny_model), adapter)
    assert done.returncode == 0, done.stderr
    assert hint in done.stdout
    assert done.stdout.startswith(
        'adapter "a" cannot be loaded: ' if adapter == f"{MODEL}@sharded" else "adapter 'a'"
    )


@pytest.mark.parametrize(
    ("model", "command"),
    [(MODEL, f"hf download {MODEL}"), (f"{MODEL}@refs/pr/1", f"hf download {MODEL} --revision refs/pr/1")],
)
def test_offline_cache_miss_is_one_line_with_id_and_hint(
    hub: Hub, tmp_path: Path, model: str, command: str
) -> None:
    text = error_of(hub, model, tmp_path, HF_HUB_OFFLINE="1")
    assert text.startswith(f"{model}: not in the local cache")
    assert text.endswith(f"run this first: {command}")
    assert hub.requests == []


#: The exit begins while a pool starts a thread, which it registers afterwards.
EXIT_WITH_A_POOL = """
import threading
from concurrent.futures import ThreadPoolExecutor
from penstock import _hub
from penstock._core import Port

is_started, is_forgotten = threading.Event(), threading.Event()
start, forget = threading.Thread.start, _hub._forget_threads

def start_pool(_model, _files):
    ThreadPoolExecutor().submit(threading.Event().wait)

def start_slowly(thread):
    start(thread)
    if thread.name.startswith("ThreadPoolExecutor"):
        is_started.set()
        is_forgotten.wait(0.5)  # with the lock of the pool, for which `forget` must wait

def forget_and_set(others):
    forget(others)
    is_forgotten.set()

_hub.resolve = start_pool
threading.Thread.start = start_slowly
_hub._forget_threads = forget_and_set
lookup = _hub.Lookup("model", Port(blocking=True))
is_started.wait()
lookup.abandon()
"""


def test_thread_that_starts_at_the_exit_does_not_delay_it() -> None:
    subprocess.run([sys.executable, "-c", EXIT_WITH_A_POOL], check=True, timeout=20)


@pytest.mark.needs("signals")
@pytest.mark.parametrize("code", INTERRUPTED.values(), ids=INTERRUPTED)
def test_ctrl_c_in_a_stalled_download_ends_the_process(hub: Hub, tmp_path: Path, code: str) -> None:
    listen = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    process = subprocess.Popen(
        [sys.executable, "-c", listen + code, STALLED],
        cwd=tmp_path,
        env=environment_of(hub, tmp_path) | {"HF_HUB_DOWNLOAD_TIMEOUT": "1000"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process:
        try:
            assert hub.is_stalled.wait(60)
            if "stdin" not in code:
                process.send_signal(signal.SIGINT)
            _, errors = process.communicate(b"\n", timeout=60)
        finally:
            process.kill()
    assert errors.rstrip().endswith(b"KeyboardInterrupt"), errors.decode()
    assert process.returncode == -signal.SIGINT
