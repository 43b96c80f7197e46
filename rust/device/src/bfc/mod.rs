//! Best fit with coalescing, as arithmetic over offsets.
//!
//! A [`Bfc`] divides a region `0..capacity` that it never touches: no pointer, no lock, no device, no clock. So it serves
//! host and device memory alike, is tested with neither, and the same requests give the same offsets on every rank. It is
//! for blocks of any size that come and go (workspaces, adapters, images); blocks of one size (the KV cache) have a pool.
//!
//! ```text
//!     0                                                                        capacity
//!     | weights | adapter | hole | adapter |     the gap      | image | hole | workspace |
//!       Low: each from the bottom of a hole ->              <- High: each from its top
//! ```
//!
//! The rules, in full:
//! - **Unit.** Sizes are rounded up to the alignment, so every offset is aligned. Zero bytes get one unit, so every block has
//!   an offset of its own.
//! - **Place.** What lives long takes the bottom of a hole and what lives briefly its top, so the two grow towards each other
//!   from the ends of the region. A hole belongs to the side whose blocks it lies between.
//! - **Fit.** The smallest hole that suffices, the lowest of equals: on the block's own side, else in the gap, else on the
//!   other side. On days of serving (`tests/bfc/serving.rs`) the mean fragmentation is from a half to two thirds of what best
//!   fit over all holes has.
//! - **Split.** Always, unless the hole fits exactly. The rest is whole units, hence a hole of its own, and nobody holds more
//!   than he asked for but for the rounding. On the same days, to leave rests below a sixteenth unsplit changed nothing, and
//!   to leave rests of up to half wasted the gap on the largest block.
//! - **Coalesce.** At once and with both neighbours: two holes never touch.

mod bins;
mod books;
mod chunk;
mod error;
mod integrity;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use bins::Holes;
use books::Books;
pub use books::{Exhausted, Extent, Holder, Stats};
use chunk::{Chunk, Chunks, Tenant};
pub use error::{InvalidSize, StaleBlock};

/// Alignment that suits every device.
pub const DEFAULT_ALIGNMENT: usize = 256;
/// The most a region can have, as for any allocation: an offset plus a size never overflows.
const MOST_CAPACITY: usize = isize::MAX as usize;

/// From which end of the region a block is placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// The bottom: for what lives long.
    Low,
    /// The top: for what lives briefly.
    High,
}

/// Names a block to the allocator it came from; to no other, and not beyond the block's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AllocationId {
    allocator: u64,
    serial: u64,
    slot: u32,
}

/// A stretch of the region that is its holder's alone until he gives it back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// To give it back with.
    pub id: AllocationId,
    /// Where it starts; a multiple of the alignment.
    pub offset: usize,
    /// Bytes granted: what was asked for, rounded up to the alignment.
    pub size: usize,
}

/// The allocator.
///
/// Invariants: the chunks tile the region; no two free chunks touch; every free chunk is in the bin of its side and size, and
/// nothing else is in a bin; `books` are the sums over the chunks in use; `retired` lists exactly the chunks that wait.
#[derive(Debug)]
pub struct Bfc {
    /// Distinguishes the allocators of a process, and decides nothing else.
    identity: u64,
    alignment: usize,
    capacity: usize,
    chunks: Chunks,
    holes: Holes,
    books: Books,
    peak: usize,
    /// By (fence, serial): the slots of chunks that wait.
    retired: BTreeMap<(u64, u64), u32>,
    next_serial: u64,
}

impl Bfc {
    /// An empty region. `capacity` is rounded down to whole units; `alignment` is a power of two from 64 to 4096.
    pub fn new(capacity: usize, alignment: usize) -> Result<Self, InvalidSize> {
        if !(alignment.is_power_of_two() && (64..=4096).contains(&alignment)) {
            return Err(InvalidSize::new("alignment", alignment, "a power of two from 64 to 4096"));
        }
        if !(alignment..=MOST_CAPACITY).contains(&capacity) {
            let limit = format!("from {alignment} to {MOST_CAPACITY} bytes");
            return Err(InvalidSize::new("capacity", capacity, limit));
        }
        let capacity = capacity - capacity % alignment;
        // Relaxed: only the numbers must differ.
        static NEXT_IDENTITY: AtomicU64 = AtomicU64::new(0);
        let mut bfc = Self {
            identity: NEXT_IDENTITY.fetch_add(1, Ordering::Relaxed),
            alignment,
            capacity,
            chunks: Chunks::new(capacity),
            holes: Holes::default(),
            books: Books::default(),
            peak: 0,
            retired: BTreeMap::new(),
            next_serial: 0,
        };
        bfc.file(chunk::LOWEST);
        Ok(bfc)
    }

    /// Size of the region.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// What offsets and sizes are multiples of.
    pub fn alignment(&self) -> usize {
        self.alignment
    }

    /// Bytes that a request for `requested` takes: whole units, at least one; `None` if no machine has as many.
    pub fn granted(&self, requested: usize) -> Option<usize> {
        requested.max(1).checked_next_multiple_of(self.alignment)
    }

    /// A block of at least `requested` bytes, `name` saying what for. Without a hole that suffices nothing changes, and the
    /// error says who has the memory.
    pub fn allocate(
        &mut self,
        requested: usize,
        placement: Placement,
        name: &'static str,
    ) -> Result<Block, Exhausted> {
        let fit =
            self.granted(requested).and_then(|size| Some((size, self.holes.take_best(size, placement)?)));
        let Some((size, hole)) = fit else { return Err(self.exhausted(requested, name)) };

        let (slot, rest) = match (placement, hole.size - size) {
            (_, 0) => (hole.slot, None),
            (Placement::Low, _) => (hole.slot, Some(self.chunks.split(hole.slot, size))),
            (Placement::High, rest) => (self.chunks.split(hole.slot, rest), Some(hole.slot)),
        };
        let serial = self.next_serial;
        self.next_serial += 1;
        let chunk = self.chunks.get_mut(slot);
        chunk.tenant = Some(Tenant { serial, requested, name, placement, is_retired: false });
        self.books.enter(chunk);
        self.peak = self.peak.max(self.books.in_use);
        let id = AllocationId { allocator: self.identity, serial, slot };
        let block = Block { id, offset: chunk.offset, size };
        // Only now, as it is the neighbours that tell a hole's side.
        if let Some(rest) = rest {
            self.file(rest);
        }
        Ok(block)
    }

    /// Takes a block back. It may be handed out again at once.
    pub fn free(&mut self, id: AllocationId) -> Result<(), StaleBlock> {
        self.find(id)?;
        self.release(id.slot);
        Ok(())
    }

    /// Takes a block back that the device may still be using: it is handed out again only after
    /// [`reclaim`](Self::reclaim) was told that `fence` has passed. Fences are points on a line that the caller numbers, such
    /// as steps submitted to a stream.
    pub fn retire(&mut self, id: AllocationId, fence: u64) -> Result<(), StaleBlock> {
        self.find(id)?;
        let chunk = self.chunks.get_mut(id.slot);
        self.books.strike(chunk);
        chunk.tenant = chunk.tenant.take().map(|tenant| Tenant { is_retired: true, ..tenant });
        self.books.enter(chunk);
        self.retired.insert((fence, id.serial), id.slot);
        Ok(())
    }

    /// Frees the retired blocks whose fence is at most `passed`, and says how many.
    pub fn reclaim(&mut self, passed: u64) -> usize {
        let before = self.retired.len();
        while let Some(first) = self.retired.first_entry().filter(|first| first.key().0 <= passed) {
            let slot = first.remove();
            self.release(slot);
        }
        before - self.retired.len()
    }

    /// Adds `bytes`, rounded down to whole units, at the top of the region and returns how many those are. A hole at the top
    /// grows; offsets stay.
    pub fn extend(&mut self, bytes: usize) -> Result<usize, InvalidSize> {
        let room = MOST_CAPACITY - self.capacity;
        if !(self.alignment..=room).contains(&bytes) {
            let limit = format!("from {} to {room} bytes", self.alignment);
            return Err(InvalidSize::new("extension", bytes, limit));
        }
        let added = bytes - bytes % self.alignment;
        if let Some(top) = self.chunks.top_hole() {
            self.unfile(top);
        }
        let top = self.chunks.extend(added);
        self.file(top);
        self.capacity += added;
        Ok(added)
    }

    /// The block's place, if it is in use.
    pub fn get(&self, id: AllocationId) -> Result<Block, StaleBlock> {
        let chunk = self.find(id)?;
        Ok(Block { id, offset: chunk.offset, size: chunk.size })
    }

    /// The numbers of this moment.
    pub fn stats(&self) -> Stats {
        let Books { in_use, requested, retired, num_live } = self.books;
        let (largest_hole, num_holes) = (self.holes.largest(), self.holes.len());
        Stats {
            capacity: self.capacity,
            in_use,
            requested,
            retired,
            peak: self.peak,
            largest_hole,
            num_holes,
            num_live,
        }
    }

    /// The region from bottom to top, without gap: what a map of it shows.
    pub fn extents(&self) -> impl Iterator<Item = Extent> {
        self.chunks.in_order().map(|(_, chunk)| {
            let name = chunk.tenant.as_ref().map(|tenant| tenant.name);
            Extent { offset: chunk.offset, size: chunk.size, name }
        })
    }

    /// The chunk of a block in use. Two allocations of one slot differ in their serial.
    fn find(&self, id: AllocationId) -> Result<&Chunk, StaleBlock> {
        if id.allocator != self.identity {
            return Err(StaleBlock::Foreign);
        }
        let chunk = self.chunks.get(id.slot);
        let is_it = |tenant: &Tenant| tenant.serial == id.serial && !tenant.is_retired;
        chunk.tenant.as_ref().is_some_and(is_it).then_some(chunk).ok_or(StaleBlock::GivenBack)
    }

    /// Makes a chunk in use a hole, one with those it touches.
    fn release(&mut self, slot: u32) {
        let Chunk { lower, upper, .. } = *self.chunks.get(slot);
        let (joins_lower, joins_upper) = (self.chunks.is_free(lower), self.chunks.is_free(upper));
        // They leave their bins while this chunk is still in use, as it was when they were filed.
        if joins_lower {
            self.unfile(lower);
        }
        if joins_upper {
            self.unfile(upper);
        }
        let chunk = self.chunks.get_mut(slot);
        self.books.strike(chunk);
        chunk.tenant = None;
        if joins_upper {
            self.chunks.absorb_upper(slot);
        }
        if joins_lower {
            self.chunks.absorb_upper(lower);
        }
        self.file(if joins_lower { lower } else { slot });
    }

    fn file(&mut self, slot: u32) {
        let (side, hole) = self.chunks.hole(slot);
        self.holes.insert(side, hole);
    }

    fn unfile(&mut self, slot: u32) {
        let (side, hole) = self.chunks.hole(slot);
        self.holes.remove(side, hole);
    }

    #[cold]
    fn exhausted(&self, requested: usize, name: &'static str) -> Exhausted {
        let holders = books::top_holders(self.chunks.in_order().map(|(_, chunk)| chunk));
        Exhausted { name, requested, stats: self.stats(), holders }
    }
}
