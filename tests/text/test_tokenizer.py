"""`Tokenizer`: the tokenizer and the chat templates of a model, without its weights."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import anyio.to_thread
import gguf
import pytest
import tokenizers

import penstock
from support.api.engines import make_engine
from support.api.texts import HOSTILE, any_code_points

if TYPE_CHECKING:
    from pathlib import Path

MESSAGES = [{"role": "user", "content": "Why is the sky blue?"}]
TEXTS = (*HOSTILE.values(), any_code_points(100, 0), "a<|im_end|>b")


def test_spaces_between_special_tokens_are_those_of_a_request(demo_model: Path) -> None:
    tokenizer = penstock.Tokenizer(demo_model)
    options = {"skip_special_tokens": False, "spaces_between_special_tokens": True}
    assert tokenizer.decode(tokenizer.encode("a<|im_end|>b"), **options) == "a <|im_end|> b"
    assert tokenizer.decode(tokenizer.encode("a<|im_end|>b"), skip_special_tokens=False) == "a<|im_end|>b"


@pytest.mark.parametrize("form", ["byte level", "sentencepiece"])
def test_names_are_those_of_the_vocabulary(form: str, tiny_model: Path, tmp_path: Path) -> None:
    path = tiny_model / "tokenizer.json"
    if form == "sentencepiece":
        path = tmp_path / "tokenizer.json"
        vocabulary = {"<unk>": 0, "▁Hello": 1, "▁world": 2}
        model = tokenizers.models.WordLevel(vocabulary, unk_token="<unk>")  # noqa: S106 - not a secret
        other = tokenizers.Tokenizer(model)
        other.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
        other.save(str(path))
    expected = tokenizers.Tokenizer.from_file(str(path))
    tokenizer = penstock.Tokenizer(path)
    ids = tokenizer.encode("Hello world, Grüße")
    assert tokenizer.token_names(ids) == [expected.id_to_token(token) for token in ids]
    assert tokenizer.token_names([tokenizer.vocabulary_size + 7]) == [""]
    with pytest.raises(penstock.InvalidRequestError, match="token_ids"):
        tokenizer.token_names([-1])


def test_results_are_those_of_the_engine(demo_model: Path) -> None:
    tokenizer = penstock.Tokenizer(demo_model)
    with make_engine(demo_model, kv_cache_blocks=8) as engine:
        for text in TEXTS:
            for special in (True, False):
                token_ids = tokenizer.encode(text, add_special_tokens=special)
                assert token_ids == engine.encode(text, add_special_tokens=special)
                for skip in (True, False):
                    shown = tokenizer.decode(token_ids, skip_special_tokens=skip)
                    assert shown == engine.decode(token_ids, skip_special_tokens=skip)
                assert tokenizer.token_bytes(token_ids) == engine.token_bytes(token_ids)
                assert tokenizer.token_names(token_ids) == engine.token_names(token_ids)
        options: dict[str, Any] = {
            "add_generation_prompt": False,
            "chat_template_kwargs": {"enable_thinking": False},
        }
        assert tokenizer.apply_chat_template(MESSAGES) == engine.apply_chat_template(MESSAGES)
        assert tokenizer.apply_chat_template(MESSAGES, **options) == engine.apply_chat_template(
            MESSAGES, **options
        )
        own = "{{ bos_token }}{{ messages[0].content }}"
        assert tokenizer.apply_chat_template(MESSAGES, chat_template=own).endswith("Why is the sky blue?")
        assert tokenizer.eos_token_ids == engine.info.eos_token_ids != ()
        assert tokenizer.vocabulary_size == engine.info.vocabulary_size
    with pytest.raises(penstock.InvalidRequestError) as caught:
        tokenizer.apply_chat_template(MESSAGES, chat_template="missing")
    assert caught.value.field == "chat_template"


def test_demo_model_ids_are_those_of_the_tokenizers_package(demo_model: Path) -> None:
    fields = gguf.GGUFReader(demo_model).fields
    tokens, merges = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "merges"))
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    theirs = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=pairs))
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    theirs.decoder = tokenizers.decoders.ByteLevel()
    ours = penstock.Tokenizer(demo_model)
    for text in (text for text in TEXTS if "<|" not in text):
        token_ids = ours.encode(text)
        assert token_ids == theirs.encode(text).ids
        assert ours.decode(token_ids) == theirs.decode(token_ids)


def test_converted_models_have_the_same_tokenizer(tiny_model: Path, tmp_path: Path) -> None:
    archive = penstock.convert(tiny_model, tmp_path / "tiny.tar", threads=1)
    directory = penstock.convert(tiny_model, tmp_path / "tiny", threads=1)
    (directory / "weights.safetensors").unlink()
    expected = penstock.Tokenizer(tiny_model)
    for model in (archive, archive.read_bytes(), directory):
        tokenizer = penstock.Tokenizer(model)
        assert tokenizer.encode("Grüße, 你好") == expected.encode("Grüße, 你好")
        assert tokenizer.apply_chat_template(MESSAGES) == expected.apply_chat_template(MESSAGES)
        assert tokenizer.eos_token_ids == expected.eos_token_ids


def test_weights_and_configuration_are_not_needed(tiny_model: Path, tmp_path: Path) -> None:
    expected = penstock.Tokenizer(tiny_model)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model / name, tmp_path)
    tokenizer = penstock.Tokenizer(tmp_path)
    assert tokenizer.apply_chat_template(MESSAGES) == expected.apply_chat_template(MESSAGES)
    end = json.loads((tmp_path / "tokenizer_config.json").read_text())["eos_token"]
    assert tokenizer.eos_token_ids == tuple(tokenizer.encode(end))
    assert tokenizer.bos_token_id is None


def test_a_tokenizer_json_alone_has_no_chat_template(tiny_model: Path) -> None:
    file = tiny_model / "tokenizer.json"
    tokenizer = penstock.Tokenizer(file)
    theirs = tokenizers.Tokenizer.from_file(str(file))
    assert [tokenizer.encode(text) for text in TEXTS] == [theirs.encode(text).ids for text in TEXTS]
    assert tokenizer.vocabulary_size == theirs.get_vocab_size() == 512
    assert tokenizer.eos_token_ids == ()
    with pytest.raises(penstock.InvalidRequestError, match="no chat template"):
        tokenizer.apply_chat_template(MESSAGES)


@pytest.mark.anyio
async def test_tokenizer_opens_and_encodes_in_a_worker_thread(tiny_model: Path) -> None:
    tokenizer = await anyio.to_thread.run_sync(penstock.Tokenizer, tiny_model)
    assert tokenizer.decode(await anyio.to_thread.run_sync(tokenizer.encode, "Hello")) == "Hello"
    assert repr(tokenizer) == f"<Tokenizer {str(tiny_model)!r}>"


def test_files_without_a_tokenizer_raise_a_model_load_error(tiny_model: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(tiny_model, tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    empty = tmp_path / "empty"
    empty.mkdir()
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    for model, problem in (
        (tmp_path / "nothing", "no such file or directory"),
        (bare, "has no tokenizer.json"),
        (empty, "contains neither a tokenizer.json nor a .gguf file"),
        (broken, "tokenizer.json: "),
        (tiny_model / "config.json", "tokenizer.json: "),
        (tiny_model / "model.safetensors", "open the directory"),
        (b"archive", "is not a converted model"),
    ):
        with pytest.raises(penstock.ModelLoadError, match=problem):
            penstock.Tokenizer(model)
    with pytest.raises(TypeError, match="for the model, not int"):
        penstock.Tokenizer(7)  # type: ignore[arg-type]


def test_invalid_text_and_ids_name_the_argument(tiny_model: Path) -> None:
    tokenizer = penstock.Tokenizer(tiny_model)
    with pytest.raises(penstock.InvalidRequestError, match="surrogate") as caught:
        tokenizer.encode("a\ud800")
    assert caught.value.field == "prompt"
    for method in (tokenizer.decode, tokenizer.token_bytes):
        with pytest.raises(penstock.InvalidRequestError) as caught:
            method([-1])
        assert caught.value.field == "token_ids"
    with pytest.raises(AttributeError, match="use eos_token_ids"):
        tokenizer.eos_token_id  # type: ignore[attr-defined]  # noqa: B018


def test_text_with_more_tokens_than_the_caller_allows_is_refused(demo_model: Path) -> None:
    tokenizer = penstock.Tokenizer(demo_model)
    text = "The quick brown fox."
    ids = tokenizer.encode(text)
    assert tokenizer.encode(text, max_tokens=len(ids)) == ids
    for longer, limit in ((text, len(ids) - 1), (text * 1_000_000, len(ids))):
        with pytest.raises(penstock.InvalidRequestError, match=f"more than {limit} tokens") as caught:
            tokenizer.encode(longer, max_tokens=limit)
        assert (caught.value.field, caught.value.limit) == ("prompt", f"at most {limit} tokens")
    wrong: Any
    for wrong in (-1, 1.5, "a", 10**30):
        with pytest.raises(penstock.InvalidRequestError) as caught:
            tokenizer.encode(text, max_tokens=wrong)
        assert caught.value.field == "max_tokens"


ENCODE_WITH_LITTLE_MEMORY = """
import resource, sys
import penstock

tokenizer = penstock.Tokenizer(sys.argv[1])
text = "The quick brown fox jumps over the lazy dog. " * 22_000
expected = tokenizer.encode(text)
hard = resource.getrlimit(resource.RLIMIT_AS)[1]
for mebibytes in (1, 4, 16, 32, 64, 128, 256, 1024):
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (mebibytes << 20), hard))
    try:
        ids = tokenizer.encode(text)
        assert ids == expected
        del ids
        answer = "ids"
    except penstock.OutOfMemoryError as error:
        answer = "refused"
        assert str(len(text)) in str(error) and isinstance(error, MemoryError)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    print(mebibytes, answer)
"""


@pytest.mark.needs("memory_limit", "proc", "resource")
@pytest.mark.parametrize("kind", ["BPE", "Unigram"])
def test_long_text_with_little_memory_is_refused(kind: str, demo_model: Path, tmp_path: Path) -> None:
    model = demo_model
    if kind == "Unigram":
        pieces = [("<unk>", 0.0), *((chr(code), -5.0) for code in range(32, 127)), ("▁the", -2.0)]
        tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=0))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
        tokenizer.decoder = tokenizers.decoders.Metaspace()
        model = tmp_path / "tokenizer.json"
        tokenizer.save(str(model))
    done = subprocess.run(
        [sys.executable, "-c", ENCODE_WITH_LITTLE_MEMORY, str(model)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers = dict(line.split() for line in done.stdout.splitlines())
    assert answers["16"] == answers["64"] == "refused"
    assert answers["1024"] == "ids"
