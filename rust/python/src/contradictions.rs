//! How the fields of a request go together: what would do nothing, or undo another field, is refused by name.

use pyo3::prelude::*;

use crate::errors::Error;
use crate::fields::Field;
use crate::params::SamplingParams;
use crate::structure::{ResponseKind, ToolChoice};

/// What contradicts something else, if anything does.
pub fn check(params: &SamplingParams) -> Result<(), Error> {
    let found = lengths(params)
        .or_else(|| choices(params))
        .or_else(|| beams(params))
        .or_else(|| tokens(params))
        .or_else(|| reports(params))
        .or_else(|| idle(params))
        .or_else(|| structure(params))
        .or_else(|| tools(params));
    found.map_or(Ok(()), |(field, limit)| Err(refuse(params, field, limit)))
}

/// The error for a field of `params`; `limit` completes the sentence "it must be ...".
pub fn refuse(params: &SamplingParams, field: &'static str, limit: impl Into<String>) -> Error {
    Python::attach(|py| match Bound::new(py, params.clone()).and_then(|params| params.getattr(field)) {
        Ok(value) => Field::request(field).refuse(&value, limit),
        Err(error) => Error::Python(error),
    })
}

/// A field, and what it must be beside the others.
type Found = Option<(&'static str, String)>;

fn found(is_wrong: bool, field: &'static str, limit: impl Into<String>) -> Found {
    is_wrong.then(|| (field, limit.into()))
}

fn lengths(params: &SamplingParams) -> Found {
    let SamplingParams { min_tokens, max_tokens, max_length, .. } = *params;
    let bounds = [("max_tokens", max_tokens), ("max_length", max_length)];
    let (name, most) = bounds.into_iter().find(|(_, most)| most.is_some_and(|most| min_tokens > most))?;
    found(true, "min_tokens", format!("at most {name}, {}", most?))
}

fn choices(params: &SamplingParams) -> Found {
    let SamplingParams { n, best_of, num_beams, .. } = *params;
    found(best_of.is_some_and(|best_of| best_of < n), "best_of", format!("at least n, {n}")).or_else(|| {
        let limit = "left out where num_beams is above 1: a beam search chooses the best itself";
        found(best_of.is_some() && num_beams > 1, "best_of", limit)
    })
}

/// A beam search keeps the likeliest texts, so nothing is drawn, and a text is one token longer in each of its steps.
fn beams(params: &SamplingParams) -> Found {
    let SamplingParams { n, num_beams, length_penalty, .. } = *params;
    if num_beams == 1 {
        let limit = "left out where num_beams is 1: only a beam search compares texts of different lengths";
        return found(length_penalty != 1.0, "length_penalty", limit);
    }
    if n > num_beams {
        return found(true, "n", format!("at most num_beams, {num_beams}"));
    }
    let draws = [
        ("temperature", params.temperature.is_some_and(|temperature| temperature > 0.0)),
        ("top_k", params.top_k.is_some()),
        ("top_p", params.top_p.is_some()),
        ("min_p", params.min_p.is_some()),
        ("typical_p", params.typical_p.is_some()),
        ("seed", params.seed.is_some()),
    ];
    if let Some((field, _)) = draws.into_iter().find(|(_, draws)| *draws) {
        return found(true, field, "left out where num_beams is above 1: a beam search draws nothing");
    }
    let parts = [
        ("presence_penalty", params.presence_penalty != 0.0),
        ("frequency_penalty", params.frequency_penalty != 0.0),
        ("repetition_penalty_scope", params.repetition_penalty_scope != "all"),
        ("logits_processors", !params.logits_processors.0.is_empty()),
        ("tools", params.tools.is_some()),
        ("prompt_logprobs", params.prompt_logprobs.is_some()),
        ("echo", params.echo),
        ("output_logits", params.output_logits.is_some()),
        ("output_hidden_states", params.output_hidden_states.is_some()),
    ];
    let part = parts.into_iter().find_map(|(field, is_given)| is_given.then_some(field));
    let field = part.or_else(|| structures(params).first().copied())?;
    let limit = "left out where num_beams is above 1: a step of a beam search knows no answer, only a prompt";
    found(true, field, limit)
}

fn tokens(params: &SamplingParams) -> Found {
    let allowed = params.allowed_token_ids.as_ref()?;
    let mut bad = params.bad_token_ids.0.clone();
    bad.sort_unstable();
    let is_bad = |id: &u32| bad.binary_search(id).is_ok();
    let limit = "at least one id that is not in bad_token_ids";
    found(allowed.0.iter().all(is_bad), "allowed_token_ids", limit)
}

fn reports(params: &SamplingParams) -> Found {
    let has_none = !params.logprobs && params.prompt_logprobs.is_none();
    let limit = "left out where logprobs is False: set logprobs=True";
    found(!params.logprobs && params.top_logprobs.is_some(), "top_logprobs", limit).or_else(|| {
        let limit = "left out where there are neither logprobs nor prompt_logprobs";
        found(has_none && params.logprobs_mode != "raw", "logprobs_mode", limit)
    })
}

/// What another field leaves nothing to do for.
fn idle(params: &SamplingParams) -> Found {
    let is_spaced = params.spaces_between_special_tokens && params.skip_special_tokens;
    let limit = "left out where skip_special_tokens is True: there are none to put spaces between";
    found(is_spaced, "spaces_between_special_tokens", limit).or_else(|| {
        let is_salted = params.cache_salt.is_some() && !params.use_prefix_cache;
        found(is_salted, "cache_salt", "left out where use_prefix_cache is False: it only parts that cache")
    })
}

/// The end of a text of a given form is an end token, and it has to end it.
fn structure(params: &SamplingParams) -> Found {
    let named = structures(params);
    let calls = matches!(params.tool_choice, Some(ToolChoice::Required | ToolChoice::Function { .. }));
    match named[..] {
        [first, second, ..] => found(true, second, format!("left out where {first} is given")),
        [first] => found(params.ignore_eos, "ignore_eos", format!("False where {first} is given")),
        [] => found(calls && params.ignore_eos, "ignore_eos", "False where tool_choice asks for a call"),
    }
}

/// The fields that say what the text looks like.
fn structures(params: &SamplingParams) -> Vec<&'static str> {
    let format = params.response_format.as_ref();
    let given = [
        ("response_format", format.is_some_and(|format| format.kind != ResponseKind::Text)),
        ("regex", params.regex.is_some()),
        ("choice", params.choice.is_some()),
        ("grammar", params.grammar.is_some()),
    ];
    given.into_iter().filter_map(|(name, is_given)| is_given.then_some(name)).collect()
}

fn tools(params: &SamplingParams) -> Found {
    let Some(tools) = &params.tools else {
        let limit = "left out where there are no tools";
        return found(params.tool_choice.is_some(), "tool_choice", limit)
            .or_else(|| found(!params.parallel_tool_calls, "parallel_tool_calls", limit));
    };
    match &params.tool_choice {
        Some(ToolChoice::Function { name, .. }) if !tools.has(name) => {
            let names: Vec<_> = tools.functions.iter().map(|tool| format!("'{}'", tool.name)).collect();
            return found(true, "tool_choice", format!("the name of one of the tools: {}", names.join(", ")));
        }
        Some(ToolChoice::None) => return None,
        _ => {}
    }
    let structures = structures(params);
    let field = structures.first()?;
    found(true, field, "left out where tools may be called: a call has a form of its own")
}
