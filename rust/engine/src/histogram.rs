//! Histograms with fixed buckets. The engine thread adds to them without a lock, an allocation or an atomic
//! read-modify-write; any thread may read them.

use std::sync::atomic::{AtomicU64, Ordering};

/// The distribution of a quantity since the engine started.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Histogram {
    /// The upper bounds of the buckets, ascending and inclusive.
    pub buckets: Vec<f64>,
    /// The number of values in each bucket, and last that of the values above every bound.
    pub counts: Vec<u64>,
    /// The sum of the values.
    pub sum: f64,
}

impl Histogram {
    /// The number of values.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }
}

/// The most buckets of a histogram, that of the values above every bound included.
const MAX_BUCKETS: usize = 32;

/// A histogram that the engine thread fills and any thread reads.
pub(crate) struct SharedHistogram {
    buckets: &'static [f64],
    counts: [AtomicU64; MAX_BUCKETS],
    /// The sum of the values, as the bits of an `f64`.
    sum: AtomicU64,
}

// All accesses are relaxed: a reader that popped an event pushed after an observation is ordered by the queue.
impl SharedHistogram {
    pub(crate) const fn new(buckets: &'static [f64]) -> Self {
        assert!(buckets.len() < MAX_BUCKETS, "too many buckets");
        Self { buckets, counts: [const { AtomicU64::new(0) }; MAX_BUCKETS], sum: AtomicU64::new(0) }
    }

    /// Adds a value `times` times. Only called by the engine thread, so that a load and a store suffice.
    pub(crate) fn observe(&self, value: f64, times: u64) {
        let count = &self.counts[self.buckets.partition_point(|bound| *bound < value)];
        count.store(count.load(Ordering::Relaxed) + times, Ordering::Relaxed);
        let sum = f64::from_bits(self.sum.load(Ordering::Relaxed)) + value * times as f64;
        self.sum.store(sum.to_bits(), Ordering::Relaxed);
    }

    pub(crate) fn read(&self) -> Histogram {
        let counts = self.counts[..=self.buckets.len()].iter();
        Histogram {
            buckets: self.buckets.to_vec(),
            counts: counts.map(|count| count.load(Ordering::Relaxed)).collect(),
            sum: f64::from_bits(self.sum.load(Ordering::Relaxed)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_counted_in_the_bucket_of_their_upper_bound() {
        let histogram = SharedHistogram::new(&[1.0, 2.5]);
        for (value, times) in [(0.0, 1), (1.0, 1), (1.5, 3), (2.5, 1), (100.0, 2)] {
            histogram.observe(value, times);
        }
        let read = histogram.read();
        assert_eq!(read, Histogram { buckets: vec![1.0, 2.5], counts: vec![2, 4, 2], sum: 208.0 });
        assert_eq!(read.count(), 8);
    }
}
