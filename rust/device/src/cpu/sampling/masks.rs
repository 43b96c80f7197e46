//! Masks: the logits of excluded ids become minus infinity. Their order does not matter.

use std::iter;

use penstock_kernels::Kernels;
use penstock_types::Sampling;

use super::Input;

/// Whether an id may be excluded.
pub(super) fn is_set(input: &Input<'_>) -> bool {
    let Sampling { no_repeat_ngram_size, allowed_token_ids, bad_token_ids, bad_token_sequences, .. } =
        input.sampling;
    *no_repeat_ngram_size > 0
        || allowed_token_ids.is_some()
        || input.mask.is_some()
        || !bad_token_ids.is_empty()
        || !input.suppressed.is_empty()
        || !bad_token_sequences.is_empty()
}

/// Excludes every id that is to be.
pub(super) fn apply(kernels: Kernels, logits: &mut [f32], input: &Input<'_>) {
    let sampling = input.sampling;
    if let Some(allowed) = &sampling.allowed_token_ids {
        exclude_all_but(logits, allowed);
    }
    if let Some(mask) = input.mask {
        kernels.mask(logits, mask);
    }
    let mut exclude = |id: u32| {
        if let Some(logit) = logits.get_mut(id as usize) {
            *logit = f32::NEG_INFINITY;
        }
    };
    sampling.bad_token_ids.iter().chain(input.suppressed).for_each(|id| exclude(*id));
    for word in &sampling.bad_token_sequences {
        match word.split_last() {
            Some((last, rest)) if input.history.ends_with(rest) => exclude(*last),
            _ => {}
        }
    }
    if sampling.no_repeat_ngram_size > 0 {
        input.history.for_each_following(sampling.no_repeat_ngram_size as usize - 1, exclude);
    }
}

/// Excludes the ids between those of `allowed`, which ascend.
fn exclude_all_but(logits: &mut [f32], allowed: &[u32]) {
    let mut start = 0;
    let end = logits.len();
    for id in allowed.iter().map(|id| *id as usize).filter(|id| *id < end).chain(iter::once(end)) {
        logits[start..id.max(start)].fill(f32::NEG_INFINITY);
        start = id + 1;
    }
}
