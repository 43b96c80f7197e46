//! What moves logits: bias and penalties.

use penstock_types::PenaltyScope;

use crate::sample::SampleParams;

/// Adds to the logits of single ids.
pub(super) fn add_bias(logits: &mut [f32], biases: &[(u32, f32)]) {
    for (id, bias) in biases {
        if let Some(logit) = logits.get_mut(*id as usize) {
            *logit += bias;
        }
    }
}

/// Whether a penalty is asked for.
pub(super) fn asked(params: &SampleParams<'_>) -> bool {
    params.repetition_penalty != 1.0 || params.presence_penalty != 0.0 || params.frequency_penalty != 0.0
}

/// Makes ids that were there before less likely.
pub(super) fn penalise(logits: &mut [f32], params: &SampleParams<'_>) {
    if !asked(params) {
        return;
    }
    for seen in params.counts.iter() {
        let Some(logit) = logits.get_mut(seen.id as usize) else { continue };
        if seen.generated > 0 || params.repetition_penalty_scope == PenaltyScope::All {
            *logit = repeated(*logit, params.repetition_penalty);
        }
        if seen.generated > 0 {
            *logit -= params.frequency_penalty * seen.generated as f32;
            *logit -= params.presence_penalty;
        }
    }
}

/// Less for a penalty above 1, on either side of zero.
fn repeated(logit: f32, penalty: f32) -> f32 {
    if logit > 0.0 { logit / penalty } else { logit * penalty }
}
