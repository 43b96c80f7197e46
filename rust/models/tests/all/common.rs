//! Test support: temporary directories, and a small model.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use serde_json::{Value, json};

pub const HIDDEN: usize = 32;
pub const WIDE: usize = 64;
pub const KV: usize = 16;
pub const LAYERS: usize = 2;
pub const VOCABULARY: usize = 64;

/// The modules of a layer, with their rows and columns.
pub const MODULES: [(&str, usize, usize); 7] = [
    ("self_attn.q_proj", HIDDEN, HIDDEN),
    ("self_attn.k_proj", KV, HIDDEN),
    ("self_attn.v_proj", KV, HIDDEN),
    ("self_attn.o_proj", HIDDEN, HIDDEN),
    ("mlp.gate_proj", WIDE, HIDDEN),
    ("mlp.up_proj", WIDE, HIDDEN),
    ("mlp.down_proj", HIDDEN, WIDE),
];

pub type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// A temporary directory, removed on drop.
pub struct Scratch(PathBuf);

impl Scratch {
    pub fn new(config: (&str, Value), weights: (&str, &Tensors)) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("penstock-models-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path).unwrap();
        std::fs::write(path.join(config.0), config.1.to_string()).unwrap();
        let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
        for (name, (shape, values)) in weights.1 {
            let start = data.len();
            values.iter().for_each(|value| data.extend(value.to_le_bytes()));
            let offsets = [start, data.len()];
            header.insert(name.clone(), json!({"dtype": "F32", "shape": shape, "data_offsets": offsets}));
        }
        let header = Value::Object(header).to_string();
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header.as_bytes());
        bytes.extend_from_slice(&data);
        std::fs::write(path.join(weights.0), bytes).unwrap();
        Self(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Numbers from -0.5 to 0.5.
pub fn random(seed: &mut u64, count: usize) -> Vec<f32> {
    let mut next = || {
        *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (*seed >> 40) as f32 / (1_u64 << 24) as f32 - 0.5
    };
    (0..count).map(|_| next()).collect()
}

/// The configuration of the model.
pub fn config() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "intermediate_size": WIDE,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": LAYERS,
        "vocab_size": VOCABULARY, "max_position_embeddings": 32, "torch_dtype": "float32",
    })
}

/// The weights of the model.
pub fn base() -> Tensors {
    let mut seed = 1;
    let mut tensors = Tensors::new();
    let mut add = |name: String, shape: &[usize]| {
        let values = random(&mut seed, shape.iter().product());
        tensors.insert(name, (shape.to_vec(), values));
    };
    add("model.embed_tokens.weight".to_owned(), &[VOCABULARY, HIDDEN]);
    add("model.norm.weight".to_owned(), &[HIDDEN]);
    add("lm_head.weight".to_owned(), &[VOCABULARY, HIDDEN]);
    for layer in 0..LAYERS {
        for norm in ["input_layernorm", "post_attention_layernorm"] {
            add(format!("model.layers.{layer}.{norm}.weight"), &[HIDDEN]);
        }
        for (module, rows, columns) in MODULES {
            add(format!("model.layers.{layer}.{module}.weight"), &[rows, columns]);
        }
    }
    tensors
}
