//! Time to sample a token from a row of logits, for the parameters of a request.
//!
//!     cargo bench -p penstock-device --bench sampling -- [--quick] [--threads N] [FILTER]
//!
//! Rows have the vocabulary of a Qwen2, in two shapes: peaked, like those of a text, and flat, like those of random weights,
//! where nearly every id is a candidate. A line has the median time of a row in a batch of 1 and in a batch of 32. All
//! cases take turns, so that their ratios do not depend on other load.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use penstock_device::cpu::{Cpu, CpuBuffer, CpuScratch, CpuSlots};
use penstock_device::{
    Compute, Load, MatrixPart, Memory, RowSource, Sample, Sampled, SamplingBatch, SamplingEntry, SlotParams,
    StepInputs, StepSpec, WeightSource,
};
use penstock_types::{Dtype, HeadShape, LogprobsRequest, Sampling};

const VOCABULARY: usize = 151_936;
const BATCH: usize = 32;

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Nearly normal, with deviation 1.
    fn normal(&mut self) -> f32 {
        let sum: f32 = (0..6).map(|_| (self.next() >> 40) as f32 / (1 << 24) as f32).sum();
        (sum - 3.0) * std::f32::consts::SQRT_2
    }
}

/// A distribution of logits: all with one deviation, and a few above the others.
#[derive(Clone, Copy)]
struct Shape {
    name: &'static str,
    deviation: f32,
    /// The highest of the few, and the distance from each to the next.
    few: Option<(f32, f32)>,
}

const SHAPES: [Shape; 2] = [
    Shape { name: "peaked", deviation: 2.5, few: Some((21.0, 0.4)) },
    Shape { name: "flat", deviation: 0.6, few: None },
];

impl RowSource for Shape {
    fn rows(&self) -> usize {
        BATCH
    }

    fn columns(&self) -> usize {
        VOCABULARY
    }

    fn read(&self, rows: Range<usize>, out: &mut [f32]) {
        for (row, out) in rows.zip(out.chunks_exact_mut(VOCABULARY)) {
            let mut random = Random(row as u64);
            out.iter_mut().for_each(|logit| *logit = self.deviation * random.normal());
            if let Some((highest, step)) = self.few {
                for nth in 0..40 {
                    out[random.next() as usize % VOCABULARY] = highest - step * nth as f32;
                }
            }
        }
    }
}

impl WeightSource for Shape {}

/// The parameters of a line.
struct Case {
    name: &'static str,
    sampling: Sampling,
    /// The prompt and the generated tokens.
    history: (Arc<[u32]>, Vec<u32>),
    mask: bool,
    given: Option<u32>,
    logprobs: Option<LogprobsRequest>,
}

fn main() {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let (mut threads, mut rounds, mut filter) = (threads, 60, String::new());
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--bench" => {}
            "--quick" => rounds = 10,
            "--threads" => {
                threads = arguments.next().and_then(|n| n.parse().ok()).expect("--threads takes a number");
            }
            _ => filter = argument,
        }
    }
    println!("{VOCABULARY} ids, {threads} threads; microseconds a row\n");
    println!("{:<42}{:>12}{:>12}{:>16}", "", "batch of 1", "batch of 32", "least, of 32");
    for shape in SHAPES {
        let titles = cases().into_iter().map(|case| (format!("{}, {}", shape.name, case.name), case));
        let cases: Vec<_> = titles.filter(|(title, _)| title.contains(&filter)).collect();
        let mut rows = Rows::new(shape, threads);
        let mut times = vec![(Vec::new(), Vec::new()); cases.len()];
        for round in 0..rounds {
            for ((_, case), (alone, batch)) in cases.iter().zip(&mut times) {
                alone.push(rows.microseconds(case, 1, round));
                batch.push(rows.microseconds(case, BATCH, round));
            }
        }
        for ((title, _), (alone, batch)) in cases.iter().zip(&mut times) {
            alone.sort_by(f64::total_cmp);
            batch.sort_by(f64::total_cmp);
            let (alone, least, batch) = (alone[alone.len() / 2], batch[0], batch[batch.len() / 2]);
            println!("{title:<42}{alone:>12.0}{batch:>12.0}{least:>16.0}");
        }
    }
}

fn cases() -> Vec<Case> {
    let mut random = Random(7);
    let prompt: Arc<[u32]> = (0..2000).map(|_| random.next() as u32 % VOCABULARY as u32).collect();
    let generated: Vec<u32> = prompt.iter().step_by(4).copied().collect();
    let greedy = || Sampling { temperature: 0.0, ..Sampling::default() };
    let plain = || Sampling { temperature: 0.8, seed: 1, ..Sampling::default() };
    let penalised =
        || Sampling { repetition_penalty: 1.1, presence_penalty: 0.5, frequency_penalty: 0.5, ..plain() };
    let case = |name, sampling| Case {
        name,
        sampling,
        history: (Arc::from([0]), vec![]),
        mask: false,
        given: None,
        logprobs: None,
    };
    let raw = |top| Some(LogprobsRequest { top, processed: false });
    let both = (Arc::clone(&prompt), generated);
    vec![
        case("greedy", greedy()),
        case("random", plain()),
        case("top_k 50", Sampling { top_k: 50, ..plain() }),
        case("top_p 0.9", Sampling { top_p: 0.9, ..plain() }),
        case("min_p 0.05", Sampling { min_p: 0.05, ..plain() }),
        case("typical_p 0.9", Sampling { typical_p: 0.9, ..plain() }),
        case("top_k 50, top_p 0.9, min_p 0.05", Sampling { top_k: 50, top_p: 0.9, min_p: 0.05, ..plain() }),
        Case { history: both.clone(), ..case("penalties, 2000 distinct ids", penalised()) },
        Case {
            history: (prompt, vec![]),
            ..case("no_repeat_ngram 3, 2000 tokens", Sampling { no_repeat_ngram_size: 3, ..plain() })
        },
        Case { mask: true, ..case("grammar mask", plain()) },
        Case { mask: true, ..case("grammar mask, greedy", greedy()) },
        Case { logprobs: raw(0), ..case("log probability", plain()) },
        Case { logprobs: raw(20), ..case("log probability, top 20", plain()) },
        Case { logprobs: raw(0), given: Some(5), ..case("log probability given", plain()) },
        Case {
            history: both,
            mask: true,
            logprobs: Some(LogprobsRequest { top: 20, processed: true }),
            ..case("everything", Sampling { top_k: 1000, top_p: 0.95, typical_p: 0.9, ..penalised() })
        },
    ]
}

/// A backend with a batch of logits.
struct Rows {
    cpu: Cpu,
    logits: CpuBuffer,
    slots: CpuSlots,
    scratch: CpuScratch,
    mask: Vec<u32>,
    batch: SamplingBatch,
    sampled: Vec<Sampled>,
}

impl Rows {
    fn new(shape: Shape, threads: usize) -> Self {
        let mut cpu = Cpu::new(threads).expect("a CPU");
        cpu.reserve(1 << 28).expect("memory");
        let heads = HeadShape { heads: 1, kv_heads: 1, head_dim: 1 };
        let spec = StepSpec {
            tokens: 1,
            sequences: BATCH,
            logits_rows: 1,
            positions: 1,
            block_size: 16,
            heads,
            vocabulary: VOCABULARY,
        };
        let slots = cpu.allocate_slots(&spec).expect("memory");
        let scratch = cpu.allocate_scratch(&spec).expect("memory");
        let table =
            cpu.load_matrix(&[MatrixPart { source: &shape, format: Dtype::F32.into() }]).expect("memory");
        let mut logits = cpu.allocate(BATCH * VOCABULARY).expect("memory");
        let inputs = StepInputs { tokens: (0..BATCH as u32).collect(), ..StepInputs::default() };
        cpu.embed(&inputs, &slots, &table, &mut logits).expect("no failure");
        let mut random = Random(8);
        let mask = (0..VOCABULARY.div_ceil(32)).map(|_| random.next() as u32).collect();
        let (batch, sampled) = (SamplingBatch::default(), Vec::new());
        Self { cpu, logits, slots, scratch, mask, batch, sampled }
    }

    /// Time of a row in a batch of `count`, the first of which is row `round`.
    fn microseconds(&mut self, case: &Case, count: usize, round: usize) -> f64 {
        let Self { cpu, logits, slots, scratch, mask, batch, sampled } = self;
        let (prompt, generated) = &case.history;
        let params = SlotParams {
            generated,
            logprobs: case.logprobs,
            prompt_logprobs: case.logprobs.map(|request| request.top),
            ..SlotParams::new(&case.sampling, prompt)
        };
        for slot in 0..count as u32 {
            cpu.admit_slot(slots, slot, &params).expect("no failure");
        }
        let start = Instant::now();
        batch.clear();
        for slot in 0..count {
            let mask = case.mask.then(|| batch.push_mask(mask));
            batch.push(SamplingEntry {
                row: ((round + slot) % BATCH) as u32,
                slot: slot as u32,
                index: (round * BATCH + slot) as u32,
                draft: None,
                given: case.given,
                mask,
                processed: None,
            });
        }
        let ticket = cpu.sample(logits, batch, slots, scratch).expect("no failure");
        cpu.collect(ticket, sampled).expect("no failure");
        1e6 * start.elapsed().as_secs_f64() / count as f64
    }
}
