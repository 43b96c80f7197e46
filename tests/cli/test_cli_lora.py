"""The options of LoRA adapters on the command line, with the names of vLLM."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from penstock.cli import main
from support.api.adapters import write_adapter
from support.api.checkpoints import make_config, write_checkpoint
from support.server.process import is_healthy, started

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    import penstock

CONFIG = make_config("llama")
ADMIN = {"Authorization": "Bearer boss"}
COMPLETION = {"prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0}
FIXED = (
    "--threads",
    "1",
    "--kv-cache-bytes",
    "4M",
    "--max-tokens",
    "8",
    "--temperature",
    "0",
    "--ignore-eos",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of "model", of the adapters "one" and "two", and of "other-model"."""
    folder = tmp_path_factory.mktemp("cli")
    write_checkpoint(folder / "model", CONFIG)
    write_checkpoint(folder / "other-model", CONFIG)
    for seed, name in enumerate(("one", "two"), start=1):
        write_adapter(folder / name, CONFIG, seed=seed)
    return folder


@pytest.fixture(autouse=True)
def without_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    """`penstock serve` leaves the logging of the tests as it is."""
    monkeypatch.setattr("penstock.server.logs.configure_logging", lambda *_, **__: None)


@pytest.fixture
def settings_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The arguments with which `penstock serve` runs the server, in place of running it."""
    found: list[Any] = []
    monkeypatch.setattr("penstock.server.serve.serve", lambda *args, **_: found.extend(args))
    return found  # type: ignore[return-value]


def engines_of(settings_of: list[Any], arguments: Sequence[object]) -> dict[str, penstock.Engine]:
    """The engines of a server with these arguments."""
    settings_of.clear()
    result = CliRunner().invoke(main, ["serve", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return {name: source.make(lambda _done, _total: None) for name, source in settings_of[0].items()}


def limits_of(engine: penstock.Engine) -> tuple[int | None, int | None, int | None]:
    """The options of adapters of an engine."""
    config = engine.config
    return config.max_adapters, config.max_adapter_rank, config.max_cpu_adapters


def test_options_of_vllm_are_those_of_the_engine(settings_of: list[Any]) -> None:
    for arguments, expected in (
        ((), (0, None, None)),
        (("--enable-lora",), (8, None, None)),
        (("--enable-lora", "--max-cpu-loras", 3), (3, None, 3)),
        (("--max-loras", 2, "--max-lora-rank", 32, "--max-cpu-loras", 5), (2, 32, 5)),
        (("--max-adapters", 2, "--max-adapter-rank", 32, "--max-cpu-adapters", 5), (2, 32, 5)),
        (("--lora-modules", "a=b"), (8, None, None)),
        (("--max-loras", 1, "--lora-modules", "a=b", "c=d"), (1, None, 2)),
    ):
        [engine] = engines_of(settings_of, ["x", *arguments]).values()
        assert limits_of(engine) == expected, arguments


def test_values_of_lora_modules_can_follow_each_other(settings_of: list[Any], tmp_path: Path) -> None:
    module = json.dumps({"name": "c", "path": "p=q", "base_model_name": "any"})
    forms: list[list[object]] = [
        ["x", "--lora-modules", "a=/p", "--lora-modules=b=q", "--lora-modules", module],
        ["--lora-modules", "a=/p", "b=q", module, "x"],
        ["--lora-modules", "a=/p", "b=q", module, "--port", 1, "x"],
        ["x", "--lora-root", tmp_path, "--lora-modules", "a=/p", "b=q", module],
    ]
    for form in forms:
        engines_of(settings_of, form)
        assert settings_of[0]["x"].modules == {"a": "/p", "b": "q", "c": "p=q"}
    roots = settings_of[2].lora_roots
    assert roots[:2] == (str(tmp_path), "/p")
    assert [root.rpartition("/")[2] for root in roots[2:]] == ["q", "p=q"]


def test_modules_of_several_models_name_theirs(settings_of: list[Any]) -> None:
    module = json.dumps({"name": "c", "path": "p", "base_model_name": "b"})
    engines_of(settings_of, ["--model", "a=x", "--model", "b=y", "--lora-modules", module])
    assert {name: dict(source.modules) for name, source in settings_of[0].items()} == {
        "a": {},
        "b": {"c": "p"},
    }
    alias = json.dumps({"name": "c", "path": "p", "base_model_name": "n"})
    names = ("--served-model-name", "m", "--served-model-name", "n")
    engines_of(settings_of, ["z", *names, "--model", "b=y", "--lora-modules", alias])
    assert dict(settings_of[0]["m"].modules) == {"c": "p"}


@pytest.mark.parametrize(
    "value",
    [
        *("", "a", "=p", "a=", "{}", "{", "[]", '{"name": "a"}', '{"name": 1, "path": "p"}'),
        *('{"name": "a", "path": "p", "base_model_name": 1}', "x=p"),
    ],
)
def test_invalid_module_is_invalid_usage(value: str) -> None:
    result = CliRunner().invoke(main, ["serve", "x", "--lora-modules", value])
    assert result.exit_code == 2
    assert "--lora-modules" in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["x", "--lora-modules", "a=p", "a=q"],
        ["x", "--served-model-name", "y", "--served-model-name", "z", "--lora-modules", "z=p"],
        ["--model", "a=x", "--model", "b=y", "--lora-modules", "c=p"],
    ],
)
def test_conflict_of_modules_is_invalid_usage(arguments: list[str]) -> None:
    result = CliRunner().invoke(main, ["serve", *arguments])
    assert result.exit_code == 2
    assert "--lora-modules" in result.output


def test_server_has_its_modules_when_it_is_ready(folder: Path) -> None:
    arguments = ("--lora-modules", f"one={folder / 'one'}", f"two={folder / 'two'}")
    keys = ("--admin-api-key", "boss", "--kv-cache-bytes", "4M")
    with started(folder / "model", *keys, *arguments) as server:
        assert is_healthy(server)
        rows = server.ask("/v1/models")[1]["data"]
        assert [(row["id"], row["parent"]) for row in rows] == [
            ("model", None),
            ("one", "model"),
            ("two", "model"),
        ]
        assert rows[1]["root"] == str(folder / "one")
        texts = set()
        for name in ("model", "one", "two"):
            _, answer, _ = server.ask("/v1/completions", {"model": name, **COMPLETION})
            texts.add(answer["choices"][0]["text"])
        assert len(texts) == 3
        # The folders of modules can be loaded again, others cannot.
        assert server.ask("/v1/unload_lora_adapter", {"lora_name": "one"}, headers=ADMIN)[0] == 200
        for name, status in (("one", 200), ("model", 400)):
            body = {"lora_name": "new", "lora_path": str(folder / name)}
            assert server.ask("/v1/load_lora_adapter", body, headers=ADMIN)[0] == status
        server.process.terminate()
        assert server.end() == 0


def test_module_that_cannot_be_loaded_ends_the_server(folder: Path) -> None:
    result = CliRunner().invoke(
        main, ["serve", str(folder / "model"), "--lora-modules", f"a={folder / 'model'}", "--port", "0"]
    )
    assert result.exit_code == 1
    assert "contains no adapter_config.json" in result.output


def answer_of(*arguments: object) -> str:
    """The output of a local command."""
    result = CliRunner().invoke(main, [*map(str, arguments), "--json", *FIXED])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    return f"{answer['adapter']}: {answer['choices'][0]['text']!r}"


def test_local_commands_load_and_select_adapters(folder: Path) -> None:
    modules = ("--lora-modules", f"one={folder / 'one'}", "--lora-modules", f"two={folder / 'two'}")
    model = folder / "model"
    base = answer_of("generate", model, "Hello")
    one = answer_of("generate", model, "Hello", *modules)
    two = answer_of("generate", model, "Hello", *modules, "--adapter", "two")
    assert [text.partition(":")[0] for text in (base, one, two)] == ["None", "one", "two"]
    assert len({text.partition(":")[2] for text in (base, one, two)}) == 3
    assert answer_of("chat", model, "Hello", *modules).startswith("one: ")
    arguments = ["generate", str(model), "Hello", *modules, "--adapter", "three", *FIXED]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert "three" in result.output


@pytest.mark.parametrize("arguments", [["--adapter", "a"], ["--lora-modules", "a=b"]])
def test_chat_with_a_server_selects_its_adapter_by_model(arguments: list[str]) -> None:
    result = CliRunner().invoke(main, ["chat", "--url", "http://127.0.0.1:9", "Hello", *arguments])
    assert result.exit_code == 2
    assert f"{arguments[0]} has no effect with --url" in result.output
