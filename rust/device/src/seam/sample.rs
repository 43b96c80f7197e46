//! [`Sample`]: the parameters of a slot, a batch of positions to sample, and the tokens.
//!
//! The order of application, which every backend follows:
//!
//! 1. the raw logits, or the processed logits of the batch entry;
//! 2. logit bias;
//! 3. repetition penalty, then frequency and presence penalties;
//! 4. masks, which set logits to minus infinity, so no later step brings a masked id back;
//! 5. temperature; "processed" log probabilities are those of the log-softmax at this point;
//! 6. the filters, in the order of their fields in [`Sampling`], each applied to the candidates that the one before
//!    left;
//! 7. the random draw, which is keyed by (seed, index) and has no state.
//!
//! The token and the log probabilities of a position depend on its logits, its slot and its own entry alone. A log
//! probability is one function of a distribution and an id, so it has the same bits whether the id was sampled, given
//! or among the most likely.

use std::sync::Arc;
use std::task::{Poll, Waker};

use penstock_types::{LogprobsRequest, Sampling, Token, TokenDetails};

use super::memory::Memory;
use super::step::StepSpec;
use crate::error::DeviceError;

/// The parameters of a request when it is admitted to a slot. Ids outside the vocabulary have no effect in any list.
#[derive(Clone, Copy, Debug)]
pub struct SlotParams<'a> {
    /// The parameters of sampling.
    pub sampling: &'a Sampling,
    /// The seed of the random draws, in place of that in `sampling`.
    pub seed: u64,
    /// The prompt's tokens.
    pub prompt: &'a Arc<[u32]>,
    /// The tokens generated so far; the backend appends those it samples.
    pub generated: &'a [u32],
    /// The number of generated tokens before which `stop_token_ids` are masked.
    pub min_tokens: usize,
    /// The ids that end the request: no position after one of them is sampled.
    pub stop_token_ids: &'a [u32],
    /// The log probabilities of generated tokens.
    pub logprobs: Option<LogprobsRequest>,
    /// The number of most likely ids returned for each position of the prompt, besides its own log probability.
    pub prompt_logprobs: Option<u32>,
}

impl<'a> SlotParams<'a> {
    /// Parameters of a request without generated tokens, stop ids or log probabilities.
    pub fn new(sampling: &'a Sampling, prompt: &'a Arc<[u32]>) -> Self {
        Self {
            sampling,
            seed: sampling.seed,
            prompt,
            generated: &[],
            min_tokens: 0,
            stop_token_ids: &[],
            logprobs: None,
            prompt_logprobs: None,
        }
    }
}

/// Lower temperatures are greedy: dividing by them would only overflow.
const MIN_TEMPERATURE: f32 = 1e-5;

/// Whether the most likely id has all the probability, whatever the filters.
pub(crate) fn is_greedy(sampling: &Sampling) -> bool {
    sampling.temperature < MIN_TEMPERATURE
}

/// The factor on the logits.
pub(crate) fn factor(sampling: &Sampling) -> f32 {
    if is_greedy(sampling) { 1.0 } else { 1.0 / sampling.temperature }
}

/// Whether a penalty is set.
pub(crate) fn has_penalty(sampling: &Sampling) -> bool {
    sampling.repetition_penalty != 1.0
        || sampling.presence_penalty != 0.0
        || sampling.frequency_penalty != 0.0
}

/// In the optional arrays of a [`SamplingBatch`], the entry has no such value.
const NONE: u32 = u32::MAX;

/// The positions sampled by one call, as parallel arrays with one element per entry.
///
/// The entries of a slot are adjacent and in the order of their positions. An entry without a draft is sampled. An
/// entry with a draft is sampled if the position before it was sampled, gave exactly this draft, and the draft does not
/// end the request; so all drafts of a sequence are verified in one call, or across the calls of one step.
#[derive(Clone, Debug, Default)]
pub struct SamplingBatch {
    rows: Vec<u32>,
    slots: Vec<u32>,
    indices: Vec<u32>,
    drafts: Vec<u32>,
    given: Vec<u32>,
    masks: Vec<u32>,
    processed: Vec<u32>,
    bitmaps: Vec<u32>,
    processed_logits: Vec<f32>,
}

/// One entry of a [`SamplingBatch`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SamplingEntry {
    /// The row of the logits.
    pub row: u32,
    /// The slot whose parameters apply and to which the token is appended.
    pub slot: u32,
    /// The number of tokens generated before this one: with the seed, the key of the random draw.
    pub index: u32,
    /// The draft token that was the input of this position.
    pub draft: Option<u32>,
    /// The token is known, and only its log probability is computed, from the raw logits. The slot does not change.
    pub given: Option<u32>,
    /// The bitmap of the allowed ids, by its number in the batch.
    pub mask: Option<u32>,
    /// The logits that replace the row, by their number in the batch. Raw log probabilities are still those of the row.
    pub processed: Option<u32>,
}

impl SamplingBatch {
    /// An empty batch with room for `entries` entries.
    pub fn with_capacity(entries: usize) -> Self {
        let array = || Vec::with_capacity(entries);
        Self {
            rows: array(),
            slots: array(),
            indices: array(),
            drafts: array(),
            given: array(),
            masks: array(),
            processed: array(),
            bitmaps: Vec::new(),
            processed_logits: Vec::new(),
        }
    }

    /// Removes all entries and keeps the memory.
    pub fn clear(&mut self) {
        let Self { rows, slots, indices, drafts, given, masks, processed, bitmaps, processed_logits } = self;
        [rows, slots, indices, drafts, given, masks, processed, bitmaps].into_iter().for_each(Vec::clear);
        processed_logits.clear();
    }

    /// Number of entries.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether there is no entry.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Appends an entry.
    pub fn push(&mut self, entry: SamplingEntry) {
        let SamplingEntry { row, slot, index, draft, given, mask, processed } = entry;
        self.rows.push(row);
        self.slots.push(slot);
        self.indices.push(index);
        self.drafts.push(draft.unwrap_or(NONE));
        self.given.push(given.unwrap_or(NONE));
        self.masks.push(mask.unwrap_or(NONE));
        self.processed.push(processed.unwrap_or(NONE));
    }

    /// Appends a bitmap, bit `id % 32` of word `id / 32`, and returns its number. All bitmaps of a batch have the same
    /// number of words; ids beyond the last word are not allowed.
    pub fn push_mask(&mut self, bitmap: &[u32]) -> u32 {
        let number = self.bitmaps.len() / bitmap.len().max(1);
        self.bitmaps.extend_from_slice(bitmap);
        number as u32
    }

    /// Appends `vocabulary` logits, written by `fill`, and returns their number. Nothing is appended if `fill` fails.
    pub fn push_processed<E>(
        &mut self,
        vocabulary: usize,
        fill: impl FnOnce(&mut [f32]) -> Result<(), E>,
    ) -> Result<u32, E> {
        let start = self.processed_logits.len();
        self.processed_logits.resize(start + vocabulary, 0.0);
        let filled = fill(&mut self.processed_logits[start..]);
        filled.inspect_err(|_| self.processed_logits.truncate(start))?;
        Ok((start / vocabulary.max(1)) as u32)
    }

    /// The entry at `index`.
    pub fn entry(&self, index: usize) -> SamplingEntry {
        let optional = |value: u32| (value != NONE).then_some(value);
        SamplingEntry {
            row: self.rows[index],
            slot: self.slots[index],
            index: self.indices[index],
            draft: optional(self.drafts[index]),
            given: optional(self.given[index]),
            mask: optional(self.masks[index]),
            processed: optional(self.processed[index]),
        }
    }

    /// The bitmap with this number; `words` is the length of each.
    pub fn mask(&self, number: u32, words: usize) -> &[u32] {
        &self.bitmaps[number as usize * words..][..words]
    }

    /// The processed logits with this number.
    pub fn processed(&self, number: u32, vocabulary: usize) -> &[f32] {
        &self.processed_logits[number as usize * vocabulary..][..vocabulary]
    }
}

/// The result of a batch entry.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Sampled {
    /// A token was sampled, or was given. Its logprob and its list of the most likely tokens are of one distribution.
    Token(Token),
    /// Every logit is minus infinity after the masks. The slot does not change.
    NoCandidates,
    /// The draft was not confirmed. The slot does not change.
    #[default]
    Rejected,
}

impl Sampled {
    /// The token, if there is one.
    pub fn token(&self) -> Option<&Token> {
        match self {
            Self::Token(token) => Some(token),
            Self::NoCandidates | Self::Rejected => None,
        }
    }

    /// A token, with the most likely tokens at its position.
    pub(crate) fn with_top(id: u32, logprob: f32, top: Vec<(u32, f32)>) -> Self {
        let details = (!top.is_empty()).then(|| Box::new(TokenDetails { top, ..TokenDetails::default() }));
        Self::Token(Token { id, logprob, details })
    }
}

/// The sampling of a device.
pub trait Sample: Memory {
    /// For each sequence, its sampling parameters, its tokens so far and all other state that sampling depends on.
    type Slots: Send;
    /// The tokens of a [`sample`](Self::sample) call, which may still be computed. May be dropped instead of collected,
    /// at any time: the call still takes effect, and its tokens are discarded.
    type Ticket: Send;

    /// Empty slots, one for each sequence of the largest step.
    fn allocate_slots(&mut self, step: &StepSpec) -> Result<Self::Slots, DeviceError>;

    /// Replaces all state of a slot by that of a new sequence.
    fn admit_slot(
        &mut self,
        slots: &mut Self::Slots,
        slot: u32,
        params: &SlotParams<'_>,
    ) -> Result<(), DeviceError>;

    /// Drops all state of a slot.
    fn free_slot(&mut self, slots: &mut Self::Slots, slot: u32) -> Result<(), DeviceError>;

    /// Samples every entry of `batch` from its row of `logits` and appends the tokens to the slots. See
    /// [`SamplingBatch`] for entries that verify drafts. Tickets complete in order, each after all earlier calls; that
    /// of an empty batch does nothing else.
    fn sample(
        &mut self,
        logits: &Self::Buffer,
        batch: &SamplingBatch,
        slots: &mut Self::Slots,
        scratch: &mut Self::Scratch,
    ) -> Result<Self::Ticket, DeviceError>;

    /// Ready if [`collect`](Self::collect) does not wait for the device. Otherwise `waker` is woken when it may have
    /// become ready. A lost device makes every ticket ready and wakes its waker; `collect` then returns the loss.
    fn poll(&mut self, ticket: &mut Self::Ticket, waker: &Waker) -> Poll<()>;

    /// Replaces `out` by the results of a [`sample`](Self::sample) call, one for each entry. Waits for the device.
    fn collect(&mut self, ticket: Self::Ticket, out: &mut Vec<Sampled>) -> Result<(), DeviceError>;
}
