//! The books of the KV cache: which block holds whose tokens. Numbers only; the bytes live in the executor.
//!
//! ```text
//!              ┌───────────── give_back, not in the cache ─────────────┐
//!              ▼                                                       │
//!   free ──────┬─ take ─▶ held by lists ── publish ─▶ held and in the prefix cache
//!    ▲         │               ▲                              │
//!    │ evict,  │               └─── open (a hit) ◀── kept ◀───┘ give_back by the last list
//!    └─expire──┼───────────────────────────────────────┘ │ evict, while the host has room
//!              │                                         ▼
//!              └───────────── open (a hit: Load) ◀── host tier ◀─▶ save, restore (a sequence that lost its place)
//! ```
//!
//! What is free or only kept can be had; some of it is promised to lists that are still to grow. `pool` counts blocks,
//! [`prefix`](crate::prefix) knows their contents, `host` counts the host tier's blocks, and `memory` is all three in
//! one hand, for the scheduler.
//!
//! **Plans run in the order they are submitted, and a plan's copies before its work.** So whatever is decided here may
//! count on every plan submitted before to have been computed, and on every copy decided before to have been made:
//! a block that is given up may be handed out at once though a step in flight still reads or writes it; a block may be
//! evicted, saved, and filled by another owner in one and the same plan. Only what a plan *writes* must wait for its
//! answer before anybody else relies on it: blocks are published when the step that computed them is done.

mod host;
mod list;
mod memory;
mod pool;

pub use host::{HostPool, Saved};
pub use list::BlockList;
pub use memory::{Found, Memory};
pub use pool::BlockPool;
