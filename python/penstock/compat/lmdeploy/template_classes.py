"""The classes of chat templates, and their registry."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from penstock.compat.lmdeploy.chat_templates import ABSENT, TEMPLATES
from penstock.compat.lmdeploy.checks import refuse

__all__ = ["MODELS", "BaseChatTemplate", "BaseModel", "ChatTemplate"]

Kind = TypeVar("Kind", bound=Callable[..., Any])

#: The values of `capability`.
CAPABILITIES = ("completion", "infilling", "chat", "python")


class ChatTemplate(Protocol):
    """The chat template of a pipeline."""

    stop_words: Sequence[str] | None

    def get_prompt(self, prompt: str, sequence_start: bool = True) -> str:
        """The text of a prompt for one message of the user."""

    def messages2prompt(
        self, messages: str | Sequence[Mapping[str, Any]], sequence_start: bool = True, **kwargs: Any
    ) -> str:
        """The text of a prompt for a chat; a last message of the assistant is continued."""


class Registry:
    """The classes of chat templates, by name."""

    def __init__(self) -> None:
        self.module_dict: dict[str, Callable[..., Any]] = {}

    def register_module(
        self,
        name: str | Sequence[str] | None = None,
        force: bool = False,
        module: Callable[..., Any] | None = None,
    ) -> Any:
        """Register a class under a name, or several: a decorator, unless `module` is the class.

        Raises `KeyError` if a name is registered already and `force` is not set.
        """

        def register(kind: Kind) -> Kind:
            names = [kind.__name__] if name is None else [name] if isinstance(name, str) else name
            for item in names:
                if item in self.module_dict and not force:
                    message = f"{item} is already registered in the chat templates"
                    raise KeyError(message)
                self.module_dict[item] = kind
            return kind

        return register if module is None else register(module)

    def get(self, name: str) -> Callable[..., Any] | None:
        """The class that is registered under this name, or `None`.

        Raises `ArgumentError` for the name of a template of LMDeploy that is not provided.
        """
        kind = self.module_dict.get(name)
        if kind is None and name in ABSENT:
            limit = "'hf', the model's own template: there is no built-in one of this name"
            refuse("model_name", name, limit)
        return kind

    def __contains__(self, name: object) -> bool:
        return name in self.module_dict


MODELS = Registry()


class BaseChatTemplate:
    """A chat template of texts around each message.

    `system`, `user`, `assistant` and `tool` are the texts before a message of this role, `eosys`, `eoh`,
    `eoa` and `eotool` those after it. `separator` follows `eoa`. `meta_instruction` is the system message of
    a chat without one; with `None` there is no system part. `capability="completion"` leaves a prompt
    unchanged. Other keywords have no effect: subclasses pass those that they do not know.
    """

    def __init__(
        self,
        system: str = "",
        meta_instruction: str | None = "",
        eosys: str = "",
        user: str = "",
        eoh: str = "",
        assistant: str = "",
        eoa: str = "",
        separator: str = "",
        tool: str = "",
        eotool: str = "",
        capability: str = "chat",
        stop_words: list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        if capability not in CAPABILITIES:
            refuse("capability", capability, f"one of {', '.join(map(repr, CAPABILITIES))}")
        self.system, self.meta_instruction, self.eosys = system, meta_instruction, eosys
        self.user, self.eoh = user, eoh
        self.assistant, self.eoa, self.separator = assistant, eoa, separator
        self.tool, self.eotool = tool, eotool
        self.capability, self.stop_words = capability, stop_words

    def get_prompt(self, prompt: str, sequence_start: bool = True) -> str:
        """The text of a prompt for one message of the user."""
        if self.capability == "completion":
            return prompt
        return self._render([{"role": "user", "content": prompt}], sequence_start)

    def messages2prompt(
        self, messages: str | Sequence[Mapping[str, Any]], sequence_start: bool = True, **kwargs: Any
    ) -> str:
        """The text of a prompt for a chat; a last message of the assistant is continued."""
        if isinstance(messages, str):
            return self.get_prompt(messages, sequence_start)
        return self._render(messages, sequence_start)

    @classmethod
    def from_config(cls, **kwargs: Any) -> BaseChatTemplate:
        """The template with these fields."""
        return cls(**kwargs)

    def _generation_prompt(self) -> str:
        """The text before an answer."""
        return self.assistant

    def _render(self, messages: Sequence[Mapping[str, Any]], sequence_start: bool) -> str:
        end_of_answer = self.eoa + self.separator
        parts = [] if sequence_start else [end_of_answer]
        begins_with_system = bool(messages) and messages[0].get("role") == "system"
        if sequence_start and self.meta_instruction is not None and messages and not begins_with_system:
            parts.append(f"{self.system}{self.meta_instruction}{self.eosys}")
        texts = {
            "system": (self.system, self.eosys),
            "user": (self.user, self.eoh),
            "assistant": (self.assistant, end_of_answer),
            "tool": (self.tool, self.eotool),
        }
        for message in messages:
            role = message.get("role")
            if role not in texts:
                refuse("the role of a message", role, f"one of {', '.join(texts)}")
            before, after = texts[role]
            parts += [before, text_of(message.get("content")), after]
        if messages and messages[-1]["role"] == "assistant":
            parts.pop()
        else:
            parts.append(self._generation_prompt())
        return "".join(parts)


class BaseModel(BaseChatTemplate):
    """A chat template of a class with a method `decorate_prompt(prompt, sequence_start)`."""

    def decorate_prompt(self, prompt: str, sequence_start: bool = True) -> str:
        """The text of a prompt for one message of the user."""
        return super().get_prompt(prompt, sequence_start)

    def get_prompt(self, prompt: str, sequence_start: bool = True) -> str:
        """The text of a prompt for one message of the user."""
        if self.capability == "completion":
            return prompt
        return self.decorate_prompt(prompt, sequence_start)


class _Trimmed(BaseChatTemplate):
    """A template of prompts that end without the space before an answer."""

    def _generation_prompt(self) -> str:
        return self.assistant.removesuffix(" ")


class _CodeLlama(BaseChatTemplate):
    """The template of Code Llama, which also fills in the text between two others."""

    def __init__(
        self,
        suffix_first: bool = False,
        capability: str = "chat",
        stop_words: list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        if capability == "infilling" and stop_words is None:
            stop_words = ["<EOT>"]
        super().__init__(capability=capability, stop_words=stop_words, **kwargs)
        self.suffix_first = suffix_first

    def get_prompt(self, prompt: str, sequence_start: bool = True) -> str:
        if self.capability == "python":
            return prompt
        if self.capability != "infilling":
            return super().get_prompt(prompt, sequence_start)
        prefix, mark, suffix = prompt.partition("<FILL>")
        if not mark or "<FILL>" in suffix:
            refuse("prompt", prompt, "a text with <FILL> once, for capability='infilling'")
        if self.suffix_first:
            return f"<PRE> <SUF>{suffix} <MID> {prefix}"
        return f"<PRE> {prefix} <SUF>{suffix} <MID>"


class _Falcon(BaseChatTemplate):
    """The template of Falcon: an empty prompt is an end token."""

    def get_prompt(self, prompt: str, sequence_start: bool = True) -> str:
        return super().get_prompt(prompt, sequence_start) or "<|endoftext|>"


class _ChatGLM(BaseChatTemplate):
    """The template of ChatGLM2, which numbers the rounds; a session's later prompts are a first round."""

    def _render(self, messages: Sequence[Mapping[str, Any]], sequence_start: bool) -> str:
        parts = [] if sequence_start else [self.eoa]
        count = 0
        for message in messages:
            content = text_of(message.get("content"))
            if message.get("role") == "user":
                count += 1
                parts.append(f"[Round {count}]\n\n{self.user}{content}{self.eoh}{self.assistant}")
            elif message.get("role") == "assistant":
                parts += [content, self.eoa]
            else:
                refuse("the role of a message", message.get("role"), "'user' or 'assistant'")
        if messages and messages[-1].get("role") == "assistant":
            parts.pop()
        return "".join(parts)


_CLASSES: dict[str, type[BaseChatTemplate]] = {
    "vicuna": _Trimmed,
    "wizardlM": _Trimmed,
    "wizardlm": _Trimmed,
    "llava-v1": _Trimmed,
    "internvl-zh": _Trimmed,
    "deepseek-vl": _Trimmed,
    "deepseek-vl2": _Trimmed,
    "codellama": _CodeLlama,
    "falcon": _Falcon,
    "chatglm": _ChatGLM,
    "chatglm2-6b": _ChatGLM,
}


def _built_in(name: str, fields: Mapping[str, Any]) -> Callable[..., BaseChatTemplate]:
    kind = _CLASSES.get(name, BaseChatTemplate)

    def build(**changes: Any) -> BaseChatTemplate:
        return kind(**{**fields, **changes})

    return build


for _name, _fields in TEMPLATES.items():
    MODELS.register_module(_name, module=_built_in(_name, _fields))


def text_of(content: object) -> str:
    """The text of a message: a string, or the first part of a list of text parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or not content:
        refuse("the content of a message", content, "a text, or a list of parts of type text")
    for part in content:
        kind = part.get("type", "text") if isinstance(part, Mapping) else part
        if kind != "text" or not isinstance(part.get("text"), str):
            refuse("a part of a message", part, "a text; images are not supported yet")
    return str(content[0]["text"])
