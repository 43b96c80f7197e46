//! What can be wrong with a vocabulary, a grammar or a token that a guide is given.

use std::time::Duration;

/// An error of this crate: each names the kind of grammar, the reason and, where there is one, the limit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GuidanceError {
    /// The vocabulary is not one that masks can be computed for.
    #[error("vocabulary: {reason}")]
    Vocabulary {
        /// What is wrong with it.
        reason: String,
    },
    /// The grammar is wrong, contradicts itself, or asks for what is not supported.
    #[error("{what}: {reason}")]
    Invalid {
        /// The kind of grammar.
        what: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// The grammar, or the mask of one token, needs more than one request may take.
    #[error("{what} is too complex: {limit}")]
    TooComplex {
        /// The kind of grammar.
        what: &'static str,
        /// The limit, and by how much it was missed where that is known.
        limit: String,
    },
    /// Compiling the grammar took longer than it may.
    #[error("{what} is too complex: not compiled within {limit:?}")]
    TimedOut {
        /// The kind of grammar.
        what: &'static str,
        /// The time limit.
        limit: Duration,
    },
    /// Too many other grammars come first. Nothing is wrong with this one.
    #[error("{what}: not compiled yet; {reason}")]
    Overloaded {
        /// The kind of grammar.
        what: &'static str,
        /// How many, or for how long.
        reason: String,
    },
    /// Whoever asked for the grammar wants it no more.
    #[error("{what}: nobody waits for it any more")]
    Abandoned {
        /// The kind of grammar.
        what: &'static str,
    },
    /// The text so far cannot be brought to an end: no token of the vocabulary may follow.
    #[error("{what}: {reason}")]
    DeadEnd {
        /// The kind of grammar.
        what: &'static str,
        /// Where the end is.
        reason: String,
    },
    /// The token may not follow. The guide stays as it was.
    #[error("{what}: token {token} may not follow")]
    Refused {
        /// The kind of grammar.
        what: &'static str,
        /// The token.
        token: u32,
    },
    /// The library failed where it never should; the guide is of no more use, others are not affected.
    #[error("{what}: the grammar library failed: {reason}")]
    Library {
        /// The kind of grammar.
        what: &'static str,
        /// What it said.
        reason: String,
    },
}
