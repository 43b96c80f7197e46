"""`Tokenizer`: the tokenizer and the chat templates of a model, without its weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from penstock import _attributes, _core, _hub
from penstock._checks import check_flag
from penstock._hub_files import TOKENIZER_FILES
from penstock._renderer import is_source, renderer
from penstock._schemas import tools_of
from penstock._shown import shown
from penstock.chat import Chat, ChatTemplate, has_messages, prompt_of
from penstock.errors import InvalidRequestError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Mapping
    from typing import NoReturn, Self

    from penstock._options import MessageModel, Prompt

__all__ = ["Tokenizer"]


class Tokenizer(metaclass=_attributes.Hinted):
    """The tokenizer and the chat templates of a model, without its weights.

        tokenizer = penstock.Tokenizer("Qwen/Qwen3-0.6B")
        text = tokenizer.apply_chat_template([{"role": "user", "content": "Why is the sky blue?"}])
        token_ids = tokenizer.encode(text, add_special_tokens=False)

    `model` is a model as `Engine` takes it: a directory, a `.gguf` file, a model of the Hugging
    Face hub, or a converted model. It can also be a directory without weights, or the path of a
    `tokenizer.json` alone, which has no chat template. Of a model on the hub, only the files of the tokenizer
    are downloaded.

    The methods return what those of an engine of this model return. They can be called from any thread.

    The constructor reads the files in the calling thread, which can take a second. Raises `ModelLoadError` if
    the model does not exist, has no tokenizer, or its files are invalid.
    """

    def __init__(self, model: str | os.PathLike[str] | bytes | bytearray | memoryview) -> None:
        self._model = _hub.model_argument(model)
        self._native = _core.Tokenizer.open(_hub.find(self._model, TOKENIZER_FILES))
        self._chat_templates: dict[str, ChatTemplate] = {}

    @classmethod
    def _of(cls, native: _core.Tokenizer, model: str | bytes) -> Self:
        """The tokenizer of an open engine."""
        self = cls.__new__(cls)
        self._model, self._native, self._chat_templates = model, native, {}
        return self

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The model's end tokens; empty for a `tokenizer.json` alone."""
        return self._native.eos_token_ids

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text, or `None` if the model has none."""
        return self._native.bos_token_id

    @property
    def vocabulary_size(self) -> int:
        """One more than the largest token id of the tokenizer; the model's own number can be larger."""
        return self._native.vocabulary_size

    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """The token ids of a text; `add_special_tokens` adds those that begin or end a prompt.

        `max_tokens` bounds the cost of a text from outside: a text with more tokens, without those that are
        added, is refused when these are counted. A text of more bytes than `max_tokens` of the longest tokens
        is refused at once.

        Runs in the calling thread, without the GIL: about one second per million characters. Raises
        `InvalidRequestError` if the text contains a lone surrogate or more than `max_tokens` tokens, or if
        that is not an integer from 0, and `OutOfMemoryError` if the system refuses the memory: 340 bytes for
        each byte of the text.
        """
        check_flag("add_special_tokens", add_special_tokens)
        return self._native.encode(text, add_special_tokens=add_special_tokens, max_tokens=max_tokens)

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = False,
    ) -> str:
        """The text of token ids. Ids outside the vocabulary are ignored; invalid bytes become U+FFFD.

        `spaces_between_special_tokens` is that of `SamplingParams`; it has no effect on omitted tokens.
        """
        check_flag("skip_special_tokens", skip_special_tokens)
        check_flag("spaces_between_special_tokens", spaces_between_special_tokens)
        return self._native.decode(
            token_ids,
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
        )

    def token_bytes(self, token_ids: Sequence[int]) -> list[bytes]:
        """The bytes of each token, such as for the entries of `top_logprobs`.

        A token can be a part of a character, so only the joined bytes are UTF-8. Special tokens have the
        bytes of their names; ids outside the vocabulary have none. Raises `InvalidRequestError` if the
        tokenizer has words, which it joins with spaces, instead of bytes.
        """
        return self._native.token_bytes(token_ids)

    def token_names(self, token_ids: Sequence[int]) -> list[str]:
        """The tokens as the vocabulary writes them, such as `Ġthe` or `▁the`; as `convert_ids_to_tokens`.

        Ids outside the vocabulary have empty names.
        """
        return self._native.token_names(token_ids)

    def apply_chat_template(
        self,
        messages: Iterable[object],
        *,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
    ) -> str:
        """Render messages and tools as the text of a prompt. Requests do the same, with the same keywords.

        `chat_template` is the name of a template of the model, or a Jinja template. Without it, the template
        is the model's `tool_use`, if it has one and there are tools, else `default`. `chat_template_kwargs`
        are variables of the template, such as `enable_thinking`. The text ends with the generation prompt,
        unless `add_generation_prompt=False`; with `continue_final_message=True` it ends with the content of
        the last message, which the model continues.

        Encode the text with `add_special_tokens=False`: templates write special tokens themselves.

        Runs in the calling thread and can take up to ten seconds; requests render in a worker thread.

        Raises `InvalidRequestError` if the model has no such template or the template rejects the messages.
        """
        chat = Chat(
            messages,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        definitions: Any = tools_of(tools)
        return chat.render(self._template(chat, definitions), tools=definitions)

    def count_tokens(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Sequence[Mapping[str, Any] | MessageModel] | None = None,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
    ) -> int:
        """The number of tokens of a prompt, as a request with it has `usage.prompt_tokens`.

        `prompt` is text, token ids, or messages, which can also be the keyword `messages`, with the keywords
        of `apply_chat_template`.

        Runs in the calling thread, as `encode` and `apply_chat_template` do. Raises as these do.
        """
        prompt = prompt_of(prompt, {"messages": messages})
        if isinstance(prompt, str):
            return len(self.encode(prompt))
        if not has_messages(prompt):
            if not isinstance(prompt, Sequence) or not all(isinstance(token, int) for token in prompt):
                limit = "text, token ids or messages"
                message = f"prompt={shown(prompt)} is not allowed: it must be {limit}"
                raise InvalidRequestError(message, "prompt", prompt, limit)
            return len(prompt)
        text = self.apply_chat_template(
            prompt,
            chat_template=chat_template,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        return len(self.encode(text, add_special_tokens=False))

    def _template(self, chat: Chat, tools: Sequence[Mapping[str, Any]] | None = None) -> ChatTemplate:
        """The template of a chat: its own, or one of the model's."""
        name = chat.template
        if name is None:
            name = "tool_use" if tools and "tool_use" in self._sources else "default"
        if is_source(name):  # compiled templates are cached
            return ChatTemplate(name, dict(self._native.special_tokens), renderer.get())
        if name not in self._chat_templates:
            if name not in self._sources:
                raise _no_template(name, sorted(self._sources))
            special_tokens = dict(self._native.special_tokens)
            self._chat_templates[name] = ChatTemplate(self._sources[name], special_tokens)
        return self._chat_templates[name]

    @cached_property
    def _sources(self) -> Mapping[str, str]:
        """The chat templates of the model by name."""
        return self._native.chat_templates

    def __repr__(self) -> str:
        model = repr(self._model) if isinstance(self._model, str) else f"of {len(self._model)} bytes"
        return f"<Tokenizer {model}>"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise _attributes.missing(self, name, _attributes.TOKENIZER_HINTS)


def _no_template(name: str, names: Sequence[str]) -> InvalidRequestError:
    if not names:
        message = "this model has no chat template; pass text or token ids instead of messages"
        return InvalidRequestError(message, "prompt", None, "text or token ids")
    limit = f"one of {', '.join(map(repr, names))}"
    message = f"chat_template is {name!r}; this model's chat templates are {', '.join(map(repr, names))}"
    return InvalidRequestError(message, "chat_template", name, limit)
