//! Log probabilities under the softmax of a row of scores.

use penstock_kernels::Kernels;

use super::tiles::{self, Tiles, rank};

/// Fills `out` with the `top` most likely ids of the softmax of `factor * scores` and returns the log probability of
/// `token`; all are the same function of scores, factor and id. `highest` has one element for each tile. NaN in a row
/// with an infinity, which has no softmax.
pub(super) fn fill(
    kernels: Kernels,
    scores: &[f32],
    factor: f32,
    token: u32,
    top: u32,
    highest: &mut [f32],
    out: &mut Vec<(u32, f32)>,
) -> f32 {
    let tiles = (top > 0).then(|| Tiles::new(kernels, scores, highest));
    let best = tiles.map_or_else(|| kernels.max(scores), |tiles| tiles.best());
    let log_sum = kernels.sum_of_exp(scores, best, factor).ln();
    let logprob = |score: f32| (f64::from((score - best) * factor) - log_sum) as f32;
    if let Some(tiles) = tiles {
        collect_highest(&tiles, top, out);
        out.iter_mut().for_each(|(_, score)| *score = logprob(*score));
    }
    logprob(scores[token as usize])
}

/// Appends the ids of the `count` highest scores with those, the highest first, the lowest id first among equals.
fn collect_highest(tiles: &Tiles<'_>, count: u32, out: &mut Vec<(u32, f32)>) {
    let mut cutoff = tiles.cutoff(count);
    for tile in tiles.up_to(cutoff.rank) {
        for id in tiles::ids(tile, tiles.scores.len()) {
            let score = tiles.scores[id];
            if score > f32::NEG_INFINITY && cutoff.includes(rank(score), 1.0) {
                out.push((id as u32, score));
            }
        }
    }
    out.sort_unstable_by_key(|(id, score)| (rank(*score), *id));
}
