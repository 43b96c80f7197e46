//! What a request asks for and what comes back: plain values, no behaviour beyond their validation.
//!
//! A request enters as [`Request`], is checked against [`Limits`](crate::limits::Limits) on the caller's thread, and answers
//! with a stream of [`Event`]s that ends in exactly one [`Event::Rejected`] or [`Event::Finished`].

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use penstock_types::{RequestedOutputs, Sampling};

/// Names one request for as long as the engine lives. Made by the engine, never by a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// Keeps the sequences of a request within a grammar.
pub trait Grammar: Send + Sync + fmt::Debug {
    /// The state of a sequence without a generated token. Called on the device thread.
    fn start(&self) -> Result<Box<dyn GrammarState>, String>;
}

/// Where one sequence stands in a grammar. What goes wrong ends its request, and no other.
pub trait GrammarState: Send {
    /// Sets the bits of the ids that may come next, bit `id % 32` of word `id / 32`, and clears all others.
    fn mask(&mut self, allowed: &mut [u32]) -> Result<(), String>;
    /// This token came.
    fn accept(&mut self, token: u32) -> Result<(), String>;
    /// Appends the tokens that can only come next, one after the other; most often none.
    fn forced(&mut self, tokens: &mut Vec<u32>);
    /// A copy of the state that advances apart from this one.
    fn fork(&self) -> Result<Box<dyn GrammarState>, String>;
}

/// Changes logits before anything else does. Called on the device thread, where it keeps everybody waiting.
pub trait LogitsProcessor: Send + Sync + fmt::Debug {
    /// `logits` are those of the next token; a failure ends the request, and no other.
    fn process(&self, prompt: &[u32], generated: &[u32], logits: &mut [f32]) -> Result<(), String>;
}

/// One request, ready for the engine: token ids only, every default resolved.
#[derive(Clone, Debug)]
pub struct Request {
    /// Prompt token ids; at least one.
    pub prompt: Arc<[u32]>,
    /// Generate at most this many tokens; 0 only where the prompt is reported on.
    pub max_tokens: usize,
    /// No stop token can be chosen, and no stop sequence ends the request, before this many tokens have been generated.
    pub min_tokens: usize,
    /// Token ids that end the request when generated (end-of-sequence ids included, unless the user ignores them).
    pub stop_token_ids: Vec<u32>,
    /// Sequences of ids, none empty, that end the request when its output ends with one.
    pub stop_token_sequences: Vec<Vec<u32>>,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// What else is told.
    pub outputs: RequestedOutputs,
    /// What its output must be.
    pub grammar: Option<Arc<dyn Grammar>>,
    /// Called one after the other.
    pub processors: Vec<Arc<dyn LogitsProcessor>>,
    /// The lower, the sooner it gets a place and the later it loses it. It buys no place to wait: see
    /// [`Rejection::Overloaded`].
    pub priority: i32,
    /// Whether it takes blocks from the prefix cache and leaves its own there.
    pub prefix_cache: bool,
    /// Blocks are shared only between requests of the same salt.
    pub cache_salt: Option<Arc<str>>,
}

impl Request {
    /// A request with nothing special about it.
    pub fn new(prompt: impl Into<Arc<[u32]>>, max_tokens: usize, sampling: Sampling) -> Self {
        Self {
            prompt: prompt.into(),
            max_tokens,
            min_tokens: 0,
            stop_token_ids: Vec::new(),
            stop_token_sequences: Vec::new(),
            sampling,
            outputs: RequestedOutputs::default(),
            grammar: None,
            processors: Vec::new(),
            priority: 0,
            prefix_cache: true,
            cache_salt: None,
        }
    }
}

/// Why a request ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// This stop token was generated (it is the last token of the output).
    Stop(u32),
    /// The output ends with this one of `stop_token_sequences`.
    StopSequence(usize),
    /// `max_tokens` or the model's length was reached.
    Length,
    /// The consumer cancelled it or went away, or the engine was closed while it ran.
    Cancelled,
    /// Others needed its blocks, and the engine was told to end it then (`PreemptionMode::Interrupt`).
    Interrupted,
    /// The step it was part of failed; the text says how. Other requests go on.
    Failed(String),
    /// The engine crashed or lost its device while the request was open.
    EngineStopped(StopCause),
}

/// Why an engine takes no more requests.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StopCause {
    /// It was closed.
    #[error("the engine is closed")]
    Closed,
    /// Its thread panicked.
    #[error("the engine crashed (a bug); create a new one")]
    Crashed,
    /// The device is gone, for this reason.
    #[error("the device was lost: {0}; create a new engine")]
    DeviceLost(Arc<str>),
}

/// Tokens found in the prefix cache, by where they were.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CachedTokens {
    /// In the KV cache itself.
    pub device: usize,
    /// In the host tier.
    pub host: usize,
}

/// The last word on a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finish {
    /// Why it ended.
    pub reason: FinishReason,
    /// Prompt tokens that the prefix cache had when it got its first place.
    pub cached: CachedTokens,
    /// From arrival to the first step that computed any of it; zero if none did.
    pub queued: Duration,
    /// From arrival to its first generated token; `None` if there was none.
    pub first_token: Option<Duration>,
    /// From arrival to the end.
    pub total: Duration,
}

/// One generated token.
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    /// Its id in the vocabulary.
    pub id: u32,
    /// Natural log of its probability; NaN unless asked for.
    pub logprob: f32,
    /// What else was asked for.
    pub details: Option<Box<TokenDetails>>,
}

impl Token {
    /// One of which no details are told.
    pub fn new(id: u32, logprob: f32) -> Self {
        Self { id, logprob, details: None }
    }

    /// Moves it out, details and all.
    pub(crate) fn take(&mut self) -> Self {
        Self { details: self.details.take(), ..*self }
    }
}

/// One position of the prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct PromptPosition {
    /// Natural log of the probability of the prompt token that follows; NaN unless asked for, or where none follows.
    pub logprob: f32,
    /// What else was asked for.
    pub details: Option<Box<TokenDetails>>,
}

impl PromptPosition {
    /// Moves it out, details and all.
    pub(crate) fn take(&mut self) -> Self {
        Self { details: self.details.take(), ..*self }
    }
}

/// What is told of a position besides the token that follows it; empty where not asked for.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenDetails {
    /// Ids and log probabilities of the most likely tokens, the most likely first.
    pub top: Vec<(u32, f32)>,
    /// Raw logits, one an id.
    pub logits: Vec<f32>,
    /// The last hidden state.
    pub hidden_state: Vec<f32>,
}

/// What a consumer receives, in this order: `Admitted`, any number of `Prompt`, then of `Token`, `Finished`; or `Refused`
/// alone.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The request waits or runs; it will be computed.
    Admitted,
    /// The request was not taken; nothing was computed.
    Rejected(Rejection),
    /// The next positions of the prompt, of those that are reported on: all but the last, which the first token's details
    /// tell of, or all where no token is generated.
    Prompt(Vec<PromptPosition>),
    /// The next generated token.
    Token(Token),
    /// Nothing follows.
    Finished(Finish),
}

/// Why the engine did not take a request that was valid in itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rejection {
    /// As many requests wait as may wait, and it cannot run at once. Whatever its priority: a request that was admitted
    /// is never dropped for a more urgent arrival.
    Overloaded {
        /// Requests waiting now, those that lost a place among them.
        waiting: usize,
        /// The most that may wait (`max_waiting`).
        limit: usize,
    },
    /// The engine has stopped or is stopping.
    Stopped(StopCause),
}

impl fmt::Display for RequestId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "request {}", self.0)
    }
}
