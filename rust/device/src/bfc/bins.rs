//! The holes, sorted by side and into bins by size: which one fits best.
//!
//! Bins are powers of two from 256 bytes, each in four equal steps; the first also takes what is smaller, the last has no
//! upper end. Only [`Bfc`](super::Bfc) calls this; nothing here knows neighbours or names.
//!
//! ```text
//!     | 256 | 320 | 384 | 448 | 512 | 640 | 768 | 896 | 1024 | 1280 | ... | 896 MiB and more |
//! ```

use super::Placement;

/// Smallest size of the first bin, but for what is smaller still.
const SMALLEST: usize = 256;
/// Bins to a power of two, as a power of two.
const STEPS_LOG2: usize = 2;
/// The last power of two is 512 MiB.
const NUM_BINS: usize = 22 << STEPS_LOG2;

/// What a hole lies between.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    /// Blocks placed low.
    Low,
    /// One of each: the gap in the middle, as long as everyone keeps to his side.
    Between,
    /// Blocks placed high.
    High,
}

/// A free chunk as its bin lists it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hole {
    pub size: usize,
    pub offset: usize,
    /// Slot of the chunk.
    pub slot: u32,
}

impl Hole {
    /// The order in a bin: by size, and the lowest first of equals. One integer, because it compares without a branch.
    fn key(&self) -> u128 {
        (self.size as u128) << 64 | self.offset as u128
    }
}

/// All holes.
#[derive(Debug, Default)]
pub(super) struct Holes {
    /// By [`Side`].
    sides: [Bins; 3],
}

impl Holes {
    /// Files a hole that is in no bin.
    pub fn insert(&mut self, side: Side, hole: Hole) {
        self.sides[side as usize].insert(hole);
    }

    /// Takes a hole out of its bin.
    pub fn remove(&mut self, side: Side, hole: Hole) {
        self.sides[side as usize].remove(hole);
    }

    /// Takes out the smallest hole of at least `size` bytes, the lowest of equals, from the first side that has one: the
    /// placement's own, the gap, the other's.
    pub fn take_best(&mut self, size: usize, placement: Placement) -> Option<Hole> {
        let order = match placement {
            Placement::Low => [Side::Low, Side::Between, Side::High],
            Placement::High => [Side::High, Side::Between, Side::Low],
        };
        order.into_iter().find_map(|side| self.sides[side as usize].take_best(size))
    }

    /// Size of the largest hole; 0 if there is none.
    pub fn largest(&self) -> usize {
        self.sides.iter().map(Bins::largest).max().unwrap_or(0)
    }

    /// Number of holes.
    pub fn len(&self) -> usize {
        self.sides.iter().map(Bins::len).sum()
    }

    /// Panics unless the invariants of all bins hold; shows every hole to `visit`.
    pub fn check_integrity(&self, mut visit: impl FnMut(Side, Hole)) {
        for side in [Side::Low, Side::Between, Side::High] {
            self.sides[side as usize].check_integrity(|hole| visit(side, hole));
        }
    }
}

/// The holes of one side. Invariants: a hole is in the bin of its size; a bin is sorted; bit `i` of `occupied` is set exactly
/// if bin `i` has a hole.
///
/// A bin is a sorted vector: bisected, and its memory kept, so that an allocator that is warm allocates nothing itself. At
/// ten thousand live blocks of all sizes a B-tree per bin took 1.25 times as long, and one bin per power of two 1.2 times.
/// The price: ten thousand holes in one bin, which takes as many blocks of one size with gaps between them, cost about
/// 2 microseconds to move up by one, where the tree needs 0.7.
#[derive(Debug)]
struct Bins {
    bins: [Vec<Hole>; NUM_BINS],
    occupied: u128,
}

impl Default for Bins {
    fn default() -> Self {
        Self { bins: [const { Vec::new() }; NUM_BINS], occupied: 0 }
    }
}

impl Bins {
    fn insert(&mut self, hole: Hole) {
        let bin = bin_of(hole.size);
        let holes = &mut self.bins[bin];
        holes.insert(holes.partition_point(|other| other.key() < hole.key()), hole);
        self.occupied |= 1 << bin;
    }

    fn remove(&mut self, hole: Hole) {
        let bin = bin_of(hole.size);
        let at = self.bins[bin].partition_point(|other| other.key() < hole.key());
        assert_eq!(self.bins[bin].get(at), Some(&hole), "a hole is not in its bin; this is a bug");
        self.take(bin, at);
    }

    fn take_best(&mut self, size: usize) -> Option<Hole> {
        let bin = bin_of(size);
        let at = self.bins[bin].partition_point(|hole| hole.size < size);
        if at < self.bins[bin].len() {
            return Some(self.take(bin, at));
        }
        // In the bins above everything fits, so the first hole of the first one with any is the smallest.
        let above = self.occupied & (u128::MAX << bin << 1);
        (above != 0).then(|| self.take(above.trailing_zeros() as usize, 0))
    }

    fn take(&mut self, bin: usize, at: usize) -> Hole {
        let hole = self.bins[bin].remove(at);
        self.occupied &= !(u128::from(self.bins[bin].is_empty()) << bin);
        hole
    }

    fn largest(&self) -> usize {
        let top = self.occupied.checked_ilog2();
        top.and_then(|top| self.bins[top as usize].last()).map_or(0, |hole| hole.size)
    }

    fn len(&self) -> usize {
        self.bins.iter().map(Vec::len).sum()
    }

    fn check_integrity(&self, mut visit: impl FnMut(Hole)) {
        for (bin, holes) in self.bins.iter().enumerate() {
            assert_eq!(
                self.occupied >> bin & 1 == 1,
                !holes.is_empty(),
                "bin {bin} is marked wrongly; this is a bug"
            );
            assert!(
                holes.is_sorted_by(|left, right| left.key() < right.key()),
                "bin {bin} is out of order; this is a bug: {holes:?}"
            );
            for hole in holes {
                assert_eq!(bin_of(hole.size), bin, "{hole:?} is in the wrong bin; this is a bug");
                visit(*hole);
            }
        }
    }
}

/// The power of two, then the two bits below its own.
fn bin_of(size: usize) -> usize {
    let size = size.max(SMALLEST);
    let power = (size / SMALLEST).ilog2() as usize;
    let step = (size >> power) / (SMALLEST >> STEPS_LOG2) - (1 << STEPS_LOG2);
    (power << STEPS_LOG2 | step).min(NUM_BINS - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hole(size: usize, offset: usize) -> Hole {
        Hole { size, offset, slot: 0 }
    }

    #[test]
    fn bins_are_quarters_of_powers_of_two_and_the_ends_are_open() {
        let sizes =
            [64, 256, 319, 320, 511, 512, 639, 640, 1024, (896 << 20) - 1, 896 << 20, isize::MAX as usize];
        assert_eq!(sizes.map(bin_of), [0, 0, 0, 1, 3, 4, 4, 5, 8, 86, 87, 87]);
    }

    #[test]
    fn the_smallest_hole_that_suffices_is_found_in_its_own_bin_or_above() {
        let mut bins = Bins::default();
        let holes =
            [hole(576, 0), hole(512, 4096), hole(512, 1024), hole(1 << 30, 1 << 40), hole(2 << 30, 8 << 30)];
        holes.into_iter().for_each(|hole| bins.insert(hole));
        assert_eq!((bins.len(), bins.largest()), (5, 2 << 30));
        for (size, expected) in [(1, 2), (512, 1), (513, 0), (577, 3), ((1 << 30) + 1, 4)] {
            assert_eq!(bins.take_best((2 << 30) + 1), None);
            assert_eq!(bins.take_best(size), Some(holes[expected]));
        }
        assert_eq!((bins.len(), bins.largest(), bins.take_best(1)), (0, 0, None));
        bins.check_integrity(|hole| panic!("{hole:?} was taken out"));
    }

    #[test]
    fn a_request_looks_on_its_own_side_then_in_the_gap_then_on_the_other() {
        let (own, gap, other) = (hole(1024, 0), hole(768, 4096), hole(512, 8192));
        for (placement, low, high) in [(Placement::Low, own, other), (Placement::High, other, own)] {
            let mut holes = Holes::default();
            holes.insert(Side::Low, low);
            holes.insert(Side::Between, gap);
            holes.insert(Side::High, high);
            assert_eq!((holes.len(), holes.largest()), (3, 1024));
            let taken = [512, 512, 512, 512].map(|size| holes.take_best(size, placement));
            assert_eq!(taken, [Some(own), Some(gap), Some(other), None]);
        }
    }

    #[test]
    #[should_panic(expected = "is not in its bin")]
    fn a_hole_that_was_never_filed_cannot_be_taken_out() {
        Holes::default().remove(Side::Low, hole(256, 0));
    }
}
