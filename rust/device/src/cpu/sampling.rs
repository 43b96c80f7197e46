//! From one row of logits to one token, on the host.
//!
//! The order of application: suppressed ids, temperature, `top_k`, `top_p`, `min_p`, draw. The draw is the inverse of the
//! cumulative distribution, over the kept ids in ascending order, at a uniform number that depends on (seed, index) alone
//! (Philox). Every sum has one fixed order, so a row's token never depends on the rows beside it.

use penstock_kernels::Kernels;

use super::candidates::{Candidate, Candidates};
use super::philox::uniform;
use crate::backend::{SampleParams, Sampled};

/// Temperatures below this are greedy: dividing by them would only overflow.
const GREEDY_BELOW: f32 = 1e-5;

/// Memory that one worker reuses from row to row, as large as the vocabulary.
pub(super) struct Scratch<'a> {
    weights: &'a mut [f32],
    candidates: Candidates<'a>,
}

impl<'a> Scratch<'a> {
    /// Of two slices as long as a row of logits.
    pub fn new(weights: &'a mut [f32], candidates: &'a mut [Candidate]) -> Self {
        Self { weights, candidates: Candidates::new(candidates) }
    }
}

/// Chooses a token from `logits` as `params` asks.
pub(super) fn sample_row(
    kernels: Kernels,
    logits: &[f32],
    params: &SampleParams<'_>,
    scratch: &mut Scratch<'_>,
) -> Sampled {
    let token = if params.temperature < GREEDY_BELOW || params.top_k == 1 {
        choose_greedy(kernels, logits, params, scratch.weights)
    } else {
        draw(kernels, logits, params, scratch)
    };
    let logprob =
        if params.logprob { logits[token as usize] - kernels.log_sum_exp(logits) } else { f32::NAN };
    Sampled { token, logprob }
}

fn choose_greedy(kernels: Kernels, logits: &[f32], params: &SampleParams<'_>, copy: &mut [f32]) -> u32 {
    let best = kernels.argmax(logits) as u32;
    if !params.suppressed.contains(&best) {
        return best;
    }
    fill_allowed(logits, params, copy);
    kernels.argmax(copy) as u32
}

/// `copy` = logits with minus infinity for the suppressed ids.
fn fill_allowed(logits: &[f32], params: &SampleParams<'_>, copy: &mut [f32]) {
    copy.copy_from_slice(logits);
    for id in params.suppressed {
        if let Some(logit) = copy.get_mut(*id as usize) {
            *logit = f32::NEG_INFINITY;
        }
    }
}

fn draw(kernels: Kernels, logits: &[f32], params: &SampleParams<'_>, scratch: &mut Scratch<'_>) -> u32 {
    let Scratch { weights, candidates } = scratch;
    fill_allowed(logits, params, weights);
    let best = kernels.argmax(weights);
    if !weights[best].is_finite() {
        return best as u32; // every logit is NaN or infinite: nothing to draw from
    }
    kernels.scale(weights, 1.0 / params.temperature);
    kernels.softmax(weights);
    let uniform = uniform(params.seed, params.index);
    if params.top_k == 0 && params.top_p >= 1.0 && params.min_p <= 0.0 {
        return draw_from_all(weights, uniform).unwrap_or(best as u32);
    }
    let floor = (params.min_p * weights[best]).max(f32::MIN_POSITIVE);
    if params.top_k > 0 {
        keep_most_likely(weights, params.top_k as usize, candidates);
    } else {
        candidates.clear();
    }
    if params.top_p < 1.0 {
        keep_nucleus(weights, params.top_p, candidates);
    } else if params.top_k == 0 {
        candidates.extend(positive(weights).filter(|candidate| candidate.weight >= floor));
    }
    candidates.retain(|candidate| candidate.weight >= floor);
    candidates.sort_unstable_by_key(|candidate| candidate.id);
    draw_from(candidates, uniform).unwrap_or(best as u32)
}

/// More likely first; the lower id among equals.
fn by_likelihood(a: &Candidate, b: &Candidate) -> std::cmp::Ordering {
    b.weight.total_cmp(&a.weight).then(a.id.cmp(&b.id))
}

/// Fills `candidates` with the `count` most likely ids, in no order.
fn keep_most_likely(weights: &[f32], count: usize, candidates: &mut Candidates<'_>) {
    candidates.clear();
    candidates.extend(positive(weights));
    if count < candidates.len() {
        candidates.select_nth_unstable_by(count, by_likelihood);
        candidates.truncate(count);
    }
}

/// Cuts to the smallest set of most likely ids that holds the share `top_p` of the weight: of `candidates`, or of all ids
/// where that is empty.
fn keep_nucleus(weights: &[f32], top_p: f32, candidates: &mut Candidates<'_>) {
    if candidates.is_empty() {
        // Sorting the whole vocabulary is what costs, so look only as far down as the share needs: floors fall by powers.
        let wanted =
            f64::from(top_p) * positive(weights).map(|candidate| f64::from(candidate.weight)).sum::<f64>();
        let mut floor = 1e-3_f32;
        loop {
            candidates.clear();
            candidates.extend(positive(weights).filter(|candidate| candidate.weight >= floor));
            let held: f64 = candidates.iter().map(|candidate| f64::from(candidate.weight)).sum();
            if held >= wanted || floor == 0.0 {
                return cut_at(candidates, wanted);
            }
            floor = if floor > 1e-8 { floor * 1e-2 } else { 0.0 };
        }
    }
    candidates.sort_unstable_by(by_likelihood);
    let wanted =
        f64::from(top_p) * candidates.iter().map(|candidate| f64::from(candidate.weight)).sum::<f64>();
    cut_at(candidates, wanted);
}

/// Sorts by likelihood and drops what follows the id at which the running sum reaches `wanted`.
fn cut_at(candidates: &mut Candidates<'_>, wanted: f64) {
    candidates.sort_unstable_by(by_likelihood);
    let mut sum = 0.0;
    let reached = |candidate: &Candidate| {
        sum += f64::from(candidate.weight);
        sum >= wanted
    };
    if let Some(last) = candidates.iter().position(reached) {
        candidates.truncate(last + 1);
    }
}

/// The ids with a weight above zero, in order.
fn positive(weights: &[f32]) -> impl Iterator<Item = Candidate> + '_ {
    let candidate = |(id, weight): (usize, &f32)| Candidate { id: id as u32, weight: *weight };
    weights.iter().enumerate().filter(|(_, weight)| **weight > 0.0).map(candidate)
}

/// The id at which the running sum of weights passes `uniform` times their total.
fn draw_from(candidates: &[Candidate], uniform: f64) -> Option<u32> {
    let total: f64 = candidates.iter().map(|candidate| f64::from(candidate.weight)).sum();
    let mut left = uniform * total;
    for candidate in candidates {
        left -= f64::from(candidate.weight);
        if left < 0.0 {
            return Some(candidate.id);
        }
    }
    candidates.last().map(|candidate| candidate.id)
}

/// The same over the whole vocabulary: sums of groups first, so that only one group is walked id by id.
fn draw_from_all(weights: &[f32], uniform: f64) -> Option<u32> {
    const GROUP: usize = 1024;
    let sum = |group: &[f32]| -> f64 {
        // Eight interleaved sums, then those in order: fixed, and quick.
        let mut lanes = [0.0_f32; 8];
        let (eights, rest) = group.as_chunks::<8>();
        for eight in eights {
            for (lane, weight) in lanes.iter_mut().zip(eight) {
                *lane += if weight.is_nan() { 0.0 } else { *weight };
            }
        }
        lanes
            .iter()
            .chain(rest.iter().filter(|weight| !weight.is_nan()))
            .map(|weight| f64::from(*weight))
            .sum()
    };
    let total: f64 = weights.chunks(GROUP).map(sum).sum();
    let mut left = uniform * total;
    let mut last = None;
    for (index, group) in weights.chunks(GROUP).enumerate() {
        let held = sum(group);
        if held > 0.0 {
            last = Some((index, group));
            if left < held {
                break;
            }
            left -= held;
        }
    }
    let (index, group) = last?;
    let mut chosen = None;
    for candidate in positive(group) {
        chosen = Some((index * GROUP) as u32 + candidate.id);
        left -= f64::from(candidate.weight);
        if left < 0.0 {
            break;
        }
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARAMS: SampleParams<'static> = SampleParams {
        temperature: 1.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        seed: 7,
        index: 0,
        logprob: true,
        suppressed: &[],
    };

    fn sample(logits: &[f32], params: &SampleParams<'_>) -> Sampled {
        let (mut weights, mut room) =
            (vec![f32::NAN; logits.len()], vec![Candidate { id: 0, weight: f32::NAN }; logits.len()]);
        sample_row(Kernels::best(), logits, params, &mut Scratch::new(&mut weights, &mut room))
    }

    /// Probabilities after temperature, top_k, top_p and min_p, by sorting everything: the slow twin.
    fn naive(logits: &[f32], params: &SampleParams<'_>) -> Vec<f64> {
        let mut ids: Vec<usize> =
            (0..logits.len()).filter(|id| !params.suppressed.contains(&(*id as u32))).collect();
        let weight = |id: usize| (f64::from(logits[id]) / f64::from(params.temperature)).exp();
        ids.sort_by(|a, b| weight(*b).total_cmp(&weight(*a)).then(a.cmp(b)));
        if params.top_k > 0 {
            ids.truncate(params.top_k as usize);
        }
        let total: f64 = ids.iter().map(|id| weight(*id)).sum();
        let mut sum = 0.0;
        let mut kept = Vec::new();
        for id in ids {
            kept.push(id);
            sum += weight(id);
            if sum >= f64::from(params.top_p) * total {
                break;
            }
        }
        let highest = weight(kept[0]);
        kept.retain(|id| weight(*id) >= f64::from(params.min_p) * highest);
        let total: f64 = kept.iter().map(|id| weight(*id)).sum();
        let mut probabilities = vec![0.0; logits.len()];
        for id in kept {
            probabilities[id] = weight(id) / total;
        }
        probabilities
    }

    /// Frequencies of 20,000 draws against the naive probabilities, by the chi-square statistic.
    fn check_distribution(params: SampleParams<'_>) {
        let logits: Vec<f32> = (0..40).map(|id| ((id * 37 % 40) as f32 * 0.37).sin() * 3.0).collect();
        let expected = naive(&logits, &params);
        let draws = 20_000;
        let mut counts = vec![0_u32; logits.len()];
        for index in 0..draws {
            counts[sample(&logits, &SampleParams { index, ..params }).token as usize] += 1;
        }
        let mut statistic = 0.0;
        let mut cells = 0;
        for (count, probability) in counts.iter().zip(&expected) {
            let wanted = probability * f64::from(draws);
            if *probability == 0.0 {
                assert_eq!(*count, 0, "an id that was cut off was drawn");
            } else if wanted >= 5.0 {
                statistic += (f64::from(*count) - wanted).powi(2) / wanted;
                cells += 1;
            }
        }
        // The statistic's mean is cells - 1 and its deviation sqrt(2 (cells - 1)); five deviations never happen by chance.
        let freedom = f64::from(cells - 1);
        assert!(
            statistic <= freedom + 5.0 * (2.0 * freedom).sqrt() + 1e-9,
            "chi-square {statistic} of {freedom}"
        );
    }

    #[test]
    fn draws_follow_the_distribution_for_every_combination_of_cuts() {
        for top_k in [0, 1, 5, 39] {
            for top_p in [1.0, 0.9, 0.3] {
                for min_p in [0.0, 0.2] {
                    check_distribution(SampleParams { temperature: 0.8, top_k, top_p, min_p, ..PARAMS });
                }
            }
        }
        check_distribution(SampleParams { suppressed: &[0, 3, 17], ..PARAMS });
    }

    #[test]
    fn greedy_takes_the_lowest_id_among_equals_and_skips_suppressed_ones() {
        let logits = [1.0, 3.0, 3.0, f32::NAN, 2.0];
        let greedy = SampleParams { temperature: 0.0, ..PARAMS };
        assert_eq!(sample(&logits, &greedy).token, 1);
        assert_eq!(sample(&logits, &SampleParams { suppressed: &[1, 2], ..greedy }).token, 4);
    }

    #[test]
    fn the_log_probability_is_that_of_the_raw_logits() {
        let logits = [0.0_f32, 1.0, 2.0];
        let params = SampleParams { temperature: 0.0, suppressed: &[2], ..PARAMS };
        let expected = 1.0 - (1.0_f64 + 1_f64.exp() + 2_f64.exp()).ln();
        assert!((f64::from(sample(&logits, &params).logprob) - expected).abs() < 1e-6);
        assert!(sample(&logits, &SampleParams { logprob: false, ..params }).logprob.is_nan());
    }

    #[test]
    fn the_same_seed_and_index_give_the_same_token_and_others_differ() {
        let logits: Vec<f32> = vec![0.0; 5000];
        let draw = |seed, index| sample(&logits, &SampleParams { seed, index, ..PARAMS }).token;
        assert_eq!(draw(1, 1), draw(1, 1));
        let tokens: std::collections::HashSet<u32> = (0..100).map(|index| draw(1, index)).collect();
        assert!(tokens.len() > 90, "{} distinct tokens of 100", tokens.len());
        assert_ne!(
            (0..8).map(|i| draw(1, i)).collect::<Vec<_>>(),
            (0..8).map(|i| draw(2, i)).collect::<Vec<_>>()
        );
    }

    #[test]
    fn rows_of_infinities_and_nan_still_give_a_token() {
        for logits in [[f32::NEG_INFINITY; 4], [f32::NAN; 4], [f32::INFINITY; 4]] {
            for temperature in [0.0, 1.0] {
                for top_p in [1.0, 0.5] {
                    assert!(sample(&logits, &SampleParams { temperature, top_p, ..PARAMS }).token < 4);
                }
            }
        }
        let logits = [f32::NAN, 0.0, f32::NEG_INFINITY, f32::NAN];
        assert_eq!(sample(&logits, &PARAMS).token, 1);
    }
}
