"""The keywords of `Engine(...)` and of a request, for type checkers and the command line.

`EngineConfig` and `SamplingParams` in `_core.pyi` document the meaning and range of each field. The strings
are help texts of the command line; a field without one is not a command line option.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol, TypeAlias, TypedDict, TypeVar

from penstock._core import EngineConfig, SamplingParams, Tensor

Fields = TypeVar("Fields", EngineConfig, SamplingParams)


class MessageModel(Protocol):
    """A message of a chat as an object, such as a pydantic model."""

    def model_dump(self) -> dict[str, Any]:
        """The message as a mapping with `role` and `content`."""


Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, Any] | MessageModel]
#: A prompt of `generate_many`; the mapping has the key `messages` only.
BatchPrompt: TypeAlias = Prompt | Mapping[str, Sequence[Mapping[str, Any] | MessageModel]]
#: Called with the token ids so far and the logits of the next token; see `SamplingParams`.
LogitsProcessor: TypeAlias = Callable[[list[int], Tensor], object]


# begin generated: EngineConfig
# fmt: off
WeightDtype: TypeAlias = Literal["auto", "float32", "float16", "bfloat16"]
Quantization: TypeAlias = Literal["auto", "none", "int8", "int4", "w8a16", "w4a16", "fp8"] | Mapping[str, Any]


class EngineOptions(TypedDict, total=False):
    """The fields of `EngineConfig`."""

    device: Annotated[
        str | None,
        "Device that computes. Default: auto.",
    ]
    dtype: Annotated[
        WeightDtype | None,
        "Type of the weights that are not quantised. Default: that of the files; bfloat16 if all are "
        "quantised.",
    ]
    quantization: Annotated[
        Quantization | None,
        "Quantisation of the weights. Default: that of the files.",
    ]
    deterministic: Annotated[
        bool | None,
        "Give a request the same tokens and logprobs in every batch. Default: True.",
    ]
    config_overrides: Annotated[
        Mapping[str, Any] | None,
        "Values that are merged into the model's config.json, such as rope_scaling. Default: none.",
    ]
    threads: Annotated[
        int | None,
        "Number of compute threads. Default: all CPUs that the process may use, on macOS the performance "
        "cores; with numa_nodes, the physical cores of the smallest node times the number of nodes.",
    ]
    numa_nodes: Annotated[
        Sequence[int] | None,
        "NUMA nodes of the threads and the memory. Default: threads and memory are placed by the system.",
    ]
    weights_cache_bytes: Annotated[
        int | None,
        "Size of the cache of packed weights on disk. Default: 0: no cache.",
    ]
    profile: bool | None
    max_model_len: Annotated[
        int | None,
        "Maximum number of tokens of a sequence, prompt and output together. Default: the model's, or what "
        "the KV cache holds.",
    ]
    max_num_seqs: Annotated[
        int | None,
        "Maximum number of sequences in a step. Default: 64.",
    ]
    max_num_batched_tokens: Annotated[
        int | None,
        "Token budget of a step, and so the length of the largest prefill chunk. Default: 512.",
    ]
    max_prefill_chunk: Annotated[
        int | None,
        "Maximum number of prompt tokens that a step computes for one sequence. Default: "
        "max_num_batched_tokens.",
    ]
    max_waiting: Annotated[
        int | None,
        "Maximum number of waiting requests; further requests raise OverloadedError. Default: no bound.",
    ]
    max_unfinished: Annotated[
        int | None,
        "Maximum number of outputs that wait or run. Default: 65536.",
    ]
    max_paused: Annotated[
        int | None,
        "Maximum number of paused outputs. Default: 4096.",
    ]
    max_logprobs: Annotated[
        int | None,
        "Maximum of top_logprobs and prompt_logprobs of a request; -1 is the size of the vocabulary. "
        "Default: 20.",
    ]
    block_size: Annotated[
        int | None,
        "Number of tokens in a block of the KV cache: 16, 32, 64, 128. Default: 16.",
    ]
    kv_cache_dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16", "int8", "uint4"] | None,
        "Type of the KV cache. Default: dtype.",
    ]
    max_output_bytes: Annotated[
        int | None,
        "Maximum size of the tensors and logprobs of unfinished requests. Default: 4 GiB.",
    ]
    kv_cache_bytes: Annotated[
        int | None,
        "Size of the KV cache in bytes. Default: what memory_ratio leaves if it is set or on a CUDA device, "
        "else a quarter of the remaining memory.",
    ]
    kv_cache_blocks: Annotated[
        int | None,
        "Size of the KV cache in blocks of block_size tokens, exactly. Default: see kv_cache_bytes.",
    ]
    kv_cache_ratio: Annotated[
        float | None,
        "Share of the memory that weights, workspace and host tier leave, for the KV cache. Default: see "
        "kv_cache_bytes.",
    ]
    memory_ratio: Annotated[
        float | None,
        "Share of the available memory that weights, workspace and KV cache may take together. Default: "
        "0.9.",
    ]
    prefix_cache: Annotated[
        bool | None,
        "Keep computed blocks for requests that begin with the same tokens. Default: True.",
    ]
    prefix_cache_ttl: Annotated[
        float | None,
        "Time for which unused blocks are kept, in seconds. Default: 300.",
    ]
    host_cache_bytes: Annotated[
        int | None,
        "Size in bytes of the host tier, which takes blocks that the KV cache has no room for. Default: 0; "
        "with preemption_mode=swap, the size of the KV cache.",
    ]
    host_cache_blocks: Annotated[
        int | None,
        "Size of the host tier in blocks of block_size tokens. Default: see host_cache_bytes.",
    ]
    kv_events: Annotated[
        str | Mapping[str, Any] | None,
        "Address at which the changes of the prefix cache are published, for routers. Default: none are "
        "published.",
    ]
    preemption_mode: Annotated[
        Literal["recompute", "swap", "interrupt"] | None,
        "Effect of preemption, which occurs when the KV cache is full, on a request. Default: recompute.",
    ]
    preemption_victim: Annotated[
        Literal["newest", "longest"] | None,
        "Request that preemption_mode=interrupt ends, among those of the lowest priority. Default: newest.",
    ]
    max_adapters: Annotated[
        int | None,
        "Maximum number of adapters on the device, and so in a step; 0 disables adapters. Default: 0.",
    ]
    max_adapter_rank: Annotated[
        int | None,
        "Maximum rank of an adapter's matrices. Default: 64.",
    ]
    adapter_cache_bytes: Annotated[
        int | None,
        "Memory for the adapters on the device in bytes. Default: room for max_adapters adapters of rank "
        "16, or for one of max_adapter_rank.",
    ]
    max_cpu_adapters: Annotated[
        int | None,
        "Maximum number of loaded adapters, of which max_adapters are on the device. Default: max_adapters.",
    ]
    max_cpu_adapter_bytes: Annotated[
        int | None,
        "Maximum size of the loaded adapters in bytes. Default: the memory that is available when the "
        "engine is open.",
    ]
    tokenizer: Annotated[
        str | os.PathLike[str] | None,
        "Path of another tokenizer.json, of a directory that has one, or of a GGUF file. Default: the "
        "model's.",
    ]
    chat_template: Annotated[
        str | os.PathLike[str] | None,
        "Path of a Jinja chat template, in place of all templates of the model. Default: those of the "
        "model.",
    ]
    tool_parser: Annotated[
        Literal["auto", "none", "hermes", "llama3_json", "mistral", "kimi_k2", "kimi_k3", "deepseek_v3",
        "deepseek_v31", "dsml32", "dsml4", "qwen_xml", "seed_xml", "glm_xml", "hy3_xml", "minimax_m1",
        "minimax_m2", "minicpm5", "step3", "pythonic", "llama4_pythonic", "olmo3", "lfm2", "gemma4",
        "functiongemma", "cohere_json", "apertus", "internlm2", "granite3", "granite_20b_fc", "jamba",
        "hunyuan_a13b", "nemotron_nano2", "phi4_mini", "xlam", "functionary_v31", "solar", "qwen", "qwen25",
        "qwen2d5", "qwen3", "granite4", "llama3", "llama4_json", "mistral_json", "mistral_args", "deepseekv3",
        "deepseekv31", "deepseek_v32", "deepseekv32", "deepseek_v4", "deepseekv4", "qwen3_coder", "qwen3_xml",
        "qwen3coder", "step3p5", "mimo", "seed_oss", "glm", "glm45", "glm47", "hy_v3", "minimax",
        "minimax-m2", "cohere_command3", "apertus2509", "internlm", "granite", "granite-20b-fc",
        "phi4_mini_json"] | None,
        "Format of tool calls. Default: detected from the chat template.",
    ]
    reasoning_parser: Annotated[
        Literal["auto", "none", "think", "seed", "mm", "hy3", "kimi_k3", "kimi_vl", "mistral", "gemma4",
        "cohere", "apertus", "thought", "hunyuan_a13b", "ernie45", "granite32", "apriel", "solar",
        "deepseek_r1", "deepseek-r1", "deepseek_v3", "deepseek-v3", "qwen3", "qwen3-thinking", "qwen-qwq",
        "glm45", "kimi_k2", "minimax_m2", "minimax", "step3", "step3p5", "nano_v3", "olmo3", "glm47", "mimo",
        "nemotron_v3", "holo2", "deepseek_v4", "seed_oss", "minimax_m3", "hy_v3", "kimi", "cohere_command3",
        "granite"] | None,
        "Format of the reasoning before the answer. Default: detected from the chat template.",
    ]
    speculation: Annotated[
        Literal["ngram"] | None,
        "Method that proposes draft tokens; does not change the output. Default: off.",
    ]
    num_speculative_tokens: Annotated[
        int | None,
        "Maximum number of draft tokens of a sequence in a step. Default: 8.",
    ]


#: The options of the command line, by group.
ENGINE_GROUPS = {
    "Computation": (
        "device",
        "dtype",
        "quantization",
        "deterministic",
        "config_overrides",
        "threads",
        "numa_nodes",
        "weights_cache_bytes",
    ),
    "Lengths and batches": (
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_prefill_chunk",
        "max_waiting",
        "max_unfinished",
        "max_paused",
        "max_logprobs",
    ),
    "Memory": (
        "block_size",
        "kv_cache_dtype",
        "max_output_bytes",
        "kv_cache_bytes",
        "kv_cache_blocks",
        "kv_cache_ratio",
        "memory_ratio",
    ),
    "Prefix cache and preemption": (
        "prefix_cache",
        "prefix_cache_ttl",
        "host_cache_bytes",
        "host_cache_blocks",
        "kv_events",
        "preemption_mode",
        "preemption_victim",
    ),
    "LoRA adapters": (
        "max_adapters",
        "max_adapter_rank",
        "adapter_cache_bytes",
        "max_cpu_adapters",
        "max_cpu_adapter_bytes",
    ),
    "Text": (
        "tokenizer",
        "chat_template",
        "tool_parser",
        "reasoning_parser",
    ),
    "Speculative decoding": (
        "speculation",
        "num_speculative_tokens",
    ),
}
# fmt: on
# end generated: EngineConfig


# begin generated: SamplingParams
# fmt: off
class SamplingOptions(TypedDict, total=False):
    """The fields of `SamplingParams`."""

    n: int | None
    best_of: int | None
    num_beams: int | None
    length_penalty: float | None
    max_tokens: Annotated[
        int | None,
        "Maximum number of tokens to generate. Default: the model's max_new_tokens, else the remaining "
        "max_model_len.",
    ]
    max_length: Annotated[
        int | None,
        "Maximum number of tokens of prompt and output together. Default: the model's, if it has no "
        "max_new_tokens.",
    ]
    min_tokens: Annotated[
        int | None,
        "Number of tokens before which stop tokens are masked and stop sequences do not end the output. "
        "Default: 0.",
    ]
    stop: Annotated[
        str | Sequence[str] | None,
        "Stop strings: the output ends before the first one that appears. Default: none.",
    ]
    stop_token_ids: Annotated[
        Sequence[int] | None,
        "Token ids that end the output, in addition to the end tokens. Default: none.",
    ]
    eos_token_ids: Annotated[
        Sequence[int] | None,
        "Token ids that end the output in place of the model's end tokens. Default: the model's.",
    ]
    stop_token_sequences: Sequence[Sequence[int]] | None
    include_stop_str_in_output: Annotated[
        bool | None,
        "Keep the stop string, token or sequence in text. Default: False.",
    ]
    ignore_eos: Annotated[
        bool | None,
        "Continue after end tokens. Default: False.",
    ]
    temperature: Annotated[
        float | None,
        "Divisor of the logits; 0 selects the most likely token (greedy). Default: the model's, else 1.0.",
    ]
    top_n_sigma: Annotated[
        float | None,
        "Sample among tokens whose logit is at most this many standard deviations below the highest one. "
        "Default: 0.0.",
    ]
    top_k: Annotated[
        int | None,
        "Sample among this many most likely tokens; 0 and -1 disable the filter. Default: the model's, else "
        "0.",
    ]
    top_p: Annotated[
        float | None,
        "Sample among the fewest most likely tokens whose probabilities sum to at least this. Default: the "
        "model's, else 1.0.",
    ]
    min_p: Annotated[
        float | None,
        "Sample among tokens whose probability is at least this fraction of the highest one. Default: the "
        "model's, else 0.0.",
    ]
    typical_p: Annotated[
        float | None,
        "Sample among the most typical tokens whose probabilities sum to at least this. Default: the "
        "model's, else 1.0.",
    ]
    epsilon_cutoff: Annotated[
        float | None,
        "Minimum probability of a sampled token. Default: the model's, else 0.0.",
    ]
    seed: Annotated[
        int | None,
        "Random seed. Default: random.",
    ]
    logit_bias: Mapping[int, float] | Mapping[str, float] | None
    repetition_penalty: Annotated[
        float | None,
        "Divisor of the positive logits, and factor of the negative ones, of tokens that occurred before. "
        "Default: the model's, else 1.0.",
    ]
    repetition_penalty_scope: Annotated[
        Literal["all", "output"] | None,
        "Tokens that repetition_penalty counts. Default: all.",
    ]
    presence_penalty: Annotated[
        float | None,
        "Value subtracted from the logits of tokens that occur in the output. Default: 0.0.",
    ]
    frequency_penalty: Annotated[
        float | None,
        "Value subtracted from the logits of tokens once per occurrence in the output. Default: 0.0.",
    ]
    no_repeat_ngram_size: Annotated[
        int | None,
        "Length of the token n-grams that occur at most once in prompt and output; 0 disables the rule. "
        "Default: the model's, else 0.",
    ]
    allowed_token_ids: Annotated[
        Sequence[int] | None,
        "The only token ids that can be generated. Default: all.",
    ]
    bad_token_ids: Annotated[
        Sequence[int] | None,
        "Token ids that cannot be generated. Default: none.",
    ]
    bad_words: Annotated[
        Sequence[str] | None,
        "Strings whose token sequences are masked. Default: none.",
    ]
    bad_token_sequences: Sequence[Sequence[int]] | None
    logits_processors: Sequence[LogitsProcessor] | None
    response_format: Mapping[str, Any] | type | Any | None
    regex: Annotated[
        str | None,
        "Regular expression that the whole output matches, in the syntax of Rust's regex. Default: none.",
    ]
    choice: Annotated[
        Sequence[str] | None,
        "Strings of which the output is one. Default: none.",
    ]
    grammar: Annotated[
        str | None,
        "Context-free grammar of the output, in Lark's notation or in GBNF. Default: none.",
    ]
    tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None
    tool_choice: Literal["none", "auto", "required"] | Mapping[str, Any] | None
    parallel_tool_calls: bool | None
    logprobs: bool | None
    top_logprobs: int | None
    prompt_logprobs: int | None
    logprobs_mode: Literal["raw", "processed"] | None
    output_logits: Literal["prompt", "generation", "all"] | None
    output_hidden_states: Literal["prompt", "generation", "all"] | None
    output_embeddings: Literal["prompt", "generation", "all"] | None
    echo: Annotated[
        bool | None,
        "Begin text with the text of the prompt. Default: False.",
    ]
    skip_special_tokens: Annotated[
        bool | None,
        "Omit special tokens from text. Default: True.",
    ]
    spaces_between_special_tokens: Annotated[
        bool | None,
        "Separate special tokens in text by spaces; they are in it with skip_special_tokens=False. Default: "
        "False.",
    ]
    priority: Annotated[
        int | None,
        "Scheduling priority; lower values are served first. Default: 0.",
    ]
    cache_salt: Annotated[
        str | None,
        "Share cached blocks only with requests that have the same salt. Default: none.",
    ]
    use_prefix_cache: Annotated[
        bool | None,
        "Use blocks from the prefix cache and add this request's blocks to it. Default: True.",
    ]
    unread: Literal["pause", "keep"] | None
    adapter: Annotated[
        str | None,
        "Name of the LoRA adapter that computes the output; see Engine.load_adapter. Default: none: the "
        "base model.",
    ]


#: The options of the command line, by group.
SAMPLING_GROUPS = {
    "Output length and stop conditions": (
        "max_tokens",
        "max_length",
        "min_tokens",
        "stop",
        "stop_token_ids",
        "eos_token_ids",
        "include_stop_str_in_output",
        "ignore_eos",
    ),
    "Sampling": (
        "temperature",
        "top_n_sigma",
        "top_k",
        "top_p",
        "min_p",
        "typical_p",
        "epsilon_cutoff",
        "seed",
        "repetition_penalty",
        "repetition_penalty_scope",
        "presence_penalty",
        "frequency_penalty",
        "no_repeat_ngram_size",
        "allowed_token_ids",
        "bad_token_ids",
        "bad_words",
    ),
    "Structured output and tools": (
        "regex",
        "choice",
        "grammar",
    ),
    "Text and additional outputs": (
        "echo",
        "skip_special_tokens",
        "spaces_between_special_tokens",
    ),
    "Scheduling and cache": (
        "priority",
        "cache_salt",
        "use_prefix_cache",
        "adapter",
    ),
}

#: The sampling filters, in the order in which they apply.
FILTERS = ("top_n_sigma", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff")
# fmt: on
# end generated: SamplingParams


class RequestOptions(SamplingOptions, total=False):
    """The fields of `SamplingParams`, the prompt as messages, and how messages are rendered."""

    messages: Sequence[Mapping[str, Any] | MessageModel] | None
    chat_template: str | None
    chat_template_kwargs: Mapping[str, Any] | None
    documents: Sequence[Mapping[str, Any]] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None


def merge(cls: type[Fields], given: Fields | None, changes: dict[str, Any]) -> Fields:
    """`given` with `changes`, or a new object of the class if `given` is `None`."""
    if given is None:
        return cls(**changes)
    if not isinstance(given, cls):
        message = f"expected {cls.__name__}, got {type(given).__name__}"
        raise TypeError(message)
    return given.replace(**changes) if changes else given
