//! Mistral: Llama without biases, with one sliding window for every layer where the configuration gives one.

use crate::config::{Family, MOST_POSITIONS, ModelConfig, ModelError};
use crate::fields::Fields;

pub(crate) const FAMILY: Family =
    Family { architecture: "MistralForCausalLM", model_type: "mistral", head_dim: None, refine };

/// Of Mistral 7B v0.1.
const FIRST_WINDOW: usize = 4096;

fn refine(fields: Fields<'_>, model: &mut ModelConfig) -> Result<(), ModelError> {
    // Not naming a window means the first Mistral's; having none is said by null.
    let window = if fields.names("sliding_window") {
        fields.optional_count("sliding_window", MOST_POSITIONS)?
    } else {
        Some(FIRST_WINDOW)
    };
    model.windows.fill(window);
    Ok(())
}
