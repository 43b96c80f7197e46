//! The cost of adapters: steps of a model with adapters, each relative to the step without.
//!
//!     cargo bench -p penstock-models --bench adapter_steps -- [--weights bf16|int8|int4] [--ranks N[,N]] [--f32]
//!         [--isa NAME] [--rounds N] [--threads N] [FILTER]
//!
//! The model has random weights with the shapes of Qwen2.5 0.5B, the adapters all its linear modules, in bfloat16 or,
//! with `--f32`, in float32. A step is the forward pass and the logits; FILTER selects steps by their names. The floor of
//! a step is the time of the step without adapters, plus the longer of two times: the bytes of all its adapters at the
//! read bandwidth, their operations at the rate of multiply-adds. The limits of the machine vary, so each round measures
//! them, and the steps of a round alternate: a line shows the median time, its quartiles, and the medians of the ratios
//! of a round.

#[path = "half_billion.rs"]
mod half_billion;
#[path = "roofline.rs"]
#[allow(dead_code, reason = "each benchmark uses only a part")]
mod roofline;

use std::error::Error;
use std::ops::ControlFlow;
use std::sync::Arc;

use penstock_checkpoint::{AdapterFiles, Checkpoint};
use penstock_device::cpu::{Cpu, CpuAdapterLayout, CpuCache};
use penstock_device::{
    AdapterLayout, AdapterRows, AdapterSpec, CacheSpec, Load, Memory, StepInputs, StepSpec,
};
use penstock_kernels::Pool;
use penstock_models::{
    AdapterLimits, Decoder, ModelConfig, WeightFormats, Workspace, adapted_matrices, load, pack_adapter,
};
use penstock_types::{Dtype, HeadShape, KvDtype, Quantization, WeightType};
use roofline::{Machine, Probe, seconds};

/// Positions of a sequence: a decode step is that of the last one.
const CONTEXT: usize = 256;
const PROMPT: usize = 512;
const BLOCK: usize = 16;
const MOST_SEQUENCES: usize = 32;
const MOST_ADAPTERS: usize = 16;
const BATCHES: [(usize, &[usize]); 4] = [(1, &[1]), (8, &[1, 8]), (16, &[1, 8, 16]), (32, &[1, 8, 16])];

fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::from_arguments();
    let mut model = Model::open(&options)?;
    let bench = Bench { probe: Probe::new(64 << 20), pool: Pool::new(options.threads)?, options };
    println!("{:<44}{:>9}{:>17}{:>10}{:>10}", "", "ms", "quartiles", "to base", "to floor");
    for (batch, counts) in BATCHES {
        let name = format!("batch {batch}");
        bench.measure(&mut model, &name, &vec![1; batch], counts)?;
    }
    bench.measure(&mut model, "prefill 512", &[PROMPT], &[1])
}

struct Options {
    weights: WeightType,
    ranks: Vec<usize>,
    is_f32: bool,
    isa: String,
    rounds: usize,
    threads: usize,
    filter: String,
}

impl Options {
    fn from_arguments() -> Self {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let mut options = Self {
            weights: WeightType::None,
            ranks: vec![8, 16, 64],
            is_f32: false,
            isa: String::new(),
            rounds: 15,
            threads,
            filter: String::new(),
        };
        let mut arguments = std::env::args().skip(1);
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().expect("a value");
            match argument.as_str() {
                "--bench" => {}
                "--weights" => {
                    options.weights = match value().as_str() {
                        "bf16" => WeightType::None,
                        "int8" => WeightType::Int8,
                        "int4" => WeightType::Int4,
                        other => panic!("{other} is not bf16, int8 or int4"),
                    }
                }
                "--ranks" => {
                    options.ranks = value().split(',').map(|rank| rank.parse().expect("a rank")).collect();
                }
                "--f32" => options.is_f32 = true,
                "--isa" => options.isa = value(),
                "--rounds" => options.rounds = value().parse().expect("a number"),
                "--threads" => options.threads = value().parse().expect("a number"),
                _ => options.filter = argument,
            }
        }
        options
    }
}

struct Bench {
    options: Options,
    probe: Probe,
    pool: Pool,
}

/// A step of a model.
struct Step {
    name: String,
    inputs: StepInputs,
    /// Bytes and operations of the adapters.
    bytes: usize,
    operations: usize,
}

impl Bench {
    /// Measures the steps of sequences with these numbers of tokens: without adapters, and with each number of adapters of
    /// each rank.
    fn measure(
        &self,
        model: &mut Model,
        name: &str,
        sequences: &[usize],
        counts: &[usize],
    ) -> Result<(), Box<dyn Error>> {
        if !name.contains(&self.options.filter) {
            return Ok(());
        }
        let mut steps = vec![model.step(name.to_owned(), sequences, None)?];
        for (index, rank) in self.options.ranks.iter().enumerate() {
            for count in counts {
                let name = match count {
                    1 => format!("{name}, 1 adapter of rank {rank}"),
                    _ => format!("{name}, {count} adapters of rank {rank}"),
                };
                steps.push(model.step(name, sequences, Some((index, *count)))?);
            }
        }
        let mut rounds = Vec::new();
        for round in 0..=self.options.rounds {
            let mut limits = self.probe.measure(&self.pool);
            let times: Vec<f64> = steps.iter().map(|step| model.run(step)).collect();
            limits = limits.mean(self.probe.measure(&self.pool));
            if round > 0 {
                rounds.push((limits, times));
            }
        }
        for (index, step) in steps.iter().enumerate() {
            let times = Sorted::new(rounds.iter().map(|(_, times)| times[index]));
            let to_base = Sorted::new(rounds.iter().map(|(_, times)| times[index] / times[0]));
            let to_floor =
                Sorted::new(rounds.iter().map(|(limits, times)| times[index] / step.floor(limits, times[0])));
            println!(
                "{:<44}{:>9.2}{:>17}{:>9.3}x{:>9.3}x",
                step.name,
                1e3 * times.at(0.5),
                format!("{:.2} to {:.2}", 1e3 * times.at(0.25), 1e3 * times.at(0.75)),
                to_base.at(0.5),
                to_floor.at(0.5),
            );
        }
        let bandwidth = Sorted::new(rounds.iter().map(|(limits, _)| limits.bytes_per_second));
        let rate = Sorted::new(rounds.iter().map(|(limits, _)| limits.flops_per_second));
        println!("{:>44} {:.1} GB/s, {:.0} GFLOP/s", "", bandwidth.at(0.5) / 1e9, rate.at(0.5) / 1e9);
        Ok(())
    }
}

impl Step {
    /// The least time of the step, if `base` is that of the step without adapters.
    fn floor(&self, limits: &Machine, base: f64) -> f64 {
        let reading = self.bytes as f64 / limits.bytes_per_second;
        base + reading.max(self.operations as f64 / limits.flops_per_second)
    }
}

/// Numbers in ascending order.
struct Sorted(Vec<f64>);

impl Sorted {
    fn new(values: impl Iterator<Item = f64>) -> Self {
        let mut values: Vec<f64> = values.collect();
        values.sort_by(f64::total_cmp);
        Self(values)
    }

    fn at(&self, part: f64) -> f64 {
        self.0[((self.0.len() - 1) as f64 * part).round() as usize]
    }
}

struct Model {
    backend: Cpu,
    decoder: Decoder<Cpu>,
    workspace: Workspace<Cpu>,
    cache: CpuCache,
    spec: StepSpec,
    /// Bytes and parameters of an adapter of each rank.
    sizes: Vec<(usize, usize)>,
}

impl Model {
    fn open(options: &Options) -> Result<Self, Box<dyn Error>> {
        let checkpoint = Checkpoint::open(&half_billion::write()?)?;
        let config = ModelConfig::with_overrides(checkpoint.config(), &serde_json::Map::new())?;
        let mut backend = Cpu::open(&Arc::default(), options.threads, &options.isa, &[])?;
        backend.reserve(8 << 30)?;
        let quantization = Quantization::from(options.weights);
        let formats = WeightFormats::new(&backend, &checkpoint, &config, Dtype::Bf16, &quantization)?;
        let mut progress = |_, _| ControlFlow::Continue(());
        let decoder = load(&mut backend, &checkpoint, config, &formats, 1, &mut progress)?;
        let heads: HeadShape = decoder.config().heads;
        let layers = decoder.config().num_layers();
        let spec = StepSpec {
            tokens: PROMPT,
            sequences: MOST_SEQUENCES,
            logits_rows: MOST_SEQUENCES,
            positions: PROMPT,
            block_size: BLOCK,
            heads,
            vocabulary: decoder.config().vocabulary_size,
        };
        let mut packed = Vec::new();
        for rank in &options.ranks {
            let files = AdapterFiles::open(&half_billion::write_adapter(*rank, options.is_f32)?, u64::MAX)?;
            let limits = AdapterLimits { rank: *rank, bytes: u64::MAX };
            for _ in 0..MOST_ADAPTERS {
                // Each with memory of its own, as adapters with other weights have.
                packed.push(Arc::new(pack_adapter::<CpuAdapterLayout>(
                    &files,
                    decoder.config(),
                    limits,
                    &mut progress,
                )?));
            }
        }
        let bytes = packed.iter().map(|packed| CpuAdapterLayout::adapter_bytes(packed.bytes().len() as u64));
        let adapters = AdapterSpec {
            adapters: packed.len(),
            bytes: bytes.sum(),
            rank: options.ranks.iter().copied().max().unwrap_or(1),
            matrices: adapted_matrices(decoder.config()),
        };
        let mut workspace = Workspace::new(&mut backend, decoder.config(), &spec, Some(&adapters))?;
        let loaded = workspace.adapters.as_mut().ok_or("adapters")?;
        for (number, packed) in (0..).zip(&packed) {
            backend.load_adapter(loaded, number, packed)?;
        }
        let blocks = MOST_SEQUENCES * CONTEXT.div_ceil(BLOCK);
        let cache =
            CacheSpec { layers, blocks, host_blocks: 0, block_size: BLOCK, heads, dtype: KvDtype::Bf16 };
        let cache = backend.allocate_cache(&cache)?;
        let sizes = packed.iter().step_by(MOST_ADAPTERS).map(|packed| {
            let shapes = packed.updates.iter().map(|update| update.shape);
            (packed.bytes().len(), shapes.map(|shape| shape.rank * (shape.rows + shape.columns)).sum())
        });
        Ok(Self { backend, decoder, workspace, cache, spec, sizes: sizes.collect() })
    }

    /// A step of sequences with these numbers of tokens. `adapters` has the index of a rank and the number of its adapters,
    /// which divide the sequences.
    fn step(
        &self,
        name: String,
        sequences: &[usize],
        adapters: Option<(usize, usize)>,
    ) -> Result<Step, Box<dyn Error>> {
        let mut inputs = StepInputs::with_room(&self.spec)?;
        let mut block = 0;
        for (index, tokens) in sequences.iter().enumerate() {
            let first = inputs.tokens.len();
            let start = if *tokens == 1 { CONTEXT - 1 } else { 0 };
            let blocks = (start + tokens).div_ceil(BLOCK);
            inputs.blocks.extend((block..block + blocks).map(|block| block as u32));
            block += blocks;
            let ids = (0..*tokens).map(|token| (7919 * (index + token) % 30_000) as u32);
            self.decoder.push_sequence(&mut inputs, ids, start, start + tokens, blocks, BLOCK);
            inputs.output_rows.push(inputs.tokens.len() as u32 - 1);
            if let Some((rank, count)) = adapters {
                // Adjacent rows have the same adapter, as in a step of the engine.
                let number = (rank * MOST_ADAPTERS + index * count / sequences.len()) as u32;
                match inputs.adapters.last_mut() {
                    Some(last) if last.adapter == number => last.rows.end = inputs.tokens.len(),
                    _ => inputs
                        .adapters
                        .push(AdapterRows { rows: first..inputs.tokens.len(), adapter: number }),
                }
            }
        }
        let (bytes, operations) = match adapters {
            None => (0, 0),
            Some((rank, count)) => {
                let (bytes, parameters) = self.sizes[rank];
                (count * bytes, 2 * inputs.tokens.len() * parameters)
            }
        };
        Ok(Step { name, inputs, bytes, operations })
    }

    fn run(&mut self, step: &Step) -> f64 {
        let Self { backend, decoder, workspace, cache, .. } = self;
        seconds(|| {
            decoder.forward(backend, &step.inputs, cache, workspace).expect("a valid step");
            decoder.logits(backend, 0..step.inputs.output_rows.len(), workspace).expect("logits");
        })
    }
}
