//! What a decoder needs to know about a model, whatever the family: sizes, options, rope, windows.
//!
//! [`ModelConfig::from_json`] reads a Hugging Face `config.json` (or its equivalent made from GGUF metadata), hands it to the
//! family that claims it, and checks that the sizes fit together. Both spellings are read: `rope_theta`, `rope_scaling`
//! and `torch_dtype` of transformers 4, `rope_parameters` and `dtype` of transformers 5.

use penstock_types::HeadShape;
use serde_json::Value;

use crate::fields::Fields;
use crate::rope::Rope;
use crate::{llama, mistral, qwen2, qwen3};

/// Largest sizes accepted, far above any published model: they keep a hostile configuration from overflowing a product.
const MOST_LAYERS: usize = 1 << 12;
const MOST_WIDTH: usize = 1 << 20;
const MOST_HEADS: usize = 1 << 12;
const MOST_HEAD_DIM: usize = 1 << 12;
const MOST_VOCABULARY: usize = 1 << 24;
pub(crate) const MOST_POSITIONS: usize = 1 << 30;

/// The model is not one we know, or its configuration makes no sense.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// No family claims it.
    #[error("architecture {found} is not supported; supported are {supported}")]
    UnknownArchitecture {
        /// What the configuration says.
        found: String,
        /// What would do.
        supported: String,
    },
    /// A field is not there.
    #[error("config: {field} is missing")]
    Missing {
        /// Its name.
        field: String,
    },
    /// A field has a value that cannot be used.
    #[error("config: {field}={value} cannot be used: it must be {limit}")]
    Field {
        /// Its name.
        field: String,
        /// What it says.
        value: String,
        /// What is allowed.
        limit: String,
    },
    /// A tensor's shape does not fit the configuration.
    #[error("tensor {tensor} has shape {found:?}; the configuration asks for {expected:?}")]
    Shape {
        /// Its name.
        tensor: String,
        /// What the file has.
        found: Vec<usize>,
        /// What the configuration implies.
        expected: Vec<usize>,
    },
    /// A tensor could not be read.
    #[error(transparent)]
    Checkpoint(#[from] penstock_checkpoint::CheckpointError),
    /// The device refused.
    #[error(transparent)]
    Device(#[from] penstock_device::DeviceError),
    /// The caller's progress function asked to stop.
    #[error("loading was cancelled")]
    Cancelled,
}

/// A decoder's shape and options.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Hugging Face architecture name.
    pub architecture: String,
    /// Number of token ids.
    pub vocabulary_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the feed-forward part.
    pub intermediate_size: usize,
    /// Query, key and value heads.
    pub heads: HeadShape,
    /// Epsilon of every RMS norm.
    pub norm_epsilon: f32,
    /// The output head is the embedding table.
    pub tied_head: bool,
    /// Longest sequence the model was made for.
    pub max_position_embeddings: usize,
    /// Rotary position embedding.
    pub rope: Rope,
    /// Biases on q, k, v.
    pub qkv_bias: bool,
    /// Bias on the attention's output projection.
    pub output_bias: bool,
    /// Biases on gate, up and down.
    pub mlp_bias: bool,
    /// RMS norms over each head of q and k before the rotation.
    pub qk_norm: bool,
    /// Sliding window of each layer; its length is the number of layers.
    pub windows: Vec<Option<usize>>,
}

/// What a family says about its models beyond what all share.
pub(crate) struct Family {
    /// Name in `architectures`.
    pub(crate) architecture: &'static str,
    /// Name in `model_type`.
    pub(crate) model_type: &'static str,
    /// Width of a head where the configuration gives none; `None` divides the hidden size.
    pub(crate) head_dim: Option<usize>,
    /// Turns the shared part into this family's.
    pub(crate) refine: fn(Fields<'_>, &mut ModelConfig) -> Result<(), ModelError>,
}

/// Every family there is.
const FAMILIES: [Family; 4] = [llama::FAMILY, mistral::FAMILY, qwen2::FAMILY, qwen3::FAMILY];

impl ModelConfig {
    /// Reads a Hugging Face configuration.
    pub fn from_json(config: &Value) -> Result<Self, ModelError> {
        let fields = Fields::new(config);
        let family = find_family(fields)?;
        let mut model = shared_part(family, fields)?;
        (family.refine)(fields, &mut model)?;
        Ok(model)
    }

    /// Number of decoder layers.
    pub fn num_layers(&self) -> usize {
        self.windows.len()
    }

    /// Number of weights, tied ones counted once.
    pub fn num_parameters(&self) -> u64 {
        let wide = |rows: usize, columns: usize| rows as u64 * columns as u64;
        let attention = wide(self.heads.qkv_width(), self.hidden_size)
            + wide(self.hidden_size, self.heads.query_width())
            + if self.qkv_bias { self.heads.qkv_width() as u64 } else { 0 }
            + if self.output_bias { self.hidden_size as u64 } else { 0 }
            + if self.qk_norm { 2 * self.heads.head_dim as u64 } else { 0 };
        let mlp = 3 * wide(self.intermediate_size, self.hidden_size)
            + if self.mlp_bias { (2 * self.intermediate_size + self.hidden_size) as u64 } else { 0 };
        let layer = attention + mlp + 2 * self.hidden_size as u64;
        let tables = wide(self.vocabulary_size, self.hidden_size) * if self.tied_head { 1 } else { 2 };
        layer * self.num_layers() as u64 + tables + self.hidden_size as u64
    }
}

/// The family named by `architectures`, or else by `model_type`.
fn find_family(fields: Fields<'_>) -> Result<&'static Family, ModelError> {
    let architecture = fields.optional_list("architectures")?.and_then(|list| list.first()?.as_str());
    let model_type = fields.optional_text("model_type")?;
    FAMILIES
        .iter()
        .find(|family| match architecture {
            Some(name) => name == family.architecture,
            None => model_type == Some(family.model_type),
        })
        .ok_or_else(|| ModelError::UnknownArchitecture {
            found: architecture.or(model_type).unwrap_or("(none named)").to_owned(),
            supported: FAMILIES.map(|family| family.architecture).join(", "),
        })
}

/// What every family spells the same way.
fn shared_part(family: &Family, fields: Fields<'_>) -> Result<ModelConfig, ModelError> {
    if let Some(activation) = fields.optional_text("hidden_act")?.filter(|name| *name != "silu") {
        return Err(fields.error("hidden_act", &activation.into(), "\"silu\""));
    }
    let hidden_size = fields.count("hidden_size", MOST_WIDTH)?;
    let heads = fields.count("num_attention_heads", MOST_HEADS)?;
    let kv_heads = fields.count_or("num_key_value_heads", MOST_HEADS, heads)?;
    if !heads.is_multiple_of(kv_heads) {
        let limit = format!("a divisor of num_attention_heads={heads}");
        return Err(fields.error("num_key_value_heads", &kv_heads.into(), limit));
    }
    let head_dim = match fields.optional_count("head_dim", MOST_HEAD_DIM)?.or(family.head_dim) {
        Some(head_dim) => head_dim,
        None if hidden_size.is_multiple_of(heads) => hidden_size / heads,
        None => {
            let limit = format!("a multiple of num_attention_heads={heads} where head_dim is not given");
            return Err(fields.error("hidden_size", &hidden_size.into(), limit));
        }
    };
    if head_dim % 2 != 0 {
        return Err(fields.error("head_dim", &head_dim.into(), "even"));
    }
    let max_position_embeddings = fields.count("max_position_embeddings", MOST_POSITIONS)?;
    Ok(ModelConfig {
        architecture: family.architecture.to_owned(),
        vocabulary_size: fields.count("vocab_size", MOST_VOCABULARY)?,
        hidden_size,
        intermediate_size: fields.count("intermediate_size", MOST_WIDTH)?,
        heads: HeadShape { heads, kv_heads, head_dim },
        norm_epsilon: fields.positive_or("rms_norm_eps", 1e-6)? as f32,
        tied_head: fields.flag_or("tie_word_embeddings", false)?,
        max_position_embeddings,
        rope: Rope::from_fields(fields, head_dim, max_position_embeddings)?,
        qkv_bias: false,
        output_bias: false,
        mlp_bias: false,
        qk_norm: false,
        windows: vec![None; fields.count("num_hidden_layers", MOST_LAYERS)?],
    })
}

/// Qwen's rule for windows: `layer_types` where it is given, else the layers from `max_window_layers` on; none at all
/// unless `use_sliding_window` is set.
pub(crate) fn qwen_windows(fields: Fields<'_>, model: &mut ModelConfig) -> Result<(), ModelError> {
    if !fields.flag_or("use_sliding_window", false)? {
        return Ok(());
    }
    let Some(window) = fields.optional_count("sliding_window", MOST_POSITIONS)? else { return Ok(()) };
    let num_layers = model.num_layers();
    if let Some(types) = fields.optional_list("layer_types")? {
        if types.len() != num_layers {
            let limit = format!("a list of num_hidden_layers={num_layers} names");
            return Err(fields.error("layer_types", &types.len().into(), limit));
        }
        for (slot, kind) in model.windows.iter_mut().zip(types) {
            *slot = match kind.as_str() {
                Some("sliding_attention") => Some(window),
                Some("full_attention") => None,
                _ => return Err(fields.error("layer_types", kind, "full_attention or sliding_attention")),
            };
        }
    } else {
        // max_window_layers may be 0 (every layer slides), so it is no count.
        let first = match fields.get("max_window_layers") {
            None => return Err(ModelError::Missing { field: "max_window_layers".to_owned() }),
            Some(value) => value
                .as_u64()
                .and_then(|first| usize::try_from(first).ok())
                .ok_or_else(|| fields.error("max_window_layers", value, "a whole number"))?,
        };
        for slot in model.windows.iter_mut().skip(first) {
            *slot = Some(window);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn llama() -> Value {
        json!({
            "architectures": ["LlamaForCausalLM"], "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 3,
            "num_key_value_heads": 1, "num_hidden_layers": 2, "vocab_size": 100, "max_position_embeddings": 64,
        })
    }

    fn with(field: &str, value: Value) -> Value {
        let mut config = llama();
        config[field] = value;
        config
    }

    #[test]
    fn a_family_adds_what_is_its_own() {
        let qwen3 =
            ModelConfig::from_json(&with("architectures", json!(["Qwen3ForCausalLM"]))).expect("qwen3");
        assert!(qwen3.qk_norm && !qwen3.qkv_bias);
        assert_eq!(qwen3.heads.head_dim, 128, "Qwen3 has a head width of its own");
        let mut mistral = with("architectures", json!(["MistralForCausalLM"]));
        mistral["sliding_window"] = json!(16);
        assert_eq!(ModelConfig::from_json(&mistral).expect("mistral").windows, [Some(16); 2]);
        mistral["sliding_window"] = Value::Null;
        assert_eq!(ModelConfig::from_json(&mistral).expect("mistral").windows, [None; 2]);
        let unnamed = with("architectures", json!(["MistralForCausalLM"]));
        assert_eq!(ModelConfig::from_json(&unnamed).expect("mistral").windows, [Some(4096); 2]);
        let mut qwen2 = with("architectures", json!(["Qwen2ForCausalLM"]));
        qwen2["use_sliding_window"] = json!(true);
        qwen2["sliding_window"] = json!(16);
        qwen2["max_window_layers"] = json!(1);
        assert_eq!(ModelConfig::from_json(&qwen2).expect("qwen2").windows, [None, Some(16)]);
    }

    #[test]
    fn the_model_type_decides_where_no_architecture_is_named() {
        let mut config = llama();
        config["architectures"] = Value::Null;
        config["model_type"] = json!("qwen2");
        assert_eq!(ModelConfig::from_json(&config).expect("qwen2").architecture, "Qwen2ForCausalLM");
    }

    #[test]
    fn what_cannot_be_used_is_refused_by_field_value_and_limit() {
        for (field, value) in [
            ("hidden_size", json!(0)),
            ("hidden_size", json!("24")),
            ("hidden_size", json!(25)),
            ("num_hidden_layers", json!(1_000_000)),
            ("num_key_value_heads", json!(2)),
            ("head_dim", json!(7)),
            ("vocab_size", Value::Null),
            ("rms_norm_eps", json!(-1e-6)),
            ("hidden_act", json!("gelu")),
            ("tie_word_embeddings", json!(1)),
            ("max_position_embeddings", json!(1e300)),
        ] {
            let message = ModelConfig::from_json(&with(field, value.clone())).expect_err(field).to_string();
            assert!(message.contains(field), "{message} should name {field}");
            assert!(value.is_null() || message.contains(&value.to_string()), "{message} should show {value}");
        }
        let message =
            ModelConfig::from_json(&with("architectures", json!(["T5"]))).expect_err("T5").to_string();
        assert!(message.contains("T5") && message.contains("LlamaForCausalLM"), "{message}");
    }
}
