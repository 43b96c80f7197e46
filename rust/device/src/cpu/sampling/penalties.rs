//! Logit bias and penalties.

use penstock_types::{PenaltyScope, Sampling};

use crate::counts::TokenCounts;

pub(super) fn add_bias(logits: &mut [f32], biases: &[(u32, f32)]) {
    for (id, bias) in biases {
        if let Some(logit) = logits.get_mut(*id as usize) {
            *logit += bias;
        }
    }
}

/// Whether a penalty is set.
pub(super) fn is_set(sampling: &Sampling) -> bool {
    sampling.repetition_penalty != 1.0
        || sampling.presence_penalty != 0.0
        || sampling.frequency_penalty != 0.0
}

/// Penalises the ids that occurred before.
pub(super) fn apply(logits: &mut [f32], sampling: &Sampling, counts: &TokenCounts) {
    if !is_set(sampling) {
        return;
    }
    for count in counts.iter() {
        let Some(logit) = logits.get_mut(count.id as usize) else { continue };
        if count.generated > 0 || sampling.repetition_penalty_scope == PenaltyScope::All {
            *logit = repeated(*logit, sampling.repetition_penalty);
        }
        if count.generated > 0 {
            *logit -= sampling.frequency_penalty * count.generated as f32;
            *logit -= sampling.presence_penalty;
        }
    }
}

/// A penalty above 1 lowers the logit on either side of zero.
fn repeated(logit: f32, penalty: f32) -> f32 {
    if logit > 0.0 { logit / penalty } else { logit * penalty }
}
