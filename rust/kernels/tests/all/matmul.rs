//! Matrix products: correct (against the reference) and deterministic (same bits in every batch).

use penstock_kernels::{Isa, Kernels, Matrix, MatrixLayout, Operand, Pool, reference};
use penstock_types::{Dtype, Epilogue};
use proptest::prelude::*;

use crate::common::*;

fn product(kernels: &Kernels, pool: &Pool, x: &[f32], tokens: usize, matrix: Matrix<'_>) -> Vec<f32> {
    let mut out = vec![f32::NAN; tokens * matrix.layout.rows];
    kernels.matmul(pool, Operand::Floats(x), tokens, &[matrix], Epilogue::Store, &mut out);
    out
}

/// The rounding error of a chain of `columns` products of floats below 1.
fn tolerance(columns: usize) -> f32 {
    2e-7 * (columns as f32).max(8.0)
}

fn check_against_reference(tokens: usize, rows: usize, columns: usize, dtype: Dtype, seed: u64) {
    let layout = MatrixLayout { rows, columns, format: dtype.into() };
    let weights = random_stored(seed, rows * columns, dtype);
    let x = random_floats(seed + 1, tokens * columns);
    let bytes = pack(layout, &weights);
    let pool = Pool::new(2).unwrap();
    for kernels in all_kernels() {
        let want = reference::matmul(&as_read(&kernels, dtype, &x), &weights, columns);
        let what = format!("{tokens} x {rows} x {columns} {dtype:?} on {kernels:?}");
        let got = product(&kernels, &pool, &x, tokens, Matrix { layout, bytes: &bytes });
        assert_close(&got, &want, tolerance(columns), &what);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn product_matches_the_reference(
        tokens in 1usize..40, rows in 1usize..120, columns in 1usize..90,
        dtype in prop::sample::select(Dtype::ALL), seed in 0u64..1000,
    ) {
        check_against_reference(tokens, rows, columns, dtype, seed);
    }
}

#[test]
fn large_products_match_the_reference() {
    for dtype in Dtype::ALL {
        check_against_reference(8, 40, 2500, *dtype, 1);
        check_against_reference(1, 1100, 33, *dtype, 2);
        check_against_reference(13, 150, 1026, *dtype, 3);
        check_against_reference(203, 50, 1025, *dtype, 4);
    }
}

#[test]
fn epilogues_add_a_bias_the_output_or_both() {
    let pool = Pool::new(2).unwrap();
    let layout = MatrixLayout { rows: 37, columns: 19, format: Dtype::Bf16.into() };
    let bytes = pack(layout, &random_stored(1, 37 * 19, Dtype::Bf16));
    let matrix = Matrix { layout, bytes: &bytes };
    let (x, bias, old) = (random_floats(2, 7 * 19), random_floats(3, 37), random_floats(4, 7 * 37));
    for kernels in all_kernels() {
        let plain = product(&kernels, &pool, &x, 7, matrix);
        let mut out = vec![f32::NAN; 7 * 37];
        kernels.matmul(&pool, Operand::Floats(&x), 7, &[matrix], Epilogue::Bias(&bias), &mut out);
        let want: Vec<f32> = plain.iter().enumerate().map(|(i, v)| v + bias[i % 37]).collect();
        assert_same_bits(&out, &want, "bias");
        let mut out = old.clone();
        kernels.matmul(&pool, Operand::Floats(&x), 7, &[matrix], Epilogue::Add, &mut out);
        let want: Vec<f32> = plain.iter().zip(&old).map(|(a, b)| a + b).collect();
        assert_same_bits(&out, &want, "add");
        let mut out = old.clone();
        kernels.matmul(&pool, Operand::Floats(&x), 7, &[matrix], Epilogue::AddBias(&bias), &mut out);
        let want: Vec<f32> = want.iter().enumerate().map(|(i, v)| v + bias[i % 37]).collect();
        assert_same_bits(&out, &want, "add and bias");
    }
}

#[test]
fn token_has_the_same_bits_in_any_batch_and_thread_count() {
    let pools: Vec<Pool> = (1..=3).map(|threads| Pool::new(threads).unwrap()).collect();
    // Several K blocks, a partial panel, an odd number of columns.
    for (rows, columns, dtype) in
        [(75, 2051, Dtype::Bf16), (75, 1030, Dtype::F16), (50, 1200, Dtype::F32), (4200, 3, Dtype::Bf16)]
    {
        let layout = MatrixLayout { rows, columns, format: dtype.into() };
        let bytes = pack(layout, &random_stored(7, rows * columns, dtype));
        let matrix = Matrix { layout, bytes: &bytes };
        let x = random_floats(8, 120 * columns);
        for kernels in all_kernels() {
            let alone: Vec<f32> =
                x.chunks_exact(columns).flat_map(|x| product(&kernels, &pools[0], x, 1, matrix)).collect();
            for tokens in (1..=40).chain([96, 97, 120]) {
                // The first and the last tokens: other positions in the batch, other tiles.
                for first in [0, 120 - tokens] {
                    let x = &x[first * columns..(first + tokens) * columns];
                    let pool = &pools[tokens % 3];
                    let got = product(&kernels, pool, x, tokens, matrix);
                    let what = format!(
                        "{tokens} tokens from {first}, {layout:?}, {} threads, {kernels:?}",
                        pool.threads()
                    );
                    assert_same_bits(&got, &alone[first * rows..(first + tokens) * rows], &what);
                }
            }
            for pool in &pools {
                assert_same_bits(&product(&kernels, pool, &x, 120, matrix), &alone, "threads");
                assert_same_bits(
                    &product(&kernels, pool, &x[..columns], 1, matrix),
                    &alone[..rows],
                    "threads",
                );
            }
        }
    }
}

#[test]
fn product_has_equal_bits_on_every_fused_isa() {
    let pool = Pool::new(2).unwrap();
    for dtype in Dtype::ALL {
        let layout = MatrixLayout { rows: 1107, columns: 1031, format: (*dtype).into() };
        let bytes = pack(layout, &random_stored(1, layout.rows * layout.columns, *dtype));
        let x = random_floats(2, 97 * layout.columns);
        for tokens in (1..=15).chain([97]) {
            let x = &x[..tokens * layout.columns];
            let outputs: Vec<_> = fused_kernels()
                .map(|kernels| product(&kernels, &pool, x, tokens, Matrix { layout, bytes: &bytes }))
                .collect();
            for other in &outputs {
                assert_same_bits(other, &outputs[0], &format!("{tokens} tokens, {layout:?}"));
            }
        }
    }
}

#[test]
fn bf16_pair_is_two_fused_multiply_adds_the_second_first() {
    let Some(kernels) = Kernels::for_isa(Isa::Avx512Bf16) else { return };
    let pool = Pool::new(2).unwrap();
    for (tokens, columns) in [(1, 9000), (13, 7), (13, 9001), (200, 1031)] {
        let layout = MatrixLayout { rows: 37, columns, format: Dtype::Bf16.into() };
        let weights = random_stored(1, 37 * columns, Dtype::Bf16);
        let x = random_floats(2, tokens * columns);
        let got = product(&kernels, &pool, &x, tokens, Matrix { layout, bytes: &pack(layout, &weights) });
        let x = as_read(&kernels, Dtype::Bf16, &x);
        let rows = x.chunks_exact(columns).flat_map(|x| weights.chunks_exact(columns).map(move |w| (x, w)));
        let want: Vec<f32> = rows
            .map(|(x, w)| {
                x.chunks(2).zip(w.chunks(2)).fold(0.0, |sum: f32, (x, w)| {
                    x.iter().zip(w).rev().fold(sum, |sum, (x, w)| x.mul_add(*w, sum))
                })
            })
            .collect();
        assert_same_bits(&got, &want, &format!("{tokens} x {columns}"));
    }
}

#[test]
fn padding_and_other_tokens_do_not_affect_a_result() {
    // With an odd number of columns the second half of a token's last pair is the next token.
    let pool = Pool::new(1).unwrap();
    for dtype in Dtype::ALL {
        let layout = MatrixLayout { rows: 5, columns: 7, format: (*dtype).into() };
        let bytes = pack(layout, &random_stored(1, 35, *dtype));
        let mut x = random_floats(2, 3 * 7);
        x[7..14].fill(f32::NAN);
        for kernels in all_kernels() {
            let out = product(&kernels, &pool, &x, 3, Matrix { layout, bytes: &bytes });
            assert!(out[..5].iter().chain(&out[10..]).all(|v| v.is_finite()), "{out:?}");
            assert!(out[5..10].iter().all(|v| v.is_nan()), "{out:?}");
        }
    }
}

#[test]
fn product_of_no_tokens_is_empty() {
    let layout = MatrixLayout { rows: 5, columns: 7, format: Dtype::F32.into() };
    let bytes = pack(layout, &random_floats(1, 35));
    product(&Kernels::best(), &Pool::new(2).unwrap(), &[], 0, Matrix { layout, bytes: &bytes });
}

proptest! {
    #[test]
    fn read_row_returns_the_packed_row(
        rows in 1usize..50, columns in 1usize..50, dtype in prop::sample::select(Dtype::ALL), seed in 0u64..1000,
    ) {
        let layout = MatrixLayout { rows, columns, format: dtype.into() };
        let weights = random_stored(seed, rows * columns, dtype);
        let bytes = pack(layout, &weights);
        let mut row = vec![f32::NAN; columns];
        for (index, want) in weights.chunks_exact(columns).enumerate() {
            Matrix { layout, bytes: &bytes }.read_row(index, &mut row);
            assert_same_bits(&row, want, "row");
        }
    }
}

#[test]
fn packing_on_a_pool_equals_packing_by_panel() {
    let pool = Pool::new(3).unwrap();
    let layout = MatrixLayout { rows: 83, columns: 21, format: Dtype::F16.into() };
    let weights = random_floats(5, 83 * 21);
    let mut bytes = vec![0xff; layout.bytes()];
    let read = |rows: std::ops::Range<usize>, into: &mut [f32]| {
        into.copy_from_slice(&weights[rows.start * 21..rows.end * 21]);
    };
    layout.pack(&pool, &mut bytes, read);
    assert_eq!(bytes, pack(layout, &weights));
}
