//! The expected output of a request. Its tokens are a function of its seed and of the contents of all positions before
//! them, which are a function of the tokens there.

use std::sync::Arc;

use penstock_engine::{AdapterId, FinishReason, Grammar, GrammarState, Limits, PromptPosition, Request};
use penstock_types::{PackedAdapter, Sampling};
use penstock_types::{Token, TokenDetails};

use crate::random::mix;

pub const VOCABULARY: u32 = 24;

/// The contents of a position, from its token, the adapter, and from the contents before it. As with dynamic rope
/// scaling, the prompt's length matters beyond `max_shared_len`.
pub fn digest(
    before: Option<u64>,
    position: usize,
    token: u32,
    (prompt_len, adapter): (usize, Option<AdapterId>),
    limits: &Limits,
) -> u64 {
    let is_stretched = prompt_len > limits.max_shared_len || position >= limits.max_shared_len;
    let stretch = if is_stretched { prompt_len as u64 } else { 0 };
    let update = adapter.map_or(0, |adapter| mix(!adapter.0));
    mix(before.unwrap_or(7) ^ update ^ mix(u64::from(token) << 32 | position as u64) ^ mix(stretch << 16))
}

/// The token after `read`. The tokens of every fourth seed mostly repeat in a cycle.
pub fn sample(request: &Request, index: u32, suppress_stops: bool, read: impl Iterator<Item = u64>) -> Token {
    let context = context(read);
    let seed = request.sampling.seed;
    let draw = mix(context ^ seed ^ mix(u64::from(index)));
    let is_cyclic = seed % 4 == 3 && !(draw >> 32).is_multiple_of(8);
    let chosen = if is_cyclic { mix(seed ^ u64::from(index % 5)) } else { draw };
    let mut id = (chosen % u64::from(VOCABULARY)) as u32;
    while suppress_stops && request.stop_token_ids.contains(&id) {
        id = (id + 1) % VOCABULARY;
    }
    Token::new(id, -((draw >> 40) as f32))
}

fn context(read: impl Iterator<Item = u64>) -> u64 {
    read.fold(0, |context, cell| mix(context ^ cell))
}

/// The prompt outputs of a position; `read` are the contents up to it.
pub fn position(request: &Request, position: usize, read: impl Iterator<Item = u64>) -> PromptPosition {
    let context = context(read);
    let next = request.prompt.get(position + 1).map_or(0, |token| u64::from(*token));
    let details = TokenDetails { top: vec![(context as u32, position as f32)], ..TokenDetails::default() };
    PromptPosition { logprob: -((mix(context ^ next) >> 40) as f32), details: Some(Box::new(details)) }
}

/// The contents of all positions of the prompt.
fn read_prompt(request: &Request, limits: &Limits) -> Vec<u64> {
    let mut read: Vec<u64> = vec![];
    for (position, token) in request.prompt.iter().enumerate() {
        let model = (request.prompt.len(), request.adapter);
        read.push(digest(read.last().copied(), position, *token, model, limits));
    }
    read
}

/// All prompt outputs of a request.
pub fn positions(request: &Request, limits: &Limits) -> Vec<PromptPosition> {
    let num_positions = if request.max_tokens == 0 { request.prompt.len() } else { request.prompt.len() - 1 };
    let num_positions = if request.outputs.has_prompt() { num_positions } else { 0 };
    let read = read_prompt(request, limits);
    (0..num_positions).map(|index| position(request, index, read[..=index].iter().copied())).collect()
}

/// The whole output of a request that is not cancelled.
pub fn expected_output(request: &Request, limits: &Limits) -> (Vec<Token>, FinishReason) {
    let prompt_len = request.prompt.len();
    let (mut read, mut tokens, mut ids) = (read_prompt(request, limits), vec![], vec![]);
    while tokens.len() < request.max_tokens && prompt_len + tokens.len() < limits.max_model_len {
        let suppress_stops = tokens.len() < request.min_tokens;
        let token = sample(request, tokens.len() as u32, suppress_stops, read.iter().copied());
        let id = token.id;
        tokens.push(token);
        ids.push(id);
        if !suppress_stops && request.stop_token_ids.contains(&id) {
            return (tokens, FinishReason::Stop(id));
        }
        let is_end = |sequence: &Vec<u32>| ids.len() >= request.min_tokens && ids.ends_with(sequence);
        if let Some(sequence) = request.stop_token_sequences.iter().position(is_end) {
            return (tokens, FinishReason::StopSequence(sequence));
        }
        let model = (prompt_len, request.adapter);
        read.push(digest(read.last().copied(), read.len(), id, model, limits));
    }
    (tokens, FinishReason::Length)
}

/// A request without stops.
pub fn request(num_prompt: usize, max_tokens: usize, seed: u64) -> Request {
    let token = |position: usize| (mix(seed ^ position as u64) % u64::from(VOCABULARY)) as u32;
    let prompt: Vec<u32> = (0..num_prompt).map(token).collect();
    Request::new(prompt, max_tokens, Sampling { seed, ..Sampling::default() })
}

/// An adapter that the fake device tells from others.
pub fn weights(adapter: u64) -> Arc<PackedAdapter> {
    let mut weights = PackedAdapter::new(Vec::new(), 8).unwrap();
    weights.bytes_mut().copy_from_slice(&adapter.to_le_bytes());
    Arc::new(weights)
}

/// A grammar whose forced tokens the fake device computes.
#[derive(Debug)]
pub struct Rails;

impl Grammar for Rails {
    fn start(&self) -> Result<Box<dyn GrammarState>, String> {
        unreachable!("the fake device does not call it")
    }
}
