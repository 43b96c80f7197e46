//! What the allocator can say about itself: numbers, a map, and why a request cannot be met.

use std::fmt;

use super::Chunk;

/// The allocator at one moment. Bytes in use are whole granted chunks, retired ones included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stats {
    /// Size of the region.
    pub capacity: usize,
    /// Bytes of chunks that are not free.
    pub in_use: usize,
    /// Bytes that were asked for in them; the rest of `in_use` is rounding.
    pub requested: usize,
    /// Bytes of chunks that wait for their fence.
    pub retired: usize,
    /// The most that was ever in use.
    pub peak: usize,
    /// The largest request that could be met now.
    pub largest_hole: usize,
    /// Free chunks.
    pub num_holes: usize,
    /// Chunks in use, those that wait for their fence not counted.
    pub num_live: usize,
}

impl Stats {
    /// Bytes of free chunks.
    pub fn free(&self) -> usize {
        self.capacity - self.in_use
    }

    /// Share of the free bytes that are outside the largest hole: 0 if they are in one piece, or if none are free.
    pub fn fragmentation(&self) -> f64 {
        match self.free() {
            0 => 0.0,
            free => 1.0 - self.largest_hole as f64 / free as f64,
        }
    }
}

/// A chunk of the region, for maps and dumps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Where it starts.
    pub offset: usize,
    /// Bytes.
    pub size: usize,
    /// What it was allocated for; `None` if free.
    pub name: Option<&'static str>,
}

/// All blocks of one name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    /// What they were allocated for.
    pub name: &'static str,
    /// Bytes they have together.
    pub bytes: usize,
    /// How many there are.
    pub num_blocks: usize,
}

/// A request that cannot be met. The allocator is as it was before.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct Exhausted {
    /// What the memory was for.
    pub name: &'static str,
    /// Bytes that were asked for.
    pub requested: usize,
    /// The allocator's numbers.
    pub stats: Stats,
    /// Who holds the most, most first; at most [`Exhausted::MOST_HOLDERS`] of them.
    pub holders: Vec<Holder>,
}

impl Exhausted {
    /// Holders that are named.
    pub const MOST_HOLDERS: usize = 4;
}

impl fmt::Display for Exhausted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, requested, stats, holders } = self;
        let (free, Stats { capacity, largest_hole, retired, .. }) = (stats.free(), stats);
        write!(
            f,
            "{name} needs {requested} bytes; {free} of {capacity} bytes are free, {largest_hole} in one piece"
        )?;
        if *retired > 0 {
            write!(f, ", and {retired} wait for the device")?;
        }
        for (index, Holder { name, bytes, num_blocks }) in holders.iter().enumerate() {
            let lead = if index == 0 { "; held by" } else { "," };
            write!(
                f,
                "{lead} {name} {bytes} ({num_blocks} block{})",
                if *num_blocks == 1 { "" } else { "s" }
            )?;
        }
        Ok(())
    }
}

/// Running sums over the chunks in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Books {
    pub in_use: usize,
    pub requested: usize,
    pub retired: usize,
    pub num_live: usize,
}

impl Books {
    /// Adds a chunk to the sums; a free one adds nothing.
    pub fn enter(&mut self, chunk: &Chunk) {
        let Some(tenant) = &chunk.tenant else { return };
        self.in_use += chunk.size;
        self.requested += tenant.requested;
        if tenant.is_retired { self.retired += chunk.size } else { self.num_live += 1 }
    }

    /// Takes a chunk out of the sums.
    pub fn strike(&mut self, chunk: &Chunk) {
        let Some(tenant) = &chunk.tenant else { return };
        self.in_use -= chunk.size;
        self.requested -= tenant.requested;
        if tenant.is_retired { self.retired -= chunk.size } else { self.num_live -= 1 }
    }
}

/// Those who hold the most, most first; equals by name.
pub(super) fn top_holders<'a>(chunks: impl Iterator<Item = &'a Chunk>) -> Vec<Holder> {
    let mut held: Vec<_> =
        chunks.filter_map(|chunk| Some((chunk.tenant.as_ref()?.name, chunk.size))).collect();
    held.sort_unstable();
    let mut holders: Vec<_> = held
        .chunk_by(|left, right| left.0 == right.0)
        .map(|same| Holder {
            name: same[0].0,
            bytes: same.iter().map(|(_, size)| size).sum(),
            num_blocks: same.len(),
        })
        .collect();
    holders.sort_by_key(|holder| std::cmp::Reverse(holder.bytes));
    holders.truncate(Exhausted::MOST_HOLDERS);
    holders
}
