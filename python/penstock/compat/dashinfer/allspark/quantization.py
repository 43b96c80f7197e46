"""The weight quantisation of `serialize`: DashInfer's settings, and Penstock's `quantization` for them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

__all__ = [
    "QUANT_CONFIG_MAP",
    "GPTQSettings",
    "IQSettings",
    "QuantizationSettings",
    "get_quant_settings_cls",
]

_GROUP_SIZES = (-1, 32, 64, 128)
#: Penstock's type of weights with float activations, by the weight format.
_WEIGHT_ONLY = {
    "int8": "w8a16",
    "uint8": "w8a16",
    "int4": "w4a16",
    "uint4": "w4a16",
    "fp8_e4m3": "fp8",
}
_IQ_KEYS = (
    "quant_method",
    "weight_format",
    "group_size",
    "compute_method",
    "activate_format",
    "group_settings",
)
_SPECIAL = set(r"[](){}+?^$|\*")


class QuantizationSettings(ABC):
    """Settings of one method of quantisation, as a mapping with the key `quant_method`."""

    quant_method: ClassVar[str]

    def __init__(self, quant_config: Mapping[str, Any]) -> None:
        self.quant_config = dict(quant_config)

    @property
    @abstractmethod
    def quantization(self) -> str | dict[str, Any]:
        """The `quantization` of `penstock.convert`."""


class GPTQSettings(QuantizationSettings):
    """The model's files are quantised with GPTQ. Codes and groups are kept as stored.

    `bits` is 4 or 8. `desc_act` raises `NotImplementedError`.
    """

    quant_method = "gptq"

    def __init__(self, quant_config: Mapping[str, Any]) -> None:
        super().__init__(quant_config)
        self.bits = quant_config.get("bits")
        self.group_size = quant_config.get("group_size", -1)
        if self.bits not in (4, 8):
            message = f"bits is {self.bits!r}; GPTQ weights must have 4 or 8 bits"
            raise ValueError(message)
        if quant_config.get("desc_act"):
            message = "desc_act is True; GPTQ weights with act-order are not computed as stored"
            raise NotImplementedError(message)

    @property
    def quantization(self) -> str:
        """The `quantization` of `penstock.convert`."""
        return "auto"


class IQSettings(QuantizationSettings):
    """The weights are quantised while they are converted ("instant quantisation").

    - `weight_format`: `int8`, `uint8`, `int4`, `uint4` or `fp8_e4m3`; required.
    - `group_size`: columns that share a scale: 32, 64, 128, or -1 for a whole row, the default.
    - `compute_method`: `weight_only`, the default, or `activate_quant`: products read 8-bit activations;
      only with `int8` and `fp8_e4m3`.
    - `group_settings`: group sizes by regular expression. An expression is searched in the Hugging Face name
      of a module, such as `model.layers.0.mlp.down_proj`, and consists of text, `.`, `.*`, `^` and `$`.

    Other keys and values raise `ValueError`.
    """

    quant_method = "instant_quant"

    def __init__(self, quant_config: Mapping[str, Any]) -> None:
        super().__init__(quant_config)
        unknown = [str(key) for key in quant_config if key not in _IQ_KEYS]
        if unknown:
            message = (
                f"unknown keys of the quantisation: {', '.join(unknown)}; the keys are {', '.join(_IQ_KEYS)}"
            )
            raise ValueError(message)
        self.weight_format = _choice(quant_config, "weight_format", None, tuple(_WEIGHT_ONLY))
        self.compute_method = _choice(
            quant_config, "compute_method", "weight_only", ("weight_only", "activate_quant")
        )
        self.group_size = _group_size("group_size", quant_config.get("group_size", -1))
        self.group_settings = quant_config.get("group_settings") or {}
        if not isinstance(self.group_settings, Mapping):
            message = f"group_settings is {self.group_settings!r}; it must map expressions to group sizes"
            raise ValueError(message)
        activations = quant_config.get("activate_format")
        if self.compute_method == "activate_quant":
            if self.weight_format not in ("int8", "fp8_e4m3"):
                message = (
                    f"weight_format is {self.weight_format!r}; "
                    "it must be 'int8' or 'fp8_e4m3' with compute_method 'activate_quant'"
                )
                raise ValueError(message)
            if activations not in (None, self.weight_format):
                message = (
                    f"activate_format is {activations!r}; it must be weight_format, {self.weight_format!r}"
                )
                raise ValueError(message)
        if self.weight_format == "fp8_e4m3" and (self.group_size != -1 or self.group_settings):
            message = f"group_size is {self.group_size}; it must be -1 with weight_format 'fp8_e4m3'"
            raise ValueError(message)

    @property
    def quantization(self) -> str | dict[str, Any]:
        """The `quantization` of `penstock.convert`."""
        if self.weight_format == "fp8_e4m3":
            return "fp8"
        value: dict[str, Any] = self._scheme(self.group_size)
        if self.group_settings:
            value["layers"] = {
                _pattern(expression): self._scheme(_group_size(f"group_settings[{expression!r}]", size))
                for expression, size in self.group_settings.items()
            }
        return value

    def _scheme(self, group_size: int) -> dict[str, Any]:
        if self.compute_method == "activate_quant":
            return {"type": "int8", "group_size": group_size, "symmetric": True}
        return {"type": _WEIGHT_ONLY[self.weight_format], "group_size": group_size, "symmetric": False}


#: The classes of settings by `quant_method`.
QUANT_CONFIG_MAP: dict[str, type[QuantizationSettings]] = {
    kind.quant_method: kind for kind in (GPTQSettings, IQSettings)
}


def get_quant_settings_cls(quant_method: str) -> type[QuantizationSettings]:
    """The class of settings for a `quant_method`. Raises `ValueError`."""
    kind = QUANT_CONFIG_MAP.get(quant_method) if isinstance(quant_method, str) else None
    if kind is None:
        message = f"quant_method is {quant_method!r}; it must be one of {', '.join(QUANT_CONFIG_MAP)}"
        raise ValueError(message)
    return kind


def read_settings(quant_config: Mapping[str, Any]) -> QuantizationSettings:
    """The settings of a mapping. Raises `ValueError` and `NotImplementedError`."""
    if not isinstance(quant_config, Mapping):
        message = f"customized_quant_config is {quant_config!r}; it must be a mapping with quant_method"
        raise ValueError(message)
    return get_quant_settings_cls(quant_config.get("quant_method", ""))(quant_config)


def _choice(config: Mapping[str, Any], key: str, default: str | None, choices: tuple[str, ...]) -> str:
    value = config.get(key, default)
    if not isinstance(value, str) or value not in choices:
        message = f"{key} is {value!r}; it must be one of {', '.join(choices)}"
        raise ValueError(message)
    return value


def _group_size(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value not in _GROUP_SIZES:
        message = f"{name} is {value!r}; it must be one of {', '.join(map(str, _GROUP_SIZES))}"
        raise ValueError(message)
    return value


def _pattern(expression: object) -> str:
    """The pattern of module names for a regular expression that is searched in a name."""
    if not isinstance(expression, str):
        message = f"group_settings has the key {expression!r}; it must be a regular expression"
        raise ValueError(message)
    start = "" if expression.startswith("^") else "*"
    end = "" if expression.endswith("$") else "*"
    pattern = ""
    rest = expression.removeprefix("^").removesuffix("$")
    while rest:
        if rest.startswith((r"\.", ".*")):
            pattern, rest = pattern + ("*" if rest[1] == "*" else "."), rest[2:]
        elif rest[0] in _SPECIAL:
            message = (
                f"group_settings has the expression {expression!r}; "
                "only text, '.', '.*', '^' and '$' can be compared with module names"
            )
            raise ValueError(message)
        else:
            pattern, rest = pattern + ("?" if rest[0] == "." else rest[0]), rest[1:]
    return f"{start}{pattern}{end}"
