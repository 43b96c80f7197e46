//! Parameters that exclude each other.

use serde_json::{Value as JsonValue, json};

use super::read;

/// The field that the conflict is reported for, and the start of its limit.
fn conflict(fields: &JsonValue) -> Option<(&'static str, String)> {
    let params = read(fields).unwrap_or_else(|error| panic!("{fields}: {error}"));
    params.check().err().map(|error| (error.field, error.limit))
}

fn tools() -> JsonValue {
    json!([{"type": "function", "function": {"name": "look_up"}}])
}

#[test]
fn conflicts_name_the_field_and_the_reason() {
    let named = json!({"type": "function", "function": {"name": "other"}});
    let cases = [
        (json!({"min_tokens": 3, "max_tokens": 2}), "min_tokens", "at most max_tokens, 2"),
        (json!({"min_tokens": 3, "max_length": 2}), "min_tokens", "at most max_length, 2"),
        (json!({"n": 3, "best_of": 2}), "best_of", "at least n, 3"),
        (json!({"n": 3, "num_beams": 2}), "n", "at most num_beams, 2"),
        (json!({"num_beams": 2, "best_of": 2}), "best_of", "left out when num_beams is above 1"),
        (json!({"length_penalty": 2.0}), "length_penalty", "left out when num_beams is 1"),
        (json!({"num_beams": 2, "seed": 1}), "seed", "left out when num_beams is above 1"),
        (json!({"num_beams": 2, "temperature": 0.5}), "temperature", "left out when num_beams is above 1"),
        (json!({"top_logprobs": 2}), "top_logprobs", "left out when logprobs is False"),
        (json!({"logprobs_mode": "processed"}), "logprobs_mode", "left out when logprobs is False"),
        (
            json!({"cache_salt": "a", "use_prefix_cache": false}),
            "cache_salt",
            "left out when use_prefix_cache",
        ),
        (json!({"regex": "a", "choice": ["a"]}), "choice", "left out when regex is given"),
        (
            json!({"ignore_eos": true, "eos_token_ids": []}),
            "eos_token_ids",
            "left out when ignore_eos is True: end tokens do not end the output",
        ),
        (
            json!({"eos_token_ids": [], "regex": "a"}),
            "eos_token_ids",
            "at least one id when regex is given: an end token ends the output",
        ),
        (
            json!({"tools": tools(), "tool_choice": "required", "eos_token_ids": []}),
            "eos_token_ids",
            "at least one id when tool_choice is given: an end token ends the output",
        ),
        (json!({"grammar": "a: b", "ignore_eos": true}), "ignore_eos", "left out when grammar is given"),
        (json!({"tool_choice": "auto"}), "tool_choice", "left out when tools is not given"),
        (json!({"tools": tools(), "regex": "a"}), "regex", "left out when tools can be called"),
        (
            json!({"tools": tools(), "tool_choice": "required", "ignore_eos": true}),
            "ignore_eos",
            "False when tool_choice requires a call",
        ),
        (
            json!({"tools": tools(), "tool_choice": named}),
            "tool_choice",
            "the name of one of the tools: 'look_up'",
        ),
        (
            json!({"allowed_token_ids": [3, 1], "bad_token_ids": [1, 2, 3]}),
            "allowed_token_ids",
            "at least one id that is not in bad_token_ids",
        ),
    ];
    for (fields, field, limit) in cases {
        let found = conflict(&fields).unwrap_or_else(|| panic!("{fields} has no conflict"));
        assert_eq!(found.0, field, "{fields}");
        assert!(found.1.starts_with(limit), "{fields}: {}", found.1);
    }
}

#[test]
fn parameters_that_only_look_like_conflicts_are_allowed() {
    for fields in [
        json!({}),
        json!({"min_tokens": 2, "max_tokens": 2}),
        json!({"n": 2, "best_of": 2}),
        json!({"num_beams": 3, "n": 3, "temperature": 0, "length_penalty": 2.0}),
        json!({"logprobs_mode": "processed", "prompt_logprobs": 0}),
        json!({"response_format": {"type": "text"}, "regex": "a"}),
        json!({"response_format": {"type": "text"}, "ignore_eos": true}),
        json!({"tools": tools(), "tool_choice": "none", "regex": "a"}),
        json!({"tools": tools(), "ignore_eos": true}),
        json!({"allowed_token_ids": [3, 4], "bad_token_ids": [1, 2, 3]}),
    ] {
        assert_eq!(conflict(&fields), None, "{fields}");
    }
}
