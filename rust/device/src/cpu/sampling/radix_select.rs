//! Radix select: the end of a sorted prefix, without sorting.
//!
//! Every id has a rank, an integer, and a mass. The prefix is the shortest list of ids, lowest rank first, whose masses
//! add up to a given sum. A pass sums the masses by the leading bits of the ranks and finds the digit in which the sum
//! is reached; the next pass looks only there. Three passes resolve all 32 bits. A quickselect moves the elements it
//! selects from, which takes several times as long for a whole vocabulary of nearly equal scores.

use std::ops::RangeInclusive;

use super::TILE;

/// Bits of a digit.
const DIGIT: u32 = 11;

/// The end of a prefix: it contains all lower ranks, and of this rank the lowest ids until their masses reach
/// `remaining`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Cutoff {
    pub rank: u32,
    remaining: f64,
}

impl Cutoff {
    /// The cutoff at which masses (not negative) reach `wanted`. `slices` yields the scores and weights of the ids,
    /// always in the same order, and `key(score, weight)` is an id's rank and mass. No rank is below `ranks`; those
    /// above it are ignored. If all masses do not add up to `wanted`, the prefix has every id of `ranks`.
    pub fn find<'a, I>(
        ranks: RangeInclusive<u32>,
        wanted: f64,
        slices: impl Fn() -> I,
        key: impl Fn(f32, f32) -> (u32, f32),
    ) -> Self
    where
        I: Iterator<Item = (&'a [f32], &'a [f32])>,
    {
        let mut first = *ranks.start();
        let mut bits = u32::BITS - (ranks.end() - first).leading_zeros();
        let mut remaining = wanted.max(f64::MIN_POSITIVE); // the prefix is never empty
        loop {
            let shift = bits.saturating_sub(DIGIT);
            let mut histogram = [0.0; 1 << DIGIT];
            for (scores, weights) in slices() {
                for (scores, weights) in scores.chunks(TILE).zip(weights.chunks(TILE)) {
                    // The digits first, in a loop that the compiler vectorises: after the first pass few tiles have
                    // any. Ranks below `first` wrap around and are out of range, like those above.
                    let mut digits = [u32::MAX; TILE];
                    let mut num_inside = 0_u32;
                    for ((digit, score), weight) in digits.iter_mut().zip(scores).zip(weights) {
                        *digit = key(*score, *weight).0.wrapping_sub(first) >> shift;
                        num_inside += u32::from(*digit < 1 << DIGIT);
                    }
                    if num_inside == 0 {
                        continue;
                    }
                    for ((digit, score), weight) in digits.iter().zip(scores).zip(weights) {
                        if let Some(sum) = histogram.get_mut(*digit as usize) {
                            *sum += f64::from(key(*score, *weight).1);
                        }
                    }
                }
            }
            let reaches = |sum: &f64| {
                let reached = *sum >= remaining;
                remaining -= if reached { 0.0 } else { *sum };
                reached
            };
            let Some(digit) = histogram.iter().position(reaches) else {
                // Not enough mass; or just enough by the sum of the pass before, which rounded differently.
                return Self { rank: first.saturating_add(((1_u64 << bits) - 1) as u32), remaining };
            };
            first += (digit as u32) << shift;
            if shift == 0 {
                return Self { rank: first, remaining };
            }
            bits = shift;
        }
    }

    /// Whether the prefix contains an id. Ids with the cutoff's own rank must be passed in ascending order.
    pub fn includes(&mut self, rank: u32, mass: f32) -> bool {
        if rank != self.rank {
            return rank < self.rank;
        }
        let fits = self.remaining > 0.0;
        self.remaining -= f64::from(mass);
        fits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The ranks are the bits of the scores.
    fn find(ranks: RangeInclusive<u32>, wanted: f64, ids: &[(u32, f32)]) -> Cutoff {
        let (scores, masses): (Vec<f32>, Vec<f32>) =
            ids.iter().map(|(rank, mass)| (f32::from_bits(*rank), *mass)).unzip();
        let slices = || [(&scores[..], &masses[..])].into_iter();
        Cutoff::find(ranks, wanted, slices, |score, mass| (score.to_bits(), mass))
    }

    /// The prefix, by sorting.
    fn naive(ids: &[(u32, f32)], wanted: f64) -> Vec<usize> {
        let mut order: Vec<usize> = (0..ids.len()).collect();
        order.sort_by_key(|id| (ids[*id].0, *id));
        let mut sum = 0.0;
        let mut list: Vec<usize> = order
            .into_iter()
            .take_while(|id| {
                let fits = sum < wanted;
                sum += f64::from(ids[*id].1);
                fits
            })
            .collect();
        list.sort_unstable();
        list
    }

    #[test]
    fn cutoff_is_where_sorting_ends_the_prefix() {
        let mut state = 1_u64;
        let mut random = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        };
        for (count, spread) in [(1, 1), (7, 3), (300, 1), (300, 40), (300, 5000), (2000, 1 << 30)] {
            for first in [0, 12345, u32::MAX - (1 << 30)] {
                // Integers, so that sums are equal in any order.
                let ids: Vec<(u32, f32)> =
                    (0..count).map(|_| (first + random(spread) as u32, random(4) as f32)).collect();
                let total: f64 = ids.iter().map(|(_, mass)| f64::from(*mass)).sum();
                for wanted in [1.0, 2.0, (total / 3.0).floor(), total - 1.0, total] {
                    let wanted = wanted.max(1.0);
                    let last = ids.iter().map(|(rank, _)| *rank).fold(first, u32::max);
                    let mut cutoff = find(first..=last, wanted, &ids);
                    let list: Vec<usize> =
                        (0..count).filter(|id| cutoff.includes(ids[*id].0, ids[*id].1)).collect();
                    assert_eq!(list, naive(&ids, wanted), "{wanted} of {total} in {count} of {spread}");
                }
            }
        }
    }

    #[test]
    fn cutoff_includes_all_for_too_much_mass_and_one_for_none() {
        let ids = [(5, 1.0), (9, 2.0), (u32::MAX, 0.5)];
        let included = |ranks, wanted| {
            let mut cutoff = find(ranks, wanted, &ids);
            ids.map(|(rank, mass)| cutoff.includes(rank, mass))
        };
        assert_eq!(included(5..=u32::MAX, 99.0), [true; 3]);
        assert_eq!(included(5..=9, 3.5)[..2], [true; 2]);
        assert_eq!(included(0..=9, 0.0), [true, false, false]);
        assert_eq!(included(5..=9, 1.0), [true, false, false]);
    }
}
