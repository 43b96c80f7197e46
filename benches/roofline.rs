//! The limits of this machine, to which benchmarks relate their results: the memory read bandwidth and the multiply-add rate of
//! all threads. They are measured next to every result, because the limits of a shared machine vary.

use std::hint::black_box;
use std::time::Instant;

use penstock_kernels::Pool;

/// The measured limits of the machine.
#[derive(Clone, Copy)]
pub struct Machine {
    /// Read bandwidth of all threads.
    pub bytes_per_second: f64,
    /// Float32 operations of all threads; a multiply-add counts as two.
    pub flops_per_second: f64,
}

impl Machine {
    /// The mean of two measurements.
    pub fn mean(self, other: Self) -> Self {
        Self {
            bytes_per_second: (self.bytes_per_second + other.bytes_per_second) / 2.0,
            flops_per_second: (self.flops_per_second + other.flops_per_second) / 2.0,
        }
    }
}

/// A probe of the machine's limits.
pub struct Probe {
    memory: Vec<u64>,
}

impl Probe {
    /// A probe that reads `bytes` bytes, which should be several times the size of the caches.
    pub fn new(bytes: usize) -> Self {
        Self { memory: vec![1; bytes / 8] }
    }

    /// The number of bytes that it reads.
    pub fn bytes(&self) -> usize {
        8 * self.memory.len()
    }

    /// Measures both limits.
    pub fn measure(&self, pool: &Pool) -> Machine {
        let parts = pool.threads();
        let length = self.memory.len() / parts;
        let reading = seconds(|| {
            pool.run(&|worker| {
                black_box(read(&self.memory[worker * length..][..length]));
            });
        });
        const STEPS: usize = 1 << 20;
        let computing = seconds(|| {
            pool.run(&|worker| {
                black_box(multiply_add(STEPS, worker as f32));
            });
        });
        Machine {
            bytes_per_second: (parts * length * 8) as f64 / reading,
            flops_per_second: (parts * STEPS * FLOPS_OF_A_STEP) as f64 / computing,
        }
    }
}

/// Reads in four streams with prefetches.
fn read(memory: &[u64]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: AVX2 is available.
        return unsafe { read_avx2(memory) };
    }
    memory.iter().fold(0, |sum, value| sum ^ value)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn read_avx2(memory: &[u64]) -> u64 {
    use std::arch::x86_64::*;
    const LINE: usize = 8;
    const AHEAD: usize = 24 * LINE;
    let stream = memory.len() / 4 / LINE * LINE;
    let mut sums = [_mm256_setzero_si256(); 8];
    for at in (0..stream).step_by(LINE) {
        for part in 0..4 {
            let line = memory.as_ptr().wrapping_add(part * stream + at);
            // SAFETY: the line is inside the slice; a prefetch may name any address.
            unsafe {
                _mm_prefetch::<_MM_HINT_T0>(line.wrapping_add(AHEAD).cast());
                sums[2 * part] = _mm256_xor_si256(sums[2 * part], _mm256_loadu_si256(line.cast()));
                sums[2 * part + 1] =
                    _mm256_xor_si256(sums[2 * part + 1], _mm256_loadu_si256(line.add(4).cast()));
            }
        }
    }
    sums.iter().fold(0, |sum, v| sum ^ _mm256_extract_epi64::<0>(*v).cast_unsigned())
}

const FLOPS_OF_A_STEP: usize = 2 * 12 * 8;

fn multiply_add(steps: usize, seed: f32) -> f32 {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        // SAFETY: AVX2 and FMA are available.
        return unsafe { multiply_add_avx2(steps, seed) };
    }
    let mut lanes = [[seed; 8]; 12];
    for _ in 0..steps {
        for lane in lanes.iter_mut().flatten() {
            *lane = *lane * 0.999 + 0.001;
        }
    }
    lanes.iter().flatten().sum()
}

/// Twelve independent chains: enough to hide the latency, few enough for 16 registers.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn multiply_add_avx2(steps: usize, seed: f32) -> f32 {
    use std::arch::x86_64::*;
    let (factor, term) = (_mm256_set1_ps(0.999), _mm256_set1_ps(0.001));
    let mut chains = [_mm256_set1_ps(seed); 12];
    for _ in 0..steps {
        for chain in &mut chains {
            *chain = _mm256_fmadd_ps(*chain, factor, term);
        }
    }
    chains.iter().fold(0.0, |sum, chain| sum + _mm256_cvtss_f32(*chain))
}

/// A rate of one kind of instruction.
pub struct Rate {
    pub name: &'static str,
    /// Operations of all threads; a multiply-add counts as two.
    pub per_second: f64,
}

/// The rates of the instructions that this CPU has.
pub fn rates(pool: &Pool) -> Vec<Rate> {
    const STEPS: usize = 1 << 21;
    let mut rates = Vec::new();
    let mut measure = |name, operations: usize, run: &(dyn Fn(usize) + Sync)| {
        let best = (0..5).fold(f64::INFINITY, |best, _| best.min(seconds(|| pool.run(&|_| run(STEPS)))));
        rates.push(Rate { name, per_second: (pool.threads() * STEPS * CHAINS * operations) as f64 / best });
    };
    #[cfg(target_arch = "x86_64")]
    {
        use x86_64::*;
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            // SAFETY: the instructions are available.
            measure("f32 multiply-add, AVX2", 2 * 8, &|steps| unsafe { fma_avx2(steps) });
        }
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the instructions are available.
            measure("f32 multiply-add, AVX-512", 2 * 16, &|steps| unsafe { fma_avx512(steps) });
        }
        if is_x86_feature_detected!("avx512bf16") {
            // SAFETY: the instructions are available.
            measure("bf16 dot product, AVX-512", 2 * 32, &|steps| unsafe { bf16_avx512(steps) });
        }
        if is_x86_feature_detected!("avx512vnni") {
            // SAFETY: the instructions are available.
            measure("int8 dot product, AVX-512 VNNI", 2 * 64, &|steps| unsafe { int8_avx512(steps) });
        }
    }
    rates
}

/// Independent chains of a rate: enough to hide the latency, few enough for 16 registers.
const CHAINS: usize = 12;

#[cfg(target_arch = "x86_64")]
mod x86_64 {
    use std::arch::x86_64::*;
    use std::hint::black_box;

    use super::CHAINS;

    /// A function that continues every chain by `$next` in each step.
    macro_rules! rate {
        ($name:ident, $features:literal, $zero:expr, $one:expr, $chain:ident, $a:ident => $next:expr) => {
            #[target_feature(enable = $features)]
            pub fn $name(steps: usize) {
                let $a = black_box($one);
                let mut chains = [$zero; CHAINS];
                for chain in &mut chains {
                    *chain = black_box(*chain);
                }
                for _ in 0..steps {
                    for chain in &mut chains {
                        let $chain = *chain;
                        *chain = $next;
                    }
                }
                black_box(chains);
            }
        };
    }

    rate!(fma_avx2, "avx2,fma", _mm256_setzero_ps(), _mm256_set1_ps(0.5), c, a => _mm256_fmadd_ps(a, a, c));
    rate!(fma_avx512, "avx512f", _mm512_setzero_ps(), _mm512_set1_ps(0.5), c, a => _mm512_fmadd_ps(a, a, c));

    #[inline(always)]
    fn pairs(bits: __m512i) -> __m512bh {
        // SAFETY: both types are 512 bits of any value.
        unsafe { std::mem::transmute(bits) }
    }
    rate!(bf16_avx512, "avx512f,avx512bf16", _mm512_setzero_ps(), _mm512_set1_epi32(0x3f00_3f00), c, a =>
        _mm512_dpbf16_ps(c, pairs(a), pairs(a)));
    rate!(int8_avx512, "avx512f,avx512vnni", _mm512_setzero_si512(), _mm512_set1_epi8(3), c, a =>
        _mm512_dpbusd_epi32(c, a, a));
}

/// The seconds that `run` takes.
pub fn seconds(run: impl FnOnce()) -> f64 {
    let start = Instant::now();
    run();
    start.elapsed().as_secs_f64()
}
