//! Mistral: Llama without biases; one sliding window for every layer.

use super::Family;
use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::fields::{Fields, MAX_POSITIONS};

pub(crate) const FAMILY: Family =
    Family { architecture: "MistralForCausalLM", model_type: "mistral", head_dim: None, read_fields };

/// The window of Mistral 7B v0.1.
const DEFAULT_WINDOW: usize = 4096;

fn read_fields(fields: Fields<'_>, model: &mut ModelConfig) -> Result<(), ModelError> {
    // A missing field means the default; null means no window.
    let window = if fields.contains("sliding_window") {
        fields.optional_count("sliding_window", MAX_POSITIONS)?
    } else {
        Some(DEFAULT_WINDOW)
    };
    model.layers.iter_mut().for_each(|layer| layer.attention.window = window);
    Ok(())
}
