//! The record of the changes of the prefix cache, for readers of [KV events](crate::kv_events).

use std::mem;
use std::sync::Arc;

use super::cache::PrefixCache;
use super::event_log::{EventLog, Hashes, tier};
#[cfg(feature = "testing")]
use super::namespace::Namespace;
use super::node::{Location, NodeId, Parent};
use crate::kv_events::{KvBatch, KvEvent, KvFeedWriter};
#[cfg(feature = "testing")]
use crate::kv_events::{KvNamespace, KvTier};
use crate::request::AdapterId;

impl PrefixCache {
    /// Adds a reader, which first gets the whole tree. `key` is that of the hashes in events.
    pub fn add_reader(&mut self, writer: KvFeedWriter, key: u128) {
        self.hand_over_events(); // the tree contains these changes
        let nodes = self.announced_nodes();
        let mut log = self.log.take().unwrap_or_else(|| self.new_log(key, &nodes));
        let mut tree = KvBatch::default();
        tree.events.push(KvEvent::Cleared);
        for &NodeId(index) in &nodes {
            let node = &self.nodes[index as usize];
            let Some(label) = self.namespaces.label(node.namespace) else { continue };
            tree.events.push(log.hashes.stored(index, node, label));
            tree.tokens.extend_from_slice(self.tokens_of(index));
        }
        if writer.push(&tree) {
            log.writers.push(writer);
        }
        self.log = (!log.writers.is_empty()).then_some(log);
    }

    fn new_log(&mut self, key: u128, nodes: &[NodeId]) -> EventLog {
        let mut hashes = Hashes::new(key, self.capacity);
        self.namespaces.label_all(|namespace| hashes.label(namespace, &self.announced));
        for &NodeId(index) in nodes {
            let node = &self.nodes[index as usize];
            let Some(label) = self.namespaces.label(node.namespace) else { continue };
            hashes.add(index, node, label, self.tokens_of(index));
        }
        EventLog { hashes, batch: KvBatch::default(), writers: Vec::new() }
    }

    /// The nodes whose blocks are announced, each after its parent.
    fn announced_nodes(&self) -> Vec<NodeId> {
        let mut nodes = Vec::new();
        let mut is_passed = vec![false; self.nodes.len()];
        let mut path = Vec::new();
        for (namespace, id) in self.namespaces.all() {
            if namespace.adapter.is_some_and(|adapter| !self.announced.contains_key(&adapter)) {
                continue;
            }
            for node in self.namespaces.nodes(&self.nodes, id) {
                let mut next = Parent::Node(node);
                while let Parent::Node(node) = next
                    && !mem::replace(&mut is_passed[node.0 as usize], true)
                {
                    path.push(node);
                    next = self.nodes[node.0 as usize].parent;
                }
                nodes.extend(path.drain(..).rev());
            }
        }
        nodes
    }

    /// Hands the events since the last call to the readers.
    pub fn hand_over_events(&mut self) {
        let Some(log) = &mut self.log else { return };
        if log.batch.events.is_empty() {
            return;
        }
        log.writers.retain(|writer| writer.push(&log.batch));
        log.batch.clear();
        if log.writers.is_empty() {
            self.log = None;
        }
    }

    /// Announces the blocks of an adapter from now on. Those of an adapter that has lost the name to it are withdrawn.
    pub fn announce(&mut self, adapter: AdapterId, name: Arc<str>) {
        let former = self.announced.iter().find(|(_, other)| **other == name).map(|(id, _)| *id);
        if let Some(former) = former {
            self.withdraw(former);
        }
        self.announced.insert(adapter, name);
    }

    /// Removes the blocks of an adapter from the tree that readers see.
    pub fn withdraw(&mut self, adapter: AdapterId) {
        if self.announced.remove(&adapter).is_none() {
            return;
        }
        let Some(log) = &mut self.log else { return };
        for namespace in self.namespaces.of_adapter(adapter) {
            let Some(id) = self.namespaces.find(namespace) else { continue };
            for NodeId(index) in self.namespaces.nodes(&self.nodes, id) {
                let (hash, tier) =
                    (log.hashes.of_nodes[index as usize], tier(self.nodes[index as usize].location));
                log.batch.events.push(KvEvent::Removed { hash, tier });
            }
        }
        self.namespaces.remove_labels(adapter);
    }

    /// Records a new node.
    pub(super) fn note_insertion(&mut self, index: u32) {
        let Some(log) = &mut self.log else { return };
        let node = &self.nodes[index as usize];
        if let Parent::Namespace(id) = node.parent {
            self.namespaces.label_new(id, |namespace| log.hashes.label(namespace, &self.announced));
        }
        let Some(label) = self.namespaces.label(node.namespace) else { return };
        let start = index as usize * self.block_size;
        let tokens = &self.tokens[start..start + self.block_size];
        log.hashes.add(index, node, label, tokens);
        log.batch.events.push(log.hashes.stored(index, node, label));
        log.batch.tokens.extend_from_slice(tokens);
    }

    /// Records that a node has moved here from another tier.
    pub(super) fn note_move(&mut self, index: u32, from: Location) {
        let Some(log) = &mut self.log else { return };
        let node = &self.nodes[index as usize];
        let Some(label) = self.namespaces.label(node.namespace) else { return };
        let start = index as usize * self.block_size;
        log.batch.events.push(log.hashes.stored(index, node, label));
        log.batch.tokens.extend_from_slice(&self.tokens[start..start + self.block_size]);
        log.batch
            .events
            .push(KvEvent::Removed { hash: log.hashes.of_nodes[index as usize], tier: tier(from) });
    }

    /// Records that a node is about to be removed.
    pub(super) fn note_removal(&mut self, index: u32) {
        let Some(log) = &mut self.log else { return };
        let node = &self.nodes[index as usize];
        if self.namespaces.label(node.namespace).is_some() {
            let (hash, tier) = (log.hashes.of_nodes[index as usize], tier(node.location));
            log.batch.events.push(KvEvent::Removed { hash, tier });
        }
    }

    /// Records that all nodes were removed.
    pub(super) fn note_clear(&mut self) {
        let Some(log) = &mut self.log else { return };
        log.batch.clear();
        log.batch.events.push(KvEvent::Cleared);
    }

    /// The blocks that readers know, each with all tokens up to its end, without the hashes of events.
    #[cfg(feature = "testing")]
    pub fn announced_blocks(&self) -> Vec<(KvNamespace, Vec<u32>, KvTier)> {
        let block = |NodeId(index): NodeId| {
            let node = &self.nodes[index as usize];
            let Namespace { adapter, salt } = self.namespaces.get(node.namespace).clone();
            let adapter = adapter.map(|id| (id, Arc::clone(&self.announced[&id])));
            let mut path = vec![index];
            let mut parent = node.parent;
            while let Parent::Node(NodeId(index)) = parent {
                path.push(index);
                parent = self.nodes[index as usize].parent;
            }
            let tokens = path.iter().rev().flat_map(|index| self.tokens_of(*index)).copied().collect();
            (KvNamespace { adapter, salt }, tokens, tier(node.location))
        };
        self.announced_nodes().into_iter().map(block).collect()
    }
}
