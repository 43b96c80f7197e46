//! From one row of logits to one token, on the CPU: the steps of [`crate::seam::sample`], in its order.
//!
//! A parameter that is not set costs nothing: a greedy row only reads its logits, a sampled one writes its weights
//! once. The vocabulary is never sorted. Ids lie in tiles of 128, and the highest logit of a tile decides whether the
//! tile is read (`tiles.rs`); the end of a filter is found by a radix select (`radix_select.rs`). Every sum has one
//! fixed order. NaN counts as minus infinity unless there are no numbers.

mod candidates;
mod filters;
mod history;
mod logprobs;
mod masks;
mod penalties;
mod philox;
mod radix_select;
mod sample;
mod slots;
mod tiles;

use penstock_kernels::Kernels;
use penstock_types::{LogprobsRequest, Sampling, Token};

use crate::counts::TokenCounts;
use crate::seam::{Sampled, factor, has_penalty, is_greedy};
use candidates::Candidates;
use history::History;
pub use slots::CpuSlots;
pub(super) use slots::sample_batch;
use tiles::Tiles;

/// Ids in a tile: few enough to look through one quickly, many enough to have few tiles.
const TILE: usize = 128;

/// The inputs of the sampling of one position, besides its logits.
#[derive(Clone, Copy, Debug)]
struct Input<'a> {
    sampling: &'a Sampling,
    history: History<'a>,
    /// The counts of `history`, if a penalty is set.
    counts: &'a TokenCounts,
    /// Stop ids that are masked because `min_tokens` is not reached.
    suppressed: &'a [u32],
    mask: Option<&'a [u32]>,
    processed: Option<&'a [f32]>,
    index: u32,
    given: Option<u32>,
    logprobs: Option<LogprobsRequest>,
}

/// The memory that one thread reuses from row to row.
pub(super) struct SamplingWorkspace<'a> {
    /// The logits after bias, penalties and masks.
    row: &'a mut [f32],
    tiles: TileSpace<'a>,
}

/// Memory for weights and for tiles; each use overwrites it.
struct TileSpace<'a> {
    weights: &'a mut [f32],
    highest: &'a mut [f32],
    sums: &'a mut [f32],
}

impl<'a> SamplingWorkspace<'a> {
    /// Number of floats for rows of `vocabulary`.
    pub fn len(vocabulary: usize) -> usize {
        2 * vocabulary.saturating_add(vocabulary.div_ceil(TILE))
    }

    /// Divides [`len`](Self::len) floats.
    pub fn new(floats: &'a mut [f32], vocabulary: usize) -> Self {
        let (row, floats) = floats.split_at_mut(vocabulary);
        let (weights, floats) = floats.split_at_mut(vocabulary);
        let (highest, sums) = floats.split_at_mut(vocabulary.div_ceil(TILE));
        Self { row, tiles: TileSpace { weights, highest, sums } }
    }
}

/// Samples a token from `logits`.
fn sample_row(
    kernels: Kernels,
    logits: &[f32],
    input: &Input<'_>,
    workspace: &mut SamplingWorkspace<'_>,
) -> Sampled {
    let SamplingWorkspace { row, tiles } = workspace;
    let wants_processed = input.logprobs.is_some_and(|logprobs| logprobs.processed);
    let scores =
        if input.given.is_none() || wants_processed { process(kernels, logits, input, row) } else { logits };
    let token = input.given.or_else(|| match distribution(kernels, scores, input.sampling, tiles) {
        Distribution::Certain(token) => token,
        Distribution::Candidates(candidates) => {
            Some(sample::sample(&candidates, philox::uniform(input.sampling.seed, input.index)))
        }
    });
    let Some(token) = token else { return Sampled::NoCandidates };
    let Some(request) = input.logprobs else { return Sampled::Token(Token::new(token, f32::NAN)) };
    let (scores, factor) = if request.processed { (scores, factor(input.sampling)) } else { (logits, 1.0) };
    let mut top = Vec::new();
    let logprob = logprobs::fill(kernels, scores, factor, token, request.top, tiles.highest, &mut top);
    Sampled::with_top(token, logprob, top)
}

/// The distribution that a token is sampled from.
enum Distribution<'a> {
    /// One id has all the probability, or there is no candidate.
    Certain(Option<u32>),
    Candidates(Candidates<'a>),
}

/// Steps 1 to 4: the logits with bias, penalties and masks. Without any of them this is the row itself.
fn process<'a>(kernels: Kernels, logits: &'a [f32], input: &Input<'a>, copy: &'a mut [f32]) -> &'a [f32] {
    let source = input.processed.unwrap_or(logits);
    assert_eq!(source.len(), logits.len(), "processed logits and the vocabulary; this is a bug");
    let Sampling { logit_bias, .. } = input.sampling;
    if logit_bias.is_empty() && !has_penalty(input.sampling) && !masks::is_set(input) {
        return source;
    }
    copy.copy_from_slice(source);
    penalties::add_bias(copy, logit_bias);
    penalties::apply(copy, input.sampling, input.counts);
    masks::apply(kernels, copy, input);
    copy
}

/// Steps 5 and 6: temperature, then the filters, in their order.
fn distribution<'a>(
    kernels: Kernels,
    scores: &'a [f32],
    sampling: &Sampling,
    space: &'a mut TileSpace<'_>,
) -> Distribution<'a> {
    let &Sampling { top_n_sigma, top_k, top_p, min_p, typical_p, epsilon_cutoff, .. } = sampling;
    if is_greedy(sampling) || top_k == 1 {
        return Distribution::Certain(most_likely(kernels, scores));
    }
    let tiles = Tiles::new(kernels, scores, space.highest);
    if !tiles.best().is_finite() {
        return Distribution::Certain(most_likely(kernels, scores)); // infinity has all the probability
    }
    let mut needed = if top_k > 0 { tiles.rank_needed(top_k) } else { u32::MAX };
    let floor = (top_n_sigma > 0.0).then(|| filters::sigma_floor(scores, tiles.best(), top_n_sigma));
    needed = floor.map_or(needed, |floor| needed.min(tiles::rank(floor)));
    let mut candidates = Candidates::new(kernels, tiles, needed, factor(sampling), space.weights, space.sums);
    if let Some(floor) = floor {
        candidates.cut_scores_below(floor);
    }
    if top_k > 0 {
        filters::top_k(&mut candidates, top_k, needed);
    }
    if top_p < 1.0 {
        filters::top_p(&mut candidates, top_p);
    }
    if min_p > 0.0 {
        filters::min_p(&mut candidates, min_p);
    }
    if typical_p < 1.0 {
        filters::typical_p(&mut candidates, typical_p);
    }
    if epsilon_cutoff > 0.0 {
        filters::epsilon_cutoff(&mut candidates, epsilon_cutoff);
    }
    Distribution::Candidates(candidates)
}

/// The lowest id of the highest score; of NaN if there are no numbers; none if every score is minus infinity.
fn most_likely(kernels: Kernels, scores: &[f32]) -> Option<u32> {
    let best = kernels.argmax(scores);
    let found = if scores[best] > f32::NEG_INFINITY {
        Some(best)
    } else {
        scores.iter().position(|score| score.is_nan())
    };
    found.map(|id| id as u32)
}

/// The probability of each id, 0 for masked and filtered ids.
#[cfg(any(test, feature = "testing"))]
fn probabilities(logits: &[f32], input: &Input<'_>) -> Vec<f32> {
    let kernels = Kernels::best();
    let mut floats = vec![f32::NAN; SamplingWorkspace::len(logits.len())];
    let SamplingWorkspace { row, mut tiles } = SamplingWorkspace::new(&mut floats, logits.len());
    let scores = process(kernels, logits, input, row);
    let mut probabilities = vec![0.0; logits.len()];
    match distribution(kernels, scores, input.sampling, &mut tiles) {
        Distribution::Certain(token) => token.into_iter().for_each(|id| probabilities[id as usize] = 1.0),
        Distribution::Candidates(candidates) => {
            let total = candidates.total();
            for (id, weight) in candidates.sums().flat_map(|(tile, _)| candidates.ids(tile)) {
                probabilities[id] = (weight / total) as f32;
            }
        }
    }
    probabilities
}

/// The probabilities from which the next token of a slot with `params` is sampled, 0 for masked and filtered ids, as
/// [`crate::Sample::sample`] computes them on this backend. Needs no device. For tests.
#[cfg(feature = "testing")]
pub fn probabilities_for_testing(
    logits: &[f32],
    params: &crate::SlotParams<'_>,
    mask: Option<&[u32]>,
    processed: Option<&[f32]>,
) -> Vec<f32> {
    let slot = slots::CpuSlot::new(params);
    let index = params.generated.len() as u32;
    probabilities(logits, &Input { mask, processed, ..slot.input(index) })
}

#[cfg(test)]
mod tests;
