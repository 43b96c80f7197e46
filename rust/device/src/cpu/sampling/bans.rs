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
    fn for_each_following(&self, count: usize, each: impl FnMut(u32)) {
        let Some(start) = self.len().checked_sub(count) else { return };
        let run: Vec<u32> = (start..self.len()).map(|index| self.get(index)).collect();
        for_each_after(&run, self.iter().copied(), each);
    }
}

/// Calls `each` with everything in `all` that comes right after `run`. However long the run is and however it repeats
/// itself, that takes a few comparisons for each of `all`: what matched already is not looked at again.
fn for_each_after<T: Copy + PartialEq>(run: &[T], all: impl Iterator<Item = T>, mut each: impl FnMut(T)) {
    if run.is_empty() {
        return all.for_each(each);
    }
    // Of the first so many of the run, how many of the last are again its first.
    let mut overlaps = vec![0; run.len() + 1];
    let extend = |overlaps: &[usize], mut matched: usize, next: T| {
        while matched > 0 && run[matched] != next {
            matched = overlaps[matched];
        }
        matched + usize::from(run[matched] == next)
    };
    for end in 1..run.len() {
        overlaps[end + 1] = extend(&overlaps, overlaps[end], run[end]);
    }
    let mut matched = 0;
    for next in all {
        if matched == run.len() {
            each(next);
            matched = overlaps[matched];
        }
        matched = extend(&overlaps, matched, next);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    thread_local! {
        static NUM_COMPARISONS: Cell<usize> = const { Cell::new(0) };
    }

    /// Counts what it is compared with.
    #[derive(Clone, Copy)]
    struct Counted(u32);

    impl PartialEq for Counted {
        fn eq(&self, other: &Self) -> bool {
            NUM_COMPARISONS.set(NUM_COMPARISONS.get() + 1);
            self.0 == other.0
        }
    }

    /// What comes after the last `count` of `all`.
    fn after(all: &[u32], count: usize) -> Vec<u32> {
        let all: Vec<Counted> = all.iter().copied().map(Counted).collect();
        let mut found = vec![];
        for_each_after(&all[all.len() - count..], all.iter().copied(), |next| found.push(next.0));
        found
    }

    #[test]
    fn a_run_that_overlaps_itself_is_found_wherever_it_is() {
        // All sequences of ten of two tokens.
        for bits in 0..1_u32 << 10 {
            let all: Vec<u32> = (0..10).map(|bit| bits >> bit & 1).collect();
            for count in 0..=10 {
                let run = &all[10 - count..];
                let naive: Vec<u32> =
                    (count..10).filter(|end| all[..*end].ends_with(run)).map(|end| all[end]).collect();
                assert_eq!(after(&all, count), naive, "{all:?}, {count}");
            }
        }
    }

    #[test]
    fn a_long_run_costs_no_more_comparisons_than_a_short_one() {
        let mut almost = vec![7; 4000];
        almost[1999] = 8;
        for all in [vec![7; 4000], almost] {
            for count in [1, 2, 1000, 2000] {
                NUM_COMPARISONS.set(0);
                after(&all, count);
                assert!(NUM_COMPARISONS.get() <= 4 * all.len(), "{count}: {}", NUM_COMPARISONS.get());
            }
        }
    }
}
