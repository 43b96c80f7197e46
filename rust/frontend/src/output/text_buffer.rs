//! The whole text of one choice, with the text of a possible stop sequence held back.
//!
//! A [`TextStream`] holds back incomplete characters and prefixes of stop strings. A stop sequence consists of tokens,
//! and the engine reports it after its last one; until then the text of its first tokens is held back here.
//!
//! ```text
//! text    | final | of tokens that may begin a stop sequence | that may begin a stop string |
//!                 ▲ boundaries[0]   ▲ boundaries[1]  one per token
//! ```

use std::collections::VecDeque;

use penstock_text::{StopMatch, TextStream};

/// Turns tokens into text.
pub struct TextBuffer {
    stream: TextStream,
    text: String,
    /// For each of the last tokens that may belong to a stop sequence, a position in `text` before which its text does
    /// not begin.
    boundaries: VecDeque<usize>,
    /// Whether no text follows.
    is_complete: bool,
}

impl TextBuffer {
    pub fn new(stream: TextStream) -> Self {
        Self { stream, text: String::new(), boundaries: VecDeque::new(), is_complete: false }
    }

    /// Puts a text before that of the first token.
    pub fn begin(&mut self, text: &str) {
        text.clone_into(&mut self.text);
    }

    /// Adds a token, or `None` for one without text; the last `held_back` tokens, this one included, may be a stop
    /// sequence. Returns the stop string that ended the text, if any; then nothing is held back and no token follows.
    pub fn push(&mut self, token: Option<u32>, held_back: usize) -> Option<StopMatch> {
        if held_back > 0 {
            self.boundaries.push_back(self.text.len());
        }
        while self.boundaries.len() > held_back {
            self.boundaries.pop_front();
        }
        let stop = token.and_then(|token| self.stream.push(token, &mut self.text));
        self.is_complete = stop.is_some();
        stop
    }

    /// Ends the text: nothing is held back any more. The released text may complete a stop string.
    pub fn finish(&mut self) -> Option<StopMatch> {
        self.is_complete = true;
        self.stream.finish(&mut self.text)
    }

    /// Ends the text: from `start` on, it is `rest`, the text of the tokens before a stop sequence. The final text does
    /// not change, because the other text was held back.
    pub fn finish_as(&mut self, start: usize, rest: &str) {
        self.is_complete = true;
        self.text.truncate(start);
        self.text += rest;
    }

    /// The text that no later token changes.
    pub fn final_text(&self) -> &str {
        if self.is_complete {
            return &self.text;
        }
        let end = self.text.len() - self.stream.held_back();
        &self.text[..self.boundaries.front().map_or(end, |boundary| end.min(*boundary))]
    }
}
