//! Blocks that several sequences need while one of them computes them.

use std::time::Instant;

use super::block_table::BlockTable;
use super::manager::KvCacheManager;
use crate::prefix_cache::{Chain, Location, Tokens};
use crate::request::AdapterId;

/// Names a block by its contents: those of two blocks with equal keys are equal unless their hashes collide.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockKey {
    adapter: Option<AdapterId>,
    hash: u128,
}

impl KvCacheManager {
    /// Adds to a table the blocks that follow its own in the prefix cache, as far as they are in the KV cache and hold
    /// the first `max_tokens` tokens. They take the place of reserved ones. Returns the number of tokens added: none if
    /// the table has blocks that are not published.
    pub fn extend(
        &mut self,
        table: &mut BlockTable,
        chain: &mut Chain,
        tokens: Tokens<'_>,
        max_tokens: usize,
        now: Instant,
    ) -> usize {
        if !self.is_extensible(table) {
            return 0;
        }
        self.expire(now);
        let Some(cache) = &mut self.prefix_cache else { return 0 };
        let first = table.num_published;
        let end = (max_tokens / self.block_size).min(first + table.num_reserved);
        let mut nodes = Vec::new();
        cache.find(chain, tokens, first..end, table.last_published, &mut nodes);
        for node in nodes {
            let Location::Device(block) = cache.location(node) else { break };
            if self.pool.acquire_reserved(table, block) {
                cache.acquire(node);
            }
            table.depends_on = table.depends_on.max(cache.loaded_in(node));
            table.last_published = Some(node);
            table.num_published += 1;
        }
        (table.num_published - first) * self.block_size
    }

    /// The key of block `index` of a table that [`extend`](Self::extend) may add.
    pub fn extension_key(
        &self,
        table: &BlockTable,
        chain: &mut Chain,
        tokens: Tokens<'_>,
        index: usize,
    ) -> Option<BlockKey> {
        let may_be_added = self.is_extensible(table) && index < chain.max_blocks();
        may_be_added.then(|| self.key(chain, tokens, index))?
    }

    /// Calls `note` with the keys of the blocks among the first `num_tokens` tokens that [`publish`](Self::publish)
    /// will add to the prefix cache.
    pub fn keys_to_publish(
        &self,
        table: &BlockTable,
        chain: &mut Chain,
        tokens: Tokens<'_>,
        num_tokens: usize,
        mut note: impl FnMut(BlockKey),
    ) {
        if self.publishes(table) {
            let end = (num_tokens / self.block_size).min(chain.max_blocks());
            (table.num_published..end).filter_map(|index| self.key(chain, tokens, index)).for_each(&mut note);
        }
    }

    fn key(&self, chain: &mut Chain, tokens: Tokens<'_>, index: usize) -> Option<BlockKey> {
        let hash = self.prefix_cache.as_ref()?.hash(chain, tokens, index);
        Some(BlockKey { adapter: chain.namespace().adapter, hash })
    }

    /// Whether all blocks of a table are in the prefix cache.
    fn is_extensible(&self, table: &BlockTable) -> bool {
        self.publishes(table) && table.blocks.len() == table.num_published
    }

    /// Whether the prefix cache takes the blocks of a table.
    pub(super) fn publishes(&self, table: &BlockTable) -> bool {
        self.prefix_cache.as_ref().is_some_and(|cache| cache.epoch() == table.epoch)
    }
}
