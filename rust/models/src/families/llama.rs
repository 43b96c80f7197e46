//! Llama 2, 3, 3.1, 3.2, and the models with the same architecture (SmolLM2, TinyLlama, ...).

use super::{Family, set_biases};
use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::fields::Fields;

pub(crate) const FAMILY: Family =
    Family { architecture: "LlamaForCausalLM", model_type: "llama", head_dim: None, read_fields };

fn read_fields(fields: Fields<'_>, model: &mut ModelConfig) -> Result<(), ModelError> {
    let attention_bias = fields.flag_or("attention_bias", false)?;
    let mlp_bias = fields.flag_or("mlp_bias", false)?;
    set_biases(model, attention_bias, attention_bias, mlp_bias);
    Ok(())
}
