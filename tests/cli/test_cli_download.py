"""Questions and messages of the command line before it downloads a model, with a terminal and without."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import types
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from penstock._hub_aliases import aliases, default_alias
from penstock._hub_ids import parse_hub_model
from penstock.cli import main
from penstock.cli.download import Memory
from support.api.checkpoints import CHAT_TEMPLATE
from support.api.ggufs import Type, write_gguf
from support.api.hub import LICENCE, MODEL, Hub, Repository, environment_of, etag, serving
from support.api.terminal import CTRL_C, Terminal

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.needs("terminal", "fcntl")

MAIN = "from penstock.cli import main; main()"
#: Runs several commands.
MAINS = """
import sys
from contextlib import suppress
from penstock.cli import main
for line in sys.argv[1:]:
    sys.argv[1:] = line.split()
    with suppress(SystemExit):
        main()
sys.exit()
"""
#: The machine has this much memory: enough for the file with 8 bits only.
SMALL_MEMORY = """
import types
import penstock
penstock.Host = lambda: types.SimpleNamespace(available_bytes={available})
"""
SMALL, LARGE = default_alias(), "qwen3-4b"
OPTIONS = ("--device", "cpu", "--threads", 1, "--max-tokens", 3)


def repository_of(alias: str) -> str:
    source = parse_hub_model(aliases()[alias])
    assert source is not None
    return source.name


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Repository]:
    """The repositories of a small and a larger alias."""
    small, large = tmp_path_factory.mktemp("small"), tmp_path_factory.mktemp("large")
    write_gguf(small / "Model-Q8_0.gguf", Type.Q8_0, chat_template=CHAT_TEMPLATE)
    write_gguf(large / "Model-Q4_K_M.gguf", Type.F32, chat_template=CHAT_TEMPLATE)
    return {
        repository_of(SMALL): Repository(small, "1" * 40),
        repository_of(LARGE): Repository(large, "2" * 40),
    }


@pytest.fixture
def hub(repositories: dict[str, Repository]) -> Iterator[Hub]:
    with serving({}, dict(repositories)) as hub:
        yield hub


@pytest.fixture
def file(repositories: dict[str, Repository]) -> Path:
    """The file of the small model."""
    return repositories[repository_of(SMALL)].folder / "Model-Q8_0.gguf"


@contextmanager
def terminal(hub: Hub, home: Path, *arguments: object, code: str = "") -> Iterator[Terminal]:
    with Terminal(code + MAIN, *arguments, environment=environment_of(hub, home), cwd=home) as found:
        yield found


def run(hub: Hub, home: Path, *arguments: object, code: str = "", **environment: str) -> Any:
    """The command in a process without a terminal."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code + MAIN, *map(str, arguments)],
        cwd=home,
        env=environment_of(hub, home) | environment,
        stdin=subprocess.DEVNULL,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )


def memory_for(file: Path) -> str:
    """Code for a machine whose memory holds this file as a sensible model, and nothing twice as large."""
    return SMALL_MEMORY.format(available=int(file.stat().st_size / 0.9 / 0.7) + 2)


def test_chat_without_a_model_offers_a_small_one(hub: Hub, file: Path, tmp_path: Path) -> None:
    with terminal(hub, tmp_path, "chat", *OPTIONS, code=memory_for(file)) as screen:
        before = screen.wait_for("Download it? [Y/n] ")
        assert f"No model is named; {SMALL} is a small one." in before
        assert f"{SMALL} ({aliases()[SMALL]}) has to be downloaded:" in before
        lines = [line.split(maxsplit=1) for line in before.splitlines() if line.startswith("  ")]
        facts = {line[0]: line[1] for line in lines}
        assert facts["repository"] == f"{repository_of(SMALL)}, commit {'1' * 12}"
        assert facts["files"] == "Model-Q8_0.gguf"
        assert facts["size"].startswith(f"{file.stat().st_size / 1e6:,.0f} MB; ")
        assert facts["licence"] == LICENCE
        assert facts["SHA-256"] == f"{etag(file)}, from {hub.address}; verified"
        assert hub.asked_files("GET") == []
        screen.type("y\n")
        screen.wait_for("> ")
        screen.type("Hello\n")
        screen.wait_for("3 output tokens")
        screen.wait_for("> ")
        screen.type("/bye\n")
        assert screen.wait() == 0
    assert hub.asked_files("GET") == [file.name]
    with terminal(hub, tmp_path, "chat", *OPTIONS) as screen:
        before = screen.wait_for("> ")
        assert f"No model is named: chatting with {SMALL}" in before
        assert "Download it?" not in before


def test_chat_without_a_model_names_the_largest_that_fits(hub: Hub, file: Path, tmp_path: Path) -> None:
    for code, best in ((memory_for(file), None), ("", LARGE)):
        with terminal(hub, tmp_path, "chat", "--device", "cpu", code=code) as screen:
            before = screen.wait_for("Download it? [Y/n] ")
            assert (f"The largest that fits this machine well is {LARGE}, " in before) == (best == LARGE)
            assert "models --sizes" in before
            screen.type("n\n")
            assert screen.wait() == 1
    assert hub.asked_files("GET") == []


@pytest.mark.parametrize(("answer", "status"), [("n\n", 1), ("\x04", 1), (CTRL_C, 130)])
def test_refused_download_downloads_nothing(hub: Hub, tmp_path: Path, answer: str, status: int) -> None:
    with terminal(hub, tmp_path, "generate", SMALL, "Hi", *OPTIONS) as screen:
        screen.wait_for("Download it? [Y/n] ")
        screen.type("what\n")
        screen.wait_for("Download it? [Y/n] ")
        screen.type(answer)
        assert screen.wait() == status
    assert hub.asked_files("GET") == []


@pytest.mark.parametrize("command", ["info", "convert", "bench", "serve", "batch", "download"])
def test_each_command_asks_before_a_download(hub: Hub, tmp_path: Path, command: str) -> None:
    (tmp_path / "in.jsonl").write_text(
        json.dumps({"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hi"}})
    )
    arguments: dict[str, list[object]] = {
        "info": [SMALL],
        "convert": [SMALL, "-o", "out"],
        "bench": [SMALL],
        "serve": [SMALL, "--port", 0],
        "batch": ["in.jsonl", "out.jsonl", "--model", SMALL],
        "download": [SMALL],
    }
    with terminal(hub, tmp_path, command, *arguments[command]) as screen:
        screen.wait_for("Download it? [Y/n] ")
        screen.type("n\n")
        assert screen.wait() == 1
    assert hub.asked_files("GET") == []


def test_yes_and_pipes_download_without_a_question(hub: Hub, file: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with terminal(hub, tmp_path / "other", "generate", SMALL, "Hi", "--yes", *OPTIONS) as screen:
        assert "Download it?" not in screen.wait_for("output tokens")
        assert screen.wait() == 0
    done = run(hub, tmp_path, "generate", SMALL, "Hi", *OPTIONS)
    assert (done.returncode, "Download it?" in done.stderr) == (0, False)
    assert len(hub.transfers(file.name)) == 2
    asked = [path for _, path in hub.requests if path.endswith("/revision/main")]
    assert len(asked) == 2, "the hub is asked once by each command"


@pytest.mark.parametrize("ending", ["", ":Q8_0", "/Model-Q8_0.gguf", "@main", None])
def test_download_prints_the_path_of_a_model(
    hub: Hub, file: Path, tmp_path: Path, ending: str | None
) -> None:
    name = SMALL if ending is None else f"{repository_of(SMALL)}{ending}"
    done = run(hub, tmp_path, "download", name)
    assert done.returncode == 0, done.stderr
    [path] = done.stdout.splitlines()
    assert path.endswith(f"/snapshots/{'1' * 40}/{file.name}")
    assert Path(path).read_bytes() == file.read_bytes()
    again = run(hub, tmp_path, "download", name, HF_HUB_OFFLINE="1")
    assert (again.returncode, again.stdout) == (0, done.stdout)
    assert len(hub.transfers(file.name)) == 1


def test_download_by_name_resumes_a_transfer(hub: Hub, file: Path, tmp_path: Path) -> None:
    """In the same call, or in the next one with versions of the library that do not try again."""
    code = "from huggingface_hub import constants; constants.DOWNLOAD_CHUNK_SIZE = 1 << 16\n"
    hub.breaks = [300_000]
    done = run(hub, tmp_path, "download", SMALL, code=code)
    if done.returncode != 0:
        assert done.stderr.endswith("; the next attempt continues the download\n")
        done = run(hub, tmp_path, "download", SMALL, code=code)
    assert Path(done.stdout.rstrip()).read_bytes() == file.read_bytes()
    first, second = hub.ranges
    assert (first, second.startswith("bytes=2")) == ("", True)


def test_download_by_name_verifies_the_checksum(hub: Hub, file: Path, tmp_path: Path) -> None:
    hub.is_damaging = True
    done = run(hub, tmp_path, "download", SMALL)
    assert (done.returncode, done.stdout) == (1, "")
    assert f", and not {etag(file)}, which the hub names; the file was deleted" in done.stderr


def test_download_by_name_checks_the_free_space(hub: Hub, file: Path, tmp_path: Path) -> None:
    hub.sizes[file.name] = 1 << 60
    done = run(hub, tmp_path, "download", SMALL)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"{SMALL} ({aliases()[SMALL]}): the download needs {1 << 60:,} bytes, and " in done.stderr
    assert hub.asked_files("GET") == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Missing argument 'MODEL', or --model-uri"),
        (("a/b", "--local-dir", "d"), "--local-dir excludes MODEL; give --model-uri in place of MODEL"),
        (("a/b", "--model-uri", "c/d"), "--model-uri excludes MODEL; give --model-uri in place of MODEL"),
        (("s3://a/b",), "s3://a/b: MODEL is no URI; give --model-uri s3://a/b"),
    ],
)
def test_download_takes_a_name_or_a_uri(arguments: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(main, ["download", *arguments])
    assert result.exit_code == 2
    assert result.output.endswith(f"Error: {message}\n")


def test_commit_that_was_shown_is_downloaded(repositories: dict[str, Repository], tmp_path: Path) -> None:
    shown, newer = (repositories[repository_of(alias)] for alias in (SMALL, LARGE))
    with serving({"main": shown, "next": newer}) as hub:
        with terminal(hub, tmp_path, "generate", MODEL, "Hi", *OPTIONS) as screen:
            screen.wait_for("Download it? [Y/n] ")
            hub.revisions["main"] = newer
            screen.type("y\n")
            assert screen.wait() == 0
        assert hub.asked_files("GET") == ["Model-Q8_0.gguf"]
    [folder] = tmp_path.glob("hub/models--*/snapshots/*")
    assert folder.name == shown.sha
    assert next(tmp_path.glob("hub/models--*/refs/main")).read_text() == shown.sha


def test_model_that_does_not_fit_is_named_first(hub: Hub, file: Path, tmp_path: Path) -> None:
    code = memory_for(file)
    with terminal(hub, tmp_path, "chat", LARGE, *OPTIONS, code=code) as screen:
        before = screen.wait_for("Download it? [y/N] ")
        assert "It does not fit into memory: the weights have " in before
        assert f"The largest that fits this machine well is {SMALL}, " in before
        screen.type("\n")
        assert screen.wait() == 1
    done = run(hub, tmp_path, "chat", LARGE, "Hi", *OPTIONS, code=code)
    assert done.returncode == 1
    assert "does not fit into memory" in done.stderr
    assert hub.asked_files("GET") == []
    done = run(hub, tmp_path, "chat", LARGE, "Hi", "--yes", *OPTIONS, code=code)
    assert (done.returncode, "Warning: " in done.stderr) == (0, True)
    assert run(hub, tmp_path, "chat", LARGE, "Hi", *OPTIONS, code=code).returncode == 0, "downloaded"


def test_model_that_is_quantised_or_converted_may_be_large(hub: Hub, file: Path, tmp_path: Path) -> None:
    """Its size in memory is another one, or no engine loads it."""
    code = memory_for(file)
    for arguments in (
        ("info", LARGE),
        ("convert", LARGE, "-o", "out"),
        ("generate", LARGE, "Hi", "--quantization", "int8", *OPTIONS),
    ):
        done = run(hub, tmp_path, *arguments, code=code)
        assert done.returncode == 0, done.stderr
        shutil.rmtree(tmp_path / "hub")


def test_chat_without_a_model_or_a_terminal_names_a_command(hub: Hub, tmp_path: Path) -> None:
    done = run(hub, tmp_path, "chat")
    assert done.returncode == 2
    assert (
        "Error: Missing argument 'MODEL', or --url. This downloads a small model and chats: " in done.stderr
    )
    assert f" chat {SMALL}\n" in done.stderr
    assert "The demo model is installed: " in done.stderr
    assert hub.requests == []
    done = run(hub, tmp_path, "chat", "-q", "Hi", "--yes", *OPTIONS)
    assert done.returncode == 0, done.stderr
    done = run(hub, tmp_path, "chat", "-q", "Hi", *OPTIONS)
    assert done.returncode == 2
    assert f"This chats with a model that is downloaded: -c chat {SMALL}" in done.stderr


def test_chat_without_the_extra_names_the_command_of_pip(hub: Hub, tmp_path: Path) -> None:
    code = "import sys; sys.modules['huggingface_hub'] = None\n"
    done = run(hub, tmp_path, "chat", code=code)
    assert done.returncode == 2
    assert "pip install 'penstock-llm[hub]'" in done.stderr or "[hub]'" in done.stderr
    done = run(hub, tmp_path, "chat", SMALL, "Hi", code=code)
    assert done.returncode == 1
    assert "[hub]'" in done.stderr
    assert done.stderr.count("\n") == 1


def test_command_without_a_network_fails_with_one_line(
    repositories: dict[str, Repository], tmp_path: Path
) -> None:
    with serving({}, repositories) as hub:
        pass
    done = run(hub, tmp_path, "chat", SMALL, "Hi")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert f"the hub at {hub.address} cannot be reached: " in done.stderr
    done = run(hub, tmp_path, "chat", SMALL, "Hi", HF_HUB_OFFLINE="1")
    assert done.stderr.count("\n") == 1
    assert "the hub is offline; run this first: hf download " in done.stderr


def test_models_lists_aliases_with_sizes_on_request(hub: Hub, file: Path, tmp_path: Path) -> None:
    listed = run(hub, tmp_path, "models", f"info {SMALL}", code=MAINS).stdout.splitlines()
    expected = [list(item) for item in aliases().items()]
    assert [line.split() for line in listed[: len(expected)]] == expected
    assert all(repository_of(SMALL) in path for _, path in hub.requests), "`models` asks nothing"
    commands = ("models --sizes --json", "models --sizes")
    done = run(hub, tmp_path, *commands, code=memory_for(file) + MAINS)
    found, end = json.JSONDecoder().raw_decode(done.stdout)
    rows = {row["name"]: row for row in found["models"]}
    assert list(rows) == list(aliases())
    assert rows[SMALL] == {
        "name": SMALL,
        "model": aliases()[SMALL],
        "downloaded": True,
        "bytes": file.stat().st_size,
        "licence": LICENCE,
        "fits": True,
    }
    assert (rows[LARGE]["fits"], rows[LARGE]["downloaded"]) == (False, False)
    assert rows["mistral-7b"]["bytes"] is None, "the hub does not have it"
    unknown = f"{len(aliases()) - 2} of {len(aliases())} sizes are unknown"
    assert f"Warning: {unknown}; the first error is: " in done.stderr
    text = done.stdout[end:]
    assert f"{LICENCE}   fits       {aliases()[SMALL]}" in text
    assert "too large" in text


def test_ctrl_c_does_not_wait_for_sizes(hub: Hub, tmp_path: Path) -> None:
    hub.is_silent = True
    code = "import os; os.environ['HF_HUB_ETAG_TIMEOUT'] = '1000'\n"
    with terminal(hub, tmp_path, "models", "--sizes", code=code) as screen:
        assert hub.is_stalled.wait(60)
        screen.type(CTRL_C)
        assert screen.wait() == 130


def test_memory_is_that_of_the_device_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def devices(reason: str | None) -> types.SimpleNamespace:
        memory = 10_000 if reason is None else None
        return types.SimpleNamespace(
            devices=[types.SimpleNamespace(index=0, free_memory=memory, reason=reason)]
        )

    monkeypatch.setattr("penstock.Host", lambda: types.SimpleNamespace(available_bytes=1000))
    monkeypatch.setattr("penstock.cuda_info", lambda: devices(None))
    assert Memory.of({}) == (9000, "cuda:0")
    assert Memory.of({"device": "cuda", "memory_ratio": 0.5}) == (5000, "cuda:0")
    assert Memory.of({"device": "cpu"}) == (900, "cpu")
    monkeypatch.setattr("penstock.cuda_info", lambda: devices("too old"))
    assert Memory.of({}) == (900, "cpu")
    assert Memory.of({"device": "cuda"}).holds(1 << 60), "the engine refuses the device"
    monkeypatch.setenv("BFC_MEM_RATIO", "0.5")
    assert Memory.of({"device": "cpu"}) == (500, "cpu")
    monkeypatch.setenv("PENSTOCK_MEMORY_RATIO", "0.25")
    assert Memory.of({"device": "cpu"}) == (250, "cpu")
    monkeypatch.setenv("PENSTOCK_MEMORY_RATIO", "25%")
    monkeypatch.setattr("penstock.Host", lambda: types.SimpleNamespace(available_bytes=(1 << 20) + 10))
    monkeypatch.setenv("BFC_LEFTOVER_MB", "1")
    assert Memory.of({"device": "cpu"}) == (5, "cpu")
    assert (Memory(100, "cpu").holds(70), Memory(100, "cpu").holds(71)) == (True, False)
    assert [Memory(1 << 40, device).holds(6 << 30) for device in ("cpu", "cuda:0")] == [False, True]
