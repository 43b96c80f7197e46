//! Nodes in the order of their last use: a doubly linked list through the nodes.

use super::node::{NONE, Node, NodeId};

/// The ends of a list, oldest use first; the links are in the nodes.
#[derive(Debug)]
pub(super) struct LruList {
    oldest: u32,
    newest: u32,
    len: usize,
}

impl Default for LruList {
    fn default() -> Self {
        Self { oldest: NONE, newest: NONE, len: 0 }
    }
}

impl LruList {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn oldest(&self) -> Option<NodeId> {
        (self.oldest != NONE).then_some(NodeId(self.oldest))
    }

    pub(super) fn push_newest(&mut self, nodes: &mut [Node], index: u32) {
        let node = &mut nodes[index as usize];
        assert!(!node.is_listed, "{node:?} is in a list already; this is a bug");
        node.is_listed = true;
        node.older = self.newest;
        node.newer = NONE;
        *self.newer_than(nodes, self.newest) = index;
        self.newest = index;
        self.len += 1;
    }

    pub(super) fn remove(&mut self, nodes: &mut [Node], index: u32) {
        let node = &mut nodes[index as usize];
        assert!(node.is_listed, "{node:?} is in no list; this is a bug");
        node.is_listed = false;
        let (older, newer) = (node.older, node.newer);
        *self.newer_than(nodes, older) = newer;
        match newer {
            NONE => self.newest = older,
            newer => nodes[newer as usize].older = older,
        }
        self.len -= 1;
    }

    /// The link to the node after `index`, or to the first node.
    fn newer_than<'a>(&'a mut self, nodes: &'a mut [Node], index: u32) -> &'a mut u32 {
        match index {
            NONE => &mut self.oldest,
            index => &mut nodes[index as usize].newer,
        }
    }

    pub(super) fn iter<'a>(&self, nodes: &'a [Node]) -> impl Iterator<Item = NodeId> + use<'a> {
        let follow = |index: u32| (index != NONE).then_some(NodeId(index));
        std::iter::successors(follow(self.oldest), move |node| follow(nodes[node.0 as usize].newer))
    }
}
