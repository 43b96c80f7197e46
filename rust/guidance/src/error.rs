//! Errors of vocabularies, grammars and matchers.

use std::time::Duration;

/// Each error names the kind of grammar, the reason and, where there is one, the limit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GuidanceError {
    /// Masks cannot be computed for this vocabulary.
    #[error("vocabulary: {reason}")]
    Vocabulary { reason: String },
    /// The grammar is malformed, unsatisfiable, or uses an unsupported feature.
    #[error("{kind}: {reason}")]
    Invalid { kind: &'static str, reason: String },
    /// The schema has keywords or formats that are not supported, which a lenient schema may have.
    #[error("{kind}: {reason}")]
    Unsupported { kind: &'static str, reason: String },
    /// The grammar, or the mask of one token, exceeds a limit on work or memory.
    #[error("{kind} is too complex: {limit}")]
    TooComplex {
        kind: &'static str,
        /// The limit, and the measured value where it is known.
        limit: String,
    },
    /// Compilation exceeded its time limit.
    #[error("{kind} is too complex: not compiled within {limit:?}")]
    TimedOut { kind: &'static str, limit: Duration },
    /// Too many other grammars are queued. The grammar itself may be valid.
    #[error("{kind}: not compiled yet; {reason}")]
    Overloaded { kind: &'static str, reason: String },
    /// The caller stopped waiting before the grammar was compiled.
    #[error("{kind}: compilation cancelled by its caller")]
    Cancelled { kind: &'static str },
    /// No token of the vocabulary can follow, and the text may not end.
    #[error("{kind}: {reason}")]
    DeadEnd { kind: &'static str, reason: String },
    /// The grammar does not allow this token here. The matcher is unchanged.
    #[error("{kind}: token {token} is not allowed here")]
    Rejected { kind: &'static str, token: u32 },
    /// An internal failure of the library. The matcher is unusable; other matchers are not affected.
    #[error("{kind}: the grammar library failed: {reason}")]
    Library { kind: &'static str, reason: String },
}
