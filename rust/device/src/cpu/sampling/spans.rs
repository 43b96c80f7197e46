//! The highest score of each span of ids: where the most likely are, without looking at all of them again.

use std::iter;
use std::ops::Range;

use penstock_kernels::Kernels;

use super::border::Border;

/// Ids in a span: few enough that a span is looked through quickly, many enough that there are few spans.
pub(super) const SPAN: usize = 128;

/// Scores, and the highest of each span (minus infinity where there is no number).
#[derive(Clone, Copy)]
pub(super) struct Spans<'a> {
    pub scores: &'a [f32],
    highest: &'a [f32],
    best: f32,
}

/// Ids of a span of `scores`.
pub(super) fn ids(span: usize, vocabulary: usize) -> Range<usize> {
    span * SPAN..vocabulary.min((span + 1) * SPAN)
}

/// A number that is less for higher scores, the same for equal ones, and the most for NaN.
pub(super) fn rank(score: f32) -> u32 {
    if score.is_nan() {
        return u32::MAX;
    }
    let bits = (score + 0.0).to_bits(); // zero has one sign
    // The bits of negative numbers ascend as they fall, from the highest bit on; those of the others fall before it.
    if bits >> 31 == 1 { bits } else { !bits & !(1 << 31) }
}

/// The place of an id in the order of scores: each amounts to one.
pub(super) fn by_score(score: f32, _: f32) -> (u32, f32) {
    (rank(score), 1.0)
}

impl<'a> Spans<'a> {
    /// In room for one number of each span.
    pub fn new(kernels: Kernels, scores: &'a [f32], room: &'a mut [f32]) -> Self {
        for (scores, highest) in scores.chunks(SPAN).zip(&mut *room) {
            *highest = kernels.max(scores);
        }
        let best = kernels.max(room);
        Self { scores, highest: room, best }
    }

    /// The highest score of all.
    pub fn best(&self) -> f32 {
        self.best
    }

    /// The highest score of each span.
    pub fn highest(&self) -> &'a [f32] {
        self.highest
    }

    /// A rank that at least `count` ids reach, if there are so many; not many more do where the highest scores are
    /// scattered over the spans. Spans whose highest score ranks behind it have none of the first `count`.
    pub fn rank_needed(&self, count: u32) -> u32 {
        let slices = || iter::once((self.highest, self.highest));
        Border::find(rank(self.best)..=u32::MAX, f64::from(count), slices, by_score).rank
    }

    /// Spans that have ids of a rank up to `last`.
    pub fn up_to(&self, last: u32) -> impl Iterator<Item = usize> + '_ {
        (0..self.highest.len()).filter(move |span| rank(self.highest[*span]) <= last)
    }

    /// Where the `count` highest scores end.
    pub fn border(&self, count: u32) -> Border {
        let needed = self.rank_needed(count);
        let scores = |span| &self.scores[ids(span, self.scores.len())];
        let slices = || self.up_to(needed).map(scores).map(|scores| (scores, scores));
        Border::find(rank(self.best)..=needed, f64::from(count), slices, by_score)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_in_the_order_of_scores_and_nan_is_the_last() {
        let falling = [f32::INFINITY, f32::MAX, 1.0, 1e-45, 0.0, -1e-45, -2.0, f32::MIN, f32::NEG_INFINITY];
        assert!(falling.windows(2).all(|pair| rank(pair[0]) < rank(pair[1])));
        assert_eq!(rank(0.0), rank(-0.0));
        assert_eq!([rank(f32::NAN), rank(-f32::NAN)], [u32::MAX; 2]);
    }
}
