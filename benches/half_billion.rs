//! Checkpoints for benchmarks: random weights with the shapes of Qwen2 0.5B, and adapters of it.

use std::error::Error;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

const HIDDEN: usize = 896;
const WIDE: usize = 4864;
const KV: usize = 128;
const LAYERS: usize = 24;

/// The linear modules of a layer, with their rows and columns.
const LINEAR: [(&str, usize, usize); 7] = [
    ("self_attn.q_proj", HIDDEN, HIDDEN),
    ("self_attn.k_proj", KV, HIDDEN),
    ("self_attn.v_proj", KV, HIDDEN),
    ("self_attn.o_proj", HIDDEN, HIDDEN),
    ("mlp.gate_proj", WIDE, HIDDEN),
    ("mlp.up_proj", WIDE, HIDDEN),
    ("mlp.down_proj", HIDDEN, WIDE),
];

/// Writes the random 0.5B checkpoint, unless it exists.
pub fn write() -> Result<PathBuf, Box<dyn Error>> {
    let directory = output("bench-model-0.5b");
    if directory.join("config.json").exists() {
        return Ok(directory);
    }
    fs::create_dir_all(&directory)?;
    let mut tensors: Vec<(String, Vec<usize>)> = vec![
        ("model.embed_tokens.weight".to_owned(), vec![151_936, HIDDEN]),
        ("model.norm.weight".to_owned(), vec![HIDDEN]),
    ];
    for layer in 0..LAYERS {
        let mut add = |part: &str, shape| tensors.push((format!("model.layers.{layer}.{part}"), shape));
        add("input_layernorm.weight", vec![HIDDEN]);
        add("post_attention_layernorm.weight", vec![HIDDEN]);
        for (module, rows, columns) in LINEAR {
            add(&format!("{module}.weight"), vec![rows, columns]);
            if ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"].contains(&module) {
                add(&format!("{module}.bias"), vec![rows]);
            }
        }
    }
    write_safetensors(&directory.join("model.safetensors"), &tensors, false)?;
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

/// Writes a random adapter of all linear modules, unless it exists.
pub fn write_adapter(rank: usize, is_f32: bool) -> Result<PathBuf, Box<dyn Error>> {
    let directory = output(&format!("bench-adapter-{rank}-{}", if is_f32 { "f32" } else { "bf16" }));
    if directory.join("adapter_config.json").exists() {
        return Ok(directory);
    }
    fs::create_dir_all(&directory)?;
    let mut tensors = Vec::new();
    for layer in 0..LAYERS {
        for (module, rows, columns) in LINEAR {
            let name = format!("base_model.model.model.layers.{layer}.{module}");
            tensors.push((format!("{name}.lora_A.weight"), vec![rank, columns]));
            tensors.push((format!("{name}.lora_B.weight"), vec![rows, rank]));
        }
    }
    write_safetensors(&directory.join("adapter_model.safetensors"), &tensors, is_f32)?;
    let config = json!({"peft_type": "LORA", "r": rank, "lora_alpha": rank});
    fs::write(directory.join("adapter_config.json"), config.to_string())?;
    Ok(directory)
}

fn output(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target").join(name)
}

/// Uniform random bfloat16 in (-0.06, 0.06), as bfloat16 or float32.
fn write_safetensors(
    path: &Path,
    tensors: &[(String, Vec<usize>)],
    is_f32: bool,
) -> Result<(), Box<dyn Error>> {
    let (size, dtype) = if is_f32 { (4, "F32") } else { (2, "BF16") };
    let mut header = serde_json::Map::new();
    let mut end = 0;
    for (name, shape) in tensors {
        let start = end;
        end += size * shape.iter().product::<usize>();
        header.insert(name.clone(), json!({"dtype": dtype, "shape": shape, "data_offsets": [start, end]}));
    }
    let header = Value::Object(header).to_string();
    let mut file = std::io::BufWriter::with_capacity(1 << 20, fs::File::create(path)?);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    for _ in 0..end / size {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let value = ((state >> 40) as f32 / (1_u64 << 24) as f32 - 0.5) * 0.12;
        // The last bytes of a float32 are the bfloat16.
        file.write_all(&(value.to_bits() & 0xffff_0000).to_le_bytes()[4 - size..])?;
    }
    file.flush()?;
    Ok(())
}
