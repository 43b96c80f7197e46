//! The supported model families, and the reading of a Hugging Face configuration.
//!
//! [`ModelConfig::from_json`] reads a `config.json` (or its equivalent made from GGUF metadata): the fields that all
//! families share here, the others by the family. It accepts the format of transformers 4 (`rope_theta`,
//! `rope_scaling`, `torch_dtype`) and 5 (`rope_parameters`, `dtype`).

use std::cell::RefCell;

use penstock_types::HeadShape;
use serde_json::{Map, Value, json};

use crate::blocks::{AttentionSpec, LayerSpec, MlpSpec};
use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::families::{Family, internlm3, llama, mistral, qwen2, qwen3, seed_oss};
use crate::fields::{Fields, MAX_POSITIONS};
use crate::rope::Rope;

/// Limits far above those of any published model; they exclude an overflow with a hostile configuration.
const MAX_LAYERS: usize = 1 << 12;
const MAX_WIDTH: usize = 1 << 20;
const MAX_HEADS: usize = 1 << 12;
const MAX_HEAD_DIM: usize = 1 << 12;
const MAX_VOCABULARY: usize = 1 << 24;

/// The supported families.
const FAMILIES: [Family; 6] =
    [internlm3::FAMILY, llama::FAMILY, mistral::FAMILY, qwen2::FAMILY, qwen3::FAMILY, seed_oss::FAMILY];

impl ModelConfig {
    /// Reads a Hugging Face configuration.
    pub fn from_json(config: &Value) -> Result<Self, ModelError> {
        Self::from_fields(Fields::new(config))
    }

    fn from_fields(fields: Fields<'_>) -> Result<Self, ModelError> {
        let (family, has_head) = find_family(fields)?;
        let mut model = read_common_fields(family, fields)?;
        // A model without a head is one for embeddings.
        model.tied_head |= !has_head;
        (family.read_fields)(fields, &mut model)?;
        Ok(model)
    }

    /// Reads a Hugging Face configuration after `overrides` are merged into it. An override that has no effect, because
    /// the field is not read, is an error.
    pub fn with_overrides(config: &Value, overrides: &Map<String, Value>) -> Result<Self, ModelError> {
        if overrides.is_empty() {
            return Self::from_json(config);
        }
        check_rope_override(config, overrides)?;
        let mut merged = config.clone();
        if let Value::Object(merged) = &mut merged {
            merge(merged, overrides);
        }
        let record = RefCell::default();
        let model = Self::from_fields(Fields::recording(&merged, &record))?;
        let read = record.into_inner();
        match paths(overrides).into_iter().find(|path| !read.contains(path)) {
            Some(field) => Err(ModelError::NotRead { architecture: model.architecture, field }),
            None => Ok(model),
        }
    }
}

/// Refuses an override of `rope_scaling` beside the file's `rope_parameters`: it would replace them, `rope_theta`
/// included.
fn check_rope_override(config: &Value, overrides: &Map<String, Value>) -> Result<(), ModelError> {
    let is_set = |value: Option<&Value>| value.is_some_and(|value| !value.is_null());
    let Some(scaling) = overrides.get("rope_scaling").filter(|scaling| is_set(Some(scaling))) else {
        return Ok(());
    };
    let parameters = overrides.get("rope_parameters").or(config.get("rope_parameters"));
    if is_set(config.get("rope_scaling")) || !is_set(parameters) {
        return Ok(());
    }
    let limit = format!(
        "written as {}: the model's file has rope_parameters in its place, which an override changes; \"rope_parameters\": \
         null beside it removes them",
        json!({ "rope_parameters": scaling })
    );
    Err(Fields::new(config).error("rope_scaling", scaling, limit))
}

/// Merges `overrides` into `config`, recursively where both values are objects.
fn merge(config: &mut Map<String, Value>, overrides: &Map<String, Value>) {
    for (name, value) in overrides {
        match (config.get_mut(name), value) {
            (Some(Value::Object(nested)), Value::Object(value)) => merge(nested, value),
            _ => drop(config.insert(name.clone(), value.clone())),
        }
    }
}

/// The paths of all values that are not objects, and of the objects themselves.
fn paths(object: &Map<String, Value>) -> Vec<String> {
    let nested = |(name, value): (&String, &Value)| {
        let inner = value.as_object().map(paths).unwrap_or_default();
        let inner = inner.into_iter().map(|path| format!("{name}.{path}"));
        [name.clone()].into_iter().chain(inner).collect::<Vec<_>>()
    };
    object.iter().flat_map(nested).collect()
}

/// The family named by `architectures`, or else by `model_type`, and whether the architecture has a head.
fn find_family(fields: Fields<'_>) -> Result<(&'static Family, bool), ModelError> {
    let architecture = fields.optional_list("architectures")?.and_then(|list| list.first()?.as_str());
    let model_type = fields.optional_text("model_type")?;
    let find = |is_it: &dyn Fn(&Family) -> bool| FAMILIES.iter().find(|family| is_it(family));
    let found = match architecture {
        Some(name) => find(&|family| name == family.architecture)
            .map(|family| (family, true))
            .or_else(|| find(&|family| family.is_without_head(name)).map(|family| (family, false))),
        None => find(&|family| model_type == Some(family.model_type)).map(|family| (family, true)),
    };
    found.ok_or_else(|| ModelError::UnknownArchitecture {
        found: architecture.or(model_type).unwrap_or("(none)").to_owned(),
        supported: FAMILIES.map(|family| family.architecture).join(", "),
    })
}

/// Fields that change the result of the model and are not supported: they must be missing, null or false.
const UNSUPPORTED: [&str; 4] =
    ["use_dynamic_ntk", "attn_logit_softcapping", "final_logit_softcapping", "quantization_config"];

/// Reads the fields that all families share.
fn read_common_fields(family: &Family, fields: Fields<'_>) -> Result<ModelConfig, ModelError> {
    for name in UNSUPPORTED {
        if let Some(value) = fields.get(name).filter(|value| **value != Value::Bool(false)) {
            return Err(fields.error(name, value, "missing: penstock does not support it"));
        }
    }
    if let Some(activation) = fields.optional_text("hidden_act")?.filter(|name| *name != "silu") {
        return Err(fields.error("hidden_act", &activation.into(), "\"silu\""));
    }
    let hidden_size = fields.count("hidden_size", MAX_WIDTH)?;
    let heads = fields.count("num_attention_heads", MAX_HEADS)?;
    let kv_heads = fields.count_or("num_key_value_heads", MAX_HEADS, heads)?;
    if !heads.is_multiple_of(kv_heads) {
        let limit = format!("a divisor of num_attention_heads={heads}");
        return Err(fields.error("num_key_value_heads", &kv_heads.into(), limit));
    }
    let head_dim = match fields.optional_count("head_dim", MAX_HEAD_DIM)?.or(family.head_dim) {
        Some(head_dim) => head_dim,
        None if hidden_size.is_multiple_of(heads) => hidden_size / heads,
        None => {
            let limit = format!("a multiple of num_attention_heads={heads} if head_dim is not set");
            return Err(fields.error("hidden_size", &hidden_size.into(), limit));
        }
    };
    if head_dim % 2 != 0 {
        return Err(fields.error("head_dim", &head_dim.into(), "even"));
    }
    let max_position_embeddings = fields.count("max_position_embeddings", MAX_POSITIONS)?;
    let rope = Rope::from_fields(fields, head_dim, max_position_embeddings)?;
    let mlp = MlpSpec { width: fields.count("intermediate_size", MAX_WIDTH)?, bias: false };
    let layer = LayerSpec { attention: AttentionSpec::default(), mlp };
    Ok(ModelConfig {
        architecture: family.architecture.to_owned(),
        vocabulary_size: fields.count("vocab_size", MAX_VOCABULARY)?,
        hidden_size,
        heads: HeadShape { heads, kv_heads, head_dim },
        norm_epsilon: fields.positive_or("rms_norm_eps", 1e-6)? as f32,
        tied_head: fields.flag_or("tie_word_embeddings", false)?,
        max_position_embeddings,
        logn_len: read_logn_len(fields, &rope)?,
        rope,
        layers: vec![layer; fields.count("num_hidden_layers", MAX_LAYERS)?],
    })
}

/// The trained length of a model with log-n attention: Qwen 1 names it `seq_length`.
fn read_logn_len(fields: Fields<'_>, rope: &Rope) -> Result<Option<usize>, ModelError> {
    if !fields.flag_or("use_logn_attn", false)? {
        return Ok(None);
    }
    let trained = fields.count_or("seq_length", MAX_POSITIONS, rope.trained_len())?;
    if trained < 2 {
        return Err(fields.error("seq_length", &trained.into(), "at least 2 with use_logn_attn"));
    }
    Ok(Some(trained))
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

    fn windows(config: &Value) -> Vec<Option<usize>> {
        let model = ModelConfig::from_json(config).expect("valid");
        model.layers.iter().map(|layer| layer.attention.window).collect()
    }

    #[test]
    fn family_reads_its_own_fields() {
        let qwen3 =
            ModelConfig::from_json(&with("architectures", json!(["Qwen3ForCausalLM"]))).expect("qwen3");
        let attention = &qwen3.layers[0].attention;
        assert!(attention.qk_norm && !attention.qkv_bias);
        assert_eq!(qwen3.heads.head_dim, 128, "the default of Qwen3");
        let seed_oss =
            ModelConfig::from_json(&with("architectures", json!(["SeedOssForCausalLM"]))).expect("seed_oss");
        assert_eq!(seed_oss.heads.head_dim, 128, "the default of Seed-OSS");
        let mut mistral = with("architectures", json!(["MistralForCausalLM"]));
        mistral["sliding_window"] = json!(16);
        assert_eq!(windows(&mistral), [Some(16); 2]);
        mistral["sliding_window"] = Value::Null;
        assert_eq!(windows(&mistral), [None; 2]);
        let unnamed = with("architectures", json!(["MistralForCausalLM"]));
        assert_eq!(windows(&unnamed), [Some(4096); 2]);
        let mut qwen2 = with("architectures", json!(["Qwen2ForCausalLM"]));
        qwen2["use_sliding_window"] = json!(true);
        qwen2["sliding_window"] = json!(16);
        qwen2["max_window_layers"] = json!(1);
        assert_eq!(windows(&qwen2), [None, Some(16)]);
    }

    fn overridden(config: &Value, overrides: Value) -> Result<ModelConfig, ModelError> {
        ModelConfig::with_overrides(config, overrides.as_object().expect("an object"))
    }

    #[test]
    fn overrides_are_merged_into_nested_objects() {
        let file = with("rope_scaling", json!({"rope_type": "yarn", "factor": 2.0, "beta_fast": 16.0}));
        let overrides = json!({"max_position_embeddings": 256, "rope_scaling": {"factor": 4.0}});
        let mut expected =
            with("rope_scaling", json!({"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0}));
        expected["max_position_embeddings"] = json!(256);
        let expected = ModelConfig::from_json(&expected).expect("valid");
        assert_eq!(overridden(&file, overrides).expect("valid"), expected);
        let plain = ModelConfig::from_json(&llama()).expect("valid");
        assert_eq!(overridden(&file, json!({"rope_scaling": null})).expect("valid"), plain, "null removes");
        assert_eq!(overridden(&llama(), json!({})).expect("valid"), plain);
        let replaced = overridden(&with("rope_scaling", Value::Null), file_scaling(&file)).expect("valid");
        assert_eq!(replaced, ModelConfig::from_json(&file).expect("valid"));
    }

    #[test]
    fn rope_scaling_may_replace_rope_parameters_that_are_removed() {
        let file = with("rope_parameters", json!({"rope_type": "default", "rope_theta": 5e5}));
        let scaling = json!({"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5});
        let overrides = json!({"rope_scaling": scaling, "rope_parameters": null});
        let expected = ModelConfig::from_json(&with("rope_scaling", scaling)).expect("valid");
        assert_eq!(overridden(&file, overrides).expect("valid"), expected);
        let mut both = file;
        both["rope_scaling"] = json!({"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5});
        let found = overridden(&both, json!({"rope_scaling": {"factor": 2.0}})).expect("valid");
        assert_eq!(found, expected);
    }

    fn file_scaling(file: &Value) -> Value {
        json!({ "rope_scaling": file["rope_scaling"] })
    }

    #[test]
    fn override_of_rope_scaling_error_shows_that_of_rope_parameters() {
        let file = with("rope_parameters", json!({"rope_type": "default", "rope_theta": 5e5}));
        let yarn = json!({"rope_type": "yarn", "factor": 4.0});
        let error = overridden(&file, json!({ "rope_scaling": yarn })).expect_err("refused").to_string();
        let shown = json!({ "rope_parameters": yarn });
        assert!(error.contains(&format!("it must be written as {shown}: the model's file has")), "{error}");
        let expected = json!({"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5});
        let expected = ModelConfig::from_json(&with("rope_parameters", expected)).expect("valid");
        assert_eq!(overridden(&file, shown).expect("as the error says"), expected);
    }

    #[test]
    fn override_that_is_not_read_error_names_the_field() {
        let scaling = |scaling: Value| json!({ "rope_scaling": scaling });
        let linear = with("rope_parameters", json!({"rope_type": "linear", "factor": 2.0}));
        let mut both = linear.clone();
        both["rope_scaling"] = json!({"rope_type": "linear", "factor": 4.0});
        for (file, overrides, field) in [
            (llama(), json!({"max_positions": 8}), "max_positions"),
            (llama(), json!({"sliding_window": 8}), "sliding_window"),
            (llama(), json!({"eos_token_id": 3}), "eos_token_id"),
            (
                llama(),
                scaling(json!({"rope_type": "linear", "factor": 2.0, "facto": 3.0})),
                "rope_scaling.facto",
            ),
            (linear, scaling(json!({"rope_type": "linear", "factor": 2.0})), "rope_scaling"),
            (both, json!({"rope_parameters": {"factor": 3.0}}), "rope_parameters.factor"),
            (llama(), json!({"hidden_size": {"x": 1}}), "hidden_size"),
            (llama(), scaling(json!({"rope_type": "linear", "factor": 0})), "rope_scaling.factor"),
        ] {
            let error = overridden(&file, overrides).expect_err(field);
            assert_eq!(error.field(), Some(field), "{error}");
        }
    }

    #[test]
    fn logn_attention_starts_at_the_trained_length() {
        let len = |changes: Value| {
            let mut overrides = json!({"use_logn_attn": true});
            merge(overrides.as_object_mut().expect("object"), changes.as_object().expect("object"));
            overridden(&llama(), overrides).map(|model| model.logn_len)
        };
        assert_eq!(ModelConfig::from_json(&llama()).expect("plain").logn_len, None);
        assert_eq!(len(json!({})).expect("default"), Some(64));
        assert_eq!(len(json!({"seq_length": 16})).expect("named"), Some(16));
        let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32});
        assert_eq!(len(json!({"rope_scaling": yarn})).expect("yarn"), Some(32));
        let dynamic = json!({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}});
        assert_eq!(len(dynamic).expect("dynamic"), Some(64));
        assert_eq!(len(json!({"use_logn_attn": false})).expect("off"), None);
        for (changes, field) in [
            (json!({"seq_length": 1}), "seq_length"),
            (json!({"use_logn_attn": 1}), "use_logn_attn"),
            (json!({"use_logn_attn": false, "seq_length": 8}), "seq_length"),
        ] {
            assert_eq!(len(changes).expect_err(field).field(), Some(field));
        }
    }

    #[test]
    fn unsupported_fields_may_be_null_or_false() {
        for value in [Value::Null, json!(false)] {
            for name in UNSUPPORTED {
                ModelConfig::from_json(&with(name, value.clone())).expect(name);
            }
        }
    }

    #[test]
    fn model_type_selects_the_family_without_architectures() {
        let mut config = llama();
        config["architectures"] = Value::Null;
        config["model_type"] = json!("qwen2");
        assert_eq!(ModelConfig::from_json(&config).expect("qwen2").architecture, "Qwen2ForCausalLM");
    }

    #[test]
    fn model_without_head_is_that_of_its_family_with_a_tied_one() {
        for family in FAMILIES {
            let mut config = with("architectures", json!([family.architecture]));
            config["tie_word_embeddings"] = json!(true);
            let tied = ModelConfig::from_json(&config).expect("with a head");
            config["architectures"] = json!([family.architecture.replace("ForCausalLM", "Model")]);
            config["tie_word_embeddings"] = json!(false);
            assert_eq!(ModelConfig::from_json(&config).expect("without"), tied);
        }
        let classifier = with("architectures", json!(["LlamaForSequenceClassification"]));
        assert!(ModelConfig::from_json(&classifier).is_err());
    }

    #[test]
    fn invalid_field_error_names_field_and_value() {
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
            ("use_logn_attn", json!(1)),
            ("use_dynamic_ntk", json!(true)),
            ("attn_logit_softcapping", json!(50.0)),
            ("final_logit_softcapping", json!(30.0)),
            ("quantization_config", json!({"quant_method":"gptq"})),
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
