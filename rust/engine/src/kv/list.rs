//! The block table of one sequence, together with the promise of blocks for the tokens it has already.

use crate::prefix::NodeId;
use penstock_types::BlockId;

/// Made by [`Memory::open`](super::Memory::open), grown by it, and given back to it: dropping one instead leaks its
/// blocks, so a debug build panics.
#[derive(Debug, Default)]
#[must_use = "a block list must be given back"]
pub struct BlockList {
    pub(super) blocks: Vec<BlockId>,
    /// Blocks promised and not taken yet.
    pub(super) num_reserved: usize,
    /// Its first blocks, so many, are in the prefix cache, found there or published; the last of them is this.
    pub(super) num_published: usize,
    pub(super) last_published: Option<NodeId>,
    /// The prefix cache's when the first of its blocks were computed or found; 0 if there is no cache. After a flush
    /// nothing of it is published, nor will be, not even once it was saved and restored.
    pub(super) epoch: u64,
    /// The latest step whose plan loads something into its blocks; 0 if none does.
    pub(super) depends_on: u64,
}

impl BlockList {
    /// The blocks taken so far, in the order of the positions they hold.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// Blocks it may still take without asking.
    pub fn num_reserved(&self) -> usize {
        self.num_reserved
    }

    /// The latest step that has to succeed for its blocks to hold what they should; 0 if they do.
    pub fn depends_on(&self) -> u64 {
        self.depends_on
    }
}

impl Drop for BlockList {
    fn drop(&mut self) {
        // `Memory::give_back` empties a list before dropping it. While a panic unwinds, the memory is on its way out too.
        let is_given_back = self.blocks.is_empty() && self.num_reserved == 0;
        debug_assert!(
            is_given_back || std::thread::panicking(),
            "{self:?} was not given back; this is a bug"
        );
    }
}
