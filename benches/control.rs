//! The cost of scoring, drafts and grammars: steps of a whole model, each relative to the plain step.
//!
//!     cargo bench -p penstock-runner --bench control -- [--rounds N] [--threads N] [PATH]
//!
//! PATH is a checkpoint; without one, random weights in the shape of Qwen2 0.5B. Steps are built directly and run without
//! an engine. A line shows the median time of a step and, because the load of the machine varies, the median of its ratios
//! to the plain step of the same round.

#[path = "half_billion.rs"]
#[allow(dead_code, reason = "each benchmark uses only a part")]
mod half_billion;

use std::error::Error;
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::Instant;

use penstock_checkpoint::Checkpoint;
use penstock_engine::{
    Grammar, GrammarState, Limits, NewSequence, Request, Sample, ScheduledRow, StepOutput, StepPlan,
};
use penstock_runner::BareRunner;
use penstock_types::{BlockId, EngineConfig, RequestedOutputs, Sampling};

const PROMPT: usize = 256;
const SCORED: usize = 512;
const MOST_ROWS: usize = 16;

fn main() -> Result<(), Box<dyn Error>> {
    let (path, rounds, threads) = arguments();
    let checkpoint = Checkpoint::open(&path.map_or_else(half_billion::write, Ok)?)?;
    let options = EngineConfig {
        threads: Some(threads),
        max_model_len: Some(SCORED),
        max_num_seqs: Some(MOST_ROWS),
        ..EngineConfig::default()
    };
    let (runner, limits) = BareRunner::open(&checkpoint, &options.into())?;
    let mut model = Model { runner, limits };

    println!("{:<36}{:>12}{:>18}", "", "ms per step", "relative to plain");
    let scored = RequestedOutputs { prompt_logprobs: Some(0), ..RequestedOutputs::default() };
    model.measure(
        rounds,
        &[
            (
                "prefill, 512 tokens",
                Row::prompt(&request(SCORED, RequestedOutputs::default(), false), SCORED),
                1,
            ),
            ("scoring, 512 tokens", Row::prompt(&request(SCORED, scored, false), SCORED), 1),
        ],
    );
    for rows in [1, 8] {
        let plain = request(PROMPT, RequestedOutputs::default(), false);
        let names = ["no drafts", "1 draft", "2 drafts", "4 drafts", "8 drafts"];
        let lines: Vec<_> = [0, 1, 2, 4, 8]
            .into_iter()
            .zip(names)
            .map(|(drafts, name)| (name, Row::next(&plain, drafts), rows))
            .collect();
        println!("decode, batch {rows}");
        model.measure(rounds, &lines);
    }
    println!("decode, batch {MOST_ROWS}");
    let row = |is_guided| Row::next(&request(PROMPT, RequestedOutputs::default(), is_guided), 0);
    model.measure(rounds, &[("plain", row(false), MOST_ROWS), ("guided", row(true), MOST_ROWS)]);
    let seconds = quickest(rounds.max(20), || {
        let mut state = Sieve(1);
        let mut mask = vec![0; model.limits.vocabulary_size.div_ceil(32)];
        let started = Instant::now();
        state.mask(&mut mask).expect("a sieve never fails");
        started.elapsed().as_secs_f64()
    });
    println!("a mask alone takes {:.0} us", 1e6 * seconds);
    Ok(())
}

fn arguments() -> (Option<PathBuf>, usize, usize) {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut read = (None, 15, threads);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut number = || arguments.next().and_then(|text| text.parse().ok()).expect("a number");
        match argument.as_str() {
            "--bench" => {}
            "--rounds" => read.1 = number(),
            "--threads" => read.2 = number(),
            _ => read.0 = Some(argument.into()),
        }
    }
    read
}

fn request(num_prompt: usize, outputs: RequestedOutputs, is_guided: bool) -> Arc<Request> {
    let prompt: Vec<u32> = (0..num_prompt as u32).map(|index| index * 7919 % 30_000).collect();
    let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
    let grammar = is_guided.then(|| Arc::new(Sieves) as Arc<dyn Grammar>);
    Arc::new(Request { outputs, grammar, ..Request::new(prompt, 1 << 20, sampling) })
}

/// A grammar that visits every id and allows about half of them, which ones depends on the tokens so far.
#[derive(Debug)]
struct Sieves;

struct Sieve(u32);

impl Grammar for Sieves {
    fn start(&self) -> Result<Box<dyn GrammarState>, String> {
        Ok(Box::new(Sieve(1)))
    }
}

impl GrammarState for Sieve {
    fn mask(&mut self, allowed: &mut [u32]) -> Result<(), String> {
        for (index, word) in allowed.iter_mut().enumerate() {
            let bit = |bit: u32| ((index as u32 * 32 + bit) ^ self.0).wrapping_mul(0x9E37_79B9) >> 31 << bit;
            *word = (0..32).map(bit).fold(0, |word, bit| word | bit);
        }
        Ok(())
    }

    fn accept(&mut self, token: u32) -> Result<(), String> {
        self.0 = self.0.wrapping_mul(31).wrapping_add(token);
        Ok(())
    }

    fn forced(&mut self, _: &mut Vec<u32>) {}

    fn fork(&self) -> Result<Box<dyn GrammarState>, String> {
        Ok(Box::new(Self(self.0)))
    }
}

/// The row of every sequence in a step.
struct Row {
    request: Arc<Request>,
    start: usize,
    num_drafts: usize,
    num_tokens: usize,
}

impl Row {
    /// The whole prompt.
    fn prompt(request: &Arc<Request>, num_tokens: usize) -> Self {
        Self { request: Arc::clone(request), start: 0, num_drafts: 0, num_tokens }
    }

    /// The first output token, followed by `num_drafts` draft tokens that are wrong.
    fn next(request: &Arc<Request>, num_drafts: usize) -> Self {
        let start = request.prompt.len();
        Self { request: Arc::clone(request), start, num_drafts, num_tokens: 1 + num_drafts }
    }
}

struct Model {
    runner: BareRunner,
    limits: Limits,
}

impl Model {
    /// Runs the steps in every round, each with a number of equal rows; the first step is the plain one. The blocks before
    /// the rows have not been computed, which does not change the time.
    fn measure(&mut self, rounds: usize, steps: &[(&str, Row, usize)]) {
        let mut times = vec![Vec::with_capacity(rounds); steps.len()];
        for _ in 0..rounds {
            for ((_, row, count), times) in steps.iter().zip(&mut times) {
                times.push(self.seconds(row, *count));
            }
        }
        let plain = times[0].clone();
        for ((name, ..), times) in steps.iter().zip(times) {
            let ratio = median(times.iter().zip(&plain).map(|(time, plain)| time / plain).collect());
            println!("{:<36}{:>12.2}{ratio:>17.2}x", format!("  {name}"), 1e3 * median(times));
        }
    }

    fn seconds(&mut self, row: &Row, count: usize) -> f64 {
        let blocks_each = SCORED.div_ceil(self.limits.block_size);
        let mut plan = StepPlan::default();
        for slot in 0..count as u32 {
            let first_token = plan.tokens.len() as u32;
            let prompt = row.request.prompt.iter().copied();
            plan.tokens.extend(prompt.chain(std::iter::repeat(1)).skip(row.start).take(row.num_tokens));
            let end = row.start + row.num_tokens;
            let first_block = slot as usize * blocks_each;
            let blocks = first_block..first_block + end.div_ceil(self.limits.block_size);
            let table_start = plan.blocks.len() as u32;
            plan.blocks.extend(blocks.map(|block| BlockId(block as u32)));
            plan.new_sequences.push(NewSequence {
                slot,
                request: Arc::clone(&row.request),
                choice: 0,
                generated: 0..0,
                lifetime: Weak::new(),
            });
            let prompt_outputs = if row.request.outputs.has_prompt() { end as u32 - 1 } else { 0 };
            plan.rows.push(ScheduledRow {
                slot,
                start: row.start as u32,
                prompt_len: row.request.prompt.len() as u32,
                num_tokens: row.num_tokens as u32,
                tokens: first_token..plan.tokens.len() as u32,
                follows_sample: false,
                blocks: table_start..plan.blocks.len() as u32,
                num_drafts: row.num_drafts as u32,
                prompt_outputs: 0..prompt_outputs,
                sample: Some(Sample { index: 0 }),
                adapter: None,
            });
        }
        let mut output = StepOutput::default();
        let started = Instant::now();
        self.runner.run(&plan, &mut output).expect("a valid plan");
        started.elapsed().as_secs_f64()
    }
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn quickest(times: usize, run: impl FnMut() -> f64) -> f64 {
    std::iter::repeat_with(run).take(times).fold(f64::INFINITY, f64::min)
}
