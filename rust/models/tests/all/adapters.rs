//! Adapters of a decoder: the same logits as with the updates merged into the weights, and the same bits in every mix.

use std::ops::{ControlFlow, Range};
use std::sync::Arc;

use penstock_checkpoint::{AdapterFiles, Checkpoint};
use penstock_device::cpu::{Cpu, CpuAdapterLayout, CpuCache};
use penstock_device::{
    AdapterLayout, AdapterRows, AdapterSpec, CacheSpec, Load, Memory, StepInputs, StepSpec,
};
use penstock_models::{
    AdapterLimits, Decoder, ModelConfig, ModelError, WeightFormats, Workspace, adapter_bytes, load,
    pack_adapter,
};
use penstock_types::{Dtype, HeadShape, KvDtype, PackedAdapter, Quantization, WeightType};
use serde_json::{Value, json};

use crate::common::{HIDDEN, LAYERS, MODULES, Scratch, Tensors, VOCABULARY, base, config, random};

const TOKENS: usize = 24;

/// Packs an adapter of up to this rank and any size.
fn packed(files: &AdapterFiles, config: &ModelConfig, rank: usize) -> Result<PackedAdapter, ModelError> {
    let limits = AdapterLimits { rank, bytes: u64::MAX };
    pack_adapter::<CpuAdapterLayout>(files, config, limits, &mut |_, _| ControlFlow::Continue(()))
}

/// An adapter of the modules that `ranks` has, and the weights that it makes of those of the base model.
fn adapter(seed: u64, ranks: impl Fn(usize, usize) -> usize) -> (Scratch, Tensors) {
    let (mut seed, mut tensors, mut merged) = (seed, Tensors::new(), base());
    let (mut rank_pattern, mut alpha_pattern) = (serde_json::Map::new(), serde_json::Map::new());
    for layer in 0..LAYERS {
        for (index, (module, rows, columns)) in MODULES.into_iter().enumerate() {
            let rank = ranks(layer, index);
            if rank == 0 {
                continue;
            }
            let name = format!("model.layers.{layer}.{module}");
            let alpha = 1 + index;
            let (a, b) = (random(&mut seed, rank * columns), random(&mut seed, rows * rank));
            let (_, weight) = merged.get_mut(&format!("{name}.weight")).unwrap();
            for (row, weight) in weight.chunks_exact_mut(columns).enumerate() {
                for (column, weight) in weight.iter_mut().enumerate() {
                    let sum: f64 = (0..rank)
                        .map(|j| f64::from(b[row * rank + j]) * f64::from(a[j * columns + column]))
                        .sum();
                    *weight += (alpha as f64 / rank as f64 * sum) as f32;
                }
            }
            rank_pattern.insert(name.clone(), json!(rank));
            alpha_pattern.insert(name.clone(), json!(alpha));
            tensors.insert(format!("base_model.model.{name}.lora_A.weight"), (vec![rank, columns], a));
            tensors.insert(format!("base_model.model.{name}.lora_B.weight"), (vec![rows, rank], b));
        }
    }
    let config = json!({"peft_type": "LORA", "rank_pattern": rank_pattern, "alpha_pattern": alpha_pattern});
    let files = Scratch::new(("adapter_config.json", config), ("adapter_model.safetensors", &tensors));
    (files, merged)
}

struct Model {
    backend: Cpu,
    decoder: Decoder<Cpu>,
    workspace: Workspace<Cpu>,
    cache: CpuCache,
}

const SPEC: StepSpec = StepSpec {
    tokens: TOKENS,
    sequences: 4,
    logits_rows: TOKENS,
    positions: 32,
    block_size: 16,
    heads: HeadShape { heads: 4, kv_heads: 2, head_dim: 8 },
    vocabulary: VOCABULARY,
};

impl Model {
    fn new(weights: &Tensors, quantization: &Quantization, threads: usize) -> Self {
        let files = Scratch::new(("config.json", config()), ("model.safetensors", weights));
        let checkpoint = Checkpoint::open(files.path()).unwrap();
        let config = ModelConfig::with_overrides(checkpoint.config(), &serde_json::Map::new()).unwrap();
        let mut backend = Cpu::new(threads).unwrap();
        backend.reserve(1 << 25).unwrap();
        let formats = WeightFormats::new(&backend, &checkpoint, &config, Dtype::F32, quantization).unwrap();
        let mut progress = |_, _| ControlFlow::Continue(());
        let decoder = load(&mut backend, &checkpoint, config, &formats, 1, &mut progress).unwrap();
        let adapters = AdapterSpec { adapters: 4, bytes: 1 << 20, rank: 16, matrices: 4 * LAYERS };
        let workspace = Workspace::new(&mut backend, decoder.config(), &SPEC, Some(&adapters)).unwrap();
        let (heads, dtype) = (SPEC.heads, KvDtype::F32);
        let cache = CacheSpec { layers: LAYERS, blocks: 8, host_blocks: 0, block_size: 16, heads, dtype };
        let cache = backend.allocate_cache(&cache).unwrap();
        Self { backend, decoder, workspace, cache }
    }

    fn load(&mut self, number: u32, files: &Scratch) {
        let files = AdapterFiles::open(files.path(), u64::MAX).unwrap();
        let adapter = packed(&files, self.decoder.config(), 16).unwrap();
        let adapters = self.workspace.adapters.as_mut().unwrap();
        self.backend.load_adapter(adapters, number, &Arc::new(adapter)).unwrap();
    }

    /// The logits of prompts of the given lengths, each with an adapter or without.
    fn logits(&mut self, prompts: &[(Range<u32>, Option<u32>)], all_rows: bool) -> Vec<Vec<f32>> {
        let mut inputs = StepInputs::with_room(&SPEC).unwrap();
        for (block, (tokens, adapter)) in (0..).zip(prompts) {
            let first = inputs.tokens.len();
            inputs.blocks.push(block);
            self.decoder.push_sequence(&mut inputs, tokens.clone(), 0, tokens.len(), 1, 16);
            let rows = first..inputs.tokens.len();
            let outputs = if all_rows { rows.clone() } else { rows.end - 1..rows.end };
            inputs.output_rows.extend(outputs.map(|row| row as u32));
            if let Some(adapter) = *adapter {
                inputs.adapters.push(AdapterRows { rows, adapter });
            }
        }
        let Self { backend, decoder, workspace, cache } = self;
        decoder.forward(backend, &inputs, cache, workspace).unwrap();
        decoder.logits(backend, 0..inputs.output_rows.len(), workspace).unwrap();
        let row = |index: usize| {
            let mut values = vec![0.0; VOCABULARY];
            backend.download(&workspace.logits, index * VOCABULARY, &mut values).unwrap();
            values
        };
        (0..inputs.output_rows.len()).map(row).collect()
    }
}

fn plain() -> Quantization {
    Quantization::default()
}

#[test]
fn logits_are_those_of_merged_weights() {
    let all = |layer: usize, index: usize| 1 + (layer * 5 + index * 3) % 16;
    let some = |layer: usize, index: usize| if (layer + index).is_multiple_of(3) { 4 } else { 0 };
    let (first, first_merged) = adapter(7, all);
    let (second, second_merged) = adapter(8, some);
    for all_rows in [true, false] {
        let mut model = Model::new(&base(), &plain(), 2);
        model.load(2, &first);
        model.load(0, &second);
        let prompts = [(3..12, Some(2)), (20..23, None), (5..14, Some(0))];
        let found = model.logits(&prompts, all_rows);
        let mut expected = Vec::new();
        for ((tokens, _), weights) in prompts.into_iter().zip([&first_merged, &base(), &second_merged]) {
            expected.extend(Model::new(weights, &plain(), 2).logits(&[(tokens, None)], all_rows));
        }
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
            assert!((found - expected).abs() < 1e-4 * expected.abs().max(1.0), "{found} {expected}");
        }
        let base = Model::new(&base(), &plain(), 2).logits(&[(3..12, None)], all_rows);
        assert!(base[0].iter().zip(&found[0]).any(|(base, found)| (base - found).abs() > 0.05));
    }
}

#[test]
fn sequence_has_the_same_bits_alone_and_beside_others() {
    let adapters: Vec<_> =
        (1..4).map(|seed| adapter(seed, |_, index| (seed as usize * 7 + index) % 9).0).collect();
    for scheme in [WeightType::None, WeightType::Int8] {
        let quantization = Quantization::from(scheme);
        let mut all = Vec::new();
        for threads in [1, 3] {
            let mut model = Model::new(&base(), &quantization, threads);
            for (number, files) in (0..).zip(&adapters) {
                model.load(number, files);
            }
            let prompts = [(1..7, Some(1)), (2..9, None), (3..5, Some(0)), (4..10, Some(2))];
            let together = model.logits(&prompts, false);
            let alone = prompts.map(|prompt| model.logits(&[prompt], false).remove(0));
            assert_eq!(together, alone, "{scheme:?} {threads}");
            all.push(together);
        }
        assert_eq!(all[0], all[1], "{scheme:?}");
        let mut without = Model::new(&base(), &quantization, 2);
        assert_eq!(all[0][1], without.logits(&[(2..9, None)], false)[0], "{scheme:?}");
    }
}

#[test]
fn adapters_that_do_not_fit_the_model_are_refused() {
    let config = |extra: Value| {
        let mut config = json!({"r": 2});
        config.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        config
    };
    let open = |module: &str, a: [usize; 2], b: [usize; 2], value: f32| {
        let mut tensors = Tensors::new();
        for (part, shape) in [("A", a), ("B", b)] {
            let values = vec![value; shape[0] * shape[1]];
            tensors.insert(format!("{module}.lora_{part}.weight"), (shape.to_vec(), values));
        }
        let config = config(json!({"r": a[0]}));
        let files = Scratch::new(("adapter_config.json", config), ("adapter_model.safetensors", &tensors));
        let model = Model::new(&base(), &plain(), 1);
        let files = AdapterFiles::open(files.path(), u64::MAX).unwrap();
        packed(&files, model.decoder.config(), 8).map(|_| ())
    };
    let q = "model.layers.0.self_attn.q_proj";
    assert!(open(q, [2, HIDDEN], [HIDDEN, 2], 1.0).is_ok());
    assert!(
        open("layers.0.self_attn.q_proj", [2, HIDDEN], [HIDDEN, 2], 1.0).is_ok(),
        "of a model without a head"
    );
    let message = |result: Result<(), ModelError>| result.unwrap_err().to_string();
    for (module, part) in [
        ("model.layers.2.self_attn.q_proj", "is not in the model, which has 2 layers"),
        ("model.layers.00.self_attn.q_proj", "is not in the model, which has 2 layers"),
        ("model.layers.+0.self_attn.q_proj", "is not in the model, which has 2 layers"),
        ("model.layers.0.self_attn.q_norm", "these are self_attn.q_proj, self_attn.k_proj"),
        ("lm_head", "lm_head of the adapter is not supported"),
    ] {
        assert!(message(open(module, [2, HIDDEN], [HIDDEN, 2], 1.0)).contains(part), "{module}");
    }
    let error = message(open(q, [2, HIDDEN + 1], [HIDDEN, 2], 1.0));
    assert!(error.contains("lora_A.weight has shape [2, 33]; the configuration requires [2, 32]"), "{error}");
    let error = message(open(q, [9, HIDDEN], [HIDDEN, 9], 1.0));
    assert!(error.contains("has rank 9; max_adapter_rank is 8"), "{error}");
    assert!(
        message(open(q, [2, HIDDEN], [HIDDEN, 2], f32::NAN))
            .contains("lora_A.weight of the adapter has the value NaN")
    );
}

#[test]
fn bytes_of_an_adapter_are_those_of_its_modules() {
    let (files, _) = adapter(1, |_, _| 8);
    let model = Model::new(&base(), &plain(), 1);
    let files = AdapterFiles::open(files.path(), u64::MAX).unwrap();
    let adapter = packed(&files, model.decoder.config(), 8).unwrap();
    let bytes = CpuAdapterLayout::adapter_bytes(adapter.bytes().len() as u64);
    assert_eq!(bytes, adapter_bytes::<CpuAdapterLayout>(model.decoder.config(), 8, Dtype::F32));
    let floats: usize = MODULES.iter().map(|(_, rows, columns)| 8 * (rows + columns)).sum();
    assert_eq!(adapter.bytes().len(), LAYERS * floats * 4);
}
