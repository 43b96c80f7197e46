//! What a request asks for and what comes back: plain values, no behaviour beyond their validation.
//!
//! A request enters as [`Request`], is checked against [`Limits`](crate::limits::Limits) on the caller's thread, and answers
//! with a stream of [`Event`]s that ends in exactly one [`Event::Refused`] or [`Event::Finished`].

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Names one request for as long as the engine lives. Made by the engine, never by a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// How the next token is chosen from the logits. Validated by the caller of the engine; see each field's range.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 means greedy (the highest logit, the lowest id among equals). Finite, >= 0.
    pub temperature: f32,
    /// Keep this many of the most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Keep the smallest set of most likely tokens whose probabilities sum to at least this. In (0, 1].
    pub top_p: f32,
    /// Keep tokens at least this share as likely as the most likely one. In [0, 1].
    pub min_p: f32,
    /// With the position of the sampled token, the whole key of the random draw.
    pub seed: u64,
    /// Whether the chosen token's log probability is computed.
    pub logprobs: bool,
}

/// One request, ready for the engine: token ids only, every default resolved.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Prompt token ids; at least one.
    pub prompt: Vec<u32>,
    /// Generate at most this many tokens; at least one.
    pub max_tokens: usize,
    /// No stop token can be chosen before this many tokens have been generated.
    pub min_tokens: usize,
    /// Token ids that end the request when generated (end-of-sequence ids included, unless the user ignores them).
    pub stop_token_ids: Vec<u32>,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// The lower, the sooner it gets a place and the later it loses it. It buys no place to wait: see
    /// [`Refusal::Overloaded`].
    pub priority: i32,
    /// Whether it takes blocks from the prefix cache and leaves its own there.
    pub prefix_cache: bool,
    /// Blocks are shared only between requests of the same salt.
    pub cache_salt: Option<Arc<str>>,
}

/// Why a request ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// This stop token was generated (it is the last token of the output).
    Stop(u32),
    /// `max_tokens` or the model's length was reached.
    Length,
    /// The consumer cancelled it or went away, or the engine was closed while it ran.
    Cancelled,
    /// Others needed its blocks, and the engine was told to end it then (`OnExhaustion::Interrupt`).
    Interrupted,
    /// The step it was part of failed; the text says how. Other requests go on.
    Failed(String),
    /// The engine stopped (a defect on its own thread); nothing more can come.
    EngineStopped,
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
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Token {
    /// Its id in the vocabulary.
    pub id: u32,
    /// Natural log of its probability under the softmax of the raw logits; NaN unless asked for.
    pub logprob: f32,
}

/// What a consumer receives, in this order: `Admitted`, any number of `Token`, `Finished`; or `Refused` alone.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The request waits or runs; it will be computed.
    Admitted,
    /// The request was not taken; nothing was computed.
    Refused(Refusal),
    /// The next generated token.
    Token(Token),
    /// Nothing follows.
    Finished(Finish),
}

/// Why the engine did not take a request that was valid in itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// As many requests wait as may wait, and it cannot run at once. Whatever its priority: a request that was admitted
    /// is never dropped for a more urgent arrival.
    Overloaded {
        /// Requests waiting now, those that lost a place among them.
        waiting: usize,
        /// The most that may wait (`max_waiting`).
        limit: usize,
    },
    /// The engine is closed or closing.
    Stopped,
}

impl fmt::Display for RequestId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "request {}", self.0)
    }
}
