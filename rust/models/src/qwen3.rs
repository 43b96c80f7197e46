//! Qwen3 dense: a head width of its own (128 unless given), RMS norms over each head of q and k, no biases unless asked for.

use crate::config::{Family, ModelConfig, ModelError, qwen_windows};
use crate::fields::Fields;

pub(crate) const FAMILY: Family =
    Family { architecture: "Qwen3ForCausalLM", model_type: "qwen3", head_dim: Some(128), refine };

fn refine(fields: Fields<'_>, model: &mut ModelConfig) -> Result<(), ModelError> {
    let attention_bias = fields.flag_or("attention_bias", false)?;
    model.qkv_bias = attention_bias;
    model.output_bias = attention_bias;
    model.qk_norm = true;
    qwen_windows(fields, model)
}
