//! The text of one running request, growing id by id.
//!
//! Ids go in by [`TextStream::push`]; text comes out by [`TextStream::take`] as soon as it is certain: whole
//! characters that no later id can change and that cannot belong to a stop string. Everything taken, put
//! together, is what decoding all ids at once gives, cut before the stop string if one occurred, or after it
//! if so asked; then nothing is held back for stop strings.

use crate::detokenizer::Detokenizer;
use crate::stops::StopFinder;
use crate::{StopMatch, TextError, Tokenizer};

/// What the text of ids holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TextOptions {
    /// Leaves special tokens out.
    pub skip_special_tokens: bool,
    /// Puts one space between a special or added token and its neighbours, as the tokenizers written in
    /// Python do; those written in Rust do not. Where special tokens are skipped there are no such spaces.
    pub spaces_between_special_tokens: bool,
    /// Cuts the text after the stop string instead of before it. Without stop strings nothing is cut.
    pub include_stop_str_in_output: bool,
}

impl Default for TextOptions {
    /// What an answer's reader wants to see: no special tokens, no spaces put in, no stop string.
    fn default() -> Self {
        Self {
            skip_special_tokens: true,
            spaces_between_special_tokens: false,
            include_stop_str_in_output: false,
        }
    }
}

/// Turns the ids of one request into text as they come. A copy goes on from there by itself.
#[derive(Clone)]
pub struct TextStream {
    tokenizer: Tokenizer,
    detokenizer: Detokenizer,
    finder: Option<StopFinder>,
    include_stop: bool,
    stopped: Option<StopMatch>,
    /// What the detokenizer gave: taken, then ready to be taken, then held back for the stop strings.
    text: String,
    taken: usize,
    ready: usize,
}

impl TextStream {
    /// A stream with no text yet. `stops` end it, each at least one character long.
    pub fn new(tokenizer: &Tokenizer, options: TextOptions, stops: &[String]) -> Result<Self, TextError> {
        Ok(Self {
            tokenizer: tokenizer.clone(),
            detokenizer: Detokenizer::new(tokenizer.rule(), options),
            finder: StopFinder::new(stops)?,
            include_stop: options.include_stop_str_in_output,
            stopped: None,
            text: String::new(),
            taken: 0,
            ready: 0,
        })
    }

    /// Adds an id. Says whether a stop string has ended the text; from then on further ids change nothing and
    /// get the same answer. An id outside the vocabulary adds no text.
    pub fn push(&mut self, id: u32) -> Option<StopMatch> {
        if self.stopped.is_none() {
            let from = self.text.len();
            self.detokenizer.push(self.tokenizer.pieces(), id, &mut self.text);
            self.look_for_stops(from);
        }
        self.stopped
    }

    /// The text that became certain since the last call; often empty.
    pub fn take(&mut self) -> String {
        if self.taken == 0 && self.ready == self.text.len() {
            self.ready = 0;
            return std::mem::take(&mut self.text);
        }
        let text = self.text[self.taken..self.ready].to_owned();
        self.taken = self.ready;
        // Dropping what was taken moves what is held; waiting until that is the smaller half keeps the sum
        // linear.
        if self.taken * 2 >= self.text.len() {
            self.text.drain(..self.taken);
            self.ready -= self.taken;
            self.taken = 0;
        }
        text
    }

    /// Says that no id follows: what was held back can be taken now, and bytes that never became a character
    /// are U+FFFD. That text, too, may complete a stop string.
    pub fn finish(&mut self) -> Option<StopMatch> {
        if self.stopped.is_none() {
            let from = self.text.len();
            self.detokenizer.finish(&mut self.text);
            self.look_for_stops(from);
            self.ready = self.text.len();
        }
        self.stopped
    }

    /// Moves `ready` over the text that came at `from`.
    fn look_for_stops(&mut self, from: usize) {
        let Some(finder) = &mut self.finder else {
            self.ready = self.text.len();
            return;
        };
        match finder.feed(&self.text.as_bytes()[from..]) {
            Some(found) => {
                let end = from + found.end;
                self.text.truncate(if self.include_stop { end } else { end - found.length });
                self.ready = self.text.len();
                self.stopped = Some(StopMatch { stop: found.stop });
            }
            None if self.include_stop => self.ready = self.text.len(),
            None => self.ready = self.text.len() - finder.pending(),
        }
    }
}
