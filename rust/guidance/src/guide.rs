//! A compiled grammar, and the walk of one sequence through it.

use std::collections::VecDeque;
use std::sync::Arc;

use llguidance::TokenParser;
use llguidance::api::StopReason;

use crate::library;
use crate::{GuidanceError, Vocabulary};

/// A grammar ready for use, shared by all sequences that follow it.
pub struct Compiled {
    what: &'static str,
    vocabulary: Arc<Vocabulary>,
    /// At the beginning of the text, with what the first mask needed already built.
    parser: TokenParser,
    complete: bool,
    bytes: usize,
}

impl Compiled {
    pub(crate) fn new(
        what: &'static str,
        vocabulary: Arc<Vocabulary>,
        mut parser: TokenParser,
        source_bytes: usize,
        symbols: usize,
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
        Ok(Self { what, vocabulary, parser, complete, bytes })
    }

    /// A guide for one sequence. It copies what the grammar's automaton has so far and then grows its own, so a
    /// sequence neither waits for another nor depends on what it does.
    ///
    /// # Errors
    /// [`GuidanceError::Library`] if the library fails.
    pub fn start(&self) -> Result<Guide, GuidanceError> {
        let parser = library::call(|| Box::new(self.parser.deep_clone()))
            .map_err(|reason| GuidanceError::Library { what: self.what, reason })?;
        Ok(Guide {
            what: self.what,
            vocabulary: Arc::clone(&self.vocabulary),
            parser,
            forced: VecDeque::new(),
            complete: self.complete,
            failed: None,
        })
    }

    /// An estimate of the memory it takes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

/// Says, token by token, what may come next in one sequence.
///
/// An error other than [`GuidanceError::Refused`] is final: every later call returns it again.
pub struct Guide {
    what: &'static str,
    vocabulary: Arc<Vocabulary>,
    parser: Box<TokenParser>,
    /// Tokens that must follow, in the tokenizer's own split, as far as they have been asked for.
    forced: VecDeque<u32>,
    /// Only an end id may follow.
    complete: bool,
    failed: Option<GuidanceError>,
}

impl Guide {
    /// Sets the bits of the tokens that may follow, and clears all others: token `id` is bit `id % 32` of word
    /// `id / 32`. Words past the vocabulary are cleared, tokens past the words left out. Where text is forced, its
    /// next token in the tokenizer's own split is the only one.
    ///
    /// # Errors
    /// [`GuidanceError::DeadEnd`] if nothing may follow, [`GuidanceError::TooComplex`] if the mask takes more than
    /// the limits of one, [`GuidanceError::Library`] if the library fails.
    pub fn mask(&mut self, allowed: &mut [u32]) -> Result<(), GuidanceError> {
        allowed.fill(0);
        self.find_forced()?;
        if let Some(&next) = self.forced.front() {
            set(allowed, next);
        } else if self.complete {
            self.vocabulary.end_ids().iter().for_each(|&end| set(allowed, end));
        } else {
            let mask = self.run(|parser| parser.compute_mask().ok())?;
            let words = mask.as_slice();
            let common = words.len().min(allowed.len());
            allowed[..common].copy_from_slice(&words[..common]);
            // A grammar that asks for an end id by name does not make it anything but the end.
            if !self.may_end()? {
                self.vocabulary.end_ids().iter().for_each(|&end| clear(allowed, end));
            }
            // A terminal that excludes some bytes includes the one that the library marks special tokens with.
            let vocabulary = Arc::clone(&self.vocabulary);
            for &special in vocabulary.special_ids() {
                if is_set(allowed, special) && !self.takes(special)? {
                    clear(allowed, special);
                }
            }
            if allowed.iter().all(|&word| word == 0) {
                return Err(self.fail(dead_end(self.what, &self.parser)));
            }
        }
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
        if self.forced.front() == Some(&token) {
            self.forced.pop_front();
            return self.advance(token);
        }
        let ends = self.vocabulary.end_ids().contains(&token);
        if ends && self.may_end()? {
            self.complete = true;
            return Ok(());
        }
        let known = (token as usize) < self.vocabulary.num_tokens();
        if ends || self.complete || !known || !self.takes(token)? {
            return Err(GuidanceError::Refused { what: self.what, token });
        }
        self.forced.clear();
        self.advance(token)
    }

    /// Appends the tokens that must follow, in the tokenizer's own split: accepting them one by one needs no masks.
    /// There are none after an error. A long run comes in parts.
    pub fn forced(&mut self, tokens: &mut Vec<u32>) {
        if self.find_forced().is_ok() {
            tokens.extend(&self.forced);
        }
    }

    /// Whether nothing but an end id may follow.
    pub fn is_complete(&self) -> bool {
        self.complete
    }

    fn takes(&mut self, token: u32) -> Result<bool, GuidanceError> {
        Ok(self.run(|parser| parser.validate_tokens_raw(&[token]).ok())? == 1)
    }

    fn may_end(&mut self) -> Result<bool, GuidanceError> {
        Ok(self.complete || self.run(|parser| Some(parser.is_accepting()))?)
    }

    fn find_forced(&mut self) -> Result<(), GuidanceError> {
        self.check()?;
        if self.forced.is_empty() && !self.complete {
            let tokens = self.run(|parser| Some(parser.compute_ff_tokens()))?;
            self.forced =
                tokens.into_iter().take_while(|token| !self.vocabulary.end_ids().contains(token)).collect();
        }
        Ok(())
    }

    fn advance(&mut self, token: u32) -> Result<(), GuidanceError> {
        self.complete = self.run(|parser| {
            parser.consume_token(token).ok()?;
            parser.check_stop().ok()
        })?;
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
            Ok(None) => stopped(self.what, &self.parser),
            Err(reason) => GuidanceError::Library { what: self.what, reason },
        };
        Err(self.fail(error))
    }

    fn fail(&mut self, error: GuidanceError) -> GuidanceError {
        self.failed = Some(error.clone());
        error
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
