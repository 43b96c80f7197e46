//! The host's part of a slot: the parameters that every entry of it has, and the lists that are copied to the device.

use penstock_types::{LogprobsRequest, PenaltyScope, Sampling};

use super::entry::{Entry, flags};
use super::layout::{Bias, MOST_LISTED, NONE, Sizes};
use crate::error::DeviceError;
use crate::seam::{SamplingEntry, SlotParams, factor, has_penalty, is_greedy};

/// The parameters of an admitted sequence.
#[derive(Clone, Debug)]
pub(super) struct Slot {
    /// The entry of any position, without mask, processed logits and log probabilities.
    plain: Entry,
    min_tokens: usize,
    logprobs: Option<LogprobsRequest>,
    prompt_logprobs: Option<u32>,
}

impl Slot {
    pub fn new(params: &SlotParams<'_>, lists: &Lists) -> Self {
        let sampling = params.sampling;
        let plain = Entry {
            seed: params.seed,
            flags: plain_flags(params),
            factor: factor(sampling),
            num_biases: lists.biases.len() as u32,
            num_sequences: lists.num_sequences as u32,
            ..Entry::with_sampling(sampling)
        };
        Self {
            plain,
            min_tokens: params.min_tokens,
            logprobs: params.logprobs,
            prompt_logprobs: params.prompt_logprobs,
        }
    }

    /// The entry of a position. `mask` and `processed` are numbers of this launch.
    pub fn entry(&self, entry: &SamplingEntry, mask: Option<u32>, processed: Option<u32>) -> Entry {
        let common = Entry {
            row: entry.row,
            slot: entry.slot,
            index: entry.index,
            draft: entry.draft.unwrap_or(NONE),
            given: entry.given.unwrap_or(NONE),
            mask: mask.unwrap_or(NONE),
            processed: processed.unwrap_or(NONE),
            ..self.plain
        };
        if entry.given.is_some() {
            let has_logprobs =
                self.prompt_logprobs.map_or(0, |_| flags::HAS_LOGPROBS | flags::HAS_RAW_LOGPROBS);
            return Entry {
                flags: has_logprobs,
                num_top: self.prompt_logprobs.unwrap_or(0),
                mask: NONE,
                processed: NONE,
                no_repeat_ngram_size: 0,
                num_sequences: 0,
                factor: 1.0,
                ..common
            };
        }
        let mut set = common.flags;
        if (entry.index as usize) < self.min_tokens && common.has(flags::HAS_STOPS) {
            set |= flags::IS_SUPPRESSED;
        }
        let changes = flags::HAS_ALLOWED | flags::IS_SUPPRESSED | flags::IS_COUNTED | flags::IS_RECORDED;
        if set & changes != 0 || mask.is_some() || common.num_biases > 0 {
            set |= flags::IS_PROCESSED;
        }
        if let Some(request) = self.logprobs {
            set |= flags::HAS_LOGPROBS | if request.processed { 0 } else { flags::HAS_RAW_LOGPROBS };
        }
        Entry { flags: set, num_top: self.logprobs.map_or(0, |request| request.top), ..common }
    }
}

/// The flags that do not depend on the position.
fn plain_flags(params: &SlotParams<'_>) -> u32 {
    let sampling = params.sampling;
    let is_set = [
        (flags::IS_GREEDY, is_greedy(sampling) || sampling.top_k == 1),
        (flags::HAS_ALLOWED, has_bitmap(sampling)),
        (flags::HAS_STOPS, !params.stop_token_ids.is_empty()),
        (flags::IS_COUNTED, has_penalty(sampling)),
        (flags::IS_RECORDED, is_recorded(sampling)),
        (flags::COUNTS_PROMPT, sampling.repetition_penalty_scope == PenaltyScope::All),
    ];
    is_set.into_iter().filter(|(_, is_set)| *is_set).map(|(flag, _)| flag).sum()
}

fn has_bitmap(sampling: &Sampling) -> bool {
    sampling.allowed_token_ids.is_some() || !sampling.bad_token_ids.is_empty()
}

/// Whether the tokens so far exclude others.
fn is_recorded(sampling: &Sampling) -> bool {
    sampling.no_repeat_ngram_size > 0 || !sampling.bad_token_sequences.is_empty()
}

/// The lists of a request, empty where they are not needed.
#[derive(Debug, Default)]
pub(super) struct Lists {
    pub allowed: Vec<u32>,
    pub stops: Vec<u32>,
    pub biases: Vec<Bias>,
    /// The ends of the sequences after a 0, then their ids.
    pub sequences: Vec<u32>,
    num_sequences: usize,
    pub history: Vec<u32>,
    pub is_counted: bool,
}

impl Lists {
    pub fn new(params: &SlotParams<'_>, sizes: &Sizes) -> Result<Self, DeviceError> {
        let sampling = params.sampling;
        let mut lists = Self { is_counted: has_penalty(sampling), ..Self::default() };
        if has_bitmap(sampling) {
            lists.allowed = allowed_bitmap(sampling, sizes);
        }
        if !params.stop_token_ids.is_empty() {
            lists.stops = vec![0; sizes.words];
            each_bit(params.stop_token_ids, sizes, |word, bit| lists.stops[word] |= bit);
        }
        lists.biases = sampling.logit_bias.iter().map(|&(id, value)| Bias { id, value }).collect();
        lists.biases.retain(|bias| (bias.id as usize) < sizes.vocabulary);
        lists.biases.sort_by_key(|bias| bias.id); // stable: equal ids are added in their order
        let sequences = || sampling.bad_token_sequences.iter().filter(|sequence| !sequence.is_empty());
        if sequences().next().is_some() {
            let ends = sequences().scan(0, |end, sequence| {
                *end += sequence.len() as u32;
                Some(*end)
            });
            lists.sequences = std::iter::once(0).chain(ends).collect();
            lists.num_sequences = lists.sequences.len() - 1;
            lists.sequences.extend(sequences().flatten());
        }
        if lists.is_counted || is_recorded(sampling) {
            lists.history = params.prompt.iter().chain(params.generated).copied().collect();
        }
        let num_ids = lists.sequences.len().saturating_sub(1 + lists.num_sequences);
        if lists.biases.len().max(num_ids) > MOST_LISTED || lists.history.len() > sizes.positions {
            return Err(DeviceError::InvalidStep("a list of a slot is too long".to_owned()));
        }
        Ok(lists)
    }
}

/// The ids that are allowed and not bad.
fn allowed_bitmap(sampling: &Sampling, sizes: &Sizes) -> Vec<u32> {
    let mut words = match &sampling.allowed_token_ids {
        None => vec![u32::MAX; sizes.words],
        Some(allowed) => {
            let mut words = vec![0; sizes.words];
            each_bit(allowed, sizes, |word, bit| words[word] |= bit);
            words
        }
    };
    each_bit(&sampling.bad_token_ids, sizes, |word, bit| words[word] &= !bit);
    words
}

fn each_bit(ids: &[u32], sizes: &Sizes, mut set: impl FnMut(usize, u32)) {
    for id in ids.iter().filter(|id| (**id as usize) < sizes.vocabulary) {
        set(*id as usize / 32, 1 << (id % 32));
    }
}
