//! A contiguous memory, divided into named regions: a [`Slab`] and the [`Bfc`] that allocates from it.
//!
//! A [`Region`] is a handle, not a slice: the arena returns its bytes on request. So regions are stored in the
//! structures they belong to (a weight, a layer of the KV cache, a workspace) without a lifetime and without `unsafe`,
//! and the borrow checker covers their use. Freeing consumes the handle, so neither use after free nor double free can
//! be written.
//!
//! ```text
//!     struct Cpu { kernels, pool, arena: Arena<HostSlab> }
//!     struct Matrix { layout, region: Region }       struct Cache { layout, blocks: Region, ... }
//!
//!     arena.bytes(&matrix.region)?                     shared access
//!     arena.bytes_mut(&cache.blocks)?                  exclusive access
//!     arena.split_mut([&scratch, &cache.blocks].map(Some))?      exclusive access to several different regions
//! ```
//!
//! A slice borrows the arena, not the whole backend, so kernels and pool can be used with it. The owner of the arena
//! owns the memory; there is no lock. Regions are not freed on drop, because that would need a reference from each
//! region to its arena; a region that is dropped without being freed stays in use, under its name, until the arena is
//! dropped.
//!
//! Freeing, fences and growth are for devices; the CPU backend only allocates. Its adapters share one region.
//!
//! Device memory uses the same arena over another slab, with [`Region::offset`] instead of slices.

#![allow(missing_docs)]

mod slab;

use std::ops::Range;

pub use slab::{HostSlab, Slab, SlabError};

use penstock_types::FieldError;

use crate::bfc::{AllocationId, Bfc, Exhausted, Placement};

/// A part of an arena's memory, from [`Arena::allocate`] to [`Arena::free`].
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a region that is not freed stays in use as long as its arena"]
pub struct Region {
    id: AllocationId,
    offset: usize,
    len: usize,
}

impl Region {
    /// The offset from the start of the slab; a multiple of the alignment.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// The requested number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// An arena cannot be created or extended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ArenaError {
    /// The size or alignment is out of range.
    #[error(transparent)]
    Size(#[from] FieldError),
    /// The memory is not available.
    #[error(transparent)]
    Slab(#[from] SlabError),
}

/// The bytes of a region cannot be borrowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegionError {
    /// The region belongs to another arena.
    #[error("the region belongs to another arena")]
    Foreign,
    /// The same region was passed twice.
    #[error("a region cannot be borrowed twice at the same time")]
    Duplicate,
}

/// The region belongs to another arena; it is returned.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the region belongs to another arena")]
pub struct ForeignRegion(pub Region);

/// A slab and its allocator.
#[derive(Debug)]
pub struct Arena<S> {
    slab: S,
    bfc: Bfc,
}

impl<S: Slab> Arena<S> {
    /// An empty arena of `bytes`, rounded down to a multiple of `alignment`, on `slab`.
    pub fn new(mut slab: S, bytes: usize, alignment: usize) -> Result<Self, ArenaError> {
        let bfc = Bfc::new(bytes, alignment)?;
        slab.commit(bfc.capacity())?;
        Ok(Self { slab, bfc })
    }

    /// Allocates a region of `bytes` for the purpose `name`; its content is unspecified. A failure changes nothing.
    pub fn allocate(
        &mut self,
        bytes: usize,
        placement: Placement,
        name: &'static str,
    ) -> Result<Region, Exhausted> {
        let block = self.bfc.allocate(bytes, placement, name)?;
        Ok(Region { id: block.id, offset: block.offset, len: bytes })
    }

    /// Frees a region.
    pub fn free(&mut self, region: Region) -> Result<(), ForeignRegion> {
        self.bfc.free(region.id).map_err(|_| ForeignRegion(region))
    }

    /// Frees a region that the device may use until `fence` has passed; see [`Bfc::retire`].
    pub fn retire(&mut self, region: Region, fence: u64) -> Result<(), ForeignRegion> {
        self.bfc.retire(region.id, fence).map_err(|_| ForeignRegion(region))
    }

    /// Frees the regions that were retired with a fence of at most `passed`, and returns their number.
    pub fn reclaim(&mut self, passed: u64) -> usize {
        self.bfc.reclaim(passed)
    }

    /// Adds `bytes`, rounded down to a multiple of the alignment, at the top. Regions keep their offsets. A failure
    /// changes nothing.
    pub fn extend(&mut self, bytes: usize) -> Result<(), ArenaError> {
        self.slab.commit(self.bfc.capacity().saturating_add(bytes))?;
        self.bfc.extend(bytes)?;
        Ok(())
    }

    /// The allocator.
    pub fn bfc(&self) -> &Bfc {
        &self.bfc
    }

    pub fn slab(&self) -> &S {
        &self.slab
    }

    fn range(&self, region: &Region) -> Result<Range<usize>, RegionError> {
        let block = self.bfc.get(region.id).map_err(|_| RegionError::Foreign)?;
        Ok(block.offset..block.offset + region.len)
    }
}

impl<S: Slab + AsRef<[u8]> + AsMut<[u8]>> Arena<S> {
    /// The bytes of a region.
    pub fn bytes(&self, region: &Region) -> Result<&[u8], RegionError> {
        Ok(&self.slab.as_ref()[self.range(region)?])
    }

    /// The bytes of a region, for writing.
    pub fn bytes_mut(&mut self, region: &Region) -> Result<&mut [u8], RegionError> {
        let range = self.range(region)?;
        Ok(&mut self.slab.as_mut()[range])
    }

    /// The bytes of several different regions, for writing. `None` has no bytes.
    pub fn split_mut<const N: usize>(
        &mut self,
        regions: [Option<&Region>; N],
    ) -> Result<[&mut [u8]; N], RegionError> {
        let mut ranges = [const { 0..0 }; N];
        for (range, region) in ranges.iter_mut().zip(regions) {
            *range = region.map_or(Ok(0..0), |region| self.range(region))?;
        }
        // All are inside the slab, and different regions do not overlap.
        self.slab.as_mut().get_disjoint_mut(ranges).map_err(|_| RegionError::Duplicate)
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
    fn regions_are_written_together_and_keep_their_content() {
        let mut arena = arena(4096);
        let weights = arena.allocate(700, Low, "weights").expect("room");
        let layers = [0, 1].map(|_| arena.allocate(600, Low, "KV cache").expect("room"));
        let workspace = arena.allocate(500, High, "workspace").expect("room");
        arena.bytes_mut(&weights).expect("own region").fill(7);
        let [scratch, first, second] =
            arena.split_mut([&workspace, &layers[0], &layers[1]].map(Some)).expect("own regions");
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
    fn region_cannot_be_borrowed_twice() {
        let mut arena = arena(1024);
        let region = arena.allocate(1, Low, "test").expect("room");
        assert_eq!(arena.split_mut([Some(&region), Some(&region)]), Err(RegionError::Duplicate));
        let [none, bytes, other] = arena.split_mut([None, Some(&region), None]).expect("one region");
        assert_eq!((none.len(), bytes.len(), other.len()), (0, 1, 0));
    }

    #[test]
    fn foreign_region_is_rejected_and_returned() {
        let (mut one, mut other) = (arena(1024), arena(1024));
        let (own, region) =
            (one.allocate(1, Low, "test").expect("room"), other.allocate(1, Low, "test").expect("room"));
        assert_eq!(one.bytes(&region), Err(RegionError::Foreign));
        assert_eq!(one.bytes_mut(&region), Err(RegionError::Foreign));
        assert_eq!(one.split_mut([&own, &region].map(Some)), Err(RegionError::Foreign));
        let ForeignRegion(region) = one.free(region).expect_err("foreign");
        let ForeignRegion(region) = one.retire(region, 0).expect_err("foreign");
        assert_eq!((one.bfc().stats().num_live, other.free(region)), (1, Ok(())));
        assert_eq!((one.free(own), one.bfc().stats().in_use), (Ok(()), 0));
    }

    #[test]
    fn full_arena_is_an_error_until_it_is_extended() {
        let mut arena = arena(1024);
        let first = arena.allocate(1024, Low, "weights").expect("room");
        arena.bytes_mut(&first).expect("own region").fill(9);
        assert_eq!(arena.allocate(512, Low, "adapter").expect_err("full").usages[0].name, "weights");
        arena.extend(512).expect("a vector grows");
        let second = arena.allocate(512, Low, "adapter").expect("room");
        assert_eq!((second.offset(), arena.slab().len()), (1024, 1536));
        assert_eq!(arena.bytes(&first), Ok(&[9; 1024][..]));
        arena.bfc().check_integrity();
    }

    #[test]
    fn failed_extension_changes_nothing() {
        let mut arena =
            Arena::new(HostSlab::reserve(8192).expect("two pages"), 4096, 256).expect("a valid size");
        arena.extend(4096).expect("within the reservation");
        let before = arena.bfc().stats();
        for bytes in [256, usize::MAX] {
            assert!(matches!(arena.extend(bytes), Err(ArenaError::Slab(_))));
        }
        assert!(matches!(arena.extend(0), Err(ArenaError::Size(_))));
        assert_eq!(arena.bfc().stats(), before);
    }

    #[test]
    fn retired_region_is_reused_after_its_fence() {
        let mut arena = arena(1024);
        let region = arena.allocate(1024, High, "image").expect("room");
        arena.retire(region, 5).expect("own region");
        assert!(arena.allocate(1, High, "image").is_err());
        assert_eq!((arena.reclaim(4), arena.reclaim(5)), (0, 1));
        let region = arena.allocate(1024, High, "image").expect("room");
        assert_eq!(arena.free(region), Ok(()));
    }
}
