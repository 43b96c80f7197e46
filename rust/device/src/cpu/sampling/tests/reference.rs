//! The reference implementation: every step of [`crate::seam::sample`] in a few lines, by sorting, in double precision,
//! over all ids.

use super::{History, Input, Sampling};
use penstock_types::PenaltyScope;

/// Whether a mask excludes `id`.
fn is_masked(id: u32, input: &Input<'_>) -> bool {
    let Sampling { no_repeat_ngram_size, allowed_token_ids, bad_token_ids, bad_token_sequences, .. } =
        input.sampling;
    let History { prompt, generated } = input.history;
    let history = [prompt, generated].concat();
    let size = *no_repeat_ngram_size as usize;
    let repeats = size > 0
        && history.len() + 1 >= size
        && history.windows(size).any(|run| run == [&history[history.len() + 1 - size..], &[id][..]].concat());
    let completes = |word: &Vec<u32>| [&history[..], &[id]].concat().ends_with(word) && !word.is_empty();
    let is_set = |mask: &[u32]| mask.get(id as usize / 32).is_some_and(|word| word & 1 << (id % 32) != 0);
    repeats
        || bad_token_sequences.iter().any(completes)
        || bad_token_ids.contains(&id)
        || input.suppressed.contains(&id)
        || allowed_token_ids.as_ref().is_some_and(|allowed| !allowed.contains(&id))
        || input.mask.is_some_and(|mask| !is_set(mask))
}

/// The logits with everything that comes before temperature.
pub fn process(logits: &[f32], input: &Input<'_>) -> Vec<f32> {
    let sampling = input.sampling;
    let process = |(id, mut logit): (usize, f32)| {
        let id = id as u32;
        sampling.logit_bias.iter().filter(|(biased, _)| *biased == id).for_each(|(_, bias)| logit += bias);
        let count = input.counts.iter().find(|count| count.id == id);
        let generated = count.map_or(0, |count| count.generated);
        let in_prompt = count.is_some_and(|count| count.in_prompt);
        if generated > 0 || in_prompt && sampling.repetition_penalty_scope == PenaltyScope::All {
            let penalty = sampling.repetition_penalty;
            logit = if logit > 0.0 { logit / penalty } else { logit * penalty };
        }
        logit -= sampling.frequency_penalty * generated as f32;
        logit -= if generated > 0 { sampling.presence_penalty } else { 0.0 };
        if is_masked(id, input) { f32::NEG_INFINITY } else { logit }
    };
    input.processed.unwrap_or(logits).iter().copied().enumerate().map(process).collect()
}

/// The log-softmax of `logits` divided by `temperature` (0 counts as 1, NaN as minus infinity).
pub fn log_softmax(logits: &[f32], temperature: f32) -> Vec<f64> {
    let divisor = if temperature == 0.0 { 1.0 } else { f64::from(temperature) };
    let scores: Vec<f64> = logits
        .iter()
        .map(|logit| if logit.is_nan() { f64::NEG_INFINITY } else { f64::from(*logit) / divisor })
        .collect();
    let best = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = scores.iter().map(|score| (score - best).exp()).sum();
    scores.into_iter().map(|score| score - best - sum.ln()).collect()
}

/// The shortest prefix of `order` that holds `share` of its weight.
fn until(order: &[usize], share: f32, weights: &[f64]) -> Vec<usize> {
    let total: f64 = order.iter().map(|id| weights[*id]).sum();
    let mut sum = 0.0;
    let mut kept = Vec::new();
    for id in order {
        if sum >= f64::from(share) * total && !kept.is_empty() {
            break;
        }
        sum += weights[*id];
        kept.push(*id);
    }
    kept
}

/// The probability of each id.
pub fn probabilities(logits: &[f32], input: &Input<'_>) -> Vec<f64> {
    let scores = process(logits, input);
    let &Sampling { temperature, top_n_sigma, top_k, top_p, min_p, typical_p, epsilon_cutoff, .. } =
        input.sampling;
    let mut probabilities = vec![0.0; scores.len()];
    let mut kept: Vec<usize> = (0..scores.len()).filter(|id| scores[*id] > f32::NEG_INFINITY).collect();
    kept.sort_by(|a, b| (scores[*b] + 0.0).total_cmp(&(scores[*a] + 0.0)).then(a.cmp(b)));
    let Some(best) = kept.first().copied() else {
        let nan = scores.iter().position(|score| score.is_nan());
        nan.into_iter().for_each(|id| probabilities[id] = 1.0);
        return probabilities;
    };
    if temperature == 0.0 || scores[best] == f32::INFINITY {
        probabilities[best] = 1.0;
        return probabilities;
    }
    let logs = log_softmax(&scores, temperature);
    let weights: Vec<f64> = logs.iter().map(|log| log.exp()).collect();
    if top_n_sigma > 0.0 {
        let mean = kept.iter().map(|id| f64::from(scores[*id])).sum::<f64>() / kept.len() as f64;
        let square = |id: &usize| (f64::from(scores[*id]) - mean).powi(2);
        let deviation = (kept.iter().map(square).sum::<f64>() / kept.len() as f64).sqrt();
        let floor = f64::from(scores[best]) - f64::from(top_n_sigma) * deviation;
        kept.retain(|id| f64::from(scores[*id]) >= floor);
    }
    if top_k > 0 {
        kept.truncate(top_k as usize);
    }
    if top_p < 1.0 {
        kept = until(&kept, top_p, &weights);
    }
    kept.retain(|id| weights[*id] >= f64::from(min_p) * weights[best]);
    if typical_p < 1.0 {
        let total: f64 = kept.iter().map(|id| weights[*id]).sum();
        let surprise = |id: usize| total.ln() - logs[id];
        let entropy: f64 = kept.iter().map(|id| weights[*id] / total * surprise(*id)).sum();
        let distance = |id: usize| (surprise(id) - entropy).abs();
        kept.sort_by(|a, b| match distance(*a) - distance(*b) {
            // Equal up to rounding: equal logits have equal distances, and no other distances are this close.
            near if near.abs() < 1e-12 => a.cmp(b),
            apart => apart.total_cmp(&0.0),
        });
        kept = until(&kept, typical_p, &weights);
    }
    let total: f64 = kept.iter().map(|id| weights[*id]).sum();
    let heaviest = kept.iter().map(|id| weights[*id]).fold(0.0, f64::max);
    kept.retain(|id| weights[*id] >= (f64::from(epsilon_cutoff) * total).min(heaviest));
    let total: f64 = kept.iter().map(|id| weights[*id]).sum();
    kept.into_iter().for_each(|id| probabilities[id] = weights[id] / total);
    probabilities
}
