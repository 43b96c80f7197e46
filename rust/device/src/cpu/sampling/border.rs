//! Where an ordered list ends that is never put in order: selection by the leading digits of ranks.
//!
//! Ids have ranks, which are whole numbers, and amounts. Wanted is the end of the shortest list of ids, lowest rank first,
//! whose amounts add up to so much. A pass adds the amounts up by the leading bits of the ranks, finds the digit in which
//! the sum is reached, and the next pass looks only there; three passes know all 32 bits. Selection by comparing moves what
//! it selects from, and over a whole vocabulary of nearly equal scores takes several times as long.

use std::ops::RangeInclusive;

use super::spans::SPAN;

/// Bits of a digit.
const DIGIT: u32 = 11;

/// The end of such a list: all lower ranks are in it, and of this rank the lowest ids until their amounts reach `left`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Border {
    pub rank: u32,
    left: f64,
}

impl Border {
    /// Where amounts (not negative) reach `wanted`. The ids come in one fixed order as slices of scores and weights, and
    /// `place(score, weight)` is an id's rank and amount. No rank comes before `ranks`; those after it are left aside. If all
    /// do not add up to it, nothing of `ranks` is cut off.
    pub fn find<'a, I>(
        ranks: RangeInclusive<u32>,
        wanted: f64,
        slices: impl Fn() -> I,
        place: impl Fn(f32, f32) -> (u32, f32),
    ) -> Self
    where
        I: Iterator<Item = (&'a [f32], &'a [f32])>,
    {
        let mut first = *ranks.start();
        let mut bits = u32::BITS - (ranks.end() - first).leading_zeros();
        let mut left = wanted.max(f64::MIN_POSITIVE); // the first id is always in the list
        loop {
            let shift = bits.saturating_sub(DIGIT);
            let mut held = [0.0; 1 << DIGIT];
            for (scores, weights) in slices() {
                for (scores, weights) in scores.chunks(SPAN).zip(weights.chunks(SPAN)) {
                    // Digits first, in a loop that the compiler makes vectors of: after the first pass few spans have any.
                    // Ranks before `first` wrap around, and are as far out of range as those behind it.
                    let mut digits = [u32::MAX; SPAN];
                    let mut num_inside = 0_u32;
                    for ((digit, score), weight) in digits.iter_mut().zip(scores).zip(weights) {
                        *digit = place(*score, *weight).0.wrapping_sub(first) >> shift;
                        num_inside += u32::from(*digit < 1 << DIGIT);
                    }
                    if num_inside == 0 {
                        continue;
                    }
                    for ((digit, score), weight) in digits.iter().zip(scores).zip(weights) {
                        if let Some(held) = held.get_mut(*digit as usize) {
                            *held += f64::from(place(*score, *weight).1);
                        }
                    }
                }
            }
            let reaches = |held: &f64| {
                let reached = *held >= left;
                left -= if reached { 0.0 } else { *held };
                reached
            };
            let Some(digit) = held.iter().position(reaches) else {
                // Too little; or just enough by the sum of the pass before, whose roundings were others.
                return Self { rank: first.saturating_add(((1_u64 << bits) - 1) as u32), left };
            };
            first += (digit as u32) << shift;
            if shift == 0 {
                return Self { rank: first, left };
            }
            bits = shift;
        }
    }

    /// Whether an id is in the list. Those of the border's own rank must be asked for in ascending order.
    pub fn includes(&mut self, rank: u32, amount: f32) -> bool {
        if rank != self.rank {
            return rank < self.rank;
        }
        let fits = self.left > 0.0;
        self.left -= f64::from(amount);
        fits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ranks travel as the bits of scores.
    fn find(ranks: RangeInclusive<u32>, wanted: f64, ids: &[(u32, f32)]) -> Border {
        let (scores, amounts): (Vec<f32>, Vec<f32>) =
            ids.iter().map(|(rank, amount)| (f32::from_bits(*rank), *amount)).unzip();
        let slices = || [(&scores[..], &amounts[..])].into_iter();
        Border::find(ranks, wanted, slices, |score, amount| (score.to_bits(), amount))
    }

    /// The list by sorting.
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
    fn the_list_ends_where_sorting_ends_it() {
        let mut state = 1_u64;
        let mut random = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        };
        for (count, spread) in [(1, 1), (7, 3), (300, 1), (300, 40), (300, 5000), (2000, 1 << 30)] {
            for first in [0, 12345, u32::MAX - (1 << 30)] {
                // Whole numbers, so that sums in any order are the same.
                let ids: Vec<(u32, f32)> =
                    (0..count).map(|_| (first + random(spread) as u32, random(4) as f32)).collect();
                let total: f64 = ids.iter().map(|(_, amount)| f64::from(*amount)).sum();
                for wanted in [1.0, 2.0, (total / 3.0).floor(), total - 1.0, total] {
                    let wanted = wanted.max(1.0);
                    let last = ids.iter().map(|(rank, _)| *rank).fold(first, u32::max);
                    let mut border = find(first..=last, wanted, &ids);
                    let list: Vec<usize> =
                        (0..count).filter(|id| border.includes(ids[*id].0, ids[*id].1)).collect();
                    assert_eq!(list, naive(&ids, wanted), "{wanted} of {total} in {count} of {spread}");
                }
            }
        }
    }

    #[test]
    fn all_is_kept_where_all_is_too_little_and_one_where_nothing_is_wanted() {
        let ids = [(5, 1.0), (9, 2.0), (u32::MAX, 0.5)];
        let kept = |ranks, wanted| {
            let mut border = find(ranks, wanted, &ids);
            ids.map(|(rank, amount)| border.includes(rank, amount))
        };
        assert_eq!(kept(5..=u32::MAX, 99.0), [true; 3]);
        assert_eq!(kept(5..=9, 3.5)[..2], [true; 2]);
        assert_eq!(kept(0..=9, 0.0), [true, false, false]);
        assert_eq!(kept(5..=9, 1.0), [true, false, false]);
    }
}
