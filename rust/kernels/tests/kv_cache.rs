//! Storage in the KV cache: error bounds, isolation between tokens, the same bytes on every machine.

#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use penstock_kernels::{Kernels, KvLayout};
use penstock_types::KvDtype;
use proptest::prelude::*;

const QUANTISED: [(KvDtype, f64); 2] = [(KvDtype::Int8, 255.0), (KvDtype::Uint4, 15.0)];

fn layout(dtype: KvDtype, kv_heads: usize, head_dim: usize) -> KvLayout {
    KvLayout { block_size: 32, kv_heads, head_dim, dtype }
}

/// The values of one head after a round trip, as keys and as values.
fn round_trip(dtype: KvDtype, row: &[f32]) -> [Vec<f32>; 2] {
    let layout = layout(dtype, 1, row.len());
    let mut cache = vec![0xff; layout.block_bytes()];
    Kernels::best().write_kv(&layout, &mut cache, 0, 21, row, row);
    let (k, v) = layout.read(&cache, 0, 21);
    [k, v]
}

/// Panics unless a round trip with `levels` levels is exact within half a scale and roundings.
fn check_error(dtype: KvDtype, levels: f64, row: &[f32]) {
    let (min, max) = row.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(min, max), x| {
        (min.min(f64::from(*x)), max.max(f64::from(*x)))
    });
    // The scale is rounded up to 8 bits, or to a multiple of 2^-133.
    let scale = (max - min) / levels * (1.0 + 2.0_f64.powi(-7)) + 2.0_f64.powi(-133);
    let rounding = 2.0_f64.powi(-23) * (max - min).max(min.abs().max(max.abs()));
    for read in round_trip(dtype, row) {
        for (x, y) in row.iter().zip(read) {
            let error = (f64::from(*x) - f64::from(y)).abs();
            assert!(error <= scale / 2.0 + rounding, "{dtype:?}: {x} was restored as {y} in {min}..={max}");
        }
    }
}

proptest! {
    #[test]
    fn quantisation_error_is_within_half_a_scale(
        head_dim in 1usize..150, exponent in -44i32..37, offset in -3.0f32..3.0, seed in 0u64..1_000_000,
    ) {
        let unit = 10.0_f64.powi(exponent) as f32;
        let row: Vec<f32> = random_floats(seed, head_dim).iter().map(|x| (x + offset) * unit).collect();
        for (dtype, levels) in QUANTISED {
            check_error(dtype, levels, &row);
        }
    }
}

#[test]
fn quantisation_error_of_extreme_ranges_is_within_bound() {
    let least = f32::from_bits(1);
    for row in [
        vec![-1.6e38, 1.6e38, 0.0, 1.0],
        vec![1e30, -1e30, 3e29],
        vec![0.0, least, 7.0 * least, f32::MIN_POSITIVE],
        vec![1e6, 1e6 + 0.0625, 1e6 + 0.125],
        vec![f32::MAX, f32::MAX.next_down()],
        vec![-0.0, 0.0, 1.0],
    ] {
        for (dtype, levels) in QUANTISED {
            check_error(dtype, levels, &row);
        }
    }
}

#[test]
fn constant_row_is_restored_exactly() {
    for x in [0.0, 0.1, -7.3, 1e30, -f32::MAX, f32::from_bits(1), -1e-41] {
        for (dtype, _) in QUANTISED {
            for read in round_trip(dtype, &[x; 20]) {
                assert_same_bits(&read, &[x; 20], &format!("{dtype:?}"));
            }
        }
    }
}

#[test]
fn range_ends_are_exact_and_ties_round_to_even() {
    // Scale 1, which is exact in bf16.
    let row = [-3.0, 12.0, 0.0, 1.5, 2.5, -2.5, 11.49];
    for read in round_trip(KvDtype::Uint4, &row) {
        assert_eq!(read, [-3.0, 12.0, 0.0, 1.0, 3.0, -3.0, 11.0], "ties go to even");
    }
    let row = [-128.0, 127.0, 0.4, 0.5, 1.5];
    for read in round_trip(KvDtype::Int8, &row) {
        assert_eq!(read, [-128.0, 127.0, 0.0, 0.0, 2.0]);
    }
}

#[test]
fn stored_bytes_equal_the_recorded_hash() {
    // FNV-1a of a block, recorded once; it must be the same on every machine.
    let hash = |bytes: &[u8]| {
        bytes.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
        })
    };
    for (dtype, want) in
        [(KvDtype::Int8, 5_760_527_099_347_050_121), (KvDtype::Uint4, 10_855_028_050_840_186_805)]
    {
        let layout = layout(dtype, 2, 40);
        for kernels in all_kernels() {
            let mut cache = vec![0; layout.block_bytes()];
            for offset in 0..32 {
                let (k, v) = (random_floats(offset as u64, 80), random_floats(99 - offset as u64, 80));
                kernels.write_kv(&layout, &mut cache, 0, offset, &k, &v);
            }
            assert_eq!(hash(&cache), want, "{dtype:?} on {kernels:?}");
        }
    }
}

#[test]
fn non_finite_value_affects_only_its_own_row() {
    for (dtype, _) in QUANTISED {
        let layout = layout(dtype, 2, 20);
        let mut cache = vec![0xff; 3 * layout.block_bytes()];
        let kernels = Kernels::best();
        let (k, v) = (random_floats(1, 40), random_floats(2, 40));
        for offset in 0..32 {
            kernels.write_kv(&layout, &mut cache, 1, offset, &k, &v);
        }
        let clean = layout.read(&cache, 1, 0);
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut non_finite = k.clone();
            non_finite[23] = bad; // of the second head
            kernels.write_kv(&layout, &mut cache, 1, 17, &non_finite, &v);
            for offset in 0..32 {
                let (k, v) = layout.read(&cache, 1, offset);
                assert_same_bits(&v, &clean.1, "values");
                assert_same_bits(&k[..20], &clean.0[..20], "the other head");
                if offset == 17 {
                    assert!(k[20..].iter().all(|k| k.is_nan()), "{bad} was restored as {k:?}");
                } else {
                    assert_same_bits(&k[20..], &clean.0[20..], "another token");
                }
            }
        }
    }
}

#[test]
fn writing_a_token_does_not_change_other_tokens() {
    for dtype in KvDtype::ALL {
        for head_dim in [1, 20, 64] {
            let layout = layout(*dtype, 2, head_dim);
            let bytes = layout.block_bytes();
            let mut cache: Vec<u8> = (0..3 * bytes).map(|i| (i * 31 % 251) as u8).collect();
            let before = cache.clone();
            let read = |cache: &[u8], offset| {
                let (k, v) = layout.read(cache, 1, offset);
                [k, v].concat().into_iter().map(f32::to_bits).collect::<Vec<_>>()
            };
            let width = 2 * head_dim;
            Kernels::best().write_kv(
                &layout,
                &mut cache,
                1,
                9,
                &random_floats(3, width),
                &random_floats(4, width),
            );
            for offset in (0..32).filter(|offset| *offset != 9) {
                assert_eq!(read(&cache, offset), read(&before, offset), "{dtype:?}, token {offset}");
            }
            assert_eq!((&cache[..bytes], &cache[2 * bytes..]), (&before[..bytes], &before[2 * bytes..]));
            // The previous bytes have no effect.
            let mut other = vec![0xff; 3 * bytes];
            Kernels::best().write_kv(
                &layout,
                &mut other,
                1,
                9,
                &random_floats(3, width),
                &random_floats(4, width),
            );
            assert_eq!(read(&cache, 9), read(&other, 9), "{dtype:?}");
        }
    }
}

#[test]
fn blocks_are_whole_cache_lines_of_the_documented_size() {
    for dtype in KvDtype::ALL {
        for head_dim in 1..150 {
            assert_eq!(layout(*dtype, 3, head_dim).block_bytes() % 64, 0, "{dtype:?} x {head_dim}");
        }
    }
    let tile = |dtype, head_dim| layout(dtype, 1, head_dim).block_bytes() / 2;
    assert_eq!([64, 128].map(|head_dim| tile(KvDtype::Bf16, head_dim)), [4096, 8192]);
    assert_eq!([64, 128].map(|head_dim| tile(KvDtype::Int8, head_dim)), [2240, 4288]);
    assert_eq!([64, 128].map(|head_dim| tile(KvDtype::Uint4, head_dim)), [1216, 2240]);
}
