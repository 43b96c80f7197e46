//! Loading of weights: names of models without a head, and the head of models with tied embeddings.

use std::ops::ControlFlow;
use std::sync::{Mutex, PoisonError};

use penstock_checkpoint::Checkpoint;
use penstock_device::Memory;
use penstock_device::cpu::Cpu;
use penstock_models::{ConvertOptions, ModelConfig, ModelError, WeightFormats, convert, load};
use penstock_types::{Dtype, Quantization};
use serde_json::{Map, Value, json};

use crate::common::{Scratch, Tensors, base, config};

/// The warnings of this process that name a head.
static WARNINGS: Mutex<Vec<String>> = Mutex::new(Vec::new());

struct Collector;

impl log::Log for Collector {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        let message = record.args().to_string();
        if message.contains("lm_head") {
            WARNINGS.lock().unwrap_or_else(PoisonError::into_inner).push(message);
        }
    }

    fn flush(&self) {}
}

fn with(field: &str, value: Value) -> Value {
    let mut config = config();
    config[field] = value;
    config
}

/// Loads a model, or converts it.
fn open(config: Value, weights: &Tensors, is_converted: bool) -> Result<(), ModelError> {
    let files = Scratch::new(("config.json", config), ("model.safetensors", weights));
    let checkpoint = Checkpoint::open(files.path())?;
    let model = ModelConfig::with_overrides(checkpoint.config(), &Map::new())?;
    let mut backend = Cpu::new(1).unwrap();
    backend.reserve(1 << 24).unwrap();
    let quantization = Quantization::default();
    let formats = WeightFormats::new(&backend, &checkpoint, &model, Dtype::F32, &quantization)?;
    let mut progress = |_, _| ControlFlow::Continue(());
    if is_converted {
        let output = &files.path().join("converted");
        let options = ConvertOptions { output, overwrite: false, dtype: Dtype::F32, quantization: "none" };
        return convert(&backend, &checkpoint, &model, &formats, options, &mut progress);
    }
    load(&mut backend, &checkpoint, model, &formats, 1, &mut progress).map(|_| ())
}

#[test]
fn unused_head_with_other_values_is_a_warning_that_names_it() {
    log::set_logger(&Collector).unwrap();
    log::set_max_level(log::LevelFilter::Warn);
    let warnings = |config: Value, weights: &Tensors, is_converted| {
        open(config, weights, is_converted).unwrap();
        WARNINGS.lock().unwrap_or_else(PoisonError::into_inner).drain(..).collect::<Vec<_>>()
    };
    let tied = || with("tie_word_embeddings", json!(true));
    let (other, mut equal, mut last, mut shorter, mut none) = (base(), base(), base(), base(), base());
    equal.insert("lm_head.weight".to_owned(), equal["model.embed_tokens.weight"].clone());
    last.insert("lm_head.weight".to_owned(), last["model.embed_tokens.weight"].clone());
    *last.get_mut("lm_head.weight").unwrap().1.last_mut().unwrap() += 1.0;
    shorter.insert("lm_head.weight".to_owned(), (vec![1, 2], vec![0.0; 2]));
    none.remove("lm_head.weight");
    for is_converted in [false, true] {
        for weights in [&other, &last, &shorter] {
            let [warning] = &warnings(tied(), weights, is_converted)[..] else { panic!("one warning") };
            assert!(warning.contains("lm_head.weight is not used: tie_word_embeddings is true"), "{warning}");
            assert!(warning.contains("model.embed_tokens.weight"), "{warning}");
        }
        for weights in [&equal, &none] {
            assert!(warnings(tied(), weights, is_converted).is_empty());
        }
        assert!(warnings(config(), &other, is_converted).is_empty());
    }
}

#[test]
fn model_without_head_loads() {
    let headless = |weights: Tensors| -> Tensors {
        let rest = weights.into_iter().filter(|(name, _)| name != "lm_head.weight");
        rest.map(|(name, tensor)| (name.strip_prefix("model.").unwrap().to_owned(), tensor)).collect()
    };
    let weights = headless(base());
    assert!(weights.contains_key("layers.0.self_attn.q_proj.weight"));
    for architecture in ["LlamaModel", "MistralModel"] {
        open(with("architectures", json!([architecture])), &weights, false).unwrap();
    }
    open(with("tie_word_embeddings", json!(true)), &weights, false).unwrap();
    let error = open(config(), &weights, false).unwrap_err().to_string();
    assert!(error.contains("there is no tensor named lm_head.weight"), "{error}");
}
