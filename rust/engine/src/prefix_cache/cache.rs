//! [`PrefixCache`]: the tree of cached blocks, its hash table and its LRU lists.

use std::ops::Range;
use std::time::{Duration, Instant};

use penstock_types::{BlockId, HostBlockId};

use super::chain::{Chain, Tokens};
use super::event_log::{Announced, EventLog};
use super::hash::BlockHasher;
use super::lru::LruList;
use super::namespace::{Namespace, Namespaces};
use super::node::{Location, NONE, Node, NodeId, Parent};
use crate::request::AdapterId;

/// See the module `prefix_cache`.
///
/// Invariants: a node is in the bucket of its hash; `node_of` names exactly the nodes in the KV cache; the parent of a
/// listed node is listed behind it in the same list, or on the device; a node on the device has no parent on the host.
pub struct PrefixCache {
    pub(super) block_size: usize,
    /// The most nodes.
    pub(super) capacity: usize,
    ttl: Duration,
    hasher: BlockHasher,
    pub(super) nodes: Vec<Node>,
    /// The tokens of all nodes, `block_size` each.
    pub(super) tokens: Vec<u32>,
    pub(super) free: Vec<u32>,
    /// Heads of the lists of nodes with the same low bits of their hashes. Fixed in size: rehashing would delay a step.
    pub(super) buckets: Vec<u32>,
    /// The node in each block of the KV cache.
    pub(super) node_of: Vec<u32>,
    pub(super) on_device: LruList,
    pub(super) on_host: LruList,
    pub(super) namespaces: Namespaces,
    epoch: u64,
    pub(super) announced: Announced,
    /// While KV events are read.
    pub(super) log: Option<EventLog>,
}

impl PrefixCache {
    /// An empty cache over `num_blocks` of the KV cache and `host_blocks` of the host tier. Blocks expire that were not
    /// used for `ttl`.
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
            capacity,
            ttl,
            hasher,
            nodes: Vec::with_capacity(capacity),
            // One block more than nodes: `insert` compares the tokens of a block before it has a node.
            tokens: Vec::with_capacity((capacity + 1) * block_size),
            free: Vec::with_capacity(capacity),
            buckets: vec![NONE; capacity.next_power_of_two()],
            node_of: vec![NONE; num_blocks],
            on_device: LruList::default(),
            on_host: LruList::default(),
            namespaces: Namespaces::default(),
            epoch: 1,
            announced: Announced::default(),
            log: None,
        }
    }

    /// Counts resets. Blocks published before the latest reset are not in the cache.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Appends to `nodes` the longest run of `blocks` of `tokens` in the cache that follows `last`, the block before
    /// them. They must be acquired before anything else changes the cache.
    pub fn find(
        &self,
        chain: &mut Chain,
        tokens: Tokens<'_>,
        blocks: Range<usize>,
        last: Option<NodeId>,
        nodes: &mut Vec<NodeId>,
    ) {
        let root = || self.namespaces.find(chain.namespace()).map(Parent::Namespace);
        let Some(mut parent) = last.map(Parent::Node).or_else(root) else { return };
        let mut block = Vec::with_capacity(self.block_size);
        for index in blocks.start..blocks.end.min(chain.max_blocks()) {
            block.clear();
            tokens.copy(index * self.block_size..(index + 1) * self.block_size, &mut block);
            let hash = chain.hash(index, &block, &self.hasher);
            let Some(node) = self.child(parent, hash, &block) else { return };
            nodes.push(node);
            parent = Parent::Node(node);
        }
    }

    /// The child of `parent` with these tokens. The tokens are compared; the hash only selects a bucket.
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

    /// The hash of `tokens` up to the end of block `index`, with the namespace's salt.
    pub fn hash(&self, chain: &mut Chain, tokens: Tokens<'_>, index: usize) -> u128 {
        let mut block = Vec::new();
        for index in chain.num_hashed()..=index {
            block.clear();
            tokens.copy(index * self.block_size..(index + 1) * self.block_size, &mut block);
            chain.hash(index, &block, &self.hasher);
        }
        chain.hash(index, &[], &self.hasher)
    }

    /// Adds block `index` of a sequence, which is computed and in `block`. The sequence references all blocks before
    /// it, the last of them `parent`. Returns the node with these tokens, and whether it is new and refers to `block`.
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
        let (parent, namespace) = match parent {
            Some(node) => (Parent::Node(node), self.nodes[node.0 as usize].namespace),
            None => {
                let namespace = self.namespaces.find_or_add(chain.namespace());
                (Parent::Namespace(namespace), namespace)
            }
        };
        let bucket = self.bucket(hash);
        let node = Node {
            hash,
            parent,
            namespace,
            previous_in_namespace: NONE,
            next_in_namespace: NONE,
            location: Location::Device(block),
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
        self.namespaces.push(&mut self.nodes, index);
        self.node_of[block.0 as usize] = index;
        self.note_insertion(index);
        (NodeId(index), true)
    }

    /// The block that holds the contents of a node.
    pub fn location(&self, node: NodeId) -> Location {
        self.nodes[node.0 as usize].location
    }

    /// The step whose plan loads the contents of a node from the host; 0 if they were computed in place.
    pub fn loaded_in(&self, node: NodeId) -> u64 {
        self.nodes[node.0 as usize].loaded_in
    }

    /// The node in a block of the KV cache.
    pub fn node_in(&self, block: BlockId) -> Option<NodeId> {
        let index = self.node_of[block.0 as usize];
        (index != NONE).then_some(NodeId(index))
    }

    /// Marks a node as referenced: it cannot be evicted and does not expire.
    pub fn acquire(&mut self, node: NodeId) {
        self.unlist(node);
    }

    /// Marks a node as unreferenced since `now`: it can be evicted, and will expire.
    pub fn release(&mut self, node: NodeId, now: Instant) {
        self.nodes[node.0 as usize].last_used = now;
        self.on_device.push_newest(&mut self.nodes, node.0);
    }

    /// The number of nodes in the host tier.
    pub fn num_on_host(&self) -> usize {
        self.on_host.len()
    }

    /// The least recently used block in the KV cache. No block in the KV cache follows it.
    pub fn oldest_on_device(&self) -> Option<NodeId> {
        self.on_device.oldest()
    }

    /// The least recently used block of the host tier. No block follows it.
    pub fn oldest_on_host(&self) -> Option<NodeId> {
        self.on_host.oldest()
    }

    /// A leaf whose time is over, if there is one.
    pub fn expired(&self, now: Instant) -> Option<NodeId> {
        // Those on the host first, since they follow the others.
        let is_over = |node: &NodeId| now.saturating_duration_since(self.last_used(*node)) >= self.ttl;
        self.oldest_on_host().filter(is_over).or_else(|| self.oldest_on_device().filter(is_over))
    }

    /// The time at which the next block expires, unless it is used before.
    pub fn next_expiry(&self) -> Option<Instant> {
        let oldest = [self.oldest_on_host(), self.oldest_on_device()];
        let last_used = oldest.into_iter().flatten().map(|node| self.last_used(node)).min()?;
        last_used.checked_add(self.ttl)
    }

    /// Moves a node to the host tier, where it becomes the most recently used.
    pub fn move_to_host(&mut self, node: NodeId, to: HostBlockId) {
        self.unlist(node);
        self.set_location(node, Location::Host(to));
        self.on_host.push_newest(&mut self.nodes, node.0);
    }

    /// Moves it to a referenced block of the KV cache, whose contents the plan of step `loaded_in` loads, or which was
    /// computed again (0).
    pub fn move_to_device(&mut self, node: NodeId, to: BlockId, loaded_in: u64) {
        self.set_location(node, Location::Device(to));
        self.nodes[node.0 as usize].loaded_in = loaded_in;
    }

    /// Removes an unreferenced leaf.
    pub fn remove(&mut self, node: NodeId) {
        self.unlist(node);
        self.detach(node);
    }

    fn detach(&mut self, node: NodeId) {
        self.note_removal(node.0);
        let Node { hash, location, next_in_bucket, .. } = self.nodes[node.0 as usize];
        if let Location::Device(block) = location {
            self.node_of[block.0 as usize] = NONE;
        }
        self.namespaces.remove(&mut self.nodes, node.0);
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

    /// Removes all blocks of a namespace. `on_unreferenced` is called for each unreferenced block of either tier.
    pub fn clear_namespace(&mut self, namespace: &Namespace, mut on_unreferenced: impl FnMut(Location)) {
        let Some(namespace) = self.namespaces.find(namespace) else { return };
        let nodes: Vec<_> = self.namespaces.nodes(&self.nodes, namespace).collect();
        for node in nodes {
            if self.nodes[node.0 as usize].is_listed {
                on_unreferenced(self.location(node));
                self.unlist(node);
            }
            self.detach(node);
        }
    }

    /// Removes all blocks of an adapter, as `clear_namespace` does.
    pub fn clear_adapter(&mut self, adapter: AdapterId, mut on_unreferenced: impl FnMut(Location)) {
        let namespaces: Vec<_> = self.namespaces.of_adapter(adapter).cloned().collect();
        for namespace in namespaces {
            self.clear_namespace(&namespace, &mut on_unreferenced);
        }
    }

    /// Removes everything. `on_unreferenced` is called for each unreferenced block of either tier.
    pub fn clear(&mut self, mut on_unreferenced: impl FnMut(Location)) {
        let log = self.log.take(); // of single removals nothing is recorded
        while let Some(node) = self.oldest_on_host().or_else(|| self.oldest_on_device()) {
            on_unreferenced(self.location(node));
            self.remove(node);
        }
        self.log = log;
        self.note_clear();
        self.nodes.clear();
        self.tokens.clear();
        self.free.clear();
        self.buckets.fill(NONE);
        self.node_of.fill(NONE);
        self.namespaces = Namespaces::default();
        self.epoch += 1;
    }

    pub(super) fn last_used(&self, node: NodeId) -> Instant {
        self.nodes[node.0 as usize].last_used
    }

    fn set_location(&mut self, node: NodeId, location: Location) {
        let Node { location: from, .. } = &mut self.nodes[node.0 as usize];
        let from = std::mem::replace(from, location);
        if let Location::Device(block) = from {
            self.node_of[block.0 as usize] = NONE;
        }
        if let Location::Device(block) = location {
            self.node_of[block.0 as usize] = node.0;
        }
        self.note_move(node.0, from);
    }

    fn unlist(&mut self, node: NodeId) {
        let list = match self.location(node) {
            Location::Device(_) => &mut self.on_device,
            Location::Host(_) => &mut self.on_host,
        };
        list.remove(&mut self.nodes, node.0);
    }

    pub(super) fn bucket(&self, hash: u128) -> usize {
        hash as usize & (self.buckets.len() - 1)
    }

    pub(super) fn tokens_of(&self, index: u32) -> &[u32] {
        let start = index as usize * self.block_size;
        &self.tokens[start..start + self.block_size]
    }

    /// Unreferenced blocks in the KV cache, least recently used first.
    pub fn unreferenced_on_device(&self) -> impl Iterator<Item = BlockId> {
        self.on_device.iter(&self.nodes).filter_map(|node| match self.location(node) {
            Location::Device(block) => Some(block),
            Location::Host(_) => None,
        })
    }

    /// Blocks of the host tier, least recently used first.
    pub fn host_blocks(&self) -> impl Iterator<Item = HostBlockId> {
        self.on_host.iter(&self.nodes).filter_map(|node| match self.location(node) {
            Location::Host(block) => Some(block),
            Location::Device(_) => None,
        })
    }
}
