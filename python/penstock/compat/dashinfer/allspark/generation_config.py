"""`ASGenerationConfigBuilder`, and the sampling parameters of a generation configuration."""

from __future__ import annotations

import logging
import math
import operator
import random
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from penstock._json import loads
from penstock._shown import shown
from penstock.compat.dashinfer.allspark.enums import AsStatus
from penstock.compat.dashinfer.allspark.errors import AsError

if TYPE_CHECKING:
    from typing import Self

    from penstock import SamplingOptions
    from penstock.compat.dashinfer.allspark.multimedia import MultiMediaInfo

__all__ = ["ASGenerationConfigBuilder", "sampling_options"]

logger = logging.getLogger("penstock.dashinfer")

#: End token if the configuration has none.
_DEFAULT_EOS_TOKEN = 102
#: Temperatures below this select the most likely token.
_MIN_TEMPERATURE = 1e-5
_MAX_TOP_LOGPROBS = 10
#: Keys that are taken from a Hugging Face generation configuration.
_HUGGING_FACE_KEYS = (
    "top_k",
    "top_p",
    "repetition_penalty",
    "length_penalty",
    "temperature",
    "min_length",
    "no_repeat_ngram_size",
)


class ASGenerationConfigBuilder:
    """Builds the generation configuration of a request, a dict.

        builder = ASGenerationConfigBuilder().max_length(512).temperature(0.7).top_k(50)
        builder.update({"repetition_penalty": 1.1})

    Setters return the builder. Values are checked when a request is started. `hf_gen_config` is a Hugging
    Face `GenerationConfig` or a mapping with its keys. `seed` is by default random, one for each builder.
    """

    def __init__(
        self, hf_gen_config: object | None = None, seed: int | None = None, eos_token_id: int = 0
    ) -> None:
        self.gen_cfg: dict[str, Any] = {
            "seed": random.SystemRandom().getrandbits(63) if seed is None else seed,
            "eos_token_id": eos_token_id,
        }
        if hf_gen_config is not None:
            self._update_from_hugging_face(hf_gen_config)

    def update(self, values: Mapping[str, Any]) -> Self:
        """Set the given keys; those of `docs/dashinfer.md`. Unknown keys are ignored with a warning."""
        if not isinstance(values, Mapping):
            message = f"expected a mapping of generation parameters, got {type(values).__name__}"
            raise TypeError(message)
        self.gen_cfg.update(values)
        return self

    def do_sample(self, flag: bool = True) -> Self:
        """Sample tokens, the default. With `False` the most likely token is selected."""
        return self._set("do_sample", flag)

    def early_stopping(self, flag: bool = True) -> Self:
        """End the output at an end token, the default. With `False` only stop words and lengths end it."""
        return self._set("early_stopping", flag)

    def temperature(self, value: float) -> Self:
        """Set the divisor of the logits, at most 2; below 0.00001 the most likely token is selected."""
        return self._set("temperature", value)

    def top_k(self, value: int) -> Self:
        """Sample among this many most likely tokens; 0 disables the filter. Default: 50."""
        return self._set("top_k", value)

    def top_p(self, value: float) -> Self:
        """Sample among the most likely tokens, up to this total probability; 0 and 1 disable the filter."""
        return self._set("top_p", value)

    def max_length(self, value: int) -> Self:
        """Set the maximum number of tokens of prompt and output together. At least one token is generated."""
        return self._set("max_length", value)

    def min_length(self, value: int) -> Self:
        """Set the number of tokens of prompt and output below which no end token is generated."""
        return self._set("min_length", value)

    def eos_token_id(self, value: int | list[int]) -> Self:
        """Set the end token, or several."""
        return self._set("eos_token_id", value)

    def stop_words_ids(self, value: list[list[int]]) -> Self:
        """Set sequences of token ids that end the output, which contains them."""
        return self._set("stop_words_ids", value)

    def bad_words_ids(self, value: list[list[int]]) -> Self:
        """Set sequences of token ids that are not generated."""
        return self._set("bad_words_ids", value)

    def no_repeat_ngram_size(self, value: int) -> Self:
        """Set the length of the n-grams that occur at most once in prompt and output; 0 disables the rule."""
        return self._set("no_repeat_ngram_size", value)

    def repetition_penalty(self, value: float) -> Self:
        """Set the divisor of the logits of tokens that occurred before: above 0, at most 2."""
        return self._set("repetition_penalty", value)

    def presence_penalty(self, value: float) -> Self:
        """Set the value that is subtracted from the logits of tokens in the output: -2 to 2."""
        return self._set("presence_penalty", value)

    def frequency_penalty(self, value: float) -> Self:
        """Set the value that is subtracted once per occurrence in the output: -2 to 2."""
        return self._set("frequency_penalty", value)

    def suppress_repetition_in_generation(self, flag: bool = True) -> Self:
        """Let `repetition_penalty` count the tokens of the output only, not those of the prompt."""
        return self._set("suppress_repetition_in_generation", flag)

    def length_penalty(self, value: float) -> Self:
        """Only 1.0, without effect, is allowed: the penalty ranks the outputs of a beam search."""
        return self._set("length_penalty", value)

    def seed(self, value: int) -> Self:
        """Set the random seed, a 64-bit integer: the same request with the same seed has the same output."""
        return self._set("seed", value)

    def log_probs(self, enable: bool = True, top_n: int = 0) -> Self:
        """Return the log probability of each token, and those of the `top_n` most likely ones, at most 10."""
        self._set("logprobs", enable)
        return self._set("top_logprobs", top_n)

    def logprobs(self, flag: bool = True) -> Self:
        """Return the log probability of each token."""
        return self._set("logprobs", flag)

    def top_logprobs(self, value: int) -> Self:
        """Set the number of most likely tokens with log probabilities, at most 10; needs `logprobs`."""
        return self._set("top_logprobs", value)

    def lora_name(self, value: str) -> Self:
        """Set the LoRA adapter that computes the output; see `Engine.load_lora`."""
        return self._set("lora_name", value)

    def with_mm_info(self, info: MultiMediaInfo) -> Self:
        """Set images or audio. They are not supported: a request with them is refused."""
        return self._set("mm_info", info)

    mm_info = with_mm_info

    def response_format(self, value: Mapping[str, Any]) -> Self:
        """Set the format of the output: `{"type": "json_object"}`, and `json_schema` with a schema."""
        return self._set("response_format", value)

    @staticmethod
    def process_eos_tokens(eos_token_id: int | list[int]) -> tuple[int, list[list[int]]]:
        """`eos_token_id` and `stop_words_ids` for the end token, or the end tokens, of a model."""
        if isinstance(eos_token_id, Iterable):
            ids = list(eos_token_id)
            if not ids:
                message = "eos_token_id is an empty list; it must have at least one token id"
                raise ValueError(message)
            return ids[0], [[token] for token in ids]
        return eos_token_id, []

    def build(self) -> dict[str, Any]:
        """The configuration: a copy of the keys that are set."""
        return dict(self.gen_cfg)

    def _set(self, key: str, value: object) -> Self:
        self.gen_cfg[key] = value
        return self

    def _update_from_hugging_face(self, config: object) -> None:
        values = config if isinstance(config, Mapping) else vars(config)
        if values.get("num_return_sequences") not in (None, 1):
            message = f"num_return_sequences is {values['num_return_sequences']!r}; it must be 1"
            raise ValueError(message)
        self.update({key: values[key] for key in _HUGGING_FACE_KEYS if values.get(key) is not None})
        self.update({"do_sample": True, "early_stopping": True})
        if values.get("eos_token_id") is not None:
            first, stop_words = self.process_eos_tokens(values["eos_token_id"])
            self.update({"eos_token_id": first})
            if stop_words:
                self.update({"stop_words_ids": stop_words})


def sampling_options(
    config: Mapping[str, Any], *, num_prompt_tokens: int, max_model_len: int, vocabulary_size: int
) -> SamplingOptions:
    """The keywords of `penstock.SamplingParams` for a generation configuration.

    None of them is left to the model's `generation_config.json`. Raises `AsError` for values that DashInfer
    refuses and Penstock accepts; `SamplingParams` checks the others.
    """
    values = _checked(config)
    max_tokens, min_tokens = _lengths(values, num_prompt_tokens, max_model_len)
    eos_token_ids = values["eos_token_id"]
    if eos_token_ids is None:
        eos_token_ids = [_DEFAULT_EOS_TOKEN] if vocabulary_size > _DEFAULT_EOS_TOKEN else []
    is_greedy = values["temperature"] < _MIN_TEMPERATURE or values["top_k"] == 1 or not values["do_sample"]
    options: SamplingOptions = {
        "max_tokens": max_tokens,
        "min_tokens": min_tokens,
        "eos_token_ids": eos_token_ids if values["early_stopping"] else [],
        "temperature": 0.0 if is_greedy else values["temperature"],
        "top_k": values["top_k"],
        "top_p": values["top_p"] or 1.0,
        "min_p": 0.0,
        "typical_p": 1.0,
        "epsilon_cutoff": 0.0,
        "no_repeat_ngram_size": values["no_repeat_ngram_size"],
        "repetition_penalty": values["repetition_penalty"],
        "presence_penalty": values["presence_penalty"],
        "frequency_penalty": values["frequency_penalty"],
        "seed": values["seed"],
        "unread": "keep",
    }
    if stop_words := values["stop_words_ids"]:
        options["stop_token_ids"] = [ids[0] for ids in stop_words if len(ids) == 1]
        options["stop_token_sequences"] = [ids for ids in stop_words if len(ids) != 1]
    if values["bad_words_ids"]:
        options["bad_token_sequences"] = values["bad_words_ids"]
    if values["suppress_repetition_in_generation"]:
        options["repetition_penalty_scope"] = "output"
    if values["lora_name"]:
        options["adapter"] = values["lora_name"]
    if values["response_format"]:
        options["response_format"] = values["response_format"]
    if values["logprobs"]:
        count = _integer("top_logprobs", values["top_logprobs"], 0, _MAX_TOP_LOGPROBS)
        options |= {"logprobs": True, "top_logprobs": count, "logprobs_mode": "processed"}
    if values["enable_tensors_from_model_inference"]:
        options["output_embeddings"] = options["output_hidden_states"] = "all"
    return options


def _checked(config: Mapping[str, Any]) -> dict[str, Any]:
    """The values of all keys; those that are set are checked."""
    values = _DEFAULTS.copy()
    for key, value in config.items():
        if key not in _PARAMETERS:
            logger.warning("the generation parameter %r is unknown and has no effect", key)
        elif value is not None:
            values[key] = _PARAMETERS[key][1](key, value)
    return values


def _lengths(values: Mapping[str, Any], num_prompt_tokens: int, max_model_len: int) -> tuple[int, int]:
    """The maximum and minimum number of generated tokens, from lengths that count the prompt."""
    limit = max_model_len - 2
    if not 0 < num_prompt_tokens <= limit:
        reason = f"the prompt has {num_prompt_tokens} tokens; it must have 1 to {limit}"
        raise AsError(AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR, reason)
    max_length = values["max_length"]
    if max_length > max_model_len:
        reason = f"max_length is {shown(max_length)}; it must be at most engine_max_length, {max_model_len}"
        raise AsError(AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR, reason)
    if max_length <= num_prompt_tokens:
        message = "max_length is %s, and the prompt has %s tokens: one token is generated"
        logger.warning(message, max_length, num_prompt_tokens)
    max_tokens = max(1, max_length - num_prompt_tokens)
    return max_tokens, min(max(0, values["min_length"] - num_prompt_tokens), max_tokens)


def _eos_token_ids(key: str, value: Any) -> list[int]:
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [_integer(key, item) for item in value]
    return [_integer(key, value)]


def _sequences(key: str, value: Any) -> list[list[int]]:
    try:
        return [[_integer(key, item) for item in sequence] for sequence in value]
    except TypeError:
        _refuse(key, value, "a list of lists of token ids")


def _seed(key: str, value: Any) -> int:
    """A seed as an unsigned 64-bit integer; DashInfer's seeds are signed."""
    return _integer(key, value, -(2**63), 2**64 - 1) % 2**64


def _response_format(key: str, value: Any) -> Mapping[str, Any] | None:
    if not isinstance(value, Mapping):
        _refuse(key, value, "a mapping")
    unknown = [str(name) for name in value if name not in ("type", "json_schema")]
    if unknown:
        _refuse(f"{key} with the keys {', '.join(unknown)}", value, "a mapping with type and json_schema")
    kind = value.get("type", "text" if not value else None)
    if kind == "text":
        return None
    if kind not in ("json_object", "json_schema"):
        _refuse(f"the type of {key}", kind, "'text', 'json_object' or 'json_schema'")
    schema = value.get("json_schema")
    if not schema:
        return {"type": kind}
    if isinstance(schema, str):
        try:
            schema = loads(schema)
        except ValueError as error:
            reason = f"json_schema of {key} is not valid JSON: {error}"
            raise AsError(AsStatus.ALLSPARK_PARAM_ERROR, reason) from error
    return {"type": "json_schema", "json_schema": schema}


def _neutral(key: str, value: Any) -> Any:
    if not isinstance(value, (int, float)) or value != 1:
        _refuse(key, value, "1: there is no beam search")
    return value


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str):
        _refuse(key, value, "a text")
    return value


def _no_multimedia(key: str, value: Any) -> NoReturn:
    _refuse(key, value, "unset: images and audio are not supported yet")


def _ignored(_key: str, value: Any) -> Any:
    return value


def _integer(key: str, value: Any, low: int = 0, high: int | None = None) -> int:
    """`value` as an integer in this range."""
    try:
        number = low - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = low - 1
    if number < low or (high is not None and number > high):
        _refuse(key, value, f"an integer from {low}" if high is None else f"an integer from {low} to {high}")
    return number


def _number(key: str, value: Any, low: float = -math.inf, high: float = math.inf) -> float:
    """`value` as a number in this range."""
    try:
        number = math.nan if isinstance(value, (bool, str)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not low <= number <= high:
        _refuse(key, value, "a number" if low == -math.inf else f"a number from {low:g} to {high:g}")
    return number


def _flag(key: str, value: Any) -> bool:
    if not isinstance(value, int) or value not in (0, 1):
        _refuse(key, value, "True or False")
    return bool(value)


def _refuse(key: str, value: object, limit: str) -> NoReturn:
    raise AsError(AsStatus.ALLSPARK_PARAM_ERROR, f"{key} is {shown(value)}; it must be {limit}")


#: The keys of a generation configuration: the value of a key that is not set, and the check of one that is.
_PARAMETERS: dict[str, tuple[Any, Callable[[str, Any], Any]]] = {
    "do_sample": (True, _flag),
    "num_beams": (1, _neutral),
    "num_return_sequences": (1, _neutral),
    "temperature": (1.0, _number),
    "top_k": (50, _integer),
    "top_p": (1.0, partial(_number, low=0.0, high=1.0)),
    "max_length": (20, partial(_integer, low=1)),
    "min_length": (0, _integer),
    "early_stopping": (True, _flag),
    "eos_token_id": (None, _eos_token_ids),
    "stop_words_ids": ((), _sequences),
    "bad_words_ids": ((), _sequences),
    "no_repeat_ngram_size": (0, _integer),
    "repetition_penalty": (1.0, partial(_number, low=0.0, high=2.0)),
    "presence_penalty": (0.0, partial(_number, low=-2.0, high=2.0)),
    "frequency_penalty": (0.0, partial(_number, low=-2.0, high=2.0)),
    "suppress_repetition_in_generation": (False, _flag),
    "length_penalty": (1.0, _neutral),
    "seed": (None, _seed),
    "logprobs": (False, _flag),
    "top_logprobs": (0, partial(_integer, low=-(2**63))),  # its range matters with `logprobs` only
    "lora_name": ("", _text),
    "mm_info": (None, _no_multimedia),
    "response_format": (None, _response_format),
    "enable_tensors_from_model_inference": (False, _flag),
    # Of DashInfer's guided decoding and logs.
    "vocab": (None, _ignored),
    "vocab_type": (None, _ignored),
    "uuid": (None, _ignored),
}
_DEFAULTS = {key: default for key, (default, _check) in _PARAMETERS.items()}
