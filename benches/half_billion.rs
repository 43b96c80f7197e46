//! A checkpoint for benchmarks: random weights with the shapes of Qwen2 0.5B.

use std::error::Error;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

/// Writes the random 0.5B checkpoint, unless it exists.
pub fn write() -> Result<PathBuf, Box<dyn Error>> {
    const HIDDEN: usize = 896;
    const WIDE: usize = 4864;
    const KV: usize = 128;
    const LAYERS: usize = 24;
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/bench-model-0.5b");
    if directory.join("config.json").exists() {
        return Ok(directory);
    }
    fs::create_dir_all(&directory)?;
    let mut tensors: Vec<(String, Vec<usize>)> = vec![
        ("model.embed_tokens.weight".to_owned(), vec![151_936, HIDDEN]),
        ("model.norm.weight".to_owned(), vec![HIDDEN]),
    ];
    for layer in 0..LAYERS {
        for (part, shape) in [
            ("input_layernorm.weight", vec![HIDDEN]),
            ("post_attention_layernorm.weight", vec![HIDDEN]),
            ("self_attn.q_proj.weight", vec![HIDDEN, HIDDEN]),
            ("self_attn.q_proj.bias", vec![HIDDEN]),
            ("self_attn.k_proj.weight", vec![KV, HIDDEN]),
            ("self_attn.k_proj.bias", vec![KV]),
            ("self_attn.v_proj.weight", vec![KV, HIDDEN]),
            ("self_attn.v_proj.bias", vec![KV]),
            ("self_attn.o_proj.weight", vec![HIDDEN, HIDDEN]),
            ("mlp.gate_proj.weight", vec![WIDE, HIDDEN]),
            ("mlp.up_proj.weight", vec![WIDE, HIDDEN]),
            ("mlp.down_proj.weight", vec![HIDDEN, WIDE]),
        ] {
            tensors.push((format!("model.layers.{layer}.{part}"), shape));
        }
    }
    write_safetensors(&directory.join("model.safetensors"), &tensors)?;
    let config = json!({
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "torch_dtype": "bfloat16", "hidden_size": HIDDEN,
        "intermediate_size": WIDE, "num_hidden_layers": LAYERS, "num_attention_heads": 14, "num_key_value_heads": 2,
        "vocab_size": 151_936, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "tie_word_embeddings": true, "hidden_act": "silu",
    });
    // Written last, so that an interrupted run does not leave a checkpoint that looks complete.
    fs::write(directory.join("config.json"), config.to_string())?;
    Ok(directory)
}

/// Uniform random bfloat16 in (-0.06, 0.06).
fn write_safetensors(path: &Path, tensors: &[(String, Vec<usize>)]) -> Result<(), Box<dyn Error>> {
    let mut header = serde_json::Map::new();
    let mut end = 0;
    for (name, shape) in tensors {
        let start = end;
        end += 2 * shape.iter().product::<usize>();
        header.insert(name.clone(), json!({"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}));
    }
    let header = Value::Object(header).to_string();
    let mut file = std::io::BufWriter::with_capacity(1 << 20, fs::File::create(path)?);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    for _ in 0..end / 2 {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let value = ((state >> 40) as f32 / (1_u64 << 24) as f32 - 0.5) * 0.12;
        file.write_all(&((value.to_bits() >> 16) as u16).to_le_bytes())?;
    }
    file.flush()?;
    Ok(())
}
