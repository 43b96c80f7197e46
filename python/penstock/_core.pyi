# ruff: noqa: A002, PYI021 - the stub documents the native module
"""The native extension module. `penstock` re-exports its public names; the others are internal.

All classes are immutable and can be shared between threads. Value classes take keyword arguments only, are
compared and hashed by value, and have a `repr` that is the call of their constructor. Numbers of tokens,
positions and blocks are `int`; times are in seconds, sizes in bytes.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias, TypeVar, final

from typing_extensions import CapsuleType

__all__ = [
    "Adapter",
    "BeamSearch",
    "Choice",
    "Chunk",
    "CudaDevice",
    "CudaInfo",
    "Engine",
    "EngineConfig",
    "Health",
    "Histogram",
    "Host",
    "HostTierInfo",
    "KvEvents",
    "MemoryInfo",
    "ModelInfo",
    "NumaInfo",
    "Port",
    "ProfileRow",
    "Request",
    "Result",
    "SamplingParams",
    "Score",
    "Stats",
    "Tensor",
    "Timings",
    "Tokenizer",
    "ToolCall",
    "ToolCallDelta",
    "Usage",
    "WeightFormatInfo",
    "__version__",
    "best_of",
    "call_deep",
    "candidate_params",
    "check_output",
    "convert",
    "cuda_info",
    "describe",
    "has_large_stack",
    "resolve_device",
    "score",
]

_FinishReason: TypeAlias = Literal["stop", "tool_calls", "length", "cancelled", "interrupted", "unread"]

_Returned = TypeVar("_Returned")

__version__: Final[str]

# begin generated: EngineConfig
# fmt: off
@final
class EngineConfig:
    """The configuration of an engine.

    Every field is optional; `None` selects the default, and `"auto"` lets the engine choose. `Engine.info`
    has the values in effect.

    Most fields affect speed and memory only. These change outputs: `dtype`, `quantization`,
    `config_overrides`, `kv_cache_dtype` and `tokenizer`; for chats, `chat_template`, `tool_parser` and
    `reasoning_parser`.

    Raises `ConfigError` for a value of the wrong type or out of range and for conflicting fields,
    `TypeError` for an unknown keyword.

    Computation:

    - `device`: Device that computes. `"auto"`, `"cpu"`, `"cuda"`, or `"cuda:1"` for another of the visible
      CUDA devices. `"auto"` is the first CUDA device that can be used, and the CPU without one. A CUDA
      device that cannot be used raises `DeviceUnavailableError` with the reason. Default: `"auto"`.
    - `dtype`: Type of the weights that are not quantised. Arithmetic with them is in float32. Range:
      `"auto"`, `"float32"`, `"float16"`, `"bfloat16"`. Default: that of the files; bfloat16 if all are
      quantised.
    - `quantization`: Quantisation of the weights. Quantised files are computed as they are stored, with
      exactly their values; `"none"` converts them to `dtype`. The other names quantise the weights while
      they are loaded. Activations are rounded to 8-bit integers, unless only the weights are quantised;
      with `"fp8"` to 8-bit floats on CUDA devices that multiply them. A mapping has `type` (one of the
      names), `group_size` (32, 64, 128, or -1 for a whole row), `symmetric` (`False` stores a minimum for
      each group), `embedding` and `head` (a name, or a mapping of the first three keys), and `layers`:
      patterns of module names, such as `"*.down_proj"`, each with such a value. The first pattern that
      matches applies. Range: `"auto"`, `"none"`, `"int8"`, `"int4"`, `"w8a16"`, `"w4a16"`, `"fp8"`, or a
      mapping. Default: that of the files.
    - `deterministic`: Give a request the same tokens and logprobs in every batch. `False` permits
      algorithms whose results depend on the other requests of a step. On a CUDA device, cuBLASLt
      multiplies weights of 16 bits then, if it is installed. The CPU has no such algorithm: its results
      are the same with both values. Default: `True`.
    - `config_overrides`: Values that are merged into the model's `config.json`, such as `rope_scaling`.
      Mappings are merged recursively; `None` removes a value. GGUF files have the same names. A key that
      the model does not read is an error. This changes outputs. Default: none.
    - `threads`: Number of compute threads. If it is not set, the environment variable `PENSTOCK_THREADS`
      applies. Range: 1 to 1024. Default: all CPUs that the process may use, on macOS the performance
      cores; with `numa_nodes`, the physical cores of the smallest node times the number of nodes.
    - `numa_nodes`: NUMA nodes of the threads and the memory. Threads run on the CPUs of the nodes, the
      same number on each. The weights of several nodes are divided between them: a thread computes with
      those of its own node. `threads` must be a multiple of the number of nodes. Weights of converted
      models and of the weights cache are copied instead of mapped. Range: 1 to 16 different NUMA nodes.
      Default: threads and memory are placed by the system.
    - `weights_cache_bytes`: Size of the cache of packed weights on disk. A model that is opened again is
      mapped into memory instead of loaded. The least recently used weights are removed first. The
      directory is `weights` in `PENSTOCK_CACHE`, by default in `penstock` in `XDG_CACHE_HOME` or
      `~/.cache`, on Windows in `LOCALAPPDATA`. Converted models need no cache. Range: 0 to 2**63 - 1.
      Default: 0: no cache.
    - `profile`: Measure the operations of the device; see `Engine.profile`. Default: `False`.

    Lengths and batches:

    - `max_model_len`: Maximum number of tokens of a sequence, prompt and output together. Range: 1 to
      2**31 - 1. Default: the model's, or what the KV cache holds.
    - `max_num_seqs`: Maximum number of sequences in a step. At most `max_num_batched_tokens`. Range: 1 to
      65536. Default: 64.
    - `max_num_batched_tokens`: Token budget of a step, and so the length of the largest prefill chunk. At
      least `block_size`. Range: 16 to 1048576. Default: 512.
    - `max_prefill_chunk`: Maximum number of prompt tokens that a step computes for one sequence. With a
      smaller value than `max_num_batched_tokens`, a long prompt delays the tokens of other requests less,
      and takes more steps itself. Does not change the output. Range: 1 to 1048576. Default:
      `max_num_batched_tokens`.
    - `max_waiting`: Maximum number of waiting requests; further requests raise `OverloadedError`. Range: 1
      or more. Default: no bound.
    - `max_unfinished`: Maximum number of outputs that wait or run. A request counts once for each of its
      choices (`n`, `best_of`). Further requests raise `OverloadedError`. Range: 128 or more. Default:
      65536.
    - `max_paused`: Maximum number of paused outputs. An output pauses while its result queue is full.
      Beyond the maximum, one of the client with the most paused outputs, the one paused for longest, ends
      with `finish_reason == "unread"`. Range: 1 or more. Default: 4096.
    - `max_logprobs`: Maximum of `top_logprobs` and `prompt_logprobs` of a request; -1 is the size of the
      vocabulary. A position takes 8 bytes for each of them; beyond 20 they count in the request's limit of
      1 GiB. Range: -1 to 2**31 - 1. Default: 20.

    Memory:

    - `block_size`: Number of tokens in a block of the KV cache. Range: 16, 32, 64, 128. Default: 16.
    - `kv_cache_dtype`: Type of the KV cache. `"int8"` and `"uint4"` have scales for each token and head.
      Range: `"auto"`, `"float32"`, `"float16"`, `"bfloat16"`, `"int8"`, `"uint4"`. Default: `dtype`.
    - `max_output_bytes`: Maximum size of the tensors and logprobs of unfinished requests. Further requests
      that ask for them raise `OverloadedError`. Up to 20 logprobs per position are not counted. Range: 1
      to 2**63 - 1. Default: 4 GiB.
    - `kv_cache_bytes`: Size of the KV cache in bytes. Never larger than twice what `max_num_seqs`
      sequences of `max_model_len` tokens need. Range: 1 to 2**63 - 1. Default: what `memory_ratio` leaves
      if it is set or on a CUDA device, else a quarter of the remaining memory.
    - `kv_cache_blocks`: Size of the KV cache in blocks of `block_size` tokens, exactly. Not allowed with
      `kv_cache_bytes`, `kv_cache_ratio`: the KV cache has one size. Range: 1 to 2**31 - 1. Default: see
      `kv_cache_bytes`.
    - `kv_cache_ratio`: Share of the memory that weights, workspace and host tier leave, for the KV cache.
      A share of `memory_ratio` of the available memory. A host tier of the same size is part of the share.
      Never larger than `kv_cache_bytes` can be. Not allowed with `kv_cache_bytes`, `kv_cache_blocks`: the
      KV cache has one size. Range: above 0, at most 1. Default: see `kv_cache_bytes`.
    - `memory_ratio`: Share of the available memory that weights, workspace and KV cache may take together.
      If it is not set, the environment variable `PENSTOCK_MEMORY_RATIO` or `BFC_MEM_RATIO` applies.
      `BFC_LEFTOVER_MB` mebibytes are subtracted from the available memory first. Range: above 0, at most
      1. Default: 0.9.

    Prefix cache and preemption:

    - `prefix_cache`: Keep computed blocks for requests that begin with the same tokens. Default: `True`.
    - `prefix_cache_ttl`: Time for which unused blocks are kept, in seconds. Not allowed when
      `prefix_cache` is False: there is no prefix cache. Range: above 0, at most 1000000000. Default: 300.
    - `host_cache_bytes`: Size in bytes of the host tier, which takes blocks that the KV cache has no room
      for. Range: 0 to 2**63 - 1. Default: 0; with `preemption_mode="swap"`, the size of the KV cache.
    - `host_cache_blocks`: Size of the host tier in blocks of `block_size` tokens. Not allowed with
      `host_cache_bytes`: the host tier has one size. Range: 0 to 2**31 - 1. Default: see
      `host_cache_bytes`.
    - `kv_events`: Address at which the changes of the prefix cache are published, for routers. The address
      of a ZMQ socket: `"tcp://HOST:PORT"`, `"HOST:PORT"`, `"PORT"` on the loopback interface, or
      `"ipc://PATH"`. A mapping has `endpoint` (such an address), `replay_endpoint` (that of a socket that
      repeats messages), `topic`, `hash_key` (a text that all engines of a fleet share, so that equal
      blocks have equal hashes), `format` (`"array"` or `"map"`) and `rank` (of data parallelism). Without
      an `endpoint`, only `Engine.kv_events()` has the events. They contain the tokens of prompts. An
      `endpoint` needs pyzmq, which is the extra `kv-events`. Not allowed when `prefix_cache` is False:
      there is no prefix cache. Default: none are published.
    - `preemption_mode`: Effect of preemption, which occurs when the KV cache is full, on a request.
      `"recompute"` and `"swap"`: it waits and resumes later with the same output, recomputed or loaded
      from the host tier. `"interrupt"`: it ends with its output so far. Range: `"recompute"`, `"swap"`,
      `"interrupt"`. Default: `"recompute"`.
    - `preemption_victim`: Request that `preemption_mode="interrupt"` ends, among those of the lowest
      priority. `"longest"`: the one with the most tokens, prompt and output together; of several, the
      newest. Not allowed when `preemption_mode` is not interrupt: no request is interrupted. Range:
      `"newest"`, `"longest"`. Default: `"newest"`.

    LoRA adapters:

    - `max_adapters`: Maximum number of adapters on the device, and so in a step; 0 disables adapters. See
      `Engine.load_adapter`. Adapters that are not in use make room for others that requests name. Range: 0
      to 1024. Default: 0.
    - `max_adapter_rank`: Maximum rank of an adapter's matrices. Determines the size of a buffer; an
      adapter takes the memory of its own ranks. Not allowed when `max_adapters` is 0: there are no
      adapters. Range: 1 to 1024. Default: 64.
    - `adapter_cache_bytes`: Memory for the adapters on the device in bytes. Not allowed when
      `max_adapters` is 0: there are no adapters. Range: 1 to 2**63 - 1. Default: room for `max_adapters`
      adapters of rank 16, or for one of `max_adapter_rank`.
    - `max_cpu_adapters`: Maximum number of loaded adapters, of which `max_adapters` are on the device. At
      least `max_adapters`. Not allowed when `max_adapters` is 0: there are no adapters. Range: 1 to 65536.
      Default: `max_adapters`.
    - `max_cpu_adapter_bytes`: Maximum size of the loaded adapters in bytes. Adapters beyond
      `adapter_cache_bytes` are not part of `memory_ratio`. Not allowed when `max_adapters` is 0: there are
      no adapters. Range: 1 to 2**63 - 1. Default: the memory that is available when the engine is open.

    Text:

    - `tokenizer`: Path of another `tokenizer.json`, of a directory that has one, or of a GGUF file.
      Default: the model's.
    - `chat_template`: Path of a Jinja chat template, in place of all templates of the model. It is
      compiled before the model is loaded: an error names the line. Default: those of the model.
    - `tool_parser`: Format of tool calls. Range: `"auto"`, `"none"`, `"hermes"`, `"llama3_json"`,
      `"mistral"`, `"kimi_k2"`, `"kimi_k3"`, `"deepseek_v3"`, `"deepseek_v31"`, `"dsml32"`, `"dsml4"`,
      `"qwen_xml"`, `"seed_xml"`, `"glm_xml"`, `"hy3_xml"`, `"minimax_m1"`, `"minimax_m2"`, `"minicpm5"`,
      `"step3"`, `"pythonic"`, `"llama4_pythonic"`, `"olmo3"`, `"lfm2"`, `"gemma4"`, `"functiongemma"`,
      `"cohere_json"`, `"apertus"`, `"internlm2"`, `"granite3"`, `"granite_20b_fc"`, `"jamba"`,
      `"hunyuan_a13b"`, `"nemotron_nano2"`, `"phi4_mini"`, `"xlam"`, `"functionary_v31"`, `"solar"`.
      Default: detected from the chat template.
    - `reasoning_parser`: Format of the reasoning before the answer. Range: `"auto"`, `"none"`, `"think"`,
      `"seed"`, `"mm"`, `"hy3"`, `"kimi_k3"`, `"kimi_vl"`, `"mistral"`, `"gemma4"`, `"cohere"`,
      `"apertus"`, `"thought"`, `"hunyuan_a13b"`, `"ernie45"`, `"granite32"`, `"apriel"`, `"solar"`.
      Default: detected from the chat template.

    Speculative decoding:

    - `speculation`: Method that proposes draft tokens; does not change the output. `"ngram"`: tokens that
      followed an earlier occurrence of the last tokens (prompt lookup). Range: `"ngram"`. Default: off.
    - `num_speculative_tokens`: Maximum number of draft tokens of a sequence in a step. Not allowed when
      `speculation` is not given: there are no draft tokens. Range: 1 to 32. Default: 8.
    """

    def __new__(
        cls,
        *,
        device: str | None = "auto",
        dtype: Literal["auto", "float32", "float16", "bfloat16"] | None = "auto",
        quantization: (
            Literal["auto", "none", "int8", "int4", "w8a16", "w4a16", "fp8"] | Mapping[str, Any] | None
        ) = "auto",
        deterministic: bool | None = True,
        config_overrides: Mapping[str, Any] | None = None,
        threads: int | None = None,
        numa_nodes: Sequence[int] | None = None,
        weights_cache_bytes: int | None = None,
        profile: bool | None = False,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        max_prefill_chunk: int | None = None,
        max_waiting: int | None = None,
        max_unfinished: int | None = None,
        max_paused: int | None = None,
        max_logprobs: int | None = None,
        block_size: int | None = None,
        kv_cache_dtype: (
            Literal["auto", "float32", "float16", "bfloat16", "int8", "uint4"] | None
        ) = "auto",
        max_output_bytes: int | None = None,
        kv_cache_bytes: int | None = None,
        kv_cache_blocks: int | None = None,
        kv_cache_ratio: float | None = None,
        memory_ratio: float | None = None,
        prefix_cache: bool | None = True,
        prefix_cache_ttl: float | None = None,
        host_cache_bytes: int | None = None,
        host_cache_blocks: int | None = None,
        kv_events: str | Mapping[str, Any] | None = None,
        preemption_mode: Literal["recompute", "swap", "interrupt"] | None = "recompute",
        preemption_victim: Literal["newest", "longest"] | None = "newest",
        max_adapters: int | None = 0,
        max_adapter_rank: int | None = None,
        adapter_cache_bytes: int | None = None,
        max_cpu_adapters: int | None = None,
        max_cpu_adapter_bytes: int | None = None,
        tokenizer: str | os.PathLike[str] | None = None,
        chat_template: str | os.PathLike[str] | None = None,
        tool_parser: (
            Literal["auto", "none", "hermes", "llama3_json", "mistral", "kimi_k2", "kimi_k3", "deepseek_v3",
            "deepseek_v31", "dsml32", "dsml4", "qwen_xml", "seed_xml", "glm_xml", "hy3_xml", "minimax_m1",
            "minimax_m2", "minicpm5", "step3", "pythonic", "llama4_pythonic", "olmo3", "lfm2", "gemma4",
            "functiongemma", "cohere_json", "apertus", "internlm2", "granite3", "granite_20b_fc", "jamba",
            "hunyuan_a13b", "nemotron_nano2", "phi4_mini", "xlam", "functionary_v31", "solar", "qwen",
            "qwen25", "qwen2d5", "qwen3", "granite4", "llama3", "llama4_json", "mistral_json", "mistral_args",
            "deepseekv3", "deepseekv31", "deepseek_v32", "deepseekv32", "deepseek_v4", "deepseekv4",
            "qwen3_coder", "qwen3_xml", "qwen3coder", "step3p5", "mimo", "seed_oss", "glm", "glm45", "glm47",
            "hy_v3", "minimax", "minimax-m2", "cohere_command3", "apertus2509", "internlm", "granite",
            "granite-20b-fc", "phi4_mini_json"] | None
        ) = "auto",
        reasoning_parser: (
            Literal["auto", "none", "think", "seed", "mm", "hy3", "kimi_k3", "kimi_vl", "mistral", "gemma4",
            "cohere", "apertus", "thought", "hunyuan_a13b", "ernie45", "granite32", "apriel", "solar",
            "deepseek_r1", "deepseek-r1", "deepseek_v3", "deepseek-v3", "qwen3", "qwen3-thinking", "qwen-qwq",
            "glm45", "kimi_k2", "minimax_m2", "minimax", "step3", "step3p5", "nano_v3", "olmo3", "glm47",
            "mimo", "nemotron_v3", "holo2", "deepseek_v4", "seed_oss", "minimax_m3", "hy_v3", "kimi",
            "cohere_command3", "granite"] | None
        ) = "auto",
        speculation: Literal["ngram"] | None = None,
        num_speculative_tokens: int | None = None,
    ) -> EngineConfig: ...
    @property
    def device(self) -> str:
        """Device that computes.

        `"auto"`, `"cpu"`, `"cuda"`, or `"cuda:1"` for another of the visible CUDA devices. `"auto"` is the
        first CUDA device that can be used, and the CPU without one. A CUDA device that cannot be used
        raises `DeviceUnavailableError` with the reason.

        Default: `"auto"`.
        """

    @property
    def dtype(self) -> Literal["auto", "float32", "float16", "bfloat16"]:
        """Type of the weights that are not quantised.

        Arithmetic with them is in float32.

        Range: `"auto"`, `"float32"`, `"float16"`, `"bfloat16"`. Default: that of the files; bfloat16 if
        all are quantised.
        """

    @property
    def quantization(self) -> (
        Literal["auto", "none", "int8", "int4", "w8a16", "w4a16", "fp8"] | dict[str, Any]
    ):
        """Quantisation of the weights.

        Quantised files are computed as they are stored, with exactly their values; `"none"` converts them
        to `dtype`. The other names quantise the weights while they are loaded. Activations are rounded to
        8-bit integers, unless only the weights are quantised; with `"fp8"` to 8-bit floats on CUDA devices
        that multiply them. A mapping has `type` (one of the names), `group_size` (32, 64, 128, or -1 for a
        whole row), `symmetric` (`False` stores a minimum for each group), `embedding` and `head` (a name,
        or a mapping of the first three keys), and `layers`: patterns of module names, such as
        `"*.down_proj"`, each with such a value. The first pattern that matches applies.

        Range: `"auto"`, `"none"`, `"int8"`, `"int4"`, `"w8a16"`, `"w4a16"`, `"fp8"`, or a mapping.
        Default: that of the files.
        """

    @property
    def deterministic(self) -> bool:
        """Give a request the same tokens and logprobs in every batch.

        `False` permits algorithms whose results depend on the other requests of a step. On a CUDA device,
        cuBLASLt multiplies weights of 16 bits then, if it is installed. The CPU has no such algorithm: its
        results are the same with both values.

        Default: `True`.
        """

    @property
    def config_overrides(self) -> dict[str, Any] | None:
        """Values that are merged into the model's `config.json`, such as `rope_scaling`.

        Mappings are merged recursively; `None` removes a value. GGUF files have the same names. A key that
        the model does not read is an error. This changes outputs.

        Default: none.
        """

    @property
    def threads(self) -> int | None:
        """Number of compute threads.

        If it is not set, the environment variable `PENSTOCK_THREADS` applies.

        Range: 1 to 1024. Default: all CPUs that the process may use, on macOS the performance cores; with
        `numa_nodes`, the physical cores of the smallest node times the number of nodes.
        """

    @property
    def numa_nodes(self) -> tuple[int, ...] | None:
        """NUMA nodes of the threads and the memory.

        Threads run on the CPUs of the nodes, the same number on each. The weights of several nodes are
        divided between them: a thread computes with those of its own node. `threads` must be a multiple of
        the number of nodes. Weights of converted models and of the weights cache are copied instead of
        mapped.

        Range: 1 to 16 different NUMA nodes. Default: threads and memory are placed by the system.
        """

    @property
    def weights_cache_bytes(self) -> int | None:
        """Size of the cache of packed weights on disk.

        A model that is opened again is mapped into memory instead of loaded. The least recently used
        weights are removed first. The directory is `weights` in `PENSTOCK_CACHE`, by default in `penstock`
        in `XDG_CACHE_HOME` or `~/.cache`, on Windows in `LOCALAPPDATA`. Converted models need no cache.

        Range: 0 to 2**63 - 1. Default: 0: no cache.
        """

    @property
    def profile(self) -> bool:
        """Measure the operations of the device; see `Engine.profile`.

        Default: `False`.
        """

    @property
    def max_model_len(self) -> int | None:
        """Maximum number of tokens of a sequence, prompt and output together.

        Range: 1 to 2**31 - 1. Default: the model's, or what the KV cache holds.
        """

    @property
    def max_num_seqs(self) -> int | None:
        """Maximum number of sequences in a step.

        At most `max_num_batched_tokens`.

        Range: 1 to 65536. Default: 64.
        """

    @property
    def max_num_batched_tokens(self) -> int | None:
        """Token budget of a step, and so the length of the largest prefill chunk.

        At least `block_size`.

        Range: 16 to 1048576. Default: 512.
        """

    @property
    def max_prefill_chunk(self) -> int | None:
        """Maximum number of prompt tokens that a step computes for one sequence.

        With a smaller value than `max_num_batched_tokens`, a long prompt delays the tokens of other
        requests less, and takes more steps itself. Does not change the output.

        Range: 1 to 1048576. Default: `max_num_batched_tokens`.
        """

    @property
    def max_waiting(self) -> int | None:
        """Maximum number of waiting requests; further requests raise `OverloadedError`.

        Range: 1 or more. Default: no bound.
        """

    @property
    def max_unfinished(self) -> int | None:
        """Maximum number of outputs that wait or run.

        A request counts once for each of its choices (`n`, `best_of`). Further requests raise
        `OverloadedError`.

        Range: 128 or more. Default: 65536.
        """

    @property
    def max_paused(self) -> int | None:
        """Maximum number of paused outputs.

        An output pauses while its result queue is full. Beyond the maximum, one of the client with the
        most paused outputs, the one paused for longest, ends with `finish_reason == "unread"`.

        Range: 1 or more. Default: 4096.
        """

    @property
    def max_logprobs(self) -> int | None:
        """Maximum of `top_logprobs` and `prompt_logprobs` of a request; -1 is the size of the vocabulary.

        A position takes 8 bytes for each of them; beyond 20 they count in the request's limit of 1 GiB.

        Range: -1 to 2**31 - 1. Default: 20.
        """

    @property
    def block_size(self) -> int | None:
        """Number of tokens in a block of the KV cache.

        Range: 16, 32, 64, 128. Default: 16.
        """

    @property
    def kv_cache_dtype(self) -> Literal["auto", "float32", "float16", "bfloat16", "int8", "uint4"]:
        """Type of the KV cache.

        `"int8"` and `"uint4"` have scales for each token and head.

        Range: `"auto"`, `"float32"`, `"float16"`, `"bfloat16"`, `"int8"`, `"uint4"`. Default: `dtype`.
        """

    @property
    def max_output_bytes(self) -> int | None:
        """Maximum size of the tensors and logprobs of unfinished requests.

        Further requests that ask for them raise `OverloadedError`. Up to 20 logprobs per position are not
        counted.

        Range: 1 to 2**63 - 1. Default: 4 GiB.
        """

    @property
    def kv_cache_bytes(self) -> int | None:
        """Size of the KV cache in bytes.

        Never larger than twice what `max_num_seqs` sequences of `max_model_len` tokens need.

        Range: 1 to 2**63 - 1. Default: what `memory_ratio` leaves if it is set or on a CUDA device, else a
        quarter of the remaining memory.
        """

    @property
    def kv_cache_blocks(self) -> int | None:
        """Size of the KV cache in blocks of `block_size` tokens, exactly.

        Not allowed with `kv_cache_bytes`, `kv_cache_ratio`: the KV cache has one size.

        Range: 1 to 2**31 - 1. Default: see `kv_cache_bytes`.
        """

    @property
    def kv_cache_ratio(self) -> float | None:
        """Share of the memory that weights, workspace and host tier leave, for the KV cache.

        A share of `memory_ratio` of the available memory. A host tier of the same size is part of the
        share. Never larger than `kv_cache_bytes` can be. Not allowed with `kv_cache_bytes`,
        `kv_cache_blocks`: the KV cache has one size.

        Range: above 0, at most 1. Default: see `kv_cache_bytes`.
        """

    @property
    def memory_ratio(self) -> float | None:
        """Share of the available memory that weights, workspace and KV cache may take together.

        If it is not set, the environment variable `PENSTOCK_MEMORY_RATIO` or `BFC_MEM_RATIO` applies.
        `BFC_LEFTOVER_MB` mebibytes are subtracted from the available memory first.

        Range: above 0, at most 1. Default: 0.9.
        """

    @property
    def prefix_cache(self) -> bool:
        """Keep computed blocks for requests that begin with the same tokens.

        Default: `True`.
        """

    @property
    def prefix_cache_ttl(self) -> float | None:
        """Time for which unused blocks are kept, in seconds.

        Not allowed when `prefix_cache` is False: there is no prefix cache.

        Range: above 0, at most 1000000000. Default: 300.
        """

    @property
    def host_cache_bytes(self) -> int | None:
        """Size in bytes of the host tier, which takes blocks that the KV cache has no room for.

        Range: 0 to 2**63 - 1. Default: 0; with `preemption_mode="swap"`, the size of the KV cache.
        """

    @property
    def host_cache_blocks(self) -> int | None:
        """Size of the host tier in blocks of `block_size` tokens.

        Not allowed with `host_cache_bytes`: the host tier has one size.

        Range: 0 to 2**31 - 1. Default: see `host_cache_bytes`.
        """

    @property
    def kv_events(self) -> dict[str, Any] | None:
        """Address at which the changes of the prefix cache are published, for routers.

        The address of a ZMQ socket: `"tcp://HOST:PORT"`, `"HOST:PORT"`, `"PORT"` on the loopback
        interface, or `"ipc://PATH"`. A mapping has `endpoint` (such an address), `replay_endpoint` (that
        of a socket that repeats messages), `topic`, `hash_key` (a text that all engines of a fleet share,
        so that equal blocks have equal hashes), `format` (`"array"` or `"map"`) and `rank` (of data
        parallelism). Without an `endpoint`, only `Engine.kv_events()` has the events. They contain the
        tokens of prompts. An `endpoint` needs pyzmq, which is the extra `kv-events`. Not allowed when
        `prefix_cache` is False: there is no prefix cache.

        Default: none are published.
        """

    @property
    def preemption_mode(self) -> Literal["recompute", "swap", "interrupt"]:
        """Effect of preemption, which occurs when the KV cache is full, on a request.

        `"recompute"` and `"swap"`: it waits and resumes later with the same output, recomputed or loaded
        from the host tier. `"interrupt"`: it ends with its output so far.

        Range: `"recompute"`, `"swap"`, `"interrupt"`. Default: `"recompute"`.
        """

    @property
    def preemption_victim(self) -> Literal["newest", "longest"]:
        """Request that `preemption_mode="interrupt"` ends, among those of the lowest priority.

        `"longest"`: the one with the most tokens, prompt and output together; of several, the newest. Not
        allowed when `preemption_mode` is not interrupt: no request is interrupted.

        Range: `"newest"`, `"longest"`. Default: `"newest"`.
        """

    @property
    def max_adapters(self) -> int:
        """Maximum number of adapters on the device, and so in a step; 0 disables adapters.

        See `Engine.load_adapter`. Adapters that are not in use make room for others that requests name.

        Range: 0 to 1024. Default: 0.
        """

    @property
    def max_adapter_rank(self) -> int | None:
        """Maximum rank of an adapter's matrices.

        Determines the size of a buffer; an adapter takes the memory of its own ranks. Not allowed when
        `max_adapters` is 0: there are no adapters.

        Range: 1 to 1024. Default: 64.
        """

    @property
    def adapter_cache_bytes(self) -> int | None:
        """Memory for the adapters on the device in bytes.

        Not allowed when `max_adapters` is 0: there are no adapters.

        Range: 1 to 2**63 - 1. Default: room for `max_adapters` adapters of rank 16, or for one of
        `max_adapter_rank`.
        """

    @property
    def max_cpu_adapters(self) -> int | None:
        """Maximum number of loaded adapters, of which `max_adapters` are on the device.

        At least `max_adapters`. Not allowed when `max_adapters` is 0: there are no adapters.

        Range: 1 to 65536. Default: `max_adapters`.
        """

    @property
    def max_cpu_adapter_bytes(self) -> int | None:
        """Maximum size of the loaded adapters in bytes.

        Adapters beyond `adapter_cache_bytes` are not part of `memory_ratio`. Not allowed when
        `max_adapters` is 0: there are no adapters.

        Range: 1 to 2**63 - 1. Default: the memory that is available when the engine is open.
        """

    @property
    def tokenizer(self) -> str | None:
        """Path of another `tokenizer.json`, of a directory that has one, or of a GGUF file.

        Default: the model's.
        """

    @property
    def chat_template(self) -> str | None:
        """Path of a Jinja chat template, in place of all templates of the model.

        It is compiled before the model is loaded: an error names the line.

        Default: those of the model.
        """

    @property
    def tool_parser(self) -> (
        Literal["auto", "none", "hermes", "llama3_json", "mistral", "kimi_k2", "kimi_k3", "deepseek_v3",
        "deepseek_v31", "dsml32", "dsml4", "qwen_xml", "seed_xml", "glm_xml", "hy3_xml", "minimax_m1",
        "minimax_m2", "minicpm5", "step3", "pythonic", "llama4_pythonic", "olmo3", "lfm2", "gemma4",
        "functiongemma", "cohere_json", "apertus", "internlm2", "granite3", "granite_20b_fc", "jamba",
        "hunyuan_a13b", "nemotron_nano2", "phi4_mini", "xlam", "functionary_v31", "solar"]
    ):
        """Format of tool calls.

        Range: `"auto"`, `"none"`, `"hermes"`, `"llama3_json"`, `"mistral"`, `"kimi_k2"`, `"kimi_k3"`,
        `"deepseek_v3"`, `"deepseek_v31"`, `"dsml32"`, `"dsml4"`, `"qwen_xml"`, `"seed_xml"`, `"glm_xml"`,
        `"hy3_xml"`, `"minimax_m1"`, `"minimax_m2"`, `"minicpm5"`, `"step3"`, `"pythonic"`,
        `"llama4_pythonic"`, `"olmo3"`, `"lfm2"`, `"gemma4"`, `"functiongemma"`, `"cohere_json"`,
        `"apertus"`, `"internlm2"`, `"granite3"`, `"granite_20b_fc"`, `"jamba"`, `"hunyuan_a13b"`,
        `"nemotron_nano2"`, `"phi4_mini"`, `"xlam"`, `"functionary_v31"`, `"solar"`. Default: detected from
        the chat template.
        """

    @property
    def reasoning_parser(self) -> (
        Literal["auto", "none", "think", "seed", "mm", "hy3", "kimi_k3", "kimi_vl", "mistral", "gemma4",
        "cohere", "apertus", "thought", "hunyuan_a13b", "ernie45", "granite32", "apriel", "solar"]
    ):
        """Format of the reasoning before the answer.

        Range: `"auto"`, `"none"`, `"think"`, `"seed"`, `"mm"`, `"hy3"`, `"kimi_k3"`, `"kimi_vl"`,
        `"mistral"`, `"gemma4"`, `"cohere"`, `"apertus"`, `"thought"`, `"hunyuan_a13b"`, `"ernie45"`,
        `"granite32"`, `"apriel"`, `"solar"`. Default: detected from the chat template.
        """

    @property
    def speculation(self) -> Literal["ngram"] | None:
        """Method that proposes draft tokens; does not change the output.

        `"ngram"`: tokens that followed an earlier occurrence of the last tokens (prompt lookup).

        Range: `"ngram"`. Default: off.
        """

    @property
    def num_speculative_tokens(self) -> int | None:
        """Maximum number of draft tokens of a sequence in a step.

        Not allowed when `speculation` is not given: there are no draft tokens.

        Range: 1 to 32. Default: 8.
        """

    def replace(self, **changes: Any) -> EngineConfig:
        """Return a copy with some fields changed; `None` sets a field back to its default."""

    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]: ...
# fmt: on
# end generated: EngineConfig

# begin generated: SamplingParams
# fmt: off
@final
class SamplingParams:
    """The parameters of a request.

    Every field is optional; `None` selects the default. A default named "the model's" is the value in the
    model's `generation_config.json`. `do_sample: false` there means a default temperature of 0 for
    requests that set no filter (`top_n_sigma`, `top_k`, `top_p`, `min_p`, `typical_p`, `epsilon_cutoff`).

    The logits of each token are processed in this order: `logits_processors`, `logit_bias`,
    `repetition_penalty`, `presence_penalty` and `frequency_penalty`, the masks (`no_repeat_ngram_size`,
    `bad_words`, `bad_token_sequences`, `bad_token_ids`, `allowed_token_ids`, `min_tokens`, structured
    output), `temperature`, the filters (`top_n_sigma`, `top_k`, `top_p`, `min_p`, `typical_p`,
    `epsilon_cutoff`). The token is then sampled with `seed` and its index in the output.

    Objects are immutable. Two are equal if all fields are. `response_format`, `tools`, `tool_choice` and
    `logit_bias` are copied when they are passed and each time they are read.

    Raises `InvalidRequestError` for a value of the wrong type or out of range and for conflicting fields,
    `TypeError` for an unknown keyword.

    Number of outputs:

    - `n`: Number of choices to generate for the prompt. Choice `i` uses the seed `seed + i`. The prompt is
      computed once. At most `num_beams`. Range: 1 to 128. Default: 1.
    - `best_of`: Number of choices to generate, of which the best `n` are returned. Choices are ranked by
      the mean log probability of their tokens, which is reported as `Choice.score`. Only for `generate`.
      At least `n`. Not allowed when `num_beams` is above 1: a beam search selects the best outputs itself.
      Range: 1 to 128. Default: `n`.
    - `num_beams`: Number of beams of a beam search; 1 samples instead. Equivalent to Hugging Face's
      `generate` with `early_stopping=False`. Only for `generate`. Range: 1 to 32. Default: 1.
    - `length_penalty`: Exponent of the length in the score of a beam. The score is the sum of the log
      probabilities divided by `length ** length_penalty`, with the length in generated tokens. Values
      above 0 favour longer outputs. Not allowed when `num_beams` is 1: only a beam search compares outputs
      of different lengths. Range: -32 to 32. Default: 1.0.

    Output length and stop conditions:

    - `max_tokens`: Maximum number of tokens to generate. At most `max_model_len` minus the length of the
      prompt. Range: 1 or more. Default: the model's `max_new_tokens`, else the remaining `max_model_len`.
    - `max_length`: Maximum number of tokens of prompt and output together. Greater than the number of
      prompt tokens. Range: 1 or more. Default: the model's, if it has no `max_new_tokens`.
    - `min_tokens`: Number of tokens before which stop tokens are masked and stop sequences do not end the
      output. At most `max_tokens` and `max_length`. Range: 0 or more. Default: 0.
    - `stop`: Stop strings: the output ends before the first one that appears. One string or a sequence of
      strings. `text` does not contain the stop string unless `include_stop_str_in_output` is set;
      `token_ids` ends with the token that completed it. The strings have at most 16,384 bytes in all.
      Range: up to 64 strings of 1 to 1024 characters. Default: none.
    - `stop_token_ids`: Token ids that end the output, in addition to the end tokens. The stop token is in
      `token_ids`, not in `text`. Range: up to 256 ids. Default: none.
    - `eos_token_ids`: Token ids that end the output in place of the model's end tokens. An empty sequence:
      none. `stop_token_ids` are in addition to them. As all stop tokens, they are masked before
      `min_tokens`, and structured output ends with one of them. Not allowed when `ignore_eos` is True: end
      tokens do not end the output. Range: up to 256 ids. Default: the model's.
    - `stop_token_sequences`: Sequences of token ids that end the output. Their tokens are in `token_ids`,
      not in `text`. Range: up to 64 sequences of 1 to 64 ids. Default: none.
    - `include_stop_str_in_output`: Keep the stop string, token or sequence in `text`. Default: `False`.
    - `ignore_eos`: Continue after end tokens. Not allowed with `response_format`, `regex`, `choice`,
      `grammar`: an end token ends the output. Default: `False`.

    Sampling:

    - `temperature`: Divisor of the logits; 0 selects the most likely token (greedy). With 0 the filters
      and `seed` have no effect; among equal logits the lowest id is selected. Not allowed when `num_beams`
      is above 1: a beam search does not sample. Range: 0 to 2. Default: the model's, else 1.0.
    - `top_n_sigma`: Sample among tokens whose logit is at most this many standard deviations below the
      highest one. Top-n-sigma sampling (Tang et al. 2024), as in llama.cpp. The standard deviation is that
      of all logits that are not minus infinity, before temperature, which does not change the tokens that
      remain. 0 disables the filter. Not allowed when `num_beams` is above 1: a beam search does not
      sample. Range: 0 or more. Default: 0.0.
    - `top_k`: Sample among this many most likely tokens; 0 and -1 disable the filter. Exactly this many
      tokens remain; among equal logits the lowest ids are kept (Fan et al. 2018). Not allowed when
      `num_beams` is above 1: a beam search does not sample. Range: -1 or more. Default: the model's, else
      0.
    - `top_p`: Sample among the fewest most likely tokens whose probabilities sum to at least this. Nucleus
      sampling (Holtzman et al. 2020, section 3.1). 1 disables the filter. Not allowed when `num_beams` is
      above 1: a beam search does not sample. Range: above 0, at most 1. Default: the model's, else 1.0.
    - `min_p`: Sample among tokens whose probability is at least this fraction of the highest one. Min-p
      sampling (Nguyen et al. 2024). 0 disables the filter. Not allowed when `num_beams` is above 1: a beam
      search does not sample. Range: 0 to 1. Default: the model's, else 0.0.
    - `typical_p`: Sample among the most typical tokens whose probabilities sum to at least this. Tokens
      are ordered by the distance of their surprise, `-log p`, from the entropy (locally typical sampling,
      Meister et al. 2023). 1 disables the filter. Not allowed when `num_beams` is above 1: a beam search
      does not sample. Range: above 0, at most 1. Default: the model's, else 1.0.
    - `epsilon_cutoff`: Minimum probability of a sampled token. The filter removes tokens with a lower
      probability, except the most likely token. Probabilities are those after the preceding filters
      (epsilon sampling, Hewitt et al. 2022). 0 disables the filter. Not allowed when `num_beams` is above
      1: a beam search does not sample. Range: 0 or more, below 1. Default: the model's, else 0.0.
    - `seed`: Random seed. A token depends on the distribution, the seed and the index of the token in the
      output, and on nothing else: the same request with the same seed has the same output.
      `Request.params` and `Choice.seed` report the seed in use. Not allowed when `num_beams` is above 1: a
      beam search does not sample. Range: 0 to 2**64 - 1. Default: random.
    - `logit_bias`: Values added to the logits of these token ids. The keys may also be strings of digits,
      as in JSON. Range: up to 1024 ids, -100 to 100. Default: none.
    - `repetition_penalty`: Divisor of the positive logits, and factor of the negative ones, of tokens that
      occurred before. Values above 1 make repetition less likely; 1 disables the penalty (Keskar et al.
      2019, section 4.1). `repetition_penalty_scope` selects the tokens that count. Range: above 0.
      Default: the model's, else 1.0.
    - `repetition_penalty_scope`: Tokens that `repetition_penalty` counts. `"all"`: those of the prompt and
      of the output. `"output"`: those of the output. Not allowed when `num_beams` is above 1: a step of a
      beam search does not distinguish prompt and output. Range: `"all"`, `"output"`. Default: `"all"`.
    - `presence_penalty`: Value subtracted from the logits of tokens that occur in the output. Not allowed
      when `num_beams` is above 1: a step of a beam search does not distinguish prompt and output. Range:
      -2 to 2. Default: 0.0.
    - `frequency_penalty`: Value subtracted from the logits of tokens once per occurrence in the output.
      Not allowed when `num_beams` is above 1: a step of a beam search does not distinguish prompt and
      output. Range: -2 to 2. Default: 0.0.
    - `no_repeat_ngram_size`: Length of the token n-grams that occur at most once in prompt and output; 0
      disables the rule. Range: 0 to 1024. Default: the model's, else 0.
    - `allowed_token_ids`: The only token ids that can be generated. Range: 1 to 1048576 ids. Default: all.
    - `bad_token_ids`: Token ids that cannot be generated. Range: up to 1048576 ids. Default: none.
    - `bad_words`: Strings whose token sequences are masked. Both tokenisations are masked: at the
      beginning of a text and after a space. Substrings are not: another tokenisation of the same text is
      still possible, and `bad_words=["Par"]` allows the token " Paris". At most 1024 tokens in all. Range:
      up to 128 strings of 1 to 256 characters. Default: none.
    - `bad_token_sequences`: Sequences of token ids that cannot be generated. The last id of a sequence is
      masked where the tokens before it, of prompt or output, are the other ids: transformers'
      `bad_words_ids`. At most 1024 ids in all, with those of `bad_words`. Range: up to 1024 sequences of 1
      to 64 ids. Default: none.
    - `logits_processors`: Callables that modify the logits of each token. They are called in order as
      `processor(token_ids, logits)` with the ids of prompt and output so far (a list) and the logits of
      the next token (a `Tensor` of float32, shape `(vocabulary_size,)`). A processor modifies the tensor
      in place during the call, or returns a replacement: an object with `__dlpack__` or the buffer
      protocol, float32, same shape. NaN, positive infinity or an exception ends the request with a
      `GenerationError`. Each call needs the GIL and delays the whole batch. Not allowed when `num_beams`
      is above 1: beam search does not support it. Range: up to 16 callables. Default: none.

    Structured output and tools:

    - `response_format`: Format of the output, as in OpenAI's API. `{"type": "text"}`, `{"type":
      "json_object"}` or `{"type": "json_schema", "json_schema": {"schema": {...}}}`. The schema may also
      be the value of `json_schema`, or of the parameter itself. A pydantic model class stands for its
      schema, and so does each type that pydantic takes, such as `list[Model]`; then `Result.parsed` is a
      value of it. Objects with `properties` have no others, unless the schema says so or `"strict": false`
      stands beside it. `"ignore_unsupported": true` beside the schema ignores keywords that are not
      supported; without it they are refused. Not allowed when `num_beams` is above 1: beam search does not
      support it. Default: text.
    - `regex`: Regular expression that the whole output matches, in the syntax of Rust's `regex`. Not
      allowed when `num_beams` is above 1: beam search does not support it. Not allowed with
      `response_format`, `choice`, `grammar`: an output has one format. Range: 1 to 1048576 characters.
      Default: none.
    - `choice`: Strings of which the output is one. Not allowed when `num_beams` is above 1: beam search
      does not support it. Not allowed with `response_format`, `regex`, `grammar`: an output has one
      format. Range: 1 to 1024 strings of 1 to 1048576 characters. Default: none.
    - `grammar`: Context-free grammar of the output, in Lark's notation or in GBNF. A grammar with a rule
      of the form `name ::= ...` is GBNF. Not allowed when `num_beams` is above 1: beam search does not
      support it. Not allowed with `response_format`, `regex`, `choice`: an output has one format. Range: 1
      to 1048576 characters. Default: none.
    - `tools`: Functions that the model can call, as in OpenAI's API. Only for chat prompts. Each is
      `{"type": "function", "function": {"name": ..., "parameters": {...}}}`, or a Python function, of
      which the name, the docstring and the annotations of the parameters are used. `"ignore_unsupported":
      true` beside `parameters` ignores keywords that are not supported. Not allowed when `num_beams` is
      above 1: beam search does not support it. Range: 1 to 128 tools. Default: none.
    - `tool_choice`: Tools that the model must or can call. `"none"`, `"auto"`, `"required"`, or `{"type":
      "function", "function": {"name": ...}}`. Not allowed when `tools` is not given: there are no tools.
      Default: `"auto"`.
    - `parallel_tool_calls`: Allow several tool calls in one output. If false, text after the first call is
      content. Not allowed when `tools` is not given: there are no tools. Default: `True`.

    Text and additional outputs:

    - `logprobs`: Return the natural logarithm of the probability of each generated token. Default:
      `False`.
    - `top_logprobs`: Also return this many most likely tokens at each position, with their log
      probabilities. At most the engine's `max_logprobs`, which is 20 by default. The most likely token is
      first; among equal ones the lowest id. Not allowed when `logprobs` is False: set logprobs=True.
      Range: 0 or more. Default: none.
    - `prompt_logprobs`: Return the log probability of each prompt token, and this many most likely tokens
      in its place. The first token has none. The whole prompt is computed, without the prefix cache. At
      most the engine's `max_logprobs`. Not allowed when `num_beams` is above 1: beam search does not
      support it. Range: 0 or more. Default: none.
    - `logprobs_mode`: Distribution of the log probabilities. `"raw"`: the log-softmax of the model's
      logits. `"processed"`: that of the logits after processors, penalties, masks and temperature, before
      the filters. Not allowed when `logprobs` is False and `prompt_logprobs` is not given: no log
      probabilities are returned. Range: `"raw"`, `"processed"`. Default: `"raw"`.
    - `output_logits`: Return the raw logits of these positions. A `Tensor` of float32, shape `(positions,
      vocabulary_size)`. `"prompt"`: the positions of the prompt. `"generation"`: those that a token was
      sampled from, the first of which is the last one of the prompt. `"all"`: both. At most 1 GiB together
      with `output_hidden_states`, `output_embeddings` and lists of more than 20 logprobs. Not allowed when
      `num_beams` is above 1: beam search does not support it. Range: `"prompt"`, `"generation"`, `"all"`.
      Default: none.
    - `output_hidden_states`: Return the decoder's last hidden states, after its final norm, of these
      positions. A `Tensor` of float32, shape `(positions, hidden_size)`. See `output_logits`. Not allowed
      when `num_beams` is above 1: beam search does not support it. Range: `"prompt"`, `"generation"`,
      `"all"`. Default: none.
    - `output_embeddings`: Return the decoder's input, the embeddings of the tokens at these positions. A
      `Tensor` of float32, shape `(positions, hidden_size)`. See `output_logits`: the last generated token
      is at none of the positions, because no token was sampled from it. Not allowed when `num_beams` is
      above 1: beam search does not support it. Range: `"prompt"`, `"generation"`, `"all"`. Default: none.
    - `echo`: Begin `text` with the text of the prompt. Not allowed when `num_beams` is above 1: beam
      search does not support it. Default: `False`.
    - `skip_special_tokens`: Omit special tokens from `text`. Default: `True`.
    - `spaces_between_special_tokens`: Separate special tokens in `text` by spaces; they are in it with
      `skip_special_tokens=False`. Default: `False`.

    Scheduling and cache:

    - `priority`: Scheduling priority; lower values are served first. A request with a lower value can
      preempt one with a higher value, which resumes later. Range: -2**31 to 2**31 - 1. Default: 0.
    - `cache_salt`: Share cached blocks only with requests that have the same salt. 1 to 1024 characters.
      Prevents one tenant from observing another's prompts through cache hits. Not allowed when
      `use_prefix_cache` is False: it only separates entries of the prefix cache. Range: 1 to 1024
      characters. Default: none.
    - `use_prefix_cache`: Use blocks from the prefix cache and add this request's blocks to it. Does not
      change the output. Default: `True`.
    - `unread`: Effect of output that is not read. `"pause"`: the request pauses when 128 to 256 tokens of
      a choice are unread, and continues when they are read. `"keep"`: the request continues, and all its
      output is kept: up to 48 bytes for each token of `max_tokens` and choice, and the outputs that were
      requested besides tokens. `generate` and other calls that return a result never pause a request.
      Range: `"pause"`, `"keep"`. Default: `"pause"`.
    - `adapter`: Name of the LoRA adapter that computes the output; see `Engine.load_adapter`. A name that
      is not loaded raises `AdapterNotFoundError`. Cached blocks are shared only with requests of the same
      adapter. Range: 1 to 256 characters. Default: none: the base model.
    """

    def __new__(
        cls,
        *,
        n: int | None = 1,
        best_of: int | None = None,
        num_beams: int | None = 1,
        length_penalty: float | None = 1.0,
        max_tokens: int | None = None,
        max_length: int | None = None,
        min_tokens: int | None = 0,
        stop: str | Sequence[str] | None = (),
        stop_token_ids: Sequence[int] | None = (),
        eos_token_ids: Sequence[int] | None = None,
        stop_token_sequences: Sequence[Sequence[int]] | None = (),
        include_stop_str_in_output: bool | None = False,
        ignore_eos: bool | None = False,
        temperature: float | None = None,
        top_n_sigma: float | None = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        typical_p: float | None = None,
        epsilon_cutoff: float | None = None,
        seed: int | None = None,
        logit_bias: Mapping[int, float] | Mapping[str, float] | None = None,
        repetition_penalty: float | None = None,
        repetition_penalty_scope: Literal["all", "output"] | None = "all",
        presence_penalty: float | None = 0.0,
        frequency_penalty: float | None = 0.0,
        no_repeat_ngram_size: int | None = None,
        allowed_token_ids: Sequence[int] | None = None,
        bad_token_ids: Sequence[int] | None = (),
        bad_words: Sequence[str] | None = (),
        bad_token_sequences: Sequence[Sequence[int]] | None = (),
        logits_processors: Sequence[Callable[[list[int], Tensor], object]] | None = (),
        response_format: Mapping[str, Any] | type | Any | None = None,
        regex: str | None = None,
        choice: Sequence[str] | None = None,
        grammar: str | None = None,
        tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
        tool_choice: Literal["none", "auto", "required"] | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = True,
        logprobs: bool | None = False,
        top_logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        logprobs_mode: Literal["raw", "processed"] | None = "raw",
        output_logits: Literal["prompt", "generation", "all"] | None = None,
        output_hidden_states: Literal["prompt", "generation", "all"] | None = None,
        output_embeddings: Literal["prompt", "generation", "all"] | None = None,
        echo: bool | None = False,
        skip_special_tokens: bool | None = True,
        spaces_between_special_tokens: bool | None = False,
        priority: int | None = 0,
        cache_salt: str | None = None,
        use_prefix_cache: bool | None = True,
        unread: Literal["pause", "keep"] | None = "pause",
        adapter: str | None = None,
    ) -> SamplingParams: ...
    @property
    def n(self) -> int:
        """Number of choices to generate for the prompt.

        Choice `i` uses the seed `seed + i`. The prompt is computed once. At most `num_beams`.

        Range: 1 to 128. Default: 1.
        """

    @property
    def best_of(self) -> int | None:
        """Number of choices to generate, of which the best `n` are returned.

        Choices are ranked by the mean log probability of their tokens, which is reported as
        `Choice.score`. Only for `generate`. At least `n`. Not allowed when `num_beams` is above 1: a beam
        search selects the best outputs itself.

        Range: 1 to 128. Default: `n`.
        """

    @property
    def num_beams(self) -> int:
        """Number of beams of a beam search; 1 samples instead.

        Equivalent to Hugging Face's `generate` with `early_stopping=False`. Only for `generate`.

        Range: 1 to 32. Default: 1.
        """

    @property
    def length_penalty(self) -> float:
        """Exponent of the length in the score of a beam.

        The score is the sum of the log probabilities divided by `length ** length_penalty`, with the
        length in generated tokens. Values above 0 favour longer outputs. Not allowed when `num_beams` is
        1: only a beam search compares outputs of different lengths.

        Range: -32 to 32. Default: 1.0.
        """

    @property
    def max_tokens(self) -> int | None:
        """Maximum number of tokens to generate.

        At most `max_model_len` minus the length of the prompt.

        Range: 1 or more. Default: the model's `max_new_tokens`, else the remaining `max_model_len`.
        """

    @property
    def max_length(self) -> int | None:
        """Maximum number of tokens of prompt and output together.

        Greater than the number of prompt tokens.

        Range: 1 or more. Default: the model's, if it has no `max_new_tokens`.
        """

    @property
    def min_tokens(self) -> int:
        """Number of tokens before which stop tokens are masked and stop sequences do not end the output.

        At most `max_tokens` and `max_length`.

        Range: 0 or more. Default: 0.
        """

    @property
    def stop(self) -> tuple[str, ...]:
        """Stop strings: the output ends before the first one that appears.

        One string or a sequence of strings. `text` does not contain the stop string unless
        `include_stop_str_in_output` is set; `token_ids` ends with the token that completed it. The strings
        have at most 16,384 bytes in all.

        Range: up to 64 strings of 1 to 1024 characters. Default: none.
        """

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Token ids that end the output, in addition to the end tokens.

        The stop token is in `token_ids`, not in `text`.

        Range: up to 256 ids. Default: none.
        """

    @property
    def eos_token_ids(self) -> tuple[int, ...] | None:
        """Token ids that end the output in place of the model's end tokens.

        An empty sequence: none. `stop_token_ids` are in addition to them. As all stop tokens, they are
        masked before `min_tokens`, and structured output ends with one of them. Not allowed when
        `ignore_eos` is True: end tokens do not end the output.

        Range: up to 256 ids. Default: the model's.
        """

    @property
    def stop_token_sequences(self) -> tuple[tuple[int, ...], ...]:
        """Sequences of token ids that end the output.

        Their tokens are in `token_ids`, not in `text`.

        Range: up to 64 sequences of 1 to 64 ids. Default: none.
        """

    @property
    def include_stop_str_in_output(self) -> bool:
        """Keep the stop string, token or sequence in `text`.

        Default: `False`.
        """

    @property
    def ignore_eos(self) -> bool:
        """Continue after end tokens.

        Not allowed with `response_format`, `regex`, `choice`, `grammar`: an end token ends the output.

        Default: `False`.
        """

    @property
    def temperature(self) -> float | None:
        """Divisor of the logits; 0 selects the most likely token (greedy).

        With 0 the filters and `seed` have no effect; among equal logits the lowest id is selected. Not
        allowed when `num_beams` is above 1: a beam search does not sample.

        Range: 0 to 2. Default: the model's, else 1.0.
        """

    @property
    def top_n_sigma(self) -> float:
        """Sample among tokens whose logit is at most this many standard deviations below the highest one.

        Top-n-sigma sampling (Tang et al. 2024), as in llama.cpp. The standard deviation is that of all
        logits that are not minus infinity, before temperature, which does not change the tokens that
        remain. 0 disables the filter. Not allowed when `num_beams` is above 1: a beam search does not
        sample.

        Range: 0 or more. Default: 0.0.
        """

    @property
    def top_k(self) -> int | None:
        """Sample among this many most likely tokens; 0 and -1 disable the filter.

        Exactly this many tokens remain; among equal logits the lowest ids are kept (Fan et al. 2018). Not
        allowed when `num_beams` is above 1: a beam search does not sample.

        Range: -1 or more. Default: the model's, else 0.
        """

    @property
    def top_p(self) -> float | None:
        """Sample among the fewest most likely tokens whose probabilities sum to at least this.

        Nucleus sampling (Holtzman et al. 2020, section 3.1). 1 disables the filter. Not allowed when
        `num_beams` is above 1: a beam search does not sample.

        Range: above 0, at most 1. Default: the model's, else 1.0.
        """

    @property
    def min_p(self) -> float | None:
        """Sample among tokens whose probability is at least this fraction of the highest one.

        Min-p sampling (Nguyen et al. 2024). 0 disables the filter. Not allowed when `num_beams` is above
        1: a beam search does not sample.

        Range: 0 to 1. Default: the model's, else 0.0.
        """

    @property
    def typical_p(self) -> float | None:
        """Sample among the most typical tokens whose probabilities sum to at least this.

        Tokens are ordered by the distance of their surprise, `-log p`, from the entropy (locally typical
        sampling, Meister et al. 2023). 1 disables the filter. Not allowed when `num_beams` is above 1: a
        beam search does not sample.

        Range: above 0, at most 1. Default: the model's, else 1.0.
        """

    @property
    def epsilon_cutoff(self) -> float | None:
        """Minimum probability of a sampled token.

        The filter removes tokens with a lower probability, except the most likely token. Probabilities are
        those after the preceding filters (epsilon sampling, Hewitt et al. 2022). 0 disables the filter.
        Not allowed when `num_beams` is above 1: a beam search does not sample.

        Range: 0 or more, below 1. Default: the model's, else 0.0.
        """

    @property
    def seed(self) -> int | None:
        """Random seed.

        A token depends on the distribution, the seed and the index of the token in the output, and on
        nothing else: the same request with the same seed has the same output. `Request.params` and
        `Choice.seed` report the seed in use. Not allowed when `num_beams` is above 1: a beam search does
        not sample.

        Range: 0 to 2**64 - 1. Default: random.
        """

    @property
    def logit_bias(self) -> dict[int, float] | None:
        """Values added to the logits of these token ids.

        The keys may also be strings of digits, as in JSON.

        Range: up to 1024 ids, -100 to 100. Default: none.
        """

    @property
    def repetition_penalty(self) -> float | None:
        """Divisor of the positive logits, and factor of the negative ones, of tokens that occurred before.

        Values above 1 make repetition less likely; 1 disables the penalty (Keskar et al. 2019, section
        4.1). `repetition_penalty_scope` selects the tokens that count.

        Range: above 0. Default: the model's, else 1.0.
        """

    @property
    def repetition_penalty_scope(self) -> Literal["all", "output"]:
        """Tokens that `repetition_penalty` counts.

        `"all"`: those of the prompt and of the output. `"output"`: those of the output. Not allowed when
        `num_beams` is above 1: a step of a beam search does not distinguish prompt and output.

        Range: `"all"`, `"output"`. Default: `"all"`.
        """

    @property
    def presence_penalty(self) -> float:
        """Value subtracted from the logits of tokens that occur in the output.

        Not allowed when `num_beams` is above 1: a step of a beam search does not distinguish prompt and
        output.

        Range: -2 to 2. Default: 0.0.
        """

    @property
    def frequency_penalty(self) -> float:
        """Value subtracted from the logits of tokens once per occurrence in the output.

        Not allowed when `num_beams` is above 1: a step of a beam search does not distinguish prompt and
        output.

        Range: -2 to 2. Default: 0.0.
        """

    @property
    def no_repeat_ngram_size(self) -> int | None:
        """Length of the token n-grams that occur at most once in prompt and output; 0 disables the rule.

        Range: 0 to 1024. Default: the model's, else 0.
        """

    @property
    def allowed_token_ids(self) -> tuple[int, ...] | None:
        """The only token ids that can be generated.

        Range: 1 to 1048576 ids. Default: all.
        """

    @property
    def bad_token_ids(self) -> tuple[int, ...]:
        """Token ids that cannot be generated.

        Range: up to 1048576 ids. Default: none.
        """

    @property
    def bad_words(self) -> tuple[str, ...]:
        """Strings whose token sequences are masked.

        Both tokenisations are masked: at the beginning of a text and after a space. Substrings are not:
        another tokenisation of the same text is still possible, and `bad_words=["Par"]` allows the token "
        Paris". At most 1024 tokens in all.

        Range: up to 128 strings of 1 to 256 characters. Default: none.
        """

    @property
    def bad_token_sequences(self) -> tuple[tuple[int, ...], ...]:
        """Sequences of token ids that cannot be generated.

        The last id of a sequence is masked where the tokens before it, of prompt or output, are the other
        ids: transformers' `bad_words_ids`. At most 1024 ids in all, with those of `bad_words`.

        Range: up to 1024 sequences of 1 to 64 ids. Default: none.
        """

    @property
    def logits_processors(self) -> tuple[Callable[[list[int], Tensor], object], ...]:
        """Callables that modify the logits of each token.

        They are called in order as `processor(token_ids, logits)` with the ids of prompt and output so far
        (a list) and the logits of the next token (a `Tensor` of float32, shape `(vocabulary_size,)`). A
        processor modifies the tensor in place during the call, or returns a replacement: an object with
        `__dlpack__` or the buffer protocol, float32, same shape. NaN, positive infinity or an exception
        ends the request with a `GenerationError`. Each call needs the GIL and delays the whole batch. Not
        allowed when `num_beams` is above 1: beam search does not support it.

        Range: up to 16 callables. Default: none.
        """

    @property
    def response_format(self) -> dict[str, Any] | None:
        """Format of the output, as in OpenAI's API.

        `{"type": "text"}`, `{"type": "json_object"}` or `{"type": "json_schema", "json_schema": {"schema":
        {...}}}`. The schema may also be the value of `json_schema`, or of the parameter itself. A pydantic
        model class stands for its schema, and so does each type that pydantic takes, such as
        `list[Model]`; then `Result.parsed` is a value of it. Objects with `properties` have no others,
        unless the schema says so or `"strict": false` stands beside it. `"ignore_unsupported": true`
        beside the schema ignores keywords that are not supported; without it they are refused. Not allowed
        when `num_beams` is above 1: beam search does not support it.

        Default: text.
        """

    @property
    def regex(self) -> str | None:
        """Regular expression that the whole output matches, in the syntax of Rust's `regex`.

        Not allowed when `num_beams` is above 1: beam search does not support it. Not allowed with
        `response_format`, `choice`, `grammar`: an output has one format.

        Range: 1 to 1048576 characters. Default: none.
        """

    @property
    def choice(self) -> tuple[str, ...] | None:
        """Strings of which the output is one.

        Not allowed when `num_beams` is above 1: beam search does not support it. Not allowed with
        `response_format`, `regex`, `grammar`: an output has one format.

        Range: 1 to 1024 strings of 1 to 1048576 characters. Default: none.
        """

    @property
    def grammar(self) -> str | None:
        """Context-free grammar of the output, in Lark's notation or in GBNF.

        A grammar with a rule of the form `name ::= ...` is GBNF. Not allowed when `num_beams` is above 1:
        beam search does not support it. Not allowed with `response_format`, `regex`, `choice`: an output
        has one format.

        Range: 1 to 1048576 characters. Default: none.
        """

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        """Functions that the model can call, as in OpenAI's API.

        Only for chat prompts. Each is `{"type": "function", "function": {"name": ..., "parameters":
        {...}}}`, or a Python function, of which the name, the docstring and the annotations of the
        parameters are used. `"ignore_unsupported": true` beside `parameters` ignores keywords that are not
        supported. Not allowed when `num_beams` is above 1: beam search does not support it.

        Range: 1 to 128 tools. Default: none.
        """

    @property
    def tool_choice(self) -> Literal["none", "auto", "required"] | dict[str, Any] | None:
        """Tools that the model must or can call.

        `"none"`, `"auto"`, `"required"`, or `{"type": "function", "function": {"name": ...}}`. Not allowed
        when `tools` is not given: there are no tools.

        Default: `"auto"`.
        """

    @property
    def parallel_tool_calls(self) -> bool:
        """Allow several tool calls in one output.

        If false, text after the first call is content. Not allowed when `tools` is not given: there are no
        tools.

        Default: `True`.
        """

    @property
    def logprobs(self) -> bool:
        """Return the natural logarithm of the probability of each generated token.

        Default: `False`.
        """

    @property
    def top_logprobs(self) -> int | None:
        """Also return this many most likely tokens at each position, with their log probabilities.

        At most the engine's `max_logprobs`, which is 20 by default. The most likely token is first; among
        equal ones the lowest id. Not allowed when `logprobs` is False: set logprobs=True.

        Range: 0 or more. Default: none.
        """

    @property
    def prompt_logprobs(self) -> int | None:
        """Return the log probability of each prompt token, and this many most likely tokens in its place.

        The first token has none. The whole prompt is computed, without the prefix cache. At most the
        engine's `max_logprobs`. Not allowed when `num_beams` is above 1: beam search does not support it.

        Range: 0 or more. Default: none.
        """

    @property
    def logprobs_mode(self) -> Literal["raw", "processed"]:
        """Distribution of the log probabilities.

        `"raw"`: the log-softmax of the model's logits. `"processed"`: that of the logits after processors,
        penalties, masks and temperature, before the filters. Not allowed when `logprobs` is False and
        `prompt_logprobs` is not given: no log probabilities are returned.

        Range: `"raw"`, `"processed"`. Default: `"raw"`.
        """

    @property
    def output_logits(self) -> Literal["prompt", "generation", "all"] | None:
        """Return the raw logits of these positions.

        A `Tensor` of float32, shape `(positions, vocabulary_size)`. `"prompt"`: the positions of the
        prompt. `"generation"`: those that a token was sampled from, the first of which is the last one of
        the prompt. `"all"`: both. At most 1 GiB together with `output_hidden_states`, `output_embeddings`
        and lists of more than 20 logprobs. Not allowed when `num_beams` is above 1: beam search does not
        support it.

        Range: `"prompt"`, `"generation"`, `"all"`. Default: none.
        """

    @property
    def output_hidden_states(self) -> Literal["prompt", "generation", "all"] | None:
        """Return the decoder's last hidden states, after its final norm, of these positions.

        A `Tensor` of float32, shape `(positions, hidden_size)`. See `output_logits`. Not allowed when
        `num_beams` is above 1: beam search does not support it.

        Range: `"prompt"`, `"generation"`, `"all"`. Default: none.
        """

    @property
    def output_embeddings(self) -> Literal["prompt", "generation", "all"] | None:
        """Return the decoder's input, the embeddings of the tokens at these positions.

        A `Tensor` of float32, shape `(positions, hidden_size)`. See `output_logits`: the last generated
        token is at none of the positions, because no token was sampled from it. Not allowed when
        `num_beams` is above 1: beam search does not support it.

        Range: `"prompt"`, `"generation"`, `"all"`. Default: none.
        """

    @property
    def echo(self) -> bool:
        """Begin `text` with the text of the prompt.

        Not allowed when `num_beams` is above 1: beam search does not support it.

        Default: `False`.
        """

    @property
    def skip_special_tokens(self) -> bool:
        """Omit special tokens from `text`.

        Default: `True`.
        """

    @property
    def spaces_between_special_tokens(self) -> bool:
        """Separate special tokens in `text` by spaces; they are in it with `skip_special_tokens=False`.

        Default: `False`.
        """

    @property
    def priority(self) -> int:
        """Scheduling priority; lower values are served first.

        A request with a lower value can preempt one with a higher value, which resumes later.

        Range: -2**31 to 2**31 - 1. Default: 0.
        """

    @property
    def cache_salt(self) -> str | None:
        """Share cached blocks only with requests that have the same salt.

        1 to 1024 characters. Prevents one tenant from observing another's prompts through cache hits. Not
        allowed when `use_prefix_cache` is False: it only separates entries of the prefix cache.

        Range: 1 to 1024 characters. Default: none.
        """

    @property
    def use_prefix_cache(self) -> bool:
        """Use blocks from the prefix cache and add this request's blocks to it.

        Does not change the output.

        Default: `True`.
        """

    @property
    def unread(self) -> Literal["pause", "keep"]:
        """Effect of output that is not read.

        `"pause"`: the request pauses when 128 to 256 tokens of a choice are unread, and continues when
        they are read. `"keep"`: the request continues, and all its output is kept: up to 48 bytes for each
        token of `max_tokens` and choice, and the outputs that were requested besides tokens. `generate`
        and other calls that return a result never pause a request.

        Range: `"pause"`, `"keep"`. Default: `"pause"`.
        """

    @property
    def adapter(self) -> str | None:
        """Name of the LoRA adapter that computes the output; see `Engine.load_adapter`.

        A name that is not loaded raises `AdapterNotFoundError`. Cached blocks are shared only with
        requests of the same adapter.

        Range: 1 to 256 characters. Default: none: the base model.
        """

    def replace(self, **changes: Any) -> SamplingParams:
        """Return a copy with some fields changed; `None` sets a field back to its default."""

    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]: ...
# fmt: on
# end generated: SamplingParams

@final
class Host:
    """The compute threads and the memory that engines share.

        host = Host(memory_bytes=8 << 30)
        async with Engine(first, host=host) as one, Engine(second, host=host) as two: ...

    Engines that are given no host share that of the process, so several models can be open in it.

    - Engines take turns if the CPUs have no room for the threads of both: a step has all its threads, and
      waits for at most one step of each other engine. Engines with the same number of `threads` share a
      worker pool. Engines on different `numa_nodes` run at the same time.
    - The memory of an engine counts in full from the moment it is opened, also blocks of its KV cache that
      were not used yet. `memory_ratio` is the share of what the other engines leave.

    Engines of different hosts compete for CPUs and memory. A host cannot be used after a fork.

    - `memory_bytes`: Maximum size of the memory of all engines of the host together. Range: 1 to 2**63 - 1.
      Default: the available memory.

    Raises `ConfigError` for a value of the wrong type or out of range.
    """

    def __new__(cls, *, memory_bytes: int | None = None) -> Host: ...
    @property
    def memory_bytes(self) -> int | None:
        """Maximum size of the memory of all engines together, in bytes; `None`: the available memory."""

    @property
    def reserved_bytes(self) -> int:
        """Memory of the open engines, in bytes: weights, workspace and KV cache, used or not.

        Raises `ConfigError` if the host was created before a fork.
        """

    @property
    def available_bytes(self) -> int:
        """Memory that another engine may take, in bytes; it changes with the system's other processes.

        What the system and its control groups have left, without what open engines have reserved, and at most
        what `memory_bytes` leaves. Raises `ConfigError` if the host was created before a fork.
        """

@final
class Tensor:
    """An array of float32 numbers in C order, which other libraries can read without a copy.

    `numpy.asarray(tensor)`, `torch.from_dlpack(tensor)` and `memoryview(tensor)` share its memory and keep it
    alive. The tensors of a result are read-only; the tensor passed to a logits processor is writable, and its
    values are read when the processor returns. `repr` shows the shape only. Two tensors are equal if their
    shapes and the bits of their values are equal.
    """

    def __new__(cls, *, shape: tuple[int, ...], data: bytes) -> Tensor:
        """A read-only tensor with a copy of `data`: the values in C order and in the machine's byte order.

        Raises `ValueError` if `shape` has more than 64 dimensions, or if the length of `data` is not four
        bytes per value of `shape`.
        """

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each dimension, the slowest first."""

    def pooled(self, pooling: str, *, normalize: bool = False, dimensions: int | None = None) -> Tensor:
        """The `last` row of hidden states, or the `mean` of their rows, `(size,)`; computed in float64.

        `dimensions` keeps the first values only; with `normalize` they are divided by their Euclidean length.
        Raises `ValueError` unless the tensor has two dimensions and a row, and for another `pooling` or
        `dimensions` beyond the size.
        """

    def __dlpack__(
        self,
        *,
        stream: None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> CapsuleType:
        """Export the tensor to `from_dlpack` of another library, as DLPack 1.0 if `max_version` allows it.

        Raises `BufferError` for a device other than the CPU and for a `stream`. Older versions of DLPack
        cannot mark a tensor as read-only: for them a read-only tensor is a `BufferError` unless `copy=True`.
        """

    def __dlpack_device__(self) -> tuple[int, int]:
        """The CPU in DLPack's numbering: `(1, 0)`."""

    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]: ...

# begin generated: results
# fmt: off
@final
class Chunk:
    """A part of one choice: its new output since the previous chunk.

    - `text`: Text that has become final; may be empty. Complete characters only. Text that may still
      become part of a stop string or stop sequence is held back until it is known not to be, unless
      `include_stop_str_in_output` is set.
    - `token_ids`: Tokens that have arrived. Their text may follow in a later chunk.
    - `logprobs`: Natural logarithm of the probability of each of `token_ids`; `None` unless requested.
    - `top_logprobs`: For each of `token_ids`, (id, log probability) of the most likely tokens, in
      descending order. `None` unless requested.
    - `index`: Index of the choice.
    - `content`: The part of `Choice.content` that has arrived. It may lag behind `text`: text that may be
      the beginning of a tool call is held back.
    - `reasoning`: The part of `Choice.reasoning` that has arrived.
    - `tool_calls`: The parts of `Choice.tool_calls` that have arrived.
    - `finish_reason`: `Choice.finish_reason` in the last chunk of a choice; else `None`. Every choice that
      ends without an error has a last chunk, which may have no text.
    - `stop_reason`: `Choice.stop_reason` in the last chunk of a choice; else `None`.
    - `logits`: The rows of `Choice.logits` that belong to `token_ids`; `None` unless requested. The rows
      of the prompt are in the first chunk of the first choice, and in the result of every choice. A chunk
      has its own copy: it keeps no other rows in memory.
    - `hidden_states`: The rows of `Choice.hidden_states` that belong to `token_ids`; `None` unless
      requested. As in `logits`.
    - `embeddings`: The rows of `Choice.embeddings` that belong to `token_ids`; `None` unless requested. As
      in `logits`.
    """

    def __new__(
        cls,
        *,
        text: str = ...,
        token_ids: Sequence[int] = ...,
        logprobs: Sequence[float] | None = ...,
        top_logprobs: Sequence[Sequence[tuple[int, float]]] | None = ...,
        index: int = ...,
        content: str = ...,
        reasoning: str = ...,
        tool_calls: Sequence[ToolCallDelta] = ...,
        finish_reason: str | None = ...,
        stop_reason: str | int | Sequence[int] | None = ...,
        logits: Tensor | None = ...,
        hidden_states: Tensor | None = ...,
        embeddings: Tensor | None = ...,
    ) -> Chunk: ...
    @property
    def text(self) -> str:
        """Text that has become final; may be empty.

        Complete characters only. Text that may still become part of a stop string or stop sequence is held
        back until it is known not to be, unless `include_stop_str_in_output` is set.
        """

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens that have arrived.

        Their text may follow in a later chunk.
        """

    @property
    def logprobs(self) -> tuple[float, ...] | None:
        """Natural logarithm of the probability of each of `token_ids`; `None` unless requested."""

    @property
    def top_logprobs(self) -> tuple[tuple[tuple[int, float], ...], ...] | None:
        """For each of `token_ids`, (id, log probability) of the most likely tokens, in descending order.

        `None` unless requested.
        """

    @property
    def index(self) -> int:
        """Index of the choice."""

    @property
    def content(self) -> str:
        """The part of `Choice.content` that has arrived.

        It may lag behind `text`: text that may be the beginning of a tool call is held back.
        """

    @property
    def reasoning(self) -> str:
        """The part of `Choice.reasoning` that has arrived."""

    @property
    def tool_calls(self) -> tuple[ToolCallDelta, ...]:
        """The parts of `Choice.tool_calls` that have arrived."""

    @property
    def finish_reason(self) -> _FinishReason | None:
        """`Choice.finish_reason` in the last chunk of a choice; else `None`.

        Every choice that ends without an error has a last chunk, which may have no text.
        """

    @property
    def stop_reason(self) -> str | int | tuple[int, ...] | None:
        """`Choice.stop_reason` in the last chunk of a choice; else `None`."""

    @property
    def logits(self) -> Tensor | None:
        """The rows of `Choice.logits` that belong to `token_ids`; `None` unless requested.

        The rows of the prompt are in the first chunk of the first choice, and in the result of every
        choice. A chunk has its own copy: it keeps no other rows in memory.
        """

    @property
    def hidden_states(self) -> Tensor | None:
        """The rows of `Choice.hidden_states` that belong to `token_ids`; `None` unless requested.

        As in `logits`.
        """

    @property
    def embeddings(self) -> Tensor | None:
        """The rows of `Choice.embeddings` that belong to `token_ids`; `None` unless requested.

        As in `logits`.
        """

    def to_dict(self) -> dict[str, Any]:
        """Return a dict that `json.dumps` accepts.

        Infinite and NaN numbers are `None`. Without `logits`, `hidden_states`, `embeddings`, which can
        have millions of numbers.
        """

    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]: ...

@final
class ToolCall:
    """A function call that the model requests.

    - `id`: Identifier of the call, generated by Penstock; unique.
    - `name`: Name of the function. It is not necessarily one of `tools` unless `tool_choice` requires a
      call.
    - `arguments`: Arguments as JSON text, as the model wrote it. Incomplete if the output was cut short.
    """

    def __new__(
        cls,
        *,
        id: str,
        name: str,
        arguments: str,
    ) -> ToolCall: ...
    @property
    def id(self) -> str:
        """Identifier of the call, generated by Penstock; unique."""

    @property
    def name(self) -> str:
        """Name of the function.

        It is not necessarily one of `tools` unless `tool_choice` requires a call.
        """

    @property
    def arguments(self) -> str:
        """Arguments as JSON text, as the model wrote it.

        Incomplete if the output was cut short.
        """

    def to_dict(self) -> dict[str, Any]:
        """Return a dict that `json.dumps` accepts.

        In the form of OpenAI's API: `id`, `type` and `function`, as chat messages have it.
        """

    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]: ...

@final
class ToolCallDelta:
    """A part of a function call; the concatenated `arguments` of one `index` are those of the call.

    - `index`: Index of the call in `Choice.tool_calls`.
    - `id`: Identifier of the call; `None` except in the first part.
    - `name`: Name of the function; `None` except in the first part.
    - `arguments`: Part of the arguments.
    """

    def __new__(
        cls,
        *,
        index: int,
        id: str | None,
        name: str | None,
        arguments: str,
    ) -> ToolCallDelta: ...
    @property
    def index(self) -> int:
        """Index of the call in `Choice.tool_calls`."""

    @property
    def id(self) -> str | None:
        """Identifier of the call; `None` except in the first part."""

    @property
    def name(self) -> str | None:
        """Name of the function; `None` except in the first part."""

    @property
    def arguments(self) -> str:
        """Part of the arguments."""

    def to_dict(self) -> dict[str, Any]:
        """Return a dict that `json.dumps` accepts.

        In the form of OpenAI's API: `index`, in the first part `id` and `type`, and `function`.
        """

    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]: ...

@final
class Usage:
    """Token counts of a request.

    - `prompt_tokens`: Tokens of the prompt, counted once for all choices.
    - `completion_tokens`: Tokens generated for all choices together. Tokens after a stop string are not
      counted.
    - `cached_tokens`: Prompt tokens taken from the prefix cache instead of being computed.
    - `cached_host_tokens`: Those of `cached_tokens` that came from the host tier.
    - `total_tokens`: Sum of `prompt_tokens` and `completion_tokens`.
    """

    def __new__(
        cls,
        *,
        prompt_tokens: int = ...,
        completion_tokens: int = ...,
        cached_tokens: int = ...,
        cached_host_tokens: int = ...,
    ) -> Usage: ...
    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, counted once for all choices."""

    @property
    def completion_tokens(self) -> int:
        """Tokens generated for all choices together.

        Tokens after a stop string are not counted.
        """

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens taken from the prefix cache instead of being computed."""

    @property
    def cached_host_tokens(self) -> int:
        """Those of `cached_tokens` that came from the host tier."""

    @property
    def total_tokens(self) -> int:
        """Sum of `prompt_tokens` and `completion_tokens`."""

    def to_dict(self) -> dict[str, Any]:
        """Return a dict that `json.dumps` accepts."""

    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]: ...

@final
class Timings:
    """Durations in seconds since the request's arrival.

    With several choices, `queued` and `first_token` are those of the first one to get there, `total` that
    of the last.

    - `queued`: Until the first step that computed part of the request.
    - `first_token`: Until the first token; `None` if there was none.
    - `total`: Until the end.
    """

    def __new__(
        cls,
        *,
        queued: float = ...,
        first_token: float | None = ...,
        total: float = ...,
    ) -> Timings: ...
    @property
    def queued(self) -> float:
        """Until the first step that computed part of the request."""

    @property
    def first_token(self) -> float | None:
        """Until the first token; `None` if there was none."""

    @property
    def total(self) -> float:
        """Until the end."""

    def to_dict(self) -> dict[str, Any]:
        """Return a dict that `json.dumps` accepts.

        Infinite and NaN numbers are `None`.
        """

    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]: ...

@final
class Choice:
    """One complete output.

    - `index`: Index of the choice, from 0.
    - `text`: The whole text. Without the stop token, string or sequence unless
      `include_stop_str_in_output` is set. With `echo` it begins with the prompt's text, in which stop
      strings are not searched. An incomplete character at the end is U+FFFD.
    - `token_ids`: All generated tokens, stop tokens included.
    - `logprobs`: Natural logarithm of the probability of each of `token_ids`; `None` unless requested.
    - `top_logprobs`: For each of `token_ids`, (id, log probability) of the most likely tokens, in
      descending order. `None` unless requested.
    - `cumulative_logprob`: Sum of `logprobs`, or `None`.
    - `finish_reason`: Reason for the end. `"stop"`; `"tool_calls"`: a stop after at least one complete
      tool call; `"length"`: `max_tokens` or the model's length; `"cancelled"`; `"interrupted"`: preempted
      by an engine with `preemption_mode="interrupt"`; `"unread"`: its consumer did not read, and more than
      `max_paused` outputs were paused.
    - `stop_reason`: For `"stop"` and `"tool_calls"`, the stop string, stop token or stop sequence; else
      `None`.
    - `seed`: Random seed in use.
    - `score`: Score by which `best_of` or `num_beams` ranked the choice; `None` without them.
    - `content`: The answer: the text of a chat's output without reasoning and tool calls. The formats are
      those of `tool_parser` and `reasoning_parser`. If the output is not parsed, `content` is the text
      without the prompt's. If a format uses special tokens that `text` omits, stop strings are searched in
      them, too.
    - `reasoning`: Reasoning before the answer; empty if there is none.
    - `tool_calls`: Function calls that the model requests.
    - `logits`: Raw logits, float32 of shape `(positions, vocabulary_size)`; `None` unless requested. See
      `SamplingParams.output_logits`. With the scope `"prompt"` all choices share one array.
    - `hidden_states`: Last hidden states, float32 of shape `(positions, hidden_size)`; `None` unless
      requested. See `SamplingParams.output_hidden_states`.
    - `embeddings`: Input embeddings, float32 of shape `(positions, hidden_size)`; `None` unless requested.
      See `SamplingParams.output_embeddings`.
    """

    def __new__(
        cls,
        *,
        index: int = ...,
        text: str = ...,
        token_ids: Sequence[int] = ...,
        logprobs: Sequence[float] | None = ...,
        top_logprobs: Sequence[Sequence[tuple[int, float]]] | None = ...,
        cumulative_logprob: float | None = ...,
        finish_reason: str = ...,
        stop_reason: str | int | Sequence[int] | None = ...,
        seed: int = ...,
        score: float | None = ...,
        content: str = ...,
        reasoning: str = ...,
        tool_calls: Sequence[ToolCall] = ...,
        logits: Tensor | None = ...,
        hidden_states: Tensor | None = ...,
        embeddings: Tensor | None = ...,
    ) -> Choice: ...
    @property
    def index(self) -> int:
        """Index of the choice, from 0."""

    @property
    def text(self) -> str:
        """The whole text.

        Without the stop token, string or sequence unless `include_stop_str_in_output` is set. With `echo`
        it begins with the prompt's text, in which stop strings are not searched. An incomplete character
        at the end is U+FFFD.
        """

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All generated tokens, stop tokens included."""

    @property
    def logprobs(self) -> tuple[float, ...] | None:
        """Natural logarithm of the probability of each of `token_ids`; `None` unless requested."""

    @property
    def top_logprobs(self) -> tuple[tuple[tuple[int, float], ...], ...] | None:
        """For each of `token_ids`, (id, log probability) of the most likely tokens, in descending order.

        `None` unless requested.
        """

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of `logprobs`, or `None`."""

    @property
    def finish_reason(self) -> _FinishReason:
        """Reason for the end.

        `"stop"`; `"tool_calls"`: a stop after at least one complete tool call; `"length"`: `max_tokens` or
        the model's length; `"cancelled"`; `"interrupted"`: preempted by an engine with
        `preemption_mode="interrupt"`; `"unread"`: its consumer did not read, and more than `max_paused`
        outputs were paused.
        """

    @property
    def stop_reason(self) -> str | int | tuple[int, ...] | None:
        """For `"stop"` and `"tool_calls"`, the stop string, stop token or stop sequence; else `None`."""

    @property
    def seed(self) -> int:
        """Random seed in use."""

    @property
    def score(self) -> float | None:
        """Score by which `best_of` or `num_beams` ranked the choice; `None` without them."""

    @property
    def content(self) -> str:
        """The answer: the text of a chat's output without reasoning and tool calls.

        The formats are those of `tool_parser` and `reasoning_parser`. If the output is not parsed,
        `content` is the text without the prompt's. If a format uses special tokens that `text` omits, stop
        strings are searched in them, too.
        """

    @property
    def reasoning(self) -> str:
        """Reasoning before the answer; empty if there is none."""

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Function calls that the model requests."""

    @property
    def logits(self) -> Tensor | None:
        """Raw logits, float32 of shape `(positions, vocabulary_size)`; `None` unless requested.

        See `SamplingParams.output_logits`. With the scope `"prompt"` all choices share one array.
        """

    @property
    def hidden_states(self) -> Tensor | None:
        """Last hidden states, float32 of shape `(positions, hidden_size)`; `None` unless requested.

        See `SamplingParams.output_hidden_states`.
        """

    @property
    def embeddings(self) -> Tensor | None:
        """Input embeddings, float32 of shape `(positions, hidden_size)`; `None` unless requested.

        See `SamplingParams.output_embeddings`.
        """

    def to_dict(self) -> dict[str, Any]:
        """Return a dict that `json.dumps` accepts.

        Infinite and NaN numbers are `None`. Without `logits`, `hidden_states`, `embeddings`, which can
        have millions of numbers.
        """

    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]: ...

@final
class Result:
    """The complete output of a request.

    It also has each property of `Choice` except `index`: that of the first choice.

    A request has a result only if all its choices ended without an error; otherwise the error is raised
    instead. Chunks that were read before remain valid.

    For tests, `Result(text="Hello")` makes a result with one choice: the constructor takes the fields of a
    `Choice`, or `choices`. All fields have defaults.

    - `choices`: The `n` choices in order.
    - `prompt_token_ids`: Tokens of the prompt, special tokens included.
    - `prompt_logprobs`: Log probability of each prompt token given those before it; `None` unless
      requested. The first entry is `None`. Shorter than the prompt if the request was cancelled early.
    - `prompt_top_logprobs`: The most likely tokens at each position of the prompt; `None` unless
      requested.
    - `adapter`: Name of the LoRA adapter that computed the output; `None` for the base model.
    - `usage`: Token counts.
    - `timings`: Durations.
    - `parsed`: The `content` as a value of the type that was given as `response_format`; `None` without
      one. Raises pydantic's `ValidationError` if the content is not complete or not valid. A copy by
      `pickle` has none.
    """

    def __new__(
        cls,
        *,
        choices: Sequence[Choice] = ...,
        prompt_token_ids: Sequence[int] = ...,
        prompt_logprobs: Sequence[float | None] | None = ...,
        prompt_top_logprobs: Sequence[Sequence[tuple[int, float]] | None] | None = ...,
        adapter: str | None = ...,
        usage: Usage = ...,
        timings: Timings = ...,
        text: str = ...,
        token_ids: Sequence[int] = ...,
        logprobs: Sequence[float] | None = ...,
        top_logprobs: Sequence[Sequence[tuple[int, float]]] | None = ...,
        cumulative_logprob: float | None = ...,
        finish_reason: str = ...,
        stop_reason: str | int | Sequence[int] | None = ...,
        seed: int = ...,
        score: float | None = ...,
        content: str = ...,
        reasoning: str = ...,
        tool_calls: Sequence[ToolCall] = ...,
        logits: Tensor | None = ...,
        hidden_states: Tensor | None = ...,
        embeddings: Tensor | None = ...,
    ) -> Result: ...
    @property
    def choices(self) -> tuple[Choice, ...]:
        """The `n` choices in order."""

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """Tokens of the prompt, special tokens included."""

    @property
    def prompt_logprobs(self) -> tuple[float | None, ...] | None:
        """Log probability of each prompt token given those before it; `None` unless requested.

        The first entry is `None`. Shorter than the prompt if the request was cancelled early.
        """

    @property
    def prompt_top_logprobs(self) -> tuple[tuple[tuple[int, float], ...] | None, ...] | None:
        """The most likely tokens at each position of the prompt; `None` unless requested."""

    @property
    def adapter(self) -> str | None:
        """Name of the LoRA adapter that computed the output; `None` for the base model."""

    @property
    def usage(self) -> Usage:
        """Token counts."""

    @property
    def timings(self) -> Timings:
        """Durations."""

    @property
    def parsed(self) -> Any:
        """The `content` as a value of the type that was given as `response_format`; `None` without one.

        Raises pydantic's `ValidationError` if the content is not complete or not valid. A copy by `pickle`
        has none.
        """

    @property
    def text(self) -> str:
        """The whole text.

        Without the stop token, string or sequence unless `include_stop_str_in_output` is set. With `echo`
        it begins with the prompt's text, in which stop strings are not searched. An incomplete character
        at the end is U+FFFD.
        """

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All generated tokens, stop tokens included."""

    @property
    def logprobs(self) -> tuple[float, ...] | None:
        """Natural logarithm of the probability of each of `token_ids`; `None` unless requested."""

    @property
    def top_logprobs(self) -> tuple[tuple[tuple[int, float], ...], ...] | None:
        """For each of `token_ids`, (id, log probability) of the most likely tokens, in descending order.

        `None` unless requested.
        """

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of `logprobs`, or `None`."""

    @property
    def finish_reason(self) -> _FinishReason:
        """Reason for the end.

        `"stop"`; `"tool_calls"`: a stop after at least one complete tool call; `"length"`: `max_tokens` or
        the model's length; `"cancelled"`; `"interrupted"`: preempted by an engine with
        `preemption_mode="interrupt"`; `"unread"`: its consumer did not read, and more than `max_paused`
        outputs were paused.
        """

    @property
    def stop_reason(self) -> str | int | tuple[int, ...] | None:
        """For `"stop"` and `"tool_calls"`, the stop string, stop token or stop sequence; else `None`."""

    @property
    def seed(self) -> int:
        """Random seed in use."""

    @property
    def score(self) -> float | None:
        """Score by which `best_of` or `num_beams` ranked the choice; `None` without them."""

    @property
    def content(self) -> str:
        """The answer: the text of a chat's output without reasoning and tool calls.

        The formats are those of `tool_parser` and `reasoning_parser`. If the output is not parsed,
        `content` is the text without the prompt's. If a format uses special tokens that `text` omits, stop
        strings are searched in them, too.
        """

    @property
    def reasoning(self) -> str:
        """Reasoning before the answer; empty if there is none."""

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Function calls that the model requests."""

    @property
    def logits(self) -> Tensor | None:
        """Raw logits, float32 of shape `(positions, vocabulary_size)`; `None` unless requested.

        See `SamplingParams.output_logits`. With the scope `"prompt"` all choices share one array.
        """

    @property
    def hidden_states(self) -> Tensor | None:
        """Last hidden states, float32 of shape `(positions, hidden_size)`; `None` unless requested.

        See `SamplingParams.output_hidden_states`.
        """

    @property
    def embeddings(self) -> Tensor | None:
        """Input embeddings, float32 of shape `(positions, hidden_size)`; `None` unless requested.

        See `SamplingParams.output_embeddings`.
        """

    def to_dict(self) -> dict[str, Any]:
        """Return a dict that `json.dumps` accepts.

        Infinite and NaN numbers are `None`.
        """

    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]: ...

@final
class Score:
    """The likelihood of a text under the model.

    - `token_ids`: Tokens of the text, special tokens included.
    - `logprobs`: Natural logarithm of the probability of each token given those before it; the first is
      `None`.
    - `perplexity`: Exponential of the negated mean of `logprobs`; `None` for a single token.
    """

    def __new__(
        cls,
        *,
        token_ids: Sequence[int],
        logprobs: Sequence[float | None],
        perplexity: float | None,
    ) -> Score: ...
    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens of the text, special tokens included."""

    @property
    def logprobs(self) -> tuple[float | None, ...]:
        """Natural logarithm of the probability of each token given those before it; the first is `None`."""

    @property
    def perplexity(self) -> float | None:
        """Exponential of the negated mean of `logprobs`; `None` for a single token."""

    def to_dict(self) -> dict[str, Any]:
        """Return a dict that `json.dumps` accepts.

        Infinite and NaN numbers are `None`.
        """

    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]: ...
# fmt: on
# end generated: results

# begin generated: statistics
# fmt: off
@final
class Stats:
    """A snapshot of the engine's numbers.

    - `running`: Sequences that hold a slot, paused ones included.
    - `waiting`: Sequences that wait for a slot or for blocks, preempted ones included.
    - `swapped`: Those among `waiting` that have blocks in the host tier.
    - `paused`: Those among `running` and `waiting` that compute nothing because their consumer does not
      read.
    - `blocks_total`: Blocks of the KV cache.
    - `blocks_used`: Blocks that hold tokens of running sequences.
    - `blocks_cached`: Blocks that no sequence uses and that are kept for reuse. They are evicted when
      blocks are needed.
    - `blocks_reserved`: Blocks reserved for tokens that running sequences have already, and not allocated
      yet.
    - `host_blocks_total`: Blocks of the host tier.
    - `host_blocks_used`: Blocks of the host tier that hold prefixes or swapped sequences.
    - `requests_admitted`: Requests admitted; each of the `n` choices counts.
    - `requests_rejected`: Requests refused with `OverloadedError`, which are not admitted. A request that
      is tried again counts each time.
    - `requests_finished`: Admitted requests that have ended.
    - `finished_stop`: Requests among `requests_finished` that ended with a stop token, stop sequence or
      stop string.
    - `finished_length`: Those that reached their maximum length.
    - `finished_cancelled`: Those that were cancelled or dropped, or open when the engine was closed.
    - `finished_interrupted`: Those that were preempted with `preemption_mode="interrupt"`.
    - `finished_unread`: Those that ended because more than `max_paused` outputs were paused.
    - `finished_failed`: Those that failed, in a step or because the engine crashed.
    - `prompt_tokens`: Prompt tokens computed; each counts once, however often it was computed.
    - `recomputed_tokens`: Tokens computed again after their sequence was preempted.
    - `generation_tokens`: Tokens generated for requests.
    - `drafted_tokens`: Draft tokens verified: predicted, or forced by a grammar.
    - `accepted_tokens`: Draft tokens accepted.
    - `prefix_query_tokens`: Prompt tokens of scheduled requests that may use the prefix cache.
    - `prefix_hit_tokens`: Tokens among `prefix_query_tokens` that the prefix cache had, in the KV cache or
      on the host.
    - `prefix_host_hit_tokens`: Tokens among `prefix_query_tokens` that the prefix cache had on the host.
    - `preemptions`: Running sequences with tokens to compute that were preempted, whether they wait or
      end.
    - `swaps`: Preemptions that saved the sequence's blocks in the host tier.
    - `adapter_loads`: LoRA adapters that steps put on the device.
    - `adapter_evictions`: LoRA adapters that left the device to make room for others.
    - `steps`: Steps completed, failed ones included.
    - `time_to_first_token`: Seconds from a request's arrival to its first token.
    - `inter_token_latency`: Seconds from a token of a request to the next. Several tokens of one step
      share the time since the step before it.
    - `queue_time`: Seconds from a request's arrival to its first step, counted when the request ends.
    - `tokens_per_step`: Tokens computed by a step: of prompts, generated ones and drafts.
    - `prefix_hit_rate`: Ratio of `prefix_hit_tokens` to `prefix_query_tokens`; 0 before the first query.
    """

    def __new__(
        cls,
        *,
        running: int,
        waiting: int,
        swapped: int,
        paused: int,
        blocks_total: int,
        blocks_used: int,
        blocks_cached: int,
        blocks_reserved: int,
        host_blocks_total: int,
        host_blocks_used: int,
        requests_admitted: int,
        requests_rejected: int,
        requests_finished: int,
        finished_stop: int,
        finished_length: int,
        finished_cancelled: int,
        finished_interrupted: int,
        finished_unread: int,
        finished_failed: int,
        prompt_tokens: int,
        recomputed_tokens: int,
        generation_tokens: int,
        drafted_tokens: int,
        accepted_tokens: int,
        prefix_query_tokens: int,
        prefix_hit_tokens: int,
        prefix_host_hit_tokens: int,
        preemptions: int,
        swaps: int,
        adapter_loads: int,
        adapter_evictions: int,
        steps: int,
        time_to_first_token: Histogram,
        inter_token_latency: Histogram,
        queue_time: Histogram,
        tokens_per_step: Histogram,
    ) -> Stats: ...
    @property
    def running(self) -> int:
        """Sequences that hold a slot, paused ones included."""

    @property
    def waiting(self) -> int:
        """Sequences that wait for a slot or for blocks, preempted ones included."""

    @property
    def swapped(self) -> int:
        """Those among `waiting` that have blocks in the host tier."""

    @property
    def paused(self) -> int:
        """Those among `running` and `waiting` that compute nothing because their consumer does not read."""

    @property
    def blocks_total(self) -> int:
        """Blocks of the KV cache."""

    @property
    def blocks_used(self) -> int:
        """Blocks that hold tokens of running sequences."""

    @property
    def blocks_cached(self) -> int:
        """Blocks that no sequence uses and that are kept for reuse.

        They are evicted when blocks are needed.
        """

    @property
    def blocks_reserved(self) -> int:
        """Blocks reserved for tokens that running sequences have already, and not allocated yet."""

    @property
    def host_blocks_total(self) -> int:
        """Blocks of the host tier."""

    @property
    def host_blocks_used(self) -> int:
        """Blocks of the host tier that hold prefixes or swapped sequences."""

    @property
    def requests_admitted(self) -> int:
        """Requests admitted; each of the `n` choices counts."""

    @property
    def requests_rejected(self) -> int:
        """Requests refused with `OverloadedError`, which are not admitted.

        A request that is tried again counts each time.
        """

    @property
    def requests_finished(self) -> int:
        """Admitted requests that have ended."""

    @property
    def finished_stop(self) -> int:
        """Requests among `requests_finished` that ended with a stop token, stop sequence or stop string."""

    @property
    def finished_length(self) -> int:
        """Those that reached their maximum length."""

    @property
    def finished_cancelled(self) -> int:
        """Those that were cancelled or dropped, or open when the engine was closed."""

    @property
    def finished_interrupted(self) -> int:
        """Those that were preempted with `preemption_mode="interrupt"`."""

    @property
    def finished_unread(self) -> int:
        """Those that ended because more than `max_paused` outputs were paused."""

    @property
    def finished_failed(self) -> int:
        """Those that failed, in a step or because the engine crashed."""

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens computed; each counts once, however often it was computed."""

    @property
    def recomputed_tokens(self) -> int:
        """Tokens computed again after their sequence was preempted."""

    @property
    def generation_tokens(self) -> int:
        """Tokens generated for requests."""

    @property
    def drafted_tokens(self) -> int:
        """Draft tokens verified: predicted, or forced by a grammar."""

    @property
    def accepted_tokens(self) -> int:
        """Draft tokens accepted."""

    @property
    def prefix_query_tokens(self) -> int:
        """Prompt tokens of scheduled requests that may use the prefix cache."""

    @property
    def prefix_hit_tokens(self) -> int:
        """Tokens among `prefix_query_tokens` that the prefix cache had, in the KV cache or on the host."""

    @property
    def prefix_host_hit_tokens(self) -> int:
        """Tokens among `prefix_query_tokens` that the prefix cache had on the host."""

    @property
    def preemptions(self) -> int:
        """Running sequences with tokens to compute that were preempted, whether they wait or end."""

    @property
    def swaps(self) -> int:
        """Preemptions that saved the sequence's blocks in the host tier."""

    @property
    def adapter_loads(self) -> int:
        """LoRA adapters that steps put on the device."""

    @property
    def adapter_evictions(self) -> int:
        """LoRA adapters that left the device to make room for others."""

    @property
    def steps(self) -> int:
        """Steps completed, failed ones included."""

    @property
    def time_to_first_token(self) -> Histogram:
        """Seconds from a request's arrival to its first token."""

    @property
    def inter_token_latency(self) -> Histogram:
        """Seconds from a token of a request to the next.

        Several tokens of one step share the time since the step before it.
        """

    @property
    def queue_time(self) -> Histogram:
        """Seconds from a request's arrival to its first step, counted when the request ends."""

    @property
    def tokens_per_step(self) -> Histogram:
        """Tokens computed by a step: of prompts, generated ones and drafts."""

    @property
    def prefix_hit_rate(self) -> float:
        """Ratio of `prefix_hit_tokens` to `prefix_query_tokens`; 0 before the first query."""

    def to_dict(self) -> dict[str, Any]:
        """Return a dict that `json.dumps` accepts."""

    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]: ...

@final
class Histogram:
    """The distribution of a quantity since the engine was opened.

    Two histograms of the same field can be subtracted or added count by count; their buckets never change.

    - `buckets`: Upper bounds of the buckets, ascending and inclusive.
    - `counts`: Number of values in each bucket, and last of those above every bound. Not cumulative: one
      more entry than `buckets`.
    - `sum`: Sum of the values.
    - `count`: Number of values.
    """

    def __new__(
        cls,
        *,
        buckets: Sequence[float],
        counts: Sequence[int],
        sum: float,
    ) -> Histogram: ...
    @property
    def buckets(self) -> tuple[float, ...]:
        """Upper bounds of the buckets, ascending and inclusive."""

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of values in each bucket, and last of those above every bound.

        Not cumulative: one more entry than `buckets`.
        """

    @property
    def sum(self) -> float:
        """Sum of the values."""

    @property
    def count(self) -> int:
        """Number of values."""

    def to_dict(self) -> dict[str, Any]:
        """Return a dict that `json.dumps` accepts.

        Infinite and NaN numbers are `None`.
        """

    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]: ...

@final
class Health:
    """The state of a working engine.

    - `state`: State of the engine. `"open"`: requests can be started; `"draining"`: `aclose(drain=...)` or
      `sleep(drain=...)` waits for the open requests; `"asleep"`: `sleep()` has freed the model, until
      `wake()`.
    - `running`: Sequences that hold a slot.
    - `waiting`: Sequences that wait for a slot or for blocks.
    - `step_age`: Seconds since the last step finished, or since the current one began if none preceded it.
      `None` if nothing is being computed. A value far above the usual time of a step means that the device
      or a logits processor is stuck.
    """

    def __new__(
        cls,
        *,
        state: Literal["open", "draining", "asleep"],
        running: int,
        waiting: int,
        step_age: float | None,
    ) -> Health: ...
    @property
    def state(self) -> Literal["open", "draining", "asleep"]:
        """State of the engine.

        `"open"`: requests can be started; `"draining"`: `aclose(drain=...)` or `sleep(drain=...)` waits
        for the open requests; `"asleep"`: `sleep()` has freed the model, until `wake()`.
        """

    @property
    def running(self) -> int:
        """Sequences that hold a slot."""

    @property
    def waiting(self) -> int:
        """Sequences that wait for a slot or for blocks."""

    @property
    def step_age(self) -> float | None:
        """Seconds since the last step finished, or since the current one began if none preceded it.

        `None` if nothing is being computed. A value far above the usual time of a step means that the
        device or a logits processor is stuck.
        """

    def to_dict(self) -> dict[str, Any]:
        """Return a dict that `json.dumps` accepts.

        Infinite and NaN numbers are `None`.
        """

    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]: ...

@final
class CudaDevice:
    """A CUDA device that the process sees; a MIG instance is one, too.

    - `index`: Index among the visible devices, as in `cuda:0`.
    - `name`: Name of the product.
    - `compute_capability`: Compute capability, such as `9.0`.
    - `total_memory`: Size of its memory in bytes.
    - `free_memory`: Part of the memory that no process uses, in bytes; `None` if it cannot be read.
    - `uuid`: Identifier, in the form of nvidia-smi without the prefix.
    - `pci_address`: Address on the PCI bus.
    - `reason`: Reason why the device cannot be used; `None` if it can.
    """

    def __new__(
        cls,
        *,
        index: int,
        name: str,
        compute_capability: str,
        total_memory: int,
        free_memory: int | None,
        uuid: str,
        pci_address: str,
        reason: str | None,
    ) -> CudaDevice: ...
    @property
    def index(self) -> int:
        """Index among the visible devices, as in `cuda:0`."""

    @property
    def name(self) -> str:
        """Name of the product."""

    @property
    def compute_capability(self) -> str:
        """Compute capability, such as `9.0`."""

    @property
    def total_memory(self) -> int:
        """Size of its memory in bytes."""

    @property
    def free_memory(self) -> int | None:
        """Part of the memory that no process uses, in bytes; `None` if it cannot be read."""

    @property
    def uuid(self) -> str:
        """Identifier, in the form of nvidia-smi without the prefix."""

    @property
    def pci_address(self) -> str:
        """Address on the PCI bus."""

    @property
    def reason(self) -> str | None:
        """Reason why the device cannot be used; `None` if it can."""

    def to_dict(self) -> dict[str, Any]:
        """Return a dict that `json.dumps` accepts."""

    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]: ...

@final
class CudaInfo:
    """The NVIDIA driver with its devices, the compiler of CUDA kernels, and cuBLASLt.

    - `driver_version`: Version of CUDA that the driver supports; `None` without a driver.
    - `devices`: The visible devices.
    - `reason`: Reason why no device can be used, with a remedy; `None` if one can.
    - `compiler_version`: Version of NVRTC, the compiler; `None` without one.
    - `compiler_path`: Library of the compiler.
    - `compiler_reason`: Reason why there is no compiler, with a remedy; `None` if there is one.
    - `cublas_version`: Version of cuBLASLt, which `deterministic=False` uses; `None` without it.
    - `cublas_path`: Library of cuBLASLt.
    - `cublas_reason`: Reason why there is no cuBLASLt, with a remedy; `None` if there is one.
    """

    def __new__(
        cls,
        *,
        driver_version: str | None,
        devices: Sequence[CudaDevice],
        reason: str | None,
        compiler_version: str | None,
        compiler_path: str | None,
        compiler_reason: str | None,
        cublas_version: str | None,
        cublas_path: str | None,
        cublas_reason: str | None,
    ) -> CudaInfo: ...
    @property
    def driver_version(self) -> str | None:
        """Version of CUDA that the driver supports; `None` without a driver."""

    @property
    def devices(self) -> tuple[CudaDevice, ...]:
        """The visible devices."""

    @property
    def reason(self) -> str | None:
        """Reason why no device can be used, with a remedy; `None` if one can."""

    @property
    def compiler_version(self) -> str | None:
        """Version of NVRTC, the compiler; `None` without one."""

    @property
    def compiler_path(self) -> str | None:
        """Library of the compiler."""

    @property
    def compiler_reason(self) -> str | None:
        """Reason why there is no compiler, with a remedy; `None` if there is one."""

    @property
    def cublas_version(self) -> str | None:
        """Version of cuBLASLt, which `deterministic=False` uses; `None` without it."""

    @property
    def cublas_path(self) -> str | None:
        """Library of cuBLASLt."""

    @property
    def cublas_reason(self) -> str | None:
        """Reason why there is no cuBLASLt, with a remedy; `None` if there is one."""

    def to_dict(self) -> dict[str, Any]:
        """Return a dict that `json.dumps` accepts."""

    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]: ...

@final
class MemoryInfo:
    """The use of the memory in bytes, as planned when the model was opened.

    The engine reserves no more memory afterwards.

    - `limit`: Maximum that the engine may take: its share of the memory that was available.
    - `weights`: Packed weights.
    - `workspace`: Activations and scratch buffers of the largest step. The system provides its pages when
      they are first written.
    - `inputs`: Input arrays of the largest step. With a CUDA device also the page-locked buffers of the
      host for copies from and to it; both are not part of `limit` then.
    - `kv_cache`: Reserved for the KV cache. Of these bytes, `blocks_used + blocks_cached` out of
      `blocks_total` of `Stats` hold tokens. The system provides its pages when they are first written; a
      CUDA device has them from the start.
    - `host_cache`: Host tier of the KV cache. The system provides its pages when they are first written.
      With a CUDA device, it is page-locked memory, and not part of `limit`.
    - `adapters`: LoRA adapters, with a buffer of the largest step; 0 without. The system provides its
      pages when they are first written.
    - `peak`: Maximum in use at once up to the end of the warm-up, without `inputs`.
    """

    def __new__(
        cls,
        *,
        limit: int,
        weights: int,
        workspace: int,
        inputs: int,
        kv_cache: int,
        host_cache: int,
        adapters: int,
        peak: int,
    ) -> MemoryInfo: ...
    @property
    def limit(self) -> int:
        """Maximum that the engine may take: its share of the memory that was available."""

    @property
    def weights(self) -> int:
        """Packed weights."""

    @property
    def workspace(self) -> int:
        """Activations and scratch buffers of the largest step.

        The system provides its pages when they are first written.
        """

    @property
    def inputs(self) -> int:
        """Input arrays of the largest step.

        With a CUDA device also the page-locked buffers of the host for copies from and to it; both are not
        part of `limit` then.
        """

    @property
    def kv_cache(self) -> int:
        """Reserved for the KV cache.

        Of these bytes, `blocks_used + blocks_cached` out of `blocks_total` of `Stats` hold tokens. The
        system provides its pages when they are first written; a CUDA device has them from the start.
        """

    @property
    def host_cache(self) -> int:
        """Host tier of the KV cache.

        The system provides its pages when they are first written. With a CUDA device, it is page-locked
        memory, and not part of `limit`.
        """

    @property
    def adapters(self) -> int:
        """LoRA adapters, with a buffer of the largest step; 0 without.

        The system provides its pages when they are first written.
        """

    @property
    def peak(self) -> int:
        """Maximum in use at once up to the end of the warm-up, without `inputs`."""

    def to_dict(self) -> dict[str, Any]:
        """Return a dict that `json.dumps` accepts."""

    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]: ...

@final
class HostTierInfo:
    """The measured costs of the host tier, in seconds per block of all layers.

    - `save_seconds`: Copying a block to the host tier.
    - `load_seconds`: Copying a block back.
    - `recompute_seconds`: Computing a block again, at the speed of the largest prefill chunk.
    - `keeps_prefixes`: Whether the host tier keeps prefixes. It does if there is a prefix cache and
      loading is faster than computing.
    """

    def __new__(
        cls,
        *,
        save_seconds: float,
        load_seconds: float,
        recompute_seconds: float,
        keeps_prefixes: bool,
    ) -> HostTierInfo: ...
    @property
    def save_seconds(self) -> float:
        """Copying a block to the host tier."""

    @property
    def load_seconds(self) -> float:
        """Copying a block back."""

    @property
    def recompute_seconds(self) -> float:
        """Computing a block again, at the speed of the largest prefill chunk."""

    @property
    def keeps_prefixes(self) -> bool:
        """Whether the host tier keeps prefixes.

        It does if there is a prefix cache and loading is faster than computing.
        """

    def to_dict(self) -> dict[str, Any]:
        """Return a dict that `json.dumps` accepts.

        Infinite and NaN numbers are `None`.
        """

    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]: ...

@final
class NumaInfo:
    """The NUMA nodes of the threads and the memory.

    - `nodes`: The nodes.
    - `cpus`: CPUs of the nodes that the process may use.
    - `threads_pinned`: Whether the system runs the threads on these CPUs only.
    - `memory_placed`: Whether the system takes the memory of these nodes. Containers need the capability
      `SYS_NICE` for that.
    """

    def __new__(
        cls,
        *,
        nodes: Sequence[int],
        cpus: Sequence[int],
        threads_pinned: bool,
        memory_placed: bool,
    ) -> NumaInfo: ...
    @property
    def nodes(self) -> tuple[int, ...]:
        """The nodes."""

    @property
    def cpus(self) -> tuple[int, ...]:
        """CPUs of the nodes that the process may use."""

    @property
    def threads_pinned(self) -> bool:
        """Whether the system runs the threads on these CPUs only."""

    @property
    def memory_placed(self) -> bool:
        """Whether the system takes the memory of these nodes.

        Containers need the capability `SYS_NICE` for that.
        """

    def to_dict(self) -> dict[str, Any]:
        """Return a dict that `json.dumps` accepts."""

    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]: ...

@final
class WeightFormatInfo:
    """The format of the weight matrices of one module, in all layers or in some of them.

    - `module`: Name of the module without that of its layer, such as `mlp.down_proj`.
    - `format`: `"float32"`, `"float16"`, `"bfloat16"`, `"fp8"`, or `"int4"` to `"int8"`, the bits of a
      code.
    - `group_size`: Columns that share a scale; `None` if all columns of a row do, and for floats.
    - `symmetric`: Whether groups have neither a minimum nor a zero point; `None` for floats.
    - `activations`: Type of the activations in a product: `"int8"`, `"fp8"`, or floats such as
      `"float32"`.
    - `count`: Number of matrices.
    - `bytes`: Size of the matrices together.
    """

    def __new__(
        cls,
        *,
        module: str,
        format: str,
        group_size: int | None,
        symmetric: bool | None,
        activations: str,
        count: int,
        bytes: int,
    ) -> WeightFormatInfo: ...
    @property
    def module(self) -> str:
        """Name of the module without that of its layer, such as `mlp.down_proj`."""

    @property
    def format(self) -> str:
        """`"float32"`, `"float16"`, `"bfloat16"`, `"fp8"`, or `"int4"` to `"int8"`, the bits of a code."""

    @property
    def group_size(self) -> int | None:
        """Columns that share a scale; `None` if all columns of a row do, and for floats."""

    @property
    def symmetric(self) -> bool | None:
        """Whether groups have neither a minimum nor a zero point; `None` for floats."""

    @property
    def activations(self) -> str:
        """Type of the activations in a product: `"int8"`, `"fp8"`, or floats such as `"float32"`."""

    @property
    def count(self) -> int:
        """Number of matrices."""

    @property
    def bytes(self) -> int:
        """Size of the matrices together."""

    def to_dict(self) -> dict[str, Any]:
        """Return a dict that `json.dumps` accepts."""

    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]: ...

@final
class Adapter:
    """A loaded LoRA adapter.

    - `name`: Name of the adapter in requests.
    - `path`: Directory that the adapter was loaded from.
    - `base_model`: Model for which the adapter was trained, as its configuration names it.
    - `rank`: Highest rank of its matrices.
    - `num_modules`: Number of linear layers that it changes.
    - `bytes`: Size on the device.
    - `on_device`: Whether it is on the device. Otherwise it is in host memory, and is copied to the device
      for the first request that names it.
    - `running`: Number of running outputs of requests with the adapter.
    - `waiting`: Number of waiting outputs of requests with the adapter.
    """

    def __new__(
        cls,
        *,
        name: str,
        path: str,
        base_model: str | None,
        rank: int,
        num_modules: int,
        bytes: int,
        on_device: bool,
        running: int,
        waiting: int,
    ) -> Adapter: ...
    @property
    def name(self) -> str:
        """Name of the adapter in requests."""

    @property
    def path(self) -> str:
        """Directory that the adapter was loaded from."""

    @property
    def base_model(self) -> str | None:
        """Model for which the adapter was trained, as its configuration names it."""

    @property
    def rank(self) -> int:
        """Highest rank of its matrices."""

    @property
    def num_modules(self) -> int:
        """Number of linear layers that it changes."""

    @property
    def bytes(self) -> int:
        """Size on the device."""

    @property
    def on_device(self) -> bool:
        """Whether it is on the device.

        Otherwise it is in host memory, and is copied to the device for the first request that names it.
        """

    @property
    def running(self) -> int:
        """Number of running outputs of requests with the adapter."""

    @property
    def waiting(self) -> int:
        """Number of waiting outputs of requests with the adapter."""

    def to_dict(self) -> dict[str, Any]:
        """Return a dict that `json.dumps` accepts."""

    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]: ...

@final
class ProfileRow:
    """Totals of one operation of the device since the engine was opened, without its warm-up.

    - `operation`: Name of the operation, such as `"linear"` or `"attention"`.
    - `calls`: Number of calls.
    - `seconds`: Time in all calls.
    - `min_seconds`: Time in the shortest call.
    - `max_seconds`: Time in the longest call.
    - `bytes`: Number of bytes of memory that the calls had to read and write.
    - `flops`: Floating-point operations of matrix products and attention; `None` for other operations.
    """

    def __new__(
        cls,
        *,
        operation: str,
        calls: int,
        seconds: float,
        min_seconds: float,
        max_seconds: float,
        bytes: int,
        flops: int | None,
    ) -> ProfileRow: ...
    @property
    def operation(self) -> str:
        """Name of the operation, such as `"linear"` or `"attention"`."""

    @property
    def calls(self) -> int:
        """Number of calls."""

    @property
    def seconds(self) -> float:
        """Time in all calls."""

    @property
    def min_seconds(self) -> float:
        """Time in the shortest call."""

    @property
    def max_seconds(self) -> float:
        """Time in the longest call."""

    @property
    def bytes(self) -> int:
        """Number of bytes of memory that the calls had to read and write."""

    @property
    def flops(self) -> int | None:
        """Floating-point operations of matrix products and attention; `None` for other operations."""

    def to_dict(self) -> dict[str, Any]:
        """Return a dict that `json.dumps` accepts.

        Infinite and NaN numbers are `None`.
        """

    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]: ...

@final
class ModelInfo:
    """The open model and the sizes in effect.

    See `EngineConfig` for the sizes that can be chosen.

    - `architecture`: Hugging Face architecture, such as `LlamaForCausalLM`.
    - `parameters`: Number of weights; tied weights count once.
    - `vocabulary_size`: Number of token ids.
    - `hidden_size`: Size of the hidden states, and so of embeddings.
    - `pooling`: Pooling of hidden states: that of the model's files, else `mean`. It is the default of
      `Engine.embed`, which supports `mean` and `last` only.
    - `normalize`: Whether embeddings have length 1 by default: what the model's files ask for, else true.
    - `eos_token_ids`: The model's end tokens, which end an output unless `ignore_eos` is set.
    - `has_sampling_defaults`: Whether the model's files set sampling parameters, which are the defaults of
      requests.
    - `dtype`: Type of the weights that are not quantised.
    - `weight_formats`: Formats of the weight matrices, by module.
    - `kv_cache_dtype`: Type of the KV cache.
    - `memory`: Use of the memory.
    - `memory_ratio`: Share of the available memory that `memory.limit` is: that of the configuration, or
      the default.
    - `host_tier`: Costs of the host tier; `None` without one.
    - `warm_up_seconds`: Duration of the warm-up.
    - `block_size`: Number of tokens in a block of the KV cache.
    - `num_blocks`: Size of the KV cache in blocks.
    - `max_model_len`: Maximum number of tokens of a sequence.
    - `max_num_seqs`: Maximum number of sequences in a step.
    - `max_adapters`: Maximum number of LoRA adapters on the device; 0 without adapters.
    - `adapter_cache_bytes`: Memory for the adapters on the device in bytes.
    - `max_cpu_adapters`: Maximum number of loaded adapters.
    - `max_cpu_adapter_bytes`: Maximum size of the loaded adapters in bytes.
    - `max_num_batched_tokens`: Token budget of a step.
    - `max_waiting`: Maximum number of waiting requests; `None` without a bound.
    - `max_unfinished`: Maximum number of unfinished outputs, without paused ones.
    - `max_output_bytes`: Maximum size of the tensors and logprobs of unfinished requests.
    - `max_paused`: Maximum number of paused outputs.
    - `device`: Device that computes: `cpu`, or a CUDA device such as `cuda:0`.
    - `threads`: Number of compute threads of the host.
    - `numa`: Placement of threads and memory; `None` without `numa_nodes`.
    - `deterministic`: Whether a request has the same tokens and logprobs in every batch. It is also true
      for `deterministic=False` if no algorithm of the device depends on the batch.
    - `isa`: Instruction set of the kernels. For a CUDA device its architecture, such as `sm_90a`, or that
      of `PENSTOCK_CUDA_ARCH`. On the CPU `portable`, `avx2`, `avx_vnni`, `avx512`, `avx512_vnni`,
      `avx512_bf16`, `amx`, `neon`, `neon_dotprod` or `neon_i8mm`. The default is the best one the CPU has;
      `PENSTOCK_ISA` selects another. `avx512_bf16` and `amx` are never the default: the first rounds the
      activations of bf16 matrices to bf16, the second is experimental.
    """

    def __new__(
        cls,
        *,
        architecture: str,
        parameters: int,
        vocabulary_size: int,
        hidden_size: int,
        pooling: str,
        normalize: bool,
        eos_token_ids: Sequence[int],
        has_sampling_defaults: bool,
        dtype: str,
        weight_formats: Sequence[WeightFormatInfo],
        kv_cache_dtype: str,
        memory: MemoryInfo,
        memory_ratio: float,
        host_tier: HostTierInfo | None,
        warm_up_seconds: float,
        block_size: int,
        num_blocks: int,
        max_model_len: int,
        max_num_seqs: int,
        max_adapters: int,
        adapter_cache_bytes: int,
        max_cpu_adapters: int,
        max_cpu_adapter_bytes: int,
        max_num_batched_tokens: int,
        max_waiting: int | None,
        max_unfinished: int,
        max_output_bytes: int,
        max_paused: int,
        device: str,
        threads: int,
        numa: NumaInfo | None,
        deterministic: bool,
        isa: str,
    ) -> ModelInfo: ...
    @property
    def architecture(self) -> str:
        """Hugging Face architecture, such as `LlamaForCausalLM`."""

    @property
    def parameters(self) -> int:
        """Number of weights; tied weights count once."""

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids."""

    @property
    def hidden_size(self) -> int:
        """Size of the hidden states, and so of embeddings."""

    @property
    def pooling(self) -> str:
        """Pooling of hidden states: that of the model's files, else `mean`.

        It is the default of `Engine.embed`, which supports `mean` and `last` only.
        """

    @property
    def normalize(self) -> bool:
        """Whether embeddings have length 1 by default: what the model's files ask for, else true."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The model's end tokens, which end an output unless `ignore_eos` is set."""

    @property
    def has_sampling_defaults(self) -> bool:
        """Whether the model's files set sampling parameters, which are the defaults of requests."""

    @property
    def dtype(self) -> str:
        """Type of the weights that are not quantised."""

    @property
    def weight_formats(self) -> tuple[WeightFormatInfo, ...]:
        """Formats of the weight matrices, by module."""

    @property
    def kv_cache_dtype(self) -> str:
        """Type of the KV cache."""

    @property
    def memory(self) -> MemoryInfo:
        """Use of the memory."""

    @property
    def memory_ratio(self) -> float:
        """Share of the available memory that `memory.limit` is: that of the configuration, or the default."""

    @property
    def host_tier(self) -> HostTierInfo | None:
        """Costs of the host tier; `None` without one."""

    @property
    def warm_up_seconds(self) -> float:
        """Duration of the warm-up."""

    @property
    def block_size(self) -> int:
        """Number of tokens in a block of the KV cache."""

    @property
    def num_blocks(self) -> int:
        """Size of the KV cache in blocks."""

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of a sequence."""

    @property
    def max_num_seqs(self) -> int:
        """Maximum number of sequences in a step."""

    @property
    def max_adapters(self) -> int:
        """Maximum number of LoRA adapters on the device; 0 without adapters."""

    @property
    def adapter_cache_bytes(self) -> int:
        """Memory for the adapters on the device in bytes."""

    @property
    def max_cpu_adapters(self) -> int:
        """Maximum number of loaded adapters."""

    @property
    def max_cpu_adapter_bytes(self) -> int:
        """Maximum size of the loaded adapters in bytes."""

    @property
    def max_num_batched_tokens(self) -> int:
        """Token budget of a step."""

    @property
    def max_waiting(self) -> int | None:
        """Maximum number of waiting requests; `None` without a bound."""

    @property
    def max_unfinished(self) -> int:
        """Maximum number of unfinished outputs, without paused ones."""

    @property
    def max_output_bytes(self) -> int:
        """Maximum size of the tensors and logprobs of unfinished requests."""

    @property
    def max_paused(self) -> int:
        """Maximum number of paused outputs."""

    @property
    def device(self) -> str:
        """Device that computes: `cpu`, or a CUDA device such as `cuda:0`."""

    @property
    def threads(self) -> int:
        """Number of compute threads of the host."""

    @property
    def numa(self) -> NumaInfo | None:
        """Placement of threads and memory; `None` without `numa_nodes`."""

    @property
    def deterministic(self) -> bool:
        """Whether a request has the same tokens and logprobs in every batch.

        It is also true for `deterministic=False` if no algorithm of the device depends on the batch.
        """

    @property
    def isa(self) -> str:
        """Instruction set of the kernels.

        For a CUDA device its architecture, such as `sm_90a`, or that of `PENSTOCK_CUDA_ARCH`. On the CPU
        `portable`, `avx2`, `avx_vnni`, `avx512`, `avx512_vnni`, `avx512_bf16`, `amx`, `neon`,
        `neon_dotprod` or `neon_i8mm`. The default is the best one the CPU has; `PENSTOCK_ISA` selects
        another. `avx512_bf16` and `amx` are never the default: the first rounds the activations of bf16
        matrices to bf16, the second is experimental.
        """

    def to_dict(self) -> dict[str, Any]:
        """Return a dict that `json.dumps` accepts.

        Infinite and NaN numbers are `None`.
        """

    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]: ...
# fmt: on
# end generated: statistics

@final
class BeamSearch:
    """A beam search in progress. Each step generates one token of every running beam."""

    @property
    def is_running(self) -> bool:
        """Whether another step follows."""

    def start_step(self, port: Port) -> list[Request]:
        """Start the requests of the next step. Raises as `Engine.start_request` does."""

    def advance(self, results: Sequence[Result]) -> None:
        """Take the results of the step's requests, in their order."""

    def close(self) -> None:
        """No step follows; neither `Engine.drain` nor `unload_adapter` waits for the search any more."""

    def result(self) -> Result:
        """The best outputs, best first; fewer than `n` if the search found fewer."""

@final
class Engine:
    """A loaded model and the threads that compute its requests.

    Dropping it without `shutdown` stops the threads without waiting for them.
    """

    @staticmethod
    def open(
        model: str | os.PathLike[str] | bytes,
        config: EngineConfig,
        host: Host,
        progress: Callable[[int, int], object] | None = None,
        cuda_folders: Sequence[str | os.PathLike[str]] = ...,
        chat_template: str | None = None,
    ) -> Engine:
        """Load a directory, a file, or a converted model in memory. Can take minutes, without the GIL.

        `chat_template` is the source of a chat template, in place of those of the model.

        `progress(done, total)` receives byte counts, at most about 20 times per second. An exception raised
        in it stops the loading and is raised here; so is `KeyboardInterrupt` in the main thread. Raises
        `ConfigError`, `ModelLoadError` and `OutOfMemoryError`.
        """

    def start_request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        port: Port,
        *,
        is_chat: bool = False,
        is_scoring: bool = False,
        client: int | None = None,
        time_left: float | None = None,
        check_cancelled: Callable[[], None] | None = None,
    ) -> Request:
        """Submit a request, whose output `port` receives. Does not wait for the engine.

        With `is_chat` the prompt is a rendered chat template: no special tokens are added, tools are allowed,
        and the output is parsed. With `is_scoring` no token is generated; the result has the log
        probabilities of the prompt.

        Tokenises the text and compiles a grammar, which can take seconds. Meanwhile `check_cancelled` is
        called at intervals; an exception raised in it ends the call, and so does Ctrl-C in the main thread.
        If it has a method `begin_wait`, this is called before the call waits for a grammar.

        `client`, a number below 2^64, is the client that the request is for: clients that compete get equal
        shares of the engine. A request that cannot end within `time_left` seconds raises
        `DeadlineError`.

        Raises `InvalidRequestError`, `OverloadedError` and `EngineStoppedError`.
        """

    def search_beams(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        is_chat: bool = False,
        client: int | None = None,
        time_left: float | None = None,
        check_cancelled: Callable[[], None] | None = None,
    ) -> BeamSearch:
        """Prepare a beam search, of which no request has started. Raises as `start_request` does."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer in use, with the model's chat templates."""

    @property
    def info(self) -> ModelInfo:
        """The model's properties and the engine's settings in effect."""

    @property
    def is_running(self) -> bool:
        """Whether requests can be started."""

    def stats(self) -> Stats:
        """A snapshot of the engine's numbers; lock-free. Also delivers queued log records."""

    def health(self, state: Literal["open", "draining"]) -> Health:
        """The state as given, with what the engine does now.

        Raises `EngineStoppedError` if it crashed, lost its device, or was opened before a fork.
        """

    def profile(self) -> list[ProfileRow]:
        """Raises `RuntimeError` unless `EngineConfig.profile` is set."""

    def check_adapter_name(self, name: str) -> None:
        """Raises `ConfigError` for a name that no adapter can have, and without `max_adapters`."""

    def load_adapter(
        self,
        name: str,
        path: str | os.PathLike[str],
        *,
        replace: bool = False,
        progress: Callable[[int, int], object] | None = None,
        check_cancelled: Callable[[], object] | None = None,
    ) -> Adapter:
        """Load an adapter from a directory; see `penstock.Engine.load_adapter`. Slow; releases the GIL.

        `check_cancelled` raises to end the wait for another load of the name.
        """

    def unload_adapter(self, name: str, port: Port, *, force: bool = False) -> None:
        """Remove an adapter, and ring `port` when its last request has ended.

        Raises `AdapterNotFoundError`.
        """

    def adapters(self) -> list[Adapter]:
        """The loaded adapters in the order of their names."""

    def reset_prefix_cache(self, *, cache_salt: str | None = None) -> None:
        """Remove all blocks from the prefix cache, or those of a salt; running requests keep theirs.

        Raises `EngineStoppedError` if the engine is not running, `InvalidRequestError` for an invalid salt.
        """

    def kv_events(self, port: Port) -> KvEvents:
        """The events of the prefix cache from now on, all blocks in it first.

        Raises `EngineStoppedError` if the engine has stopped, `ConfigError` without a prefix cache.
        """

    @property
    def is_forked(self) -> bool:
        """Whether this process is the child of a fork, and the engine's threads are in the parent."""

    def check_room(self, client: int | None = None) -> None:
        """Raise `OverloadedError` if a request of a client would be refused, such as by `max_waiting`."""

    def check_process(self) -> None:
        """Raise `EngineStoppedError` if `is_forked`."""

    @staticmethod
    def check_may_wait() -> None:
        """Raise `RuntimeError` inside a logits processor, where waiting for the engine never ends."""

    def drain(self) -> None:
        """Make the engine's threads end once no request is open and no beam search is held.

        Requests are still accepted until then. Can be called repeatedly.
        """

    def stop(self) -> None:
        """Start a shutdown; never waits. Can be called repeatedly."""

    def ring_at_end(self, port: Port) -> None:
        """Make `port` readable once the engine's threads have ended; `shutdown` then does not wait."""

    def shutdown(self) -> None:
        """Cancel open requests and wait until the engine's threads have ended. Can be called repeatedly."""

@final
class Tokenizer:
    """The tokenizer, chat templates and special tokens of a model."""

    @staticmethod
    def open(model: str | os.PathLike[str] | bytes) -> Tokenizer:
        """Read them from a directory, a file, or a converted model in memory. Raises `ModelLoadError`."""

    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """The token ids of a text; Ctrl-C in the main thread interrupts it.

        Raises `InvalidRequestError` if the text has a lone surrogate, or more than `max_tokens` tokens.
        """

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = False,
    ) -> str:
        """The text of token ids. Ids outside the vocabulary are ignored; invalid bytes become U+FFFD."""

    def token_bytes(self, token_ids: Sequence[int]) -> list[bytes]:
        """The bytes of each token; see `penstock.Tokenizer.token_bytes`."""

    def token_names(self, token_ids: Sequence[int]) -> list[str]:
        """The tokens as the vocabulary writes them; see `penstock.Tokenizer.token_names`."""

    @property
    def chat_templates(self) -> dict[str, str]:
        """The source of each chat template of the model, by name. Requests use `default`."""

    @property
    def special_tokens(self) -> list[tuple[str, str]]:
        """Names and texts of the special tokens for chat templates, such as `("bos_token", "<s>")`."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The model's end tokens; if it names none, its `eos_token`."""

    @property
    def bos_token_id(self) -> int | None:
        """The id of the `bos_token`; if it names none, that of the generation settings."""

    @property
    def vocabulary_size(self) -> int:
        """One more than the largest id."""

@final
class Port:
    """The receiver of the output of any number of requests, for one event loop or one blocking caller.

    `Request.is_admitted`, `has_chunk` and `has_ended` return whether the request has reached that state. If
    one of them returns False, `drain` returns the request's id once it would return True.

    Raises `OSError` if the process has too many open files.
    """

    def __new__(cls, *, blocking: bool = False) -> Port: ...
    def fileno(self) -> int:
        """A descriptor that is readable while output waits to be drained. It is valid as long as the port.

        -1 for a blocking port.
        """

    def drain(self) -> list[int]:
        """Receive the output of this port's requests; return the ids of those with an awaited change.

        Clears the descriptor first. Never waits; runs without the GIL.
        """

    def ring(self) -> None:
        """Make the port readable; from any thread."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until output may have arrived; returns False if that takes longer than `timeout` seconds.

        One thread at a time; Ctrl-C raises `KeyboardInterrupt`.
        """

@final
class KvEvents:
    """The KV events of an engine, for one listener; see `Engine.kv_events`."""

    def read(self) -> list[tuple[Any, ...]] | None:
        """The events since the last read, after the port was drained; `None` once the engine has stopped.

        An event has the block hashes, the hash of the parent, the token ids, the tier, the adapter, its id
        and the salt of stored blocks, the hashes and the tier of removed ones, or nothing if all are gone.
        """

    def payload(self, timestamp: float) -> tuple[bytes, bool] | None:
        """The events since the last read as a message of vLLM, in the format of the option `kv_events`.

        Also whether it begins with the removal of all blocks. Empty without events, `None` once the engine
        has stopped. `timestamp` is in seconds since 1970.
        """

    def cleared(self, timestamp: float) -> bytes:
        """A message in which all blocks are removed."""

    def restart(self) -> None:
        """Drop what was not read, and begin again with the removal of all blocks and those in the cache."""

    @property
    def block_size(self) -> int:
        """The number of tokens of a block."""

@final
class Request:
    """A submitted request with all its choices. Dropping it cancels the request.

    In the child of a fork its methods raise `EngineStoppedError`, and dropping it has no effect.
    """

    @property
    def id(self) -> int:
        """The request's number, unique within its engine."""

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters in effect: all defaults filled in, including the seed."""

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """Tokens of the prompt."""

    @property
    def usage(self) -> Usage:
        """Token counts so far."""

    @property
    def timings(self) -> Timings:
        """Durations so far."""

    @property
    def finish_reason(
        self,
    ) -> Literal["stop", "length", "cancelled", "interrupted", "unread", "error"] | None:
        """The reason of the first choice, or `error` if a choice failed; `None` until all have ended."""

    @property
    def is_forked(self) -> bool:
        """Whether this process is the child of a fork, and the request belongs to the parent."""

    def is_admitted(self) -> bool:
        """Whether the engine has accepted or rejected the request."""

    def has_chunk(self) -> bool:
        """Whether `take` returns a chunk, or the request has ended."""

    def is_readable(self) -> bool:
        """Whether `next` returns a chunk or raises, of the output that the port has drained."""

    def next(self) -> Chunk | None:
        """`take` from the output that the port has drained.

        Raises `StopAsyncIteration` after the last chunk, or as `check` does.
        """

    def has_ended(self) -> bool:
        """Whether all choices have ended. The first call lifts the limit on unread output."""

    def poll(self) -> Chunk | None:
        """Receive the output that has arrived, and `take` a chunk of it."""

    def take(self) -> Chunk | None:
        """The unread output of one choice, which then counts as read; `None` if there is none.

        The choices take turns.
        """

    def check_admission(self) -> None:
        """Raise the error of a request that was rejected. Later failures are not raised here."""

    def check(self) -> None:
        """Raise the error of the first choice that failed, once all choices have ended.

        It is an `OverloadedError`, `EngineStoppedError` or `GenerationError`.
        """

    def result(self) -> Result | None:
        """The complete output, or `None` until all choices have ended. Raises as `check` does."""

    def cancel(self) -> None:
        """Cancel the request. Never waits, never raises."""

def best_of(result: Result, params: SamplingParams) -> Result:
    """The `n` choices with the highest mean log probability, which becomes their score, best first.

    Returns `result` if `params.best_of` is not set. The usage counts the tokens of all candidates.
    """

def call_deep(function: Callable[[], _Returned], interrupt: Callable[[], object]) -> _Returned:
    """Call a function that recurses deeply on a new thread with a large stack, and return its result.

    Raises what the function raises. If the handler of a signal raises, `interrupt` is called, and the
    exception of the handler is raised when the function has ended.
    """

def candidate_params(params: SamplingParams) -> SamplingParams:
    """The parameters of the request that generates the candidates of `best_of`."""

def check_output(output: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Check that `convert` may write `output`. Raises `ConfigError`."""

def convert(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str],
    config: EngineConfig,
    host: Host,
    *,
    overwrite: bool = False,
    progress: Callable[[int, int], object] | None = None,
) -> None:
    """Write a converted model, with the `dtype` and the `quantization` of `config`; see `penstock.convert`.

    Raises `ConfigError`, `ModelLoadError`, `OSError`, and any exception that `progress` raises.
    """

def cuda_info(cuda_folders: Sequence[str | os.PathLike[str]]) -> CudaInfo:
    """The driver, devices, compiler and cuBLASLt, searched in these folders; see `penstock.cuda_info`."""

def has_large_stack() -> bool:
    """Whether the calling thread has a stack of at least 4 MiB, so that it needs no `call_deep`."""

def resolve_device(config: EngineConfig, cuda_folders: Sequence[str | os.PathLike[str]]) -> str:
    """The device that computes for this configuration, such as `"cpu"` or `"cuda:0"`.

    Searches the compiler in these folders first. Raises `DeviceUnavailableError`.
    """

def describe(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The metadata of a model, with `config` and `generation_config` as JSON; see `penstock.describe`.

    Raises `ModelLoadError`.
    """

def score(result: Result) -> Score:
    """The score of the prompt, from the result of a scoring request.

    Raises `EngineStoppedError` if the engine was closed before the prompt was scored, and `GenerationError`
    if only a part of the prompt was scored.
    """
