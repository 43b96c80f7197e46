//! The reference counts of the KV cache's blocks: which are free, cached or in use, and how many are reserved.

use penstock_types::BlockId;

use super::block_table::BlockTable;

/// All blocks of the KV cache. Every operation is O(1).
///
/// Invariants: the reference count of a block is the number of tables that contain it; a block without references is in
/// `free` or is one of the `num_cached`, whose contents the prefix cache keeps; `num_reserved` is the sum over the
/// tables, and at most the number of blocks that are free or cached. So allocating a reserved block cannot fail, once a
/// cached block was evicted where none is free.
#[derive(Debug)]
pub struct BlockPool {
    /// A stack: the block freed last is the most likely to be in a CPU cache.
    free: Vec<BlockId>,
    ref_counts: Vec<u32>,
    num_cached: usize,
    num_reserved: usize,
    num_releases: u64,
}

impl BlockPool {
    /// A pool of `num_blocks` free blocks; at least one.
    pub fn new(num_blocks: usize) -> Self {
        assert!(num_blocks > 0, "a pool without blocks; this is a bug");
        let last = u32::try_from(num_blocks - 1).expect("the limits were validated; this is a bug");
        Self {
            free: (0..=last).rev().map(BlockId).collect(),
            ref_counts: vec![0; num_blocks],
            num_cached: 0,
            num_reserved: 0,
            num_releases: 0,
        }
    }

    pub fn num_blocks(&self) -> usize {
        self.ref_counts.len()
    }

    /// Blocks in at least one table.
    pub fn num_used(&self) -> usize {
        self.ref_counts.len() - self.free.len() - self.num_cached
    }

    /// Blocks in no table that the prefix cache keeps.
    pub fn num_cached(&self) -> usize {
        self.num_cached
    }

    /// Blocks whose contents nothing needs.
    pub fn num_free(&self) -> usize {
        self.free.len()
    }

    /// Blocks reserved for tables and not allocated yet.
    pub fn num_reserved(&self) -> usize {
        self.num_reserved
    }

    /// Blocks that can be allocated or reserved: free or cached, and not reserved.
    pub fn num_available(&self) -> usize {
        self.free.len() + self.num_cached - self.num_reserved
    }

    /// The number of times that blocks have become available since the start.
    pub fn num_releases(&self) -> u64 {
        self.num_releases
    }

    /// The number of tables that contain a block.
    pub fn ref_count(&self, block: BlockId) -> usize {
        self.ref_counts[block.0 as usize] as usize
    }

    /// Reserves `num_blocks` more for `table`. Panics if they are not available.
    pub fn reserve(&mut self, table: &mut BlockTable, num_blocks: usize) {
        assert!(num_blocks <= self.num_available(), "reserved more than available; this is a bug: {self:?}");
        table.num_reserved += num_blocks;
        self.num_reserved += num_blocks;
    }

    /// Adds a free block to `table`, out of its reservation. Panics if it has none.
    pub fn allocate(&mut self, table: &mut BlockTable) -> BlockId {
        assert!(table.num_reserved > 0, "{table:?} exceeds its reservation; this is a bug");
        let block = self.free.pop().expect("reserved blocks are free or cached; this is a bug");
        table.num_reserved -= 1;
        self.num_reserved -= 1;
        self.ref_counts[block.0 as usize] = 1;
        table.blocks.push(block);
        block
    }

    /// Adds a reference to a block that is in use or cached. True if it was cached; it must have been available then.
    pub fn acquire(&mut self, block: BlockId) -> bool {
        let count = &mut self.ref_counts[block.0 as usize];
        let was_cached = *count == 0;
        *count += 1;
        // Not `-= usize::from(was_cached)`: rustc 1.95 to 1.97 loses it without overflow checks (the MIR pass
        // SimplifyComparisonIntegral, where the caller branches on the result).
        if was_cached {
            self.num_cached -= 1;
        }
        was_cached
    }

    /// Adds a block that is in use or cached to `table`, in place of a reserved one. True if it was cached.
    pub fn acquire_reserved(&mut self, table: &mut BlockTable, block: BlockId) -> bool {
        assert!(table.num_reserved > 0, "{table:?} exceeds its reservation; this is a bug");
        table.num_reserved -= 1;
        self.num_reserved -= 1;
        table.blocks.push(block);
        let was_cached = self.acquire(block);
        if !was_cached {
            self.num_releases += 1;
        }
        was_cached
    }

    /// Drops a reference to a block. If it was the last, returns true, and the block becomes cached if `is_published`,
    /// else free.
    pub fn release(&mut self, block: BlockId, is_published: bool) -> bool {
        let count = &mut self.ref_counts[block.0 as usize];
        *count -= 1;
        if *count > 0 {
            return false;
        }
        match is_published {
            true => self.num_cached += 1,
            false => self.free.push(block),
        }
        self.num_releases += 1;
        true
    }

    /// Frees a cached block.
    pub fn evict(&mut self, block: BlockId) {
        self.num_cached -= 1;
        self.free.push(block);
    }

    /// Cancels the reservation of a table.
    pub fn cancel_reservation(&mut self, table: &mut BlockTable) {
        self.num_reserved -= std::mem::take(&mut table.num_reserved);
        self.num_releases += 1;
    }

    /// Panics unless the counts agree with each other, with `tables`, which must be all there are, and with `cached`.
    pub fn check_integrity<'a>(
        &self,
        tables: impl IntoIterator<Item = &'a BlockTable>,
        cached: impl Iterator<Item = BlockId>,
    ) {
        let mut counts = vec![0; self.ref_counts.len()];
        let mut num_reserved = 0;
        for table in tables {
            num_reserved += table.num_reserved;
            for block in &table.blocks {
                counts[block.0 as usize] += 1;
            }
        }
        assert_eq!(counts, self.ref_counts, "tables and reference counts differ; this is a bug: {self:?}");
        assert_eq!(
            num_reserved, self.num_reserved,
            "reservations and their sum differ; this is a bug: {self:?}"
        );
        let num_unreferenced = self.free.len() + self.num_cached;
        assert!(num_reserved <= num_unreferenced, "more reserved than available; this is a bug: {self:?}");
        let mut num_cached = 0;
        for block in cached.inspect(|_| num_cached += 1).chain(self.free.iter().copied()) {
            let count = &mut counts[block.0 as usize];
            assert_eq!(*count, 0, "{block:?} is free or cached twice or in use; this is a bug: {self:?}");
            *count = 1;
        }
        assert_eq!(num_cached, self.num_cached, "cached blocks miscounted; this is a bug: {self:?}");
        assert!(!counts.is_empty(), "nothing was checked; this is a bug");
        assert!(
            !counts.contains(&0),
            "a block is neither free nor cached nor in use; this is a bug: {self:?}"
        );
    }
}
