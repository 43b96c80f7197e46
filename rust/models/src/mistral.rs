//! Mistral: Llama without biases, with one sliding window for every layer where the configuration gives one.

use crate::config::{Family, MOST_POSITIONS, ModelConfig, ModelError};
use crate::fields::Fields;

pub(crate) const FAMILY: Family =
    Family { architecture: "MistralForCausalLM", model_type: "mistral", head_dim: None, refine };

fn refine(fields: Fields<'_>, model: &mut ModelConfig) -> Result<(), ModelError> {
    let window = fields.optional_count("sliding_window", MOST_POSITIONS)?;
    model.windows.fill(window);
    Ok(())
}
