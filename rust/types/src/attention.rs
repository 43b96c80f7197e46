//! The inputs of an attention operation.

use std::ops::Range;

/// The queries of one sequence in a step: consecutive positions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttentionRow {
    /// The row of the first query.
    pub first_query: usize,
    /// The number of queries.
    pub num_queries: usize,
    /// The position of the first query.
    pub start: usize,
    /// The sequence's entries in the block table; the first of them holds position 0. They cover every position up to
    /// the last query's. Entries entirely before the window are not read.
    pub blocks: Range<usize>,
}

/// The parameters of an attention layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionParams {
    /// Multiplies the scores.
    pub scale: f32,
    /// The query at position p sees only positions above p - window; without a window, all up to p.
    pub window: Option<usize>,
    /// Scores become cap * tanh(score / cap).
    pub softcap: Option<f32>,
}
