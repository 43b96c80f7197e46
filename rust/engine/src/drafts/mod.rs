//! Drafts: guesses of the tokens that a sequence will generate, to be verified by the next step. Where they come from
//! (`ngram`), and how many are worth while (`confidence`).

mod confidence;
mod ngram;

pub(crate) use confidence::Confidence;
pub(crate) use ngram::look_up;

/// Most drafts of a row that a grammar forces.
pub(crate) const MAX_FORCED: usize = 16;
