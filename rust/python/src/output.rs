//! Everything generated for one choice so far, and how much of it was taken. What was received and not taken is a pair
//! of cursors, so nothing is lost when a waiting task is cancelled and nothing is stored twice.

use crate::parsed::Parsed;
use crate::record::Tuple;
use crate::results::{Chunk, TopLogprobs};
use penstock_types::RequestedOutputs;

/// What there is of a choice's text and tokens.
///
/// `logprobs` and `top_logprobs` are as long as `token_ids`, or empty where they are not told of.
pub struct Output {
    pub told: Told,
    /// The prompt's own text first, as far as `echoed`.
    pub text: String,
    pub echoed: usize,
    /// What the text behind that means; empty where it is not parsed.
    pub parsed: Parsed,
    pub token_ids: Vec<u32>,
    pub logprobs: Vec<f32>,
    pub top_logprobs: Vec<TopLogprobs>,
    taken_text: usize,
    taken_tokens: usize,
}

/// What a reader is told besides text and tokens.
#[derive(Clone, Copy)]
pub struct Told {
    pub logprobs: bool,
    pub top_logprobs: bool,
    /// What the text means: content, reasoning and tool calls.
    pub parsed: bool,
}

impl Output {
    /// Nothing yet. Its readers are told what the `reports` are about, and the meaning of text that `is_parsed`.
    pub fn new(reports: &RequestedOutputs, is_parsed: bool) -> Self {
        let told = Told {
            logprobs: reports.logprobs.is_some(),
            top_logprobs: reports.logprobs.is_some_and(|count| count > 0),
            parsed: is_parsed,
        };
        Self {
            told,
            text: String::new(),
            echoed: 0,
            parsed: Parsed::default(),
            token_ids: Vec::new(),
            logprobs: Vec::new(),
            top_logprobs: Vec::new(),
            taken_text: 0,
            taken_tokens: 0,
        }
    }

    /// Adds a token; its text may come later.
    pub fn push(&mut self, token: u32, logprob: f32, top: Vec<(u32, f32)>) {
        self.token_ids.push(token);
        if self.told.logprobs {
            self.logprobs.push(logprob);
        }
        if self.told.top_logprobs {
            self.top_logprobs.push(Tuple(top));
        }
    }

    /// Adds text that is certain.
    pub fn extend_text(&mut self, text: String) {
        if self.text.is_empty() {
            self.text = text;
        } else {
            self.text += &text;
        }
    }

    /// Tokens that were not taken yet.
    pub fn num_unread(&self) -> usize {
        self.token_ids.len() - self.taken_tokens
    }

    /// Whether there is something to take.
    pub fn has_unread(&self) -> bool {
        self.num_unread() > 0 || self.text.len() > self.taken_text || self.parsed.has_unread()
    }

    /// What was not taken yet, as a chunk of choice number `index`.
    pub fn take(&mut self, index: usize) -> Chunk {
        let Told { logprobs, top_logprobs, parsed } = self.told;
        let content = match parsed {
            true => self.parsed.take_content(),
            false => self.text[self.taken_text.max(self.echoed)..].to_owned(),
        };
        let tokens = self.taken_tokens..;
        let chunk = Chunk {
            text: self.text[self.taken_text..].to_owned(),
            token_ids: Tuple(self.token_ids[tokens.clone()].to_vec()),
            logprobs: logprobs.then(|| Tuple(self.logprobs[tokens.clone()].to_vec())),
            top_logprobs: top_logprobs.then(|| Tuple(self.top_logprobs[tokens].to_vec())),
            index,
            content,
            reasoning: self.parsed.take_reasoning(),
            tool_calls: self.parsed.take_calls(),
        };
        self.taken_text = self.text.len();
        self.taken_tokens = self.token_ids.len();
        chunk
    }
}
