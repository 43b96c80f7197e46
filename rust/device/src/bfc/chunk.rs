//! The tiling: chunks in a slab, linked in the order of their addresses.
//!
//! A slot number stays with a chunk for its life and is reused after it, last out first in, so the same requests always meet
//! the same slots. Bins and books are the business of [`Bfc`](super::Bfc), which calls this and keeps them in step.

use super::Placement;
use super::bins::{Hole, Side};

/// No chunk: the neighbour of the lowest and of the highest.
const NONE: u32 = u32::MAX;
/// The lowest chunk's slot, always: splitting and joining leave the lower part its slot.
pub(super) const LOWEST: u32 = 0;

/// A stretch of the region, wholly used or wholly free.
#[derive(Debug)]
pub(super) struct Chunk {
    pub offset: usize,
    pub size: usize,
    /// Slot of the chunk that ends where this one starts.
    pub lower: u32,
    /// Slot of the chunk that starts where this one ends.
    pub upper: u32,
    /// Who has it; free if nobody.
    pub tenant: Option<Tenant>,
}

/// Who has a chunk.
#[derive(Debug)]
pub(super) struct Tenant {
    /// Number of the allocation, never used twice.
    pub serial: u64,
    /// Bytes that were asked for.
    pub requested: usize,
    pub name: &'static str,
    pub placement: Placement,
    /// Given up, but not to be reused before its fence has passed.
    pub is_retired: bool,
}

/// Invariants: from `LOWEST` upwards the chunks tile the region from 0 to its end without gap or overlap, up to `highest`;
/// every slot is either in that chain or in `vacant`.
#[derive(Debug)]
pub(super) struct Chunks {
    slots: Vec<Chunk>,
    vacant: Vec<u32>,
    highest: u32,
}

impl Chunks {
    /// One free chunk of `size` bytes.
    pub fn new(size: usize) -> Self {
        let chunk = Chunk { offset: 0, size, lower: NONE, upper: NONE, tenant: None };
        Self { slots: vec![chunk], vacant: Vec::new(), highest: LOWEST }
    }

    /// The chunk in a slot; a vacant slot's has no tenant.
    pub fn get(&self, slot: u32) -> &Chunk {
        &self.slots[slot as usize]
    }

    pub fn get_mut(&mut self, slot: u32) -> &mut Chunk {
        &mut self.slots[slot as usize]
    }

    /// Whether there is a chunk in `slot`, and it is free.
    pub fn is_free(&self, slot: u32) -> bool {
        slot != NONE && self.get(slot).tenant.is_none()
    }

    /// A free chunk as its bin lists it. Its neighbours must be in use, as those of every filed hole are.
    pub fn hole(&self, slot: u32) -> (Side, Hole) {
        let Chunk { offset, size, lower, upper, .. } = *self.get(slot);
        let placement = |slot, at_end| match slot {
            NONE => at_end,
            _ => self.get(slot).tenant.as_ref().expect("two holes touch; this is a bug").placement,
        };
        let side = match (placement(lower, Placement::Low), placement(upper, Placement::High)) {
            (Placement::Low, Placement::Low) => Side::Low,
            (Placement::High, Placement::High) => Side::High,
            _ => Side::Between,
        };
        (side, Hole { size, offset, slot })
    }

    /// Cuts a free chunk in two; it keeps `size` bytes, the rest is a new free chunk above it whose slot is returned.
    ///
    /// ```text
    ///     | slot                    | upper      |
    ///     | slot: size | rest       | upper      |
    /// ```
    pub fn split(&mut self, slot: u32, size: usize) -> u32 {
        let Chunk { offset, size: whole, upper, .. } = *self.get(slot);
        let rest = Chunk { offset: offset + size, size: whole - size, lower: slot, upper, tenant: None };
        let rest = self.insert(rest);
        let chunk = self.get_mut(slot);
        (chunk.size, chunk.upper) = (size, rest);
        self.set_lower(upper, rest);
        rest
    }

    /// Joins a free chunk with its free upper neighbour, whose slot falls vacant.
    pub fn absorb_upper(&mut self, slot: u32) {
        let absorbed = self.get(slot).upper;
        let Chunk { size, upper, .. } = *self.get(absorbed);
        let chunk = self.get_mut(slot);
        (chunk.size, chunk.upper) = (chunk.size + size, upper);
        self.set_lower(upper, slot);
        self.vacant.push(absorbed);
    }

    /// The highest chunk, if it is free.
    pub fn top_hole(&self) -> Option<u32> {
        self.is_free(self.highest).then_some(self.highest)
    }

    /// Adds `size` bytes at the top, to the free chunk there or else as one, and returns its slot.
    pub fn extend(&mut self, size: usize) -> u32 {
        if let Some(top) = self.top_hole() {
            self.get_mut(top).size += size;
            return top;
        }
        let (lower, Chunk { offset, size: below, .. }) = (self.highest, self.get(self.highest));
        let slot = self.insert(Chunk { offset: offset + below, size, lower, upper: NONE, tenant: None });
        self.get_mut(lower).upper = slot;
        self.highest = slot;
        slot
    }

    /// Slots in the order of addresses.
    pub fn in_order(&self) -> impl Iterator<Item = (u32, &Chunk)> {
        let above = |slot: u32| (slot != NONE).then(|| (slot, self.get(slot)));
        std::iter::successors(above(LOWEST), move |(_, chunk)| above(chunk.upper))
    }

    /// Panics unless the invariants hold for a region of `capacity` bytes, all sizes are whole units, and no two free chunks
    /// touch. Returns the number of chunks.
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
                "a chunk of no whole units; this is a bug: {chunk:?}"
            );
            assert!(!(was_free && chunk.tenant.is_none()), "adjacent free chunks; this is a bug: {chunk:?}");
            (num_chunks, end, below, was_free) =
                (num_chunks + 1, end + chunk.size, slot, chunk.tenant.is_none());
        }
        assert!(num_chunks > 0, "nothing was checked; this is a bug");
        assert_eq!(
            (end, below),
            (capacity, self.highest),
            "chunks end before or after the region; this is a bug"
        );
        assert_eq!(num_chunks + self.vacant.len(), self.slots.len(), "a chunk was lost; this is a bug");
        num_chunks
    }

    fn insert(&mut self, chunk: Chunk) -> u32 {
        if let Some(slot) = self.vacant.pop() {
            self.slots[slot as usize] = chunk;
            return slot;
        }
        self.slots.push(chunk);
        u32::try_from(self.slots.len() - 1).expect("four billion chunks; this is a bug")
    }

    /// Tells the chunk in `slot`, or the end of the region, what is now below it.
    fn set_lower(&mut self, slot: u32, lower: u32) {
        match slot {
            NONE => self.highest = lower,
            _ => self.get_mut(slot).lower = lower,
        }
    }
}
