//! A tiny Llama with random weights in a temporary directory, and requests to it.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use penstock_checkpoint::Checkpoint;
use penstock_device::Backend;
use penstock_engine::{Consumer, Engine, Event, FinishReason, Limits, Port, Request};
use penstock_runner::{BareRunner, DeviceInfo, Host, LaunchConfig, LaunchError, ModelInfo};
use penstock_types::{Device, EngineConfig, Sampling};
use serde_json::{Value, json};

pub const VOCABULARY: usize = 320;
pub const LAYERS: usize = 3;
pub const HIDDEN: usize = 64;
const WIDE: usize = 96;
const KV: usize = 32;
pub const LONGEST: usize = 256;
const DEVICE: DeviceInfo =
    DeviceInfo { device: Device::Cpu, threads: 2, isa: String::new(), numa: None, turns: None };

/// The model's directory, removed on drop.
pub struct TinyModel(PathBuf);

impl TinyModel {
    pub fn write() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("penstock-runner-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let directory = std::env::temp_dir().join(name);
        std::fs::create_dir(&directory).unwrap();
        let config = json!({
            "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "intermediate_size": WIDE,
            "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": LAYERS,
            "vocab_size": VOCABULARY, "max_position_embeddings": LONGEST, "torch_dtype": "float32",
        });
        std::fs::write(directory.join("config.json"), config.to_string()).unwrap();
        std::fs::write(directory.join("model.safetensors"), safetensors()).unwrap();
        Self(directory)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    pub fn open_on<B: Backend>(
        &self,
        backend: B,
        config: &LaunchConfig,
    ) -> Result<(BareRunner<B>, Limits), LaunchError> {
        BareRunner::open_on(backend, DEVICE, &Checkpoint::open(&self.0).unwrap(), config)
    }

    pub fn launch_on<B: Backend>(
        &self,
        backend: B,
        config: &LaunchConfig,
    ) -> Result<(Engine, ModelInfo), LaunchError> {
        penstock_engine::check_when_idle();
        penstock_runner::launch_on(backend, DEVICE, &Checkpoint::open(&self.0).unwrap(), config)
    }

    pub fn launch(&self, options: &EngineConfig) -> Result<(Engine, ModelInfo), LaunchError> {
        penstock_engine::check_when_idle();
        let checkpoint = Checkpoint::open(&self.0).unwrap();
        let config = options.clone().into();
        penstock_runner::launch(&checkpoint, &config, &Host::default(), &mut |_, _| ControlFlow::Continue(()))
    }
}

impl Drop for TinyModel {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Header and uniform random float32 values.
fn safetensors() -> Vec<u8> {
    let mut tensors = vec![
        ("model.embed_tokens.weight".to_owned(), vec![VOCABULARY, HIDDEN]),
        ("model.norm.weight".to_owned(), vec![HIDDEN]),
        ("lm_head.weight".to_owned(), vec![VOCABULARY, HIDDEN]),
    ];
    for layer in 0..LAYERS {
        for (part, shape) in [
            ("input_layernorm", vec![HIDDEN]),
            ("post_attention_layernorm", vec![HIDDEN]),
            ("self_attn.q_proj", vec![HIDDEN, HIDDEN]),
            ("self_attn.k_proj", vec![KV, HIDDEN]),
            ("self_attn.v_proj", vec![KV, HIDDEN]),
            ("self_attn.o_proj", vec![HIDDEN, HIDDEN]),
            ("mlp.gate_proj", vec![WIDE, HIDDEN]),
            ("mlp.up_proj", vec![WIDE, HIDDEN]),
            ("mlp.down_proj", vec![HIDDEN, WIDE]),
        ] {
            tensors.push((format!("model.layers.{layer}.{part}.weight"), shape));
        }
    }
    let (mut header, mut end) = (serde_json::Map::new(), 0);
    for (name, shape) in tensors {
        let start = end;
        end += 4 * shape.iter().product::<usize>();
        header.insert(name, json!({"dtype": "F32", "shape": shape, "data_offsets": [start, end]}));
    }
    let header = Value::Object(header).to_string();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    let mut state = 1_u64;
    for _ in 0..end / 4 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let value = (state >> 40) as f32 / (1_u64 << 24) as f32 - 0.5;
        bytes.extend_from_slice(&value.to_le_bytes());
    }
    bytes
}

/// A sampled request with a prompt of `num_prompt` tokens that depends on `number`.
pub fn request(number: usize, num_prompt: usize, max_tokens: usize) -> Request {
    let token = |index: usize| (number * 7919 + index * 104_729) % VOCABULARY;
    let prompt: Vec<u32> = (0..num_prompt).map(|index| token(index) as u32).collect();
    let sampling = Sampling { top_p: 0.9, seed: number as u64, ..Sampling::default() };
    Request::new(prompt, max_tokens, sampling)
}

/// Runs requests concurrently; each must finish by its length. Returns the number of tokens.
pub fn run(engine: &Engine, port: &Port, requests: impl Iterator<Item = Request>) -> usize {
    let mut consumers: Vec<Consumer> =
        requests.map(|request| engine.start_request(request, port).unwrap()).collect();
    let (mut open, mut tokens) = (consumers.len(), 0);
    let mut listed = Vec::new();
    while open > 0 {
        port.wait(None);
        port.take_listed(&mut listed);
        listed.clear();
        for consumer in &mut consumers {
            while let Some(event) = consumer.pop() {
                match event {
                    Event::Token(_) => tokens += 1,
                    Event::Finished(finish) => {
                        assert_eq!(finish.reason, FinishReason::Length);
                        open -= 1;
                    }
                    Event::Admitted | Event::Prompt(_) => {}
                    other => panic!("{other:?}"),
                }
            }
        }
    }
    tokens
}
