//! The allocation of the KV cache: assigns blocks to tokens. It handles block ids only; the executor has the bytes.
//!
//! ```text
//!              ┌────────────── free (not published) ───────────────────┐
//!              ▼                                                       │
//!   free ──────┬─ allocate ─▶ in use ─────── publish ─▶ in use and in the prefix cache
//!    ▲         │                 ▲                              │
//!    │ evict,  │                 └─ allocate (a hit) ◀── cached ◀── free (by the last user)
//!    └─expire──┼──────────────────────────────────────────┘ │ evict, while the host tier has room
//!              │                                            ▼
//!              └──────────── allocate (a hit: Load) ◀── host tier ◀─▶ swap_out, allocate (a preempted sequence)
//! ```
//!
//! Free and cached blocks are available. Some of them are reserved for sequences that are still to grow. `block_pool`
//! counts blocks, the [prefix cache](crate::prefix_cache) knows their contents, `host_pool` counts the blocks of the
//! host tier. The scheduler calls [`KvCacheManager`], which combines the three. Its interface is in tokens; it decides
//! how many blocks hold them and which of the blocks a sequence still needs.
//!
//! **Plans run in the order they are submitted, and the copies of a plan run before its rows.** Every decision here may
//! rely on earlier plans having run and on earlier copies having been made: a freed block may be allocated again at
//! once although a step in flight still reads or writes it, and a block may be evicted, saved and filled by another
//! sequence in one plan. Only the output of a plan is not known before its step is done: blocks are published then.

mod block_pool;
mod block_table;
mod host_pool;
mod integrity;
mod manager;
mod prefix_match;
mod publish;
mod sharing;
mod swap;

pub use block_table::BlockTable;
pub use host_pool::SwappedBlocks;
pub use manager::{Demand, KvAllocation, KvCacheManager, LoadLimit};
#[cfg(feature = "testing")]
pub use prefix_match::PrefixMatch;
pub use sharing::BlockKey;
