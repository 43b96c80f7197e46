//! The ids that may be drawn, with their weights.

use std::ops::RangeInclusive;

use penstock_kernels::Kernels;

use super::border::Border;
use super::spans::{self, Spans};

/// What is left of a row of scores. A span is out when its sum is 0; what its weights are is then unknown and never looked
/// at. In the others an id that is out weighs 0.
pub(super) struct Kept<'a> {
    kernels: Kernels,
    spans: Spans<'a>,
    /// What multiplies the scores.
    factor: f32,
    /// `exp(factor * (score - best))`, so 1 for the best.
    weights: &'a mut [f32],
    /// Sum of the weights of each span.
    sums: &'a mut [f32],
}

impl<'a> Kept<'a> {
    /// The ids of spans that have ids of a rank up to `last`.
    pub fn new(
        kernels: Kernels,
        spans: Spans<'a>,
        last: u32,
        factor: f32,
        weights: &'a mut [f32],
        sums: &'a mut [f32],
    ) -> Self {
        sums.fill(0.0);
        for span in spans.up_to(last) {
            let ids = spans::ids(span, weights.len());
            let (scores, weights) = (&spans.scores[ids.clone()], &mut weights[ids]);
            sums[span] = kernels.exp_weights(scores, spans.best(), factor, weights);
        }
        Self { kernels, spans, factor, weights, sums }
    }

    /// The scores it was made of.
    pub fn spans(&self) -> &Spans<'a> {
        &self.spans
    }

    /// What multiplies the scores.
    pub fn factor(&self) -> f32 {
        self.factor
    }

    /// Log of the weight of an id with this score.
    pub fn log_weight(&self, score: f32) -> f32 {
        (score - self.spans.best()) * self.factor
    }

    /// How many ids there were.
    pub fn vocabulary(&self) -> usize {
        self.weights.len()
    }

    /// The sum of all weights.
    pub fn total(&self) -> f64 {
        self.sums.iter().map(|sum| f64::from(*sum)).sum()
    }

    /// The spans that are not out, each with the sum of its weights.
    pub fn sums(&self) -> impl Iterator<Item = (usize, f64)> + '_ {
        let sums = self.sums.iter().enumerate().filter(|(_, sum)| **sum > 0.0);
        sums.map(|(span, sum)| (span, f64::from(*sum)))
    }

    /// The ids of such a span that may be drawn, each with its weight.
    pub fn ids(&self, span: usize) -> impl Iterator<Item = (usize, f64)> + '_ {
        let ids = spans::ids(span, self.weights.len());
        let weights = self.weights[ids.clone()].iter().map(|weight| f64::from(*weight));
        ids.zip(weights).filter(|(_, weight)| *weight > 0.0)
    }

    /// Scores and weights of the spans that are not out.
    pub fn slices(&self) -> impl Iterator<Item = (&[f32], &[f32])> + '_ {
        let ids = self.sums().map(|(span, _)| spans::ids(span, self.weights.len()));
        ids.map(|ids| (&self.spans.scores[ids.clone()], &self.weights[ids]))
    }

    /// Cuts spans of which no log weight reaches `floor`.
    pub fn cut_spans_below(&mut self, floor: f32) {
        for span in 0..self.sums.len() {
            if self.log_weight(self.spans.highest()[span]) < floor {
                self.sums[span] = 0.0;
            }
        }
    }

    /// Cuts ids that weigh less than `floor`.
    pub fn cut_below(&mut self, floor: f32) {
        for (span, sum) in self.sums.iter_mut().enumerate().filter(|(_, sum)| **sum > 0.0) {
            let weights = &mut self.weights[spans::ids(span, self.spans.scores.len())];
            for weight in &mut *weights {
                *weight = if *weight < floor { 0.0 } else { *weight };
            }
            *sum = self.kernels.sum(weights);
        }
    }

    /// Keeps the ids of the lowest ranks, the lowest ids first among equals, until their amounts add up to `wanted`, and cuts
    /// the others. `place(score, weight)` is an id's rank, none before `ranks`, and amount; it has 0 of what is out. An id
    /// behind `ranks` must not be needed.
    pub fn keep_first(
        &mut self,
        ranks: RangeInclusive<u32>,
        wanted: f64,
        place: impl Fn(f32, f32) -> (u32, f32),
    ) {
        let mut border = Border::find(ranks, wanted, || self.slices(), &place);
        for (span, sum) in self.sums.iter_mut().enumerate().filter(|(_, sum)| **sum > 0.0) {
            let ids = spans::ids(span, self.weights.len());
            let (scores, weights) = (&self.spans.scores[ids.clone()], &mut self.weights[ids]);
            let mut num_at_border = 0_u32;
            for (score, weight) in scores.iter().zip(&mut *weights) {
                let (rank, _) = place(*score, *weight);
                num_at_border += u32::from(rank == border.rank);
                *weight = if rank <= border.rank { *weight } else { 0.0 };
            }
            if num_at_border > 0 {
                for (score, weight) in scores.iter().zip(&mut *weights) {
                    let (rank, amount) = place(*score, *weight);
                    *weight = if border.includes(rank, amount) { *weight } else { 0.0 };
                }
            }
            *sum = self.kernels.sum(weights);
        }
    }
}
