//! The blocks of the host tier, and those of them that hold a preempted sequence.

use penstock_types::HostBlockId;

#[cfg(doc)]
use super::block_table::BlockTable;
use super::block_table::NEVER_PUBLISHED;

/// The free blocks of the host tier. A block that is not free belongs to a node of the prefix cache or to a
/// [`SwappedBlocks`].
#[derive(Debug)]
pub struct HostPool {
    free: Vec<HostBlockId>,
    num_blocks: usize,
}

/// The blocks of a preempted sequence in the host tier: those from block `first` on; the blocks before it are left to
/// the prefix cache. Ends by being allocated again or discarded.
#[derive(Debug)]
#[must_use = "swapped blocks must be restored or discarded"]
pub struct SwappedBlocks {
    /// Index in the sequence of the first block.
    pub first: usize,
    /// The blocks, in the order of their tokens.
    pub blocks: Vec<HostBlockId>,
    /// Tokens that the sequence had computed, up to its last saved block.
    pub num_tokens: usize,
    /// The step whose plan saves the blocks.
    pub step: u64,
    /// The epoch of the block table; see [`BlockTable`].
    pub(super) epoch: u64,
}

impl SwappedBlocks {
    /// See [`BlockTable::unpublish`].
    pub fn unpublish(&mut self) {
        self.epoch = NEVER_PUBLISHED;
    }
}

impl HostPool {
    /// A tier of `num_blocks` free blocks; may be none.
    pub fn new(num_blocks: usize) -> Self {
        let last = u32::try_from(num_blocks).expect("the limits were validated; this is a bug");
        Self { free: (0..last).rev().map(HostBlockId).collect(), num_blocks }
    }

    pub fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    pub fn num_free(&self) -> usize {
        self.free.len()
    }

    /// Takes a free block; `None` if there is none.
    pub(super) fn allocate(&mut self) -> Option<HostBlockId> {
        self.free.pop()
    }

    /// Frees a block. Copies from it that are decided already are made before any that are decided later.
    pub(super) fn free(&mut self, block: HostBlockId) {
        self.free.push(block);
    }

    /// Panics unless every block is free or in `used`, once.
    pub(super) fn check_integrity(&self, used: impl Iterator<Item = HostBlockId>) {
        let mut blocks: Vec<u32> = self.free.iter().copied().chain(used).map(|block| block.0).collect();
        blocks.sort_unstable();
        let expected = 0..self.num_blocks as u32;
        assert!(
            blocks.iter().copied().eq(expected),
            "host blocks lost or duplicated; this is a bug: {blocks:?}"
        );
    }
}
