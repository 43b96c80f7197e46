//! A compiled grammar, and the matcher that follows it for one sequence.

use std::collections::VecDeque;
use std::mem;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use llguidance::TokenParser;
use llguidance::api::StopReason;
use llguidance::earley::{BiasComputer, ParserRecognizer};
use toktrie::{SimpleVob, TokEnv, TokTrie};

use crate::library;
use crate::memory::{MatcherMemory, MemoryShare};
use crate::watchdog::{Watchdog, WatchedParser};
use crate::{GuidanceError, GuidanceLimits, Vocabulary};

/// Size of an automaton in bytes up to which the library has no large cache beside it.
const SMALL_AUTOMATON: usize = 128 << 10;

/// Maximum processor time of the first mask, for which the library builds most of the automaton.
const FIRST_MASK_TIME: Duration = Duration::from_secs(3);

/// The number of tokens that a new grammar is tried with.
const NUM_TRIED: usize = 2;

/// A grammar ready for use, shared by all its matchers.
pub struct CompiledGrammar {
    initial: Arc<InitialState>,
    bytes: usize,
}

/// The bounds that all matchers of a compiler have in common.
#[derive(Clone)]
pub(crate) struct MatcherBounds {
    pub(crate) memory: Arc<MatcherMemory>,
    pub(crate) watchdog: Arc<Watchdog>,
    /// See [`GuidanceLimits`].
    pub(crate) step_time: Duration,
    pub(crate) forced_time: Duration,
}

/// The state in which all matchers of a grammar start.
struct InitialState {
    kind: &'static str,
    vocabulary: Arc<Vocabulary>,
    /// At the start of the text. The automaton's states for the first mask exist.
    parser: TokenParser,
    complete: bool,
    /// Maximum size of one sequence's automaton, in bytes.
    max_bytes: usize,
    /// Estimated size of a copy.
    bytes: usize,
    bounds: MatcherBounds,
    /// The error of a call of a sequence that was late.
    late: OnceLock<GuidanceError>,
    /// See [`GuidanceLimits`].
    compared_items: usize,
    sequence_items: usize,
}

impl InitialState {
    /// Fails after a late call of a sequence.
    fn check(&self) -> Result<(), GuidanceError> {
        self.late.get().cloned().map_or(Ok(()), Err)
    }

    /// Copies a parser, within the memory of all.
    fn copy(&self, parser: &TokenParser, bytes: usize) -> Result<MatcherParser, GuidanceError> {
        let mut memory = self.bounds.memory.share();
        memory.resize(bytes).map_err(|limit| GuidanceError::TooComplex { kind: self.kind, limit })?;
        let mut parser = library::call(|| Box::new(parser.deep_clone()))
            .map_err(|reason| GuidanceError::Library { kind: self.kind, reason })?;
        let watched = self.bounds.watchdog.watch(&mut parser);
        Ok(MatcherParser { parser, memory, watched })
    }
}

impl CompiledGrammar {
    pub(crate) fn new(
        kind: &'static str,
        vocabulary: Arc<Vocabulary>,
        mut parser: TokenParser,
        source_bytes: usize,
        symbols: usize,
        limits: &GuidanceLimits,
        bounds: MatcherBounds,
    ) -> Result<Self, GuidanceError> {
        let watched = bounds.watchdog.watch(&mut parser);
        let first_mask = watched.call(FIRST_MASK_TIME, || {
            parser.start_without_prompt();
            let complete = parser.check_stop().ok()?;
            if !complete {
                parser.compute_mask().ok()?;
            }
            Some(complete)
        });
        if watched.is_late() {
            return Err(late_error(kind, FIRST_MASK_TIME));
        }
        let complete = first_mask.ok_or_else(|| stop_error(kind, &parser))?;
        let automaton = parser.parser.lexer_stats();
        let bytes = estimate_bytes(&parser);
        let initial = Arc::new(InitialState {
            kind,
            vocabulary,
            complete,
            max_bytes: automaton.num_bytes.saturating_add(limits.lexer_bytes),
            bytes,
            bounds,
            late: OnceLock::new(),
            compared_items: limits.compared_items,
            sequence_items: limits.sequence_items,
            parser,
        });
        // The factors were measured with small and large grammars.
        let compiled = Self { initial, bytes: bytes + 10 * source_bytes + 600 * symbols + 4_096 };
        compiled.try_first_tokens()?;
        Ok(compiled)
    }

    /// Follows the grammar for the first tokens, on one of the possible paths: a grammar that exceeds a limit there is
    /// refused before its request starts. Other errors of that path say nothing about the grammar.
    fn try_first_tokens(&self) -> Result<(), GuidanceError> {
        match self.follow_first_tokens() {
            Err(error @ GuidanceError::TooComplex { .. }) => Err(error),
            Ok(()) | Err(_) => Ok(()),
        }
    }

    fn follow_first_tokens(&self) -> Result<(), GuidanceError> {
        let mut matcher = self.start()?;
        let mut allowed = vec![0; self.initial.vocabulary.num_tokens().div_ceil(32)];
        for _ in 0..NUM_TRIED {
            matcher.mask(&mut allowed)?;
            let ends = self.initial.vocabulary.end_ids();
            ends.iter().for_each(|&end| clear(&mut allowed, end));
            let Some(word) = allowed.iter().position(|&word| word != 0) else { return Ok(()) };
            matcher.accept(word as u32 * 32 + allowed[word].trailing_zeros())?;
        }
        matcher.mask(&mut allowed)
    }

    /// Creates the matcher of one sequence. It copies the grammar's automaton and extends its own copy, so sequences
    /// neither wait for each other nor influence each other.
    ///
    /// # Errors
    /// [`GuidanceError::TooComplex`] if there is no room for it beside other sequences, [`GuidanceError::Library`] if
    /// the library fails.
    pub fn start(&self) -> Result<GrammarMatcher, GuidanceError> {
        GrammarMatcher::new(&self.initial)
    }

    /// Fails if a call of a sequence took too long.
    pub(crate) fn check(&self) -> Result<(), GuidanceError> {
        self.initial.check()
    }

    /// Estimated size in memory.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Estimated size of a new matcher in memory, which [`start`](Self::start) copies.
    pub fn start_bytes(&self) -> usize {
        self.initial.bytes
    }
}

/// The estimated size of a parser in memory, without what it shares with its copies. The library counts only the
/// automaton. The factors for the rest were measured with small and large grammars. Beside a large automaton, the
/// library has a cache that is five times as large.
fn estimate_bytes(parser: &TokenParser) -> usize {
    let automaton = parser.parser.lexer_stats();
    let cache = 5 * automaton.num_bytes.saturating_sub(SMALL_AUTOMATON);
    let items = 8 * parser.parser.stats().all_items;
    automaton.num_bytes + cache + 64 * automaton.num_ast_nodes + items
}

/// Computes the allowed next tokens of one sequence.
///
/// Its results depend only on the accepted tokens, not on which masks were computed. So a matcher that accepts all
/// tokens of another matcher at once continues exactly like the other.
///
/// An error other than [`GuidanceError::Rejected`] is final: every later call returns it again.
pub struct GrammarMatcher {
    initial: Arc<InitialState>,
    parser: MatcherParser,
    /// Tokens that must follow, as the tokenizer splits them. The split depends on where it starts, so it is computed
    /// after every accepted token, not on request.
    forced: VecDeque<u32>,
    /// Only an end id may follow.
    complete: bool,
    failed: Option<GuidanceError>,
    /// Accepted tokens without end ids.
    accepted: Vec<u32>,
    /// Parser items of their rows.
    num_items: usize,
    /// The mask of the next token has been computed.
    has_mask: bool,
    /// A token was accepted without its mask.
    has_skipped_mask: bool,
}

/// The parser of a matcher, with its part of what all matchers share.
struct MatcherParser {
    parser: Box<TokenParser>,
    memory: MemoryShare,
    watched: WatchedParser,
}

impl GrammarMatcher {
    fn new(initial: &Arc<InitialState>) -> Result<Self, GuidanceError> {
        let mut matcher = Self {
            initial: Arc::clone(initial),
            parser: initial.copy(&initial.parser, initial.bytes)?,
            forced: VecDeque::new(),
            complete: initial.complete,
            failed: None,
            accepted: Vec::new(),
            num_items: 0,
            has_mask: false,
            has_skipped_mask: false,
        };
        matcher.update_forced()?;
        Ok(matcher)
    }

    /// Copies the matcher. The copies do not influence each other.
    ///
    /// # Errors
    /// Those of [`CompiledGrammar::start`].
    pub fn fork(&self) -> Result<Self, GuidanceError> {
        let parser = &self.parser.parser;
        Ok(Self {
            initial: Arc::clone(&self.initial),
            parser: self.initial.copy(parser, estimate_bytes(parser))?,
            forced: self.forced.clone(),
            complete: self.complete,
            failed: self.failed.clone(),
            accepted: self.accepted.clone(),
            num_items: self.num_items,
            has_mask: self.has_mask,
            has_skipped_mask: self.has_skipped_mask,
        })
    }

    /// Sets the bits of the allowed tokens and clears all others: token `id` is bit `id % 32` of word `id / 32`. Words
    /// beyond the vocabulary are cleared; tokens beyond the words are left out. If text is forced, its next token, as
    /// the tokenizer splits it, is the only one allowed.
    ///
    /// # Errors
    /// [`GuidanceError::DeadEnd`] if no token is allowed, [`GuidanceError::TooComplex`] if the mask exceeds a limit,
    /// [`GuidanceError::Library`] if the library fails.
    pub fn mask(&mut self, allowed: &mut [u32]) -> Result<(), GuidanceError> {
        self.check()?;
        self.retry_with_masks(|matcher| matcher.limited(|matcher| matcher.fill_mask(allowed)))?;
        self.has_mask = true;
        Ok(())
    }

    /// Advances by one token. Tokens that match the grammar but are not in the mask, such as another split of forced
    /// text, are accepted too. An end id is accepted wherever the text may end, and again after that.
    ///
    /// # Errors
    /// [`GuidanceError::Rejected`] if the token is not allowed, which leaves the matcher unchanged; otherwise those of
    /// [`mask`](Self::mask).
    pub fn accept(&mut self, token: u32) -> Result<(), GuidanceError> {
        self.check()?;
        self.retry_with_masks(|matcher| matcher.limited(|matcher| matcher.accept_once(token)))?;
        self.has_skipped_mask |= !self.has_mask;
        self.has_mask = false;
        Ok(())
    }

    /// Appends the tokens that must follow, as the tokenizer splits them. They can be accepted without masks. A long
    /// forced text is returned in parts. There are none after an error.
    pub fn forced_tokens(&self, tokens: &mut Vec<u32>) {
        if self.failed.is_none() {
            tokens.extend(&self.forced);
        }
    }

    /// Whether only an end id may follow.
    pub fn is_complete(&self) -> bool {
        self.complete
    }

    fn fill_mask(&mut self, allowed: &mut [u32]) -> Result<(), GuidanceError> {
        allowed.fill(0);
        if let Some(&next) = self.forced.front() {
            set(allowed, next);
        } else if self.complete {
            self.initial.vocabulary.end_ids().iter().for_each(|&end| set(allowed, end));
        } else {
            let mask = self.run(|parser| parser.compute_mask().ok())?;
            let words = mask.as_slice();
            let common = words.len().min(allowed.len());
            allowed[..common].copy_from_slice(&words[..common]);
            let initial = Arc::clone(&self.initial);
            // An end id that the grammar names is allowed only where the text may end.
            if !self.is_accepting()? {
                initial.vocabulary.end_ids().iter().for_each(|&end| clear(allowed, end));
            }
            // A terminal that excludes some bytes still contains the byte with which the library marks special tokens.
            for &special in initial.vocabulary.special_ids() {
                if is_set(allowed, special) && !self.can_accept(special)? {
                    clear(allowed, special);
                }
            }
            if allowed.iter().all(|&word| word == 0) {
                return Err(self.fail(dead_end_error(initial.kind, &self.parser.parser)));
            }
            let bytes = self.parser.parser.parser.lexer_stats().num_bytes;
            if bytes > initial.max_bytes {
                let limit = format!("the automaton has {bytes} bytes; the limit is {}", initial.max_bytes);
                return Err(self.fail_too_complex(limit));
            }
        }
        Ok(())
    }

    fn accept_once(&mut self, token: u32) -> Result<(), GuidanceError> {
        self.reset_fuel()?;
        if self.forced.front() == Some(&token) {
            self.forced.pop_front();
            return self.advance(token);
        }
        let ends = self.initial.vocabulary.end_ids().contains(&token);
        if ends && self.is_accepting()? {
            self.complete = true;
            return Ok(());
        }
        let known = (token as usize) < self.initial.vocabulary.num_tokens();
        if ends || self.complete || !known || !self.can_accept(token)? {
            return Err(GuidanceError::Rejected { kind: self.initial.kind, token });
        }
        self.forced.clear();
        self.advance(token)
    }

    /// Runs a step. Each mask builds a part of the automaton within its own limits; after skipped masks, one step may
    /// have to build all their parts. If that exceeds the limits, the accepted tokens are replayed with their masks and
    /// the step is run again.
    fn retry_with_masks(
        &mut self,
        mut step: impl FnMut(&mut Self) -> Result<(), GuidanceError>,
    ) -> Result<(), GuidanceError> {
        let outcome = step(self);
        if !(self.has_skipped_mask && matches!(outcome, Err(GuidanceError::TooComplex { .. }))) {
            return outcome;
        }
        let accepted = mem::take(&mut self.accepted);
        *self = Self::new(&self.initial)?;
        let mut mask = vec![0; self.initial.vocabulary.num_tokens().div_ceil(32)];
        for token in accepted {
            self.mask(&mut mask)?;
            self.accept(token)?;
        }
        step(self)
    }

    fn can_accept(&mut self, token: u32) -> Result<bool, GuidanceError> {
        Ok(self.run(|parser| parser.validate_tokens_raw(&[token]).ok())? == 1)
    }

    fn is_accepting(&mut self) -> Result<bool, GuidanceError> {
        Ok(self.complete || self.run(|parser| Some(parser.is_accepting()))?)
    }

    fn update_forced(&mut self) -> Result<(), GuidanceError> {
        if self.forced.is_empty() && !self.complete {
            let limit = self.initial.bounds.forced_time;
            let tokens = self.run_within(limit, |parser| Some(parser.compute_ff_tokens()))?;
            self.forced = tokens
                .into_iter()
                .take_while(|token| !self.initial.vocabulary.end_ids().contains(token))
                .collect();
        }
        Ok(())
    }

    fn advance(&mut self, token: u32) -> Result<(), GuidanceError> {
        let (items, _) = self.num_created();
        self.complete = self.run(|parser| {
            parser.consume_token(token).ok()?;
            parser.check_stop().ok()
        })?;
        self.accepted.push(token);
        self.num_items += self.num_created().0.saturating_sub(items);
        if self.num_items > self.initial.sequence_items {
            let (items, limit) = (self.num_items, self.initial.sequence_items);
            return Err(self.fail_too_complex(format!(
                "{} tokens have {items} parser items; the limit is {limit}",
                self.accepted.len()
            )));
        }
        self.update_forced()
    }

    /// Resets the fuel of the library's lexer. The library does this only when it computes a mask, so without it all
    /// tokens accepted between two masks would share the fuel of one. Each token therefore starts with an empty mask.
    fn reset_fuel(&mut self) -> Result<(), GuidanceError> {
        let empty = EmptyMask(Arc::clone(self.initial.vocabulary.environment()));
        // Masks with a prefix are not cached by the library.
        self.run(|parser| Some(parser.parser.compute_bias(&empty, b" ")))?;
        Ok(())
    }

    fn check(&self) -> Result<(), GuidanceError> {
        self.failed.clone().map_or(Ok(()), Err)
    }

    /// Runs a step, after which it fails if the step has compared too many parser items, or there is no room for the
    /// matcher beside others.
    fn limited(
        &mut self,
        step: impl FnOnce(&mut Self) -> Result<(), GuidanceError>,
    ) -> Result<(), GuidanceError> {
        let before = self.num_created();
        step(self)?;
        let after = self.num_created();
        let (items, rows) = (after.0.saturating_sub(before.0), after.1.saturating_sub(before.1));
        let compared = items.saturating_mul(items) / rows.max(1);
        let limit = self.initial.compared_items;
        if compared > limit {
            let limit = format!("a step compares {compared} parser items; the limit is {limit}");
            return Err(self.fail_too_complex(limit));
        }
        let MatcherParser { parser, memory, .. } = &mut self.parser;
        memory.resize(estimate_bytes(parser)).map_err(|limit| self.fail_too_complex(limit))
    }

    /// The numbers of parser items and of rows that have been created.
    fn num_created(&self) -> (usize, usize) {
        let stats = self.parser.parser.parser.stats();
        (stats.all_items, stats.rows)
    }

    /// Calls the library. A failure is final.
    fn run<T>(&mut self, work: impl FnOnce(&mut TokenParser) -> Option<T>) -> Result<T, GuidanceError> {
        self.run_within(self.initial.bounds.step_time, work)
    }

    /// Calls the library for at most this processor time. After a late call of a sequence, those with the same grammar
    /// make none.
    fn run_within<T>(
        &mut self,
        limit: Duration,
        work: impl FnOnce(&mut TokenParser) -> Option<T>,
    ) -> Result<T, GuidanceError> {
        if let Err(error) = self.initial.check() {
            return Err(self.fail(error));
        }
        let MatcherParser { parser, watched, .. } = &mut self.parser;
        let outcome = watched.call(limit, || library::call(|| work(parser)));
        let InitialState { kind, late, .. } = &*self.initial;
        let error = match outcome {
            _ if watched.is_late() => late.get_or_init(|| late_error(kind, limit)).clone(),
            Ok(Some(value)) => return Ok(value),
            Ok(None) => stop_error(kind, parser),
            Err(reason) => GuidanceError::Library { kind, reason },
        };
        Err(self.fail(error))
    }

    fn fail_too_complex(&mut self, limit: String) -> GuidanceError {
        self.fail(GuidanceError::TooComplex { kind: self.initial.kind, limit })
    }

    fn fail(&mut self, error: GuidanceError) -> GuidanceError {
        self.failed = Some(error.clone());
        error
    }
}

/// Computes an empty mask.
struct EmptyMask(TokEnv);

impl BiasComputer for EmptyMask {
    fn compute_bias(&self, _: &mut ParserRecognizer<'_>, _: &[u8]) -> SimpleVob {
        self.trie().alloc_token_set()
    }

    fn trie(&self) -> &TokTrie {
        self.0.tok_trie()
    }
}

fn is_set(words: &[u32], token: u32) -> bool {
    words.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
}

fn set(words: &mut [u32], token: u32) {
    if let Some(word) = words.get_mut(token as usize / 32) {
        *word |= 1 << (token % 32);
    }
}

fn clear(words: &mut [u32], token: u32) {
    if let Some(word) = words.get_mut(token as usize / 32) {
        *word &= !(1 << (token % 32));
    }
}

fn late_error(kind: &'static str, limit: Duration) -> GuidanceError {
    let limit = format!(
        "a step takes more than {limit:?}; text without an end may be forced, as by a terminal that is followed by one of \
         its own characters"
    );
    GuidanceError::TooComplex { kind, limit }
}

fn dead_end_error(kind: &'static str, parser: &TokenParser) -> GuidanceError {
    let reason =
        format!("after {} tokens, no token is allowed and the text may not end", parser.num_tokens());
    GuidanceError::DeadEnd { kind, reason }
}

/// The error of a parser that has stopped.
fn stop_error(kind: &'static str, parser: &TokenParser) -> GuidanceError {
    let reason = || parser.error_message().map_or_else(String::new, |message| library::reason(&message));
    match parser.stop_reason() {
        StopReason::NoExtensionBias => dead_end_error(kind, parser),
        StopReason::LexerTooComplex | StopReason::ParserTooComplex => {
            GuidanceError::TooComplex { kind, limit: reason() }
        }
        _ => GuidanceError::Library { kind, reason: reason() },
    }
}
