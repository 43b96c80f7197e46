//! The division of a job among workers: claims on a range, and disjoint parts of one mutable buffer.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use penstock_types::config_limits::MAX_NUMA_NODES;

use super::Pool;
use crate::numa::panels_of_node;

/// A range of work that workers claim in pieces, in ascending order. Aligned to a cache line, so that nodes do not
/// share one.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct Claims {
    next: AtomicUsize,
    count: usize,
}

impl Claims {
    pub(crate) fn new(count: usize) -> Self {
        Self { next: AtomicUsize::new(0), count }
    }

    /// The next unclaimed index.
    pub(crate) fn next(&self) -> Option<usize> {
        // Relaxed: the counter only assigns indices; the pool's barriers order the data.
        let index = self.next.fetch_add(1, Ordering::Relaxed);
        (index < self.count).then_some(index)
    }

    /// The next unclaimed indices: `1 / (2 threads)` of the rest, rounded up to a multiple of `unit`, at most `limit`.
    /// The pieces shrink towards the end, so that workers of unequal speed finish together.
    pub(crate) fn next_share(&self, threads: usize, unit: usize, limit: usize) -> Option<Range<usize>> {
        let share = |next: usize| {
            let left = self.count.checked_sub(next).filter(|left| *left > 0)?;
            let size = (left / (2 * threads)).max(1).next_multiple_of(unit).min(limit);
            Some(next + size.min(left))
        };
        // Relaxed: as above.
        let start = self.next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, share).ok()?;
        share(start).map(|end| start..end)
    }
}

/// The panels of a matrix for each of several blocks of tokens. A worker first claims the panels in the memory of its
/// node, then those of other nodes.
pub(crate) struct PanelClaims<'a> {
    pool: &'a Pool,
    panels: usize,
    nodes: [Claims; MAX_NUMA_NODES],
}

/// A claimed piece: it begins at panel `panel` of token block `block`.
pub(crate) struct PanelShare {
    pub(crate) block: usize,
    pub(crate) panel: usize,
    pub(crate) count: usize,
}

impl<'a> PanelClaims<'a> {
    pub(crate) fn new(pool: &'a Pool, blocks: usize, panels: usize) -> Self {
        let num_nodes = pool.num_nodes();
        let nodes = std::array::from_fn(|node| {
            let is_used = node < num_nodes;
            Claims::new(if is_used { blocks * panels_of_node(panels, num_nodes, node).len() } else { 0 })
        });
        Self { pool, panels, nodes }
    }

    /// Calls `run` with pieces that `worker` has claimed until none is left. A piece has at most `limit` panels, of one
    /// block and one node.
    pub(crate) fn for_each(&self, worker: usize, unit: usize, limit: usize, mut run: impl FnMut(PanelShare)) {
        let num_nodes = self.pool.num_nodes();
        let threads = self.pool.threads() / num_nodes;
        let own = worker / threads;
        for node in (own..num_nodes).chain(0..own) {
            let panels = panels_of_node(self.panels, num_nodes, node);
            while let Some(mut share) = self.nodes[node].next_share(threads, unit, limit) {
                while !share.is_empty() {
                    let (block, panel) = (share.start / panels.len(), share.start % panels.len());
                    let count = share.len().min(panels.len() - panel);
                    run(PanelShare { block, panel: panels.start + panel, count });
                    share.start += count;
                }
            }
        }
    }
}

/// A mutable slice whose disjoint parts several workers write at the same time.
#[derive(Clone, Copy)]
pub(crate) struct SharedMut<'a, T> {
    start: *mut T,
    length: usize,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: it represents `&mut [T]`; the callers of `slice` keep the parts disjoint.
unsafe impl<T: Send> Send for SharedMut<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for SharedMut<'_, T> {}

impl<'a, T> SharedMut<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self { start: slice.as_mut_ptr(), length: slice.len(), slice: PhantomData }
    }

    pub(crate) fn as_ptr(&self) -> *mut T {
        self.start
    }

    /// # Safety
    /// No part of `start..start + length` may be borrowed elsewhere while the result lives.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn slice(&self, start: usize, length: usize) -> &'a mut [T] {
        assert!(
            start <= self.length && length <= self.length - start,
            "part outside the slice; this is a bug"
        );
        // SAFETY: in bounds as just checked; unshared by contract.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(start), length) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The blocks and panels that a worker claims.
    fn claimed(claims: &PanelClaims<'_>, worker: usize) -> Vec<(usize, usize)> {
        let mut all = Vec::new();
        claims.for_each(worker, 4, 8, |share| {
            assert!((1..=8).contains(&share.count));
            all.extend((share.panel..share.panel + share.count).map(|panel| (share.block, panel)));
        });
        all
    }

    #[test]
    fn worker_claims_the_panels_of_its_node_first() {
        let cpus = crate::allowed_cpus().unwrap_or_else(|_| vec![0]);
        for (threads, nodes, blocks, panels) in [(2, 2, 1, 20), (4, 2, 3, 7), (3, 3, 2, 1), (2, 1, 2, 9)] {
            let pool = Pool::on_nodes(threads, vec![cpus.clone(); nodes]).expect("threads");
            for worker in 0..threads {
                let own = panels_of_node(panels, nodes, worker / (threads / nodes));
                let claims = PanelClaims::new(&pool, blocks, panels);
                let all = claimed(&claims, worker);
                assert!(all[..blocks * own.len()].iter().all(|(_, panel)| own.contains(panel)), "{all:?}");
                let mut sorted = all;
                sorted.sort_unstable();
                let each = (0..blocks).flat_map(|block| (0..panels).map(move |panel| (block, panel)));
                assert_eq!(sorted, each.collect::<Vec<_>>(), "each panel is claimed once");
                assert!(claimed(&claims, 0).is_empty());
            }
        }
    }

    #[test]
    fn shares_shrink_keep_the_limit_and_cover_the_range_once() {
        for (count, threads, unit, limit) in
            [(1000, 1, 3, 128), (1000, 2, 4, 16), (7, 3, 4, 64), (0, 2, 1, 8)]
        {
            let claims = Claims::new(count);
            let mut shares = Vec::new();
            while let Some(share) = claims.next_share(threads, unit, limit) {
                shares.push(share);
            }
            assert!(shares.iter().all(|share| (1..=limit).contains(&share.len())), "{shares:?}");
            assert!(shares.windows(2).all(|pair| pair[0].len() >= pair[1].len()), "{shares:?}");
            assert_eq!(shares.into_iter().flatten().collect::<Vec<_>>(), (0..count).collect::<Vec<_>>());
        }
    }
}
