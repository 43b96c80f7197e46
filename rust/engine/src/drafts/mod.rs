//! Draft tokens: predictions of the tokens that a sequence will generate, which the next step verifies. Where they come
//! from (`ngram`) and how many are worth verifying (`acceptance`).

mod acceptance;
mod ngram;

pub(crate) use acceptance::AcceptanceRate;
pub(crate) use ngram::look_up;

/// The most drafts of a row that a grammar forces.
pub(crate) const MAX_FORCED: usize = 16;
