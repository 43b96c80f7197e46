//! The generation defaults of a model.

/// The values of `generation_config.json` (token ids also from `config.json`) or of GGUF metadata. `None` means that
/// the model does not define a value.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct GenerationConfig {
    /// Tokens that end generation. Empty if the model defines none.
    pub eos_token_ids: Vec<u32>,
    /// The token that begins a text.
    pub bos_token_id: Option<u32>,
    /// The token that pads batches.
    pub pad_token_id: Option<u32>,
    /// `false` means greedy decoding, regardless of the other fields.
    pub do_sample: Option<bool>,
    /// Divisor of the logits.
    pub temperature: Option<f32>,
    /// Number of most likely tokens to keep; 0 keeps all.
    pub top_k: Option<u32>,
    /// Keep the smallest set of most likely tokens with at least this total probability.
    pub top_p: Option<f32>,
    /// Keep tokens with at least this fraction of the probability of the most likely one.
    pub min_p: Option<f32>,
    /// Keep the most typical tokens up to this total probability.
    pub typical_p: Option<f32>,
    /// Keep tokens with at least this probability.
    pub epsilon_cutoff: Option<f32>,
    /// Values above 1 make earlier tokens less likely.
    pub repetition_penalty: Option<f32>,
    /// No sequence of this many tokens is repeated; 0 disables the rule.
    pub no_repeat_ngram_size: Option<u32>,
    /// Maximum number of tokens of a sequence, including the prompt.
    pub max_length: Option<u32>,
    /// Maximum number of generated tokens.
    pub max_new_tokens: Option<u32>,
}

impl GenerationConfig {
    /// Whether a field says how tokens are sampled.
    pub fn sets_sampling(&self) -> bool {
        self.do_sample.is_some()
            || self.top_k.is_some()
            || self.no_repeat_ngram_size.is_some()
            || [
                self.temperature,
                self.top_p,
                self.min_p,
                self.typical_p,
                self.epsilon_cutoff,
                self.repetition_penalty,
            ]
            .iter()
            .any(Option::is_some)
    }
}
