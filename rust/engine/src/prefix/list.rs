//! Nodes by their last use, oldest first: a doubly linked list through the nodes themselves.

use super::{NONE, Node, NodeId};

/// The ends of a list; the links are in the nodes.
#[derive(Debug)]
pub(super) struct List {
    oldest: u32,
    newest: u32,
    len: usize,
}

impl Default for List {
    fn default() -> Self {
        Self { oldest: NONE, newest: NONE, len: 0 }
    }
}

impl List {
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

    /// The link to what comes after a node, or to the first.
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
