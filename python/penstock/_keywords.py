"""Errors for unknown keyword arguments: names the right one, also for the names that other engines use."""

from __future__ import annotations

import difflib

__all__ = ["synonym", "unknown"]

#: The least similarity of a misspelt name, as `difflib` defines it.
CUTOFF = 0.75

#: Names that vLLM, SGLang, LMDeploy, TensorRT-LLM, llama-cpp-python and transformers use for a field of
#: `EngineConfig`, and former names of Penstock.
ENGINE_SYNONYMS = {
    "device_map": "device",
    "device_type": "device",
    "torch_dtype": "dtype",
    "hf_overrides": "config_overrides",
    "json_model_override_args": "config_overrides",
    "rope_freq_base": "config_overrides",
    "rope_freq_scale": "config_overrides",
    "rope_parameters": "config_overrides",
    "rope_scaling": "config_overrides",
    "rope_scaling_factor": "config_overrides",
    "rope_scaling_type": "config_overrides",
    "rope_theta": "config_overrides",
    "n_threads": "threads",
    "n_threads_batch": "threads",
    "num_threads": "threads",
    "context_length": "max_model_len",
    "ctx_size": "max_model_len",
    "max_context_length": "max_model_len",
    "max_seq_len": "max_model_len",
    "max_seq_length": "max_model_len",
    "n_ctx": "max_model_len",
    "session_len": "max_model_len",
    "max_batch_size": "max_num_seqs",
    "max_running_requests": "max_num_seqs",
    "n_parallel": "max_num_seqs",
    "n_seq_max": "max_num_seqs",
    "chunked_prefill_size": "max_num_batched_tokens",
    "long_prefill_token_threshold": "max_prefill_chunk",
    "max_num_tokens": "max_num_batched_tokens",
    "max_prefill_token_num": "max_num_batched_tokens",
    "max_prefill_tokens": "max_num_batched_tokens",
    "n_batch": "max_num_batched_tokens",
    "n_ubatch": "max_num_batched_tokens",
    "num_tokens_per_iter": "max_num_batched_tokens",
    "max_queue_size": "max_waiting",
    "max_queued_requests": "max_waiting",
    "cache_block_seq_len": "block_size",
    "page_size": "block_size",
    "tokens_per_block": "block_size",
    "cache_dtype": "kv_cache_dtype",
    "quant_policy": "kv_cache_dtype",
    "type_k": "kv_cache_dtype",
    "type_v": "kv_cache_dtype",
    "kv_cache_memory_bytes": "kv_cache_bytes",
    "max_total_tokens": "kv_cache_bytes",
    "num_gpu_blocks": "kv_cache_blocks",
    "num_gpu_blocks_override": "kv_cache_blocks",
    "cache_max_entry_count": "kv_cache_ratio",
    "free_gpu_memory_fraction": "kv_cache_ratio",
    "gpu_memory_utilization": "memory_ratio",
    "kv_cache_free_gpu_mem_fraction": "kv_cache_ratio",
    "mem_fraction_static": "memory_ratio",
    "enable_block_reuse": "prefix_cache",
    "enable_prefix_caching": "prefix_cache",
    "enable_hierarchical_cache": "host_cache_bytes",
    "hicache_ratio": "host_cache_bytes",
    "hicache_size": "host_cache_bytes",
    "host_cache_size": "host_cache_bytes",
    "num_cpu_blocks": "host_cache_blocks",
    "swap_space": "host_cache_bytes",
    "on_exhaustion": "preemption_mode",
    "tokenizer_path": "tokenizer",
    "speculative_algorithm": "speculation",
    "speculative_config": "speculation",
    "num_assistant_tokens": "num_speculative_tokens",
    "prompt_lookup_num_tokens": "num_speculative_tokens",
    "speculative_num_draft_tokens": "num_speculative_tokens",
    "tool_call_parser": "tool_parser",
    "lora_max_num": "max_adapters",
    "max_loras": "max_adapters",
    "max_loras_per_batch": "max_adapters",
    "lora_max_rank": "max_adapter_rank",
    "max_lora_rank": "max_adapter_rank",
    "max_cpu_loras": "max_cpu_adapters",
    "max_loaded_loras": "max_cpu_adapters",
}
ENGINE_HINTS = {
    "cache_dir": "set the environment variable HF_HOME instead",
    "chat_format": "pass chat_template, the path of a file",
    "cpu_offload_gb": "all weights are in the memory of the device; quantization='int8' makes them smaller",
    "disable_radix_cache": "use prefix_cache=False",
    "download_dir": "set the environment variable HF_HOME instead",
    "dp_size": "parallelism across devices is not supported",
    "draft_model": "draft models are not supported; use speculation='ngram', which needs none",
    **dict.fromkeys(
        ("embedding", "is_embedding", "runner", "task"),
        "each model has engine.embed(), and engine.rerank() if it is one",
    ),
    "enable_auto_tool_choice": "tool calls are parsed whenever a request has tools; see tool_parser",
    "enable_chunked_prefill": "chunked prefill is always on; max_num_batched_tokens limits a step",
    "disable_log_stats": "statistics are not logged; read engine.stats()",
    "enforce_eager": "CUDA graphs cannot be disabled; results are the same with them",
    "adapters": "use max_adapters, and await engine.load_adapter(name, path)",
    "enable_lora": "use max_adapters",
    "flash_attn": "attention is always computed in tiles; no option selects another implementation",
    "guided_decoding_backend": "there is one grammar backend",
    "load_in_4bit": "use quantization='int4'",
    "load_in_8bit": "use quantization='int8'",
    "load_format": "the format is detected from the files",
    "logits_all": "use prompt_logprobs of a request, or engine.score(...)",
    "lora_path": "use max_adapters, and await engine.load_adapter(name, path)",
    "lora_paths": "use max_adapters, and await engine.load_adapter(name, path)",
    "main_gpu": "use device='cuda:1', with the index of the GPU",
    "model_path": "pass the model as the first argument",
    "n_gpu_layers": "use device='cuda', which computes all layers, or device='cpu'",
    "numa": "use numa_nodes, such as numa_nodes=[0]; see EngineConfig",
    "offload_kqv": "the KV cache is in the memory of the device",
    "pipeline_parallel_size": "parallelism across devices is not supported",
    "revision": "append it to the model's id: 'owner/name@revision'",
    "scheduling_policy": "priority of a request is always obeyed",
    "tokenizer_mode": "there is one kind of tokenizer",
    "skip_tokenizer_init": "a tokenizer is always loaded; prompts can be token ids",
    "tensor_parallel_size": "parallelism across devices is not supported",
    "tp": "parallelism across devices is not supported",
    "tp_size": "parallelism across devices is not supported",
    "trust_remote_code": "code from model repositories is never executed",
    "use_mlock": "memory cannot be locked",
    "use_mmap": "weights are always memory-mapped while they are loaded",
    "verbose": "use the logging module; the logger is named 'penstock'",
    "vocab_only": "penstock info reads the metadata of a model without its weights",
}
#: The same for a field of `SamplingParams`; the OpenAI API's names too.
REQUEST_SYNONYMS = {
    "num_return_sequences": "n",
    "beam_width": "num_beams",
    "use_beam_search": "num_beams",
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "min_length": "min_tokens",
    "min_new_tokens": "min_tokens",
    "temp": "temperature",
    "topk": "top_k",
    "topp": "top_p",
    "repeat_penalty": "repetition_penalty",
    "embedding_bias": "logit_bias",
    "bad": "bad_words",
    "bad_words_ids": "bad_token_sequences",
    "begin_suppress_tokens": "bad_token_ids",
    "suppress_tokens": "bad_token_ids",
    "stop_strings": "stop",
    "stop_words": "stop",
    "end_id": "stop_token_ids",
    "eos_token_id": "eos_token_ids",
    "stop_sequences_ids": "stop_token_sequences",
    "include_stop_in_output": "include_stop_str_in_output",
    "no_stop_trim": "include_stop_str_in_output",
    "random_seed": "seed",
    "sampling_seed": "seed",
    "output_scores": "logprobs",
    "return_log_probs": "logprobs",
    "return_logprob": "logprobs",
    "n_probs": "top_logprobs",
    "num_logprobs": "top_logprobs",
    "top_logprobs_num": "top_logprobs",
    "logprob_start_len": "prompt_logprobs",
    "return_generation_logits": "output_logits",
    "output_last_hidden_state": "output_hidden_states",
    "return_hidden_states": "output_hidden_states",
    "custom_logit_processor": "logits_processors",
    "logits_processor": "logits_processors",
    "prefix_allowed_tokens_fn": "logits_processors",
    "guided_json": "response_format",
    "json_schema": "response_format",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "choices": "choice",
    "ebnf": "grammar",
    "guided_grammar": "grammar",
    "functions": "tools",
    "function_call": "tool_choice",
    "prompt_cache_key": "cache_salt",
    "cache_prompt": "use_prefix_cache",
    "adapter_id": "adapter",
    "adapter_name": "adapter",
    "lora_name": "adapter",
}
REQUEST_HINTS = {
    "assistant_model": "draft models are not supported; use Engine(speculation='ngram')",
    "chat_format": "pass chat_template",
    "add_special_tokens": "encode the text first: engine.encode(text, add_special_tokens=...)",
    "detokenize": "text is always decoded; token ids are in token_ids",
    "do_sample": "use temperature=0 for greedy decoding, temperature > 0 for sampling",
    "dry_multiplier": "not supported; see logits_processors",
    "early_stopping": "a beam search stops when no running beam can be better",
    "enable_thinking": "use chat_template_kwargs={'enable_thinking': ...}",
    "eta_cutoff": "not supported; see logits_processors",
    "guidance_scale": "not supported; see logits_processors",
    "guided_decoding": "use response_format, regex, choice or grammar",
    "input_ids": "pass token ids as the prompt",
    "lora_path": "load it with await engine.load_adapter(name, path), and use adapter=name",
    "lora_request": "load it with await engine.load_adapter(name, path), and use adapter=name",
    "max_time": "put a timeout around the call: anyio.fail_after(seconds)",
    "mirostat_mode": "not supported; see logits_processors",
    "mirostat_tau": "not supported; see logits_processors",
    "messages": "of a batch, each prompt can be a list of messages; pass these as prompts",
    "output_kind": "chunks have the new output; result() has all of it",
    "prompt_token_ids": "pass token ids as the prompt",
    "prompts": "pass one prompt per call, or use generate_many(prompts)",
    "prompt_lookup_num_tokens": "use Engine(speculation='ngram', num_speculative_tokens=...)",
    "reasoning_effort": "use chat_template_kwargs={'reasoning_effort': ...}",
    "reset": "requests share no state",
    "request_id": "the id is assigned: request.id",
    "return_dict": "use result.to_dict()",
    "repeat_last_n": "repetition_penalty counts all tokens; see repetition_penalty_scope",
    "sampling_params": "pass the SamplingParams as the second argument",
    "stop_sequences": "use stop for strings, stop_token_sequences for token ids",
    "stopping_criteria": "read the stream and leave it when enough has been generated",
    "stream": "use engine.stream(...)",
    "streamer": "use engine.stream(...)",
    "structured_outputs": "use response_format, regex, choice or grammar",
    "suffix": "infilling is not supported; write the model's own infill format as the prompt",
    "suppress_repetition_in_generation": "use repetition_penalty_scope='output'",
    "tfs_z": "not supported; see logits_processors",
    "timeout": "put a timeout around the call: anyio.fail_after(seconds); without an event loop, use "
    "start_request(...).result(timeout=seconds)",
    "truncate_prompt_tokens": "truncate the token ids of the prompt: engine.encode(text)[-n:]",
    "user": "not supported",
    "use_cache": "the KV cache is always used; use_prefix_cache shares it between requests",
    "xtc_probability": "not supported; see logits_processors",
}


def synonym(keyword: str) -> str | None:
    """The field that another engine calls so."""
    return ENGINE_SYNONYMS.get(keyword) or REQUEST_SYNONYMS.get(keyword)


def unknown(class_name: str, keyword: str) -> TypeError:
    """The error for a keyword argument that the class does not have."""
    from penstock._options import EngineOptions, SamplingOptions

    if class_name == "EngineConfig":
        owner, fields, others = "Engine", EngineOptions.__annotations__, SamplingOptions.__annotations__
        synonyms, hints, elsewhere = ENGINE_SYNONYMS, ENGINE_HINTS, "a parameter of requests"
    else:
        owner, fields, others = "a request", SamplingOptions.__annotations__, EngineOptions.__annotations__
        synonyms, hints, elsewhere = REQUEST_SYNONYMS, REQUEST_HINTS, "an option of Engine"
    if keyword in others:
        hint = f"it is {elsewhere}"
    elif keyword in hints:
        hint = hints[keyword]
    elif meant := synonyms.get(keyword) or next(
        iter(difflib.get_close_matches(keyword, fields, 1, CUTOFF)), None
    ):
        hint = f"did you mean {meant}?"
    else:
        hint = f"see help(penstock.{class_name})"
    return TypeError(f"{owner} has no keyword {keyword!r}: {hint}")
