//! InternLM3: `qkv_bias` is that of q, k and v, and `bias` that of all other products.

use super::{Family, set_biases};
use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::fields::Fields;

pub(crate) const FAMILY: Family =
    Family { architecture: "InternLM3ForCausalLM", model_type: "internlm3", head_dim: None, read_fields };

fn read_fields(fields: Fields<'_>, model: &mut ModelConfig) -> Result<(), ModelError> {
    let qkv_bias = fields.flag_or("qkv_bias", false)?;
    let bias = fields.flag_or("bias", false)?;
    set_biases(model, qkv_bias, bias, bias);
    Ok(())
}
