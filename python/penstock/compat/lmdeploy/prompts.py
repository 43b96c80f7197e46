"""The forms of prompts, and the parameters of each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.compat.lmdeploy.checks import refuse
from penstock.compat.lmdeploy.generation_config import GenerationConfig
from penstock.compat.lmdeploy.model import ChatTemplateConfig

__all__ = ["check_step", "check_template", "config_of", "configs_of", "early_of", "split", "takes_early"]

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


def split(prompts: Any) -> tuple[list[Any], bool]:
    """The prompts as a list, and whether it is one prompt. Raises `ArgumentError`."""
    if isinstance(prompts, str) or _is_chat(prompts):
        return [prompts], True
    if isinstance(prompts, tuple):
        refuse("prompts", prompts, "text or messages; images are not supported yet")
    if not isinstance(prompts, list):
        refuse("prompts", prompts, "a string, a list of messages, or a list of these")
    for prompt in prompts:
        if isinstance(prompt, tuple):
            refuse("prompts", prompt, "text or messages; images are not supported yet")
        if not isinstance(prompt, str) and not _is_chat(prompt):
            refuse("prompts", prompt, "a list of strings, or of lists of messages")
    return prompts, False


def _is_chat(prompt: object) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], Mapping)


def early_of(given: dict[str, Any]) -> dict[str, Any]:
    """The keywords of a call that apply without `gen_config`. Raises `TypeError` for others."""
    for name in given:
        if name not in _EARLY:
            message = f"unexpected keyword argument {name!r}"
            raise TypeError(message)
    return given


def takes_early(given: Mapping[str, Any]) -> bool:
    """Whether one of the parameters that `GenerationConfig` replaced is given."""
    return any(given[name] is not None for name in given)


def config_of(gen_config: GenerationConfig | None, given: Mapping[str, Any]) -> GenerationConfig:
    """The parameters of a call; `given` has those that apply without `gen_config`, by name."""
    if gen_config is not None:
        if not isinstance(gen_config, GenerationConfig):
            refuse("gen_config", gen_config, "a GenerationConfig")
        return gen_config
    if not takes_early(given):
        return GenerationConfig()
    values = _EARLY | {name: value for name, value in given.items() if value is not None}
    return GenerationConfig(max_new_tokens=values.pop("request_output_len"), **values)


def configs_of(gen_config: Any, num_prompts: int, given: Mapping[str, Any]) -> Sequence[GenerationConfig]:
    """The parameters of each prompt. Raises `ArgumentError`."""
    if isinstance(gen_config, (list, tuple)):
        if len(gen_config) != num_prompts:
            message = f"one GenerationConfig for each prompt: {num_prompts}, not {len(gen_config)}"
            refuse("gen_config", gen_config, message)
        return [config_of(config, given) for config in gen_config]
    return [config_of(gen_config, given)] * num_prompts


def check_step(step: object) -> None:
    """Raise `ArgumentError` if this is not an integer."""
    if isinstance(step, bool) or not isinstance(step, int):
        refuse("step", step, "an integer")


def check_template(config: object) -> None:
    """Raise `ArgumentError` if this is not a `ChatTemplateConfig` or `None`."""
    if config is not None and not isinstance(config, ChatTemplateConfig):
        refuse("chat_template_config", config, "a ChatTemplateConfig")
