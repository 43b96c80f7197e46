//! [`Token`]: the only form of a generated token, from the sampling of a device to the consumer of a request.

/// One generated token.
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    /// Its id in the vocabulary.
    pub id: u32,
    /// Natural logarithm of its probability; NaN unless requested.
    pub logprob: f32,
    /// The other outputs that were requested of this position.
    pub details: Option<Box<TokenDetails>>,
}

impl Token {
    /// A token without details.
    pub fn new(id: u32, logprob: f32) -> Self {
        Self { id, logprob, details: None }
    }

    /// Takes the token with its details, and leaves it without.
    pub fn take(&mut self) -> Self {
        Self { details: self.details.take(), ..*self }
    }

    /// The most likely tokens at its position; empty unless requested.
    pub fn top(&self) -> &[(u32, f32)] {
        self.details.as_ref().map_or(&[], |details| &details.top)
    }
}

/// The outputs of a position besides the token that follows it; empty unless requested.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenDetails {
    /// Ids and logprobs of the most likely tokens, the most likely first, the lowest id first among equals. Ids with
    /// probability zero are left out, so there may be fewer than requested.
    pub top: Vec<(u32, f32)>,
    /// Raw logits, one per id.
    pub logits: Vec<f32>,
    /// The last hidden state, after the final norm.
    pub hidden_state: Vec<f32>,
    /// The embedding of the token at the position.
    pub embedding: Vec<f32>,
}
