//! The model families: each file has the fields that only its family reads.

pub(crate) mod internlm3;
pub(crate) mod llama;
pub(crate) mod mistral;
pub(crate) mod qwen2;
pub(crate) mod qwen3;
pub(crate) mod seed_oss;

use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::fields::{Fields, MAX_POSITIONS};

/// A model family.
pub(crate) struct Family {
    /// Name in `architectures`.
    pub(crate) architecture: &'static str,
    /// Name in `model_type`.
    pub(crate) model_type: &'static str,
    /// Default of `head_dim`; `None` divides the hidden size by the number of heads.
    pub(crate) head_dim: Option<usize>,
    /// Reads the fields of the family into a configuration that has the common fields.
    pub(crate) read_fields: fn(Fields<'_>, &mut ModelConfig) -> Result<(), ModelError>,
}

impl Family {
    /// Whether this is the name of the family's model without its head, such as `LlamaModel`.
    pub(crate) fn is_without_head(&self, name: &str) -> bool {
        name.strip_suffix("Model")
            .is_some_and(|stem| self.architecture.strip_prefix(stem) == Some("ForCausalLM"))
    }
}

/// Sets the biases of every layer: on q, k and v; on the output projection; on gate, up and down.
fn set_biases(model: &mut ModelConfig, qkv: bool, output: bool, mlp: bool) {
    for layer in &mut model.layers {
        layer.attention.qkv_bias = qkv;
        layer.attention.output_bias = output;
        layer.mlp.bias = mlp;
    }
}

/// Reads the sliding windows of Qwen: none unless `use_sliding_window` is set, else those of `layer_types`, or of the
/// layers from `max_window_layers` on.
fn read_qwen_windows(fields: Fields<'_>, model: &mut ModelConfig) -> Result<(), ModelError> {
    if !fields.flag_or("use_sliding_window", false)? {
        return Ok(());
    }
    let Some(window) = fields.optional_count("sliding_window", MAX_POSITIONS)? else { return Ok(()) };
    let num_layers = model.num_layers();
    if let Some(types) = fields.optional_list("layer_types")? {
        if types.len() != num_layers {
            let limit = format!("a list of num_hidden_layers={num_layers} names");
            return Err(fields.error("layer_types", &types.len().into(), limit));
        }
        for (layer, kind) in model.layers.iter_mut().zip(types) {
            layer.attention.window = match kind.as_str() {
                Some("sliding_attention") => Some(window),
                Some("full_attention") => None,
                _ => return Err(fields.error("layer_types", kind, "full_attention or sliding_attention")),
            };
        }
    } else {
        // 0 is allowed: every layer has the window.
        let first = match fields.get("max_window_layers") {
            None => return Err(ModelError::Missing { field: "max_window_layers".to_owned() }),
            Some(value) => value
                .as_u64()
                .and_then(|first| usize::try_from(first).ok())
                .ok_or_else(|| fields.error("max_window_layers", value, "an integer of at least 0"))?,
        };
        for layer in model.layers.iter_mut().skip(first) {
            layer.attention.window = Some(window);
        }
    }
    Ok(())
}
