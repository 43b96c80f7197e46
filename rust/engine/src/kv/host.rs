//! Which blocks of the host tier are free, and what a sequence without a place has there.

use penstock_types::HostBlockId;

/// All blocks of the host tier. A block that is not free is a prefix cache node's or a [`Saved`] one's.
#[derive(Debug)]
pub struct HostPool {
    free: Vec<HostBlockId>,
    num_blocks: usize,
}

/// The blocks of a sequence that lost its place: those from block `first` on, the ones before being left to the prefix
/// cache. To be restored or discarded.
#[derive(Debug)]
#[must_use = "saved blocks must be restored or discarded"]
pub struct Saved {
    /// Index of the first one in the sequence.
    pub first: usize,
    /// One after the other.
    pub blocks: Vec<HostBlockId>,
    /// Tokens that the sequence had computed, up to its last saved block.
    pub num_tokens: usize,
    /// The step whose plan saves them.
    pub step: u64,
    /// The prefix cache's when the sequence got the place it lost: after a flush nothing of it is published.
    pub epoch: u64,
}

impl HostPool {
    /// A tier of `num_blocks` free blocks; none is fine.
    pub fn new(num_blocks: usize) -> Self {
        let last = u32::try_from(num_blocks).expect("the limits were validated; this is a bug");
        Self { free: (0..last).rev().map(HostBlockId).collect(), num_blocks }
    }

    /// Blocks there are.
    pub fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    /// Blocks that nobody has.
    pub fn num_free(&self) -> usize {
        self.free.len()
    }

    /// A free block, if there is one.
    pub fn take(&mut self) -> Option<HostBlockId> {
        self.free.pop()
    }

    /// Ends the use of a block. A copy from it that is decided already is made before any that is decided later.
    pub fn give_back(&mut self, block: HostBlockId) {
        self.free.push(block);
    }

    /// Panics unless every block is free or in `used`, once.
    pub fn check_integrity(&self, used: impl Iterator<Item = HostBlockId>) {
        let mut blocks: Vec<u32> = self.free.iter().copied().chain(used).map(|block| block.0).collect();
        blocks.sort_unstable();
        let expected = 0..self.num_blocks as u32;
        assert!(
            blocks.iter().copied().eq(expected),
            "host blocks lost or doubled; this is a bug: {blocks:?}"
        );
    }
}
