"""The keywords of `Engine(...)` and of a request, for type checkers and the command line.

What they mean in full, and their ranges, is documented with the classes that check them, `EngineConfig` and
`SamplingParams` in `_core.pyi`; a test holds the names here against theirs. The strings are the command
line's help; a field without one is no option there.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias, TypedDict, TypeVar

from penstock._core import EngineConfig, SamplingParams, Tensor

Fields = TypeVar("Fields", EngineConfig, SamplingParams)
Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, Any]]
ElementName: TypeAlias = Literal["auto", "float32", "float16", "bfloat16"]
CacheElementName: TypeAlias = Literal["auto", "float32", "float16", "bfloat16", "int8", "uint4"]
PreemptionMode: TypeAlias = Literal["recompute", "swap", "interrupt"]
ToolParser: TypeAlias = Literal["auto", "none", "hermes", "llama3_json", "mistral"]
ReasoningParser: TypeAlias = Literal["auto", "none", "think"]
LogprobsMode: TypeAlias = Literal["raw", "processed"]
Extent: TypeAlias = Literal["prompt", "generation", "all"]
ToolChoice: TypeAlias = Literal["none", "auto", "required"] | dict[str, Any]
#: Gets the tokens so far and the logits of the next one; see `SamplingParams`.
LogitsProcessor: TypeAlias = Callable[[Sequence[int], Tensor], object]


class EngineOptions(TypedDict, total=False):
    """Fields of `EngineConfig`."""

    device: Annotated[str | None, "Where to compute: auto or cpu."]
    dtype: Annotated[ElementName | None, "Type the weights are kept in: auto, float32, float16 or bfloat16."]
    threads: Annotated[int | None, "Compute threads; all CPUs by default."]
    max_model_len: Annotated[int | None, "Most tokens of a sequence; the model's length by default."]
    max_num_seqs: Annotated[int | None, "Most sequences computed together."]
    max_num_batched_tokens: Annotated[int | None, "Most tokens computed in one step."]
    max_waiting: Annotated[int | None, "Most requests that may wait."]
    block_size: Annotated[int | None, "Tokens per block of the KV cache: 16, 32, 64 or 128."]
    kv_cache_dtype: Annotated[
        CacheElementName | None, "Type of the KV cache, int8 and uint4 too; that of the weights by default."
    ]
    kv_cache_bytes: Annotated[int | None, "Bytes of the KV cache."]
    memory_ratio: Annotated[float | None, "Share of the available memory to use; 0.9 by default."]
    prefix_cache: Annotated[bool | None, "Share what requests have in common at their beginnings."]
    prefix_cache_ttl: Annotated[float | None, "Seconds to keep what nobody uses; 300 by default."]
    host_cache_bytes: Annotated[int | None, "Bytes of the host tier of the KV cache; 0 by default."]
    preemption_mode: Annotated[
        PreemptionMode | None, "When the KV cache is full: recompute, swap or interrupt a request."
    ]
    tokenizer: Annotated[str | os.PathLike[str] | None, "Another tokenizer.json, or a directory with one."]
    speculation: Annotated[Literal["ngram"] | None, "Guess tokens ahead, with the same answer: ngram."]
    num_speculative_tokens: Annotated[int | None, "Most tokens guessed ahead; 8 by default."]
    tool_parser: Annotated[
        ToolParser | None, "How the model writes tool calls: auto, none, hermes, llama3_json or mistral."
    ]
    reasoning_parser: Annotated[ReasoningParser | None, "How it marks its reasoning: auto, none or think."]


class SamplingOptions(TypedDict, total=False):
    """Fields of `SamplingParams`."""

    n: int | None
    best_of: int | None
    num_beams: int | None
    length_penalty: float | None
    max_tokens: Annotated[int | None, "Most tokens to generate; up to the model's length by default."]
    max_length: Annotated[int | None, "Most tokens of prompt and answer together."]
    min_tokens: Annotated[int | None, "No stop token before this many tokens."]
    temperature: Annotated[float | None, "0 is greedy; the model's own by default."]
    top_k: Annotated[int | None, "Choose among this many tokens; 0 is all."]
    top_p: Annotated[float | None, "Choose among the likeliest tokens of this total probability."]
    min_p: Annotated[float | None, "Choose among tokens this likely, relative to the likeliest."]
    typical_p: Annotated[float | None, "Choose among the most typical tokens of this total probability."]
    repetition_penalty: Annotated[float | None, "Above 1 makes tokens that were seen before less likely."]
    presence_penalty: Annotated[float | None, "Subtracted from the logits of tokens generated before."]
    frequency_penalty: Annotated[float | None, "Likewise, once for each time."]
    no_repeat_ngram_size: Annotated[int | None, "No sequence of so many tokens comes twice; 0 for no rule."]
    repetition_penalty_scope: Annotated[
        Literal["all", "output"] | None, "Tokens that repetition_penalty counts: all, or those of the output."
    ]
    logit_bias: dict[int, float] | None
    allowed_token_ids: Annotated[Sequence[int] | None, "Choose this token alone; may be given several times."]
    bad_words: Annotated[
        Sequence[str] | None, "A word that the answer does not have; may be given several times."
    ]
    bad_token_ids: Annotated[Sequence[int] | None, "Never choose this token; may be given several times."]
    stop: Annotated[str | Sequence[str] | None, "Text that ends the answer; may be given several times."]
    stop_token_ids: Annotated[Sequence[int] | None, "Token that ends the answer; may be given several times."]
    stop_token_sequences: Sequence[Sequence[int]] | None
    include_stop_str_in_output: Annotated[bool | None, "Keep what ended the answer in its text."]
    ignore_eos: Annotated[bool | None, "Go on after the model's own end token."]
    seed: Annotated[int | None, "The same seed gives the same answer; random by default."]
    logprobs: bool | None
    top_logprobs: int | None
    prompt_logprobs: int | None
    logprobs_mode: LogprobsMode | None
    echo: Annotated[bool | None, "Begin the text with that of the prompt."]
    skip_special_tokens: Annotated[bool | None, "Leave special tokens out of the text."]
    spaces_between_special_tokens: Annotated[bool | None, "Put spaces around special tokens in the text."]
    output_logits: Extent | None
    output_hidden_states: Extent | None
    logits_processors: Sequence[LogitsProcessor] | None
    response_format: dict[str, Any] | None
    regex: Annotated[str | None, "The answer is what this regular expression matches as a whole."]
    choice: Annotated[Sequence[str] | None, "The answer is this text; may be given several times."]
    grammar: Annotated[str | None, "The answer is a text of this grammar, in Lark."]
    tools: Sequence[dict[str, Any]] | None
    tool_choice: ToolChoice | None
    parallel_tool_calls: bool | None
    priority: Annotated[int | None, "The lower, the sooner; 0 by default."]
    cache_salt: Annotated[str | None, "Share computed blocks with requests of this salt alone."]
    use_prefix_cache: Annotated[bool | None, "Take from the prefix cache, and leave there."]


def merge(cls: type[Fields], given: Fields | None, changes: dict[str, Any]) -> Fields:
    """`given` with `changes`; a new object of the class where nothing is given."""
    if given is None:
        return cls(**changes)
    if not isinstance(given, cls):
        message = f"expected {cls.__name__}, got {type(given).__name__}"
        raise TypeError(message)
    return given.replace(**changes) if changes else given
