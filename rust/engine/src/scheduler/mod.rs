//! The scheduler: selects the sequences that run, and the number of tokens that each computes in the next step.
//!
//! There is one order, by [`SchedulingKey`](crate::sequence::SchedulingKey): priority, then arrival. Waiting sequences
//! are admitted in it (`admission`), the tokens of a step are distributed along it (`budget`), and blocks go to the
//! first in it at the cost of the last (`preemption`). A request that cannot end before its deadline is rejected on
//! arrival (`backlog`). If several clients compete, the sequences of one priority are in the order of the clients'
//! shares first (`clients`). A running sequence has a slot and blocks for the tokens it has; blocks for the tokens
//! still to come are allocated one at a time.
//!
//! Every request ends: of the sequences whose consumers read, the first in the order gets every block it needs, because
//! the others are preempted one by one, and alone it fits, as was checked when it arrived. So it is computed in every
//! step until it ends, and then another sequence is the first. It is not preempted for the share of another client,
//! since the last of a client's sequences is, and no client loses its only one.
//!
//! One choice of a group computes the prompt; the others reuse its blocks (`queue`). Draft tokens use the remaining
//! step budget (`rows`). Decoding, a chunk of a prompt, and recomputation after preemption are all "pending tokens";
//! there are no phases.

mod adapters;
mod admission;
mod backlog;
mod budget;
mod clients;
mod integrity;
mod preemption;
mod queue;
mod rows;
#[expect(clippy::module_inception, reason = "the type has the name of its module")]
mod scheduler;
mod slots;

pub use scheduler::Scheduler;
