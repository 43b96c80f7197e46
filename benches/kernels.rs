//! The speed of each kernel relative to the limits of the machine.
//!
//!     cargo bench -p penstock-kernels --bench kernels -- [--quick] [--shapes] [--json] [--threads N] [--isa NAME[,NAME]] [FILTER]
//!     cargo bench -p penstock-kernels --bench kernels -- --limits
//!
//! `--shapes` also measures the matrices of a layer one by one, `--json` prints a JSON object per line, and `--limits`
//! prints only the limits of the machine, as JSON, for each number of threads.
//!
//! Several instruction sets alternate, so that their ratio does not depend on the load of the machine.
//! Every iteration measures the machine (read bandwidth, FMA rate) right before and after the kernel, so that the share of
//! the limit is meaningful on a machine with a varying clock or load. A line shows the median rate, the median share of the
//! limit over the iterations, and the best share. The limit of a kernel is the longer of two times: its bytes at the read
//! bandwidth, its operations at the peak of the instruction that the weights allow. Decoding over a long context alternates between all KV dtypes; there,
//! "reading" is the share of the read bandwidth alone, and the last column is the median, least and largest ratio to bf16
//! of one iteration.

#[path = "roofline.rs"]
#[allow(dead_code, reason = "each benchmark uses only a part")]
mod roofline;

use std::hint::black_box;
use std::time::Instant;

use penstock_kernels::{
    Isa, Kernels, KvLayout, Matrix, MatrixLayout, Operand, Pool, Rows, RowsMut, attention_scratch,
};
use penstock_types::{
    Activations, AttentionParams, AttentionRow, CodeBits, Dtype, Epilogue, Grid, GridRows, KvDtype, Minimum,
    ScaleFormat, WeightFormat,
};
use roofline::{Probe, Rates, Streams, seconds};

fn main() {
    let options = Options::from_arguments();
    if options.limits {
        return print_limits(options.threads);
    }
    let kernels =
        options.isas.iter().map(|isa| Kernels::for_isa(*isa).expect("an instruction set of this CPU"));
    let kernels: Vec<Kernels> = kernels.collect();
    let pool = Pool::new(options.threads).expect("threads");
    let bench = Bench {
        rates: options.isas.iter().map(|isa| roofline::rates(&pool, *isa)).collect(),
        probe: Probe::new(if options.quick { 128 << 20 } else { 256 << 20 }),
        kernels,
        pool,
        options,
    };
    if !bench.options.json {
        println!("{:<40}{:>12}{:>10}{:>8}{:>8}", "", "time", "rate", "share", "best");
        bench.barrier();
    }
    for dtype in [Dtype::Bf16, Dtype::F16, Dtype::F32] {
        bench.products(&format!("{dtype:?}").to_lowercase(), dtype.into());
    }
    let grid = |bits, group, scales, minimum, activations| {
        WeightFormat::Grid(Grid { bits, group, scales, minimum, activations })
    };
    use Activations::{Float, Int8};
    use Minimum::{Centred, Stored};
    use ScaleFormat::{F16, F32, Nested};
    for (tag, format) in [
        ("int8 row", grid(CodeBits::Eight, None, F32, Centred, Int8)),
        ("int8 g128", grid(CodeBits::Eight, Some(128), F16, Centred, Int8)),
        ("q8_0", grid(CodeBits::Eight, Some(32), F16, Centred, Int8)),
        ("int4 g128", grid(CodeBits::Four, Some(128), F16, Centred, Int8)),
        ("int4 g64", grid(CodeBits::Four, Some(64), F16, Centred, Int8)),
        ("q4_0", grid(CodeBits::Four, Some(32), F16, Centred, Int8)),
        ("q4_1", grid(CodeBits::Four, Some(32), F16, Stored, Int8)),
        ("q4_k", grid(CodeBits::Four, Some(32), Nested, Stored, Int8)),
        ("q5_k", grid(CodeBits::Five, Some(32), Nested, Stored, Int8)),
        ("q6_k", grid(CodeBits::Six, Some(16), Nested, Centred, Int8)),
        ("w8a16", grid(CodeBits::Eight, None, F32, Centred, Float)),
        ("w4a16", grid(CodeBits::Four, Some(64), F16, Centred, Float)),
    ] {
        bench.products(tag, format);
    }
    if bench.options.shapes {
        bench.shapes("bf16", Dtype::Bf16.into());
        bench.shapes("int8 g128", grid(CodeBits::Eight, Some(128), F16, Centred, Int8));
        bench.shapes("int4 g128", grid(CodeBits::Four, Some(128), F16, Centred, Int8));
    }
    if bench.options.json {
        return;
    }
    bench.tiles();
    for dtype in [KvDtype::Bf16, KvDtype::F32, KvDtype::Int8, KvDtype::Uint4] {
        bench.attention_prefill(dtype, 512);
    }
    bench.row_operations();
    for dtype in KvDtype::ALL {
        bench.write_kv(*dtype);
    }
    for (heads, kv_heads, head_dim) in [(14, 2, 64), (32, 8, 128)] {
        for sequences in [1, 8] {
            bench.attention_decode(heads, kv_heads, head_dim, sequences);
        }
    }
}

/// The limits of the machine with 1 to `most` threads, a JSON object per line.
fn print_limits(most: usize) {
    let probe = Probe::new(256 << 20);
    let isa = if Isa::Avx512Bf16.is_available() { Isa::Avx512Bf16 } else { Isa::best() };
    for threads in 1..=most {
        let pool = Pool::new(threads).expect("threads");
        let mut read = 0.0_f64;
        for streams in [Streams::One, Streams::Two, Streams::Four] {
            for _ in 0..6 {
                let rate = probe.bandwidth(&pool, streams);
                read = read.max(rate);
            }
        }
        let Rates { f32, bf16, int8, int4 } = roofline::rates(&pool, isa);
        println!(
            r#"{{"threads":{threads},"read":{read:.0},"f32":{f32:.0},"bf16":{bf16:.0},"int8":{int8:.0},"int4":{int4:.0}}}"#
        );
    }
}

struct Options {
    quick: bool,
    shapes: bool,
    json: bool,
    limits: bool,
    threads: usize,
    isas: Vec<Isa>,
    filter: String,
}

impl Options {
    fn from_arguments() -> Self {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let mut options = Options {
            quick: false,
            shapes: false,
            json: false,
            limits: false,
            threads,
            isas: vec![Isa::best()],
            filter: String::new(),
        };
        let mut arguments = std::env::args().skip(1);
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "--bench" => {}
                "--quick" => options.quick = true,
                "--shapes" => options.shapes = true,
                "--json" => options.json = true,
                "--limits" => options.limits = true,
                "--threads" => {
                    options.threads =
                        arguments.next().and_then(|n| n.parse().ok()).expect("--threads takes a number");
                }
                "--isa" => {
                    let names = arguments.next().unwrap_or_default();
                    options.isas = names
                        .split(',')
                        .map(|name| Isa::from_name(name).unwrap_or_else(|error| panic!("{error}")))
                        .collect();
                }
                _ => options.filter = argument,
            }
        }
        options
    }
}

struct Bench {
    options: Options,
    probe: Probe,
    /// The peak rates of each instruction set in `kernels`.
    rates: Vec<Rates>,
    kernels: Vec<Kernels>,
    pool: Pool,
}

/// The bytes and operations of one kernel call.
#[derive(Clone, Copy, Default)]
struct Work {
    bytes: usize,
    flops: usize,
    kind: Kind,
}

/// The instructions of the operations.
#[derive(Clone, Copy, Default)]
enum Kind {
    #[default]
    F32,
    Bf16,
    Int8,
    Int4,
}

impl Kind {
    fn of(format: WeightFormat) -> Self {
        match format {
            WeightFormat::Float(Dtype::Bf16) => Kind::Bf16,
            WeightFormat::Grid(Grid { activations: Activations::Int8, bits: CodeBits::Four, .. }) => {
                Kind::Int4
            }
            WeightFormat::Grid(Grid { activations: Activations::Int8, .. }) => Kind::Int8,
            _ => Kind::F32,
        }
    }

    /// The peak rate relative to that of float32 multiply-adds.
    fn speed(self, rates: &Rates) -> f64 {
        let rate = match self {
            Kind::F32 => rates.f32,
            Kind::Bf16 => rates.bf16,
            Kind::Int8 => rates.int8,
            Kind::Int4 => rates.int4,
        };
        rate / rates.f32
    }
}

/// The shapes of qwen2-0.5b: (rows, columns) of a layer's four products, and of the head.
const LAYER: [(usize, usize); 4] = [(1152, 896), (896, 896), (9728, 896), (896, 4864)];
const HEAD: (usize, usize) = (151_936, 896);
const LAYERS: usize = 24;

impl Bench {
    /// Runs `call` repeatedly between probes and prints a line for each instruction set.
    fn line(&self, name: &str, work: Work, mut call: impl FnMut(&Kernels, &Pool)) {
        if !name.contains(&self.options.filter) {
            return;
        }
        self.kernels.iter().for_each(|kernels| call(kernels, &self.pool));
        let budget = if self.options.quick { 0.15 } else { 2.0 } * self.kernels.len() as f64;
        let (mut times, mut shares) =
            (vec![Vec::new(); self.kernels.len()], vec![Vec::new(); self.kernels.len()]);
        let start = Instant::now();
        while times[0].len() < 3 || start.elapsed().as_secs_f64() < budget {
            for (index, kernels) in self.kernels.iter().enumerate() {
                let before = self.probe.measure(&self.pool);
                let time = seconds(|| call(kernels, &self.pool));
                let after = self.probe.measure(&self.pool);
                let machine = before.mean(after);
                let reading = work.bytes as f64 / machine.bytes_per_second;
                let peak = machine.flops_per_second * work.kind.speed(&self.rates[index]);
                shares[index].push(reading.max(work.flops as f64 / peak) / time);
                times[index].push(time);
            }
        }
        for ((kernels, times), shares) in self.kernels.iter().zip(&mut times).zip(&mut shares) {
            times.sort_by(f64::total_cmp);
            shares.sort_by(f64::total_cmp);
            let time = times[times.len() / 2];
            let (median, best) = (shares[shares.len() / 2], shares[shares.len() - 1]);
            let (bytes, flops) = (work.bytes as f64 / time / 1e9, work.flops as f64 / time / 1e9);
            let isa = kernels.isa();
            if self.options.json {
                println!(
                    r#"{{"kernel":"{name}","isa":"{isa}","ms":{:.4},"gb_s":{bytes:.1},"gop_s":{flops:.0},"share":{median:.3},"best":{best:.3}}}"#,
                    1e3 * time
                );
                continue;
            }
            let rate = if work.flops > 2 * work.bytes {
                format!("{flops:.0} GOP/s")
            } else {
                format!("{bytes:.1} GB/s")
            };
            let isa = if self.kernels.len() > 1 { isa.name() } else { "" };
            let (ms, median, best) = (1e3 * time, 100.0 * median, 100.0 * best);
            println!("{name:<40}{ms:>9.3} ms{rate:>11}{median:>6.0} %{best:>6.0} %  {isa}");
        }
    }

    fn barrier(&self) {
        if "barrier".contains(&self.options.filter) {
            const RUNS: usize = 20_000;
            let time = seconds(|| (0..RUNS).for_each(|_| self.pool.run(&|_| {})));
            println!("{:<34}{:>9.3} us", "barrier", 1e6 * time / RUNS as f64);
        }
    }

    /// The matrix products of a forward pass.
    fn products(&self, tag: &str, format: WeightFormat) {
        let (layers, head) = match (self.options.quick, format) {
            (true, _) => (6, (HEAD.0 / 8, HEAD.1)),
            (false, WeightFormat::Float(Dtype::F32)) => (LAYERS / 2, (HEAD.0 / 2, HEAD.1)),
            (false, _) => (LAYERS, HEAD),
        };
        let shapes: Vec<_> = (0..layers).flat_map(|_| LAYER).chain([head]).collect();
        // Long prompts need no head, and two layers exceed every cache.
        self.matmul(&format!("matmul {tag}"), format, &shapes, 8);
    }

    /// Each matrix of a forward pass alone, in as many copies as exceed every cache.
    fn shapes(&self, tag: &str, format: WeightFormat) {
        const BYTES: usize = 128 << 20;
        for (name, shape) in
            ["qkv", "output", "gate_up", "down", "head"].iter().zip(LAYER.iter().chain([&HEAD]))
        {
            let bytes = MatrixLayout { rows: shape.0, columns: shape.1, format }.bytes();
            let copies = vec![*shape; BYTES.div_ceil(bytes)];
            self.matmul(&format!("matmul {tag} {name} {} x {}", shape.0, shape.1), format, &copies, 8);
        }
    }

    /// Products with all matrices one after another; those of long prompts with the first `long` of them.
    fn matmul(&self, title: &str, format: WeightFormat, shapes: &[(usize, usize)], long: usize) {
        let names = [1, 8, 32, 512].map(|tokens| format!("{title} {tokens} tokens"));
        if !names.iter().any(|name| name.contains(&self.options.filter)) {
            return;
        }
        let layouts: Vec<MatrixLayout> = shapes
            .iter()
            .map(|(rows, columns)| MatrixLayout { rows: *rows, columns: *columns, format })
            .collect();
        let fill = |_: std::ops::Range<usize>, into: &mut [f32]| {
            into.iter_mut().enumerate().for_each(|(i, v)| *v = (i % 97) as f32 / 97.0 - 0.5);
        };
        let matrices: Vec<Vec<u8>> = layouts
            .iter()
            .map(|layout| {
                let mut bytes = vec![0; layout.bytes()];
                match format {
                    WeightFormat::Float(_) => layout.pack(&self.pool, &mut bytes, fill),
                    WeightFormat::Grid(grid) => {
                        layout.pack_grid(&self.pool, &mut bytes, |rows, into: &mut GridRows| {
                            into.resize(&grid, rows.len(), layout.columns);
                            into.codes.iter_mut().enumerate().for_each(|(i, code)| *code = (i % 13) as u8);
                            into.scales.fill(0.01);
                            into.outer_scales.fill(0.01);
                        });
                    }
                }
                bytes
            })
            .collect();
        for (name, tokens) in names.iter().zip([1, 8, 32, 512]) {
            let count = if tokens > 32 { long.min(layouts.len()) } else { layouts.len() };
            let pass: Vec<Matrix<'_>> = layouts
                .iter()
                .zip(&matrices)
                .take(count)
                .map(|(layout, bytes)| Matrix { layout: *layout, bytes })
                .collect();
            let elements: usize = pass.iter().map(|matrix| matrix.layout.rows * matrix.layout.columns).sum();
            let bytes = pass.iter().map(|matrix| matrix.bytes.len()).sum();
            let x = vec![0.25; tokens * 4864];
            let mut codes = vec![0; tokens * 4864 * 4];
            let mut out = vec![0.0; tokens * pass.iter().map(|matrix| matrix.layout.rows).max().unwrap_or(0)];
            let work = Work { bytes, flops: 2 * elements * tokens, kind: Kind::of(format) };
            self.line(name, work, |kernels, pool| {
                for matrix in &pass {
                    let MatrixLayout { rows, columns, .. } = matrix.layout;
                    let (x, out) = (&x[..tokens * columns], &mut out[..tokens * rows]);
                    let x = match kernels.operand_layout([format].into_iter(), columns) {
                        None => Operand::Floats(x),
                        Some(layout) => {
                            let codes = &mut codes[..tokens * layout.row_bytes()];
                            kernels.quantise(pool, Rows::dense(x, columns), &layout, codes);
                            Operand::Codes(codes)
                        }
                    };
                    kernels.matmul(pool, x, tokens, &[*matrix], Epilogue::Store, out);
                }
            });
        }
    }

    /// The tile shapes: a matrix that stays in L2, on one thread.
    fn tiles(&self) {
        let alone = Pool::new(1).expect("no threads");
        let layout = MatrixLayout { rows: 96, columns: 896, format: Dtype::Bf16.into() };
        let matrix = Matrix { layout, bytes: &vec![0x3c; layout.bytes()] };
        const ROUNDS: usize = 500;
        for tokens in 1..=8 {
            let x = vec![0.25; tokens * layout.columns];
            let mut out = vec![0.0; tokens * layout.rows];
            // The limit counts all threads.
            let flops = 2 * ROUNDS * tokens * layout.rows * layout.columns * self.pool.threads();
            self.line(
                &format!("tile bf16 {tokens} tokens x threads"),
                Work { flops, ..Work::default() },
                |kernels, _| {
                    for _ in 0..ROUNDS {
                        kernels.matmul(
                            &alone,
                            Operand::Floats(&x),
                            tokens,
                            &[matrix],
                            Epilogue::Store,
                            &mut out,
                        );
                    }
                },
            );
        }
    }

    /// One token each of sequences with a context of 8k, over more layers than a cache holds. The dtypes alternate, so that
    /// their ratio does not depend on the load of the machine.
    fn attention_decode(&self, heads: usize, kv_heads: usize, head_dim: usize, sequences: usize) {
        const POSITIONS: usize = 8192;
        let title = format!("attention decode {heads}/{kv_heads} x {head_dim}, {sequences} at {POSITIONS}");
        if !title.contains(&self.options.filter) {
            return;
        }
        println!("\n{title:<34}{:>12}{:>11}{:>8}{:>10}", "time", "rate", "reading", "to bf16");
        let kernels = self.kernels.iter().copied();
        let mut runs: Vec<Decode> = kernels
            .flat_map(|kernels| KvDtype::ALL.iter().map(move |dtype| (kernels, *dtype)))
            .map(|(kernels, dtype)| {
                let layout = KvLayout { block_size: 16, kv_heads, head_dim, dtype };
                Decode::new(kernels, layout, heads, sequences, POSITIONS, self.probe.bytes())
            })
            .collect();
        let budget = if self.options.quick { 1.0 } else { 20.0 };
        let start = Instant::now();
        let mut bandwidths = Vec::new();
        while bandwidths.len() < 3 || start.elapsed().as_secs_f64() < budget {
            let before = self.probe.measure(&self.pool);
            runs.iter_mut().for_each(|run| run.step(&self.pool));
            bandwidths.push(before.mean(self.probe.measure(&self.pool)).bytes_per_second);
        }
        let sorted = |numbers: &mut dyn Iterator<Item = f64>| {
            let mut numbers: Vec<f64> = numbers.collect();
            numbers.sort_by(f64::total_cmp);
            (numbers[numbers.len() / 2], numbers[0], numbers[numbers.len() - 1])
        };
        let bf16 = runs.iter().find(|run| run.layout.dtype == KvDtype::Bf16).expect("among all");
        for run in &runs {
            let bytes = run.layers[0].len() as f64;
            let (time, _, _) = sorted(&mut run.times.iter().copied());
            let reading = run.times.iter().zip(&bandwidths).map(|(time, bandwidth)| bytes / time / bandwidth);
            let (share, _, _) = sorted(&mut { reading });
            let ratios = run.times.iter().zip(&bf16.times).map(|(time, bf16)| time / bf16);
            let (ratio, least, most) = sorted(&mut { ratios });
            let name = format!("  {:?} {}", run.layout.dtype, run.kernels.isa()).to_lowercase();
            let (ms, rate, share) = (1e3 * time, bytes / time / 1e9, 100.0 * share);
            println!(
                "{name:<34}{ms:>9.3} ms{rate:>6.1} GB/s{share:>6.0} %{ratio:>10.2} ({least:.2} to {most:.2})"
            );
        }
    }

    fn attention_prefill(&self, dtype: KvDtype, tokens: usize) {
        let (heads, layout) = (14, KvLayout { block_size: 16, kv_heads: 2, head_dim: 64, dtype });
        let blocks: Vec<u32> = (0..tokens as u32 / 16).collect();
        let cache = vec![0; tokens / 16 * layout.block_bytes()];
        let q = vec![0.5; tokens * heads * 64];
        let mut out = vec![0.0; tokens * heads * 64];
        let mut scratch = [];
        let row = AttentionRow { first_query: 0, num_queries: tokens, start: 0, blocks: 0..blocks.len() };
        // Half of the square, including its diagonal.
        let work =
            Work { bytes: cache.len(), flops: 4 * heads * 64 * tokens * (tokens + 1) / 2, ..Work::default() };
        let name = format!("attention {} prefill {tokens}", format!("{dtype:?}").to_lowercase());
        self.line(&name, work, |kernels, pool| {
            kernels.attention(
                pool,
                &layout,
                &cache,
                std::slice::from_ref(&row),
                &blocks,
                Rows::dense(&q, heads * 64),
                heads,
                AttentionParams { scale: 0.125, window: None, softcap: None },
                &mut scratch,
                RowsMut::dense(&mut out, heads * 64),
                None,
            );
        });
    }

    fn row_operations(&self) {
        let (tokens, hidden, ffn) = (512, 896, 4864);
        let weight = vec![1.0; hidden];
        let x = vec![0.5; tokens * hidden];
        let mut out = vec![0.0; tokens * hidden];
        self.line("rms_norm 512 x 896", Work { bytes: 8 * x.len(), ..Work::default() }, |kernels, pool| {
            kernels.rms_norm(pool, Rows::dense(&x, hidden), &weight, 1e-6, RowsMut::dense(&mut out, hidden));
        });
        let gate_up = vec![0.5; tokens * 2 * ffn];
        let mut out = vec![0.0; tokens * ffn];
        self.line(
            "silu_mul 512 x 4864",
            Work { bytes: 12 * out.len(), ..Work::default() },
            |kernels, pool| {
                kernels.silu_mul(pool, Rows::dense(&gate_up, 2 * ffn), RowsMut::dense(&mut out, ffn));
            },
        );
        let (cos, sin) = (vec![0.6; tokens * 32], vec![0.8; tokens * 32]);
        let mut q = vec![0.5; tokens * hidden];
        self.line("rope 512 x 14 x 64", Work { bytes: 8 * q.len(), ..Work::default() }, |kernels, pool| {
            let (cos, sin) = (Rows::dense(&cos, 32), Rows::dense(&sin, 32));
            kernels.rope(pool, RowsMut::dense(&mut q, hidden), 64, cos, sin);
        });
        let logits: Vec<f32> = (0..HEAD.0).map(|i| (i * 7919 % 1000) as f32 / 100.0).collect();
        self.line("argmax 151936", Work { bytes: 4 * logits.len(), ..Work::default() }, |kernels, _| {
            black_box(kernels.argmax(&logits));
        });
        self.line("sum_of_exp 151936", Work { bytes: 4 * logits.len(), ..Work::default() }, |kernels, _| {
            black_box(kernels.sum_of_exp(&logits, 10.0, 1.0));
        });
        let mut masked = logits.clone();
        let words: Vec<u32> =
            (0..HEAD.0.div_ceil(32) as u32).map(|word| word.wrapping_mul(0x9e37_79b9)).collect();
        self.line("mask 151936", Work { bytes: 8 * logits.len(), ..Work::default() }, |kernels, _| {
            kernels.mask(black_box(&mut masked), &words);
        });
    }

    /// The keys and values of a prefill in one layer.
    fn write_kv(&self, dtype: KvDtype) {
        const TOKENS: usize = 512;
        let layout = KvLayout { block_size: 16, kv_heads: 2, head_dim: 64, dtype };
        let mut cache = vec![0; TOKENS / 16 * layout.block_bytes()];
        let kv: Vec<f32> = (0..128).map(|i| (i * 37 % 128) as f32 / 64.0 - 1.0).collect();
        let work = Work { bytes: TOKENS * 8 * kv.len() + cache.len(), ..Work::default() };
        let name = format!("write_kv {} {TOKENS} x 2 x 64", format!("{dtype:?}").to_lowercase());
        self.line(&name, work, |kernels, _| {
            for token in 0..TOKENS {
                kernels.write_kv(&layout, &mut cache, token as u32 / 16, token % 16, &kv, &kv);
            }
        });
    }
}

/// Sequences that decode with contexts of equal length, in more layers than a cache holds.
struct Decode {
    kernels: Kernels,
    layout: KvLayout,
    heads: usize,
    layers: Vec<Vec<u8>>,
    blocks: Vec<u32>,
    rows: Vec<AttentionRow>,
    q: Vec<f32>,
    out: Vec<f32>,
    scratch: Vec<f32>,
    times: Vec<f64>,
}

impl Decode {
    fn new(
        kernels: Kernels,
        layout: KvLayout,
        heads: usize,
        sequences: usize,
        positions: usize,
        bytes: usize,
    ) -> Self {
        let per_sequence = positions / layout.block_size;
        let blocks: Vec<u32> = (0..(sequences * per_sequence) as u32).rev().collect();
        let layer = vec![0; blocks.len() * layout.block_bytes()];
        let rows = (0..sequences).map(|index| AttentionRow {
            first_query: index,
            num_queries: 1,
            start: positions - 1,
            blocks: index * per_sequence..(index + 1) * per_sequence,
        });
        Self {
            kernels,
            layout,
            heads,
            rows: rows.collect(),
            layers: vec![layer.clone(); bytes.div_ceil(layer.len())],
            blocks,
            q: vec![0.5; sequences * heads * layout.head_dim],
            out: vec![0.0; sequences * heads * layout.head_dim],
            scratch: vec![0.0; attention_scratch(heads, layout.head_dim, sequences * positions)],
            times: Vec::new(),
        }
    }

    /// Runs one step in every layer and records the seconds of one layer.
    fn step(&mut self, pool: &Pool) {
        let width = self.heads * self.layout.head_dim;
        let time = seconds(|| {
            for layer in &self.layers {
                self.kernels.attention(
                    pool,
                    &self.layout,
                    layer,
                    &self.rows,
                    &self.blocks,
                    Rows::dense(&self.q, width),
                    self.heads,
                    AttentionParams { scale: 0.125, window: None, softcap: None },
                    &mut self.scratch,
                    RowsMut::dense(&mut self.out, width),
                    None,
                );
            }
        });
        self.times.push(time / self.layers.len() as f64);
    }
}
