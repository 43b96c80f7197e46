//! Qwen3 dense: its own default of `head_dim`, RMS norms over each head of q and k, optional biases and sliding
//! windows.

use super::{Family, read_qwen_windows};
use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::fields::Fields;

pub(crate) const FAMILY: Family =
    Family { architecture: "Qwen3ForCausalLM", model_type: "qwen3", head_dim: Some(128), read_fields };

fn read_fields(fields: Fields<'_>, model: &mut ModelConfig) -> Result<(), ModelError> {
    let attention_bias = fields.flag_or("attention_bias", false)?;
    for layer in &mut model.layers {
        layer.attention.qkv_bias = attention_bias;
        layer.attention.output_bias = attention_bias;
        layer.attention.qk_norm = true;
    }
    read_qwen_windows(fields, model)
}
