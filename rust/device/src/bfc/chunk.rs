//! The chunks of the region, in slots, linked in the order of their offsets.
//!
//! A chunk keeps its slot for its lifetime; slots are reused in LIFO order, so the same requests get the same slots.
//! [`Bfc`](super::Bfc) keeps bins and accounting consistent with the chunks.

use super::Placement;
use super::free_chunks::{FreeChunk, Side};

/// No chunk: below the lowest and above the highest.
const NONE: u32 = u32::MAX;
/// The slot of the lowest chunk. It never changes, because splitting and joining keep the slot of the lower part.
pub(super) const LOWEST: u32 = 0;

/// A part of the region that is in use or free.
#[derive(Debug)]
pub(super) struct MemoryChunk {
    pub offset: usize,
    pub size: usize,
    /// Slot of the chunk that ends where this one starts.
    pub lower: u32,
    /// Slot of the chunk that starts where this one ends.
    pub upper: u32,
    /// `None` if the chunk is free.
    pub allocation: Option<Allocation>,
}

/// The use of a chunk.
#[derive(Debug)]
pub(super) struct Allocation {
    /// Unique number of the allocation.
    pub serial: u64,
    /// Requested bytes.
    pub requested: usize,
    pub name: &'static str,
    pub placement: Placement,
    /// Freed by its owner, but not reusable before its fence has passed.
    pub is_retired: bool,
}

/// Invariants: the chunks from `LOWEST` to `highest` cover the region without gap or overlap; every slot is either in
/// that chain or in `vacant`.
#[derive(Debug)]
pub(super) struct Chunks {
    slots: Vec<MemoryChunk>,
    vacant: Vec<u32>,
    highest: u32,
}

impl Chunks {
    /// One free chunk of `size` bytes.
    pub fn new(size: usize) -> Self {
        let chunk = MemoryChunk { offset: 0, size, lower: NONE, upper: NONE, allocation: None };
        Self { slots: vec![chunk], vacant: Vec::new(), highest: LOWEST }
    }

    /// The chunk in a slot; in a vacant slot it has no allocation.
    pub fn get(&self, slot: u32) -> &MemoryChunk {
        &self.slots[slot as usize]
    }

    pub fn get_mut(&mut self, slot: u32) -> &mut MemoryChunk {
        &mut self.slots[slot as usize]
    }

    /// Whether `slot` has a chunk that is free.
    pub fn is_free(&self, slot: u32) -> bool {
        slot != NONE && self.get(slot).allocation.is_none()
    }

    /// The bin entry of a free chunk. Its neighbours must be in use.
    pub fn free_chunk(&self, slot: u32) -> (Side, FreeChunk) {
        let MemoryChunk { offset, size, lower, upper, .. } = *self.get(slot);
        let placement = |slot, at_end| match slot {
            NONE => at_end,
            _ => self.get(slot).allocation.as_ref().expect("adjacent free chunks; this is a bug").placement,
        };
        let side = match (placement(lower, Placement::Low), placement(upper, Placement::High)) {
            (Placement::Low, Placement::Low) => Side::Low,
            (Placement::High, Placement::High) => Side::High,
            _ => Side::Between,
        };
        (side, FreeChunk { size, offset, slot })
    }

    /// Splits a free chunk: it keeps `size` bytes; the rest is a new free chunk above it, whose slot is returned.
    ///
    /// ```text
    ///     | slot                    | upper      |
    ///     | slot: size | rest       | upper      |
    /// ```
    pub fn split(&mut self, slot: u32, size: usize) -> u32 {
        let MemoryChunk { offset, size: whole, upper, .. } = *self.get(slot);
        let rest =
            MemoryChunk { offset: offset + size, size: whole - size, lower: slot, upper, allocation: None };
        let rest = self.insert(rest);
        let chunk = self.get_mut(slot);
        (chunk.size, chunk.upper) = (size, rest);
        self.set_lower(upper, rest);
        rest
    }

    /// Joins a free chunk with its free upper neighbour, whose slot becomes vacant.
    pub fn absorb_upper(&mut self, slot: u32) {
        let absorbed = self.get(slot).upper;
        let MemoryChunk { size, upper, .. } = *self.get(absorbed);
        let chunk = self.get_mut(slot);
        (chunk.size, chunk.upper) = (chunk.size + size, upper);
        self.set_lower(upper, slot);
        self.vacant.push(absorbed);
    }

    /// The highest chunk, if it is free.
    pub fn top_free(&self) -> Option<u32> {
        self.is_free(self.highest).then_some(self.highest)
    }

    /// Adds `size` bytes at the top, to the free chunk there or as a new one, and returns its slot.
    pub fn extend(&mut self, size: usize) -> u32 {
        if let Some(top) = self.top_free() {
            self.get_mut(top).size += size;
            return top;
        }
        let (lower, MemoryChunk { offset, size: below, .. }) = (self.highest, self.get(self.highest));
        let slot =
            self.insert(MemoryChunk { offset: offset + below, size, lower, upper: NONE, allocation: None });
        self.get_mut(lower).upper = slot;
        self.highest = slot;
        slot
    }

    /// The chunks in the order of their offsets.
    pub fn in_order(&self) -> impl Iterator<Item = (u32, &MemoryChunk)> {
        let above = |slot: u32| (slot != NONE).then(|| (slot, self.get(slot)));
        std::iter::successors(above(LOWEST), move |(_, chunk)| above(chunk.upper))
    }

    /// Panics unless the invariants hold for a region of `capacity` bytes, all sizes are multiples of `unit`, and no
    /// two free chunks are adjacent. Returns the number of chunks.
    pub fn check_integrity(&self, capacity: usize, unit: usize) -> usize {
        let (mut num_chunks, mut end, mut below, mut was_free) = (0, 0, NONE, false);
        for (slot, chunk) in self.in_order() {
            assert_eq!(
                (chunk.offset, chunk.lower),
                (end, below),
                "chunks do not tile; this is a bug: {chunk:?}"
            );
            assert!(
                chunk.size > 0 && chunk.size % unit == 0,
                "a size that is not a multiple of the unit; this is a bug: {chunk:?}"
            );
            assert!(
                !(was_free && chunk.allocation.is_none()),
                "adjacent free chunks; this is a bug: {chunk:?}"
            );
            (num_chunks, end, below, was_free) =
                (num_chunks + 1, end + chunk.size, slot, chunk.allocation.is_none());
        }
        assert!(num_chunks > 0, "no chunks; this is a bug");
        assert_eq!(
            (end, below),
            (capacity, self.highest),
            "chunks end before or after the region; this is a bug"
        );
        assert_eq!(num_chunks + self.vacant.len(), self.slots.len(), "a chunk was lost; this is a bug");
        num_chunks
    }

    fn insert(&mut self, chunk: MemoryChunk) -> u32 {
        if let Some(slot) = self.vacant.pop() {
            self.slots[slot as usize] = chunk;
            return slot;
        }
        self.slots.push(chunk);
        u32::try_from(self.slots.len() - 1).expect("more than 2^32 chunks; this is a bug")
    }

    /// Sets the lower neighbour of the chunk in `slot`, or the highest chunk.
    fn set_lower(&mut self, slot: u32, lower: u32) {
        match slot {
            NONE => self.highest = lower,
            _ => self.get_mut(slot).lower = lower,
        }
    }
}
