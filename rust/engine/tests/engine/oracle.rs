//! What a request must answer, whatever happens around it: its tokens follow from its seed and from what every position
//! before them holds, which follows from the tokens there.

use penstock_engine::{FinishReason, Limits, Request, Sampling, Token};

use crate::random::mix;

pub const VOCABULARY: u32 = 24;

/// What a position holds: of its token, and of what was read before it. As with a rope that is stretched for long
/// prompts, the prompt's length matters where `max_shared_len` says it does.
pub fn digest(before: Option<u64>, position: usize, token: u32, prompt_len: usize, limits: &Limits) -> u64 {
    let is_stretched = prompt_len > limits.max_shared_len || position >= limits.max_shared_len;
    let stretch = if is_stretched { prompt_len as u64 } else { 0 };
    mix(before.unwrap_or(7) ^ mix(u64::from(token) << 32 | position as u64) ^ mix(stretch << 16))
}

/// The token after `read`.
pub fn sample(request: &Request, index: u32, suppress_stops: bool, read: impl Iterator<Item = u64>) -> Token {
    let context = read.fold(0, |context, cell| mix(context ^ cell));
    let draw = mix(context ^ request.sampling.seed ^ mix(u64::from(index)));
    let mut id = (draw % u64::from(VOCABULARY)) as u32;
    while suppress_stops && request.stop_token_ids.contains(&id) {
        id = (id + 1) % VOCABULARY;
    }
    Token::new(id, -((draw >> 40) as f32))
}

/// The whole answer of a request that is left alone.
pub fn answer(request: &Request, limits: &Limits) -> (Vec<Token>, FinishReason) {
    let prompt_len = request.prompt.len();
    let (mut read, mut tokens) = (vec![], vec![]);
    let compute = |token: u32, read: &mut Vec<u64>| {
        read.push(digest(read.last().copied(), read.len(), token, prompt_len, limits));
    };
    request.prompt.iter().for_each(|token| compute(*token, &mut read));
    while tokens.len() < request.max_tokens && prompt_len + tokens.len() < limits.max_model_len {
        let suppress_stops = tokens.len() < request.min_tokens;
        let token = sample(request, tokens.len() as u32, suppress_stops, read.iter().copied());
        let id = token.id;
        tokens.push(token);
        if !suppress_stops && request.stop_token_ids.contains(&id) {
            return (tokens, FinishReason::Stop(id));
        }
        compute(id, &mut read);
    }
    (tokens, FinishReason::Length)
}

/// A request without stops; tests change what they care about.
pub fn request(num_prompt: usize, max_tokens: usize, seed: u64) -> Request {
    let token = |position: usize| (mix(seed ^ position as u64) % u64::from(VOCABULARY)) as u32;
    let prompt: Vec<u32> = (0..num_prompt).map(token).collect();
    Request::new(prompt, max_tokens, Sampling { seed, ..Sampling::default() })
}
