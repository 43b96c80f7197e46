//! Best fit with coalescing, as arithmetic over offsets.
//!
//! A [`Bfc`] divides a region `0..capacity` without accessing it: no pointer, no lock, no device, no clock. So it works
//! for host and device memory, is tested without either, and the same requests give the same offsets on every rank. It
//! is for blocks of any size and lifetime (workspaces, adapters, images); blocks of one size (the KV cache) have a
//! pool.
//!
//! ```text
//!     0                                                                        capacity
//!     | weights | adapter | free | adapter |       gap        | image | free | workspace |
//!       Low: from the bottom of a free chunk ->            <- High: from its top
//! ```
//!
//! The rules:
//! - **Unit.** Sizes are rounded up to the alignment, so every offset is aligned. A request of zero bytes gets one
//!   unit, so every block has its own offset.
//! - **Placement.** Long-lived blocks take the bottom of a free chunk, short-lived blocks its top, so that they grow
//!   towards each other from the ends of the region. A free chunk belongs to the side of its neighbours.
//! - **Fit.** The smallest sufficient free chunk, the lowest of equals: on the block's own side, else the gap, else on
//!   the other side. In the serving workload of `tests/all/bfc/serving.rs` the mean fragmentation is a half to two
//!   thirds of that of best fit over all free chunks.
//! - **Split.** Always, unless the free chunk fits exactly. The rest is a multiple of the unit and becomes a free
//!   chunk, so a block exceeds its request only by the rounding. In the same workload, not splitting off rests below a
//!   sixteenth made no difference, and not splitting off rests up to a half wasted the gap on the largest block.
//! - **Coalesce.** A freed chunk is joined with both neighbours immediately: free chunks are never adjacent.

#![allow(missing_docs)]

mod accounting;
mod chunk;
mod error;
mod free_chunks;
mod integrity;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use penstock_types::FieldError;

use accounting::Accounting;
pub use accounting::{AllocatorStats, Exhausted, Extent, NamedUsage};
use chunk::{Allocation, Chunks, MemoryChunk};
pub use error::StaleBlock;
use free_chunks::FreeChunks;

/// An alignment that is sufficient for every device.
pub const DEFAULT_ALIGNMENT: usize = 256;
/// The largest capacity: an offset plus a size cannot overflow.
const MAX_CAPACITY: usize = isize::MAX as usize;

/// The end of the region from which a block is placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// The bottom, for long-lived blocks.
    Low,
    /// The top, for short-lived blocks.
    High,
}

/// The id of a block, valid for its allocator and its lifetime.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AllocationId {
    allocator: u64,
    serial: u64,
    slot: u32,
}

/// An allocated part of the region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    pub id: AllocationId,
    /// A multiple of the alignment.
    pub offset: usize,
    /// The requested bytes, rounded up to the alignment.
    pub size: usize,
}

/// The allocator.
///
/// Invariants: the chunks cover the region; no two free chunks are adjacent; the bins have exactly the free chunks, by
/// side and size; `accounting` has the sums over the chunks in use; `retired` has exactly the retired chunks.
#[derive(Debug)]
pub struct Bfc {
    /// Distinguishes the allocators of a process.
    identity: u64,
    alignment: usize,
    capacity: usize,
    chunks: Chunks,
    free_chunks: FreeChunks,
    accounting: Accounting,
    peak: usize,
    /// The slots of retired chunks, by (fence, serial).
    retired: BTreeMap<(u64, u64), u32>,
    next_serial: u64,
}

impl Bfc {
    /// An empty region. `capacity` is rounded down to a multiple of `alignment`, a power of two from 64 to 4096.
    pub fn new(capacity: usize, alignment: usize) -> Result<Self, FieldError> {
        if !(alignment.is_power_of_two() && (64..=4096).contains(&alignment)) {
            return Err(FieldError::new("alignment", alignment, "a power of two from 64 to 4096"));
        }
        if !(alignment..=MAX_CAPACITY).contains(&capacity) {
            let limit = format!("from {alignment} to {MAX_CAPACITY} bytes");
            return Err(FieldError::new("capacity", capacity, limit));
        }
        let capacity = capacity - capacity % alignment;
        // Relaxed: the numbers only have to differ.
        static NEXT_IDENTITY: AtomicU64 = AtomicU64::new(0);
        let mut bfc = Self {
            identity: NEXT_IDENTITY.fetch_add(1, Ordering::Relaxed),
            alignment,
            capacity,
            chunks: Chunks::new(capacity),
            free_chunks: FreeChunks::default(),
            accounting: Accounting::default(),
            peak: 0,
            retired: BTreeMap::new(),
            next_serial: 0,
        };
        bfc.insert_free(chunk::LOWEST);
        Ok(bfc)
    }

    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// The unit of offsets and sizes.
    pub fn alignment(&self) -> usize {
        self.alignment
    }

    /// The size of a block for `requested` bytes: a multiple of the alignment, at least one unit; `None` on overflow.
    pub fn granted(&self, requested: usize) -> Option<usize> {
        requested.max(1).checked_next_multiple_of(self.alignment)
    }

    /// Allocates a block of at least `requested` bytes for the purpose `name`. If no free chunk is large enough,
    /// nothing changes and the error lists the largest usages.
    pub fn allocate(
        &mut self,
        requested: usize,
        placement: Placement,
        name: &'static str,
    ) -> Result<Block, Exhausted> {
        let fit = self
            .granted(requested)
            .and_then(|size| Some((size, self.free_chunks.take_best(size, placement)?)));
        let Some((size, free)) = fit else { return Err(self.exhausted(requested, name)) };

        let (slot, rest) = match (placement, free.size - size) {
            (_, 0) => (free.slot, None),
            (Placement::Low, _) => (free.slot, Some(self.chunks.split(free.slot, size))),
            (Placement::High, rest) => (self.chunks.split(free.slot, rest), Some(free.slot)),
        };
        let serial = self.next_serial;
        self.next_serial += 1;
        let chunk = self.chunks.get_mut(slot);
        chunk.allocation = Some(Allocation { serial, requested, name, placement, is_retired: false });
        self.accounting.add(chunk);
        self.peak = self.peak.max(self.accounting.in_use);
        let id = AllocationId { allocator: self.identity, serial, slot };
        let block = Block { id, offset: chunk.offset, size };
        // Inserted last, because the neighbours determine the side of a free chunk.
        if let Some(rest) = rest {
            self.insert_free(rest);
        }
        Ok(block)
    }

    /// Frees a block. Its memory can be reused immediately.
    pub fn free(&mut self, id: AllocationId) -> Result<(), StaleBlock> {
        self.find(id)?;
        self.release(id.slot);
        Ok(())
    }

    /// Frees a block that the device may still use: its memory is reused only after [`reclaim`](Self::reclaim) has been
    /// called with `fence` or a later one. The caller numbers the fences, for example by the steps submitted to a
    /// stream.
    pub fn retire(&mut self, id: AllocationId, fence: u64) -> Result<(), StaleBlock> {
        self.find(id)?;
        let chunk = self.chunks.get_mut(id.slot);
        self.accounting.remove(chunk);
        chunk.allocation =
            chunk.allocation.take().map(|allocation| Allocation { is_retired: true, ..allocation });
        self.accounting.add(chunk);
        self.retired.insert((fence, id.serial), id.slot);
        Ok(())
    }

    /// Frees the retired blocks whose fence is at most `passed`, and returns their number.
    pub fn reclaim(&mut self, passed: u64) -> usize {
        let before = self.retired.len();
        while let Some(first) = self.retired.first_entry().filter(|first| first.key().0 <= passed) {
            let slot = first.remove();
            self.release(slot);
        }
        before - self.retired.len()
    }

    /// Adds `bytes`, rounded down to a multiple of the alignment, at the top of the region and returns the added bytes.
    /// Offsets do not change.
    pub fn extend(&mut self, bytes: usize) -> Result<usize, FieldError> {
        let most = MAX_CAPACITY - self.capacity;
        if !(self.alignment..=most).contains(&bytes) {
            let limit = format!("from {} to {most} bytes", self.alignment);
            return Err(FieldError::new("extension", bytes, limit));
        }
        let added = bytes - bytes % self.alignment;
        if let Some(top) = self.chunks.top_free() {
            self.remove_free(top);
        }
        let top = self.chunks.extend(added);
        self.insert_free(top);
        self.capacity += added;
        Ok(added)
    }

    /// The block of an id.
    pub fn get(&self, id: AllocationId) -> Result<Block, StaleBlock> {
        let chunk = self.find(id)?;
        Ok(Block { id, offset: chunk.offset, size: chunk.size })
    }

    pub fn stats(&self) -> AllocatorStats {
        let Accounting { in_use, requested, retired, num_live } = self.accounting;
        let (largest_free, num_free_chunks) = (self.free_chunks.largest(), self.free_chunks.len());
        AllocatorStats {
            capacity: self.capacity,
            in_use,
            requested,
            retired,
            peak: self.peak,
            largest_free,
            num_free_chunks,
            num_live,
        }
    }

    /// The chunks of the region from bottom to top, without gaps.
    pub fn extents(&self) -> impl Iterator<Item = Extent> {
        self.chunks.in_order().map(|(_, chunk)| {
            let name = chunk.allocation.as_ref().map(|allocation| allocation.name);
            Extent { offset: chunk.offset, size: chunk.size, name }
        })
    }

    /// The chunk of a block in use. The serial distinguishes the allocations of one slot.
    fn find(&self, id: AllocationId) -> Result<&MemoryChunk, StaleBlock> {
        if id.allocator != self.identity {
            return Err(StaleBlock::Foreign);
        }
        let chunk = self.chunks.get(id.slot);
        let is_current = |allocation: &Allocation| allocation.serial == id.serial && !allocation.is_retired;
        chunk.allocation.as_ref().is_some_and(is_current).then_some(chunk).ok_or(StaleBlock::Freed)
    }

    /// Frees a chunk in use and joins it with its free neighbours.
    fn release(&mut self, slot: u32) {
        let MemoryChunk { lower, upper, .. } = *self.chunks.get(slot);
        let (joins_lower, joins_upper) = (self.chunks.is_free(lower), self.chunks.is_free(upper));
        // The neighbours leave their bins while this chunk is in use, because it determines their sides.
        if joins_lower {
            self.remove_free(lower);
        }
        if joins_upper {
            self.remove_free(upper);
        }
        let chunk = self.chunks.get_mut(slot);
        self.accounting.remove(chunk);
        chunk.allocation = None;
        if joins_upper {
            self.chunks.absorb_upper(slot);
        }
        if joins_lower {
            self.chunks.absorb_upper(lower);
        }
        self.insert_free(if joins_lower { lower } else { slot });
    }

    fn insert_free(&mut self, slot: u32) {
        let (side, chunk) = self.chunks.free_chunk(slot);
        self.free_chunks.insert(side, chunk);
    }

    fn remove_free(&mut self, slot: u32) {
        let (side, chunk) = self.chunks.free_chunk(slot);
        self.free_chunks.remove(side, chunk);
    }

    #[cold]
    fn exhausted(&self, requested: usize, name: &'static str) -> Exhausted {
        let usages = accounting::largest_usages(self.chunks.in_order().map(|(_, chunk)| chunk));
        Exhausted { name, requested, stats: self.stats(), usages }
    }
}
