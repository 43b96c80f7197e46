"""llama-cpp-python's API: what is without effect, and what is refused by name."""

from __future__ import annotations

import gc
import sys
from typing import TYPE_CHECKING, Any

import pytest

import penstock
from penstock.compat import llama_cpp
from penstock.compat.llama_cpp import Llama, UnsupportedError
from penstock.compat.llama_cpp.arguments import UNSUPPORTED, WITHOUT_EFFECT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

#: Arguments of `Llama` in llama-cpp-python 0.3.36, with their defaults.
DEFAULTS: dict[str, Any] = dict(
    (
        *(("n_gpu_layers", 0), ("split_mode", 1), ("main_gpu", 0), ("tensor_split", None)),
        *(("vocab_only", False), ("use_mmap", True), ("use_mlock", False), ("kv_overrides", None)),
        *(("seed", 4294967295), ("n_ctx", 512), ("n_batch", 512), ("n_ubatch", 512), ("n_threads", None)),
        *(("n_threads_batch", None), ("rope_scaling_type", -1), ("pooling_type", -1)),
        *(("attention_type", -1), ("rope_freq_base", 0.0), ("rope_freq_scale", 0.0)),
        *(("yarn_ext_factor", -1.0), ("yarn_attn_factor", 1.0), ("yarn_beta_fast", 32.0)),
        *(("yarn_beta_slow", 1.0), ("yarn_orig_ctx", 0), ("logits_all", False), ("embedding", False)),
        *(("offload_kqv", True), ("flash_attn", False), ("op_offload", None), ("swa_full", None)),
        *(("no_perf", False), ("last_n_tokens_size", 64), ("lora_base", None), ("lora_scale", 1.0)),
        *(("lora_path", None), ("numa", False), ("chat_format", None), ("chat_handler", None)),
        *(("draft_model", None), ("tokenizer", None), ("type_k", None), ("type_v", None)),
        *(("spm_infill", False), ("verbose", True)),
    )
)


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[Llama]:
    with Llama(str(tiny_model)) as llm:
        yield llm


def test_every_argument_is_accepted_with_its_default(tiny_model: Path) -> None:
    with Llama(str(tiny_model), **DEFAULTS) as llm:
        assert llm([1, 2, 3], max_tokens=2)["usage"]["completion_tokens"] <= 2
    assert DEFAULTS.keys() > WITHOUT_EFFECT | UNSUPPORTED.keys()


@pytest.mark.filterwarnings("error")
def test_model_that_is_dropped_is_closed(tiny_model: Path) -> None:
    llm = Llama(str(tiny_model))
    engine = llm._engine
    assert engine is not None
    stream = llm([1, 2, 3], stream=True)
    stream.close()
    del llm, stream
    gc.collect()
    with pytest.raises(penstock.EngineStoppedError):
        engine.blocking.generate([1, 2, 3])


def test_arguments_without_effect_are_accepted(tiny_model: Path) -> None:
    others: dict[str, Any] = dict.fromkeys(WITHOUT_EFFECT, True)
    with Llama(str(tiny_model), **others) as llm:
        assert llm.n_ctx() == 512


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_argument_that_is_not_supported_is_refused_by_name(name: str, tiny_model: Path) -> None:
    arguments: dict[str, Any] = {name: 77}
    with pytest.raises(UnsupportedError, match=rf"^{name} is 77; it is not supported: "):
        Llama(str(tiny_model), **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pooling_type": 4}, "pooling_type is 4"),
        ({"chat_format": "vicuna"}, "chat_format is 'vicuna'.*chatml, chatml-function-calling, llama-2"),
        ({"draft_model": "small"}, "draft_model is 'small'"),
    ],
)
def test_value_of_an_argument_is_refused_by_name(
    arguments: dict[str, Any], message: str, tiny_model: Path
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        Llama(str(tiny_model), **arguments)


def test_unknown_arguments_and_models_are_errors(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(
        TypeError, match=r"Llama\(\) got an unexpected .* 'n_thread'; did you mean n_threads\?$"
    ):
        Llama(str(tiny_model), n_thread=1)
    with pytest.raises(penstock.ModelLoadError, match=r"none\.gguf"):
        Llama(str(tmp_path / "none.gguf"))


def test_unknown_argument_of_a_request_has_the_nearest_name(llm: Llama) -> None:
    unknown: dict[str, Any] = {"temprature": 0.5}
    hint = r"argument 'temprature'; did you mean temperature\?$"
    with pytest.raises(TypeError, match=r"^Llama\.create_completion\(\) got an unexpected keyword " + hint):
        llm("a", **unknown)
    with pytest.raises(TypeError, match=hint):
        llm.create_chat_completion([], **unknown)
    with pytest.raises(TypeError, match=r"argument 'zzz'$"):
        llm.generate([1], zzz=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"suffix": "b"}, "suffix is 'b'"),
        ({"echo": True, "logprobs": 1}, "echo is True"),
        ({"mirostat_mode": 2}, "mirostat_mode is 2"),
    ],
)
def test_option_of_a_completion_is_refused_by_name(llm: Llama, options: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        llm("a", **options)
    assert llm("a", max_tokens=1, tfs_z=0.5, mirostat_tau=3.0, mirostat_eta=0.2)["object"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"messages": "hi"}, "messages is 'hi'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            "images are not supported yet",
        ),
        ({"response_format": {"type": "xml"}}, "response_format is {'type': 'xml'}"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "chat_format='chatml'"),
    ],
)
def test_option_of_a_chat_is_refused_by_name(options: Any, message: str, tiny_model: Path) -> None:
    with Llama(str(tiny_model), chat_format="chatml") as llm, pytest.raises(UnsupportedError, match=message):
        llm.create_chat_completion(**{"messages": [{"role": "user", "content": "hi"}], **options})


def test_function_that_is_not_a_tool_is_refused(llm: Llama) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    choice = {"type": "function", "function": {"name": "g"}}
    with pytest.raises(ValueError, match="tool_choice is 'g'; it must be a function of tools"):
        llm.create_chat_completion([{"role": "user", "content": "hi"}], tools=tools, tool_choice=choice)


def test_embeddings_need_the_argument_embedding(llm: Llama, tiny_model: Path) -> None:
    with pytest.raises(RuntimeError, match=r"Llama\(embedding=True\)"):
        llm.embed("a")
    with Llama(str(tiny_model), embedding=True, n_batch=4, pooling_type=3) as other:
        assert other.embed("abcdefgh") == other.embed("abcd")
        with pytest.raises(ValueError, match="8 tokens; the limit is n_batch=4"):
            other.embed("abcdefgh", truncate=False)


def test_special_token_in_a_text_is_refused_unless_asked_for(demo_model: Path) -> None:
    llm = Llama(str(demo_model), vocab_only=True)
    with pytest.raises(UnsupportedError, match=r"special is False.*<\|im_end\|>"):
        llm.tokenize(b"a<|im_end|>")


@pytest.mark.parametrize("name", ["eval", "sample", "save_state", "load_state", "scores", "ctx"])
def test_state_of_the_context_is_refused_with_a_reason(llm: Llama, name: str) -> None:
    with pytest.raises(AttributeError, match=rf"Llama has no attribute '{name}': "):
        getattr(llm, name)
    llm.reset()
    llm.set_cache(None)


@pytest.mark.parametrize("name", ["LlamaRAMCache", "LlamaTokenizer", "llama_chat_format", "server"])
def test_name_that_is_not_provided_has_an_alternative(name: str) -> None:
    with pytest.raises(ImportError, match=rf"llama_cpp\.{name} is not provided: "):
        getattr(llama_cpp, name)
    with pytest.raises(AttributeError, match="C functions are not provided"):
        llama_cpp.llama_backend_init  # noqa: B018
    assert all(hasattr(llama_cpp, exported) for exported in llama_cpp.__all__)


@pytest.mark.parametrize(
    "statement",
    [
        "import penstock.compat.llama_cpp.server",
        "from penstock.compat.llama_cpp.server.app import create_app",
        "from penstock.compat.llama_cpp.llama_chat_format import Llava15ChatHandler",
        "from penstock.compat.llama_cpp.llama_tokenizer import LlamaHFTokenizer",
        "from penstock.compat.llama_cpp.llama_types import ChatCompletionRequestMessage",
    ],
)
def test_module_that_is_not_provided_has_an_alternative(statement: str) -> None:
    name = statement.split()[1].split(".")[3]
    with pytest.raises(ImportError, match=rf"^llama_cpp\.{name} is not provided: "):
        exec(statement)  # noqa: S102


def test_openai_objects_need_the_package(llm: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openai.types.chat", None)
    with pytest.raises(ImportError, match="openai"):
        llm.create_chat_completion_openai_v1([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("seed", [[1], True, "7", 1.5])
def test_seed_that_is_no_integer_is_not_kept(llm: Llama, seed: Any) -> None:
    for use in (lambda: llm([1, 2], max_tokens=1, seed=seed), lambda: llm.set_seed(seed)):
        with pytest.raises(penstock.InvalidRequestError, match=r"^seed=.* it must be an integer"):
            use()
    assert llm([1, 2], max_tokens=1)["usage"]["completion_tokens"] <= 1


def test_model_needs_an_integer_as_its_seed(tiny_model: Path) -> None:
    seed: Any = [1]
    with pytest.raises(penstock.InvalidRequestError, match=r"^seed=\[1\] .* it must be an integer"):
        Llama(str(tiny_model), seed=seed)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("grammar", lambda llm: llm([1, 2], grammar=5)),
        ("prompt", lambda llm: llm(b"x")),
        ("text", lambda llm: llm.tokenize("text")),
    ],
)
def test_argument_of_the_wrong_type_is_named(llm: Llama, name: str, call: Callable[[Any], object]) -> None:
    with pytest.raises(penstock.InvalidRequestError, match=f"^{name}="):
        call(llm)
