//! The consistency check of the prefix cache, for tests and for idle debug builds.

use penstock_types::BlockId;

use super::cache::PrefixCache;
use super::node::{Location, NONE, NodeId, Parent};

impl PrefixCache {
    /// Panics unless buckets, lists, locations and parents agree, and exactly the blocks with `is_referenced` are
    /// referenced.
    pub fn check_integrity(&self, is_referenced: impl Fn(BlockId) -> bool) {
        let mut nodes = Vec::new();
        let mut is_known = vec![false; self.nodes.len()];
        for (bucket, &head) in self.buckets.iter().enumerate() {
            let mut index = head;
            while index != NONE {
                let node = &self.nodes[index as usize];
                assert_eq!(self.bucket(node.hash), bucket, "{node:?} is in a wrong bucket; this is a bug");
                nodes.push(index);
                is_known[index as usize] = true;
                index = node.next_in_bucket;
            }
        }
        assert_eq!(
            nodes.len() + self.free.len(),
            self.nodes.len(),
            "nodes lost or duplicated; this is a bug"
        );
        assert_eq!(
            self.tokens.len(),
            self.nodes.len() * self.block_size,
            "tokens and nodes differ; this is a bug"
        );
        let (mut num_on_device, mut num_listed) = (0, 0);
        for &index in &nodes {
            let node = &self.nodes[index as usize];
            num_listed += usize::from(node.is_listed);
            let is_on_device = match node.location {
                Location::Device(block) => {
                    assert_eq!(
                        self.node_of[block.0 as usize], index,
                        "{node:?} is not in its block; this is a bug"
                    );
                    assert_eq!(
                        node.is_listed,
                        !is_referenced(block),
                        "{node:?} referenced and listed, or neither; this is a bug"
                    );
                    true
                }
                Location::Host(_) => {
                    assert!(node.is_listed, "{node:?} is on the host and referenced; this is a bug");
                    false
                }
            };
            num_on_device += usize::from(is_on_device);
            let Parent::Node(NodeId(parent)) = node.parent else { continue };
            assert!(is_known[parent as usize], "{node:?} has no parent; this is a bug");
            let parent = &self.nodes[parent as usize];
            assert_eq!(node.namespace, parent.namespace, "{node:?} has a parent of another; this is a bug");
            let is_parent_on_device = matches!(parent.location, Location::Device(_));
            assert!(
                is_parent_on_device || !is_on_device,
                "{node:?} follows a block on the host; this is a bug"
            );
            assert!(
                node.is_listed || !parent.is_listed,
                "{node:?} is referenced and its parent is not; this is a bug"
            );
        }
        let num_blocks = self.node_of.iter().filter(|index| **index != NONE).count();
        assert_eq!(num_blocks, num_on_device, "blocks of removed nodes; this is a bug");
        let order: Vec<NodeId> =
            self.on_host.iter(&self.nodes).chain(self.on_device.iter(&self.nodes)).collect();
        let lengths = self.on_host.len() + self.on_device.len();
        assert_eq!(
            (order.len(), lengths),
            (num_listed, num_listed),
            "the lists and their nodes differ; this is a bug"
        );
        assert!(self.on_host.iter(&self.nodes).all(|node| matches!(self.location(node), Location::Host(_))));
        assert!(
            self.on_device.iter(&self.nodes).all(|node| matches!(self.location(node), Location::Device(_)))
        );
        for list in [&self.on_host, &self.on_device] {
            assert!(
                list.iter(&self.nodes).is_sorted_by_key(|node| self.last_used(node)),
                "out of order; this is a bug"
            );
        }
        let mut is_passed = vec![false; self.nodes.len()];
        for NodeId(index) in order {
            is_passed[index as usize] = true;
            let node = &self.nodes[index as usize];
            let Parent::Node(NodeId(parent)) = node.parent else { continue };
            assert!(!is_passed[parent as usize], "{node:?} would outlive its parent; this is a bug");
        }
        self.namespaces.check_integrity(&self.nodes, nodes.len());
    }
}
