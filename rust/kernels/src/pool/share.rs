//! The division of a job among workers: claims on a range, and disjoint parts of one mutable buffer.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A range of work that workers claim in pieces, in ascending order.
#[derive(Debug)]
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
