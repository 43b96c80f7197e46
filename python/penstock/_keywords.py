"""Keywords that nobody knows: an error that says which one was meant, in the words of others too."""

from __future__ import annotations

import difflib

__all__ = ["unknown"]

#: What the objects are called by those who use them.
_OWNERS = {"EngineConfig": "Engine", "SamplingParams": "a request"}
_PER_ENGINE = {
    "on_exhaustion": "did you mean preemption_mode?",
    "gpu_memory_utilization": "did you mean memory_ratio?",
    "cache_max_entry_count": "did you mean memory_ratio?",
    "enable_prefix_caching": "did you mean prefix_cache?",
    "max_batch_size": "did you mean max_num_seqs?",
    "session_len": "did you mean max_model_len?",
    "max_seq_len": "did you mean max_model_len?",
    "num_threads": "did you mean threads?",
}
_PER_REQUEST = {
    "stop_sequences_ids": "did you mean stop_token_sequences?",
    "stop_sequences": "did you mean stop or stop_token_sequences?",
    "include_stop_in_output": "did you mean include_stop_str_in_output?",
    "suppress_repetition_in_generation": "use repetition_penalty_scope='output'",
    "max_new_tokens": "did you mean max_tokens?",
    "max_completion_tokens": "did you mean max_tokens?",
    "min_new_tokens": "did you mean min_tokens?",
    "random_seed": "did you mean seed?",
    "stop_words": "did you mean stop?",
    "bad_words_ids": "did you mean bad_token_ids?",
    "functions": "did you mean tools?",
    "function_call": "did you mean tool_choice?",
    "guided_json": "did you mean response_format?",
    "guided_decoding": "did you mean response_format, regex, choice or grammar?",
    "structured_outputs": "did you mean response_format, regex, choice or grammar?",
    "guided_regex": "did you mean regex?",
    "guided_choice": "did you mean choice?",
    "guided_grammar": "did you mean grammar?",
    "stream": "use engine.stream(...)",
    "timeout": "put a deadline around the wait, as the guide shows",
}


def unknown(class_name: str, keyword: str) -> TypeError:
    """The error for a keyword that the class does not have."""
    from penstock._options import EngineOptions, SamplingOptions

    engine, request = EngineOptions.__annotations__, SamplingOptions.__annotations__
    is_engine = class_name == "EngineConfig"
    own, other = (engine, request) if is_engine else (request, engine)
    if keyword in other:
        hint = f"it is one of {_OWNERS['SamplingParams' if is_engine else 'EngineConfig']}"
    elif (known := (_PER_ENGINE if is_engine else _PER_REQUEST).get(keyword)) is not None:
        hint = known
    elif close := difflib.get_close_matches(keyword, own, n=1):
        hint = f"did you mean {close[0]}?"
    else:
        hint = f"{class_name} has them all"
    return TypeError(f"{_OWNERS[class_name]} has no keyword {keyword!r}: {hint}")
