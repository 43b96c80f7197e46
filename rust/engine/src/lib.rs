//! The Penstock engine: an actor that owns the scheduler, the block pool and every sequence.
//!
//! It knows no model, no Python, no GPU and no clock: whatever computes is behind [`Executor`], whoever consumes is
//! behind a [`Port`], and time is an argument.
//!
//! ```text
//!   caller ── Engine::start_request ──▶ mailbox ──▶ engine thread ──▶ Executor::submit ──▶ whatever computes
//!                                          ▲     (core, scheduler,                              │
//!                                          │      blocks, prefixes, sequences)                  │
//!                                          └────────────── Completions::send ◀──────────────────┘
//!   caller ◀── Consumer::pop ◀── result queue ◀──── events │ ring
//!   caller ◀── Port::wait ◀───────── bell ◀────────────────┘
//! ```
//!
//! To use an engine, the names below are all there is. The modules are public for those who implement the executor's
//! side and for the simulation and the model checks in `tests/`, which drive [`core::Core`] without a thread.

mod actor;
pub mod core;
mod drafts;
pub mod executor;
mod handle;
pub mod kv;
pub mod limits;
pub mod mailbox;
pub mod message;
pub mod port;
pub mod prefix;
pub mod request;
pub mod result_queue;
mod scheduler;
mod sequence;
pub mod stats;
mod sync;

pub use executor::{
    DEPTH, Executor, NewSequence, RowOutput, Sample, ScheduledRow, StepDone, StepError, StepOutput, StepPlan,
};
pub use handle::{Consumer, Engine, EngineError, StartError};
pub use limits::{InvalidRequest, Limits, PreemptionMode};
pub use mailbox::Completions;
pub use penstock_types::{BlockCopy, BlockId, HostBlockId, OutputScope, RequestedOutputs, Sampling};
pub use port::Port;
pub use request::{
    CachedTokens, Event, Finish, FinishReason, Grammar, GrammarState, LogitsProcessor, PromptPosition,
    Rejection, Request, RequestId, StopCause, Token, TokenDetails,
};
pub use stats::{StatEntry, StatKind, Stats};
