//! Requests and their events: plain values.
//!
//! A [`Request`] is checked against the [`Limits`](crate::limits::Limits) on the caller's thread. Its [`Event`]s end
//! with exactly one [`Event::Rejected`] or [`Event::Finished`].

#![warn(missing_docs)]

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use penstock_types::{OutputScope, RequestedOutputs, Sampling, Token, TokenDetails, Unread};

/// Identifies a request of this process: no two engines assign the same id. Ids increase.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// Identifies an adapter of an engine. Ids are not used again, so an adapter that is loaded again has another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AdapterId(pub u64);

/// Identifies a client of an engine, such as the owner of an API key. Clients that compete get equal shares of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClientId(pub u64);

/// A grammar that constrains the output of a request.
pub trait Grammar: Send + Sync + fmt::Debug {
    /// The state before the first generated token. It is made in the thread that computes its first mask.
    fn start(&self) -> Result<Box<dyn GrammarState>, String>;

    /// The bytes that [`start`](Self::start) copies.
    fn start_bytes(&self) -> usize {
        0
    }
}

/// The state of one sequence in a grammar. An error ends its request and no other.
pub trait GrammarState: Send {
    /// Sets the bits of the ids that are allowed next, bit `id % 32` of word `id / 32`, and clears all others.
    fn mask(&mut self, allowed: &mut [u32]) -> Result<(), String>;
    /// Advances by a token.
    fn accept(&mut self, token: u32) -> Result<(), String>;
    /// Appends the only tokens that are allowed next, in order; usually none.
    fn forced(&mut self, tokens: &mut Vec<u32>);
    /// A copy of the state that advances apart from this one.
    fn fork(&self) -> Result<Box<dyn GrammarState>, String>;
}

/// Changes logits before all other sampling parameters. Called on the device thread: every request waits for it.
pub trait LogitsProcessor: Send + Sync + fmt::Debug {
    /// `logits` are those of the next token. An error ends the request and no other.
    fn process(&self, prompt: &[u32], generated: &[u32], logits: &mut [f32]) -> Result<(), String>;
}

/// A request with token ids and resolved defaults.
#[derive(Clone, Debug)]
pub struct Request {
    /// Prompt token ids; at least one.
    pub prompt: Arc<[u32]>,
    /// The most tokens to generate; 0 only if outputs of the prompt are requested.
    pub max_tokens: usize,
    /// No stop token is sampled, and no stop sequence ends the request, before this many tokens have been generated.
    pub min_tokens: usize,
    /// Token ids that end the request when generated, end-of-sequence ids included.
    pub stop_token_ids: Vec<u32>,
    /// Non-empty sequences of ids that end the request when its output ends with one of them.
    pub stop_token_sequences: Vec<Vec<u32>>,
    /// The parameters of sampling.
    pub sampling: Sampling,
    /// Outputs besides the tokens.
    pub outputs: RequestedOutputs,
    /// The grammar that constrains the output.
    pub grammar: Option<Arc<dyn Grammar>>,
    /// The processors, which are called in this order.
    pub processors: Vec<Arc<dyn LogitsProcessor>>,
    /// Lower values are scheduled first and preempted last. They do not help against a full queue: see
    /// [`Rejection::Overloaded`].
    pub priority: i32,
    /// The client that it is for. Requests without one are those of one client.
    pub client: Option<ClientId>,
    /// The time by which it must end. A request that cannot end by then is rejected on arrival. The engine does not end
    /// it at its deadline: its consumer cancels it.
    pub deadline: Option<Instant>,
    /// Whether it uses the prefix cache.
    pub prefix_cache: bool,
    /// Blocks are shared only between requests with the same salt.
    pub cache_salt: Option<Arc<str>>,
    /// The low-rank updates of the model's matrices. Blocks are shared only between requests with the same adapter.
    pub adapter: Option<AdapterId>,
    /// Whether it pauses when its result queue is full, or has a queue for all its events.
    pub unread: Unread,
    /// The most bytes that the tensors and logprobs of all its choices take; see
    /// [`Limits::max_output_bytes`](crate::Limits::max_output_bytes).
    pub output_bytes: usize,
}

impl Request {
    /// A request without optional parameters.
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
            client: None,
            deadline: None,
            prefix_cache: true,
            cache_salt: None,
            adapter: None,
            unread: Unread::Pause,
            output_bytes: 0,
        }
    }

    /// The seed of a choice: that of the first choice plus its index.
    pub fn choice_seed(&self, choice: u32) -> u64 {
        self.sampling.seed.wrapping_add(u64::from(choice))
    }

    /// The outputs of a choice: only the first has those of the prompt.
    pub fn choice_outputs(&self, choice: u32) -> RequestedOutputs {
        if choice == 0 {
            return self.outputs;
        }
        let generated = |scope: Option<OutputScope>| {
            scope.filter(|scope| scope.has_generation()).map(|_| OutputScope::Generation)
        };
        let RequestedOutputs { logits, hidden_states, embeddings, .. } = self.outputs;
        RequestedOutputs {
            prompt_logprobs: None,
            logits: generated(logits),
            hidden_states: generated(hidden_states),
            embeddings: generated(embeddings),
            ..self.outputs
        }
    }

    /// A copy whose first choice equals the given one of this request.
    #[cfg(feature = "testing")]
    pub fn of_choice(&self, choice: u32) -> Self {
        let mut request = self.clone();
        request.sampling.seed = self.choice_seed(choice);
        request.outputs = self.choice_outputs(choice);
        request
    }
}

/// The reason for the end of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// This stop token was generated (it is the last token of the output).
    Stop(u32),
    /// The output ends with the stop sequence of this index.
    StopSequence(usize),
    /// `max_tokens` or the model's length was reached.
    Length,
    /// The consumer has found a stop string.
    StopString,
    /// The consumer cancelled or was dropped, or the engine was closed.
    Cancelled,
    /// It was preempted with `PreemptionMode::Interrupt`.
    Interrupted,
    /// Its consumer did not read, and more than `max_paused` sequences were paused. It was the one paused for longest
    /// of the client with the most.
    Unread,
    /// Its step failed, with this message. Other requests continue.
    Failed(String),
    /// The engine crashed or lost its device while the request was open.
    EngineStopped(StopCause),
}

/// The reason why an engine takes no more requests.
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
    /// The handle was copied by a fork from this process, which has the engine's threads.
    #[error("the engine was opened in process {0}, before a fork; open an engine in each process")]
    Forked(u32),
}

/// Tokens found in the prefix cache, by tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CachedTokens {
    /// In the KV cache.
    pub device: usize,
    /// In the host tier.
    pub host: usize,
}

/// The end of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finish {
    /// The reason why the output ended.
    pub reason: FinishReason,
    /// Prompt tokens that the prefix cache had when the request was first scheduled.
    pub cached: CachedTokens,
    /// The time from arrival to the first step that computed a token of the request; zero if none did.
    pub queued: Duration,
    /// The time from arrival to the first generated token; `None` if there was none.
    pub first_token: Option<Duration>,
    /// The time from arrival to the end.
    pub total: Duration,
}

/// One position of the prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct PromptPosition {
    /// Natural logarithm of the probability of the next prompt token; NaN unless requested, or if there is none.
    pub logprob: f32,
    /// The other outputs that were requested of this position.
    pub details: Option<Box<TokenDetails>>,
}

impl PromptPosition {
    /// Takes the position with its details, and leaves it without.
    pub(crate) fn take(&mut self) -> Self {
        Self { details: self.details.take(), ..*self }
    }
}

/// An event that a consumer receives: `Admitted`, any number of `Prompt`, any number of `Token`, and `Finished`; or
/// only `Rejected`.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The request waits or runs.
    Admitted,
    /// The request was not admitted.
    Rejected(Rejection),
    /// The next positions of the prompt with requested outputs: all but the last, which the first token's details
    /// cover, or all if no token is generated.
    Prompt(Vec<PromptPosition>),
    /// The next generated token.
    Token(Token),
    /// The last event: nothing follows it.
    Finished(Finish),
}

/// The reason why the engine did not admit a valid request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rejection {
    /// The waiting queue is full, and the request cannot run at once. Whatever its priority: an admitted request is
    /// never dropped for a new one.
    Overloaded {
        /// Requests waiting now that were never scheduled. The choices of a request count once.
        waiting: usize,
        /// The most that may wait (`max_waiting`).
        limit: usize,
    },
    /// The waiting requests and the preempted sequences together are too many.
    TooManyPreempted {
        /// Requests waiting now that were never scheduled, and preempted sequences without the paused ones.
        waiting: usize,
        /// The most that may wait (`max_waiting` and `max_num_seqs` together).
        limit: usize,
    },
    /// With its choices, more sequences would be unfinished than may be.
    TooManyUnfinished {
        /// Sequences that wait or run now, without the paused ones.
        unfinished: usize,
        /// The choices of the request.
        choices: usize,
        /// The most that may wait or run (`max_unfinished`).
        limit: usize,
    },
    /// Its prompt and those before it in the queue take longer than the time until its deadline.
    TooLate {
        /// The estimate of the least time until its end.
        least: Duration,
        /// The time until its deadline.
        left: Duration,
    },
    /// The adapter is not registered, or is being removed.
    UnknownAdapter {
        /// The adapters that take requests.
        num_adapters: usize,
    },
    /// The engine has stopped or is stopping.
    Stopped(StopCause),
}

/// The bound that a new request would exceed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overload {
    /// More requests would wait than `max_waiting` allows.
    Waiting,
    /// More sequences would be unfinished than `max_unfinished` allows.
    Unfinished,
}

/// The use of an adapter at the moment. The engine thread writes it; any thread can read it.
#[derive(Debug, Default)]
pub struct AdapterUse {
    num_running: AtomicUsize,
    num_waiting: AtomicUsize,
    is_on_device: AtomicBool,
    is_removed: AtomicBool,
}

// Relaxed: the numbers are independent, and nothing else is read because of them.
impl AdapterUse {
    /// Sequences with the adapter that have a slot.
    pub fn num_running(&self) -> usize {
        self.num_running.load(Ordering::Relaxed)
    }

    /// Sequences with the adapter that wait for a slot.
    pub fn num_waiting(&self) -> usize {
        self.num_waiting.load(Ordering::Relaxed)
    }

    /// Whether the adapter is on the device, from the next step on.
    pub fn is_on_device(&self) -> bool {
        self.is_on_device.load(Ordering::Relaxed)
    }

    /// Whether the engine has removed the adapter.
    pub fn is_removed(&self) -> bool {
        self.is_removed.load(Ordering::Relaxed)
    }

    pub(crate) fn note_removal(&self) {
        self.is_removed.store(true, Ordering::Relaxed);
    }

    pub(crate) fn set(&self, num_running: usize, num_waiting: usize, is_on_device: bool) {
        self.num_running.store(num_running, Ordering::Relaxed);
        self.num_waiting.store(num_waiting, Ordering::Relaxed);
        self.is_on_device.store(is_on_device, Ordering::Relaxed);
    }
}

impl fmt::Display for AdapterId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "adapter {}", self.0)
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "request {}", self.0)
    }
}
