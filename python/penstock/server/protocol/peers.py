"""Fields that vLLM, SGLang and LMDeploy add to OpenAI's requests, and that the server does not have."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["PEER_ALIASES", "PEER_FIELDS", "PEER_LABELS"]

#: Fields with another name here.
PEER_ALIASES = {"min_new_tokens": "min_tokens", "no_stop_trim": "include_stop_str_in_output"}
#: Fields that are accepted and have no effect: they describe the request, concern media, which are refused
#: where they stand, or choose the size of chunks.
PEER_LABELS = frozenset(
    {
        "custom_labels",
        "images_config",
        "max_dynamic_patch",
        "media_io_kwargs",
        "min_dynamic_patch",
        "mm_processor_kwargs",
        "return_mm_kwargs",
        "return_token_offsets",
        "rid",
        "routed_experts_prompt_start",
        "routed_experts_start_len",
        "session_id",
        "stream_interval",
        "use_audio_in_video",
    }
)
_NO_RANKS = "0 or left out: the server has one replica of the model"
_NO_TRANSFER = "left out: the KV cache is not transferred between servers"
_NO_EXTENSIONS = "left out: the server has no extensions"
_NO_REPETITION = "0 or left out: the server does not look for repetitions"
#: The values that each field may have, and that limit in words.
PEER_FIELDS: Mapping[str, tuple[tuple[object, ...], str]] = {
    "bootstrap_host": ((), _NO_TRANSFER),
    "bootstrap_port": ((), _NO_TRANSFER),
    "bootstrap_room": ((), _NO_TRANSFER),
    "custom_logit_processor": ((), "left out: requests have no code"),
    "custom_params": (({},), _NO_EXTENSIONS),
    "data_parallel_rank": ((0,), _NO_RANKS),
    "disagg_prefill_dp_rank": ((0,), _NO_RANKS),
    "ebnf": ((), "left out: use grammar, which is Lark or GBNF, or regex or response_format"),
    "ec_transfer_params": (({},), _NO_TRANSFER),
    "extra_key": ((), "left out: use cache_salt"),
    "image_data": (([],), "left out: the model reads text only"),
    "input_ids": ((), "left out: /v1/completions takes token ids as the prompt"),
    "kv_transfer_params": (({},), _NO_TRANSFER),
    "kwargs": (({},), "left out: its entries are fields of the request"),
    "logprob_token_ids": ((), "left out: use top_logprobs"),
    "ngram_corpus_id": ((), "left out: the server has no corpora"),
    "prompt_embeds": ((), "left out: prompts are texts or token ids"),
    "repetition_detection": ((), "left out: the server does not look for repetitions"),
    "repetition_ngram_size": ((0,), _NO_REPETITION),
    "repetition_ngram_threshold": ((0,), _NO_REPETITION),
    "return_cached_tokens_details": ((False,), "false: usage has the number of cached tokens"),
    "return_hidden_states": ((False,), "false: hidden states are not returned"),
    "return_logprob": ((False,), "false: use logprobs"),
    "return_meta_info": ((False,), "false: usage has the token counts"),
    "return_prompt_text": ((False,), "false: /tokenize returns the prompt"),
    "return_prompt_token_ids": ((False,), "false: use return_token_ids"),
    "return_routed_experts": ((False,), "false: experts are not reported"),
    "routed_dp_rank": ((0,), _NO_RANKS),
    "separate_reasoning": ((True,), "true: reasoning_parser of the engine decides"),
    "session_params": (({},), "left out: the server has no sessions"),
    "stop_regex": (("", []), "left out: use stop"),
    "stream_reasoning": ((True,), "true: use include_reasoning"),
    "thinking_token_budget": ((-1,), "-1 or left out: the reasoning has no limit of its own"),
    "vllm_xargs": (({},), _NO_EXTENSIONS),
    "watermarking": ((False,), "false: texts have no watermark"),
}
