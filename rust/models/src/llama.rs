//! Llama 2, 3, 3.1, 3.2, and the many models that share their architecture (SmolLM2, TinyLlama, ...).

use crate::config::{Family, ModelConfig, ModelError};
use crate::fields::Fields;

pub(crate) const FAMILY: Family =
    Family { architecture: "LlamaForCausalLM", model_type: "llama", head_dim: None, refine };

fn refine(fields: Fields<'_>, model: &mut ModelConfig) -> Result<(), ModelError> {
    let attention_bias = fields.flag_or("attention_bias", false)?;
    model.qkv_bias = attention_bias;
    model.output_bias = attention_bias;
    model.mlp_bias = fields.flag_or("mlp_bias", false)?;
    Ok(())
}
