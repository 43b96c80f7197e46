//! `top_k`, `top_p`, `min_p` and `typical_p`, on what is left by the one before.
//!
//! Those that keep a share of the probability first say how light an id can be and still be needed: ids lighter than the
//! share that is not wanted, divided by the vocabulary, hold less than that share together. In a text's usual rows that
//! leaves some thousands to look at; half of it is taken, because sums are rounded.

use super::kept::Kept;
use super::spans;

/// Keeps exactly `count` of the highest scores (all, if there are fewer), none of which ranks behind `needed`.
pub(super) fn top_k(kept: &mut Kept<'_>, count: u32, needed: u32) {
    let first = spans::rank(kept.spans().best());
    kept.keep_first(first..=needed, f64::from(count), spans::by_score);
}

/// Keeps the fewest of the heaviest that hold `share` of the weight.
pub(super) fn top_p(kept: &mut Kept<'_>, share: f32) {
    let total = kept.total();
    let floor = lightest_needed(kept, share, total);
    kept.cut_spans_below(floor.ln() as f32);
    let rank = |weight: f32| !weight.to_bits(); // weights are positive, so their bits ascend with them
    kept.keep_first(rank(1.0)..=rank(floor as f32), f64::from(share) * total, |_, weight| {
        (rank(weight), weight)
    });
}

/// Keeps those that weigh at least `share` of the heaviest, whose weight is 1: no cut before this takes it.
pub(super) fn min_p(kept: &mut Kept<'_>, share: f32) {
    kept.cut_spans_below(share.ln() - SLACK);
    kept.cut_below(share);
}

/// Logarithms and exponentials of single precision are not each other's inverse: what could be kept is farther than this
/// from what certainly cannot.
const SLACK: f32 = 1e-3;

/// Keeps the fewest that hold `share` of the weight, those first whose log weight is nearest to its mean. That is how far
/// their surprise is from the entropy: both are log weights, negated and moved by the same.
pub(super) fn typical_p(kept: &mut Kept<'_>, share: f32) {
    let total = kept.total();
    let mean = sum_log_weights(kept) / total;
    let (log_total, log_floor) = (total.ln(), lightest_needed(kept, share, total).ln());
    // An id of twice the entropy or more is farther from it than all that are likelier, and may be left aside if the
    // likelier suffice.
    let entropy = log_total - mean;
    let farthest = (mean - log_floor).max(entropy) as f32 + SLACK;
    let mean = mean as f32;
    kept.cut_spans_below(mean - farthest);
    let (best, factor) = (kept.spans().best(), kept.factor());
    let distance = move |score: f32| ((score - best) * factor - mean).abs();
    kept.keep_first(0..=farthest.to_bits(), f64::from(share) * total, |score, weight| {
        (distance(score).to_bits(), weight)
    });
}

/// A weight such that ids lighter than it are not needed for `share` of `total`.
fn lightest_needed(kept: &Kept<'_>, share: f32, total: f64) -> f64 {
    (1.0 - f64::from(share)) * total / kept.vocabulary() as f64 / 2.0
}

/// The sum of weight times log weight.
fn sum_log_weights(kept: &Kept<'_>) -> f64 {
    let sum = |(scores, weights): (&[f32], &[f32])| {
        let product = |(score, weight): (&f32, &f32)| {
            if *weight > 0.0 { weight * kept.log_weight(*score) } else { 0.0 }
        };
        // Eight interleaved sums, then those in order: fixed, and quick.
        let mut lanes = [0.0_f32; 8];
        let ((scores, last_scores), (weights, last_weights)) =
            (scores.as_chunks::<8>(), weights.as_chunks::<8>());
        for (scores, weights) in scores.iter().zip(weights) {
            for (lane, pair) in lanes.iter_mut().zip(scores.iter().zip(weights)) {
                *lane += product(pair);
            }
        }
        let rest = last_scores.iter().zip(last_weights).map(product);
        lanes.into_iter().chain(rest).map(f64::from).sum::<f64>()
    };
    kept.slices().map(sum).sum()
}
