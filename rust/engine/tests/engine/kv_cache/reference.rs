//! The naive reference of the KV cache manager.

use penstock_engine::CachedTokens;

use super::Seen;

#[derive(Clone)]
pub struct RefTable {
    pub salt: Option<&'static str>,
    pub tokens: Vec<u32>,
    /// The number of its blocks that may be shared.
    pub max_shared: usize,
    pub num_blocks: usize,
    pub num_reserved: usize,
    pub num_published: usize,
    pub is_reset: bool,
}

/// A cached block by its whole contents: its salt, and all tokens up to its end.
pub type Key = (Option<&'static str>, Vec<u32>);

#[derive(Default)]
pub struct Reference {
    pub num_blocks: usize,
    pub host_blocks: usize,
    pub host_prefixes: bool,
    pub block_size: usize,
    pub ttl: u64,
    pub now: u64,
    /// Unreferenced blocks and when they were used last, oldest first.
    pub device: Vec<(Key, u64)>,
    pub host: Vec<(Key, u64)>,
    pub num_swapped: usize,
}

impl RefTable {
    pub fn key(&self, index: usize, block_size: usize) -> Key {
        (self.salt, self.tokens[..(index + 1) * block_size].to_vec())
    }
}

impl Reference {
    pub fn is_referenced(&self, key: &Key, others: &[RefTable]) -> bool {
        others.iter().any(|table| {
            table.salt == key.0
                && !table.is_reset
                && table.tokens[..table.num_published * self.block_size].starts_with(&key.1)
        })
    }

    pub fn num_used(&self, tables: &[RefTable]) -> usize {
        let mut shared: Vec<Key> = tables
            .iter()
            .filter(|table| !table.is_reset)
            .flat_map(|table| (0..table.num_published).map(|index| table.key(index, self.block_size)))
            .collect();
        shared.sort();
        shared.dedup();
        let private = |table: &RefTable| table.num_blocks - table.num_published;
        shared.len() + tables.iter().map(private).sum::<usize>()
    }

    pub fn num_available(&self, tables: &[RefTable]) -> usize {
        self.num_blocks - self.num_used(tables) - tables.iter().map(|table| table.num_reserved).sum::<usize>()
    }

    pub fn find(&self, wanted: &RefTable, max_blocks: usize, tables: &[RefTable]) -> CachedTokens {
        let mut found = CachedTokens::default();
        for index in 0..max_blocks.min(wanted.max_shared) {
            let key = wanted.key(index, self.block_size);
            if self.is_referenced(&key, tables) || self.device.iter().any(|(other, _)| *other == key) {
                assert_eq!(found.host, 0, "a block on the device follows one on the host");
                found.device += self.block_size;
            } else if self.host.iter().any(|(other, _)| *other == key) {
                found.host += self.block_size;
            } else {
                break;
            }
        }
        found
    }

    pub fn remove(&mut self, key: &Key) {
        self.device.retain(|(other, _)| other != key);
        self.host.retain(|(other, _)| other != key);
    }

    /// Evicts if there is no room for one more used block.
    pub fn allocate(&mut self, num_used: usize, seen: &mut Seen) {
        if num_used + self.device.len() < self.num_blocks {
            return;
        }
        seen.evicted += 1;
        let evicted = self.device.remove(0);
        if self.host_prefixes && self.take_on_host() {
            self.host.push(evicted);
        }
    }

    pub fn take_on_host(&mut self) -> bool {
        if self.host.len() + self.num_swapped == self.host_blocks {
            if self.host.is_empty() {
                return false;
            }
            self.host.remove(0);
        }
        true
    }

    pub fn expire(&mut self, seen: &mut Seen) {
        let before = self.device.len() + self.host.len();
        let is_fresh = |(_, last_used): &(Key, u64)| self.now - last_used < self.ttl;
        self.device.retain(is_fresh);
        self.host.retain(is_fresh);
        seen.expired += (before - self.device.len() - self.host.len()) as u64;
    }
}
