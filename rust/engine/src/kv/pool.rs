//! Which blocks are free, which are only kept, how many are promised, and how many lists hold each.

use super::BlockList;
use penstock_types::BlockId;

/// All blocks of the cache. Every operation is O(1); nothing searches.
///
/// Invariants: a block's count is the number of lists that hold it; a block whose count is 0 is in `free` or is one of
/// the `num_kept`, whose contents the prefix cache keeps; `num_reserved` is the sum of the lists' own, and never more
/// than is free or kept. Hence taking a promised block cannot fail, once a kept one was released where none is free.
#[derive(Debug)]
pub struct BlockPool {
    /// A stack: the block given back last is the likeliest to be warm in somebody's cache.
    free: Vec<BlockId>,
    /// How many lists hold each block.
    counts: Vec<u32>,
    num_kept: usize,
    num_reserved: usize,
}

impl BlockPool {
    /// A pool of `num_blocks` free blocks; at least one.
    pub fn new(num_blocks: usize) -> Self {
        assert!(num_blocks > 0, "a pool without blocks; this is a bug");
        let last = u32::try_from(num_blocks - 1).expect("the limits were validated; this is a bug");
        Self {
            free: (0..=last).rev().map(BlockId).collect(),
            counts: vec![0; num_blocks],
            num_kept: 0,
            num_reserved: 0,
        }
    }

    /// Blocks there are.
    pub fn num_blocks(&self) -> usize {
        self.counts.len()
    }

    /// Blocks held by at least one list.
    pub fn num_used(&self) -> usize {
        self.counts.len() - self.free.len() - self.num_kept
    }

    /// Blocks that nobody holds and that are not free.
    pub fn num_kept(&self) -> usize {
        self.num_kept
    }

    /// Blocks that can be taken without releasing a kept one, if nobody takes what he was promised.
    pub fn num_free(&self) -> usize {
        self.free.len()
    }

    /// Blocks that are promised to lists and not taken yet.
    pub fn num_reserved(&self) -> usize {
        self.num_reserved
    }

    /// Blocks that can be had: free or only kept, and not promised.
    pub fn num_available(&self) -> usize {
        self.free.len() + self.num_kept - self.num_reserved
    }

    /// Whether a block can only be taken once a kept one was released.
    pub fn has_free(&self) -> bool {
        !self.free.is_empty()
    }

    /// How many lists hold a block.
    pub fn count(&self, block: BlockId) -> usize {
        self.counts[block.0 as usize] as usize
    }

    /// Promises `num_blocks` more to `list`. To promise more than is available is a bug and panics.
    pub fn reserve(&mut self, list: &mut BlockList, num_blocks: usize) {
        assert!(num_blocks <= self.num_available(), "promised what there is not; this is a bug: {self:?}");
        list.num_reserved += num_blocks;
        self.num_reserved += num_blocks;
    }

    /// Adds a free block to `list`, out of its reservation. Taking more than was reserved is a bug and panics.
    pub fn take(&mut self, list: &mut BlockList) -> BlockId {
        assert!(list.num_reserved > 0, "{list:?} outgrows its reservation; this is a bug");
        let block = self.free.pop().expect("reserved blocks are free or kept; this is a bug");
        list.num_reserved -= 1;
        self.num_reserved -= 1;
        self.counts[block.0 as usize] = 1;
        list.blocks.push(block);
        block
    }

    /// One more list holds a block, which was held or kept. True if it was kept; then one must have been available.
    pub fn hold(&mut self, block: BlockId) -> bool {
        let count = &mut self.counts[block.0 as usize];
        *count += 1;
        let was_kept = *count == 1;
        self.num_kept -= usize::from(was_kept);
        was_kept
    }

    /// One list less holds a block. If it was the last, true, and the block is kept if so told and else free.
    pub fn let_go(&mut self, block: BlockId, keep: bool) -> bool {
        let count = &mut self.counts[block.0 as usize];
        *count -= 1;
        if *count > 0 {
            return false;
        }
        match keep {
            true => self.num_kept += 1,
            false => self.free.push(block),
        }
        true
    }

    /// A kept block is kept no longer.
    pub fn release(&mut self, block: BlockId) {
        self.num_kept -= 1;
        self.free.push(block);
    }

    /// Takes back what was promised to a list and not taken.
    pub fn cancel_reservation(&mut self, list: &mut BlockList) {
        self.num_reserved -= std::mem::take(&mut list.num_reserved);
    }

    /// Panics unless the books agree with each other, with `lists`, which must be all there are, and with `kept`.
    pub fn check_integrity<'a>(
        &self,
        lists: impl IntoIterator<Item = &'a BlockList>,
        kept: impl Iterator<Item = BlockId>,
    ) {
        let mut counts = vec![0; self.counts.len()];
        let mut num_reserved = 0;
        for list in lists {
            num_reserved += list.num_reserved;
            for block in &list.blocks {
                counts[block.0 as usize] += 1;
            }
        }
        assert_eq!(counts, self.counts, "lists and counts differ; this is a bug: {self:?}");
        assert_eq!(
            num_reserved, self.num_reserved,
            "reservations and their sum differ; this is a bug: {self:?}"
        );
        let num_unheld = self.free.len() + self.num_kept;
        assert!(num_reserved <= num_unheld, "more promised than there is; this is a bug: {self:?}");
        let mut num_kept = 0;
        for block in kept.inspect(|_| num_kept += 1).chain(self.free.iter().copied()) {
            let count = &mut counts[block.0 as usize];
            assert_eq!(*count, 0, "{block:?} is free or kept twice or held; this is a bug: {self:?}");
            *count = 1;
        }
        assert_eq!(num_kept, self.num_kept, "kept blocks miscounted; this is a bug: {self:?}");
        assert!(!counts.is_empty(), "nothing was checked; this is a bug");
        assert!(!counts.contains(&0), "a block is neither free nor kept nor held; this is a bug: {self:?}");
    }
}
