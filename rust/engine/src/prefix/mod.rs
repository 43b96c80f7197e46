//! The prefix cache: full blocks that are kept to be used again, found by the tokens they hold and all tokens before.
//!
//! ```text
//!   namespace ─┬─ "You are" ─┬─ "a helpful" ── "assistant" ┄┄ "in Rome"      ── in the KV cache   ┄┄ on the host
//!              │             └─ "a pirate"
//!              └─ "Write a"
//! ```
//!
//! A node is one block. Nobody holds it (it waits in the list of its tier, oldest use first) or some sequences do (it
//! is in no list). One rule makes everything here O(blocks touched):
//!
//! > **Whoever holds a block holds all blocks before it, and lets go of the last one first.**
//!
//! So nothing above a held block is ever unheld; in a list a block comes before the one it continues, however it was
//! used; the oldest of a list is a leaf; and the expired ones are the oldest. Eviction, expiry and the move to the host
//! take from the old end of a list and never search.
//!
//! It keeps the books of contents only. Who holds what and which blocks are free is [`kv`](crate::kv)'s to say.

mod chain;
mod hash;
mod integrity;
mod list;
mod namespace;

use std::time::{Duration, Instant};

use penstock_types::{BlockId, HostBlockId};

pub use chain::{Chain, Tokens};
pub use hash::{BlockHasher, HashFunction};
pub use namespace::{Namespace, NamespaceId};

use list::List;
use namespace::Namespaces;

/// Names a node for as long as it is in the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeId(u32);

/// No node.
const NONE: u32 = u32::MAX;

/// Where a block's bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In the KV cache.
    Device(BlockId),
    /// In the host tier.
    Host(HostBlockId),
}

/// What a block continues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parent {
    /// Nothing: it is the first of its chain.
    Namespace(NamespaceId),
    /// This one.
    Node(NodeId),
}

#[derive(Debug)]
struct Node {
    hash: u128,
    parent: Parent,
    place: Place,
    /// The step whose plan loads it from the host; 0 if it was computed where it is.
    loaded_in: u64,
    /// When its last holder let go of it.
    last_used: Instant,
    is_listed: bool,
    /// Neighbours in the list of its tier.
    older: u32,
    newer: u32,
    next_in_bucket: u32,
}

/// See the module.
///
/// Invariants: a node is in the bucket of its hash; `node_of` names exactly the nodes in the KV cache; a listed node's
/// parent is listed behind it in the same list, or on the device; a node on the device has no parent on the host.
pub struct PrefixCache {
    block_size: usize,
    ttl: Duration,
    hasher: BlockHasher,
    nodes: Vec<Node>,
    /// The tokens of all nodes, `block_size` each.
    tokens: Vec<u32>,
    free: Vec<u32>,
    /// Heads of the chains of nodes with the same low bits of their hashes. Fixed in size: a table that grows would
    /// stop a step for it.
    buckets: Vec<u32>,
    node_of: Vec<u32>,
    on_device: List,
    on_host: List,
    namespaces: Namespaces,
    epoch: u64,
}

impl PrefixCache {
    /// An empty cache over so many blocks of either tier, which forgets what was not used for `ttl`.
    pub fn new(
        num_blocks: usize,
        host_blocks: usize,
        block_size: usize,
        ttl: Duration,
        hasher: BlockHasher,
    ) -> Self {
        let capacity = num_blocks + host_blocks;
        Self {
            block_size,
            ttl,
            hasher,
            nodes: Vec::with_capacity(capacity),
            // One more, in which a block waits for a node.
            tokens: Vec::with_capacity((capacity + 1) * block_size),
            free: Vec::with_capacity(capacity),
            buckets: vec![NONE; capacity.next_power_of_two()],
            node_of: vec![NONE; num_blocks],
            on_device: List::default(),
            on_host: List::default(),
            namespaces: Namespaces::default(),
            epoch: 1,
        }
    }

    /// Counts the flushes: what was published before the latest is not in the cache.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Finds the longest run of first blocks of `tokens` that are here, of at most `max_blocks`, and leaves their nodes
    /// in `found`. Whoever is to use them must hold them before anything else is done here.
    pub fn find(&self, chain: &mut Chain, tokens: Tokens<'_>, max_blocks: usize, found: &mut Vec<NodeId>) {
        found.clear();
        let Some(namespace) = self.namespaces.find(chain.namespace()) else { return };
        let mut parent = Parent::Namespace(namespace);
        let mut block = Vec::with_capacity(self.block_size);
        for index in 0..max_blocks.min(chain.max_blocks()) {
            block.clear();
            tokens.copy(index * self.block_size..(index + 1) * self.block_size, &mut block);
            let hash = chain.hash(index, &block, &self.hasher);
            let Some(node) = self.child(parent, hash, &block) else { return };
            found.push(node);
            parent = Parent::Node(node);
        }
    }

    /// The node that continues `parent` with these tokens: the tokens are compared, the hash only says where to look.
    fn child(&self, parent: Parent, hash: u128, tokens: &[u32]) -> Option<NodeId> {
        let mut index = self.buckets[self.bucket(hash)];
        while index != NONE {
            let node = &self.nodes[index as usize];
            if node.hash == hash && node.parent == parent && self.tokens_of(index) == tokens {
                return Some(NodeId(index));
            }
            index = node.next_in_bucket;
        }
        None
    }

    /// Block `index` of a sequence that holds all blocks before it, the latest of them `parent`, is computed and lies in
    /// `block`. Returns the node that holds these tokens from now on, and whether it is a new one, in `block`.
    pub fn insert(
        &mut self,
        chain: &mut Chain,
        tokens: Tokens<'_>,
        index: usize,
        parent: Option<NodeId>,
        block: BlockId,
        now: Instant,
    ) -> (NodeId, bool) {
        let start = self.tokens.len();
        tokens.copy(index * self.block_size..(index + 1) * self.block_size, &mut self.tokens);
        let hash = chain.hash(index, &self.tokens[start..], &self.hasher);
        let root = || self.namespaces.find(chain.namespace()).map(Parent::Namespace);
        let known = parent.map(Parent::Node).or_else(root);
        if let Some(node) = known.and_then(|known| self.child(known, hash, &self.tokens[start..])) {
            self.tokens.truncate(start);
            return (node, false);
        }
        let parent = match parent {
            Some(node) => Parent::Node(node),
            None => Parent::Namespace(self.namespaces.enter(chain.namespace())),
        };
        let bucket = self.bucket(hash);
        let node = Node {
            hash,
            parent,
            place: Place::Device(block),
            loaded_in: 0,
            last_used: now,
            is_listed: false,
            older: NONE,
            newer: NONE,
            next_in_bucket: self.buckets[bucket],
        };
        let index = match self.free.pop() {
            Some(index) => {
                self.tokens.copy_within(start.., index as usize * self.block_size);
                self.tokens.truncate(start);
                self.nodes[index as usize] = node;
                index
            }
            None => {
                self.nodes.push(node);
                (self.nodes.len() - 1) as u32
            }
        };
        self.buckets[bucket] = index;
        self.node_of[block.0 as usize] = index;
        (NodeId(index), true)
    }

    /// Where its bytes are.
    pub fn place(&self, node: NodeId) -> Place {
        self.nodes[node.0 as usize].place
    }

    /// The step whose plan brings its bytes to where they are; 0 if they were computed there.
    pub fn loaded_in(&self, node: NodeId) -> u64 {
        self.nodes[node.0 as usize].loaded_in
    }

    /// The node that lies in a block of the KV cache.
    pub fn node_in(&self, block: BlockId) -> Option<NodeId> {
        let index = self.node_of[block.0 as usize];
        (index != NONE).then_some(NodeId(index))
    }

    /// Its first holder has come: it cannot be evicted and does not expire.
    pub fn hold(&mut self, node: NodeId) {
        self.unlist(node);
    }

    /// Its last holder has gone.
    pub fn let_go(&mut self, node: NodeId, now: Instant) {
        self.nodes[node.0 as usize].last_used = now;
        self.on_device.push_newest(&mut self.nodes, node.0);
    }

    /// Blocks of the host tier in use here.
    pub fn num_on_host(&self) -> usize {
        self.on_host.len()
    }

    /// The block in the KV cache that was not held for longest. It is a leaf there.
    pub fn oldest_on_device(&self) -> Option<NodeId> {
        self.on_device.oldest()
    }

    /// The same of the host tier; a leaf of the tree.
    pub fn oldest_on_host(&self) -> Option<NodeId> {
        self.on_host.oldest()
    }

    /// The oldest block anywhere, if its time is over. Those on the host come first, for they continue the others.
    pub fn expired(&self, now: Instant) -> Option<NodeId> {
        let is_over = |node: &NodeId| now.saturating_duration_since(self.last_used(*node)) >= self.ttl;
        self.oldest_on_host().filter(is_over).or_else(|| self.oldest_on_device().filter(is_over))
    }

    /// When `expired` will have something to say, if nothing happens before.
    pub fn next_expiry(&self) -> Option<Instant> {
        let oldest = [self.oldest_on_host(), self.oldest_on_device()];
        let last_used = oldest.into_iter().flatten().map(|node| self.last_used(node)).min()?;
        last_used.checked_add(self.ttl)
    }

    /// Its bytes go from the KV cache to the host. It was the oldest there, and is the newest here.
    pub fn move_to_host(&mut self, node: NodeId, to: HostBlockId) {
        self.unlist(node);
        self.place_at(node, Place::Host(to));
        self.on_host.push_newest(&mut self.nodes, node.0);
    }

    /// Its bytes are in the KV cache again, where somebody holds it: by the plan of step `loaded_in`, or by having been
    /// computed once more (0).
    pub fn move_to_device(&mut self, node: NodeId, to: BlockId, loaded_in: u64) {
        self.place_at(node, Place::Device(to));
        self.nodes[node.0 as usize].loaded_in = loaded_in;
    }

    /// Forgets a leaf that nobody holds.
    pub fn remove(&mut self, node: NodeId) {
        self.unlist(node);
        let Node { hash, parent, place, next_in_bucket, .. } = self.nodes[node.0 as usize];
        if let Place::Device(block) = place {
            self.node_of[block.0 as usize] = NONE;
        }
        if let Parent::Namespace(namespace) = parent {
            self.namespaces.leave(namespace);
        }
        let bucket = self.bucket(hash);
        let mut before = self.buckets[bucket];
        if before == node.0 {
            self.buckets[bucket] = next_in_bucket;
        } else {
            while self.nodes[before as usize].next_in_bucket != node.0 {
                before = self.nodes[before as usize].next_in_bucket;
            }
            self.nodes[before as usize].next_in_bucket = next_in_bucket;
        }
        self.free.push(node.0);
    }

    /// Forgets everything. Blocks that nobody held, of either tier, are handed to `unheld`; the others are their
    /// holders' own from now on.
    pub fn flush(&mut self, mut unheld: impl FnMut(Place)) {
        while let Some(node) = self.oldest_on_host().or_else(|| self.oldest_on_device()) {
            unheld(self.place(node));
            self.remove(node);
        }
        self.nodes.clear();
        self.tokens.clear();
        self.free.clear();
        self.buckets.fill(NONE);
        self.node_of.fill(NONE);
        self.namespaces = Namespaces::default();
        self.epoch += 1;
    }

    fn last_used(&self, node: NodeId) -> Instant {
        self.nodes[node.0 as usize].last_used
    }

    fn place_at(&mut self, node: NodeId, place: Place) {
        let Node { place: from, .. } = &mut self.nodes[node.0 as usize];
        if let Place::Device(block) = std::mem::replace(from, place) {
            self.node_of[block.0 as usize] = NONE;
        }
        if let Place::Device(block) = place {
            self.node_of[block.0 as usize] = node.0;
        }
    }

    fn unlist(&mut self, node: NodeId) {
        let list = match self.place(node) {
            Place::Device(_) => &mut self.on_device,
            Place::Host(_) => &mut self.on_host,
        };
        list.remove(&mut self.nodes, node.0);
    }

    fn bucket(&self, hash: u128) -> usize {
        hash as usize & (self.buckets.len() - 1)
    }

    fn tokens_of(&self, index: u32) -> &[u32] {
        let start = index as usize * self.block_size;
        &self.tokens[start..start + self.block_size]
    }

    /// Blocks in the KV cache that nobody holds, oldest use first.
    pub fn unheld_on_device(&self) -> impl Iterator<Item = BlockId> {
        self.on_device.iter(&self.nodes).filter_map(|node| match self.place(node) {
            Place::Device(block) => Some(block),
            Place::Host(_) => None,
        })
    }

    /// Blocks of the host tier in use here, oldest use first.
    pub fn host_blocks(&self) -> impl Iterator<Item = HostBlockId> {
        self.on_host.iter(&self.nodes).filter_map(|node| match self.place(node) {
            Place::Host(block) => Some(block),
            Place::Device(_) => None,
        })
    }
}
