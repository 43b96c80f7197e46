//! A check of every invariant of the allocator.

use super::Bfc;
use super::accounting::Accounting;

impl Bfc {
    /// Panics unless every invariant holds. For tests and debug builds: the time is linear in the number of chunks.
    pub fn check_integrity(&self) {
        let num_chunks = self.chunks.check_integrity(self.capacity, self.alignment);
        let (mut accounting, mut num_used, mut num_waiting) = (Accounting::default(), 0, 0);
        for (_, chunk) in self.chunks.in_order() {
            accounting.add(chunk);
            let Some(allocation) = &chunk.allocation else { continue };
            assert!(allocation.serial < self.next_serial, "an invalid serial; this is a bug: {chunk:?}");
            num_used += 1;
            num_waiting += usize::from(allocation.is_retired);
        }
        assert_eq!(
            accounting, self.accounting,
            "accounting differs from the sums over the chunks; this is a bug"
        );
        assert!(
            (accounting.in_use..=self.capacity).contains(&self.peak),
            "a peak of {}; this is a bug",
            self.peak
        );

        for (&(fence, serial), &slot) in &self.retired {
            let allocation = self.chunks.get(slot).allocation.as_ref();
            let is_waiting =
                allocation.is_some_and(|allocation| allocation.is_retired && allocation.serial == serial);
            assert!(is_waiting, "block {serial} does not wait for {fence}; this is a bug");
        }
        assert_eq!(self.retired.len(), num_waiting, "a retired block without a fence; this is a bug");

        let (mut num_free_chunks, mut free) = (0, 0);
        self.free_chunks.check_integrity(|side, chunk| {
            assert!(self.chunks.is_free(chunk.slot), "a used chunk is in a bin; this is a bug: {chunk:?}");
            assert_eq!(self.chunks.free_chunk(chunk.slot), (side, chunk), "a wrong bin entry; this is a bug");
            num_free_chunks += 1;
            free += chunk.size;
        });
        // Bin entries are distinct, because bins are sorted by size and offset; so equal counts mean that each chunk is
        // in one.
        assert_eq!(
            num_free_chunks + num_used,
            num_chunks,
            "a free chunk is in no bin, or in two; this is a bug"
        );
        assert_eq!(free + accounting.in_use, self.capacity, "bytes were lost; this is a bug");
    }
}

/// Each test breaks one invariant; the check must name it.
#[cfg(test)]
mod tests {
    use super::*;
    use crate::bfc::free_chunks::FreeChunk;
    use crate::bfc::{Allocation, Placement};

    /// `| used | free | retired | gap |`
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
    #[should_panic(expected = "accounting differ")]
    fn wrong_sum_is_detected() {
        let mut bfc = busy();
        bfc.accounting.requested += 1;
        bfc.check_integrity();
    }

    #[test]
    #[should_panic(expected = "a peak of")]
    fn peak_below_usage_is_detected() {
        let mut bfc = busy();
        bfc.peak = 1;
        bfc.check_integrity();
    }

    #[test]
    #[should_panic(expected = "is in no bin")]
    fn missing_bin_entry_is_detected() {
        let mut bfc = busy();
        bfc.remove_free(bfc.chunks.top_free().expect("the gap"));
        bfc.check_integrity();
    }

    #[test]
    #[should_panic(expected = "wrong bin entry")]
    fn bin_entry_with_a_wrong_size_is_detected() {
        let mut bfc = busy();
        let (side, chunk) = bfc.chunks.free_chunk(bfc.chunks.top_free().expect("the gap"));
        bfc.free_chunks.remove(side, chunk);
        bfc.free_chunks.insert(side, FreeChunk { size: chunk.size - 256, ..chunk });
        bfc.check_integrity();
    }

    #[test]
    #[should_panic(expected = "adjacent free chunks")]
    fn adjacent_free_chunks_are_detected() {
        let mut bfc = busy();
        let gap = bfc.chunks.top_free().expect("the gap");
        bfc.chunks.split(gap, 256);
        bfc.check_integrity();
    }

    #[test]
    #[should_panic(expected = "do not tile")]
    fn overlapping_chunk_is_detected() {
        let mut bfc = busy();
        bfc.chunks.get_mut(0).size += 256;
        bfc.check_integrity();
    }

    #[test]
    #[should_panic(expected = "before or after the region")]
    fn wrong_capacity_is_detected() {
        let mut bfc = busy();
        bfc.capacity += 256;
        bfc.check_integrity();
    }

    #[test]
    #[should_panic(expected = "without a fence")]
    fn retired_block_without_a_fence_is_detected() {
        let mut bfc = busy();
        bfc.retired.clear();
        bfc.check_integrity();
    }

    #[test]
    #[should_panic(expected = "does not wait for 7")]
    fn fence_without_a_retired_block_is_detected() {
        let mut bfc = busy();
        let slot = *bfc.retired.values().next().expect("a retired block");
        let chunk = bfc.chunks.get_mut(slot);
        bfc.accounting.remove(chunk);
        chunk.allocation =
            chunk.allocation.take().map(|allocation| Allocation { is_retired: false, ..allocation });
        bfc.accounting.add(chunk);
        bfc.check_integrity();
    }
}
