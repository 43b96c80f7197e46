//! Incremental decoding of one running request.
//!
//! [`TextStream::push`] adds ids; [`TextStream::take`] returns the text that is final: complete characters that cannot
//! belong to a stop string. All taken texts together equal the one-shot decoding of all ids, cut before the stop string
//! if one occurs. If the stop string is included in the output, the text is cut after it and nothing is held back.

use crate::detokenizer::Detokenizer;
use crate::error::TextError;
use crate::options::TextOptions;
use crate::stop_strings::{StopMatch, StopStringMatcher};
use crate::tokenizer::Tokenizer;

/// Decodes the ids of one request incrementally. A clone continues independently.
#[derive(Clone)]
pub struct TextStream {
    tokenizer: Tokenizer,
    detokenizer: Detokenizer,
    matcher: Option<StopStringMatcher>,
    include_stop: bool,
    stopped: Option<StopMatch>,
    /// Decoded text: `..taken` has been taken, `taken..ready` can be taken, `ready..` is held back for stop strings.
    text: String,
    taken: usize,
    ready: usize,
}

impl TextStream {
    /// Creates an empty stream. No stop string may be empty.
    pub fn new(tokenizer: &Tokenizer, options: TextOptions, stops: &[String]) -> Result<Self, TextError> {
        Ok(Self {
            tokenizer: tokenizer.clone(),
            detokenizer: Detokenizer::new(tokenizer.rule(), options),
            matcher: StopStringMatcher::new(stops)?,
            include_stop: options.include_stop_str_in_output,
            stopped: None,
            text: String::new(),
            taken: 0,
            ready: 0,
        })
    }

    /// Puts ids before the first one. Returns their text; if it ends within a character, the character is text of the
    /// id that completes it. Stop strings are not searched in the returned text.
    pub fn begin_after(&mut self, ids: &[u32]) -> String {
        for id in ids {
            self.detokenizer.push(self.tokenizer.table(), *id, &mut self.text);
        }
        std::mem::take(&mut self.text)
    }

    /// Adds an id. Returns the stop string that ended the text, if any; later ids are ignored and return the same. An
    /// id outside the vocabulary adds no text.
    pub fn push(&mut self, id: u32) -> Option<StopMatch> {
        if self.stopped.is_none() {
            let from = self.text.len();
            self.detokenizer.push(self.tokenizer.table(), id, &mut self.text);
            self.find_stop(from);
        }
        self.stopped
    }

    /// Returns the text that became final since the last call; often empty.
    pub fn take(&mut self) -> String {
        if self.taken == 0 && self.ready == self.text.len() {
            self.ready = 0;
            return std::mem::take(&mut self.text);
        }
        let text = self.text[self.taken..self.ready].to_owned();
        self.taken = self.ready;
        // Removing taken text moves the rest. Doing so only when the rest is the smaller half keeps the total linear.
        if self.taken * 2 >= self.text.len() {
            self.text.drain(..self.taken);
            self.ready -= self.taken;
            self.taken = 0;
        }
        text
    }

    /// Ends the stream: text that was held back can be taken, and bytes of an incomplete character become U+FFFD, which
    /// may complete a stop string.
    pub fn finish(&mut self) -> Option<StopMatch> {
        if self.stopped.is_none() {
            let from = self.text.len();
            self.detokenizer.finish(&mut self.text);
            self.find_stop(from);
            self.ready = self.text.len();
        }
        self.stopped
    }

    /// Searches the text from `from` on and updates `ready`.
    fn find_stop(&mut self, from: usize) {
        let Some(matcher) = &mut self.matcher else {
            self.ready = self.text.len();
            return;
        };
        match matcher.feed(&self.text.as_bytes()[from..]) {
            Some(position) => {
                let end = from + position.end;
                self.text.truncate(if self.include_stop { end } else { end - position.length });
                self.ready = self.text.len();
                self.stopped = Some(StopMatch { stop: position.stop });
            }
            None if self.include_stop => self.ready = self.text.len(),
            None => self.ready = self.text.len() - matcher.held_back(),
        }
    }
}
