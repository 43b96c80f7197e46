//! The draft tokens of a sequence: those it may verify in its next row, and the number in flight.
//!
//! A draft is not a token of the sequence: it counts neither among its tokens nor among the planned ones. When the row
//! is done, the accepted drafts have been generated and their positions are computed; the rejected ones leave no trace.
//!
//! Predictions are kept from one token to the next and compared with the tokens that are sampled, whether or not they
//! were drafted. So a sequence with bad predictions costs no rows, and resumes drafting once its predictions become
//! good.

use crate::drafts::{AcceptanceRate, MAX_FORCED, look_up};
use crate::prefix_cache::Tokens;

#[derive(Debug)]
pub(super) struct Drafting {
    /// The most tokens that are predicted; 0 without speculative decoding.
    max_predicted: usize,
    /// The tokens that are likely to follow the last generated token; empty if some are forced.
    predicted: Vec<u32>,
    acceptance: AcceptanceRate,
    /// The only tokens that the grammar allows after the last generated token, in order.
    forced: Vec<u32>,
    /// Drafts in flight. No row follows a row with drafts.
    pub(super) num_in_flight: usize,
}

impl Drafting {
    pub(super) fn new(max_predicted: usize) -> Self {
        let predicted = Vec::with_capacity(max_predicted);
        let acceptance = AcceptanceRate::new();
        Self { max_predicted, predicted, acceptance, forced: Vec::new(), num_in_flight: 0 }
    }

    /// Compares a generated token with the prediction.
    pub(super) fn observe(&mut self, token: u32) {
        let Some(prediction) = self.predicted.first() else { return };
        let is_right = *prediction == token;
        self.acceptance.observe(is_right);
        // The predictions after a wrong one say nothing.
        let num_judged = if is_right { 1 } else { self.predicted.len() };
        self.predicted.drain(..num_judged);
    }

    /// Predicts what follows `tokens`, after which the grammar allows only `forced`.
    pub(super) fn update(&mut self, tokens: Tokens<'_>, forced: &[u32]) {
        self.forced.clear();
        self.forced.extend_from_slice(&forced[..forced.len().min(MAX_FORCED)]);
        self.predicted.clear();
        if self.max_predicted > 0 && forced.is_empty() {
            look_up(tokens, self.max_predicted, &mut self.predicted);
        }
    }

    /// The number of drafts worth verifying while `num_running` sequences run, once `num_tokens` more tokens are known.
    pub(super) fn num_wanted(&self, num_tokens: usize, num_running: usize) -> usize {
        if !self.forced.is_empty() {
            return self.forced.len().saturating_sub(num_tokens);
        }
        match self.predicted.len().saturating_sub(num_tokens) {
            0 => 0,
            num_predicted => self.acceptance.num_drafts(num_predicted, num_running),
        }
    }

    /// The tokens that drafts are taken from.
    pub(super) fn candidates(&self) -> &[u32] {
        if self.forced.is_empty() { &self.predicted } else { &self.forced }
    }
}
