//! How much one request may cost.

use std::time::Duration;

/// Limits of a [`Compiler`](crate::Compiler) and of the guides that come from it.
///
/// All but the time are counts of work, so whether a grammar is within them does not depend on the machine or
/// on what else it is doing. The time is the last resort.
#[derive(Clone, Debug)]
pub struct Limits {
    /// The longest that a caller waits for a thread to take its grammar, and then again for it to be compiled.
    pub compile_time: Duration,
    /// Grammars that wait for a thread.
    pub queued_grammars: usize,
    /// Threads that compile, started when needed.
    pub workers: usize,
    /// Brackets of a grammar's source within each other.
    pub nesting: usize,
    /// Bytes of a grammar's source.
    pub source_bytes: usize,
    /// Steps of a recursion that the source may lead the library into: brackets within each other, one
    /// definition calling the next, properties of one object.
    pub recursion: usize,
    /// Bytes that combining parts of a JSON schema may copy: alternatives times the bytes each is combined with.
    pub copied_bytes: usize,
    /// Pairs of properties or alternatives of a JSON schema that are compared. Patterns of properties and properties
    /// that are counted weigh more.
    pub pairs: usize,
    /// Symbols in the productions of the compiled grammar.
    pub grammar_symbols: usize,
    /// Nodes of the automaton that recognises the grammar's terminals, before the first token.
    pub lexer_nodes: u64,
    /// States of that automaton in one sequence.
    pub lexer_states: usize,
    /// Bytes by which that automaton may grow in one sequence, as the library counts them when a mask is there. What
    /// schemas need in use stays below a tenth of the default; 128 sequences at the limit take 1 GiB.
    pub lexer_bytes: usize,
    /// Nodes that one mask may add to it: about 14 per microsecond.
    pub mask_nodes: u64,
    /// Items that the parser may make for one mask: about 20 per microsecond.
    pub mask_items: usize,
    /// Compiled grammars kept for the next request.
    pub cached_grammars: usize,
    /// Bytes that they take together, estimated.
    pub cached_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            compile_time: Duration::from_secs(5),
            queued_grammars: 64,
            workers: 2,
            nesting: 64,
            source_bytes: 1 << 20,
            recursion: 20_000,
            copied_bytes: 64 << 20,
            pairs: 1_000_000,
            grammar_symbols: 500_000,
            lexer_nodes: 300_000,
            lexer_states: 50_000,
            lexer_bytes: 8 << 20,
            mask_nodes: 200_000,
            mask_items: 50_000,
            cached_grammars: 1_024,
            cached_bytes: 256 << 20,
        }
    }
}
