//! A compiled grammar, and the walk of one sequence through it.

use std::collections::VecDeque;
use std::mem;
use std::sync::Arc;

use llguidance::TokenParser;
use llguidance::api::StopReason;
use llguidance::earley::{BiasComputer, ParserRecognizer};
use toktrie::{SimpleVob, TokEnv, TokTrie};

use crate::library;
use crate::{GuidanceError, Vocabulary};

/// A grammar ready for use, shared by all sequences that follow it.
pub struct Compiled {
    origin: Arc<Origin>,
    bytes: usize,
}

/// Where all guides of a grammar begin.
struct Origin {
    what: &'static str,
    vocabulary: Arc<Vocabulary>,
    /// At the beginning of the text, with what the first mask needed already built.
    parser: TokenParser,
    complete: bool,
    /// The most that the automaton of one sequence may take.
    max_bytes: usize,
}

impl Compiled {
    pub(crate) fn new(
        what: &'static str,
        vocabulary: Arc<Vocabulary>,
        mut parser: TokenParser,
        source_bytes: usize,
        symbols: usize,
        grown_bytes: usize,
    ) -> Result<Self, GuidanceError> {
        parser.start_without_prompt();
        let complete = parser.check_stop().map_err(|_| stopped(what, &parser))?;
        if !complete {
            parser.compute_mask().map_err(|_| stopped(what, &parser))?;
        }
        let automaton = parser.parser.lexer_stats();
        // The library counts its automaton alone. What the rest takes was measured, over small and large grammars.
        let rest = 64 * automaton.num_ast_nodes + 10 * source_bytes + 600 * symbols + 4_096;
        let bytes = automaton.num_bytes + rest;
        let max_bytes = automaton.num_bytes.saturating_add(grown_bytes);
        Ok(Self { origin: Arc::new(Origin { what, vocabulary, parser, complete, max_bytes }), bytes })
    }

    /// A guide for one sequence. It copies what the grammar's automaton has so far and then grows its own, so a
    /// sequence neither waits for another nor depends on what it does.
    ///
    /// # Errors
    /// [`GuidanceError::Library`] if the library fails.
    pub fn start(&self) -> Result<Guide, GuidanceError> {
        Guide::start(&self.origin)
    }

    /// An estimate of the memory it takes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

/// Says, token by token, what may come next in one sequence.
///
/// What it says depends on the tokens it accepted alone: masks that were or were not asked for change nothing, so a
/// guide that takes all tokens of another at once goes on as the other does.
///
/// An error other than [`GuidanceError::Refused`] is final: every later call returns it again.
pub struct Guide {
    origin: Arc<Origin>,
    parser: Box<TokenParser>,
    /// Tokens that must follow, in the tokenizer's own split. How text is split depends on where that begins, so it is
    /// done when the token before is accepted, whether or not somebody asks.
    forced: VecDeque<u32>,
    /// Only an end id may follow.
    complete: bool,
    failed: Option<GuidanceError>,
    /// What was accepted, but for end ids.
    accepted: Vec<u32>,
    /// The mask of the next token has been worked out.
    is_masked: bool,
    /// A token came without its mask.
    has_skipped: bool,
}

impl Guide {
    fn start(origin: &Arc<Origin>) -> Result<Self, GuidanceError> {
        let parser = library::call(|| Box::new(origin.parser.deep_clone()))
            .map_err(|reason| GuidanceError::Library { what: origin.what, reason })?;
        let mut guide = Self {
            origin: Arc::clone(origin),
            parser,
            forced: VecDeque::new(),
            complete: origin.complete,
            failed: None,
            accepted: Vec::new(),
            is_masked: false,
            has_skipped: false,
        };
        guide.find_forced()?;
        Ok(guide)
    }

    /// Sets the bits of the tokens that may follow, and clears all others: token `id` is bit `id % 32` of word
    /// `id / 32`. Words past the vocabulary are cleared, tokens past the words left out. Where text is forced, its
    /// next token in the tokenizer's own split is the only one.
    ///
    /// # Errors
    /// [`GuidanceError::DeadEnd`] if nothing may follow, [`GuidanceError::TooComplex`] if the mask takes more than
    /// the limits of one, [`GuidanceError::Library`] if the library fails.
    pub fn mask(&mut self, allowed: &mut [u32]) -> Result<(), GuidanceError> {
        self.check()?;
        self.attempt(|guide| guide.work_out(allowed))?;
        self.is_masked = true;
        Ok(())
    }

    /// Goes on by one token. A token that the grammar has but the mask left out, such as another split of forced
    /// text, is taken too. An end id is taken wherever the text may end, and again after that.
    ///
    /// # Errors
    /// [`GuidanceError::Refused`] if the token may not follow, which leaves the guide as it was; otherwise those of
    /// [`mask`](Self::mask).
    pub fn accept(&mut self, token: u32) -> Result<(), GuidanceError> {
        self.check()?;
        self.attempt(|guide| guide.go_on(token))?;
        self.has_skipped |= !self.is_masked;
        self.is_masked = false;
        Ok(())
    }

    /// Appends the tokens that must follow, in the tokenizer's own split: accepting them one by one needs no masks.
    /// There are none after an error. A long run comes in parts.
    pub fn forced(&self, tokens: &mut Vec<u32>) {
        if self.failed.is_none() {
            tokens.extend(&self.forced);
        }
    }

    /// Whether nothing but an end id may follow.
    pub fn is_complete(&self) -> bool {
        self.complete
    }

    fn work_out(&mut self, allowed: &mut [u32]) -> Result<(), GuidanceError> {
        allowed.fill(0);
        if let Some(&next) = self.forced.front() {
            set(allowed, next);
        } else if self.complete {
            self.origin.vocabulary.end_ids().iter().for_each(|&end| set(allowed, end));
        } else {
            let mask = self.run(|parser| parser.compute_mask().ok())?;
            let words = mask.as_slice();
            let common = words.len().min(allowed.len());
            allowed[..common].copy_from_slice(&words[..common]);
            let origin = Arc::clone(&self.origin);
            // A grammar that asks for an end id by name does not make it anything but the end.
            if !self.may_end()? {
                origin.vocabulary.end_ids().iter().for_each(|&end| clear(allowed, end));
            }
            // A terminal that excludes some bytes includes the one that the library marks special tokens with.
            for &special in origin.vocabulary.special_ids() {
                if is_set(allowed, special) && !self.takes(special)? {
                    clear(allowed, special);
                }
            }
            if allowed.iter().all(|&word| word == 0) {
                return Err(self.fail(dead_end(origin.what, &self.parser)));
            }
            let bytes = self.parser.parser.lexer_stats().num_bytes;
            if bytes > origin.max_bytes {
                let limit = format!("{bytes} bytes of automaton; the limit is {}", origin.max_bytes);
                return Err(self.fail(GuidanceError::TooComplex { what: origin.what, limit }));
            }
        }
        Ok(())
    }

    fn go_on(&mut self, token: u32) -> Result<(), GuidanceError> {
        self.renew_fuel()?;
        if self.forced.front() == Some(&token) {
            self.forced.pop_front();
            return self.advance(token);
        }
        let ends = self.origin.vocabulary.end_ids().contains(&token);
        if ends && self.may_end()? {
            self.complete = true;
            return Ok(());
        }
        let known = (token as usize) < self.origin.vocabulary.num_tokens();
        if ends || self.complete || !known || !self.takes(token)? {
            return Err(GuidanceError::Refused { what: self.origin.what, token });
        }
        self.forced.clear();
        self.advance(token)
    }

    /// Each mask builds a part of the automaton, within its own limits; where masks were skipped, the next step may have
    /// to build the parts of all. If that is too much, it is done again, mask by mask.
    fn attempt(
        &mut self,
        mut step: impl FnMut(&mut Self) -> Result<(), GuidanceError>,
    ) -> Result<(), GuidanceError> {
        let outcome = step(self);
        if !(self.has_skipped && matches!(outcome, Err(GuidanceError::TooComplex { .. }))) {
            return outcome;
        }
        let accepted = mem::take(&mut self.accepted);
        *self = Self::start(&self.origin)?;
        let mut mask = vec![0; self.origin.vocabulary.num_tokens().div_ceil(32)];
        for token in accepted {
            self.mask(&mut mask)?;
            self.accept(token)?;
        }
        step(self)
    }

    fn takes(&mut self, token: u32) -> Result<bool, GuidanceError> {
        Ok(self.run(|parser| parser.validate_tokens_raw(&[token]).ok())? == 1)
    }

    fn may_end(&mut self) -> Result<bool, GuidanceError> {
        Ok(self.complete || self.run(|parser| Some(parser.is_accepting()))?)
    }

    fn find_forced(&mut self) -> Result<(), GuidanceError> {
        if self.forced.is_empty() && !self.complete {
            let tokens = self.run(|parser| Some(parser.compute_ff_tokens()))?;
            self.forced = tokens
                .into_iter()
                .take_while(|token| !self.origin.vocabulary.end_ids().contains(token))
                .collect();
        }
        Ok(())
    }

    fn advance(&mut self, token: u32) -> Result<(), GuidanceError> {
        self.complete = self.run(|parser| {
            parser.consume_token(token).ok()?;
            parser.check_stop().ok()
        })?;
        self.accepted.push(token);
        self.find_forced()
    }

    /// The library gives its automaton fuel for one step when a mask is computed, and never else: tokens without masks
    /// between them would all burn that of one. So each token begins with a mask of nothing.
    fn renew_fuel(&mut self) -> Result<(), GuidanceError> {
        let nothing = Nothing(Arc::clone(self.origin.vocabulary.environment()));
        // A prefix, whatever it is, keeps the mask out of the library's cache.
        self.run(|parser| Some(parser.parser.compute_bias(&nothing, b" ")))?;
        Ok(())
    }

    fn check(&self) -> Result<(), GuidanceError> {
        self.failed.clone().map_or(Ok(()), Err)
    }

    /// Calls the library; what goes wrong there is final.
    fn run<T>(&mut self, work: impl FnOnce(&mut TokenParser) -> Option<T>) -> Result<T, GuidanceError> {
        let parser = &mut self.parser;
        let error = match library::call(|| work(parser)) {
            Ok(Some(value)) => return Ok(value),
            Ok(None) => stopped(self.origin.what, &self.parser),
            Err(reason) => GuidanceError::Library { what: self.origin.what, reason },
        };
        Err(self.fail(error))
    }

    fn fail(&mut self, error: GuidanceError) -> GuidanceError {
        self.failed = Some(error.clone());
        error
    }
}

/// Computes the mask that allows nothing.
struct Nothing(TokEnv);

impl BiasComputer for Nothing {
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

fn dead_end(what: &'static str, parser: &TokenParser) -> GuidanceError {
    let reason = format!("no token may follow the {} so far, and the text may not end", parser.num_tokens());
    GuidanceError::DeadEnd { what, reason }
}

/// Why the library's parser goes on no more.
fn stopped(what: &'static str, parser: &TokenParser) -> GuidanceError {
    let reason = || parser.error_message().map_or_else(String::new, |message| library::reason(&message));
    match parser.stop_reason() {
        StopReason::NoExtensionBias => dead_end(what, parser),
        StopReason::LexerTooComplex | StopReason::ParserTooComplex => {
            GuidanceError::TooComplex { what, limit: reason() }
        }
        _ => GuidanceError::Library { what, reason: reason() },
    }
}
