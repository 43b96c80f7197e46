//! The allocator's statistics, its map, and the error of a request that does not fit.

use std::fmt;

use super::MemoryChunk;

/// A snapshot of the allocator. Bytes in use are whole chunks, retired ones included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllocatorStats {
    /// Size of the region.
    pub capacity: usize,
    /// Bytes of chunks that are not free.
    pub in_use: usize,
    /// Requested bytes; the rest of `in_use` is rounding.
    pub requested: usize,
    /// Bytes of retired chunks, which wait for their fence.
    pub retired: usize,
    /// The largest `in_use` so far.
    pub peak: usize,
    /// Size of the largest free chunk: the largest request that fits.
    pub largest_free: usize,
    /// Number of free chunks.
    pub num_free_chunks: usize,
    /// Number of chunks in use, retired ones excluded.
    pub num_live: usize,
}

impl AllocatorStats {
    /// Bytes of free chunks.
    pub fn free(&self) -> usize {
        self.capacity - self.in_use
    }

    /// The share of the free bytes outside the largest free chunk; 0 if no byte is free.
    pub fn fragmentation(&self) -> f64 {
        match self.free() {
            0 => 0.0,
            free => 1.0 - self.largest_free as f64 / free as f64,
        }
    }
}

/// A chunk of the region, for maps and dumps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    pub offset: usize,
    pub size: usize,
    /// The purpose of the allocation; `None` if free.
    pub name: Option<&'static str>,
}

/// The blocks in use under one name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamedUsage {
    pub name: &'static str,
    /// Total size.
    pub bytes: usize,
    pub num_blocks: usize,
}

/// A request does not fit. The allocator is unchanged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct Exhausted {
    /// The purpose of the request.
    pub name: &'static str,
    /// Requested bytes.
    pub requested: usize,
    /// The allocator's statistics.
    pub stats: AllocatorStats,
    /// The largest usages, in descending order; at most [`Exhausted::MAX_USAGES`].
    pub usages: Vec<NamedUsage>,
}

impl Exhausted {
    /// The most usages that the error lists.
    pub const MAX_USAGES: usize = 4;
}

impl fmt::Display for Exhausted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, requested, stats, usages } = self;
        let (free, AllocatorStats { capacity, largest_free, retired, .. }) = (stats.free(), stats);
        write!(
            f,
            "{name} needs {requested} bytes; {free} of {capacity} bytes are free, {largest_free} of them contiguous"
        )?;
        if *retired > 0 {
            write!(f, ", and {retired} are in use by the device")?;
        }
        for (index, NamedUsage { name, bytes, num_blocks }) in usages.iter().enumerate() {
            let lead = if index == 0 { "; in use:" } else { "," };
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
pub(super) struct Accounting {
    pub in_use: usize,
    pub requested: usize,
    pub retired: usize,
    pub num_live: usize,
}

impl Accounting {
    /// Adds a chunk to the sums; a free chunk adds nothing.
    pub fn add(&mut self, chunk: &MemoryChunk) {
        let Some(allocation) = &chunk.allocation else { return };
        self.in_use += chunk.size;
        self.requested += allocation.requested;
        if allocation.is_retired { self.retired += chunk.size } else { self.num_live += 1 }
    }

    /// Subtracts a chunk from the sums.
    pub fn remove(&mut self, chunk: &MemoryChunk) {
        let Some(allocation) = &chunk.allocation else { return };
        self.in_use -= chunk.size;
        self.requested -= allocation.requested;
        if allocation.is_retired { self.retired -= chunk.size } else { self.num_live -= 1 }
    }
}

/// The largest usages, in descending order; equals by name.
pub(super) fn largest_usages<'a>(chunks: impl Iterator<Item = &'a MemoryChunk>) -> Vec<NamedUsage> {
    let mut in_use: Vec<_> =
        chunks.filter_map(|chunk| Some((chunk.allocation.as_ref()?.name, chunk.size))).collect();
    in_use.sort_unstable();
    let mut usages: Vec<_> = in_use
        .chunk_by(|left, right| left.0 == right.0)
        .map(|same| NamedUsage {
            name: same[0].0,
            bytes: same.iter().map(|(_, size)| size).sum(),
            num_blocks: same.len(),
        })
        .collect();
    usages.sort_by_key(|usage| std::cmp::Reverse(usage.bytes));
    usages.truncate(Exhausted::MAX_USAGES);
    usages
}
