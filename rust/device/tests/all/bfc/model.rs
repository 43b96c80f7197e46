//! The reference implementation of the allocator: one sorted list of spans with linear search. It has no bins, links or
//! slots and shares no code with the allocator.

use penstock_device::bfc::{AllocationId, AllocatorStats, Bfc, Extent, Placement, StaleBlock};

const NAME: &str = "model";

#[derive(Clone, Copy)]
struct Span {
    offset: usize,
    size: usize,
    allocation: Option<Allocation>,
}

#[derive(Clone, Copy)]
struct Allocation {
    id: AllocationId,
    requested: usize,
    placement: Placement,
    fence: Option<u64>,
}

/// An allocator and its model, compared after every request.
pub struct Pair {
    bfc: Bfc,
    spans: Vec<Span>,
    peak: usize,
    freed: Vec<AllocationId>,
}

/// The offset and size of an allocation; `None` if it failed.
pub type Outcome = Option<(usize, usize)>;

impl Pair {
    pub fn new(capacity: usize, alignment: usize) -> Self {
        let bfc = Bfc::new(capacity, alignment).expect("a valid size");
        let spans = vec![Span { offset: 0, size: capacity / alignment * alignment, allocation: None }];
        Self { bfc, spans, peak: 0, freed: Vec::new() }
    }

    pub fn allocate(&mut self, requested: usize, placement: Placement) -> Outcome {
        let expected = self.expected(requested, placement);
        let before = expected.is_none().then(|| format!("{:?}", self.bfc));
        let outcome = self.bfc.allocate(requested, placement, NAME);
        match (&outcome, expected) {
            (Ok(block), Some((index, offset, size))) => {
                assert_eq!((block.offset, block.size), (offset, size));
                assert_eq!(self.bfc.get(block.id), Ok(*block));
                let free = self.spans.remove(index);
                let allocation = Some(Allocation { id: block.id, requested, placement, fence: None });
                let below = Span { offset: free.offset, size: offset - free.offset, allocation: None };
                let end = offset + size;
                let above = Span { offset: end, size: free.offset + free.size - end, allocation: None };
                let parts = [below, Span { offset, size, allocation }, above]
                    .into_iter()
                    .filter(|part| part.size > 0);
                self.spans.splice(index..index, parts);
                self.peak = self.peak.max(self.in_use());
            }
            (Err(error), None) => {
                assert_eq!((error.requested, error.name, error.stats), (requested, NAME, self.stats()));
                let in_use: usize = error.usages.iter().map(|usage| usage.bytes).sum();
                assert_eq!(in_use, self.in_use(), "all blocks have one name");
                assert_eq!(Some(format!("{:?}", self.bfc)), before, "a failure changes nothing");
            }
            (outcome, expected) => panic!("{outcome:?}, the model has {expected:?}"),
        }
        self.compare();
        outcome.ok().map(|block| (block.offset, block.size))
    }

    /// Frees live block number `which` modulo their number, counted from the bottom.
    pub fn free(&mut self, which: usize) {
        let Some(index) = self.live(which) else { return };
        let id = self.id_at(index);
        assert_eq!(self.bfc.free(id), Ok(()));
        self.clear(index);
        self.freed.push(id);
        self.compare();
    }

    /// Retires live block number `which`, counted as in `free`.
    pub fn retire(&mut self, which: usize, fence: u64) {
        let Some(index) = self.live(which) else { return };
        let id = self.id_at(index);
        assert_eq!(self.bfc.retire(id, fence), Ok(()));
        self.spans[index].allocation =
            self.spans[index].allocation.map(|allocation| Allocation { fence: Some(fence), ..allocation });
        self.freed.push(id);
        self.compare();
    }

    pub fn reclaim(&mut self, passed: u64) {
        let is_due = |span: &Span| {
            span.allocation.and_then(|allocation| allocation.fence).is_some_and(|fence| fence <= passed)
        };
        let mut num_due = 0;
        while let Some(index) = self.spans.iter().position(is_due) {
            self.clear(index);
            num_due += 1;
        }
        assert_eq!(self.bfc.reclaim(passed), num_due);
        self.compare();
    }

    pub fn extend(&mut self, bytes: usize) {
        let added = bytes / self.bfc.alignment() * self.bfc.alignment();
        assert_eq!(self.bfc.extend(bytes).ok(), (added > 0).then_some(added));
        if added > 0 {
            self.spans.push(Span { offset: self.capacity(), size: added, allocation: None });
            self.merge();
        }
        self.compare();
    }

    /// Frees every block, in an order that depends on `seed`.
    pub fn free_everything(&mut self, seed: usize) {
        self.reclaim(u64::MAX);
        for step in 0.. {
            let num_live = self.stats().num_live;
            if num_live == 0 {
                break;
            }
            self.free(seed.wrapping_mul(step * 2 + 1) % num_live);
        }
    }

    pub fn extents(&self) -> Vec<Extent> {
        self.bfc.extents().collect()
    }

    /// Index, offset and size that a request must get: the smallest free span, the lowest of equals, on the nearest
    /// side.
    fn expected(&self, requested: usize, placement: Placement) -> Option<(usize, usize, usize)> {
        let unit = self.bfc.alignment();
        let size = requested.max(1).div_ceil(unit).checked_mul(unit)?;
        let placed = |span: &Span| span.allocation.map(|allocation| allocation.placement);
        let distance = |index: usize| {
            let below =
                index.checked_sub(1).and_then(|below| placed(&self.spans[below])).unwrap_or(Placement::Low);
            let above = self.spans.get(index + 1).and_then(placed).unwrap_or(Placement::High);
            usize::from(below != placement) + usize::from(above != placement)
        };
        let fits = |index: &usize| self.spans[*index].allocation.is_none() && self.spans[*index].size >= size;
        let best = |index: &usize| (distance(*index), self.spans[*index].size, self.spans[*index].offset);
        let index = (0..self.spans.len()).filter(fits).min_by_key(best)?;
        let free = self.spans[index];
        let offset = if placement == Placement::Low { free.offset } else { free.offset + free.size - size };
        Some((index, offset, size))
    }

    fn live(&self, which: usize) -> Option<usize> {
        let is_live = |index: &usize| {
            self.spans[*index].allocation.is_some_and(|allocation| allocation.fence.is_none())
        };
        let live: Vec<usize> = (0..self.spans.len()).filter(is_live).collect();
        live.get(which % live.len().max(1)).copied()
    }

    fn id_at(&self, index: usize) -> AllocationId {
        self.spans[index].allocation.expect("a used span").id
    }

    fn clear(&mut self, index: usize) {
        self.spans[index].allocation = None;
        self.merge();
    }

    fn merge(&mut self) {
        self.spans.dedup_by(|upper, lower| {
            let both = upper.allocation.is_none() && lower.allocation.is_none();
            lower.size += if both { upper.size } else { 0 };
            both
        });
    }

    fn capacity(&self) -> usize {
        self.spans.iter().map(|span| span.size).sum()
    }

    fn in_use(&self) -> usize {
        self.spans.iter().filter(|span| span.allocation.is_some()).map(|span| span.size).sum()
    }

    fn stats(&self) -> AllocatorStats {
        let used = || self.spans.iter().filter_map(|span| Some((span.size, span.allocation?)));
        let free = || self.spans.iter().filter(|span| span.allocation.is_none()).map(|span| span.size);
        AllocatorStats {
            capacity: self.capacity(),
            in_use: self.in_use(),
            requested: used().map(|(_, allocation)| allocation.requested).sum(),
            retired: used().filter(|(_, allocation)| allocation.fence.is_some()).map(|(size, _)| size).sum(),
            peak: self.peak,
            largest_free: free().max().unwrap_or(0),
            num_free_chunks: free().count(),
            num_live: used().filter(|(_, allocation)| allocation.fence.is_none()).count(),
        }
    }

    /// Compares map and statistics, checks the invariants, and tries to free every freed block again.
    fn compare(&mut self) {
        self.bfc.check_integrity();
        let of_span = |span: &Span| Extent {
            offset: span.offset,
            size: span.size,
            name: span.allocation.map(|_| NAME),
        };
        assert_eq!(self.extents(), self.spans.iter().map(of_span).collect::<Vec<_>>());
        assert_eq!(self.bfc.stats(), self.stats());
        assert!(self.spans.iter().all(|span| span.offset % self.bfc.alignment() == 0));
        for id in &self.freed {
            assert_eq!(self.bfc.free(*id), Err(StaleBlock::Freed));
            assert_eq!(self.bfc.retire(*id, 0), Err(StaleBlock::Freed));
            assert_eq!(self.bfc.get(*id), Err(StaleBlock::Freed));
        }
    }
}
