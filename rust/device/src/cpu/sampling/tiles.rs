//! The highest score of each tile of ids: where the most likely ids are, without a second pass over all of them.

use std::iter;
use std::ops::Range;

use penstock_kernels::Kernels;

use super::TILE;
use super::radix_select::Cutoff;

/// Scores, and the highest score of each tile (minus infinity if it has no number).
#[derive(Clone, Copy)]
pub(super) struct Tiles<'a> {
    pub scores: &'a [f32],
    highest: &'a [f32],
    best: f32,
}

/// The ids of a tile.
pub(super) fn ids(tile: usize, vocabulary: usize) -> Range<usize> {
    tile * TILE..vocabulary.min((tile + 1) * TILE)
}

/// An integer that is lower for higher scores, the same for equal ones, and the highest for NaN.
pub(super) fn rank(score: f32) -> u32 {
    if score.is_nan() {
        return u32::MAX;
    }
    let bits = (score + 0.0).to_bits(); // zero has one sign
    // The bits of negative numbers, sign included, ascend as the numbers fall; those of the others are inverted.
    if bits >> 31 == 1 { bits } else { !bits & !(1 << 31) }
}

/// The key that orders ids by score; each has mass 1.
pub(super) fn by_score(score: f32, _: f32) -> (u32, f32) {
    (rank(score), 1.0)
}

impl<'a> Tiles<'a> {
    /// `highest` has one element for each tile.
    pub fn new(kernels: Kernels, scores: &'a [f32], highest: &'a mut [f32]) -> Self {
        for (scores, highest) in scores.chunks(TILE).zip(&mut *highest) {
            *highest = kernels.max(scores);
        }
        let best = kernels.max(highest);
        Self { scores, highest, best }
    }

    /// The highest score of all.
    pub fn best(&self) -> f32 {
        self.best
    }

    /// The highest score of each tile.
    pub fn highest(&self) -> &'a [f32] {
        self.highest
    }

    /// A rank that at least `count` ids reach, if there are as many; not many more do if the highest scores are spread
    /// over the tiles. A tile whose highest score has a higher rank has none of the first `count` ids.
    pub fn rank_needed(&self, count: u32) -> u32 {
        let slices = || iter::once((self.highest, self.highest));
        Cutoff::find(rank(self.best)..=u32::MAX, f64::from(count), slices, by_score).rank
    }

    /// The tiles that have an id with a rank up to `last`.
    pub fn up_to(&self, last: u32) -> impl Iterator<Item = usize> + '_ {
        (0..self.highest.len()).filter(move |tile| rank(self.highest[*tile]) <= last)
    }

    /// The cutoff of the `count` highest scores.
    pub fn cutoff(&self, count: u32) -> Cutoff {
        let needed = self.rank_needed(count);
        let scores = |tile| &self.scores[ids(tile, self.scores.len())];
        let slices = || self.up_to(needed).map(scores).map(|scores| (scores, scores));
        Cutoff::find(rank(self.best)..=needed, f64::from(count), slices, by_score)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_fall_with_scores_and_nan_is_last() {
        let falling = [f32::INFINITY, f32::MAX, 1.0, 1e-45, 0.0, -1e-45, -2.0, f32::MIN, f32::NEG_INFINITY];
        assert!(falling.windows(2).all(|pair| rank(pair[0]) < rank(pair[1])));
        assert_eq!(rank(0.0), rank(-0.0));
        assert_eq!([rank(f32::NAN), rank(-f32::NAN)], [u32::MAX; 2]);
    }
}
