"""A program that uses a part of the library in a thread with a small stack.

Its argument is the size of the stack in bytes. It forks for each entry and prints the errors as JSON. An
entry makes its preparations in the main thread and returns what the other thread calls.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
import threading
import traceback
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import gguf

import penstock
from penstock.compat import lmdeploy
from penstock.compat.dashinfer import allspark
from penstock.compat.dashinfer.allspark.errors import AsError
from penstock.compat.llama_cpp import LlamaGrammar
from penstock.compat.vllm.sampling_params import StructuredOutputsParams
from support.api.adapters import write_adapter
from support.api.checkpoints import make_config, write_checkpoint
from support.api.ggufs import write_gguf

if TYPE_CHECKING:
    from collections.abc import Callable

    Entry = Callable[[Path], Callable[[], object]]

CONFIG = make_config("llama")
#: Nested sequences of a normaliser: the parser of JSON allows 127 levels, and each sequence has two.
NESTING = 60
SENTENCE = "The quick brown fox jumps over the lazy dog, don't you think? 12345 \u4f60\u597d caf\u00e9\n\n"
CHAT = [{"role": "user", "content": "Why is the sky blue?"}]


def write_models(folder: Path) -> None:
    """Write the files that the entries read."""
    write_checkpoint(folder / "float32", CONFIG)
    write_checkpoint(folder / "bfloat16", make_config("llama", dtype="bfloat16"))
    write_gguf(folder / "q4_0.gguf", gguf.GGMLQuantizationType.Q4_0)
    write_adapter(folder / "adapter", CONFIG)
    shutil.copytree(folder / "float32", folder / "deep")
    deep_file = folder / "deep" / "tokenizer.json"
    tokenizer = json.loads(deep_file.read_text())
    normalizer: dict[str, Any] = {"type": "NFC"}
    for _ in range(NESTING):
        normalizer = {"type": "Sequence", "normalizers": [normalizer]}
    # The lookahead after a greedy repetition makes the library match with backtracking.
    pattern = {"Regex": r"(?i:'s|'t|'re)|\s+(?!\S)|(?:\p{L}+\s?)+(?=[^\p{L}]|$)|\p{N}{1,3}|\S"}
    split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    steps: dict[str, Any] = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    tokenizer |= {"normalizer": normalizer, "pre_tokenizer": steps}
    deep_file.write_text(json.dumps(tokenizer))


def nested_schema(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def nested_text(depth: int) -> str:
    return '{"a": ' + "[" * depth + "]" * depth + "}"


def nested_value(step: str, depth: int = 950) -> str:
    """A template that replaces `n.x` some times."""
    loop = f"{{% for i in range({depth}) %}}{{% set n.x = {step} %}}{{% endfor %}}"
    return "{% set n = namespace(x=[]) %}" + loop


def opens(model: str, **options: Any) -> Entry:
    """Opens an engine, generates and closes it."""

    def use(folder: Path) -> None:
        with penstock.Engine(folder / model, threads=1, **options) as engine:
            engine.blocking.generate("Hello", max_tokens=4, ignore_eos=True)
            assert engine.stats().requests_finished
            engine.health()

    return lambda folder: partial(use, folder)


def on_engine(call: Callable[[penstock.Engine], object], **options: Any) -> Entry:
    """Calls a function with an engine that is open."""

    def prepare(folder: Path) -> Callable[[], object]:
        engine = penstock.Engine(folder / "deep", threads=1, **options)
        engine.blocking.start()
        return partial(call, engine)

    return prepare


def streams(**options: Any) -> Entry:
    def read(engine: penstock.Engine) -> None:
        with engine.blocking.stream(SENTENCE, max_tokens=16, **options) as stream:
            assert "".join(chunk.text for chunk in stream)

    return on_engine(read)


def generates(prompt: Any, **options: Any) -> Entry:
    return on_engine(lambda engine: engine.blocking.generate(prompt, max_tokens=4, **options))


def with_tokenizer(call: Callable[[penstock.Tokenizer], object]) -> Entry:
    return lambda folder: partial(call, penstock.Tokenizer(folder / "deep"))


def renders(template: str, *, is_refused: bool = False) -> Entry:
    """Renders a template; with `is_refused`, the library refuses it."""

    def render(tokenizer: penstock.Tokenizer) -> None:
        errors = (penstock.InvalidRequestError,) if is_refused else ()
        with contextlib.suppress(*errors):
            tokenizer.apply_chat_template(CHAT, chat_template=template)
            assert not is_refused

    return with_tokenizer(render)


def use_adapter(engine: penstock.Engine, adapter: Path) -> None:
    engine.blocking.load_adapter("a", adapter)
    engine.blocking.generate("Hello", max_tokens=4, adapter="a")
    engine.blocking.unload_adapter("a")


def loads_adapter(folder: Path) -> Callable[[], object]:
    use = partial(use_adapter, adapter=folder / "adapter")
    return on_engine(use, max_adapters=2, max_adapter_rank=8)(folder)


def sleep_and_wake(folder: Path) -> None:
    async def main() -> None:
        async with penstock.Engine(folder / "deep", threads=1) as engine:
            await engine.sleep()
            await engine.wake()
            request = await engine.start_request(CHAT, max_tokens=4)
            async for _ in request:
                pass

    anyio.run(main)


def convert(folder: Path) -> None:
    path = penstock.convert(folder / "float32", folder / "converted", quantization="int8", overwrite=True)
    with penstock.Engine(path, threads=1):
        pass


def download(folder: Path) -> None:
    del folder
    with contextlib.suppress(penstock.ModelLoadError):
        penstock.Tokenizer("acme/tiny")
        raise AssertionError


def use_lmdeploy(folder: Path) -> None:
    with lmdeploy.Pipeline(str(folder / "deep")) as pipe:
        pipe(["Hello"], gen_config=lmdeploy.GenerationConfig(max_new_tokens=4))


def use_dashinfer(folder: Path) -> None:
    loader = allspark.HuggingFaceModel(folder / "float32", "tiny")
    loader.load_model().serialize(None, folder / "dashinfer").free_model()
    builder = loader.create_reference_runtime_config_builder("tiny", allspark.TargetDevice.CPU, [0], 2)
    config = builder.build()
    engine = allspark.Engine()
    assert engine.install_model(config) is allspark.AsStatus.ALLSPARK_SUCCESS
    assert engine.start_model("tiny") is allspark.AsStatus.ALLSPARK_SUCCESS
    engine.stop_model("tiny")
    Path(config.model_path).write_text(nested_text(5000))
    with contextlib.suppress(AsError):
        allspark.Engine().install_model(config)
        raise AssertionError


def use_nested_schemas() -> None:
    for read in (LlamaGrammar.from_json_schema, lambda text: StructuredOutputsParams(json=text).options()):
        try:
            read(nested_text(5000))
        except ValueError:
            continue
        raise AssertionError("it is nested too deep")


ENTRIES: dict[str, Entry] = {
    "open float32": opens("float32"),
    "open bfloat16": opens("bfloat16"),
    "open int8": opens("float32", quantization="int8"),
    "open int4": opens("bfloat16", quantization="int4"),
    "open GGUF": opens("q4_0.gguf"),
    "open nested normalizer": opens("deep"),
    "open with adapters": opens("float32", max_adapters=2, max_adapter_rank=8),
    "sleep and wake": lambda folder: partial(sleep_and_wake, folder),
    "load adapter": loads_adapter,
    "open tokenizer": lambda folder: partial(penstock.Tokenizer, folder / "deep"),
    "encode": with_tokenizer(lambda tokenizer: tokenizer.encode(SENTENCE * 2000)),
    "decode": with_tokenizer(lambda tokenizer: tokenizer.decode(list(range(256)) * 1000)),
    "describe": lambda folder: partial(penstock.describe, folder / "deep"),
    "convert": lambda folder: partial(convert, folder),
    "download": lambda folder: partial(download, folder),
    "generate": generates(SENTENCE),
    "generate chat": generates(CHAT),
    "beams": generates(SENTENCE, num_beams=2),
    "score": on_engine(lambda engine: engine.blocking.score(SENTENCE)),
    "schema": streams(response_format=nested_schema(25)),
    "regex": streams(regex="(a|(b|(c|d)*)*)+e{1,20}"),
    "grammar": streams(grammar='start: "a" start | "b"'),
    "template of nots": renders("{{ " + "not " * 100 + "1 }}"),
    "template of ifs": renders("{% if true %}" * 150 + "{% endif %}" * 150, is_refused=True),
    "template of brackets": renders("{{ " + "[" * 900 + "]" * 900 + " }}", is_refused=True),
    "recursive macro": renders(
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(900) }}", is_refused=True
    ),
    "block that calls itself": renders("{% block b %}{{ self.b() }}{% endblock %}", is_refused=True),
    "nested list as text": renders(nested_value("[n.x]") + "{{ n.x|string }}", is_refused=True),
    "nested list as JSON": renders(nested_value("[n.x]") + "{{ n.x|tojson(indent=1) }}", is_refused=True),
    "nested list compared": renders(nested_value("[n.x]") + "{{ n.x == [n.x] }}", is_refused=True),
    "nested dict as text": renders(nested_value("{'a': n.x}") + "{{ '%s'|format(n.x) }}", is_refused=True),
    "nested tuple as key": renders(nested_value("(n.x,)") + "{{ {1: 1}[n.x] }}", is_refused=True),
    "chain of filters": renders(nested_value("n.x|select") + "{{ n.x|list }}", is_refused=True),
    "list of the greatest depth": renders(nested_value("[n.x]", 190) + "{{ n.x|tojson(indent=1) ~ n.x }}"),
    "chain of the greatest length": renders(nested_value("n.x|map('string')", 50) + "{{ n.x|list }}"),
    "nested arguments": with_tokenizer(
        lambda tokenizer: tokenizer.apply_chat_template(
            [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": nested_text(5000)}]}]
        )
    ),
    "lmdeploy": lambda folder: partial(use_lmdeploy, folder),
    "dashinfer": lambda folder: partial(use_dashinfer, folder),
    "schemas of peers": lambda _: use_nested_schemas,
}


def run(call: Callable[[], object]) -> str:
    """The error of a call in another thread."""
    errors: list[str] = []

    def in_thread() -> None:
        try:
            call()
        except BaseException:  # noqa: BLE001 - any error is reported
            errors.append(traceback.format_exc())

    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    return "".join(errors)


def run_in_child(prepare: Entry, folder: Path, stack: int) -> str:
    """The error of an entry in a child process, or the signal that ends it."""
    file = folder / "error.txt"
    child = os.fork()
    if child == 0:
        call = prepare(folder)
        threading.stack_size(stack)
        file.write_text(run(call))
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return file.read_text() if status == 0 else f"ended with {status}"


def main(stack: int) -> None:
    """Run all entries."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_models(folder)
        errors = {name: run_in_child(prepare, folder, stack) for name, prepare in ENTRIES.items()}
    print(json.dumps(errors))


if __name__ == "__main__":
    main(int(sys.argv[1]))
