//! The limits of this machine, to which benchmarks relate their results: the memory read bandwidth and the multiply-add rate of
//! all threads. They are measured next to every result, because the limits of a shared machine vary.

use std::hint::black_box;
use std::time::Instant;

use penstock_kernels::{Isa, Pool};

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
        let mut memory = Vec::with_capacity(bytes / 8);
        advise_huge_pages(memory.spare_capacity_mut());
        memory.resize(bytes / 8, 1);
        Self { memory }
    }

    /// The number of bytes that it reads.
    pub fn bytes(&self) -> usize {
        8 * self.memory.len()
    }

    /// The read bandwidth of all threads: bytes per second.
    pub fn bandwidth(&self, pool: &Pool, streams: Streams) -> f64 {
        let parts = pool.threads();
        let length = self.memory.len() / parts;
        let reading = seconds(|| {
            pool.run(&|worker| {
                black_box(read(&self.memory[worker * length..][..length], streams));
            });
        });
        (parts * length * 8) as f64 / reading
    }

    /// Measures both limits.
    pub fn measure(&self, pool: &Pool) -> Machine {
        let parts = pool.threads();
        let bytes_per_second = self.bandwidth(pool, Streams::Two);
        const STEPS: usize = 1 << 20;
        let computing = seconds(|| {
            pool.run(&|worker| {
                black_box(multiply_add(STEPS, worker as f32));
            });
        });
        Machine { bytes_per_second, flops_per_second: (parts * STEPS * FLOPS_OF_A_STEP) as f64 / computing }
    }
}

/// Asks for huge pages, with which less time goes to address translation.
fn advise_huge_pages(memory: &mut [std::mem::MaybeUninit<u64>]) {
    #[cfg(target_os = "linux")]
    {
        unsafe extern "C" {
            fn madvise(address: *mut std::ffi::c_void, length: usize, advice: i32) -> i32;
        }
        const PAGE: usize = 4096;
        const HUGE_PAGE: i32 = 14;
        let skipped = memory.as_ptr().align_offset(PAGE).min(memory.len());
        let pages = &mut memory[skipped..];
        // SAFETY: the range is inside the allocation and starts at a page; the advice does not change its contents.
        unsafe { madvise(pages.as_mut_ptr().cast(), size_of_val(pages) / PAGE * PAGE, HUGE_PAGE) };
    }
}

/// Reads in a number of streams, with prefetches.
fn read(memory: &[u64], streams: Streams) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: AVX2 is available.
        return unsafe {
            match streams {
                Streams::One => read_avx2::<1>(memory),
                Streams::Two => read_avx2::<2>(memory),
                Streams::Four => read_avx2::<4>(memory),
            }
        };
    }
    let _ = streams;
    memory.iter().fold(0, |sum, value| sum ^ value)
}

/// The number of addresses that a thread reads from in turn. Which one is the fastest depends on the machine.
#[derive(Clone, Copy, Debug)]
pub enum Streams {
    One,
    Two,
    Four,
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn read_avx2<const STREAMS: usize>(memory: &[u64]) -> u64 {
    use std::arch::x86_64::*;
    const LINE: usize = 8;
    const AHEAD: usize = 64 * LINE;
    let stream = memory.len() / STREAMS / LINE * LINE;
    let mut sums = [_mm256_setzero_si256(); 8];
    for at in (0..stream).step_by(LINE) {
        for part in 0..STREAMS {
            let line = memory.as_ptr().wrapping_add(part * stream + at);
            // SAFETY: the line is inside the slice; a prefetch may name any address.
            unsafe {
                _mm_prefetch::<_MM_HINT_T1>(line.wrapping_add(AHEAD).cast());
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

/// Operations per second of all threads, of the best instruction of each kind; a multiply-add counts as two.
#[derive(Clone, Copy, Debug)]
pub struct Rates {
    /// Multiply-adds of float32.
    pub f32: f64,
    /// Dot products of bfloat16; the multiply-adds of CPUs without them.
    pub bf16: f64,
    /// Exact dot products of bytes.
    pub int8: f64,
    /// Dot products of 4-bit codes with bytes; without VNNI, products are first added in 16 bits.
    pub int4: f64,
}

/// The rates of the instructions of this CPU that `isa` has.
pub fn rates(pool: &Pool, isa: Isa) -> Rates {
    const STEPS: usize = 1 << 20;
    let best = |operations: usize, run: &(dyn Fn(usize) + Sync)| {
        let time = (0..5).fold(f64::INFINITY, |best, _| best.min(seconds(|| pool.run(&|_| run(STEPS)))));
        (pool.threads() * STEPS * CHAINS * operations) as f64 / time
    };
    #[cfg(target_arch = "x86_64")]
    if Isa::Avx2.is_available() && isa != Isa::Portable {
        use x86_64::*;
        let has_512 = !matches!(isa, Isa::Avx2) && Isa::Avx512.is_available();
        let has_vnni = has_512 && !matches!(isa, Isa::Avx512) && Isa::Avx512Vnni.is_available();
        // SAFETY: the set has the instructions.
        let f32 = best(2 * 8, &|steps| unsafe { fma_avx2(steps) });
        let bf16 = match isa {
            // SAFETY: as above.
            Isa::Avx512Bf16 => best(2 * 32, &|steps| unsafe { bf16_avx512(steps) }),
            _ => f32,
        };
        let (int8, int4) = if has_vnni {
            // SAFETY: as above.
            let rate = best(2 * 64, &|steps| unsafe { int8_vnni(steps) });
            (rate, rate)
        } else if has_512 {
            // SAFETY: as above.
            let int8 = best(2 * 64, &|steps| unsafe { int8_avx512(steps) });
            // SAFETY: as above.
            (int8, best(4 * 2 * 64, &|steps| unsafe { int4_avx512(steps) }))
        } else {
            // SAFETY: as above.
            let int8 = best(2 * 32, &|steps| unsafe { int8_avx2(steps) });
            // SAFETY: as above.
            (int8, best(4 * 2 * 32, &|steps| unsafe { int4_avx2(steps) }))
        };
        return Rates { f32, bf16, int8, int4 };
    }
    let _ = isa;
    let f32 = best(2 * 8, &|steps| {
        black_box(multiply_add(steps, 0.5));
    });
    Rates { f32, bf16: f32, int8: f32, int4: f32 }
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

    #[inline(always)]
    fn pairs(bits: __m512i) -> __m512bh {
        // SAFETY: both types are 512 bits of any value.
        unsafe { std::mem::transmute(bits) }
    }
    rate!(bf16_avx512, "avx512f,avx512bf16", _mm512_setzero_ps(), _mm512_set1_epi32(0x3f00_3f00), c, a =>
        _mm512_dpbf16_ps(c, pairs(a), pairs(a)));
    rate!(int8_vnni, "avx512f,avx512vnni", _mm512_setzero_si512(), _mm512_set1_epi8(3), c, a =>
        _mm512_dpbusd_epi32(c, a, a));

    // Each product reads the chain, so that none is the same in every step.
    rate!(int8_avx2, "avx2", _mm256_setzero_si256(), _mm256_set1_epi16(1), c, a =>
        _mm256_add_epi32(c, _mm256_madd_epi16(_mm256_maddubs_epi16(a, c), a)));
    rate!(int4_avx2, "avx2", _mm256_setzero_si256(), _mm256_set1_epi16(1), c, a => {
        let ends = _mm256_add_epi16(_mm256_maddubs_epi16(a, c), _mm256_maddubs_epi16(c, a));
        let mids = _mm256_add_epi16(_mm256_maddubs_epi16(c, c), _mm256_maddubs_epi16(ends, c));
        _mm256_add_epi32(c, _mm256_madd_epi16(_mm256_add_epi16(ends, mids), a))
    });
    rate!(int8_avx512, "avx512bw", _mm512_setzero_si512(), _mm512_set1_epi16(1), c, a =>
        _mm512_add_epi32(c, _mm512_madd_epi16(_mm512_maddubs_epi16(a, c), a)));
    rate!(int4_avx512, "avx512bw", _mm512_setzero_si512(), _mm512_set1_epi16(1), c, a => {
        let ends = _mm512_add_epi16(_mm512_maddubs_epi16(a, c), _mm512_maddubs_epi16(c, a));
        let mids = _mm512_add_epi16(_mm512_maddubs_epi16(c, c), _mm512_maddubs_epi16(ends, c));
        _mm512_add_epi32(c, _mm512_madd_epi16(_mm512_add_epi16(ends, mids), a))
    });
}

/// The seconds that `run` takes.
pub fn seconds(run: impl FnOnce()) -> f64 {
    let start = Instant::now();
    run();
    start.elapsed().as_secs_f64()
}
