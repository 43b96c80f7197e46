//! What a request may ask of the choice of a token, and what it gets.
//!
//! The order of application, which every backend follows:
//!
//! 1. the raw logits, or what processors outside of the device made of them;
//! 2. logit bias;
//! 3. repetition penalty, then frequency and presence penalties;
//! 4. bans, which are minus infinity, so nothing resurrects a banned id;
//! 5. temperature; the log-softmax here is that of "processed" log probabilities;
//! 6. `top_k`, `top_p`, `min_p`, `typical_p`, each a cut of what the one before left;
//! 7. the draw, which is keyed by (seed, index) and has no state.
//!
//! The law: a row's token and log probabilities depend on its logits and its own parameters alone. Log probabilities are
//! one function of a distribution and an id, so they have the same bits whichever way they were asked for.

use penstock_types::{LogprobsRequest, PenaltyScope};

use crate::counts::TokenCounts;

/// How one row of logits becomes a token. `SampleParams { .., ..SampleParams::greedy() }` names only what is wanted.
///
/// Ids outside of the vocabulary have no effect in any list.
#[derive(Clone, Copy, Debug)]
pub struct SampleParams<'a> {
    /// The row of the logits.
    pub row: u32,
    /// Divides the logits; 0 is greedy, which takes the lowest id among the most likely.
    pub temperature: f32,
    /// Keep exactly so many of the most likely, the lowest ids first among equals; 0 keeps all.
    pub top_k: u32,
    /// Keep the fewest of the most likely that hold this share of the probability, the lowest ids first among equals; 1
    /// keeps all.
    pub top_p: f32,
    /// Keep those at least this share as likely as the most likely; 0 keeps all.
    pub min_p: f32,
    /// Keep the fewest that hold this share of the probability, first those whose surprise (minus the log of their
    /// probability) is nearest to its mean, the entropy; the lowest ids first among equals; 1 keeps all. Probabilities are
    /// those that the cuts before left. This is locally typical sampling (Meister et al. 2022, section 4).
    pub typical_p: f32,
    /// Divides positive logits of ids seen, multiplies negative ones; 1 changes nothing.
    pub repetition_penalty: f32,
    /// The tokens that `repetition_penalty` counts.
    pub repetition_penalty_scope: PenaltyScope,
    /// Subtracted once from the logit of each id that was generated.
    pub presence_penalty: f32,
    /// Subtracted from it as often as it was generated.
    pub frequency_penalty: f32,
    /// The tokens so far, as penalties ask for them.
    pub counts: &'a TokenCounts,
    /// Bans the id that would repeat a run of so many tokens of prompt and output; 0 bans none.
    pub no_repeat_ngram_size: u32,
    /// The prompt's tokens, for n-grams and bad words.
    pub prompt: &'a [u32],
    /// The tokens generated so far, likewise.
    pub generated: &'a [u32],
    /// Added to the logits of these ids.
    pub logit_bias: &'a [(u32, f32)],
    /// Only these ids, ascending.
    pub allowed: Option<&'a [u32]>,
    /// Never these.
    pub banned: &'a [u32],
    /// Sequences that must not come to be: the last id of each is banned where prompt and output end with the rest.
    pub bad_words: &'a [Vec<u32>],
    /// Never these either: what would end the text too early.
    pub suppressed: &'a [u32],
    /// Only ids whose bit is set, bit `id % 32` of word `id / 32`; those beyond the last word are not allowed.
    pub mask: Option<&'a [u32]>,
    /// The logits as processors left them, in place of the row. Raw log probabilities are still those of the row.
    pub processed: Option<&'a [f32]>,
    /// Key of the draw, with `index`.
    pub seed: u64,
    /// Number of the token within its request.
    pub index: u32,
    /// The token is known and only its log probability is wanted.
    pub given: Option<u32>,
    /// Which log probabilities are wanted.
    pub logprobs: Option<LogprobsRequest>,
}

impl SampleParams<'static> {
    /// The most likely id of row 0, and nothing else.
    pub fn greedy() -> Self {
        Self {
            row: 0,
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            typical_p: 1.0,
            repetition_penalty: 1.0,
            repetition_penalty_scope: PenaltyScope::All,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            counts: TokenCounts::none(),
            no_repeat_ngram_size: 0,
            prompt: &[],
            generated: &[],
            logit_bias: &[],
            allowed: None,
            banned: &[],
            bad_words: &[],
            suppressed: &[],
            mask: None,
            processed: None,
            seed: 0,
            index: 0,
            given: None,
            logprobs: None,
        }
    }
}

/// A chosen token.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sampled {
    /// Its id; no token where `is_exhausted`.
    pub token: u32,
    /// Log of its probability, or NaN if not asked for.
    pub logprob: f32,
    /// The most likely ids of the same distribution with theirs, the most likely first, the lowest id first among equals.
    /// Ids that the distribution rules out are not among them, so there may be fewer than asked for.
    pub top: Vec<(u32, f32)>,
    /// Whether there was nothing to choose from: every logit is minus infinity after the bans.
    pub is_exhausted: bool,
}
