//! The result of a lookup in the prefix cache.

use crate::prefix_cache::NodeId;
use crate::request::CachedTokens;

/// The longest cached prefix of a sequence. Valid until the next change of the KV cache.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PrefixMatch {
    /// Its blocks: first those in the KV cache, then those in the host tier.
    pub(super) nodes: Vec<NodeId>,
    /// The number of blocks in the KV cache.
    pub(super) num_on_device: usize,
    pub(super) block_size: usize,
}

impl PrefixMatch {
    /// The number of tokens, by the tier that holds them.
    pub fn cached(&self) -> CachedTokens {
        let host = self.nodes.len() - self.num_on_device;
        CachedTokens { device: self.num_on_device * self.block_size, host: host * self.block_size }
    }

    /// The number of blocks in the host tier.
    pub(super) fn num_on_host(&self) -> usize {
        self.nodes.len() - self.num_on_device
    }

    /// Keeps at most the first `num_blocks` blocks.
    pub(super) fn truncate(&mut self, num_blocks: usize) {
        self.nodes.truncate(num_blocks);
        self.num_on_device = self.num_on_device.min(num_blocks);
    }
}
