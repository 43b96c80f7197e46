//! The filters, each applied to the candidates that the one before left.
//!
//! Those that keep a share of the probability first compute a weight below which no id is needed: ids lighter than the
//! share that is cut, divided by the vocabulary size, hold less than that share together. In a typical text this leaves
//! a few thousand ids to look at. Half of that weight is used, because sums are rounded.

use super::candidates::Candidates;
use super::tiles;

/// The lowest score that `top_n_sigma` keeps: `count` standard deviations below the best. Scores of minus infinity and
/// NaN do not count.
pub(super) fn sigma_floor(scores: &[f32], best: f32, count: f32) -> f32 {
    /// Eight interleaved sums, added in a fixed order: of the numbers, of the distances to the best, of their squares.
    #[derive(Default)]
    struct Lanes {
        counts: [f64; 8],
        sums: [f64; 8],
        squares: [f64; 8],
    }
    let best = f64::from(best);
    let mut lanes = Lanes::default();
    for scores in scores.chunks(8) {
        for (lane, score) in scores.iter().enumerate() {
            let is_number = *score > f32::NEG_INFINITY;
            let distance = if is_number { best - f64::from(*score) } else { 0.0 };
            lanes.counts[lane] += f64::from(u8::from(is_number));
            lanes.sums[lane] += distance;
            lanes.squares[lane] += distance * distance;
        }
    }
    let sum = |lanes: [f64; 8]| lanes.into_iter().sum::<f64>();
    let num_scores = sum(lanes.counts);
    let mean = sum(lanes.sums) / num_scores;
    let variance = sum(lanes.squares) / num_scores - mean * mean;
    (best - f64::from(count) * variance.max(0.0).sqrt()) as f32
}

/// Keeps exactly `count` of the highest scores (all, if there are fewer); none of them has a rank above `needed`.
pub(super) fn top_k(candidates: &mut Candidates<'_>, count: u32, needed: u32) {
    let first = tiles::rank(candidates.tiles().best());
    candidates.keep_lowest_ranks(first..=needed, f64::from(count), tiles::by_score);
}

/// Keeps the fewest of the heaviest that hold `share` of the weight.
pub(super) fn top_p(candidates: &mut Candidates<'_>, share: f32) {
    let total = candidates.total();
    let floor = lightest_needed(candidates, share, total);
    candidates.cut_tiles_below(floor.ln() as f32);
    let rank = |weight: f32| !weight.to_bits(); // weights are positive, so their bits ascend with them
    candidates.keep_lowest_ranks(rank(1.0)..=rank(floor as f32), f64::from(share) * total, |_, weight| {
        (rank(weight), weight)
    });
}

/// Keeps the candidates with a weight of at least `share`. The largest weight is 1; no earlier filter removes it.
pub(super) fn min_p(candidates: &mut Candidates<'_>, share: f32) {
    candidates.cut_tiles_below(share.ln() - SLACK);
    candidates.cut_below(share);
}

/// Single-precision logarithms and exponentials are not exact inverses: a bound on the difference.
const SLACK: f32 = 1e-3;

/// Keeps the fewest that hold `share` of the weight, in the order of the distance between their log weight and its
/// mean. This is the distance between surprise and entropy, because both are negated log weights plus the same
/// constant.
pub(super) fn typical_p(candidates: &mut Candidates<'_>, share: f32) {
    let total = candidates.total();
    let mean = sum_log_weights(candidates) / total;
    let (log_total, log_floor) = (total.ln(), lightest_needed(candidates, share, total).ln());
    // An id with a surprise of twice the entropy or more is farther from it than every likelier id, so it is not needed
    // if the likelier ones suffice.
    let entropy = log_total - mean;
    let farthest = (mean - log_floor).max(entropy) as f32 + SLACK;
    let mean = mean as f32;
    candidates.cut_tiles_below(mean - farthest);
    let (best, factor) = (candidates.tiles().best(), candidates.factor());
    let distance = move |score: f32| ((score - best) * factor - mean).abs();
    candidates.keep_lowest_ranks(0..=farthest.to_bits(), f64::from(share) * total, |score, weight| {
        (distance(score).to_bits(), weight)
    });
}

/// Keeps the candidates that have `share` of the weight each, or else the heaviest. That is not always the best id: an
/// earlier filter can have removed it.
pub(super) fn epsilon_cutoff(candidates: &mut Candidates<'_>, share: f32) {
    let floor = (f64::from(share) * candidates.total()) as f32;
    let floor = floor.min(candidates.heaviest());
    candidates.cut_tiles_below(floor.ln() - SLACK);
    candidates.cut_below(floor);
}

/// A weight such that no lighter id is needed for `share` of `total`.
fn lightest_needed(candidates: &Candidates<'_>, share: f32, total: f64) -> f64 {
    (1.0 - f64::from(share)) * total / candidates.vocabulary() as f64 / 2.0
}

/// The sum of weight times log weight.
fn sum_log_weights(candidates: &Candidates<'_>) -> f64 {
    let sum = |(scores, weights): (&[f32], &[f32])| {
        let product = |(score, weight): (&f32, &f32)| {
            if *weight > 0.0 { weight * candidates.log_weight(*score) } else { 0.0 }
        };
        // Eight interleaved sums, added in a fixed order.
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
    candidates.slices().map(sum).sum()
}
