//! Sampling on a backend: rows at once are rows alone.

#![allow(clippy::unwrap_used)]

use std::ops::Range;

use penstock_device::cpu::Cpu;
use penstock_device::{Backend, RowSource, SampleParams, Sampled, StepInputs, StepSpec, TokenCounts};
use penstock_types::{Dtype, HeadShape, LogprobsRequest};

const VOCABULARY: usize = 333;
const ROWS: usize = 9;

/// Logits of one row after the other.
struct Logits;

impl RowSource for Logits {
    fn rows(&self) -> usize {
        ROWS
    }

    fn columns(&self) -> usize {
        VOCABULARY
    }

    fn read(&self, rows: Range<usize>, out: &mut [f32]) {
        for (row, out) in rows.zip(out.chunks_exact_mut(VOCABULARY)) {
            for (id, logit) in out.iter_mut().enumerate() {
                *logit = ((row * 131 + id * 17) as f32).sin() * 4.0;
            }
        }
    }
}

/// A backend on `threads`, its logits, and its scratch.
struct Device {
    cpu: Cpu,
    logits: <Cpu as Backend>::Buffer,
    scratch: <Cpu as Backend>::Scratch,
}

impl Device {
    fn new(threads: usize) -> Self {
        let mut cpu = Cpu::new(threads).unwrap();
        cpu.reserve(1 << 22).unwrap();
        let table = cpu.load_matrix(&Logits, Dtype::F32).unwrap();
        let mut logits = cpu.allocate(ROWS * VOCABULARY).unwrap();
        let inputs = StepInputs { tokens: (0..ROWS as u32).collect(), ..StepInputs::default() };
        cpu.embed(&inputs, &table, &mut logits).unwrap();
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
        let scratch = cpu.allocate_scratch(&spec).unwrap();
        Self { cpu, logits, scratch }
    }

    fn sample(&mut self, params: &[SampleParams<'_>], out: &mut [Sampled]) {
        let Self { cpu, logits, scratch } = self;
        cpu.sample(VOCABULARY, logits, &|place| params[place], scratch, out).unwrap();
    }
}

/// What differs in every way: greedy, drawn, cut, penalised, masked, exhausted, given.
fn many(counts: &TokenCounts) -> Vec<SampleParams<'_>> {
    let drawn = SampleParams { temperature: 0.9, ..SampleParams::greedy() };
    let raw = Some(LogprobsRequest { top: 5, processed: false });
    let processed = Some(LogprobsRequest { top: 3, processed: true });
    let kinds = [
        SampleParams { logprobs: raw, ..SampleParams::greedy() },
        drawn,
        SampleParams { top_p: 0.8, logprobs: processed, ..drawn },
        SampleParams { top_k: 30, typical_p: 0.7, logprobs: raw, ..drawn },
        SampleParams { repetition_penalty: 1.4, frequency_penalty: 0.3, counts, logprobs: raw, ..drawn },
        SampleParams { mask: Some(&[0xdead_beef, 0x0f0f_1234]), logprobs: processed, ..drawn },
        SampleParams { allowed: Some(&[]), logprobs: raw, ..drawn },
        SampleParams { given: Some(100), logprobs: processed, ..drawn },
    ];
    let places = (0..200_u32).map(|place| {
        let kind = kinds[place as usize % kinds.len()];
        // Neither in order nor once each.
        SampleParams { row: place * 7 % ROWS as u32, seed: u64::from(place / 3), index: place, ..kind }
    });
    places.collect()
}

/// Everything but NaN, by its bits.
fn bits(sampled: &Sampled) -> (u32, u32, Vec<(u32, u32)>, bool) {
    let top = sampled.top.iter().map(|(id, logprob)| (*id, logprob.to_bits()));
    (sampled.token, sampled.logprob.to_bits(), top.collect(), sampled.is_exhausted)
}

#[test]
fn places_sampled_at_once_have_the_bits_of_places_sampled_alone() {
    let mut counts = TokenCounts::new();
    counts.push_prompt(&[1, 5, 9, 200]);
    (0..50).for_each(|id| counts.push(id * 3));
    let params = many(&counts);
    let mut device = Device::new(1);
    let alone: Vec<_> = params
        .iter()
        .map(|params| {
            let mut out = [Sampled::default()];
            device.sample(std::slice::from_ref(params), &mut out);
            bits(&out[0])
        })
        .collect();
    assert!(alone.iter().any(|(.., is_exhausted)| *is_exhausted));
    for threads in 1..=3 {
        let mut device = Device::new(threads);
        let mut out = vec![Sampled::default(); params.len()];
        // The second time over what the first left behind.
        for _ in 0..2 {
            device.sample(&params, &mut out);
            let together: Vec<_> = out.iter().map(bits).collect();
            assert_eq!(together, alone, "{threads} threads");
        }
    }
}

#[test]
fn the_memory_of_what_was_sampled_is_used_again() {
    let mut device = Device::new(1);
    let params = [SampleParams {
        logprobs: Some(LogprobsRequest { top: 20, processed: false }),
        ..SampleParams::greedy()
    }];
    let mut out = [Sampled::default()];
    device.sample(&params, &mut out);
    let (place, capacity) = (out[0].top.as_ptr(), out[0].top.capacity());
    device.sample(&[SampleParams::greedy()], &mut out);
    assert!(out[0].top.is_empty());
    device.sample(&params, &mut out);
    assert_eq!((out[0].top.len(), out[0].top.as_ptr(), out[0].top.capacity()), (20, place, capacity));
}
