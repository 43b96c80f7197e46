//! One stretch of memory, divided into named regions: a [`Slab`] and the [`Bfc`] that keeps its books.
//!
//! A [`Region`] is a token, not a slice: it says which bytes, and the arena lends them out. So any number of regions live side
//! by side in the structures they belong to (a weight, a layer of the KV cache, a workspace) with no lifetime and no `unsafe`,
//! and the borrow checker sees to the rest. Freeing takes the token, so neither use after free nor double free can be written.
//!
//! ```text
//!     struct Cpu { kernels, pool, arena: Arena<HostSlab> }
//!     struct Matrix { layout, region: Region }       struct Cache { layout, blocks: Region, ... }
//!
//!     arena.bytes(&matrix.region)?                     many readers at once
//!     arena.bytes_mut(&cache.blocks)?                  one writer
//!     arena.split_mut([&scratch, &cache.blocks])?      several writers at once, of regions that are not the same
//! ```
//!
//! A loan borrows the arena, not the whole backend: kernels and pool stay free to use it. Whoever holds the arena holds the
//! memory; there is no lock. Regions are not freed on drop, because that would need a way back to the arena from each of them;
//! one that is dropped unfreed stays in use, and shows under its name, until the arena ends.
//!
//! Freeing, fences and growth are for devices, and for adapters that come and go; the CPU backend only allocates.
//!
//! Device memory has the same arena over another slab, and uses [`Region::offset`] instead of the loans.

mod slab;

use std::ops::Range;

pub use slab::{HostSlab, Slab, SlabRefused};

use crate::bfc::{AllocationId, Bfc, Exhausted, InvalidSize, Placement};

/// A stretch of one arena's memory, from [`Arena::allocate`] to [`Arena::free`].
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a region that is not freed stays in use as long as its arena"]
pub struct Region {
    id: AllocationId,
    offset: usize,
    len: usize,
}

impl Region {
    /// Where it starts, from the start of the slab; a multiple of the alignment.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Bytes, as they were asked for.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// There is no such arena.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ArenaError {
    /// Its size or alignment is out of range.
    #[error(transparent)]
    Size(#[from] InvalidSize),
    /// The memory cannot be had.
    #[error(transparent)]
    Slab(#[from] SlabRefused),
}

/// These bytes are not to be lent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoanError {
    /// The region is not this arena's.
    #[error("the region belongs to another arena")]
    Foreign,
    /// One region was named twice.
    #[error("one region cannot be lent twice at once")]
    Twice,
}

/// A region given to an arena that it does not belong to, and returned.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the region belongs to another arena")]
pub struct ForeignRegion(pub Region);

/// A slab and its books.
#[derive(Debug)]
pub struct Arena<S> {
    slab: S,
    bfc: Bfc,
}

impl<S: Slab> Arena<S> {
    /// An empty arena of `bytes`, rounded down to whole multiples of `alignment`, on a slab that can have as many.
    pub fn new(mut slab: S, bytes: usize, alignment: usize) -> Result<Self, ArenaError> {
        let bfc = Bfc::new(bytes, alignment)?;
        slab.commit(bfc.capacity())?;
        Ok(Self { slab, bfc })
    }

    /// A region of `bytes`, `name` saying what for; what is in it is whatever was there before. If there is no room, nothing
    /// changes.
    pub fn allocate(
        &mut self,
        bytes: usize,
        placement: Placement,
        name: &'static str,
    ) -> Result<Region, Exhausted> {
        let block = self.bfc.allocate(bytes, placement, name)?;
        Ok(Region { id: block.id, offset: block.offset, len: bytes })
    }

    /// Ends a region.
    pub fn free(&mut self, region: Region) -> Result<(), ForeignRegion> {
        self.bfc.free(region.id).map_err(|_| ForeignRegion(region))
    }

    /// Ends a region that the device may use until `fence` has passed; see [`Bfc::retire`].
    pub fn retire(&mut self, region: Region, fence: u64) -> Result<(), ForeignRegion> {
        self.bfc.retire(region.id, fence).map_err(|_| ForeignRegion(region))
    }

    /// Frees what was retired with a fence of at most `passed`, and says how many regions those are.
    pub fn reclaim(&mut self, passed: u64) -> usize {
        self.bfc.reclaim(passed)
    }

    /// Adds `bytes`, rounded down likewise, at the top. Regions stay where they are. If the slab refuses, nothing changes.
    pub fn extend(&mut self, bytes: usize) -> Result<(), ArenaError> {
        self.slab.commit(self.bfc.capacity().saturating_add(bytes))?;
        self.bfc.extend(bytes)?;
        Ok(())
    }

    /// The books: numbers, map, integrity.
    pub fn bfc(&self) -> &Bfc {
        &self.bfc
    }

    /// The memory itself.
    pub fn slab(&self) -> &S {
        &self.slab
    }

    fn range(&self, region: &Region) -> Result<Range<usize>, LoanError> {
        let block = self.bfc.get(region.id).map_err(|_| LoanError::Foreign)?;
        Ok(block.offset..block.offset + region.len)
    }
}

impl<S: Slab + AsRef<[u8]> + AsMut<[u8]>> Arena<S> {
    /// Lends a region for reading.
    pub fn bytes(&self, region: &Region) -> Result<&[u8], LoanError> {
        Ok(&self.slab.as_ref()[self.range(region)?])
    }

    /// Lends a region for writing.
    pub fn bytes_mut(&mut self, region: &Region) -> Result<&mut [u8], LoanError> {
        let range = self.range(region)?;
        Ok(&mut self.slab.as_mut()[range])
    }

    /// Lends several regions for writing (and those that are only read along with them) at once.
    pub fn split_mut<const N: usize>(&mut self, regions: [&Region; N]) -> Result<[&mut [u8]; N], LoanError> {
        let mut ranges = [const { 0..0 }; N];
        for (range, region) in ranges.iter_mut().zip(regions) {
            *range = self.range(region)?;
        }
        // All are inside the slab, and different regions are apart.
        self.slab.as_mut().get_disjoint_mut(ranges).map_err(|_| LoanError::Twice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Placement::{High, Low};

    fn arena(bytes: usize) -> Arena<Vec<u8>> {
        Arena::new(Vec::new(), bytes, 256).expect("a valid size")
    }

    #[test]
    fn regions_are_written_side_by_side_and_keep_what_was_written() {
        let mut arena = arena(4096);
        let weights = arena.allocate(700, Low, "weights").expect("room");
        let layers = [0, 1].map(|_| arena.allocate(600, Low, "KV cache").expect("room"));
        let workspace = arena.allocate(500, High, "workspace").expect("room");
        arena.bytes_mut(&weights).expect("its own").fill(7);
        let [scratch, first, second] =
            arena.split_mut([&workspace, &layers[0], &layers[1]]).expect("all its own");
        first.fill(1);
        second.fill(2);
        scratch.copy_from_slice(&first[..500]);
        for (region, len, value) in
            [(&weights, 700, 7), (&layers[0], 600, 1), (&layers[1], 600, 2), (&workspace, 500, 1)]
        {
            assert_eq!((region.len(), region.is_empty()), (len, false));
            assert_eq!(arena.bytes(region), Ok(&vec![value; len][..]));
        }
    }

    #[test]
    fn one_region_is_not_lent_twice_at_once() {
        let mut arena = arena(1024);
        let region = arena.allocate(1, Low, "test").expect("room");
        assert_eq!(arena.split_mut([&region, &region]), Err(LoanError::Twice));
    }

    #[test]
    fn another_arenas_region_is_refused_and_given_back() {
        let (mut one, mut other) = (arena(1024), arena(1024));
        let (own, region) =
            (one.allocate(1, Low, "test").expect("room"), other.allocate(1, Low, "test").expect("room"));
        assert_eq!(one.bytes(&region), Err(LoanError::Foreign));
        assert_eq!(one.bytes_mut(&region), Err(LoanError::Foreign));
        assert_eq!(one.split_mut([&own, &region]), Err(LoanError::Foreign));
        let ForeignRegion(region) = one.free(region).expect_err("foreign");
        let ForeignRegion(region) = one.retire(region, 0).expect_err("foreign");
        assert_eq!((one.bfc().stats().num_live, other.free(region)), (1, Ok(())));
        assert_eq!((one.free(own), one.bfc().stats().in_use), (Ok(()), 0));
    }

    #[test]
    fn a_full_arena_says_so_and_grows_if_its_slab_can() {
        let mut arena = arena(1024);
        let first = arena.allocate(1024, Low, "weights").expect("room");
        arena.bytes_mut(&first).expect("its own").fill(9);
        assert_eq!(arena.allocate(512, Low, "adapter").expect_err("full").holders[0].name, "weights");
        arena.extend(512).expect("a vector grows");
        let second = arena.allocate(512, Low, "adapter").expect("room");
        assert_eq!((second.offset(), arena.slab().len()), (1024, 1536));
        assert_eq!(arena.bytes(&first), Ok(&[9; 1024][..]));
        arena.bfc().check_integrity();
    }

    #[test]
    fn a_refused_growth_changes_nothing() {
        let mut arena =
            Arena::new(HostSlab::reserve(8192).expect("two pages"), 4096, 256).expect("a valid size");
        arena.extend(4096).expect("as much as was reserved");
        let before = arena.bfc().stats();
        for bytes in [256, usize::MAX] {
            assert!(matches!(arena.extend(bytes), Err(ArenaError::Slab(_))));
        }
        assert!(matches!(arena.extend(0), Err(ArenaError::Size(_))));
        assert_eq!(arena.bfc().stats(), before);
    }

    #[test]
    fn a_retired_region_is_used_again_after_its_fence() {
        let mut arena = arena(1024);
        let region = arena.allocate(1024, High, "image").expect("room");
        arena.retire(region, 5).expect("its own");
        assert!(arena.allocate(1, High, "image").is_err());
        assert_eq!((arena.reclaim(4), arena.reclaim(5)), (0, 1));
        let region = arena.allocate(1024, High, "image").expect("room");
        assert_eq!(arena.free(region), Ok(()));
    }
}
