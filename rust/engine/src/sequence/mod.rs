//! A request inside the engine: its tokens, the number of computed ones, and the outbox for its events.
//!
//! There are no prefill and decode phases. A sequence has tokens, and its computed tokens catch up with them:
//!
//! ```text
//!   prompt ───────────────┬─ generated ──┬─ being sampled ┐
//!   0 ......... num_planned ......................... num_tokens
//!               └──────── pending ────────────────────────┘
//! ```
//!
//! `num_planned` tokens are computed or in a plan in flight. The last token may be unknown yet (a plan in flight
//! samples it): a row for it follows the sample instead of naming its input. Only a row whose tokens are all known may
//! end with draft tokens (`drafting`).
//!
//! A preempted sequence keeps its tokens and loses its computed state, except what the prefix cache or the host tier
//! has of it when it is scheduled again. It is not scheduled again while rows of it are in flight.

mod drafting;
mod planning;
mod prompt_outputs;
#[expect(clippy::module_inception, reason = "the type has the name of its module")]
mod sequence;

pub use sequence::SchedulingKey;
pub(crate) use sequence::{Arrival, ComputedTokens, GENERATED_AHEAD, Sequence};
