//! Limits on the cost of a grammar.

use std::time::Duration;

/// Limits of a [`GrammarCompiler`](crate::GrammarCompiler) and of its matchers.
///
/// All limits except the times are counts of work, so the decision does not depend on the machine or its load. The time
/// limits are the last resort.
#[derive(Clone, Debug)]
pub struct GuidanceLimits {
    /// Maximum time a caller waits for a worker thread, and again for the compilation itself.
    pub compile_time: Duration,
    /// Maximum processor time of one call of the library. Those within the other limits take milliseconds.
    pub step_time: Duration,
    /// Maximum processor time to find the tokens that must follow, which may be without an end.
    pub forced_time: Duration,
    /// Maximum number of grammars in the queue.
    pub queued_grammars: usize,
    /// Maximum number of worker threads. They start on demand. While compilations exceed their time limit, there are as
    /// many more, up to twice the number.
    pub workers: usize,
    /// Maximum nesting depth of brackets in a source.
    pub nesting: usize,
    /// Maximum size of a source, in bytes.
    pub source_bytes: usize,
    /// Maximum recursion depth a source can cause in the library: nested brackets, chained definitions, properties of
    /// one object.
    pub recursion: usize,
    /// Maximum number of bytes copied to combine parts of a JSON schema: alternatives times the bytes each is combined
    /// with.
    pub copied_bytes: usize,
    /// Maximum number of compared pairs of properties or alternatives of a JSON schema. Pattern properties and counted
    /// properties have a higher weight.
    pub pairs: usize,
    /// Maximum number of symbols in the productions of a compiled grammar.
    pub grammar_symbols: usize,
    /// Maximum number of nodes of the lexer automaton before the first token.
    pub lexer_nodes: u64,
    /// Maximum number of lexer states in one sequence.
    pub lexer_states: usize,
    /// Maximum growth of the lexer automaton in one sequence, in bytes as the library counts them after a mask. Typical
    /// schemas stay below a tenth of the default.
    pub lexer_bytes: usize,
    /// Maximum number of lexer nodes created by one mask. About 14 per microsecond.
    pub mask_nodes: u64,
    /// Maximum number of parser items created by one mask. About 20 per microsecond.
    pub mask_items: usize,
    /// Maximum number of parser items in a row; a lexeme begins a row. The library compares each item with the others.
    pub row_items: usize,
    /// Maximum number of compared parser items of one mask, and of one token: the square of the items of a row, summed
    /// over its rows.
    pub compared_items: usize,
    /// Maximum number of parser items of the tokens of one sequence, of 8 bytes each. Schemas of configuration files
    /// have up to 7 a token on average, and 425 in one token.
    pub sequence_items: usize,
    /// Maximum estimated size of all matchers, in bytes. One has up to a quarter of what the others leave.
    pub matcher_bytes: usize,
    /// Maximum number of cached grammars.
    pub cached_grammars: usize,
    /// Maximum estimated size of all cached grammars, in bytes.
    pub cached_bytes: usize,
}

impl GuidanceLimits {
    /// The number of worker threads without those of compilations that exceed the time limit.
    pub(crate) fn max_workers(&self) -> usize {
        self.workers.max(1)
    }
}

impl Default for GuidanceLimits {
    fn default() -> Self {
        Self {
            compile_time: Duration::from_secs(5),
            step_time: Duration::from_secs(1),
            forced_time: Duration::from_millis(100),
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
            mask_items: 20_000,
            row_items: 1_000,
            compared_items: 1_000_000,
            sequence_items: 4_000_000,
            matcher_bytes: 1 << 30,
            cached_grammars: 1_024,
            cached_bytes: 256 << 20,
        }
    }
}
