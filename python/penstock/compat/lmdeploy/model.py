"""`lmdeploy.model`: `ChatTemplateConfig`, and the chat template of a pipeline.

A template has `messages2prompt(messages, sequence_start)`, `get_prompt(prompt, sequence_start)` and
`stop_words`. With `sequence_start=False` the text continues a session: it begins with the end of the
assistant's last message, which the session's tokens do not contain, and has no system part.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import logging
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import penstock
from penstock._json import loads
from penstock._shown import shown
from penstock.compat.lmdeploy.chat_templates import ABSENT
from penstock.compat.lmdeploy.checks import check_choice, refuse
from penstock.compat.lmdeploy.errors import ArgumentError, UnsupportedError
from penstock.compat.lmdeploy.template_classes import (
    CAPABILITIES,
    MODELS,
    BaseChatTemplate,
    BaseModel,
    ChatTemplate,
)
from penstock.compat.lmdeploy.tokenizer import Tokenizer

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping, Sequence

__all__ = [
    "MODELS",
    "BaseChatTemplate",
    "BaseModel",
    "ChatTemplate",
    "ChatTemplateConfig",
    "ModelTemplate",
    "best_template",
    "templates_named",
]

logger = logging.getLogger("penstock.lmdeploy")

#: An answer in the text of a chat template.
_SENTINEL = "penstock-sentinel"
#: The name of the model's own template.
_OWN = "hf"
#: Texts that select a template by the name of a model that has none of its own.
_MATCHES = {
    "codellama": "codellama",
    "llama-2": "llama2",
    "llama2": "llama2",
    "vicuna": "vicuna",
    "wizardlm": "wizardlm",
    "chatglm2": "chatglm",
    "mistral": "mistral",
    "mixtral": "mixtral",
    "internlm-chat": "internlm-chat",
    "baichuan2": "baichuan2-7b",
    "qwen": "qwen",
    "solar": "solar",
    "ultralm": "ultralm",
    "ultracm": "ultracm",
}


@dataclasses.dataclass
class ChatTemplateConfig:
    """The chat template of a pipeline: a built-in or registered one by its name, with other texts.

    Fields that are `None` keep the texts of the template; see `BaseChatTemplate`. `model_name="hf"` is the
    model's own template. Raises `ArgumentError` for a value of the wrong type.
    """

    model_name: str
    model_path: str | None = None
    system: str | None = None
    meta_instruction: str | None = None
    eosys: str | None = None
    user: str | None = None
    eoh: str | None = None
    assistant: str | None = None
    eoa: str | None = None
    tool: str | None = None
    eotool: str | None = None
    separator: str | None = None
    capability: Literal["completion", "infilling", "chat", "python"] | None = None
    stop_words: list[str] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model_name, str):
            refuse("model_name", self.model_name, "the name of a chat template")
        check_choice(self, "capability", (None, *CAPABILITIES))
        for name in _TEXTS:
            if not isinstance(getattr(self, name), str | None):
                refuse(name, getattr(self, name), "None or a text")
        words = self.stop_words
        if words is not None and not (
            isinstance(words, (list, tuple)) and all(isinstance(word, str) and word for word in words)
        ):
            refuse("stop_words", words, "None or a list of texts of at least one character")

    @property
    def chat_template(self) -> ChatTemplate:
        """The template; that of a name that is not registered has these texts only."""
        changes = {key: value for key, value in dataclasses.asdict(self).items() if value is not None}
        del changes["model_name"]
        kind = MODELS.get(self.model_name)
        if kind is None:
            logger.warning("model_name %r is not a registered chat template", self.model_name)
            kind = BaseChatTemplate
        return _with_sequence_start(kind(**changes))

    def to_json(self, file_path: str | os.PathLike[str] | None = None) -> str:
        """The fields as JSON, which is also written to a file."""
        text = json.dumps(dataclasses.asdict(self), ensure_ascii=False, indent=4)
        if file_path is not None:
            Path(file_path).write_text(text, encoding="utf-8")
        return text

    @classmethod
    def from_json(cls, file_or_string: str | os.PathLike[str]) -> ChatTemplateConfig:
        """The configuration in a JSON file or a JSON text.

        A name that is not registered becomes that of a new template. Raises `ArgumentError` if the text is
        not valid JSON or has unknown fields.
        """
        values = _read_json(file_or_string)
        unknown = sorted(values.keys() - {field.name for field in dataclasses.fields(cls)})
        if unknown:
            names = ", ".join(field.name for field in dataclasses.fields(cls))
            refuse("the fields of a chat template", unknown, f"fields of ChatTemplateConfig: {names}")
        name = values.get("model_name") or uuid.uuid4().hex
        if name not in MODELS and name not in ABSENT:
            MODELS.register_module(name, module=BaseChatTemplate)
        return cls(**{**values, "model_name": name})


#: The fields of a `ChatTemplateConfig` that are texts.
_TEXTS = (
    "system",
    "meta_instruction",
    "eosys",
    "user",
    "eoh",
    "assistant",
    "eoa",
    "tool",
    "eotool",
    "separator",
)


class ModelTemplate:
    """The model's own chat template."""

    #: The model's end tokens end an output without stop words.
    stop_words: Sequence[str] | None = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer.model

    @functools.cached_property
    def can_continue(self) -> bool:
        """Whether `sequence_start=False` is possible: the template keeps earlier answers."""
        try:
            self.get_prompt("hi", sequence_start=False)
        except (UnsupportedError, penstock.InvalidRequestError):
            return False
        return True

    def get_prompt(self, prompt: str, sequence_start: bool = True) -> str:
        """The text of a prompt for one message of the user."""
        return self.messages2prompt(prompt, sequence_start)

    def messages2prompt(
        self, messages: str | Sequence[Mapping[str, Any]], sequence_start: bool = True, **kwargs: Any
    ) -> str:
        """The text of a prompt for a chat; a last message of the assistant is continued.

        Other keywords are `tools` and variables of the template. Raises `penstock.InvalidRequestError` if the
        template rejects the messages, `UnsupportedError` for `sequence_start=False` if it does not keep
        answers.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        before = [] if sequence_start else _TURN
        text = self._tokenizer.apply_chat_template(
            [*before, *messages],
            tools=kwargs.pop("tools", None),
            chat_template_kwargs=kwargs or None,
            continue_final_message=bool(messages) and messages[-1].get("role") == "assistant",
        )
        if sequence_start:
            return text
        _turn, found, continuation = text.partition(_SENTINEL)
        if not found:
            message = (
                "sequence_start is False; it is not supported: the model's chat template changes or leaves "
                "out earlier answers; send all messages with sequence_start=True"
            )
            raise UnsupportedError(message)
        return continuation


def _own_template(model_path: str | None = None, **_: Any) -> ModelTemplate:
    """The template of the model at this path."""
    if not model_path:
        refuse("model_path", model_path, "the path of a model, of which 'hf' is the chat template")
    return ModelTemplate(Tokenizer(model_path))


MODELS.register_module(_OWN, module=_own_template)


#: A turn before the messages that continue a session.
_TURN: list[Mapping[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": _SENTINEL},
]


class _WithoutSequenceStart:
    """A registered template without `sequence_start` in its methods."""

    def __init__(self, template: Any) -> None:
        self._template = template
        self._has_warned = False
        self.stop_words: Sequence[str] | None = getattr(template, "stop_words", None)

    def get_prompt(self, prompt: str, sequence_start: bool = True) -> str:
        self._check(sequence_start)
        return str(self._template.get_prompt(prompt))

    def messages2prompt(
        self, messages: str | Sequence[Mapping[str, Any]], sequence_start: bool = True, **kwargs: Any
    ) -> str:
        self._check(sequence_start)
        return str(self._template.messages2prompt(messages, **kwargs))

    def _check(self, sequence_start: bool) -> None:
        """Warn once about a prompt that continues a session."""
        if not sequence_start and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the chat template %s has no parameter sequence_start: each prompt of a session has its "
                "system part again",
                type(self._template).__name__,
            )


def best_template(
    tokenizer: Tokenizer,
    *,
    model_path: str | os.PathLike[str] = "",
    model_name: str | None = None,
    config: ChatTemplateConfig | None = None,
) -> ChatTemplate:
    """The chat template of a pipeline.

    That of `config`; else the one that `model_name` names; else the model's own; else a built-in one for the
    name of the model's directory; else `base`, which leaves a prompt unchanged.
    """
    if config is not None and config.model_name != _OWN:
        return config.chat_template
    if config is not None:
        for name in (*_TEXTS, "capability", "stop_words"):
            if getattr(config, name) is not None:
                refuse(name, getattr(config, name), "None, without other fields: model_name is 'hf'")
    elif model_name != _OWN and model_name in MODELS:
        return ChatTemplateConfig(str(model_name)).chat_template
    elif model_name is not None and model_name != _OWN:
        logger.info("model_name %r is not the name of a chat template; the model's own is used", model_name)
    template = ModelTemplate(tokenizer)
    try:
        template.get_prompt("hi")
    except penstock.InvalidRequestError as error:
        if config is not None:
            raise ArgumentError(f"model_name is 'hf'; {error}") from error
        name = Path(model_path).name.lower()
        match = next((match for text, match in _MATCHES.items() if text in name), "base")
        logger.warning("the model has no chat template of its own; %r is used", match)
        return ChatTemplateConfig(match).chat_template
    return template


def templates_named(names: Iterable[str]) -> dict[str | None, ChatTemplate]:
    """The registered chat templates with these names, which are those of adapters."""
    templates: dict[str | None, ChatTemplate] = {}
    for name in names:
        if name != _OWN and name in MODELS:
            logger.info("the adapter %r has the chat template of this name", name)
            templates[name] = ChatTemplateConfig(name).chat_template
    return templates


def _with_sequence_start(template: Any) -> ChatTemplate:
    parameters = inspect.signature(template.messages2prompt).parameters
    if "sequence_start" in parameters:
        return template  # type: ignore[no-any-return]
    return _WithoutSequenceStart(template)


def _read_json(file_or_string: str | os.PathLike[str]) -> dict[str, Any]:
    text = file_or_string
    try:
        if not isinstance(text, str) or not text.lstrip().startswith("{"):
            text = Path(text).read_text(encoding="utf-8")
        values = loads(text)
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{shown(file_or_string)} is neither a JSON file nor JSON: {error}") from error
    if not isinstance(values, dict):
        refuse("the JSON of a chat template", values, "an object")
    return values
