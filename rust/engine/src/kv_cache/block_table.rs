//! The block table of a sequence, with its reservation.

use penstock_types::BlockId;

use crate::prefix_cache::NodeId;

/// The epoch of tables that are not published; the prefix cache counts from 1.
pub(super) const NEVER_PUBLISHED: u64 = 0;

/// The blocks of one sequence, in the order of the positions they hold. All layers form one group, with one list of
/// blocks.
///
/// [`KvCacheManager`](super::KvCacheManager) allocates, grows and frees it. Dropping a table that was not freed leaks
/// its blocks; debug builds panic.
#[derive(Debug, Default)]
#[must_use = "a block table must be freed"]
pub struct BlockTable {
    pub(super) blocks: Vec<BlockId>,
    /// Blocks reserved and not allocated yet.
    pub(super) num_reserved: usize,
    /// The number of first blocks that are in the prefix cache, found there or published; `last_published` is the last.
    pub(super) num_published: usize,
    pub(super) last_published: Option<NodeId>,
    /// The epoch of the prefix cache when the first of its blocks were computed or found; 0 without a prefix cache.
    /// After a reset of the cache nothing of this table is published any more, not even once it was swapped out and
    /// back.
    pub(super) epoch: u64,
    /// The latest step whose plan loads something into its blocks; 0 if none does.
    pub(super) depends_on: u64,
}

impl BlockTable {
    /// The blocks allocated so far.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// The number of blocks reserved and not allocated yet.
    #[cfg(feature = "testing")]
    pub fn num_reserved(&self) -> usize {
        self.num_reserved
    }

    /// Marks all blocks as not published. Called before the blocks of the namespace are removed from the prefix cache.
    pub fn unpublish(&mut self) {
        self.epoch = NEVER_PUBLISHED;
    }

    /// The latest step that must succeed for the contents of the blocks to be valid; 0 if they are.
    pub fn depends_on(&self) -> u64 {
        self.depends_on
    }
}

impl Drop for BlockTable {
    fn drop(&mut self) {
        // `KvCacheManager::free` empties a table before it drops it. While a panic unwinds, the manager is dropped too.
        let is_freed = self.blocks.is_empty() && self.num_reserved == 0;
        debug_assert!(is_freed || std::thread::panicking(), "{self:?} was not freed; this is a bug");
    }
}
