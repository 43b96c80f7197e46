//! Incremental decoding of one running request.
//!
//! [`TextStream::push`] appends the text of an id to a text of the caller. The text is final except for its last
//! [`TextStream::held_back`] bytes, which may belong to a stop string; an incomplete character is not part of it yet.
//! At the end, it equals the one-shot decoding of all ids, cut before the stop string if one occurs. If the stop string
//! is included in the output, the text is cut after it and nothing is held back.

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
    /// `None` without stop strings, and after the end.
    matcher: Option<StopStringMatcher>,
    include_stop: bool,
    stopped: Option<StopMatch>,
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
        })
    }

    /// Puts ids before the first one. Returns their text; if it ends within a character, the character is text of the
    /// id that completes it. Stop strings are not searched in the returned text.
    pub fn begin_after(&mut self, ids: &[u32]) -> String {
        let mut text = String::new();
        for id in ids {
            self.detokenizer.push(self.tokenizer.table(), *id, &mut text);
        }
        text
    }

    /// Appends the text of an id to `text`, and cuts a stop string off its end. Returns the stop string that ended the
    /// text, if any; later ids are ignored and return the same. An id outside the vocabulary adds no text.
    pub fn push(&mut self, id: u32, text: &mut String) -> Option<StopMatch> {
        if self.stopped.is_none() {
            let from = text.len();
            self.detokenizer.push(self.tokenizer.table(), id, text);
            self.find_stop(from, text);
        }
        self.stopped
    }

    /// Ends the stream: nothing is held back any more, and bytes of an incomplete character become U+FFFD, which may
    /// complete a stop string.
    pub fn finish(&mut self, text: &mut String) -> Option<StopMatch> {
        if self.stopped.is_none() {
            let from = text.len();
            self.detokenizer.finish(text);
            self.find_stop(from, text);
            self.matcher = None;
        }
        self.stopped
    }

    /// The number of last bytes of the text that may belong to a stop string.
    pub fn held_back(&self) -> usize {
        match &self.matcher {
            Some(matcher) if !self.include_stop => matcher.held_back(),
            _ => 0,
        }
    }

    /// Searches the text from `from` on, and cuts it at a stop string.
    fn find_stop(&mut self, from: usize, text: &mut String) {
        let Some(matcher) = &mut self.matcher else { return };
        if let Some(position) = matcher.feed(&text.as_bytes()[from..]) {
            let end = from + position.end;
            // A caller that only looks for stop strings does not keep the text before this id.
            text.truncate(if self.include_stop { end } else { end.saturating_sub(position.length) });
            self.stopped = Some(StopMatch { stop: position.stop });
            self.matcher = None;
        }
    }
}
