//! Norms, activations, rotary embedding and reductions, against the reference.

use penstock_kernels::{Pool, Rows, RowsMut, reference};
use proptest::prelude::*;

use crate::common::*;

/// The error of a few roundings.
const CLOSE: f32 = 1e-6;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn rms_norm_matches_the_reference(rows in 0usize..9, width in 1usize..1400, seed in 0u64..1000) {
        let pool = Pool::new(2).unwrap();
        let (x, weight) = (random_floats(seed, rows * width), random_floats(seed + 1, width));
        let want = reference::rms_norm(&x, &weight, 1e-6);
        for kernels in all_kernels() {
            let mut out = vec![f32::NAN; rows * width];
            kernels.rms_norm(&pool, Rows::dense(&x, width), &weight, 1e-6, RowsMut::dense(&mut out, width));
            assert_close(&out, &want, CLOSE, "rms_norm");
        }
    }

    #[test]
    fn heads_of_a_fused_row_are_normalised_in_place(heads in 1usize..5, head_dim in 1usize..100, seed in 0u64..1000) {
        let pool = Pool::new(2).unwrap();
        let (width, stride) = (heads * head_dim, heads * head_dim + 11);
        let (x, weight) = (random_floats(seed, 3 * stride), random_floats(seed + 1, head_dim));
        for kernels in all_kernels() {
            let mut got = x.clone();
            kernels.rms_norm_in_place(&pool, RowsMut::columns(&mut got, stride, 4..4 + width), &weight, 1e-5);
            for (got, x) in got.chunks_exact(stride).zip(x.chunks_exact(stride)) {
                assert_close(&got[4..4 + width], &reference::rms_norm(&x[4..4 + width], &weight, 1e-5), CLOSE, "head");
                assert_same_bits(&got[..4], &x[..4], "before");
                assert_same_bits(&got[4 + width..], &x[4 + width..], "after");
            }
        }
    }

    #[test]
    fn gated_activations_match_the_reference(rows in 1usize..6, width in 1usize..300, seed in 0u64..1000) {
        let pool = Pool::new(2).unwrap();
        let x: Vec<f32> = random_floats(seed, rows * 2 * width).into_iter().map(|x| x * 12.0).collect();
        for kernels in all_kernels() {
            let mut out = vec![f32::NAN; rows * width];
            kernels.silu_mul(&pool, Rows::dense(&x, 2 * width), RowsMut::dense(&mut out, width));
            assert_close(&out, &reference::silu_mul(&x, width), CLOSE, "silu");
            kernels.gelu_tanh_mul(&pool, Rows::dense(&x, 2 * width), RowsMut::dense(&mut out, width));
            assert_close(&out, &reference::gelu_tanh_mul(&x, width), 2e-6, "gelu");
        }
    }

    #[test]
    fn rope_rotates_the_first_part_of_every_head(
        rows in 1usize..6, heads in 1usize..4, half in 1usize..70, rest in 0usize..20, seed in 0u64..1000,
    ) {
        let pool = Pool::new(2).unwrap();
        let head_dim = 2 * half + rest;
        let width = heads * head_dim;
        let angles = random_floats(seed, rows * half);
        let cos: Vec<f32> = angles.iter().map(|a| a.cos()).collect();
        let sin: Vec<f32> = angles.iter().map(|a| a.sin()).collect();
        let x = random_floats(seed + 1, rows * width);
        for kernels in all_kernels() {
            let mut got = x.clone();
            let (cos_rows, sin_rows) = (Rows::dense(&cos, half), Rows::dense(&sin, half));
            kernels.rope(&pool, RowsMut::dense(&mut got, width), head_dim, cos_rows, sin_rows);
            for (index, (got, x)) in got.chunks_exact(head_dim).zip(x.chunks_exact(head_dim)).enumerate() {
                let row = index / heads;
                assert_close(got, &reference::rope(x, cos_rows.row(row), sin_rows.row(row)), CLOSE, "rope");
                assert_same_bits(&got[2 * half..], &x[2 * half..], "rest of the head");
            }
        }
    }

    #[test]
    fn reductions_match_the_reference(length in 1usize..3000, scale in 0.1f32..50.0, seed in 0u64..1000) {
        let x: Vec<f32> = random_floats(seed, length).into_iter().map(|x| x * scale).collect();
        for kernels in all_kernels() {
            assert_eq!(kernels.max(&x), reference::max(&x));
            assert_eq!(kernels.argmax(&x), reference::argmax(&x));
        }
    }

    #[test]
    fn exp_weights_and_their_sums_match_the_reference(
        length in 0usize..1500, scale in 0.1f32..50.0, factor in 0.1f32..10.0, seed in 0u64..1000,
    ) {
        let x: Vec<f32> = random_floats(seed, length).into_iter().map(|x| x * scale).collect();
        let shift = reference::max(&x);
        let want = reference::exp_weights(&x, shift, factor);
        let total = want.iter().map(|weight| f64::from(*weight)).sum::<f64>();
        for kernels in all_kernels() {
            let mut got = vec![f32::NAN; length];
            let sum = kernels.exp_weights(&x, shift, factor, &mut got);
            assert_close(&got, &want, CLOSE, "exp_weights");
            prop_assert!(got.iter().all(|weight| (0.0..=1.0).contains(weight)));
            assert_same_bits(&[sum], &[kernels.sum(&got)], "the sum of exp_weights");
            assert_close(&[sum], &[total as f32], 4e-6, "sum");
            let sum = kernels.sum_of_exp(&x, shift, factor) as f32;
            assert_close(&[sum], &[total as f32], 4e-6, "sum_of_exp");
        }
    }

    #[test]
    fn mask_sets_elements_without_a_bit_to_minus_infinity(length in 0usize..200, words in 0usize..8, seed in 0u64..1000) {
        let x = random_floats(seed, length);
        let words: Vec<u32> = random_floats(seed + 1, words).into_iter().map(f32::to_bits).collect();
        for kernels in all_kernels() {
            let mut got = x.clone();
            kernels.mask(&mut got, &words);
            assert_same_bits(&got, &reference::mask(&x, &words), "mask");
        }
    }

    #[test]
    fn add_changes_every_element(length in 0usize..100, seed in 0u64..1000) {
        let (x, y) = (random_floats(seed, length), random_floats(seed + 1, length));
        for kernels in all_kernels() {
            let mut got = x.clone();
            kernels.add(&mut got, &y);
            assert_same_bits(&got, &x.iter().zip(&y).map(|(x, y)| x + y).collect::<Vec<_>>(), "add");
        }
    }
}

#[test]
fn argmax_is_the_lowest_index_of_equals_and_ignores_nan() {
    for kernels in all_kernels() {
        for length in [1, 15, 16, 17, 511, 512, 513, 1500] {
            let mut x = vec![1.0; length];
            assert_eq!(kernels.argmax(&x), 0);
            x[length - 1] = 2.0;
            assert_eq!(kernels.argmax(&x), length - 1);
            x.fill(f32::NAN);
            assert_eq!((kernels.argmax(&x), kernels.max(&x)), (0, f32::NEG_INFINITY));
            x[length / 2] = -5.0;
            assert_eq!((kernels.argmax(&x), kernels.max(&x)), (length / 2, -5.0));
        }
        assert_eq!((kernels.argmax(&[]), kernels.max(&[])), (0, f32::NEG_INFINITY));
        assert_eq!(kernels.argmax(&[f32::NEG_INFINITY; 3]), 0);
    }
}

#[test]
fn exp_weight_of_nan_is_0_and_of_the_maximum_is_1() {
    for kernels in all_kernels() {
        let x = [f32::NEG_INFINITY, 7.0, f32::NAN, f32::MIN, 7.0, -1e30];
        let mut weights = [f32::NAN; 6];
        assert_eq!(kernels.exp_weights(&x, 7.0, 0.5, &mut weights), 2.0);
        assert_eq!(weights, [0.0, 1.0, 0.0, 0.0, 1.0, 0.0]);
        assert_eq!(kernels.sum_of_exp(&x, 7.0, 0.5), 2.0);
        assert_eq!((kernels.sum(&[]), kernels.sum_of_exp(&[], 0.0, 1.0)), (0.0, 0.0));
    }
}

#[test]
fn row_has_the_same_bits_in_any_batch_and_thread_count() {
    let width = 1000;
    let (x, weight) = (random_floats(1, 50 * width), random_floats(2, width));
    for kernels in all_kernels() {
        for threads in 1..=3 {
            let pool = Pool::new(threads).unwrap();
            let (mut all, mut alone) = (vec![0.0; x.len()], vec![0.0; width]);
            kernels.rms_norm(&pool, Rows::dense(&x, width), &weight, 1e-6, RowsMut::dense(&mut all, width));
            for (all, x) in all.chunks_exact(width).zip(x.chunks_exact(width)) {
                kernels.rms_norm(
                    &pool,
                    Rows::dense(x, width),
                    &weight,
                    1e-6,
                    RowsMut::dense(&mut alone, width),
                );
                assert_same_bits(all, &alone, "row");
            }
        }
    }
}

#[test]
fn row_operations_have_equal_bits_on_every_fused_isa() {
    let pool = Pool::new(1).unwrap();
    for width in [16, 70, 1000] {
        let (x, weight) = (random_floats(1, 6 * width), random_floats(2, width));
        let outputs: Vec<Vec<f32>> = fused_kernels()
            .map(|kernels| {
                let mut all = vec![0.0; 13 * width];
                let (norm, rest) = all.split_at_mut(6 * width);
                let (silu, rest) = rest.split_at_mut(3 * width);
                let (gelu, weights) = rest.split_at_mut(3 * width);
                let out = RowsMut::dense(norm, width);
                kernels.rms_norm(&pool, Rows::dense(&x, width), &weight, 1e-6, out);
                kernels.silu_mul(&pool, Rows::dense(&x, 2 * width), RowsMut::dense(silu, width));
                kernels.gelu_tanh_mul(&pool, Rows::dense(&x, 2 * width), RowsMut::dense(gelu, width));
                let sum = kernels.exp_weights(&x[..width], 1.0, 3.0, weights);
                all.extend([sum, kernels.sum(&x), kernels.max(&x), kernels.sum_of_exp(&x, 1.0, 3.0) as f32]);
                all
            })
            .collect();
        for other in &outputs {
            assert_same_bits(other, &outputs[0], &format!("rows of {width}"));
        }
    }
}
