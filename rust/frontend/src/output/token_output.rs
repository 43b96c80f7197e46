//! The tokens of one choice so far, and how many of them were taken.

use penstock_types::RequestedOutputs;

use super::TopLogprobs;

/// Tokens of a choice in columns.
///
/// `logprobs` and `top_logprobs` are as long as `token_ids`, or `None` if they were not requested.
pub struct TokenOutput {
    pub token_ids: Vec<u32>,
    pub logprobs: Option<Vec<f32>>,
    pub top_logprobs: Option<Vec<TopLogprobs>>,
    num_taken: usize,
}

/// The columns of the tokens that were taken at once.
type Columns = (Vec<u32>, Option<Vec<f32>>, Option<Vec<TopLogprobs>>);

impl TokenOutput {
    pub fn new(outputs: &RequestedOutputs) -> Self {
        Self {
            token_ids: Vec::new(),
            logprobs: outputs.logprobs.map(|_| Vec::new()),
            top_logprobs: outputs.logprobs.filter(|count| *count > 0).map(|_| Vec::new()),
            num_taken: 0,
        }
    }

    /// Adds a token.
    pub fn push(&mut self, token: u32, logprob: f32, top: TopLogprobs) {
        self.token_ids.push(token);
        if let Some(logprobs) = &mut self.logprobs {
            logprobs.push(logprob);
        }
        if let Some(top_logprobs) = &mut self.top_logprobs {
            top_logprobs.push(top);
        }
    }

    /// The number of tokens that were not taken yet.
    pub fn num_unread(&self) -> usize {
        self.token_ids.len() - self.num_taken
    }

    /// Takes the tokens that were not taken yet.
    pub fn take(&mut self) -> Columns {
        let start = std::mem::replace(&mut self.num_taken, self.token_ids.len());
        (
            self.token_ids[start..].to_vec(),
            self.logprobs.as_ref().map(|logprobs| logprobs[start..].to_vec()),
            self.top_logprobs.as_ref().map(|tops| tops[start..].to_vec()),
        )
    }
}
