//! Who may share with whom: blocks are found only from the root of the same namespace.

use std::collections::HashMap;
use std::sync::Arc;

/// What must be equal, besides the tokens, for two sequences to share a block.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Namespace {
    /// The request's `cache_salt`.
    pub salt: Option<Arc<str>>,
}

/// A namespace that something is kept in. Valid for as long as that is so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamespaceId(u32);

/// The namespaces that something is kept in: no more than there are blocks.
///
/// Invariants: `ids` names exactly the occupied `entries`; an entry counts the first blocks of its chains.
#[derive(Debug, Default)]
pub(super) struct Namespaces {
    /// Hashed by the library's keyed function: salts are what strangers send.
    ids: HashMap<Namespace, u32>,
    entries: Vec<Option<Entry>>,
    free: Vec<u32>,
}

#[derive(Debug)]
struct Entry {
    namespace: Namespace,
    num_roots: usize,
}

impl Namespaces {
    pub(super) fn find(&self, namespace: &Namespace) -> Option<NamespaceId> {
        self.ids.get(namespace).map(|id| NamespaceId(*id))
    }

    /// Counts one more first block in it.
    pub(super) fn enter(&mut self, namespace: &Namespace) -> NamespaceId {
        if let Some(id) = self.find(namespace) {
            self.entry(id).num_roots += 1;
            return id;
        }
        let id = self.free.pop().unwrap_or_else(|| {
            self.entries.push(None);
            (self.entries.len() - 1) as u32
        });
        self.ids.insert(namespace.clone(), id);
        self.entries[id as usize] = Some(Entry { namespace: namespace.clone(), num_roots: 1 });
        NamespaceId(id)
    }

    /// Counts one less, and forgets it with the last.
    pub(super) fn leave(&mut self, id: NamespaceId) {
        let entry = self.entry(id);
        entry.num_roots -= 1;
        if entry.num_roots == 0 {
            let Entry { namespace, .. } =
                self.entries[id.0 as usize].take().expect("seen just now; this is a bug");
            self.ids.remove(&namespace);
            self.free.push(id.0);
        }
    }

    fn entry(&mut self, id: NamespaceId) -> &mut Entry {
        self.entries[id.0 as usize].as_mut().expect("a namespace in use is known; this is a bug")
    }

    /// Panics unless it counts what `roots` says.
    pub(super) fn check_integrity(&self, roots: impl Iterator<Item = NamespaceId>) {
        let mut counts = vec![0; self.entries.len()];
        roots.for_each(|id| counts[id.0 as usize] += 1);
        for (id, entry) in self.entries.iter().enumerate() {
            let num_roots = entry.as_ref().map_or(0, |entry| entry.num_roots);
            assert_eq!(counts[id], num_roots, "chains of a namespace miscounted; this is a bug: {self:?}");
            let named =
                entry.as_ref().is_none_or(|entry| self.ids.get(&entry.namespace) == Some(&(id as u32)));
            assert!(named, "a namespace is kept under another's name; this is a bug: {self:?}");
        }
        let num_used = self.entries.len() - self.free.len();
        assert_eq!(self.ids.len(), num_used, "namespaces lost or doubled; this is a bug: {self:?}");
    }
}
