//! Generation defaults of a model: which tokens end a text, and how its makers sample.

/// From `generation_config.json` (token ids also from `config.json`), or from GGUF metadata. `None` is "not said".
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Generation {
    /// Tokens that end a generation; empty where the files name none.
    pub eos_token_ids: Vec<u32>,
    /// Begins a text.
    pub bos_token_id: Option<u32>,
    /// Fills up batches.
    pub pad_token_id: Option<u32>,
    /// `false` asks for greedy decoding whatever the other fields say.
    pub do_sample: Option<bool>,
    /// Divides the logits.
    pub temperature: Option<f32>,
    /// Keep this many of the most likely tokens; 0 keeps all.
    pub top_k: Option<u32>,
    /// Keep the smallest set of most likely tokens with at least this probability together.
    pub top_p: Option<f32>,
    /// Keep tokens at least this share as likely as the most likely one.
    pub min_p: Option<f32>,
    /// Keep the most typical tokens, up to this total probability.
    pub typical_p: Option<f32>,
    /// Above 1 makes tokens that were seen before less likely.
    pub repetition_penalty: Option<f32>,
    /// No sequence of so many tokens comes twice; 0 for no such rule.
    pub no_repeat_ngram_size: Option<u32>,
    /// Most tokens of a sequence, its prompt included.
    pub max_length: Option<u32>,
    /// Most tokens that are generated.
    pub max_new_tokens: Option<u32>,
}
