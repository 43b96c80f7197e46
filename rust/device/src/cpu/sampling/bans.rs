//! What takes ids out: their logits become minus infinity.

use std::iter;

use penstock_kernels::Kernels;

use crate::sample::SampleParams;

/// Whether something may be banned.
pub(super) fn asked(params: &SampleParams<'_>) -> bool {
    params.no_repeat_ngram_size > 0
        || params.allowed.is_some()
        || params.mask.is_some()
        || [params.banned, params.suppressed].iter().any(|ids| !ids.is_empty())
        || !params.bad_words.is_empty()
}

/// Bans all that is to be. Their order does not matter.
pub(super) fn ban(kernels: Kernels, logits: &mut [f32], params: &SampleParams<'_>) {
    let history = History { prompt: params.prompt, generated: params.generated };
    if let Some(allowed) = params.allowed {
        ban_all_but(logits, allowed);
    }
    if let Some(mask) = params.mask {
        kernels.mask(logits, mask);
    }
    let mut ban = |id: u32| {
        if let Some(logit) = logits.get_mut(id as usize) {
            *logit = f32::NEG_INFINITY;
        }
    };
    params.banned.iter().chain(params.suppressed).for_each(|id| ban(*id));
    for word in params.bad_words {
        match word.split_last() {
            Some((last, rest)) if history.ends_with(rest) => ban(*last),
            _ => {}
        }
    }
    if params.no_repeat_ngram_size > 0 {
        history.for_each_following(params.no_repeat_ngram_size as usize - 1, ban);
    }
}

/// Bans what lies between `allowed` ids, which ascend.
fn ban_all_but(logits: &mut [f32], allowed: &[u32]) {
    let mut start = 0;
    let end = logits.len();
    for id in allowed.iter().map(|id| *id as usize).filter(|id| *id < end).chain(iter::once(end)) {
        logits[start..id.max(start)].fill(f32::NEG_INFINITY);
        start = id + 1;
    }
}

/// A request's tokens so far.
#[derive(Clone, Copy)]
struct History<'a> {
    prompt: &'a [u32],
    generated: &'a [u32],
}

impl<'a> History<'a> {
    fn len(&self) -> usize {
        self.prompt.len() + self.generated.len()
    }

    fn iter(&self) -> impl DoubleEndedIterator<Item = &'a u32> {
        self.prompt.iter().chain(self.generated)
    }

    fn get(&self, index: usize) -> u32 {
        let in_prompt = self.prompt.get(index);
        *in_prompt.unwrap_or_else(|| &self.generated[index - self.prompt.len()])
    }

    /// Whether the tokens before `end` are `ids`.
    fn has_before(&self, end: usize, ids: impl DoubleEndedIterator<Item = u32>) -> bool {
        ids.rev().enumerate().all(|(back, id)| back < end && self.get(end - 1 - back) == id)
    }

    fn ends_with(&self, ids: &[u32]) -> bool {
        self.has_before(self.len(), ids.iter().copied())
    }

    /// Calls `each` with every token that followed where the last `count` tokens were before.
    fn for_each_following(&self, count: usize, mut each: impl FnMut(u32)) {
        let Some(start) = self.len().checked_sub(count) else { return };
        if count == 0 {
            return self.iter().for_each(|id| each(*id));
        }
        // Most places differ in the last of them, so that one is looked for first.
        let last = self.get(self.len() - 1);
        self.iter().enumerate().filter(|(_, id)| **id == last).for_each(|(at, _)| {
            let following = at + 1;
            let tail = (start..self.len()).map(|index| self.get(index));
            if following < self.len() && self.has_before(following, tail) {
                each(self.get(following));
            }
        });
    }
}
