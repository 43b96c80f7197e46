//! The prefix cache: full blocks that are kept for reuse, found by the tokens they hold and all tokens before.
//!
//! ```text
//!   namespace ─┬─ "You are" ─┬─ "a helpful" ── "assistant" ┄┄ "in Rome"      ── in the KV cache   ┄┄ on the host
//!              │             └─ "a pirate"
//!              └─ "Write a"
//! ```
//!
//! A node is one block. It is referenced by running sequences, or it is in the LRU list of its tier. One rule makes
//! every operation O(blocks touched):
//!
//! > **A sequence that references a block references all blocks before it, and releases the last one first.**
//!
//! So no ancestor of a referenced block is unreferenced; in a list a block comes before its parent; the least recently
//! used block of a list is a leaf; and the expired blocks are the least recently used. Eviction, expiry and the move to
//! the host take from the old end of a list and never search.
//!
//! This module knows contents only. [`kv_cache`](crate::kv_cache) keeps track of free blocks and of the tables that
//! contain a block.

mod cache;
mod chain;
mod event_log;
mod events;
mod hash;
mod integrity;
mod lru;
mod namespace;
mod node;

pub use cache::PrefixCache;
pub use chain::{Chain, Tokens};
pub use hash::BlockHasher;
pub use namespace::Namespace;
pub use node::{Location, NodeId};
