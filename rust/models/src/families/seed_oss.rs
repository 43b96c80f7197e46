//! Seed-OSS: its own default of `head_dim`; biases on q, k and v by default, a separate one on the output projection.

use super::{Family, set_biases};
use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::fields::Fields;

pub(crate) const FAMILY: Family =
    Family { architecture: "SeedOssForCausalLM", model_type: "seed_oss", head_dim: Some(128), read_fields };

fn read_fields(fields: Fields<'_>, model: &mut ModelConfig) -> Result<(), ModelError> {
    let qkv_bias = fields.flag_or("attention_bias", true)?;
    let output_bias = fields.flag_or("attention_out_bias", false)?;
    let mlp_bias = fields.flag_or("mlp_bias", false)?;
    set_biases(model, qkv_bias, output_bias, mlp_bias);
    Ok(())
}
