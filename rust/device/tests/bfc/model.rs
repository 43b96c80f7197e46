//! The allocator's slow twin: one sorted list of spans, searched from end to end. It shares no code and no idea of bins, links
//! or slots with what it is the measure of.

use penstock_device::bfc::{AllocationId, Bfc, Extent, Placement, StaleBlock, Stats};

const NAME: &str = "model";

#[derive(Clone, Copy)]
struct Span {
    offset: usize,
    size: usize,
    tenant: Option<Tenant>,
}

#[derive(Clone, Copy)]
struct Tenant {
    id: AllocationId,
    requested: usize,
    placement: Placement,
    fence: Option<u64>,
}

/// An allocator and its model, fed the same and compared after every request.
pub struct Pair {
    bfc: Bfc,
    spans: Vec<Span>,
    peak: usize,
    gone: Vec<AllocationId>,
}

/// What a caller saw of an allocation: the place, or that there was none.
pub type Outcome = Option<(usize, usize)>;

impl Pair {
    pub fn new(capacity: usize, alignment: usize) -> Self {
        let bfc = Bfc::new(capacity, alignment).expect("a valid size");
        let spans = vec![Span { offset: 0, size: capacity / alignment * alignment, tenant: None }];
        Self { bfc, spans, peak: 0, gone: Vec::new() }
    }

    pub fn allocate(&mut self, requested: usize, placement: Placement) -> Outcome {
        let expected = self.place(requested, placement);
        let before = expected.is_none().then(|| format!("{:?}", self.bfc));
        let outcome = self.bfc.allocate(requested, placement, NAME);
        match (&outcome, expected) {
            (Ok(block), Some((index, offset, size))) => {
                assert_eq!((block.offset, block.size), (offset, size));
                assert_eq!(self.bfc.get(block.id), Ok(*block));
                let hole = self.spans.remove(index);
                let tenant = Some(Tenant { id: block.id, requested, placement, fence: None });
                let below = Span { offset: hole.offset, size: offset - hole.offset, tenant: None };
                let end = offset + size;
                let above = Span { offset: end, size: hole.offset + hole.size - end, tenant: None };
                let parts =
                    [below, Span { offset, size, tenant }, above].into_iter().filter(|part| part.size > 0);
                self.spans.splice(index..index, parts);
                self.peak = self.peak.max(self.in_use());
            }
            (Err(refusal), None) => {
                assert_eq!((refusal.requested, refusal.name, refusal.stats), (requested, NAME, self.stats()));
                let held: usize = refusal.holders.iter().map(|holder| holder.bytes).sum();
                assert_eq!(held, self.in_use(), "all blocks have one name");
                assert_eq!(Some(format!("{:?}", self.bfc)), before, "a refusal changes nothing at all");
            }
            (outcome, expected) => panic!("{outcome:?} where the model has {expected:?}"),
        }
        self.compare();
        outcome.ok().map(|block| (block.offset, block.size))
    }

    /// Frees the `which`th live block, counted from below and round.
    pub fn free(&mut self, which: usize) {
        let Some(index) = self.live(which) else { return };
        let id = self.id_at(index);
        assert_eq!(self.bfc.free(id), Ok(()));
        self.vacate(index);
        self.gone.push(id);
        self.compare();
    }

    /// Retires the `which`th live block, counted likewise.
    pub fn retire(&mut self, which: usize, fence: u64) {
        let Some(index) = self.live(which) else { return };
        let id = self.id_at(index);
        assert_eq!(self.bfc.retire(id, fence), Ok(()));
        self.spans[index].tenant =
            self.spans[index].tenant.map(|tenant| Tenant { fence: Some(fence), ..tenant });
        self.gone.push(id);
        self.compare();
    }

    pub fn reclaim(&mut self, passed: u64) {
        let is_due =
            |span: &Span| span.tenant.and_then(|tenant| tenant.fence).is_some_and(|fence| fence <= passed);
        let mut num_due = 0;
        while let Some(index) = self.spans.iter().position(is_due) {
            self.vacate(index);
            num_due += 1;
        }
        assert_eq!(self.bfc.reclaim(passed), num_due);
        self.compare();
    }

    pub fn extend(&mut self, bytes: usize) {
        let added = bytes / self.bfc.alignment() * self.bfc.alignment();
        assert_eq!(self.bfc.extend(bytes).ok(), (added > 0).then_some(added));
        if added > 0 {
            self.spans.push(Span { offset: self.capacity(), size: added, tenant: None });
            self.merge();
        }
        self.compare();
    }

    /// Gives everything back, in the order that `seed` shuffles it to.
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

    /// Index, offset and size of what a request must get: the smallest hole, the lowest of equals, on the nearest side.
    fn place(&self, requested: usize, placement: Placement) -> Option<(usize, usize, usize)> {
        let unit = self.bfc.alignment();
        let size = requested.max(1).div_ceil(unit).checked_mul(unit)?;
        let placed = |span: &Span| span.tenant.map(|tenant| tenant.placement);
        let distance = |index: usize| {
            let below =
                index.checked_sub(1).and_then(|below| placed(&self.spans[below])).unwrap_or(Placement::Low);
            let above = self.spans.get(index + 1).and_then(placed).unwrap_or(Placement::High);
            usize::from(below != placement) + usize::from(above != placement)
        };
        let fits = |index: &usize| self.spans[*index].tenant.is_none() && self.spans[*index].size >= size;
        let best = |index: &usize| (distance(*index), self.spans[*index].size, self.spans[*index].offset);
        let index = (0..self.spans.len()).filter(fits).min_by_key(best)?;
        let hole = self.spans[index];
        let offset = if placement == Placement::Low { hole.offset } else { hole.offset + hole.size - size };
        Some((index, offset, size))
    }

    fn live(&self, which: usize) -> Option<usize> {
        let is_live = |index: &usize| self.spans[*index].tenant.is_some_and(|tenant| tenant.fence.is_none());
        let live: Vec<usize> = (0..self.spans.len()).filter(is_live).collect();
        live.get(which % live.len().max(1)).copied()
    }

    fn id_at(&self, index: usize) -> AllocationId {
        self.spans[index].tenant.expect("a used span").id
    }

    fn vacate(&mut self, index: usize) {
        self.spans[index].tenant = None;
        self.merge();
    }

    fn merge(&mut self) {
        self.spans.dedup_by(|upper, lower| {
            let both = upper.tenant.is_none() && lower.tenant.is_none();
            lower.size += if both { upper.size } else { 0 };
            both
        });
    }

    fn capacity(&self) -> usize {
        self.spans.iter().map(|span| span.size).sum()
    }

    fn in_use(&self) -> usize {
        self.spans.iter().filter(|span| span.tenant.is_some()).map(|span| span.size).sum()
    }

    fn stats(&self) -> Stats {
        let used = || self.spans.iter().filter_map(|span| Some((span.size, span.tenant?)));
        let holes = || self.spans.iter().filter(|span| span.tenant.is_none()).map(|span| span.size);
        Stats {
            capacity: self.capacity(),
            in_use: self.in_use(),
            requested: used().map(|(_, tenant)| tenant.requested).sum(),
            retired: used().filter(|(_, tenant)| tenant.fence.is_some()).map(|(size, _)| size).sum(),
            peak: self.peak,
            largest_hole: holes().max().unwrap_or(0),
            num_holes: holes().count(),
            num_live: used().filter(|(_, tenant)| tenant.fence.is_none()).count(),
        }
    }

    /// The same map, the same numbers, sound inside, and nothing given back can be given back again.
    fn compare(&mut self) {
        self.bfc.check_integrity();
        let of_span =
            |span: &Span| Extent { offset: span.offset, size: span.size, name: span.tenant.map(|_| NAME) };
        assert_eq!(self.extents(), self.spans.iter().map(of_span).collect::<Vec<_>>());
        assert_eq!(self.bfc.stats(), self.stats());
        assert!(self.spans.iter().all(|span| span.offset % self.bfc.alignment() == 0));
        for id in &self.gone {
            assert_eq!(self.bfc.free(*id), Err(StaleBlock::GivenBack));
            assert_eq!(self.bfc.retire(*id, 0), Err(StaleBlock::GivenBack));
            assert_eq!(self.bfc.get(*id), Err(StaleBlock::GivenBack));
        }
    }
}
