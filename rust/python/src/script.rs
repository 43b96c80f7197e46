//! The text of one choice as its tokens come, without what may have to be taken back.
//!
//! A [`TextStream`] already waits for whole characters and for stop strings. A stop sequence is one of tokens, and the
//! engine tells of it after its last one: until then the text of its first ones waits here.
//!
//! ```text
//! text of the stream    ... | taken | ready | of tokens that may begin a stop sequence |
//!                                           ▲ marks[0]        ▲ marks[1]   one a token
//! ```

use std::collections::VecDeque;

use penstock_text::{StopMatch, TextStream};

/// Turns tokens into text that stays.
pub struct Script {
    stream: TextStream,
    /// What the stream gave and nobody took.
    text: String,
    /// For each of the last tokens that may belong to a stop sequence, a place in `text` that its own text does not
    /// begin before.
    marks: VecDeque<usize>,
    /// Length of what was taken.
    num_taken: usize,
}

impl Script {
    /// No token yet.
    pub fn new(stream: TextStream) -> Self {
        Self { stream, text: String::new(), marks: VecDeque::new(), num_taken: 0 }
    }

    /// Adds a token, or one that says nothing; `num_open` of the last ones, this one included, may be a stop sequence.
    /// Says which stop string ended the text, if one did: then nothing waits any more, and nothing follows.
    pub fn push(&mut self, token: Option<u32>, num_open: usize) -> Option<StopMatch> {
        if num_open > 0 {
            self.marks.push_back(self.text.len());
        }
        while self.marks.len() > num_open {
            self.marks.pop_front();
        }
        let stop = token.and_then(|token| self.stream.push(token));
        if stop.is_some() {
            self.marks.clear();
        }
        self.receive();
        stop
    }

    /// Says that no token follows: nothing waits any more. That text may complete a stop string, too.
    pub fn finish(&mut self) -> Option<StopMatch> {
        self.marks.clear();
        let stop = self.stream.finish();
        self.receive();
        stop
    }

    /// The text is `whole` and nothing else: that of the tokens before a stop sequence. What was taken is its
    /// beginning, because the rest has waited.
    pub fn end_as(&mut self, whole: &str) {
        self.marks.clear();
        self.text = whole[self.num_taken..].to_owned();
    }

    /// What became certain since the last time.
    pub fn take(&mut self) -> String {
        let Some(&end) = self.marks.front() else {
            self.num_taken += self.text.len();
            return std::mem::take(&mut self.text);
        };
        self.num_taken += end;
        self.marks.iter_mut().for_each(|mark| *mark -= end);
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
