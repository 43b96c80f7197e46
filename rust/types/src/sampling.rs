//! How tokens are chosen: the resolved sampling parameters of a request.

use crate::enums::PenaltyScope;

/// How the next token is chosen from the logits. Every value is resolved and within the range that its field states.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 means greedy (the highest logit, the lowest id among equals). Finite, >= 0.
    pub temperature: f32,
    /// Keeps this many of the most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Keeps the smallest set of most likely tokens whose probabilities sum to at least this. In (0, 1].
    pub top_p: f32,
    /// Keeps tokens whose probability is at least this fraction of the highest one. In [0, 1].
    pub min_p: f32,
    /// Keeps the most typical tokens, up to this total probability. In (0, 1]; 1 keeps all.
    pub typical_p: f32,
    /// Divides the positive and multiplies the negative logits of earlier tokens. Finite, > 0; 1 changes nothing.
    pub repetition_penalty: f32,
    /// The tokens that `repetition_penalty` counts.
    pub repetition_penalty_scope: PenaltyScope,
    /// Subtracted from the logits of generated tokens. Finite.
    pub presence_penalty: f32,
    /// Subtracted from the logits of generated tokens, once for each occurrence. Finite.
    pub frequency_penalty: f32,
    /// No n-gram of this length occurs twice in prompt and output; 0 turns the rule off.
    pub no_repeat_ngram_size: u32,
    /// Added to the logits of these ids. Finite.
    pub logit_bias: Vec<(u32, f32)>,
    /// Only these ids can be chosen; ascending, not empty.
    pub allowed_token_ids: Option<Vec<u32>>,
    /// These ids cannot be chosen.
    pub bad_token_ids: Vec<u32>,
    /// These sequences of ids, none empty, do not occur.
    pub bad_words: Vec<Vec<u32>>,
    /// With the position of the sampled token, the whole key of the random draw.
    pub seed: u64,
}

impl Default for Sampling {
    /// Draws from the model's own distribution, unchanged.
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            typical_p: 1.0,
            repetition_penalty: 1.0,
            repetition_penalty_scope: PenaltyScope::All,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            no_repeat_ngram_size: 0,
            logit_bias: Vec::new(),
            allowed_token_ids: None,
            bad_token_ids: Vec::new(),
            bad_words: Vec::new(),
            seed: 0,
        }
    }
}
