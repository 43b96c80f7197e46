//! A sequence's guesses of its next tokens, in its next row and in the one in flight.
//!
//! A draft is no token of the sequence: it counts neither among its tokens nor among those that are planned. When the row
//! is answered, those that were confirmed are generated, and their positions computed; the others were never there.

use super::Sequence;
use crate::drafts::{Confidence, MAX_FORCED, look_up};
use crate::prefix::Tokens;

#[derive(Debug)]
pub(super) struct Drafting {
    /// Of its guesses.
    pub(super) confidence: Confidence,
    /// What can only follow its last generated token, if its grammar is right about that.
    forced: Vec<u32>,
    /// Drafts in flight; no row follows theirs.
    pub(super) num_drafts: usize,
    /// Whether they were forced.
    are_forced: bool,
}

impl Drafting {
    pub(super) fn new(num_speculative_tokens: usize) -> Self {
        let confidence = Confidence::new(num_speculative_tokens);
        Self { confidence, forced: Vec::new(), num_drafts: 0, are_forced: false }
    }

    /// So many of the drafts in flight were confirmed, beside so many rows.
    pub(super) fn verified(&mut self, num_confirmed: usize, num_rows: usize) {
        let num_drafts = std::mem::take(&mut self.num_drafts);
        if !self.are_forced {
            self.confidence.verified(num_drafts, num_confirmed, num_rows);
        }
    }

    /// What is in flight will not be counted on.
    pub(super) fn forget_flights(&mut self) {
        self.num_drafts = 0;
    }
}

impl Sequence {
    /// What its grammar leaves no choice about, after the last generated token.
    pub(crate) fn expect(&mut self, forced: &[u32]) {
        let forced = &forced[..forced.len().min(MAX_FORCED)];
        self.drafting.forced.clear();
        self.drafting.forced.extend_from_slice(forced);
    }

    /// Whether its next row may have drafts, if there is room, or the one in flight has: it cannot follow its own sample
    /// then.
    pub(crate) fn is_drafting(&self, num_rows: usize, has_room: bool) -> bool {
        let Drafting { confidence, forced, num_drafts, .. } = &self.drafting;
        if *num_drafts > 0 {
            return true;
        }
        let has_guesses = || !self.generated.is_empty() && confidence.num_drafts(num_rows) > 0;
        // Those that are forced were when the last token came, and some have been sampled since.
        let has_drafts = forced.len() > self.num_sampling || has_guesses();
        let is_last_next = self.num_planned + 1 >= self.num_tokens();
        has_room && has_drafts && is_last_next && !self.is_paused && self.num_left() > 1
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
        let Drafting { confidence, forced, are_forced, .. } = &mut self.drafting;
        *are_forced = !forced.is_empty();
        let wish = if *are_forced { forced.len() } else { confidence.num_drafts(num_rows) };
        let mut num_drafts = wish.min(most).min(self.num_left().saturating_sub(1));
        while num_drafts > 0 && !self.outbox.writer().has_room_for(num_drafts + 1) {
            num_drafts -= 1;
        }
        if num_drafts == 0 {
            return;
        }
        let Drafting { confidence, forced, are_forced, .. } = &mut self.drafting;
        if *are_forced {
            return drafts.extend_from_slice(&forced[..num_drafts]);
        }
        look_up(Tokens { prompt: &self.request.prompt, generated: &self.generated }, num_drafts, drafts);
        if drafts.is_empty() {
            confidence.missed(num_rows);
        }
    }
}
