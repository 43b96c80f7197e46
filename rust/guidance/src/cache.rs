//! Compiled grammars kept for the next request.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use crate::{Compiled, Grammar};

/// Bounded by number and by bytes; who was not asked for the longest goes first.
pub(crate) struct Cache {
    entries: HashMap<Arc<Grammar>, Entry>,
    /// The order of use: the moment of an entry's last use, which no two share.
    by_use: BTreeMap<u64, Arc<Grammar>>,
    uses: u64,
    bytes: usize,
    max_entries: usize,
    max_bytes: usize,
}

struct Entry {
    compiled: Arc<Compiled>,
    last_use: u64,
    bytes: usize,
}

impl Cache {
    pub(crate) fn new(max_entries: usize, max_bytes: usize) -> Self {
        Self { entries: HashMap::new(), by_use: BTreeMap::new(), uses: 0, bytes: 0, max_entries, max_bytes }
    }

    pub(crate) fn get(&mut self, grammar: &Grammar) -> Option<Arc<Compiled>> {
        let entry = self.entries.get_mut(grammar)?;
        self.uses += 1;
        let key = self.by_use.remove(&entry.last_use).expect("every entry has a last use; this is a bug");
        self.by_use.insert(self.uses, key);
        entry.last_use = self.uses;
        Some(Arc::clone(&entry.compiled))
    }

    /// Does nothing if the grammar alone is more than all may be.
    pub(crate) fn insert(&mut self, grammar: Arc<Grammar>, compiled: Arc<Compiled>) {
        let bytes = compiled.bytes() + grammar.source_bytes();
        if bytes > self.max_bytes || self.max_entries == 0 || self.entries.contains_key(&*grammar) {
            return;
        }
        self.uses += 1;
        self.bytes += bytes;
        self.by_use.insert(self.uses, Arc::clone(&grammar));
        self.entries.insert(grammar, Entry { compiled, last_use: self.uses, bytes });
        while self.entries.len() > self.max_entries || self.bytes > self.max_bytes {
            let (_, oldest) = self.by_use.pop_first().expect("every entry has a last use; this is a bug");
            let entry = self.entries.remove(&oldest).expect("what was used is an entry; this is a bug");
            self.bytes -= entry.bytes;
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}
