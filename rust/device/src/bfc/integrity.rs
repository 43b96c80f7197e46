//! The audit: every invariant of the allocator, by looking at everything.

use super::Bfc;
use super::books::Books;

impl Bfc {
    /// Panics unless every invariant holds. For tests and for idle moments of builds with debug assertions: its time grows
    /// with the number of chunks.
    pub fn check_integrity(&self) {
        let num_chunks = self.chunks.check_integrity(self.capacity, self.alignment);
        let (mut books, mut num_used, mut num_waiting) = (Books::default(), 0, 0);
        for (_, chunk) in self.chunks.in_order() {
            books.enter(chunk);
            let Some(tenant) = &chunk.tenant else { continue };
            assert!(tenant.serial < self.next_serial, "a block from the future; this is a bug: {chunk:?}");
            num_used += 1;
            num_waiting += usize::from(tenant.is_retired);
        }
        assert_eq!(books, self.books, "books differ from the sums over the chunks; this is a bug");
        assert!(
            (books.in_use..=self.capacity).contains(&self.peak),
            "a peak of {}; this is a bug",
            self.peak
        );

        for (&(fence, serial), &slot) in &self.retired {
            let tenant = self.chunks.get(slot).tenant.as_ref();
            let is_waiting = tenant.is_some_and(|tenant| tenant.is_retired && tenant.serial == serial);
            assert!(is_waiting, "block {serial} does not wait for {fence}; this is a bug");
        }
        assert_eq!(self.retired.len(), num_waiting, "a block waits for nothing; this is a bug");

        let (mut num_holes, mut free) = (0, 0);
        self.holes.check_integrity(|side, hole| {
            assert!(self.chunks.is_free(hole.slot), "a used chunk is in a bin; this is a bug: {hole:?}");
            assert_eq!(self.chunks.hole(hole.slot), (side, hole), "a hole is filed wrongly; this is a bug");
            num_holes += 1;
            free += hole.size;
        });
        // Bins are sorted by offset within a size and every entry is a chunk's own, so equal counts mean: each once.
        assert_eq!(num_holes + num_used, num_chunks, "a free chunk is in no bin, or in two; this is a bug");
        assert_eq!(free + books.in_use, self.capacity, "bytes were lost; this is a bug");
    }
}

/// Each breaks one thing and must be found out by name.
#[cfg(test)]
mod tests {
    use super::*;
    use crate::bfc::bins::Hole;
    use crate::bfc::{Placement, Tenant};

    /// `| used | hole | used | gap |`, the last one used being retired.
    fn busy() -> Bfc {
        let mut bfc = Bfc::new(16 << 10, 256).expect("a valid size");
        let blocks =
            [256, 512, 1024].map(|size| bfc.allocate(size, Placement::Low, "test").expect("room").id);
        bfc.free(blocks[1]).expect("a live block");
        bfc.retire(blocks[2], 7).expect("a live block");
        bfc.check_integrity();
        bfc
    }

    #[test]
    #[should_panic(expected = "books differ")]
    fn a_wrong_sum_is_noticed() {
        let mut bfc = busy();
        bfc.books.requested += 1;
        bfc.check_integrity();
    }

    #[test]
    #[should_panic(expected = "a peak of")]
    fn a_peak_below_what_is_in_use_is_noticed() {
        let mut bfc = busy();
        bfc.peak = 1;
        bfc.check_integrity();
    }

    #[test]
    #[should_panic(expected = "is in no bin")]
    fn a_hole_that_was_not_filed_is_noticed() {
        let mut bfc = busy();
        bfc.unfile(bfc.chunks.top_hole().expect("the gap"));
        bfc.check_integrity();
    }

    #[test]
    #[should_panic(expected = "is filed wrongly")]
    fn a_hole_filed_with_an_old_size_is_noticed() {
        let mut bfc = busy();
        let (side, hole) = bfc.chunks.hole(bfc.chunks.top_hole().expect("the gap"));
        bfc.holes.remove(side, hole);
        bfc.holes.insert(side, Hole { size: hole.size - 256, ..hole });
        bfc.check_integrity();
    }

    #[test]
    #[should_panic(expected = "adjacent free chunks")]
    fn a_hole_cut_in_two_is_noticed() {
        let mut bfc = busy();
        let gap = bfc.chunks.top_hole().expect("the gap");
        bfc.chunks.split(gap, 256);
        bfc.check_integrity();
    }

    #[test]
    #[should_panic(expected = "do not tile")]
    fn a_chunk_that_grew_over_its_neighbour_is_noticed() {
        let mut bfc = busy();
        bfc.chunks.get_mut(0).size += 256;
        bfc.check_integrity();
    }

    #[test]
    #[should_panic(expected = "before or after the region")]
    fn a_region_of_another_size_is_noticed() {
        let mut bfc = busy();
        bfc.capacity += 256;
        bfc.check_integrity();
    }

    #[test]
    #[should_panic(expected = "waits for nothing")]
    fn a_retired_block_without_a_fence_is_noticed() {
        let mut bfc = busy();
        bfc.retired.clear();
        bfc.check_integrity();
    }

    #[test]
    #[should_panic(expected = "does not wait for 7")]
    fn a_fence_without_a_retired_block_is_noticed() {
        let mut bfc = busy();
        let slot = *bfc.retired.values().next().expect("one waits");
        let chunk = bfc.chunks.get_mut(slot);
        bfc.books.strike(chunk);
        chunk.tenant = chunk.tenant.take().map(|tenant| Tenant { is_retired: false, ..tenant });
        bfc.books.enter(chunk);
        bfc.check_integrity();
    }
}
