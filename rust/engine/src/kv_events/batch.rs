//! [`KvBatch`]: events in the order of the engine thread, with the tokens of the blocks.

use std::sync::Arc;

use crate::request::AdapterId;

/// The memory that holds a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum KvTier {
    /// The KV cache of the device.
    Device,
    /// The host tier.
    Host,
}

/// The requests that share a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvNamespace {
    /// Their adapter and its name.
    pub adapter: Option<(AdapterId, Arc<str>)>,
    /// Their `cache_salt`.
    pub salt: Option<Arc<str>>,
}

/// A change of the prefix cache.
///
/// A block has a hash of its tokens, of all tokens before them, of the adapter's name and of the salt. It is the same
/// in every engine with the same key and block size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvEvent {
    /// A block can be reused. Its tokens are in [`KvBatch::tokens`].
    Stored {
        hash: u64,
        /// The block before it, which is stored in some tier; `None` for the first block of a sequence.
        parent: Option<u64>,
        tier: KvTier,
        namespace: Arc<KvNamespace>,
    },
    /// A block has left this tier.
    Removed { hash: u64, tier: KvTier },
    /// All blocks have left both tiers.
    Cleared,
}

/// Events, oldest first.
#[derive(Clone, Debug, Default)]
pub struct KvBatch {
    pub events: Vec<KvEvent>,
    /// The tokens of the stored blocks, in the order of their events.
    pub tokens: Vec<u32>,
}

impl KvBatch {
    /// Adds the events of `other`.
    pub(super) fn append(&mut self, other: &Self) {
        if other.events.first() == Some(&KvEvent::Cleared) {
            self.clear(); // it removes the effect of all earlier events
        }
        self.events.extend_from_slice(&other.events);
        self.tokens.extend_from_slice(&other.tokens);
    }

    pub(crate) fn clear(&mut self) {
        self.events.clear();
        self.tokens.clear();
    }
}
