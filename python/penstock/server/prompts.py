"""Texts and chats as prompts: the options of chat templates, and token ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.server.errors import ApiError, invalid, prompt_too_long

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import penstock
    from penstock.server.protocol.template import TemplateFields
    from penstock.server.settings import ServerSettings

    Prompts = list[str | Sequence[int]]

__all__ = [
    "check_length",
    "encode_chat",
    "encode_text",
    "max_bytes",
    "render_chat",
    "template_options",
    "text_prompts",
]

#: The longest text that the server tokenises or makes of fields: characters for each token of the longest
#: sequence.
_CHARACTERS = 8
_MIN_TEXT = 1 << 18

#: The fields that are an option of the template if they have another value than this.
_DEFAULTS = {
    "chat_template": None,
    "documents": None,
    "add_generation_prompt": None,
    "continue_final_message": False,
}


def text_prompts(field: str, given: str | list[str | int | list[int]], limit: int) -> Prompts:
    """The prompts of a field that is one or several of them, each a text or token ids."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise invalid(field, given, "a text, token ids, or a list of them that is not empty")
    if all(isinstance(item, int) for item in given):
        return [given]  # type: ignore[list-item] # as just checked
    if any(isinstance(item, int) for item in given):
        raise invalid(field, given, "a text, token ids, or a list of texts or of lists of token ids")
    if len(given) > limit:
        raise invalid(field, f"a list of {len(given)}", f"a list of at most {limit} prompts")
    return given  # type: ignore[return-value] # as just checked


def template_options(
    settings: ServerSettings, fields: TemplateFields, variables: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The options of the chat template. `variables` are those of its variables that other fields set."""
    if fields.chat_template is not None and not settings.request_templates:
        message = "chat_template is not allowed: this server accepts none in requests"
        raise ApiError(400, message, param="chat_template")
    options = {
        name: value for name, default in _DEFAULTS.items() if (value := getattr(fields, name)) != default
    }
    given = {name: value for name, value in (variables or {}).items() if value is not None}
    if merged := given | (fields.chat_template_kwargs or {}):
        options["chat_template_kwargs"] = merged
    return options


def render_chat(
    engine: penstock.Engine,
    messages: Sequence[Any],
    tools: Sequence[Mapping[str, Any]] | None,
    template: Mapping[str, Any],
) -> str:
    """The text of a chat."""
    return engine.apply_chat_template(messages, tools=tools or None, **template)


def encode_chat(
    engine: penstock.Engine,
    messages: Sequence[Any],
    tools: Sequence[Mapping[str, Any]] | None,
    template: Mapping[str, Any],
) -> list[int]:
    """The token ids of a chat."""
    text = render_chat(engine, messages, tools, template)
    return encode_text(engine, text, add_special_tokens=False, field="messages")


def encode_text(
    engine: penstock.Engine, text: str, *, add_special_tokens: bool, field: str = "prompt"
) -> list[int]:
    """The token ids of a text; a million characters take about a second, which nothing interrupts."""
    check_length(engine, len(text), field)
    return engine.encode(text, add_special_tokens=add_special_tokens)


def max_bytes(*texts: str) -> int:
    """The bytes that texts take together at most, in memory and in UTF-8."""
    return sum(map(len, texts)) * (1 if all(map(str.isascii, texts)) else 4)


def check_length(engine: penstock.Engine, num_chars: int, field: str) -> None:
    """Raise if a text of this length is too long to be tokenised, or to be made for that."""
    longest = engine.info.max_model_len
    limit = max(_MIN_TEXT, _CHARACTERS * longest)
    if num_chars > limit:
        raise prompt_too_long(field, num_chars, limit, "characters", longest)
