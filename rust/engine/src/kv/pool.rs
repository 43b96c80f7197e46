//! Which blocks are free, how many are promised, and how many lists hold each.

use super::BlockList;
use crate::executor::BlockId;

/// All blocks of the cache. Taking and giving back one block is O(1); nothing searches.
///
/// Invariants: a block is in `free` exactly if its count is 0; a block's count is the number of lists that hold it;
/// `num_reserved` is the sum of the lists' own, and never more than `free` can honour. Hence growing a list within its
/// reservation cannot fail.
#[derive(Debug)]
pub struct BlockPool {
    /// A stack: the block given back last is the likeliest to be warm in somebody's cache.
    free: Vec<BlockId>,
    /// How many lists hold each block.
    counts: Vec<u32>,
    num_reserved: usize,
}

impl BlockPool {
    /// A pool of `num_blocks` free blocks; at least one.
    pub fn new(num_blocks: usize) -> Self {
        assert!(num_blocks > 0, "a pool without blocks; this is a bug");
        let last = u32::try_from(num_blocks - 1).expect("the limits were validated; this is a bug");
        Self { free: (0..=last).rev().map(BlockId).collect(), counts: vec![0; num_blocks], num_reserved: 0 }
    }

    /// Blocks there are.
    pub fn num_blocks(&self) -> usize {
        self.counts.len()
    }

    /// Blocks held by at least one list.
    pub fn num_used(&self) -> usize {
        self.counts.len() - self.free.len()
    }

    /// Free blocks that are promised to lists.
    pub fn num_reserved(&self) -> usize {
        self.num_reserved
    }

    /// An empty list that may grow to `num_blocks`; `None`, changing nothing, if that cannot be promised now.
    pub fn open(&mut self, num_blocks: usize) -> Option<BlockList> {
        if num_blocks > self.free.len() - self.num_reserved {
            return None;
        }
        self.num_reserved += num_blocks;
        Some(BlockList { blocks: Vec::with_capacity(num_blocks), num_reserved: num_blocks })
    }

    /// As [`open`](Self::open), but the list starts with the first `num_shared` blocks of another, which both then
    /// hold and neither may write to.
    pub fn open_sharing(
        &mut self,
        other: &BlockList,
        num_shared: usize,
        num_blocks: usize,
    ) -> Option<BlockList> {
        let shared = &other.blocks[..num_shared];
        let mut list = self.open(num_blocks - num_shared)?;
        list.blocks.extend_from_slice(shared);
        for block in shared {
            self.counts[block.0 as usize] += 1;
        }
        Some(list)
    }

    /// Takes blocks until `list` has `num_blocks` of them, out of its reservation. Asking for more than was reserved
    /// is a bug and panics.
    pub fn grow(&mut self, list: &mut BlockList, num_blocks: usize) {
        while list.blocks.len() < num_blocks {
            assert!(list.num_reserved > 0, "{list:?} outgrows its reservation; this is a bug");
            let block = self.free.pop().expect("reserved blocks are free; this is a bug");
            list.num_reserved -= 1;
            self.num_reserved -= 1;
            self.counts[block.0 as usize] = 1;
            list.blocks.push(block);
        }
    }

    /// Ends a list: its reservation lapses and blocks that no other list holds are free. They may be handed out at
    /// once; what was submitted with them before runs before whatever is submitted with them afterwards.
    pub fn give_back(&mut self, mut list: BlockList) {
        self.num_reserved -= std::mem::take(&mut list.num_reserved);
        // Last block first, so that the next list gets them in the order this one had.
        for block in list.blocks.drain(..).rev() {
            let count = &mut self.counts[block.0 as usize];
            *count -= 1;
            if *count == 0 {
                self.free.push(block);
            }
        }
    }

    /// Panics unless the books agree with each other and with `lists`, which must be all there are.
    pub fn check_integrity<'a>(&self, lists: impl IntoIterator<Item = &'a BlockList>) {
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
        assert!(num_reserved <= self.free.len(), "more promised than free; this is a bug: {self:?}");
        for block in &self.free {
            let count = &mut counts[block.0 as usize];
            assert_eq!(*count, 0, "{block:?} is free twice or held; this is a bug: {self:?}");
            *count = 1;
        }
        assert!(!counts.is_empty(), "nothing was checked; this is a bug");
        assert!(!counts.contains(&0), "a block is neither free nor held; this is a bug: {self:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_promise_is_kept_while_others_take_the_rest() {
        let mut pool = BlockPool::new(4);
        let mut first = pool.open(3).unwrap();
        assert!(pool.open(2).is_none(), "three of four are promised");
        let mut second = pool.open(1).unwrap();
        pool.grow(&mut second, 1);
        pool.grow(&mut first, 3);
        assert_eq!((pool.num_used(), pool.num_reserved()), (4, 0));
        pool.check_integrity([&first, &second]);
        pool.give_back(first);
        pool.check_integrity([&second]);
        pool.give_back(second);
        assert_eq!(pool.num_used(), 0);
    }

    #[test]
    fn a_shared_block_is_freed_by_the_last_list() {
        let mut pool = BlockPool::new(4);
        let mut first = pool.open(2).unwrap();
        pool.grow(&mut first, 2);
        let second = pool.open_sharing(&first, 1, 2).unwrap();
        assert_eq!(second.blocks(), &first.blocks()[..1]);
        pool.give_back(first);
        assert_eq!(pool.num_used(), 1);
        pool.check_integrity([&second]);
        pool.give_back(second);
        pool.check_integrity([]);
        assert_eq!(pool.num_used(), 0);
    }

    #[test]
    #[should_panic(expected = "outgrows its reservation")]
    fn growing_beyond_the_promise_is_a_bug() {
        let mut pool = BlockPool::new(4);
        let mut list = pool.open(1).unwrap();
        pool.grow(&mut list, 2);
    }

    #[test]
    #[cfg(debug_assertions)]
    #[should_panic(expected = "was not given back")]
    fn a_lost_list_is_noticed() {
        drop(BlockPool::new(1).open(1));
    }

    #[test]
    #[should_panic(expected = "lists and counts differ")]
    fn the_integrity_check_notices_a_list_it_was_not_shown() {
        let mut pool = BlockPool::new(2);
        let mut list = pool.open(1).unwrap();
        pool.grow(&mut list, 1);
        pool.check_integrity([]);
    }
}
