//! Qwen2 and Qwen2.5: biases on q, k and v, optional sliding windows.

use super::{Family, read_qwen_windows};
use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::fields::Fields;

pub(crate) const FAMILY: Family =
    Family { architecture: "Qwen2ForCausalLM", model_type: "qwen2", head_dim: None, read_fields };

fn read_fields(fields: Fields<'_>, model: &mut ModelConfig) -> Result<(), ModelError> {
    model.layers.iter_mut().for_each(|layer| layer.attention.qkv_bias = true);
    read_qwen_windows(fields, model)
}
