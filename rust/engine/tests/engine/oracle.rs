//! What a request must answer, whatever happens around it: its tokens follow from its seed and from what every position
//! before them holds, which follows from the tokens there.

use penstock_engine::{
    FinishReason, Grammar, GrammarState, Limits, PromptPosition, Request, Token, TokenDetails,
};
use penstock_types::Sampling;

use crate::random::mix;

pub const VOCABULARY: u32 = 24;

/// What a position holds: of its token, and of what was read before it. As with a rope that is stretched for long
/// prompts, the prompt's length matters where `max_shared_len` says it does.
pub fn digest(before: Option<u64>, position: usize, token: u32, prompt_len: usize, limits: &Limits) -> u64 {
    let is_stretched = prompt_len > limits.max_shared_len || position >= limits.max_shared_len;
    let stretch = if is_stretched { prompt_len as u64 } else { 0 };
    mix(before.unwrap_or(7) ^ mix(u64::from(token) << 32 | position as u64) ^ mix(stretch << 16))
}

/// The token after `read`. Those of every fourth seed mostly go round in a circle.
pub fn sample(request: &Request, index: u32, suppress_stops: bool, read: impl Iterator<Item = u64>) -> Token {
    let context = context(read);
    let seed = request.sampling.seed;
    let draw = mix(context ^ seed ^ mix(u64::from(index)));
    let goes_round = seed % 4 == 3 && !(draw >> 32).is_multiple_of(8);
    let chosen = if goes_round { mix(seed ^ u64::from(index % 5)) } else { draw };
    let mut id = (chosen % u64::from(VOCABULARY)) as u32;
    while suppress_stops && request.stop_token_ids.contains(&id) {
        id = (id + 1) % VOCABULARY;
    }
    Token::new(id, -((draw >> 40) as f32))
}

fn context(read: impl Iterator<Item = u64>) -> u64 {
    read.fold(0, |context, cell| mix(context ^ cell))
}

/// What is told of a prompt's position, up to which was `read`.
pub fn position(request: &Request, position: usize, read: impl Iterator<Item = u64>) -> PromptPosition {
    let context = context(read);
    let next = request.prompt.get(position + 1).map_or(0, |token| u64::from(*token));
    let details = TokenDetails { top: vec![(context as u32, position as f32)], ..TokenDetails::default() };
    PromptPosition { logprob: -((mix(context ^ next) >> 40) as f32), details: Some(Box::new(details)) }
}

/// What a sequence holds once its prompt is computed.
fn read_prompt(request: &Request, limits: &Limits) -> Vec<u64> {
    let mut read: Vec<u64> = vec![];
    for (position, token) in request.prompt.iter().enumerate() {
        read.push(digest(read.last().copied(), position, *token, request.prompt.len(), limits));
    }
    read
}

/// All that a request is told of its prompt.
pub fn positions(request: &Request, limits: &Limits) -> Vec<PromptPosition> {
    let told = if request.max_tokens == 0 { request.prompt.len() } else { request.prompt.len() - 1 };
    let told = if request.outputs.has_prompt() { told } else { 0 };
    let read = read_prompt(request, limits);
    (0..told).map(|index| position(request, index, read[..=index].iter().copied())).collect()
}

/// The whole answer of a request that is left alone.
pub fn answer(request: &Request, limits: &Limits) -> (Vec<Token>, FinishReason) {
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
        read.push(digest(read.last().copied(), read.len(), id, prompt_len, limits));
    }
    (tokens, FinishReason::Length)
}

/// A request without stops; tests change what they care about.
pub fn request(num_prompt: usize, max_tokens: usize, seed: u64) -> Request {
    let token = |position: usize| (mix(seed ^ position as u64) % u64::from(VOCABULARY)) as u32;
    let prompt: Vec<u32> = (0..num_prompt).map(token).collect();
    Request::new(prompt, max_tokens, Sampling { seed, ..Sampling::default() })
}

/// A grammar whose states the device makes up: it knows what comes next.
#[derive(Debug)]
pub struct Rails;

impl Grammar for Rails {
    fn start(&self) -> Result<Box<dyn GrammarState>, String> {
        unreachable!("nobody samples here")
    }
}
