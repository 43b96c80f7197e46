//! Log probabilities under the softmax of a row of scores.

use penstock_kernels::Kernels;

use super::spans::{self, Spans, rank};

/// Fills `out` with the `top` most likely ids of the softmax of `factor * scores` and returns the log probability of `token`:
/// both are the same function of scores, factor and id. `room` has a place for each span. NaN in a row with an infinity,
/// which has no softmax.
pub(super) fn fill(
    kernels: Kernels,
    scores: &[f32],
    factor: f32,
    token: u32,
    top: u32,
    room: &mut [f32],
    out: &mut Vec<(u32, f32)>,
) -> f32 {
    let spans = (top > 0).then(|| Spans::new(kernels, scores, room));
    let best = spans.map_or_else(|| kernels.max(scores), |spans| spans.best());
    let log_sum = kernels.sum_of_exp(scores, best, factor).ln();
    let logprob = |score: f32| (f64::from((score - best) * factor) - log_sum) as f32;
    if let Some(spans) = spans {
        collect_highest(&spans, top, out);
        out.iter_mut().for_each(|(_, score)| *score = logprob(*score));
    }
    logprob(scores[token as usize])
}

/// The ids of the `count` highest scores with those, the highest first, the lowest id first among equals.
fn collect_highest(spans: &Spans<'_>, count: u32, out: &mut Vec<(u32, f32)>) {
    let mut border = spans.border(count);
    for span in spans.up_to(border.rank) {
        for id in spans::ids(span, spans.scores.len()) {
            let score = spans.scores[id];
            if score > f32::NEG_INFINITY && border.includes(rank(score), 1.0) {
                out.push((id as u32, score));
            }
        }
    }
    out.sort_unstable_by_key(|(id, score)| (rank(*score), *id));
}
