//! The sampling state of each slot, and the batch loop: each sequence's entries are one work item, sampled in order.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use penstock_kernels::{Kernels, Pool};
use penstock_types::{LogprobsRequest, Sampling};

use super::history::History;
use super::{Input, SamplingWorkspace, sample_row};
use crate::counts::TokenCounts;
use crate::seam::{Sampled, SamplingBatch, SamplingEntry, SlotParams, has_penalty};

/// The slots of a backend.
pub struct CpuSlots {
    pub(in crate::cpu) vocabulary: usize,
    /// Each slot is locked by at most one work item at a time, so no lock is ever waited for.
    slots: Vec<Mutex<CpuSlot>>,
    /// Apart from the slots, because entries with a given token are sampled beside those of the same slot.
    prompt_logprobs: Vec<Option<u32>>,
}

impl CpuSlots {
    pub(in crate::cpu) fn new(slots: usize, vocabulary: usize) -> Self {
        let empty = || Mutex::new(CpuSlot::default());
        Self {
            vocabulary,
            slots: std::iter::repeat_with(empty).take(slots).collect(),
            prompt_logprobs: vec![None; slots],
        }
    }

    pub(in crate::cpu) fn len(&self) -> usize {
        self.slots.len()
    }

    pub(in crate::cpu) fn admit(&mut self, slot: usize, params: &SlotParams<'_>) {
        *self.slots[slot].get_mut().unwrap_or_else(PoisonError::into_inner) = CpuSlot::new(params);
        self.prompt_logprobs[slot] = params.prompt_logprobs;
    }

    pub(in crate::cpu) fn free(&mut self, slot: usize) {
        self.slots[slot] = Mutex::default();
        self.prompt_logprobs[slot] = None;
    }

    /// The token sampled last, or the prompt's last token if none was.
    pub(in crate::cpu) fn last_token(&self, slot: usize) -> u32 {
        let slot = self.lock(slot);
        let last = slot.generated.last().or_else(|| slot.prompt.last());
        *last.expect("a row follows a slot that was admitted; this is a bug")
    }

    fn lock(&self, slot: usize) -> MutexGuard<'_, CpuSlot> {
        self.slots[slot].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The sampling state of one sequence.
#[derive(Debug, Default)]
pub(super) struct CpuSlot {
    sampling: Sampling,
    prompt: Arc<[u32]>,
    generated: Vec<u32>,
    /// Empty unless a penalty is set.
    counts: TokenCounts,
    min_tokens: usize,
    stop_token_ids: Vec<u32>,
    logprobs: Option<LogprobsRequest>,
}

impl CpuSlot {
    pub fn new(params: &SlotParams<'_>) -> Self {
        let mut counts = TokenCounts::default();
        if has_penalty(params.sampling) {
            counts.push_prompt(params.prompt);
            params.generated.iter().for_each(|token| counts.push(*token));
        }
        Self {
            sampling: Sampling { seed: params.seed, ..params.sampling.clone() },
            prompt: Arc::clone(params.prompt),
            generated: params.generated.to_vec(),
            counts,
            min_tokens: params.min_tokens,
            stop_token_ids: params.stop_token_ids.to_vec(),
            logprobs: params.logprobs,
        }
    }

    /// The input of the next position, the request's `index`-th token, without mask or processed logits.
    pub fn input(&self, index: u32) -> Input<'_> {
        let is_suppressed = (index as usize) < self.min_tokens;
        Input {
            sampling: &self.sampling,
            history: History { prompt: &self.prompt, generated: &self.generated },
            counts: &self.counts,
            suppressed: if is_suppressed { &self.stop_token_ids } else { &[] },
            mask: None,
            processed: None,
            index,
            given: None,
            logprobs: self.logprobs,
        }
    }

    /// Whether the position after `draft` is sampled, the request's `index`-th token: all tokens before it are the
    /// slot's, the last of them is the draft, and the draft does not end the request.
    fn confirms(&self, draft: u32, index: u32) -> bool {
        self.generated.len() == index as usize
            && self.generated.last() == Some(&draft)
            && !self.stop_token_ids.contains(&draft)
    }

    fn push(&mut self, token: u32) {
        self.generated.push(token);
        if has_penalty(&self.sampling) {
            self.counts.push(token);
        }
    }
}

/// Samples every entry of `batch` into `out`, which has one element for each. `floats` holds a workspace for each
/// thread.
pub(in crate::cpu) fn sample_batch(
    kernels: Kernels,
    pool: &Pool,
    logits: &[f32],
    batch: &SamplingBatch,
    slots: &CpuSlots,
    floats: &mut [f32],
    out: &mut [Sampled],
) {
    let vocabulary = slots.vocabulary;
    let workspaces = Mutex::new(floats.chunks_exact_mut(SamplingWorkspace::len(vocabulary)));
    let items = Mutex::new(Items { batch, start: 0, out });
    let next = || items.lock().unwrap_or_else(PoisonError::into_inner).next();
    let plain = CpuSlot::default();
    let sample = |entry: &SamplingEntry, input: &Input<'_>, workspace: &mut SamplingWorkspace<'_>| {
        let input = Input {
            mask: entry.mask.map(|mask| batch.mask(mask, vocabulary.div_ceil(32))),
            processed: entry.processed.map(|processed| batch.processed(processed, vocabulary)),
            given: entry.given,
            ..*input
        };
        let logits = &logits[entry.row as usize * vocabulary..][..vocabulary];
        sample_row(kernels, logits, &input, workspace)
    };
    // Results do not depend on which thread takes which item.
    let share = |_| {
        let floats = workspaces.lock().unwrap_or_else(PoisonError::into_inner).next();
        let floats = floats.expect("there is one workspace for each thread; this is a bug");
        let mut workspace = SamplingWorkspace::new(floats, vocabulary);
        while let Some((entries, out)) = next() {
            let first = batch.entry(entries.start);
            if first.given.is_some() {
                let top = slots.prompt_logprobs[first.slot as usize];
                let logprobs = top.map(|top| LogprobsRequest { top, processed: false });
                out[0] = sample(&first, &Input { logprobs, ..plain.input(0) }, &mut workspace);
                continue;
            }
            let mut slot = slots.lock(first.slot as usize);
            for (entry, out) in entries.map(|index| batch.entry(index)).zip(out) {
                if entry.draft.is_some_and(|draft| !slot.confirms(draft, entry.index)) {
                    *out = Sampled::Rejected;
                    continue;
                }
                *out = sample(&entry, &slot.input(entry.index), &mut workspace);
                if let Some(token) = out.token() {
                    slot.push(token.id);
                }
            }
        }
    };
    if batch.len() > 1 {
        pool.share(&share);
    } else {
        share(0);
    }
}

/// The work items of a batch: an entry with a given token, or all entries that a slot samples.
struct Items<'a> {
    batch: &'a SamplingBatch,
    start: usize,
    out: &'a mut [Sampled],
}

impl<'a> Iterator for Items<'a> {
    type Item = (Range<usize>, &'a mut [Sampled]);

    fn next(&mut self) -> Option<Self::Item> {
        let start = self.start;
        if start == self.batch.len() {
            return None;
        }
        let first = self.batch.entry(start);
        let mut end = start + 1;
        if first.given.is_none() {
            let follows = |entry: SamplingEntry| entry.slot == first.slot && entry.given.is_none();
            while end < self.batch.len() && follows(self.batch.entry(end)) {
                end += 1;
            }
        }
        self.start = end;
        Some((start..end, self.out.split_off_mut(..end - start)?))
    }
}
