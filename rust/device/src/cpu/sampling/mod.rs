//! From one row of logits to one token, on the host: the order of [`crate::sample`], processor by processor.
//!
//! A processor that nobody asked for costs nothing: a greedy row only reads its logits, a drawn one writes its weights once.
//! The vocabulary is never sorted. Ids lie in spans of some hundred, and the highest logit of each says where not to look
//! (`spans.rs`); what a cut keeps is found by counting leading digits (`border.rs`). Every sum has one fixed order. A logit
//! that is NaN counts as minus infinity wherever there is a number.

mod bans;
mod border;
mod cuts;
mod draw;
mod kept;
mod logprobs;
mod penalties;
mod philox;
mod spans;

use penstock_kernels::Kernels;

use crate::sample::{SampleParams, Sampled};
use kept::Kept;
use spans::{SPAN, Spans};

/// Temperatures below this are greedy: dividing by them would only overflow.
const GREEDY_BELOW: f32 = 1e-5;

/// Memory that one worker reuses from row to row.
pub(super) struct Scratch<'a> {
    /// The logits as processors change them.
    row: &'a mut [f32],
    room: Room<'a>,
}

/// For what is found out about logits, each overwritten by the next use.
struct Room<'a> {
    weights: &'a mut [f32],
    /// For each span.
    highest: &'a mut [f32],
    sums: &'a mut [f32],
}

impl<'a> Scratch<'a> {
    /// Floats of it for rows of `vocabulary`.
    pub fn len(vocabulary: usize) -> usize {
        2 * vocabulary.saturating_add(vocabulary.div_ceil(SPAN))
    }

    /// In [`len`](Self::len) floats.
    pub fn new(floats: &'a mut [f32], vocabulary: usize) -> Self {
        let (row, floats) = floats.split_at_mut(vocabulary);
        let (weights, floats) = floats.split_at_mut(vocabulary);
        let (highest, sums) = floats.split_at_mut(vocabulary.div_ceil(SPAN));
        Self { row, room: Room { weights, highest, sums } }
    }
}

/// Chooses a token from `logits` as `params` asks. What `out` held before does not matter but for its memory.
pub(super) fn sample_row(
    kernels: Kernels,
    logits: &[f32],
    params: &SampleParams<'_>,
    scratch: &mut Scratch<'_>,
    out: &mut Sampled,
) {
    let Scratch { row, room } = scratch;
    let wants_processed = params.logprobs.is_some_and(|logprobs| logprobs.processed);
    let scores = if params.given.is_none() || wants_processed {
        process(kernels, logits, params, row)
    } else {
        logits
    };
    let token = params.given.or_else(|| match distribution(kernels, scores, params, room) {
        Distribution::Certain(token) => token,
        Distribution::Kept(kept) => Some(draw::draw(&kept, philox::uniform(params.seed, params.index))),
    });
    out.token = token.unwrap_or_default();
    out.is_exhausted = token.is_none();
    out.logprob = f32::NAN;
    out.top.clear();
    if let (Some(token), Some(wanted)) = (token, params.logprobs) {
        let (scores, factor) = if wanted.processed { (scores, factor(params)) } else { (logits, 1.0) };
        out.logprob = logprobs::fill(kernels, scores, factor, token, wanted.top, room.highest, &mut out.top);
    }
}

/// What is drawn from.
enum Distribution<'a> {
    /// This one; or nothing is left to choose from.
    Certain(Option<u32>),
    /// One of these.
    Kept(Kept<'a>),
}

/// Steps 1 to 4: the logits with bias, penalties and bans. They are the row itself where none is asked for.
fn process<'a>(
    kernels: Kernels,
    logits: &'a [f32],
    params: &SampleParams<'a>,
    copy: &'a mut [f32],
) -> &'a [f32] {
    let source = params.processed.unwrap_or(logits);
    assert_eq!(source.len(), logits.len(), "processed logits and the vocabulary; this is a bug");
    if params.logit_bias.is_empty() && !penalties::asked(params) && !bans::asked(params) {
        return source;
    }
    copy.copy_from_slice(source);
    penalties::add_bias(copy, params.logit_bias);
    penalties::penalise(copy, params);
    bans::ban(kernels, copy, params);
    copy
}

/// Steps 5 and 6: temperature, then the cuts, each of what the one before left.
fn distribution<'a>(
    kernels: Kernels,
    scores: &'a [f32],
    params: &SampleParams<'_>,
    room: &'a mut Room<'_>,
) -> Distribution<'a> {
    if is_greedy(params) || params.top_k == 1 {
        return Distribution::Certain(most_likely(kernels, scores));
    }
    let spans = Spans::new(kernels, scores, room.highest);
    if !spans.best().is_finite() {
        return Distribution::Certain(most_likely(kernels, scores)); // an infinity, if any, has all the probability
    }
    let needed = if params.top_k > 0 { spans.rank_needed(params.top_k) } else { u32::MAX };
    let mut kept = Kept::new(kernels, spans, needed, factor(params), room.weights, room.sums);
    if params.top_k > 0 {
        cuts::top_k(&mut kept, params.top_k, needed);
    }
    if params.top_p < 1.0 {
        cuts::top_p(&mut kept, params.top_p);
    }
    if params.min_p > 0.0 {
        cuts::min_p(&mut kept, params.min_p);
    }
    if params.typical_p < 1.0 {
        cuts::typical_p(&mut kept, params.typical_p);
    }
    Distribution::Kept(kept)
}

fn is_greedy(params: &SampleParams<'_>) -> bool {
    params.temperature < GREEDY_BELOW
}

/// What multiplies the logits.
fn factor(params: &SampleParams<'_>) -> f32 {
    if is_greedy(params) { 1.0 } else { 1.0 / params.temperature }
}

/// The lowest id of the highest score; of NaN where there is no number; none where everything is minus infinity.
fn most_likely(kernels: Kernels, scores: &[f32]) -> Option<u32> {
    let best = kernels.argmax(scores);
    let found = if scores[best] > f32::NEG_INFINITY {
        Some(best)
    } else {
        scores.iter().position(|score| score.is_nan())
    };
    found.map(|id| id as u32)
}

/// The probabilities that a token would be drawn with from `logits`, 0 for ids that were cut: the way of
/// [`crate::Backend::sample`] on this backend as far as the draw, which needs no device. For tests.
pub fn probabilities_for_testing(logits: &[f32], params: &SampleParams<'_>) -> Vec<f32> {
    let kernels = Kernels::best();
    let mut floats = vec![f32::NAN; Scratch::len(logits.len())];
    let Scratch { row, mut room } = Scratch::new(&mut floats, logits.len());
    let scores = process(kernels, logits, params, row);
    let mut probabilities = vec![0.0; logits.len()];
    match distribution(kernels, scores, params, &mut room) {
        Distribution::Certain(token) => token.into_iter().for_each(|id| probabilities[id as usize] = 1.0),
        Distribution::Kept(kept) => {
            let total = kept.total();
            for (id, weight) in kept.sums().flat_map(|(span, _)| kept.ids(span)) {
                probabilities[id] = (weight / total) as f32;
            }
        }
    }
    probabilities
}

#[cfg(test)]
mod tests;
