//! Logit bias and penalties.

use penstock_types::{PenaltyScope, Sampling};

use crate::counts::TokenCounts;
use crate::seam::has_penalty;

pub(super) fn add_bias(logits: &mut [f32], biases: &[(u32, f32)]) {
    for (id, bias) in biases {
        if let Some(logit) = logits.get_mut(*id as usize) {
            *logit += bias;
        }
    }
}

/// Penalises the ids that occurred before.
pub(super) fn apply(logits: &mut [f32], sampling: &Sampling, counts: &TokenCounts) {
    if !has_penalty(sampling) {
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
