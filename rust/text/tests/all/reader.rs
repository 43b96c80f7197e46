//! A reader of a [`TextStream`]: it takes the final part of the text piece by piece.

use penstock_text::{StopMatch, TextOptions, TextStream, Tokenizer};

pub struct Reader {
    stream: TextStream,
    text: String,
    taken: usize,
}

impl Reader {
    pub fn new(tokenizer: &Tokenizer, options: TextOptions, stops: &[String]) -> Self {
        Self { stream: TextStream::new(tokenizer, options, stops).unwrap(), text: String::new(), taken: 0 }
    }

    pub fn push(&mut self, id: u32) -> Option<StopMatch> {
        self.stream.push(id, &mut self.text)
    }

    pub fn finish(&mut self) -> Option<StopMatch> {
        self.stream.finish(&mut self.text)
    }

    /// The text that became final since the last call.
    pub fn take(&mut self) -> String {
        let end = self.text.len() - self.stream.held_back();
        let start = std::mem::replace(&mut self.taken, end);
        self.text[start..end].to_owned()
    }
}
