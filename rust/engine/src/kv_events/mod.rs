//! KV events: the changes of the prefix cache, for routers that send a request where its prefix is cached.
//!
//! The prefix cache records an event for each block that it stores, moves or removes. Once per iteration the engine
//! thread hands the new events to each reader, through a slot with one batch:
//!
//! ```text
//! engine   take the unread batch back, or an empty one ─ add the new events ─ put it into the slot ─ ring
//! reader                                    wait ─ clear ─ take the batch ─ read it ─ give its memory back
//! ```
//!
//! So the engine thread never waits for a reader, and a slow reader finds all unread events in one batch. If they
//! become too many, the reader has lost them: it gets [`KvEvent::Cleared`] and the whole tree, as a new reader does.
//!
//! Events are recorded, and blocks hashed for them, only while there is a reader.

mod batch;
mod feed;

pub use batch::{KvBatch, KvEvent, KvNamespace, KvTier};
pub use feed::{KvFeedReader, KvFeedWriter, KvRead, kv_feed};
