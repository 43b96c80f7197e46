//! Time to choose a token from a row of logits, for what a request can ask.
//!
//!     cargo bench -p penstock-device --bench sampling -- [--quick] [--threads N] [FILTER]
//!
//! Rows have the vocabulary of a Qwen2, in two shapes: peaked, like those of a text, and flat, like those of random weights,
//! where nearly every id is in the running. A line has the median time of a row in a batch of 1 and in a batch of 32. All
//! cases take turns, so that what one is to another does not depend on the hour.

use std::ops::Range;
use std::time::Instant;

use penstock_device::cpu::Cpu;
use penstock_device::{Backend, RowSource, SampleParams, Sampled, StepInputs, StepSpec, TokenCounts};
use penstock_types::{Dtype, HeadShape, LogprobsRequest};

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

    /// Nearly normal, of deviation 1.
    fn normal(&mut self) -> f32 {
        let sum: f32 = (0..6).map(|_| (self.next() >> 40) as f32 / (1 << 24) as f32).sum();
        (sum - 3.0) * std::f32::consts::SQRT_2
    }
}

/// How logits are spread: all of one deviation, and a few above the others.
#[derive(Clone, Copy)]
struct Shape {
    name: &'static str,
    deviation: f32,
    /// How far each of the few is below the one before, from the first on.
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
    let mut random = Random(7);
    let mut counts = TokenCounts::new();
    let prompt: Vec<u32> = (0..2000).map(|_| random.next() as u32 % VOCABULARY as u32).collect();
    counts.push_prompt(&prompt);
    prompt.iter().step_by(4).for_each(|id| counts.push(*id));
    let mask: Vec<u32> = (0..VOCABULARY.div_ceil(32)).map(|_| random.next() as u32).collect();

    let greedy = SampleParams::greedy();
    let drawn = SampleParams { temperature: 0.8, seed: 1, ..greedy };
    let penalised = SampleParams {
        repetition_penalty: 1.1,
        presence_penalty: 0.5,
        frequency_penalty: 0.5,
        counts: &counts,
        ..drawn
    };
    let raw = |top| Some(LogprobsRequest { top, processed: false });
    let cases = [
        ("greedy", greedy),
        ("drawn", drawn),
        ("top_k 50", SampleParams { top_k: 50, ..drawn }),
        ("top_p 0.9", SampleParams { top_p: 0.9, ..drawn }),
        ("min_p 0.05", SampleParams { min_p: 0.05, ..drawn }),
        ("typical_p 0.9", SampleParams { typical_p: 0.9, ..drawn }),
        ("top_k 50, top_p 0.9, min_p 0.05", SampleParams { top_k: 50, top_p: 0.9, min_p: 0.05, ..drawn }),
        ("penalties, 2000 distinct ids", penalised),
        (
            "no_repeat_ngram 3, 2000 tokens",
            SampleParams { no_repeat_ngram_size: 3, prompt: &prompt, ..drawn },
        ),
        ("grammar mask", SampleParams { mask: Some(&mask), ..drawn }),
        ("grammar mask, greedy", SampleParams { mask: Some(&mask), ..greedy }),
        ("log probability", SampleParams { logprobs: raw(0), ..drawn }),
        ("log probability, top 20", SampleParams { logprobs: raw(20), ..drawn }),
        ("log probability given", SampleParams { logprobs: raw(0), given: Some(5), ..drawn }),
        (
            "everything",
            SampleParams {
                top_k: 1000,
                top_p: 0.95,
                typical_p: 0.9,
                mask: Some(&mask),
                logprobs: Some(LogprobsRequest { top: 20, processed: true }),
                ..penalised
            },
        ),
    ];
    println!("{VOCABULARY} ids, {threads} threads; microseconds a row\n");
    println!("{:<42}{:>12}{:>12}{:>16}", "", "batch of 1", "batch of 32", "least, of 32");
    for shape in SHAPES {
        let titles = cases.map(|(name, params)| (format!("{}, {name}", shape.name), params));
        let cases: Vec<_> = titles.into_iter().filter(|(title, _)| title.contains(&filter)).collect();
        let mut rows = Rows::new(shape, threads);
        let mut times = vec![(Vec::new(), Vec::new()); cases.len()];
        for round in 0..rounds {
            for ((_, params), (alone, batch)) in cases.iter().zip(&mut times) {
                alone.push(rows.microseconds(params, 1, round));
                batch.push(rows.microseconds(params, BATCH, round));
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

/// A backend with a batch of logits.
struct Rows {
    cpu: Cpu,
    logits: <Cpu as Backend>::Buffer,
    scratch: <Cpu as Backend>::Scratch,
    sampled: Vec<Sampled>,
}

impl Rows {
    fn new(shape: Shape, threads: usize) -> Self {
        let mut cpu = Cpu::new(threads).expect("a CPU");
        cpu.reserve(1 << 28).expect("memory");
        let table = cpu.load_matrix(&shape, Dtype::F32).expect("memory");
        let mut logits = cpu.allocate(BATCH * VOCABULARY).expect("memory");
        let inputs = StepInputs { tokens: (0..BATCH as u32).collect(), ..StepInputs::default() };
        cpu.embed(&inputs, &table, &mut logits).expect("no failure");
        let heads = HeadShape { heads: 1, kv_heads: 1, head_dim: 1 };
        let spec = StepSpec {
            tokens: 1,
            sequences: 1,
            logits_rows: 1,
            positions: 1,
            block_size: 16,
            heads,
            vocabulary: VOCABULARY,
        };
        let scratch = cpu.allocate_scratch(&spec).expect("memory");
        Self { cpu, logits, scratch, sampled: vec![Sampled::default(); BATCH] }
    }

    /// Time of a row in a batch of `count`, the first of which is row `round`.
    fn microseconds(&mut self, params: &SampleParams<'_>, count: usize, round: usize) -> f64 {
        let params = |place| SampleParams {
            row: ((round + place) % BATCH) as u32,
            index: (round * BATCH + place) as u32,
            ..*params
        };
        let start = Instant::now();
        let Self { cpu, logits, scratch, sampled } = self;
        cpu.sample(VOCABULARY, logits, &params, scratch, &mut sampled[..count]).expect("no failure");
        1e6 * start.elapsed().as_secs_f64() / count as f64
    }
}
