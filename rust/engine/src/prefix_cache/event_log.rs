//! [`EventLog`]: the KV events since the last hand-over, and the hashes of the nodes in them.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::hash::BlockHasher;
use super::namespace::{Label, Namespace};
use super::node::{Location, Node, Parent};
use crate::kv_events::{KvBatch, KvEvent, KvFeedWriter, KvNamespace, KvTier};
use crate::request::AdapterId;

/// Words that separate the parts of a namespace in the message that is hashed. A byte is below them.
const AFTER_ADAPTER: u32 = 256;
const AFTER_SALT: u32 = 257;

/// The adapters whose blocks are announced, with their names. One that was replaced or unloaded is not among them: no
/// new request finds its blocks.
pub(super) type Announced = BTreeMap<AdapterId, Arc<str>>;

/// The events since the last hand-over. There is a log while there are readers.
pub(super) struct EventLog {
    pub hashes: Hashes,
    pub batch: KvBatch,
    pub writers: Vec<KvFeedWriter>,
}

/// The hashes of the nodes in events. Unlike [`Node::hash`], they do not depend on the process.
pub(super) struct Hashes {
    hasher: BlockHasher,
    /// By the index of the node.
    pub of_nodes: Vec<u64>,
}

impl Hashes {
    pub(super) fn new(key: u128, capacity: usize) -> Self {
        Self { hasher: BlockHasher::new(key), of_nodes: vec![0; capacity] }
    }

    /// The label of a namespace; `None` if its blocks are not announced.
    pub(super) fn label(&self, namespace: &Namespace, announced: &Announced) -> Option<Label> {
        let adapter = match namespace.adapter {
            None => None,
            Some(id) => Some((id, Arc::clone(announced.get(&id)?))),
        };
        let mut words = Vec::new();
        for (part, end) in
            [(adapter.as_ref().map(|(_, name)| name), AFTER_ADAPTER), (namespace.salt.as_ref(), AFTER_SALT)]
        {
            if let Some(part) = part {
                words.extend(part.bytes().map(u32::from));
                words.push(end);
            }
        }
        let hash = self.hasher.hash(0, &words) as u64;
        Some(Label { hash, namespace: Arc::new(KvNamespace { adapter, salt: namespace.salt.clone() }) })
    }

    /// Computes the hash of a node, whose parent has one.
    pub(super) fn add(&mut self, index: u32, node: &Node, label: &Label, tokens: &[u32]) {
        let parent = match node.parent {
            Parent::Namespace(_) => label.hash,
            Parent::Node(parent) => self.of_nodes[parent.0 as usize],
        };
        self.of_nodes[index as usize] = self.hasher.hash(parent.into(), tokens) as u64;
    }

    /// The event that a node is stored where it is.
    pub(super) fn stored(&self, index: u32, node: &Node, label: &Label) -> KvEvent {
        let parent = match node.parent {
            Parent::Namespace(_) => None,
            Parent::Node(parent) => Some(self.of_nodes[parent.0 as usize]),
        };
        let hash = self.of_nodes[index as usize];
        KvEvent::Stored { hash, parent, tier: tier(node.location), namespace: Arc::clone(&label.namespace) }
    }
}

/// The tier of a location in events.
pub(super) fn tier(location: Location) -> KvTier {
    match location {
        Location::Device(_) => KvTier::Device,
        Location::Host(_) => KvTier::Host,
    }
}
