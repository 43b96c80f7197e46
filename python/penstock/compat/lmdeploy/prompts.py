"""The forms of prompts, and the parameters of each of them."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

from penstock.compat.lmdeploy.checks import check_integer, refuse
from penstock.compat.lmdeploy.errors import ArgumentError
from penstock.compat.lmdeploy.generation_config import GenerationConfig
from penstock.compat.lmdeploy.model import ChatTemplateConfig

__all__ = [
    "check_count",
    "check_prompt",
    "check_step",
    "check_template",
    "config_of",
    "configs_of",
    "early_of",
    "hint_of",
    "is_early_order",
    "split",
    "takes_early",
    "variables_of",
]

_log = logging.getLogger("penstock.lmdeploy")

#: The parameters of a call without `gen_config`, and their values if one of them is given.
_EARLY = {
    "request_output_len": 512,
    "top_k": 40,
    "top_p": 0.8,
    "temperature": 0.8,
    "repetition_penalty": 1.0,
    "ignore_eos": False,
    "stop_words": None,
}

#: Keywords of LMDeploy that become variables of the chat template.
_VARIABLES = ("tools", "reasoning_effort", "enable_thinking")
#: Keywords of LMDeploy that concern images and video only.
_MEDIA = ("media_io_kwargs", "mm_processor_kwargs")


def split(prompts: Any) -> tuple[list[Any], bool]:
    """The prompts as a list, and whether it is one prompt. Raises `ArgumentError`."""
    if isinstance(prompts, str) or _is_chat(prompts):
        return [prompts], True
    if isinstance(prompts, tuple):
        refuse("prompts", prompts, "text, or a list; a tuple has images, which are not supported yet")
    if not isinstance(prompts, list):
        refuse("prompts", prompts, "text, a list of messages, or a list of these")
    for index, prompt in enumerate(prompts):
        check_prompt(f"prompts[{index}]", prompt)
    return prompts, False


def check_prompt(name: str, prompt: object) -> None:
    """Raise `ArgumentError` if this is not one prompt."""
    if isinstance(prompt, tuple):
        refuse(name, prompt, "text or a list of messages; images are not supported yet")
    if not isinstance(prompt, str) and not _is_chat(prompt):
        refuse(name, prompt, "text or a list of messages")


def _is_chat(prompt: object) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], Mapping)


def early_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of a call that apply without `gen_config`."""
    return {name: value for name, value in given.items() if name in _EARLY}


def variables_of(function: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The variables of the chat template: the keywords of a call that no argument has, as in LMDeploy.

    Those in `chat_template_kwargs` take precedence. Raises `TypeError` for the fields of `GenerationConfig`.
    """
    values = {name: value for name, value in given.items() if name not in _EARLY and name not in _MEDIA}
    further = values.pop("chat_template_kwargs", None) or {}
    if not isinstance(further, Mapping) or not all(isinstance(name, str) for name in further):
        refuse("chat_template_kwargs", further, "None or a mapping of names to values")
    if rewinds := values.pop("rewind_stop_tokens", False):
        refuse("rewind_stop_tokens", rewinds, "left out: a session never has stop tokens")
    for name in values:
        if hint := hint_of(name):
            message = f"{function}() got an unexpected keyword argument {name!r}{hint}"
            raise TypeError(message)
        if name not in _VARIABLES:
            _note_variable(name)
    return {name: value for name, value in values.items() if value is not None} | dict(further)


@cache
def _note_variable(name: str) -> None:
    """Log once that a keyword, which may be misspelt, is not an argument."""
    _log.warning("the keyword %r is a variable of the chat template: no argument has this name", name)


def hint_of(name: str) -> str:
    """The end of the error for an unknown argument: where it belongs, if it is known."""
    if any(field.name == name for field in dataclasses.fields(GenerationConfig)):
        return f"; use gen_config=GenerationConfig({name}=...)"
    return ""


def takes_early(given: Mapping[str, Any]) -> bool:
    """Whether one of the parameters that `GenerationConfig` replaced is given."""
    return any(given[name] is not None for name in given)


def config_of(gen_config: GenerationConfig | None, given: Mapping[str, Any]) -> GenerationConfig:
    """The parameters of a call; `given` has those that apply without `gen_config`, by name."""
    early = _early_config(given)
    if gen_config is None:
        return early or GenerationConfig()
    _check_config("gen_config", gen_config)
    if early is not None:
        names = ", ".join(name for name in given if given[name] is not None)
        _log.warning("%s: no effect beside gen_config", names)
    return gen_config


def _early_config(given: Mapping[str, Any]) -> GenerationConfig | None:
    """The parameters that replace a `GenerationConfig`; `None` if none of them is given."""
    if not takes_early(given):
        return None
    values = _EARLY | {name: value for name, value in given.items() if value is not None}
    length = SimpleNamespace(request_output_len=values.pop("request_output_len"))
    check_integer(length, "request_output_len")
    return GenerationConfig(max_new_tokens=length.request_output_len, **values)


def _check_config(name: str, value: object) -> None:
    if not isinstance(value, GenerationConfig):
        refuse(name, value, "a GenerationConfig")


def configs_of(gen_config: Any, num_prompts: int, given: Mapping[str, Any]) -> Sequence[GenerationConfig]:
    """The parameters of each prompt. Raises `ArgumentError`."""
    if isinstance(gen_config, (list, tuple)):
        check_count("gen_config", len(gen_config), "GenerationConfig", num_prompts)
        for index, config in enumerate(gen_config):
            if config is not None:
                _check_config(f"gen_config[{index}]", config)
        default = config_of(None, given)
        first = next((config for config in gen_config if config is not None), None)
        if first is not None:
            config_of(first, given)  # keywords beside it have no effect
        return [default if config is None else config for config in gen_config]
    return [config_of(gen_config, given)] * num_prompts


def check_count(name: str, count: int, kind: str, num_prompts: int) -> None:
    """Raise `ArgumentError` if a list does not have an item for each prompt."""
    if count != num_prompts:
        message = f"{name} is a list of {count}; it must be one {kind} for each prompt: {num_prompts}"
        raise ArgumentError(message)


def check_step(step: object) -> None:
    """Raise `ArgumentError` if this is not an integer."""
    if isinstance(step, bool) or not isinstance(step, int):
        refuse("step", step, "an integer")


def check_template(config: object) -> None:
    """Raise `ArgumentError` if this is not a `ChatTemplateConfig` or `None`."""
    if config is not None and not isinstance(config, ChatTemplateConfig):
        refuse("chat_template_config", config, "a ChatTemplateConfig")


def is_early_order(args: Sequence[Any]) -> bool:
    """Whether positional arguments of `stream_infer` begin with `gen_config`, not with `sessions`."""
    first = args[0] if args else None
    if isinstance(first, (list, tuple)) and first:
        first = first[0]
    return isinstance(first, GenerationConfig) or isinstance(next(iter(args[1:]), None), bool)
