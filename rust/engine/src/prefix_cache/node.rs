//! The nodes of the prefix cache.

use std::time::Instant;

use penstock_types::{BlockId, HostBlockId};

/// Names a node for as long as it is in the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeId(pub(super) u32);

/// Names a namespace for as long as it has blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NamespaceId(pub(super) u32);

/// The index that names no node: the end of a list, an empty bucket, or a block that is not cached.
pub(super) const NONE: u32 = u32::MAX;

/// The block that holds a node's contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Location {
    /// In the KV cache.
    Device(BlockId),
    /// In the host tier.
    Host(HostBlockId),
}

/// The predecessor of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Parent {
    /// The block has no predecessor: it is the first of a sequence in this namespace.
    Namespace(NamespaceId),
    Node(NodeId),
}

/// One cached block, with its links in three lists.
#[derive(Debug)]
pub(super) struct Node {
    pub hash: u128,
    pub parent: Parent,
    pub namespace: NamespaceId,
    /// Neighbours in the list of the namespace.
    pub previous_in_namespace: u32,
    pub next_in_namespace: u32,
    pub location: Location,
    /// The step whose plan loads it from the host; 0 if it was computed where it is.
    pub loaded_in: u64,
    /// The time at which its last reference was released.
    pub last_used: Instant,
    pub is_listed: bool,
    /// Neighbours in the LRU list of its tier.
    pub older: u32,
    pub newer: u32,
    pub next_in_bucket: u32,
}
