//! The consistency checks of the KV cache, for tests and for idle debug builds.

use super::block_table::BlockTable;
use super::host_pool::SwappedBlocks;
use super::manager::KvCacheManager;
use crate::prefix_cache::PrefixCache;

impl KvCacheManager {
    /// Panics unless pool, prefix cache and host tier agree with each other, with `tables` and with `swapped`, which
    /// must be all there are.
    pub fn check_integrity<'a>(
        &self,
        tables: impl Iterator<Item = &'a BlockTable> + Clone,
        swapped: impl Iterator<Item = &'a SwappedBlocks>,
    ) {
        let cached = self.prefix_cache.iter().flat_map(PrefixCache::unreferenced_on_device);
        self.pool.check_integrity(tables.clone(), cached);
        let prefixes = self.prefix_cache.iter().flat_map(PrefixCache::host_blocks);
        let swapped: Vec<_> = swapped.collect();
        assert_eq!(swapped.len(), self.num_swapped, "swapped sequences miscounted; this is a bug");
        let swapped = swapped.into_iter().flat_map(|swapped| swapped.blocks.iter().copied());
        self.host.check_integrity(swapped.chain(prefixes));
        let Some(cache) = &self.prefix_cache else { return };
        cache.check_integrity(|block| self.pool.ref_count(block) > 0);
        for table in tables.filter(|table| table.epoch == cache.epoch()) {
            let published = table.blocks.iter().take_while(|block| cache.node_in(**block).is_some()).count();
            assert_eq!(
                published, table.num_published,
                "{table:?} and the prefix cache differ; this is a bug"
            );
            let last = published.checked_sub(1).and_then(|last| cache.node_in(table.blocks[last]));
            assert_eq!(last, table.last_published, "{table:?} has another last node; this is a bug");
        }
    }

    /// Whether `num_tokens` tokens fit beside the reservations and `watermark` blocks.
    pub fn can_hold(&self, num_tokens: usize, watermark: usize) -> bool {
        self.num_blocks(num_tokens) + watermark <= self.pool.num_available()
    }

    /// Panics unless a table holds exactly `num_tokens` tokens and has reserved no more than `max_tokens` need.
    pub fn check_table(&self, table: &BlockTable, num_tokens: usize, max_tokens: usize) {
        let num_blocks = table.blocks.len();
        assert_eq!(num_blocks, self.num_blocks(num_tokens), "{table:?} has wrong blocks; this is a bug");
        assert!(
            num_blocks + table.num_reserved <= self.num_blocks(max_tokens),
            "{table:?} has reserved too much; this is a bug"
        );
    }
}
