//! The speed of a whole model relative to the limits of the machine.
//!
//!     cargo bench -p penstock-runner --bench model -- [--rounds N] [--threads N] [--dtype NAME] [PATH]
//!
//! PATH is a checkpoint; without one, random weights in the shape of a 0.5B Qwen2 (494 million parameters, bfloat16) are
//! written to `target/` once. Requests go through the engine, so scheduling, sampling and result queues are included. Every
//! result has the machine's limits measured right before and after it, and is printed as a share of the longer of two times:
//! its bytes at the read bandwidth, its operations at the multiply-add rate.

#[path = "half_billion.rs"]
mod half_billion;
#[path = "roofline.rs"]
#[allow(dead_code, reason = "each benchmark uses a part of it")]
mod roofline;

use std::error::Error;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use penstock_checkpoint::Checkpoint;
use penstock_engine::{Consumer, Engine, Event, Port, Request};
use penstock_kernels::Pool;
use penstock_runner::{EngineConfig, ModelInfo};
use penstock_types::{Dtype, Sampling};
use roofline::{Machine, Probe};
use serde_json::Value;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments = Arguments::read();
    let path = arguments.path.clone().map_or_else(half_billion::write, Ok)?;
    let checkpoint = Checkpoint::open(&path)?;
    let opened = Instant::now();
    let options = EngineConfig {
        threads: Some(arguments.threads),
        dtype: arguments.dtype,
        prefix_cache_ttl: Some(Duration::from_secs(300)),
        ..EngineConfig::default()
    };
    let (engine, info) =
        penstock_runner::launch(&checkpoint, &options, &mut |_, _| ControlFlow::Continue(()))?;
    println!(
        "{}: {:.0} M parameters, {:?}, {:.0} MB of weights, {} threads, {}; opened in {:.2} s",
        info.architecture,
        info.parameters as f64 / 1e6,
        info.dtype,
        info.memory.weights as f64 / 1e6,
        info.threads,
        info.isa,
        opened.elapsed().as_secs_f64(),
    );
    let model = Model::new(engine, info, checkpoint.config());
    let bench =
        Bench { probe: Probe::new(256 << 20), pool: Pool::new(arguments.threads)?, rounds: arguments.rounds };
    println!("{:<28}{:>14}{:>10}{:>10}{:>22}", "", "tokens/s", "share", "best", "limits (GB/s, GFLOP/s)");
    bench.line("prefill, 512 tokens", &model, 1, 512, 1);
    bench.line("decode, batch 1", &model, 1, 16, 65);
    bench.line("decode, batch 8", &model, 8, 16, 33);
    bench.line("decode, batch 32", &model, 32, 16, 17);
    bench.first_token(&model, 512, 460);
    Ok(())
}

struct Arguments {
    path: Option<PathBuf>,
    rounds: usize,
    threads: usize,
    dtype: Option<Dtype>,
}

impl Arguments {
    fn read() -> Self {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let mut read = Self { path: None, rounds: 5, threads, dtype: None };
        let mut arguments = std::env::args().skip(1);
        while let Some(argument) = arguments.next() {
            let mut number = || arguments.next().and_then(|text| text.parse().ok()).expect("a number");
            match argument.as_str() {
                "--bench" => {}
                "--rounds" => read.rounds = number(),
                "--threads" => read.threads = number(),
                "--dtype" => {
                    read.dtype = match arguments.next().as_deref() {
                        Some("float32") => Some(Dtype::F32),
                        Some("float16") => Some(Dtype::F16),
                        Some("bfloat16") => Some(Dtype::Bf16),
                        _ => panic!("--dtype float32, float16 or bfloat16"),
                    }
                }
                _ => read.path = Some(argument.into()),
            }
        }
        read
    }
}

/// A running engine, and the minimum cost of its steps.
struct Model {
    engine: Engine,
    info: ModelInfo,
    /// Multiply-adds of a token in all layers, and in the head.
    body: f64,
    head: f64,
}

impl Model {
    fn new(engine: Engine, info: ModelInfo, config: &Value) -> Self {
        let size = |name: &str| config[name].as_f64().expect("checked when the model was opened");
        let head = size("hidden_size") * size("vocab_size");
        let tables = if config["tie_word_embeddings"] == Value::Bool(true) { 1.0 } else { 2.0 };
        let body = info.parameters as f64 - tables * head;
        Self { engine, info, body, head }
    }

    /// `len` arbitrary token ids, which differ between streams from the first one on.
    fn tokens(&self, len: u32, stream: u32) -> Vec<u32> {
        let vocabulary = self.engine.limits().vocabulary_size as u32;
        (0..len).map(|index| (index * 7919 + stream * 104_729) % vocabulary).collect()
    }

    /// Seconds until every stream has its first token, and from there to the end.
    fn run(&self, prompts: Vec<Vec<u32>>, max_tokens: usize, prefix_cache: bool) -> (f64, f64) {
        let port = Port::with_condvar();
        let streams = prompts.len();
        let started = Instant::now();
        let start = |prompt| {
            let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
            let request = Request { prefix_cache, ..Request::new(prompt, max_tokens, sampling) };
            self.engine.start_request(request, &port).expect("a valid request")
        };
        let mut consumers: Vec<Consumer> = prompts.into_iter().map(start).collect();
        let (mut waiting, mut open, mut first) = (streams, streams, 0.0);
        let mut has_begun = vec![false; streams];
        while open > 0 {
            port.wait(None);
            port.clear();
            for (consumer, has_begun) in consumers.iter_mut().zip(&mut has_begun) {
                while let Some(event) = consumer.pop() {
                    match event {
                        Event::Token(_) if !*has_begun => {
                            *has_begun = true;
                            waiting -= 1;
                            if waiting == 0 {
                                first = started.elapsed().as_secs_f64();
                            }
                        }
                        Event::Finished(_) => open -= 1,
                        _ => {}
                    }
                }
            }
        }
        (first, started.elapsed().as_secs_f64() - first)
    }

    /// The shortest time for a step of `tokens` tokens, `outputs` of them with logits.
    fn limit(&self, machine: Machine, tokens: usize, outputs: usize) -> f64 {
        let operations = 2.0 * (self.body * tokens as f64 + self.head * outputs as f64);
        let bytes = self.info.memory.weights as f64;
        (bytes / machine.bytes_per_second).max(operations / machine.flops_per_second)
    }
}

struct Bench {
    probe: Probe,
    pool: Pool,
    rounds: usize,
}

impl Bench {
    /// Prints medians over the rounds. With one token to generate the time is that of the prefill, else that of the decode steps.
    fn line(&self, name: &str, model: &Model, streams: usize, prompt: u32, max_tokens: usize) {
        let mut rounds: Vec<(f64, f64, Machine)> = (0..self.rounds)
            .map(|_| {
                let before = self.probe.measure(&self.pool);
                let prompts = (0..streams as u32).map(|stream| model.tokens(prompt, stream)).collect();
                let (first, rest) = model.run(prompts, max_tokens, false);
                let machine = before.mean(self.probe.measure(&self.pool));
                if max_tokens == 1 {
                    (f64::from(prompt) / first, model.limit(machine, prompt as usize, 1) / first, machine)
                } else {
                    let steps = (max_tokens - 1) as f64;
                    (
                        streams as f64 * steps / rest,
                        steps * model.limit(machine, streams, streams) / rest,
                        machine,
                    )
                }
            })
            .collect();
        rounds.sort_by(|a, b| a.1.total_cmp(&b.1));
        let (rate, share, machine) = rounds[rounds.len() / 2];
        let best = rounds.last().map_or(0.0, |round| round.1);
        let limits = format!("{:.1}, {:.0}", machine.bytes_per_second / 1e9, machine.flops_per_second / 1e9);
        println!("{name:<28}{rate:>14.1}{:>9.1}%{:>9.1}%{limits:>22}", 100.0 * share, 100.0 * best);
    }
}

impl Bench {
    /// Time to first token of a prompt that is mostly cached, relative to an uncached one; one pair per round.
    fn first_token(&self, model: &Model, prompt: u32, shared: u32) {
        let seconds = |stream: u32| {
            let mut tokens = model.tokens(shared, 1000);
            tokens.extend(model.tokens(prompt - shared, stream));
            model.run(vec![tokens], 1, stream > 0).0
        };
        seconds(1); // fills the cache
        let mut rounds: Vec<(f64, f64)> =
            (0..self.rounds as u32).map(|round| (seconds(0), seconds(2 + round))).collect();
        rounds.sort_by(|a, b| (a.1 / a.0).total_cmp(&(b.1 / b.0)));
        let ((least, most), (cold, hit)) = ((rounds[0], rounds[rounds.len() - 1]), rounds[rounds.len() / 2]);
        println!(
            "first token of {prompt}, {:.0} % cached: {:.0} ms, {:.1} % of {:.0} ms uncached ({:.1} to {:.1} %)",
            100.0 * f64::from(shared) / f64::from(prompt),
            1e3 * hit,
            100.0 * hit / cold,
            1e3 * cold,
            100.0 * least.1 / least.0,
            100.0 * most.1 / most.0,
        );
    }
}
