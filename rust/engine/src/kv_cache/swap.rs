//! Preempted sequences in the host tier: their blocks are swapped out, and back in when they are scheduled again.

use penstock_types::BlockCopy;

use super::block_table::BlockTable;
use super::host_pool::SwappedBlocks;
use super::manager::{KvCacheManager, MAX_COPIES};
use super::prefix_match::PrefixMatch;
use crate::prefix_cache::PrefixCache;

impl KvCacheManager {
    /// Saves in the host tier the blocks of a table that the prefix cache does not keep, all of them, and drops
    /// prefixes there to make room. To be called before the table is freed. `None` if there is nothing to save, no room
    /// for it, or too much to copy already.
    pub fn swap_out(&mut self, table: &BlockTable, num_tokens: usize) -> Option<SwappedBlocks> {
        let epoch = self.prefix_cache.as_ref().map(PrefixCache::epoch);
        let first = if epoch == Some(table.epoch) { table.num_published } else { 0 };
        let num_blocks = table.blocks.len() - first;
        let num_prefixes = self.prefix_cache.as_ref().map_or(0, PrefixCache::num_on_host);
        let is_crowded = self.copies.len() >= MAX_COPIES;
        if is_crowded || num_blocks == 0 || num_blocks > self.host.num_free() + num_prefixes {
            return None;
        }
        let mut blocks = Vec::with_capacity(num_blocks);
        for &from in &table.blocks[first..] {
            let to = self.take_host_block().expect("counted just now; this is a bug");
            self.copies.push(BlockCopy::Save { from, to });
            blocks.push(to);
        }
        self.num_swapped += 1;
        Some(SwappedBlocks { first, blocks, num_tokens, step: self.next_step, epoch: table.epoch })
    }

    /// Whether the swapped blocks can follow those of `hit` in a table.
    pub(super) fn can_resume(&self, swapped: &SwappedBlocks, hit: &PrefixMatch) -> bool {
        let epoch = self.prefix_cache.as_ref().map_or(0, PrefixCache::epoch);
        swapped.first == 0 || swapped.epoch == epoch && swapped.first <= hit.nodes.len()
    }

    /// Adds the swapped blocks to a table that ends where they begin. Returns the number of tokens it holds.
    pub(super) fn swap_in(&mut self, swapped: SwappedBlocks, table: &mut BlockTable) -> usize {
        self.num_swapped -= 1;
        table.epoch = swapped.epoch;
        for from in swapped.blocks {
            self.load(from, table);
        }
        swapped.num_tokens
    }

    /// Gives up swapped blocks.
    pub fn discard(&mut self, swapped: SwappedBlocks) {
        self.num_swapped -= 1;
        swapped.blocks.into_iter().for_each(|block| self.host.free(block));
    }
}
