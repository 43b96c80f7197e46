//! Storage in the KV cache: error bounds, isolation between tokens, the same bytes on every machine.

use penstock_kernels::{Kernels, KvLayout};
use penstock_types::KvDtype;
use proptest::prelude::*;

use crate::common::*;

const QUANTISED: [KvDtype; 2] = [KvDtype::Int8, KvDtype::Uint4];

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

/// Panics unless a round trip is exact within the bound of the dtype.
fn check_error(dtype: KvDtype, row: &[f32]) {
    match dtype {
        KvDtype::Int8 => check_range_error(row),
        _ => check_rotated_error(row),
    }
}

/// Panics unless every value of a round trip as `int8` is exact within half a scale and roundings.
fn check_range_error(row: &[f32]) {
    let (min, max) = row.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(min, max), x| {
        (min.min(f64::from(*x)), max.max(f64::from(*x)))
    });
    // The scale is rounded up to 8 bits, or to a multiple of 2^-133.
    let scale = (max - min) / 255.0 * (1.0 + 2.0_f64.powi(-7)) + 2.0_f64.powi(-133);
    let rounding = 2.0_f64.powi(-23) * (max - min).max(min.abs().max(max.abs()));
    for read in round_trip(KvDtype::Int8, row) {
        for (x, y) in row.iter().zip(read) {
            let error = (f64::from(*x) - f64::from(y)).abs();
            assert!(error <= scale / 2.0 + rounding, "{x} was restored as {y} in {min}..={max}");
        }
    }
}

/// The Hadamard transform by its definition, in blocks of the largest power of two that divides the length.
fn naive_transform(x: &[f64]) -> Vec<f64> {
    let block = 1 << x.len().trailing_zeros();
    let sign = |i: usize, j: usize| if (i & j).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
    let transform = |x: &[f64], i| (0..block).map(|j| sign(i, j) * x[j]).sum::<f64>() / (block as f64).sqrt();
    x.chunks_exact(block).flat_map(|x| (0..block).map(move |i| transform(x, i))).collect()
}

/// Panics unless the squared error of a round trip as `uint4` is at most that of half a scale for every value, where
/// the scale covers the largest value of the transform.
fn check_rotated_error(row: &[f32]) {
    let head_dim = row.len();
    let slow = if head_dim < 64 { head_dim } else { head_dim / 2 / 32 * 32 };
    let (half, quarter) = (head_dim / 2, (head_dim - slow) / 16 * 8);
    let is_fast = |d: &usize| *d < quarter || (half..half + quarter).contains(d);
    let (fast, slow): (Vec<usize>, Vec<usize>) = (0..head_dim).partition(is_fast);
    let all: Vec<usize> = (0..head_dim).collect();
    let [k, v] = round_trip(KvDtype::Uint4, row);
    // Per part: dimensions, restored values, half the levels, relative rounding of the scale.
    for (part, read, half_levels, rounding) in
        [(fast, &k, 7.5, 0.5), (slow, &k, 15.5, 0.125), (all, &v, 7.5, 0.125)]
    {
        if part.is_empty() {
            continue;
        }
        let x: Vec<f64> = part.iter().map(|d| f64::from(row[*d])).collect();
        let largest = naive_transform(&x).iter().fold(0.0, |largest, x| x.abs().max(largest));
        let scale = largest / half_levels * (1.0 + rounding);
        let error: f64 = part.iter().map(|d| (f64::from(row[*d]) - f64::from(read[*d])).powi(2)).sum();
        // Scales below 1e-37 are 0; the second term has the roundings of the transform.
        let bound = (scale / 2.0 + 2.0_f64.powi(-20) * largest + 16.0 * 1e-37) * (x.len() as f64).sqrt();
        assert!(error.sqrt() <= bound, "{row:?} was restored as {read:?}: {} > {bound}", error.sqrt());
    }
}

proptest! {
    #[test]
    fn quantisation_error_is_within_bound(
        head_dim in 1usize..150, exponent in -44i32..37, offset in -3.0f32..3.0, seed in 0u64..1_000_000,
    ) {
        let unit = 10.0_f64.powi(exponent) as f32;
        let row: Vec<f32> = random_floats(seed, head_dim).iter().map(|x| (x + offset) * unit).collect();
        for dtype in QUANTISED {
            check_error(dtype, &row);
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
        vec![-0.0, 0.0, 1.0],
    ] {
        for dtype in QUANTISED {
            check_error(dtype, &row);
        }
    }
    check_range_error(&[f32::MAX, f32::MAX.next_down()]);
}

#[test]
fn constant_int8_row_is_restored_exactly() {
    for x in [0.0, 0.1, -7.3, 1e30, -f32::MAX, f32::from_bits(1), -1e-41] {
        for read in round_trip(KvDtype::Int8, &[x; 20]) {
            assert_same_bits(&read, &[x; 20], "int8");
        }
    }
}

#[test]
fn constant_uint4_row_is_within_bound_and_zero_is_exact() {
    for head_dim in [1, 20, 64, 80, 128, 600] {
        for x in [0.1, -7.3, 1e30, -1e37, 1e-30, f32::from_bits(1)] {
            check_rotated_error(&vec![x; head_dim]);
        }
        for read in round_trip(KvDtype::Uint4, &vec![0.0; head_dim]) {
            assert!(read.iter().all(|x| *x == 0.0), "{read:?}");
        }
    }
}

/// A few dimensions of keys are far larger than the others.
#[test]
fn uint4_error_beside_large_values_is_small() {
    let (mut error, mut total) = ([0.0; 2], 0.0);
    for seed in 0..50 {
        let mut row = random_floats(seed, 128);
        (row[41], row[100]) = (10.0 * row[41].signum(), 7.0);
        for (error, read) in error.iter_mut().zip(round_trip(KvDtype::Uint4, &row)) {
            let squares = row.iter().zip(read).map(|(x, y)| f64::from(x - y).powi(2));
            *error += squares.sum::<f64>();
        }
        total += row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
    }
    let [k, v] = error.map(|error| (error / total).sqrt());
    assert!(k < 0.055, "the error of keys is {k}");
    assert!(v < 0.095, "the error of values is {v}");
}

#[test]
fn overflow_of_the_transform_is_restored_as_nan() {
    for read in round_trip(KvDtype::Uint4, &[f32::MAX; 64]) {
        assert!(read[32..48].iter().all(|x| x.is_nan()), "{read:?}");
    }
}

#[test]
fn int8_range_ends_are_exact_and_ties_round_to_even() {
    // Scale 1, which is exact in bf16.
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
        [(KvDtype::Int8, 5_760_527_099_347_050_121), (KvDtype::Uint4, 16_341_434_704_409_367_333)]
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
    for dtype in QUANTISED {
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
    assert_eq!([64, 128].map(|head_dim| tile(KvDtype::Uint4, head_dim)), [1152, 2240]);
}
