//! The slow twin: every step of [`crate::sample`] in a few lines, by sorting and in double precision, each over all ids.

use penstock_types::PenaltyScope;

use crate::sample::SampleParams;

/// Whether `id` is banned by anything.
fn is_banned(id: u32, params: &SampleParams<'_>) -> bool {
    let history = [params.prompt, params.generated].concat();
    let size = params.no_repeat_ngram_size as usize;
    let repeats = size > 0
        && history.len() + 1 >= size
        && history.windows(size).any(|run| run == [&history[history.len() + 1 - size..], &[id][..]].concat());
    let completes = |word: &Vec<u32>| [&history[..], &[id]].concat().ends_with(word) && !word.is_empty();
    let is_set = |mask: &[u32]| mask.get(id as usize / 32).is_some_and(|word| word & 1 << (id % 32) != 0);
    repeats
        || params.bad_words.iter().any(completes)
        || params.banned.contains(&id)
        || params.suppressed.contains(&id)
        || params.allowed.is_some_and(|allowed| !allowed.contains(&id))
        || params.mask.is_some_and(|mask| !is_set(mask))
}

/// The logits with everything that comes before temperature.
pub fn process(logits: &[f32], params: &SampleParams<'_>) -> Vec<f32> {
    let process = |(id, mut logit): (usize, f32)| {
        let id = id as u32;
        params.logit_bias.iter().filter(|(biased, _)| *biased == id).for_each(|(_, bias)| logit += bias);
        let seen = params.counts.iter().find(|seen| seen.id == id);
        let generated = seen.map_or(0, |seen| seen.generated);
        let in_prompt = seen.is_some_and(|seen| seen.in_prompt);
        if generated > 0 || in_prompt && params.repetition_penalty_scope == PenaltyScope::All {
            let penalty = params.repetition_penalty;
            logit = if logit > 0.0 { logit / penalty } else { logit * penalty };
        }
        logit -= params.frequency_penalty * generated as f32;
        logit -= if generated > 0 { params.presence_penalty } else { 0.0 };
        if is_banned(id, params) { f32::NEG_INFINITY } else { logit }
    };
    params.processed.unwrap_or(logits).iter().copied().enumerate().map(process).collect()
}

/// The logs of the probabilities of `logits` divided by `temperature` (0 is as 1), where NaN is as minus infinity.
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

/// The first of `order` whose probabilities reach `share` of those of all of it.
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

/// The probabilities that are drawn from.
pub fn probabilities(logits: &[f32], params: &SampleParams<'_>) -> Vec<f64> {
    let scores = process(logits, params);
    let mut probabilities = vec![0.0; scores.len()];
    let mut kept: Vec<usize> = (0..scores.len()).filter(|id| scores[*id] > f32::NEG_INFINITY).collect();
    kept.sort_by(|a, b| (scores[*b] + 0.0).total_cmp(&(scores[*a] + 0.0)).then(a.cmp(b)));
    let Some(best) = kept.first().copied() else {
        let nan = scores.iter().position(|score| score.is_nan());
        nan.into_iter().for_each(|id| probabilities[id] = 1.0);
        return probabilities;
    };
    if params.temperature == 0.0 || scores[best] == f32::INFINITY {
        probabilities[best] = 1.0;
        return probabilities;
    }
    let logs = log_softmax(&scores, params.temperature);
    let weights: Vec<f64> = logs.iter().map(|log| log.exp()).collect();
    if params.top_k > 0 {
        kept.truncate(params.top_k as usize);
    }
    if params.top_p < 1.0 {
        kept = until(&kept, params.top_p, &weights);
    }
    kept.retain(|id| weights[*id] >= f64::from(params.min_p) * weights[best]);
    if params.typical_p < 1.0 {
        let total: f64 = kept.iter().map(|id| weights[*id]).sum();
        let surprise = |id: usize| total.ln() - logs[id];
        let entropy: f64 = kept.iter().map(|id| weights[*id] / total * surprise(*id)).sum();
        let distance = |id: usize| (surprise(id) - entropy).abs();
        kept.sort_by(|a, b| match distance(*a) - distance(*b) {
            // Equal but for roundings: the distances of equal logits are, and quarters leave no others so near.
            near if near.abs() < 1e-12 => a.cmp(b),
            apart => apart.total_cmp(&0.0),
        });
        kept = until(&kept, params.typical_p, &weights);
    }
    let total: f64 = kept.iter().map(|id| weights[*id]).sum();
    kept.into_iter().for_each(|id| probabilities[id] = weights[id] / total);
    probabilities
}
