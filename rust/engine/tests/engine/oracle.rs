//! What a request must answer, whatever happens around it: tokens are a pure function of its seed and their index.

use penstock_engine::{FinishReason, Limits, Request, Sampling, Token};

use crate::random::mix;

pub const VOCABULARY: u32 = 24;

pub fn sample(request: &Request, index: u32, suppress_stops: bool) -> Token {
    let draw = mix(request.sampling.seed ^ mix(u64::from(index)));
    let mut id = (draw % u64::from(VOCABULARY)) as u32;
    while suppress_stops && request.stop_token_ids.contains(&id) {
        id = (id + 1) % VOCABULARY;
    }
    Token { id, logprob: -((draw >> 40) as f32) }
}

/// The whole answer of a request that is left alone.
pub fn answer(request: &Request, limits: &Limits) -> (Vec<Token>, FinishReason) {
    let mut tokens = Vec::new();
    while tokens.len() < request.max_tokens && request.prompt.len() + tokens.len() < limits.max_model_len {
        let suppress_stops = tokens.len() < request.min_tokens;
        let token = sample(request, tokens.len() as u32, suppress_stops);
        tokens.push(token);
        if !suppress_stops && request.stop_token_ids.contains(&token.id) {
            return (tokens, FinishReason::Stop(token.id));
        }
    }
    (tokens, FinishReason::Length)
}

/// A request without stops; tests change what they care about.
pub fn request(num_prompt: usize, max_tokens: usize, seed: u64) -> Request {
    let sampling = Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed, logprobs: true };
    let prompt = (0..num_prompt).map(|position| (mix(seed ^ position as u64) % u64::from(VOCABULARY)) as u32);
    Request {
        prompt: prompt.collect(),
        max_tokens,
        min_tokens: 0,
        stop_token_ids: vec![],
        sampling,
        priority: 0,
        prefix_cache: true,
        cache_salt: None,
    }
}
