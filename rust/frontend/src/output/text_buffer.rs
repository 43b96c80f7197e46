//! The text of one choice, with the text of a possible stop sequence held back.
//!
//! A [`TextStream`] already holds back incomplete characters and prefixes of stop strings. A stop sequence consists of
//! tokens, and the engine reports it after its last one; until then the text of its first tokens is held back here.
//!
//! ```text
//! text of the stream    ... | taken | ready | of tokens that may begin a stop sequence |
//!                                           ▲ boundaries[0]   ▲ boundaries[1]  one per token
//! ```

use std::collections::VecDeque;

use penstock_text::{StopMatch, TextStream};

/// Turns tokens into final text.
pub struct TextBuffer {
    stream: TextStream,
    /// Text from the stream that was not taken.
    text: String,
    /// For each of the last tokens that may belong to a stop sequence, a position in `text` before which its text does
    /// not begin.
    boundaries: VecDeque<usize>,
    /// Bytes taken so far.
    num_taken: usize,
}

impl TextBuffer {
    pub fn new(stream: TextStream) -> Self {
        Self { stream, text: String::new(), boundaries: VecDeque::new(), num_taken: 0 }
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
        let stop = token.and_then(|token| self.stream.push(token));
        if stop.is_some() {
            self.boundaries.clear();
        }
        self.receive();
        stop
    }

    /// Ends the text: nothing is held back any more. The released text may complete a stop string.
    pub fn finish(&mut self) -> Option<StopMatch> {
        self.boundaries.clear();
        let stop = self.stream.finish();
        self.receive();
        stop
    }

    /// Ends the text as `whole`, the text of the tokens before a stop sequence. The text taken so far is a prefix of
    /// it, because the rest was held back.
    pub fn finish_as(&mut self, whole: &str) {
        self.boundaries.clear();
        self.text = whole[self.num_taken..].to_owned();
    }

    /// Returns the text that became final since the last call.
    pub fn take(&mut self) -> String {
        let Some(&end) = self.boundaries.front() else {
            self.num_taken += self.text.len();
            return std::mem::take(&mut self.text);
        };
        self.num_taken += end;
        self.boundaries.iter_mut().for_each(|boundary| *boundary -= end);
        self.text.drain(..end).collect()
    }

    fn receive(&mut self) {
        let text = self.stream.take();
        if self.text.is_empty() {
            self.text = text;
        } else {
            self.text += &text;
        }
    }
}
