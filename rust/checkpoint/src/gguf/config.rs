//! GGUF metadata as the `config.json` that Hugging Face would have written for the same model.
//!
//! Settings that would change what these architectures compute and have no Hugging Face spelling are refused by key and
//! value, never left out.

use serde_json::{Map, Value, json};

use super::header::{Header, TensorInfo};
use super::metadata::shortest;
use crate::dequantize;
use crate::error::{CheckpointError, shown};

/// Rope divisors by frequency: a tensor to ggml, part of the configuration to everyone else.
pub(super) const ROPE_FACTORS: &str = "rope_freqs.weight";

/// The architectures that are read, with what Hugging Face calls them.
const ARCHITECTURES: [(&str, &str); 3] =
    [("llama", "LlamaForCausalLM"), ("qwen2", "Qwen2ForCausalLM"), ("qwen3", "Qwen3ForCausalLM")];

/// The sizes that the layout of the tensors depends on, and the configuration with all the rest.
pub(super) struct Config {
    pub(super) architecture: &'static str,
    pub(super) num_attention_heads: usize,
    pub(super) num_key_value_heads: usize,
    pub(super) head_dim: usize,
    pub(super) json: Value,
}

/// Reads the configuration of a file; `bytes` are all of it.
pub(super) fn read(header: &Header<'_>, bytes: &[u8]) -> Result<Config, CheckpointError> {
    let metadata = &header.metadata;
    let keys = Keys::new(header)?;
    let architecture = keys.architecture;

    let hidden_size = keys.size("embedding_length")?;
    let num_attention_heads = keys.size("attention.head_count")?;
    let num_key_value_heads = keys.optional_size("attention.head_count_kv")?.unwrap_or(num_attention_heads);
    let head_dim = head_dim(&keys, hidden_size, num_attention_heads)?;
    keys.only("attention.value_length", head_dim)?;
    keys.only("rope.dimension_count", head_dim)?;
    keys.only("expert_count", 0)?;
    if metadata.bool(&keys.full("attention.causal"))? == Some(false) {
        return Err(metadata.unsupported(&keys.full("attention.causal"), "false", "true"));
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
        // Qwen 2 always has biases on queries, keys and values; its configuration has no word for it.
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
    Ok(Config { architecture, num_attention_heads, num_key_value_heads, head_dim, json: Value::Object(json) })
}

fn head_dim(keys: &Keys<'_>, hidden_size: usize, num_heads: usize) -> Result<usize, CheckpointError> {
    let metadata = &keys.header.metadata;
    let head_dim = match keys.optional_size("attention.key_length")? {
        Some(length) => length,
        None if hidden_size.is_multiple_of(num_heads) => hidden_size / num_heads,
        None => {
            let problem = format!("{num_heads} heads do not divide embedding_length {hidden_size}");
            return Err(metadata.malformed(&keys.full("attention.head_count"), problem));
        }
    };
    if head_dim.is_multiple_of(2) {
        return Ok(head_dim);
    }
    let problem = format!("heads of {head_dim} dimensions; rotation needs an even number");
    Err(metadata.malformed(&keys.full("attention.key_length"), problem))
}

fn rope_scaling(keys: &Keys<'_>) -> Result<Value, CheckpointError> {
    let metadata = &keys.header.metadata;
    let older = keys.optional_float("rope.scale_linear")?;
    // A factor of zero is how ggml writes "none".
    let factor = keys.optional_float("rope.scaling.factor")?.or(older).filter(|&factor| factor != 0.0);
    let kind = metadata.text(&keys.full("rope.scaling.type"))?;
    match (kind.unwrap_or("linear"), factor) {
        ("none", _) | ("linear", None) => Ok(Value::Null),
        ("linear", Some(factor)) => Ok(json!({ "rope_type": "linear", "factor": factor })),
        ("yarn", Some(factor)) => yarn(keys, factor),
        ("yarn", None) => {
            Err(metadata.malformed(&keys.full("rope.scaling.factor"), "yarn scaling needs one"))
        }
        (other, _) => {
            Err(metadata.unsupported(&keys.full("rope.scaling.type"), shown(other), "none, linear, yarn"))
        }
    }
}

fn yarn(keys: &Keys<'_>, factor: f64) -> Result<Value, CheckpointError> {
    let mut scaling = json!({ "rope_type": "yarn", "factor": factor });
    if let Some(length) = keys.optional_size("rope.scaling.original_context_length")? {
        scaling["original_max_position_embeddings"] = json!(length);
    }
    let scale = keys.optional_float("rope.scaling.attn_factor")?.unwrap_or(1.0)
        * keys.optional_float("rope.scaling.yarn_attn_factor")?.unwrap_or(1.0);
    if scale != 1.0 {
        // ggml multiplies yarn's own temperature by these; Hugging Face wants the product.
        scaling["attention_factor"] = json!(scale * (0.1 * factor.ln() + 1.0));
    }
    keys.only_number("rope.scaling.yarn_ext_factor", 1.0)?;
    keys.only_number("rope.scaling.yarn_log_multiplier", 0.0)?;
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
    keys: &Keys<'_>,
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
        Some(factor) => Err(malformed(format!("{factor}; factors above zero are expected"))),
        None => Ok(factors.into_iter().map(shortest).collect()),
    }
}

/// Look-ups below the architecture's own prefix.
struct Keys<'h> {
    header: &'h Header<'h>,
    architecture: &'static str,
}

impl<'h> Keys<'h> {
    fn new(header: &'h Header<'h>) -> Result<Self, CheckpointError> {
        let key = "general.architecture";
        let Some(found) = header.metadata.text(key)? else {
            return Err(header.metadata.malformed(key, "is missing"));
        };
        match ARCHITECTURES.iter().find(|(name, _)| *name == found) {
            Some((architecture, _)) => Ok(Keys { header, architecture }),
            None => {
                let supported = ARCHITECTURES.map(|(name, _)| name).join(", ");
                Err(header.metadata.unsupported(key, shown(found), supported))
            }
        }
    }

    fn full(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    fn missing(&self, key: &str) -> CheckpointError {
        self.header.metadata.malformed(&self.full(key), "is missing")
    }

    /// A count or size: at least 1, and small enough that products of two cannot overflow.
    fn optional_size(&self, key: &str) -> Result<Option<usize>, CheckpointError> {
        let Some(size) = self.header.metadata.integer(&self.full(key))? else { return Ok(None) };
        match u32::try_from(size) {
            Ok(size @ 1..) => Ok(Some(size as usize)),
            _ => {
                let problem = format!("{size}; 1 to {} is expected", u32::MAX);
                Err(self.header.metadata.malformed(&self.full(key), problem))
            }
        }
    }

    fn size(&self, key: &str) -> Result<usize, CheckpointError> {
        self.optional_size(key)?.ok_or_else(|| self.missing(key))
    }

    fn optional_float(&self, key: &str) -> Result<Option<f64>, CheckpointError> {
        self.header.metadata.float(&self.full(key))
    }

    fn float(&self, key: &str) -> Result<f64, CheckpointError> {
        self.optional_float(key)?.ok_or_else(|| self.missing(key))
    }

    /// A setting that may be absent but has only one value that is supported.
    fn only(&self, key: &str, supported: usize) -> Result<(), CheckpointError> {
        match self.header.metadata.integer(&self.full(key))? {
            Some(found) if found != supported as u64 => Err(self.header.metadata.unsupported(
                &self.full(key),
                found.to_string(),
                supported.to_string(),
            )),
            _ => Ok(()),
        }
    }

    fn only_number(&self, key: &str, supported: f64) -> Result<(), CheckpointError> {
        match self.optional_float(key)? {
            Some(found) if found != supported => Err(self.header.metadata.unsupported(
                &self.full(key),
                found.to_string(),
                supported.to_string(),
            )),
            _ => Ok(()),
        }
    }

    /// Every layer has tensors, which bounds what a file may claim.
    fn num_layers(&self) -> Result<usize, CheckpointError> {
        let (layers, tensors) = (self.size("block_count")?, self.header.tensors.len());
        if layers <= tensors {
            return Ok(layers);
        }
        let problem = format!("{layers}; the file has {tensors} tensors in all");
        Err(self.header.metadata.malformed(&self.full("block_count"), problem))
    }

    /// The rows of the embedding. Some files repeat the number in a key, which then has to agree.
    fn vocab_size(&self) -> Result<usize, CheckpointError> {
        let Some(TensorInfo { shape, .. }) = self.header.tensors.get("token_embd.weight") else {
            return Err(self.header.metadata.malformed("tensor token_embd.weight", "is missing"));
        };
        let rows = shape[0];
        match self.optional_size("vocab_size")? {
            Some(size) if size != rows => {
                let problem = format!("{size}; the embedding has {rows} rows");
                Err(self.header.metadata.malformed(&self.full("vocab_size"), problem))
            }
            _ => Ok(rows),
        }
    }
}
