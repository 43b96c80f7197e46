//! The outputs that a request asks for besides its tokens.

use crate::enums::OutputScope;

impl OutputScope {
    /// Whether the scope covers the prompt.
    pub fn has_prompt(self) -> bool {
        self != Self::Generation
    }

    /// Whether the scope covers the generated tokens.
    pub fn has_generation(self) -> bool {
        self != Self::Prompt
    }
}

/// The outputs of a request besides its tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestedOutputs {
    /// The log probability of each generated token, and those of this many most likely tokens.
    pub logprobs: Option<u32>,
    /// The same for each token of the prompt but the first.
    pub prompt_logprobs: Option<u32>,
    /// Log probabilities come from the distribution after processors, bans and temperature, not from the raw logits.
    pub processed_logprobs: bool,
    /// Raw logits.
    pub logits: Option<OutputScope>,
    /// The decoder's last hidden states, after its final norm.
    pub hidden_states: Option<OutputScope>,
    /// The decoder's input: the embeddings of the tokens.
    pub embeddings: Option<OutputScope>,
}

impl RequestedOutputs {
    /// Whether an output covers the prompt. The whole prompt is then computed, whatever the prefix cache holds.
    pub fn has_prompt(&self) -> bool {
        let covers = |scope: Option<OutputScope>| scope.is_some_and(OutputScope::has_prompt);
        let tensors = [self.logits, self.hidden_states, self.embeddings];
        self.prompt_logprobs.is_some() || tensors.into_iter().any(covers)
    }
}

/// The log probabilities that a row of logits returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogprobsRequest {
    /// The number of most likely ids that are returned besides the sampled one.
    pub top: u32,
    /// Whether the distribution is the one after bans and temperature (1 if greedy), not that of the raw logits.
    pub processed: bool,
}
