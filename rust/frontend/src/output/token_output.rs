//! Everything generated for one choice so far, and how much of it was taken. The part that was received and not taken
//! is a pair of cursors, so nothing is lost if a waiting task is cancelled, and nothing is stored twice.

use penstock_types::RequestedOutputs;

use super::parsed_output::ParsedOutput;
use super::{Chunk, TopLogprobs};

/// Text and tokens of a choice.
///
/// `logprobs` and `top_logprobs` are as long as `token_ids`, or empty if they were not requested.
pub struct TokenOutput {
    pub has_logprobs: bool,
    pub has_top_logprobs: bool,
    /// Whether the text is parsed into content, reasoning and tool calls.
    pub is_parsed: bool,
    /// Begins with the prompt's text, up to `echoed`.
    pub text: String,
    pub echoed: usize,
    /// The meaning of the text after that; empty if it is not parsed.
    pub parsed: ParsedOutput,
    pub token_ids: Vec<u32>,
    pub logprobs: Vec<f32>,
    pub top_logprobs: Vec<TopLogprobs>,
    taken_text: usize,
    taken_tokens: usize,
}

impl TokenOutput {
    pub fn new(outputs: &RequestedOutputs, is_parsed: bool) -> Self {
        Self {
            has_logprobs: outputs.logprobs.is_some(),
            has_top_logprobs: outputs.logprobs.is_some_and(|count| count > 0),
            is_parsed,
            text: String::new(),
            echoed: 0,
            parsed: ParsedOutput::default(),
            token_ids: Vec::new(),
            logprobs: Vec::new(),
            top_logprobs: Vec::new(),
            taken_text: 0,
            taken_tokens: 0,
        }
    }

    /// Adds a token; its text may follow later.
    pub fn push(&mut self, token: u32, logprob: f32, top: TopLogprobs) {
        self.token_ids.push(token);
        if self.has_logprobs {
            self.logprobs.push(logprob);
        }
        if self.has_top_logprobs {
            self.top_logprobs.push(top);
        }
    }

    /// Adds final text.
    pub fn extend_text(&mut self, text: String) {
        if self.text.is_empty() {
            self.text = text;
        } else {
            self.text += &text;
        }
    }

    /// Number of tokens that were not taken yet.
    pub fn num_unread(&self) -> usize {
        self.token_ids.len() - self.taken_tokens
    }

    /// Whether a chunk would have text or tokens.
    pub fn has_unread(&self) -> bool {
        self.num_unread() > 0 || self.text.len() > self.taken_text || self.parsed.has_unread()
    }

    /// Takes everything that was not taken yet as a chunk of choice `index`, without tensors.
    pub fn take(&mut self, index: usize) -> Chunk {
        let content = match self.is_parsed {
            true => self.parsed.take_content(),
            false => self.text[self.taken_text.max(self.echoed)..].to_owned(),
        };
        let tokens = self.taken_tokens..;
        let chunk = Chunk {
            text: self.text[self.taken_text..].to_owned(),
            token_ids: self.token_ids[tokens.clone()].to_vec(),
            logprobs: self.has_logprobs.then(|| self.logprobs[tokens.clone()].to_vec()),
            top_logprobs: self.has_top_logprobs.then(|| self.top_logprobs[tokens].to_vec()),
            index,
            content,
            reasoning: self.parsed.take_reasoning(),
            tool_calls: self.parsed.take_calls(),
            finish_reason: None,
            stop_reason: None,
            logits: None,
            hidden_states: None,
            embeddings: None,
        };
        self.taken_text = self.text.len();
        self.taken_tokens = self.token_ids.len();
        chunk
    }
}
