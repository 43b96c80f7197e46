//! The cache of compiled grammars.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use crate::{CompiledGrammar, GrammarSpec};

/// A least-recently-used cache limited by number of entries and by bytes.
pub(crate) struct GrammarCache {
    entries: HashMap<Arc<GrammarSpec>, CachedGrammar>,
    /// Keys in order of last use. Each use has a unique number.
    by_use: BTreeMap<u64, Arc<GrammarSpec>>,
    uses: u64,
    bytes: usize,
    max_entries: usize,
    max_bytes: usize,
}

struct CachedGrammar {
    compiled: Arc<CompiledGrammar>,
    last_use: u64,
    bytes: usize,
}

impl GrammarCache {
    pub(crate) fn new(max_entries: usize, max_bytes: usize) -> Self {
        Self { entries: HashMap::new(), by_use: BTreeMap::new(), uses: 0, bytes: 0, max_entries, max_bytes }
    }

    pub(crate) fn get(&mut self, spec: &GrammarSpec) -> Option<Arc<CompiledGrammar>> {
        let entry = self.entries.get_mut(spec)?;
        self.uses += 1;
        let key = self.by_use.remove(&entry.last_use).expect("every entry has a last use; this is a bug");
        self.by_use.insert(self.uses, key);
        entry.last_use = self.uses;
        Some(Arc::clone(&entry.compiled))
    }

    /// Does nothing if the grammar alone exceeds the limits.
    pub(crate) fn insert(&mut self, spec: Arc<GrammarSpec>, compiled: Arc<CompiledGrammar>) {
        let bytes = compiled.bytes() + spec.source_bytes();
        if bytes > self.max_bytes || self.max_entries == 0 || self.entries.contains_key(&*spec) {
            return;
        }
        self.uses += 1;
        self.bytes += bytes;
        self.by_use.insert(self.uses, Arc::clone(&spec));
        self.entries.insert(spec, CachedGrammar { compiled, last_use: self.uses, bytes });
        while self.entries.len() > self.max_entries || self.bytes > self.max_bytes {
            let (_, oldest) = self.by_use.pop_first().expect("every entry has a last use; this is a bug");
            let entry = self.entries.remove(&oldest).expect("every use has an entry; this is a bug");
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
