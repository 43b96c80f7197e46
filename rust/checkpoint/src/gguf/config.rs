//! Translation of GGUF metadata to the `config.json` of the same model.
//!
//! Settings that change the computation and have no equivalent in `config.json` are rejected, never ignored.

use serde_json::{Map, Value, json};

use super::header::{GgufHeader, TensorInfo};
use super::value::shortest;
use crate::dequantize;
use crate::error::{CheckpointError, shown};

/// Rope divisors per frequency: a tensor in ggml, a part of the configuration elsewhere.
pub(super) const ROPE_FACTORS: &str = "rope_freqs.weight";

/// The supported architectures and their Hugging Face classes.
const ARCHITECTURES: [(&str, &str); 3] =
    [("llama", "LlamaForCausalLM"), ("qwen2", "Qwen2ForCausalLM"), ("qwen3", "Qwen3ForCausalLM")];

/// The configuration, and the sizes that the tensor layout depends on.
pub(super) struct GgufConfig {
    pub(super) architecture: &'static str,
    pub(super) num_attention_heads: usize,
    pub(super) num_key_value_heads: usize,
    pub(super) head_dim: usize,
    pub(super) json: Value,
}

/// Reads the configuration. `bytes` is the complete file.
pub(super) fn read(header: &GgufHeader<'_>, bytes: &[u8]) -> Result<GgufConfig, CheckpointError> {
    let metadata = &header.metadata;
    let keys = ArchitectureKeys::new(header)?;
    let architecture = keys.architecture;

    let hidden_size = keys.size("embedding_length")?;
    let num_attention_heads = keys.size("attention.head_count")?;
    let num_key_value_heads = keys.optional_size("attention.head_count_kv")?.unwrap_or(num_attention_heads);
    let head_dim = head_dim(&keys, hidden_size, num_attention_heads)?;
    keys.require("attention.value_length", head_dim)?;
    keys.require("rope.dimension_count", head_dim)?;
    keys.require("expert_count", 0)?;
    if metadata.bool(&keys.full_key("attention.causal"))? == Some(false) {
        return Err(metadata.unsupported(&keys.full_key("attention.causal"), "false", "true"));
    }

    let mut json = Map::new();
    let mut set = |key: &str, value: Value| json.insert(key.to_owned(), value);
    let class = ARCHITECTURES.iter().find(|(name, _)| *name == architecture).map(|(_, class)| *class);
    set("architectures", json!([class]));
    set("model_type", json!(architecture));
    set("hidden_act", json!("silu"));
    set("hidden_size", json!(hidden_size));
    set("intermediate_size", json!(keys.size("feed_forward_length")?));
    set("num_hidden_layers", json!(keys.num_layers()?));
    set("num_attention_heads", json!(num_attention_heads));
    set("num_key_value_heads", json!(num_key_value_heads));
    set("head_dim", json!(head_dim));
    set("rms_norm_eps", json!(keys.float("attention.layer_norm_rms_epsilon")?));
    set("max_position_embeddings", json!(keys.size("context_length")?));
    set("vocab_size", json!(keys.vocab_size()?));
    set("tie_word_embeddings", json!(!header.tensors.contains_key("output.weight")));
    let has_bias = |module: &str| header.tensors.contains_key(format!("blk.0.{module}.bias").as_str());
    if architecture != "qwen2" {
        // Qwen 2 always has biases on queries, keys and values; its configuration has no key for them.
        set("attention_bias", json!(has_bias("attn_q")));
    }
    if architecture == "llama" {
        set("mlp_bias", json!(has_bias("ffn_gate")));
    }
    set("rope_theta", json!(keys.optional_float("rope.freq_base")?.unwrap_or(10_000.0)));
    set("rope_scaling", rope_scaling(&keys)?);
    if let Some(info) = header.tensors.get(ROPE_FACTORS) {
        set("rope_frequency_factors", frequency_factors(&keys, info, bytes, head_dim)?);
    }
    Ok(GgufConfig {
        architecture,
        num_attention_heads,
        num_key_value_heads,
        head_dim,
        json: Value::Object(json),
    })
}

fn head_dim(
    keys: &ArchitectureKeys<'_>,
    hidden_size: usize,
    num_heads: usize,
) -> Result<usize, CheckpointError> {
    let metadata = &keys.header.metadata;
    let head_dim = match keys.optional_size("attention.key_length")? {
        Some(length) => length,
        None if hidden_size.is_multiple_of(num_heads) => hidden_size / num_heads,
        None => {
            let problem = format!("embedding_length {hidden_size} is not a multiple of {num_heads} heads");
            return Err(metadata.malformed(&keys.full_key("attention.head_count"), problem));
        }
    };
    if head_dim.is_multiple_of(2) {
        return Ok(head_dim);
    }
    let problem = format!("heads of {head_dim} dimensions; an even number is expected");
    Err(metadata.malformed(&keys.full_key("attention.key_length"), problem))
}

fn rope_scaling(keys: &ArchitectureKeys<'_>) -> Result<Value, CheckpointError> {
    let metadata = &keys.header.metadata;
    let older_factor = keys.optional_float("rope.scale_linear")?;
    // ggml writes "none" as a factor of zero.
    let factor = keys.optional_float("rope.scaling.factor")?.or(older_factor).filter(|&factor| factor != 0.0);
    let kind = metadata.text(&keys.full_key("rope.scaling.type"))?;
    match (kind.unwrap_or("linear"), factor) {
        ("none", _) | ("linear", None) => Ok(Value::Null),
        ("linear", Some(factor)) => Ok(json!({ "rope_type": "linear", "factor": factor })),
        ("yarn", Some(factor)) => yarn(keys, factor),
        ("yarn", None) => {
            Err(metadata
                .malformed(&keys.full_key("rope.scaling.factor"), "missing; yarn scaling requires it"))
        }
        (other, _) => {
            Err(metadata.unsupported(&keys.full_key("rope.scaling.type"), shown(other), "none, linear, yarn"))
        }
    }
}

fn yarn(keys: &ArchitectureKeys<'_>, factor: f64) -> Result<Value, CheckpointError> {
    let mut scaling = json!({ "rope_type": "yarn", "factor": factor });
    if let Some(length) = keys.optional_size("rope.scaling.original_context_length")? {
        scaling["original_max_position_embeddings"] = json!(length);
    }
    let scale = keys.optional_float("rope.scaling.attn_factor")?.unwrap_or(1.0)
        * keys.optional_float("rope.scaling.yarn_attn_factor")?.unwrap_or(1.0);
    if scale != 1.0 {
        // ggml multiplies yarn's own temperature by these factors; Hugging Face expects the product.
        scaling["attention_factor"] = json!(scale * (0.1 * factor.ln() + 1.0));
    }
    keys.require_number("rope.scaling.yarn_ext_factor", 1.0)?;
    keys.require_number("rope.scaling.yarn_log_multiplier", 0.0)?;
    for (key, name) in
        [("beta_fast", "rope.scaling.yarn_beta_fast"), ("beta_slow", "rope.scaling.yarn_beta_slow")]
    {
        if let Some(beta) = keys.optional_float(name)? {
            scaling[key] = json!(beta);
        }
    }
    Ok(scaling)
}

fn frequency_factors(
    keys: &ArchitectureKeys<'_>,
    info: &TensorInfo,
    bytes: &[u8],
    head_dim: usize,
) -> Result<Value, CheckpointError> {
    let malformed = |problem| keys.header.metadata.malformed(&format!("tensor {ROPE_FACTORS}"), problem);
    if info.shape != [head_dim / 2] {
        return Err(malformed(format!("shape {:?}; half of head_dim {head_dim} is expected", info.shape)));
    }
    let mut factors = vec![0.0; head_dim / 2];
    dequantize::to_f32(info.storage, &bytes[info.range.clone()], &mut factors);
    match factors.iter().find(|factor| !factor.is_finite() || **factor <= 0.0) {
        Some(factor) => Err(malformed(format!("{factor}; positive factors are expected"))),
        None => Ok(factors.into_iter().map(shortest).collect()),
    }
}

/// Access to the metadata keys of the architecture.
struct ArchitectureKeys<'h> {
    header: &'h GgufHeader<'h>,
    architecture: &'static str,
}

impl<'h> ArchitectureKeys<'h> {
    fn new(header: &'h GgufHeader<'h>) -> Result<Self, CheckpointError> {
        let key = "general.architecture";
        let Some(found) = header.metadata.text(key)? else {
            return Err(header.metadata.malformed(key, "missing"));
        };
        match ARCHITECTURES.iter().find(|(name, _)| *name == found) {
            Some((architecture, _)) => Ok(ArchitectureKeys { header, architecture }),
            None => {
                let supported = ARCHITECTURES.map(|(name, _)| name).join(", ");
                Err(header.metadata.unsupported(key, shown(found), supported))
            }
        }
    }

    fn full_key(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    fn missing(&self, key: &str) -> CheckpointError {
        self.header.metadata.malformed(&self.full_key(key), "missing")
    }

    /// A positive count or size, small enough that a product of two cannot overflow.
    fn optional_size(&self, key: &str) -> Result<Option<usize>, CheckpointError> {
        let Some(size) = self.header.metadata.integer(&self.full_key(key))? else { return Ok(None) };
        match u32::try_from(size) {
            Ok(size @ 1..) => Ok(Some(size as usize)),
            _ => {
                let problem = format!("{size}; 1 to {} is expected", u32::MAX);
                Err(self.header.metadata.malformed(&self.full_key(key), problem))
            }
        }
    }

    fn size(&self, key: &str) -> Result<usize, CheckpointError> {
        self.optional_size(key)?.ok_or_else(|| self.missing(key))
    }

    fn optional_float(&self, key: &str) -> Result<Option<f64>, CheckpointError> {
        self.header.metadata.float(&self.full_key(key))
    }

    fn float(&self, key: &str) -> Result<f64, CheckpointError> {
        self.optional_float(key)?.ok_or_else(|| self.missing(key))
    }

    /// Checks an optional setting with only one supported value.
    fn require(&self, key: &str, supported: usize) -> Result<(), CheckpointError> {
        match self.header.metadata.integer(&self.full_key(key))? {
            Some(found) if found != supported as u64 => Err(self.header.metadata.unsupported(
                &self.full_key(key),
                found.to_string(),
                supported.to_string(),
            )),
            _ => Ok(()),
        }
    }

    fn require_number(&self, key: &str, supported: f64) -> Result<(), CheckpointError> {
        match self.optional_float(key)? {
            Some(found) if found != supported => Err(self.header.metadata.unsupported(
                &self.full_key(key),
                found.to_string(),
                supported.to_string(),
            )),
            _ => Ok(()),
        }
    }

    /// The number of layers, which is bounded by the number of tensors.
    fn num_layers(&self) -> Result<usize, CheckpointError> {
        let (layers, tensors) = (self.size("block_count")?, self.header.tensors.len());
        if layers <= tensors {
            return Ok(layers);
        }
        let problem = format!("{layers}; the file has {tensors} tensors");
        Err(self.header.metadata.malformed(&self.full_key("block_count"), problem))
    }

    /// The number of rows of the embedding. An optional key must have the same value.
    fn vocab_size(&self) -> Result<usize, CheckpointError> {
        let Some(TensorInfo { shape, .. }) = self.header.tensors.get("token_embd.weight") else {
            return Err(self.header.metadata.malformed("tensor token_embd.weight", "missing"));
        };
        let rows = shape[0];
        match self.optional_size("vocab_size")? {
            Some(size) if size != rows => {
                let problem = format!("{size}; the embedding has {rows} rows");
                Err(self.header.metadata.malformed(&self.full_key("vocab_size"), problem))
            }
            _ => Ok(rows),
        }
    }
}
