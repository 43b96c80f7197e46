//! The Penstock engine: an actor that owns the scheduler, the KV cache's blocks and every sequence.
//!
//! It knows no model, no Python, no GPU and no clock: an [`Executor`] computes steps, consumers listen on a [`Port`],
//! and time is an argument.
//!
//! ```text
//!   caller ── Engine::start_request ──▶ mailbox ──▶ engine thread ──▶ Executor::submit ──▶ executor
//!                                          ▲     (core, scheduler,                            │
//!                                          │      blocks, prefixes, sequences)                │
//!                                          └───────────── Completions::send ◀─────────────────┘
//!   caller ◀── Consumer::pop ◀── result queue ◀──── events │ ring
//!   caller ◀── Port::wait ◀───────── bell ◀────────────────┘
//! ```

#![allow(missing_docs)]

mod actor;
mod drafts;
mod ending;
mod engine_core;
pub mod executor;
mod handle;
mod histogram;
mod kv_cache;
mod kv_events;
pub mod limits;
mod mailbox;
mod message;
mod output_budget;
mod port;
mod prefix_cache;
mod process;
pub mod request;
mod result_queue;
mod scheduler;
mod sequence;
mod share;
mod start_error;
pub mod stats;
pub mod step;
mod stop;
mod sync;

/// The parts of the engine, for tests that drive them without a thread.
#[cfg(feature = "testing")]
pub mod testing {
    pub use crate::engine_core::EngineCore;
    pub use crate::kv_cache::{
        BlockTable, Demand, KvAllocation, KvCacheManager, LoadLimit, PrefixMatch, SwappedBlocks,
    };
    pub use crate::kv_events::{KvFeedReader, kv_feed};
    pub use crate::mailbox::{CancelSet, Gate};
    pub use crate::message::{Message, NewAdapter, Outbox, Start};
    pub use crate::prefix_cache::{BlockHasher, Chain, Namespace, Tokens};
    pub use crate::result_queue::{CancelCause, CancelFlag, Reader, Writer, num_pops, result_queue};
    pub use crate::sequence::SchedulingKey;
    pub use crate::stats::SharedStats;
}

#[cfg(feature = "testing")]
pub use actor::check_when_idle;
pub use executor::{Executor, StepDone, StepError};
pub use handle::{Consumer, Engine, EngineError, Hold, KvEvents};
pub use histogram::Histogram;
pub use kv_events::{KvBatch, KvEvent, KvNamespace, KvRead, KvTier};
pub use limits::{InvalidRequest, Limits};
pub use mailbox::Completions;
pub use message::AdapterError;
pub use output_budget::Reservation;
pub use penstock_types::{
    BlockCopy, BlockId, HostBlockId, OutputScope, PreemptionMode, PreemptionVictim, RequestedOutputs,
    Sampling,
};
pub use port::{Port, RawBell};
pub use process::Process;
pub use request::{
    AdapterId, AdapterUse, CachedTokens, ClientId, Event, Finish, FinishReason, Grammar, GrammarState,
    LogitsProcessor, Overload, PromptPosition, Rejection, Request, RequestId, StopCause,
};
pub use start_error::StartError;
pub use stats::{StatEntry, StatKind, Stats};
pub use step::{AdapterChange, DEPTH, NewSequence, RowOutput, Sample, ScheduledRow, StepOutput, StepPlan};
