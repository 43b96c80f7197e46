//! Namespaces: sequences share blocks only within one.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::kv_events::KvNamespace;
use crate::request::AdapterId;

use super::node::{NONE, NamespaceId, Node, NodeId};

/// Two sequences share a block only if their tokens and their namespaces are equal. The namespaces of an adapter are
/// adjacent.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Namespace {
    /// The request's adapter, on which keys and values depend.
    pub adapter: Option<AdapterId>,
    /// The request's `cache_salt`.
    pub salt: Option<Arc<str>>,
}

/// The namespaces that have blocks, each with the list of its nodes: a doubly linked list through the nodes.
///
/// Invariants: `ids` names exactly the occupied `entries`; their lists are not empty.
#[derive(Debug, Default)]
pub(super) struct Namespaces {
    ids: BTreeMap<Namespace, u32>,
    entries: Vec<Option<NamespaceEntry>>,
    free: Vec<u32>,
}

#[derive(Debug)]
struct NamespaceEntry {
    namespace: Namespace,
    first: u32,
    /// While KV events are recorded; `None` if blocks of the namespace are not announced.
    label: Option<Label>,
}

/// The namespace of blocks in KV events.
#[derive(Debug)]
pub(super) struct Label {
    /// The hash before the first block.
    pub hash: u64,
    pub namespace: Arc<KvNamespace>,
}

impl Namespaces {
    pub(super) fn find(&self, namespace: &Namespace) -> Option<NamespaceId> {
        self.ids.get(namespace).map(|id| NamespaceId(*id))
    }

    /// The namespaces of an adapter.
    pub(super) fn of_adapter(&self, adapter: AdapterId) -> impl Iterator<Item = &Namespace> {
        let first = Namespace { adapter: Some(adapter), salt: None };
        let from_first = self.ids.range(first..).map(|(namespace, _)| namespace);
        from_first.take_while(move |namespace| namespace.adapter == Some(adapter))
    }

    /// The id of a namespace to which a node is about to be added.
    pub(super) fn find_or_add(&mut self, namespace: &Namespace) -> NamespaceId {
        if let Some(id) = self.find(namespace) {
            return id;
        }
        let id = self.free.pop().unwrap_or_else(|| {
            self.entries.push(None);
            (self.entries.len() - 1) as u32
        });
        self.ids.insert(namespace.clone(), id);
        self.entries[id as usize] =
            Some(NamespaceEntry { namespace: namespace.clone(), first: NONE, label: None });
        NamespaceId(id)
    }

    /// All namespaces.
    pub(super) fn all(&self) -> impl Iterator<Item = (&Namespace, NamespaceId)> {
        self.ids.iter().map(|(namespace, id)| (namespace, NamespaceId(*id)))
    }

    /// The label of a namespace in KV events.
    pub(super) fn label(&self, id: NamespaceId) -> Option<&Label> {
        self.entries[id.0 as usize].as_ref()?.label.as_ref()
    }

    /// Gives every namespace a label.
    pub(super) fn label_all(&mut self, label: impl Fn(&Namespace) -> Option<Label>) {
        for entry in self.entries.iter_mut().flatten() {
            entry.label = label(&entry.namespace);
        }
    }

    /// Gives a namespace a label if it has none.
    pub(super) fn label_new(&mut self, id: NamespaceId, label: impl Fn(&Namespace) -> Option<Label>) {
        let entry = self.entry(id);
        if entry.label.is_none() {
            entry.label = label(&entry.namespace);
        }
    }

    /// Removes the labels of the namespaces of an adapter.
    pub(super) fn remove_labels(&mut self, adapter: AdapterId) {
        for entry in self.entries.iter_mut().flatten() {
            if entry.namespace.adapter == Some(adapter) {
                entry.label = None;
            }
        }
    }

    #[cfg(feature = "testing")]
    pub(super) fn get(&self, id: NamespaceId) -> &Namespace {
        &self.entries[id.0 as usize]
            .as_ref()
            .expect("a namespace with blocks has an entry; this is a bug")
            .namespace
    }

    /// Adds a node to the list of its namespace.
    pub(super) fn push(&mut self, nodes: &mut [Node], index: u32) {
        let node = &mut nodes[index as usize];
        let first = std::mem::replace(&mut self.entry(node.namespace).first, index);
        (node.previous_in_namespace, node.next_in_namespace) = (NONE, first);
        if first != NONE {
            nodes[first as usize].previous_in_namespace = index;
        }
    }

    /// Removes a node from the list of its namespace, and the namespace with its last node.
    pub(super) fn remove(&mut self, nodes: &mut [Node], index: u32) {
        let Node { namespace, previous_in_namespace, next_in_namespace, .. } = nodes[index as usize];
        if next_in_namespace != NONE {
            nodes[next_in_namespace as usize].previous_in_namespace = previous_in_namespace;
        }
        match (previous_in_namespace, next_in_namespace) {
            (NONE, NONE) => {
                let id = namespace.0;
                let entry = self.entries[id as usize].take().expect("it had a node; this is a bug");
                self.ids.remove(&entry.namespace);
                self.free.push(id);
            }
            (NONE, next) => self.entry(namespace).first = next,
            (previous, next) => nodes[previous as usize].next_in_namespace = next,
        }
    }

    /// The nodes of a namespace, the latest first.
    pub(super) fn nodes<'a>(
        &self,
        nodes: &'a [Node],
        id: NamespaceId,
    ) -> impl Iterator<Item = NodeId> + use<'a> {
        let follow = |index: u32| (index != NONE).then_some(NodeId(index));
        let first = self.entries[id.0 as usize].as_ref().map_or(NONE, |entry| entry.first);
        std::iter::successors(follow(first), move |node| follow(nodes[node.0 as usize].next_in_namespace))
    }

    fn entry(&mut self, id: NamespaceId) -> &mut NamespaceEntry {
        self.entries[id.0 as usize].as_mut().expect("a namespace with blocks has an entry; this is a bug")
    }

    /// Panics unless the lists have exactly `num_nodes` nodes, each that of its namespace.
    pub(super) fn check_integrity(&self, nodes: &[Node], num_nodes: usize) {
        let mut num_listed = 0;
        for (id, entry) in self.entries.iter().enumerate() {
            let Some(NamespaceEntry { namespace, first, .. }) = entry else { continue };
            assert_eq!(
                self.ids.get(namespace),
                Some(&(id as u32)),
                "a namespace has another's entry; this is a bug: {self:?}"
            );
            assert_ne!(*first, NONE, "a namespace without nodes; this is a bug: {self:?}");
            let mut previous = NONE;
            for NodeId(index) in self.nodes(nodes, NamespaceId(id as u32)) {
                let node = &nodes[index as usize];
                let place = (node.namespace.0 as usize, node.previous_in_namespace);
                assert_eq!(place, (id, previous), "{node:?} is in a wrong list; this is a bug");
                (previous, num_listed) = (index, num_listed + 1);
            }
        }
        assert_eq!(num_listed, num_nodes, "nodes in no namespace; this is a bug");
        let num_used = self.entries.len() - self.free.len();
        assert_eq!(self.ids.len(), num_used, "namespaces lost or duplicated; this is a bug: {self:?}");
    }
}
