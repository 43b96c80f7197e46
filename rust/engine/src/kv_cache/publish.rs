//! Publishing of computed blocks to the prefix cache, and expiry of unused ones.

use std::sync::Arc;
use std::time::Instant;

use super::block_table::BlockTable;
use super::manager::KvCacheManager;
use crate::kv_events::KvFeedWriter;
#[cfg(feature = "testing")]
use crate::kv_events::{KvNamespace, KvTier};
#[cfg(feature = "testing")]
use crate::prefix_cache::PrefixCache;
use crate::prefix_cache::{Chain, Location, Namespace, Tokens};
use crate::request::AdapterId;

impl KvCacheManager {
    /// Publishes the full blocks among the first `num_computed` tokens of a table; the steps that computed them are
    /// done. If the prefix cache has a block of the same contents, the table refers to that one from now on and its own
    /// becomes free.
    pub fn publish(
        &mut self,
        table: &mut BlockTable,
        chain: &mut Chain,
        tokens: Tokens<'_>,
        num_computed: usize,
        now: Instant,
    ) {
        let end = (num_computed / self.block_size).min(chain.max_blocks());
        if table.num_published >= end {
            return;
        }
        self.expire(now);
        if !self.publishes(table) {
            return;
        }
        let Some(cache) = &mut self.prefix_cache else { return };
        for index in table.num_published..end {
            let block = table.blocks[index];
            let (node, is_new) = cache.insert(chain, tokens, index, table.last_published, block, now);
            match cache.location(node) {
                _ if is_new => {}
                Location::Device(first) => {
                    if self.pool.acquire(first) {
                        cache.acquire(node);
                    }
                    self.pool.release(block, false);
                    table.blocks[index] = first;
                    table.depends_on = table.depends_on.max(cache.loaded_in(node));
                }
                Location::Host(first) => {
                    cache.acquire(node);
                    cache.move_to_device(node, block, 0);
                    self.host.free(first);
                }
            }
            table.last_published = Some(node);
        }
        table.num_published = end;
    }

    /// Removes the blocks from the prefix cache that were not used for too long.
    pub fn expire(&mut self, now: Instant) {
        let Some(cache) = &mut self.prefix_cache else { return };
        while let Some(node) = cache.expired(now) {
            match cache.location(node) {
                Location::Device(block) => self.pool.evict(block),
                Location::Host(block) => self.host.free(block),
            }
            cache.remove(node);
        }
    }

    /// The time at which `expire` next removes a block, unless it is used before.
    pub fn next_expiry(&self) -> Option<Instant> {
        self.prefix_cache.as_ref()?.next_expiry()
    }

    /// Empties the prefix cache. Tables keep their blocks, which are no longer published.
    pub fn reset_prefix_cache(&mut self) {
        let Some(cache) = &mut self.prefix_cache else { return };
        cache.clear(|location| match location {
            Location::Device(block) => self.pool.evict(block),
            Location::Host(block) => self.host.free(block),
        });
    }

    /// Adds a reader of KV events. `key` is that of the hashes in events. Without a prefix cache, its feed ends.
    pub fn add_reader(&mut self, writer: KvFeedWriter, key: u128) {
        if let Some(cache) = &mut self.prefix_cache {
            cache.add_reader(writer, key);
        }
    }

    /// Hands the KV events since the last call to the readers.
    pub fn hand_over_events(&mut self) {
        if let Some(cache) = &mut self.prefix_cache {
            cache.hand_over_events();
        }
    }

    /// Announces the blocks of an adapter in KV events from now on, and no longer those of another one of this name.
    pub fn announce(&mut self, adapter: AdapterId, name: Arc<str>) {
        if let Some(cache) = &mut self.prefix_cache {
            cache.announce(adapter, name);
        }
    }

    /// Removes the blocks of an adapter from the tree that readers of KV events see.
    pub fn withdraw(&mut self, adapter: AdapterId) {
        if let Some(cache) = &mut self.prefix_cache {
            cache.withdraw(adapter);
        }
    }

    /// The blocks that readers of KV events know.
    #[cfg(feature = "testing")]
    pub fn announced_blocks(&self) -> Vec<(KvNamespace, Vec<u32>, KvTier)> {
        self.prefix_cache.as_ref().map_or_else(Vec::new, PrefixCache::announced_blocks)
    }

    /// Removes the blocks of a namespace from the prefix cache. The tables of its sequences are
    /// [unpublished](BlockTable::unpublish), and so are their swapped blocks; they keep their blocks.
    pub fn reset_namespace(&mut self, namespace: &Namespace) {
        let Some(cache) = &mut self.prefix_cache else { return };
        cache.clear_namespace(namespace, |location| match location {
            Location::Device(block) => self.pool.evict(block),
            Location::Host(block) => self.host.free(block),
        });
    }

    /// Removes the blocks of an adapter without sequences from the prefix cache.
    pub fn reset_adapter(&mut self, adapter: AdapterId) {
        let Some(cache) = &mut self.prefix_cache else { return };
        cache.clear_adapter(adapter, |location| match location {
            Location::Device(block) => self.pool.evict(block),
            Location::Host(block) => self.host.free(block),
        });
    }

    /// A plan with copies has failed: the contents that it or a later plan copies are corrupt. The scheduler handles
    /// the tables that depend on one of them and the blocks that one of them swaps out.
    pub fn invalidate_copies(&mut self) {
        self.reset_prefix_cache();
        self.copies.clear();
    }
}
