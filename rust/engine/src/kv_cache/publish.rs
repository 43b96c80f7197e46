//! Publishing of computed blocks to the prefix cache, and expiry of unused ones.

use std::time::Instant;

use super::block_table::BlockTable;
use super::manager::KvCacheManager;
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
