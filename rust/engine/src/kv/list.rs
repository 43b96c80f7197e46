//! The block table of one sequence, together with the pool's promise that it can grow to its full length.

use crate::executor::BlockId;

/// Made by [`BlockPool::open`](super::BlockPool::open), grown by the pool, and given back to it: dropping one instead
/// leaks its blocks, so a debug build panics.
#[derive(Debug)]
#[must_use = "a block list must be given back to its pool"]
pub struct BlockList {
    pub(super) blocks: Vec<BlockId>,
    /// Blocks promised and not taken yet.
    pub(super) num_reserved: usize,
}

impl BlockList {
    /// The blocks taken so far, in the order of the positions they hold.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// Blocks it may still take.
    pub fn num_reserved(&self) -> usize {
        self.num_reserved
    }
}

impl Drop for BlockList {
    fn drop(&mut self) {
        // The pool empties a list before dropping it. While a panic unwinds, the pool is on its way out as well.
        let is_given_back = self.blocks.is_empty() && self.num_reserved == 0;
        debug_assert!(
            is_given_back || std::thread::panicking(),
            "{self:?} was not given back; this is a bug"
        );
    }
}
