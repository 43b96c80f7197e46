//! A sequence's guesses of its next tokens, in its next row and in the one in flight.
//!
//! A draft is no token of the sequence: it counts neither among its tokens nor among those that are planned. When the row
//! is answered, those that were confirmed are generated, and their positions computed; the others were never there.
//!
//! Whether or not they are drafted, guesses are there from one token to the next, which shows whether they were right. So who
//! guesses badly costs nobody a row, and is found out once it guesses well.

use super::Sequence;
use crate::drafts::{Confidence, MAX_FORCED, look_up};
use crate::prefix::Tokens;

#[derive(Debug)]
pub(super) struct Drafting {
    /// Most guesses at once; 0 if it makes none.
    most: usize,
    /// What probably follows its last generated token; empty where something is forced.
    guesses: Vec<u32>,
    /// In the guesses.
    confidence: Confidence,
    /// What can only follow its last generated token, if its grammar is right about that.
    forced: Vec<u32>,
    /// Drafts in flight; no row follows theirs.
    pub(super) num_drafts: usize,
}

impl Drafting {
    pub(super) fn new(most: usize) -> Self {
        let guesses = Vec::with_capacity(most);
        Self { most, guesses, confidence: Confidence::new(), forced: Vec::new(), num_drafts: 0 }
    }

    /// This token was generated.
    pub(super) fn token_came(&mut self, token: u32) {
        let Some(guess) = self.guesses.first() else { return };
        let is_right = *guess == token;
        self.confidence.guessed(is_right);
        // Those after a mistake say nothing.
        let num_settled = if is_right { 1 } else { self.guesses.len() };
        self.guesses.drain(..num_settled);
    }

    /// How many drafts it wishes for while `num_rows` sequences run, once `num_tokens` more tokens have come.
    fn wish(&self, num_tokens: usize, num_rows: usize) -> usize {
        if !self.forced.is_empty() {
            return self.forced.len().saturating_sub(num_tokens);
        }
        match self.guesses.len().saturating_sub(num_tokens) {
            0 => 0,
            num_guesses => self.confidence.num_drafts(num_guesses, num_rows),
        }
    }

    /// What it drafts from.
    fn source(&self) -> &[u32] {
        if self.forced.is_empty() { &self.guesses } else { &self.forced }
    }

    /// What is in flight will not be counted on.
    pub(super) fn forget_flights(&mut self) {
        self.num_drafts = 0;
    }
}

impl Sequence {
    /// Looks ahead from the last generated token, after which the grammar leaves no choice about `forced`.
    pub(crate) fn look_ahead(&mut self, forced: &[u32]) {
        let Drafting { most, guesses, forced: known, .. } = &mut self.drafting;
        known.clear();
        known.extend_from_slice(&forced[..forced.len().min(MAX_FORCED)]);
        guesses.clear();
        if *most > 0 && forced.is_empty() {
            look_up(Tokens { prompt: &self.request.prompt, generated: &self.generated }, *most, guesses);
        }
    }

    /// Whether its next row will probably have drafts, if there is room, or the one in flight has: it cannot follow its own
    /// sample then.
    pub(crate) fn is_drafting(&self, num_rows: usize, has_room: bool) -> bool {
        if self.drafting.num_drafts > 0 {
            return true;
        }
        let is_last_next = self.num_planned + 1 >= self.num_tokens();
        // What was looked ahead for followed the last token that has come, and some have been sampled since.
        let has_drafts = || self.drafting.wish(self.num_sampling, num_rows) > 0;
        has_room && is_last_next && !self.is_paused && self.num_left() > 1 && has_drafts()
    }

    /// Tokens it may still generate, besides those on their way.
    fn num_left(&self) -> usize {
        self.max_new_tokens - self.generated.len() - self.num_sampling
    }

    /// Appends to `drafts` what its next row, which computes `num_tokens` tokens, guesses beyond them: at most so many, and no
    /// more than it may generate and its consumer has room for. Nothing if the row does not end with its last token, or
    /// that is not known.
    pub(crate) fn draft(&mut self, num_tokens: usize, most: usize, num_rows: usize, drafts: &mut Vec<u32>) {
        if self.num_coming() > 0
            || self.num_planned + num_tokens < self.num_tokens()
            || self.generated.is_empty()
        {
            return;
        }
        let wish = self.drafting.wish(0, num_rows);
        let mut num_drafts = wish.min(most).min(self.num_left().saturating_sub(1));
        while num_drafts > 0 && !self.outbox.writer().has_room_for(num_drafts + 1) {
            num_drafts -= 1;
        }
        drafts.extend_from_slice(&self.drafting.source()[..num_drafts]);
    }
}
