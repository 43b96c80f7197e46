//! [`EncodeCheck`]: the end of an encoding that is not wanted any more or has too many tokens.

use std::cell::{Cell, RefCell};
use std::fmt;

/// Number of words between two cancellation checks: about a millisecond of encoding.
const WORDS_PER_CHECK: u32 = 256;

/// The encoding was cancelled.
#[derive(Debug)]
pub(crate) struct Cancelled;

impl fmt::Display for Cancelled {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("cancelled")
    }
}

impl std::error::Error for Cancelled {}

/// The text has more tokens than may be.
#[derive(Debug)]
pub(crate) struct TooManyTokens;

impl fmt::Display for TooManyTokens {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("too many tokens")
    }
}

impl std::error::Error for TooManyTokens {}

/// Counts tokens up to a maximum.
pub(crate) struct TokenCount {
    left: Cell<usize>,
}

impl TokenCount {
    /// Counts tokens, or words that have a token each.
    pub(crate) fn add(&self, count: usize) -> Result<(), TooManyTokens> {
        self.left.set(self.left.get().checked_sub(count).ok_or(TooManyTokens)?);
        Ok(())
    }
}

/// Checks at intervals whether an encoding is still wanted. Has the maximum number of tokens.
pub(crate) struct EncodeCheck<'a> {
    is_wanted: RefCell<&'a mut dyn FnMut() -> bool>,
    words_left: Cell<u32>,
    max_tokens: usize,
}

impl<'a> EncodeCheck<'a> {
    pub(crate) fn new(is_wanted: &'a mut dyn FnMut() -> bool, max_tokens: usize) -> Self {
        Self { is_wanted: RefCell::new(is_wanted), words_left: Cell::new(WORDS_PER_CHECK), max_tokens }
    }

    /// Counts one word of the interval.
    pub(crate) fn count_word(&self) -> Result<(), Cancelled> {
        let left = self.words_left.get() - 1;
        self.words_left.set(if left == 0 { WORDS_PER_CHECK } else { left });
        if left > 0 || (self.is_wanted.borrow_mut())() { Ok(()) } else { Err(Cancelled) }
    }

    /// A count of the text's tokens, from zero.
    pub(crate) fn token_count(&self) -> TokenCount {
        TokenCount { left: Cell::new(self.max_tokens) }
    }
}
