//! Blocks of the KV cache and of the host tier, and the copies between them.

/// Index of a block of the KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct BlockId(pub u32);

/// Index of a block of the host tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct HostBlockId(pub u32);

/// A copy of one block, all layers, between the KV cache and the host tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockCopy {
    /// From the KV cache to the host tier.
    Save {
        /// The source.
        from: BlockId,
        /// The destination.
        to: HostBlockId,
    },
    /// From the host tier to the KV cache.
    Load {
        /// The source.
        from: HostBlockId,
        /// The destination.
        to: BlockId,
    },
}
