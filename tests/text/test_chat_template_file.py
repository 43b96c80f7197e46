"""A chat template of a file, in place of those of the model."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from penstock import ConfigError
from support.api.checkpoints import make_config, write_checkpoint
from support.api.engines import make_engine

if TYPE_CHECKING:
    from pathlib import Path

MESSAGES = [{"role": "user", "content": "Hi"}]
TOOLS: list[Any] = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]
BROKEN = "{% for message in messages %}\n{{ message.content }}\n{% endif %}"


def test_template_of_the_file_replaces_all_of_the_model(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", make_config("llama"))
    templates = [{"name": name, "template": "{{ 'of the model' }}"} for name in ("default", "tool_use")]
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    path = tmp_path / "template.jinja"
    path.write_text("Question: {{ messages[0].content }}\n{{ tools | length if tools }}Answer:")
    with make_engine(model, chat_template=path) as engine:
        assert engine.config.chat_template == str(path)
        assert engine.apply_chat_template(MESSAGES) == "Question: Hi\nAnswer:"
        assert engine.apply_chat_template(MESSAGES, tools=TOOLS) == "Question: Hi\n1Answer:"
        result = engine.blocking.generate(MESSAGES, max_tokens=2)
        assert result.prompt_token_ids == tuple(
            engine.encode("Question: Hi\nAnswer:", add_special_tokens=False)
        )
        path.unlink()  # it was read
        assert engine.apply_chat_template(MESSAGES) == "Question: Hi\nAnswer:"
    with make_engine(model) as engine:
        assert engine.apply_chat_template(MESSAGES) == "of the model"


def test_formats_are_detected_in_the_template_of_the_file(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    options: Any = {"max_tokens": 30, "regex": "<think>so</think>yes"}
    outputs = {}
    for comment in ("", "{# <think> #}"):
        path.write_text(comment + "{{ messages[0].content }}")
        with make_engine(tiny_model, chat_template=path) as engine:
            result = engine.blocking.generate(MESSAGES, **options)
            outputs[comment] = (result.reasoning, result.content)
    assert outputs == {"": ("", "<think>so</think>yes"), "{# <think> #}": ("so", "yes")}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (BROKEN.encode(), r"line 3: .*endif"),
        (b"{{ x | unknown }}", r"line 1: No filter named 'unknown'"),
        (b"\xff", "utf-8"),
        (None, "No such file"),
    ],
    ids=["syntax", "filter", "encoding", "missing"],
)
def test_bad_template_is_refused_before_the_model_is_loaded(
    content: bytes | None, reason: str, tiny_model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "template.jinja"
    if content is not None:
        path.write_bytes(content)
    loaded = []
    engine = make_engine(tiny_model, chat_template=path, progress=lambda *numbers: loaded.append(numbers))
    with pytest.raises(ConfigError, match=rf"chat_template='{path}' is not allowed: .*{reason}") as caught:
        engine.blocking.start()
    assert caught.value.field == "chat_template"
    assert loaded == []


def test_serve_ends_with_the_line_of_a_bad_template(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text(BROKEN)
    options = ["--port", "0", "--chat-template", str(path)]
    command = [sys.executable, "-m", "penstock", "serve", str(tiny_model), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "line 3" in done.stderr
