//! Namespaces: sequences share blocks only within one.

use std::collections::HashMap;
use std::sync::Arc;

/// Two sequences share a block only if their tokens and their namespaces are equal.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Namespace {
    /// The request's `cache_salt`.
    pub salt: Option<Arc<str>>,
}

/// Names a namespace for as long as it has blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NamespaceId(u32);

/// The namespaces that have blocks.
///
/// Invariants: `ids` names exactly the occupied `entries`; an entry counts the root blocks of its namespace.
#[derive(Debug, Default)]
pub(super) struct Namespaces {
    /// Hashed by the standard library's keyed function: clients choose salts.
    ids: HashMap<Namespace, u32>,
    entries: Vec<Option<NamespaceEntry>>,
    free: Vec<u32>,
}

#[derive(Debug)]
struct NamespaceEntry {
    namespace: Namespace,
    num_roots: usize,
}

impl Namespaces {
    pub(super) fn find(&self, namespace: &Namespace) -> Option<NamespaceId> {
        self.ids.get(namespace).map(|id| NamespaceId(*id))
    }

    /// Counts a new root block.
    pub(super) fn add_root(&mut self, namespace: &Namespace) -> NamespaceId {
        if let Some(id) = self.find(namespace) {
            self.entry(id).num_roots += 1;
            return id;
        }
        let id = self.free.pop().unwrap_or_else(|| {
            self.entries.push(None);
            (self.entries.len() - 1) as u32
        });
        self.ids.insert(namespace.clone(), id);
        self.entries[id as usize] = Some(NamespaceEntry { namespace: namespace.clone(), num_roots: 1 });
        NamespaceId(id)
    }

    /// Discounts a root block. A namespace without root blocks is removed.
    pub(super) fn remove_root(&mut self, id: NamespaceId) {
        let entry = self.entry(id);
        entry.num_roots -= 1;
        if entry.num_roots == 0 {
            let NamespaceEntry { namespace, .. } =
                self.entries[id.0 as usize].take().expect("seen just now; this is a bug");
            self.ids.remove(&namespace);
            self.free.push(id.0);
        }
    }

    fn entry(&mut self, id: NamespaceId) -> &mut NamespaceEntry {
        self.entries[id.0 as usize].as_mut().expect("a namespace with blocks has an entry; this is a bug")
    }

    /// Panics unless the counts agree with `roots`.
    pub(super) fn check_integrity(&self, roots: impl Iterator<Item = NamespaceId>) {
        let mut counts = vec![0; self.entries.len()];
        roots.for_each(|id| counts[id.0 as usize] += 1);
        for (id, entry) in self.entries.iter().enumerate() {
            let num_roots = entry.as_ref().map_or(0, |entry| entry.num_roots);
            assert_eq!(counts[id], num_roots, "root blocks miscounted; this is a bug: {self:?}");
            let named =
                entry.as_ref().is_none_or(|entry| self.ids.get(&entry.namespace) == Some(&(id as u32)));
            assert!(named, "a namespace has another's entry; this is a bug: {self:?}");
        }
        let num_used = self.entries.len() - self.free.len();
        assert_eq!(self.ids.len(), num_used, "namespaces lost or duplicated; this is a bug: {self:?}");
    }
}
