//! The outputs match the reference and have the same bits for every chunking, batch and thread count.

use penstock_kernels::{Pool, Rows, RowsMut, attention_scratch};
use penstock_types::KvDtype;
use proptest::prelude::*;

use super::case::*;
use crate::common::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn attention_matches_the_reference(spec in spec(), queries in 1usize..20, seed in 0u64..1000) {
        let case = Case::new(spec, seed);
        let positions = spec.positions.saturating_sub(queries)..spec.positions;
        let want = case.reference(positions.clone());
        let pool = Pool::new(2).unwrap();
        for kernels in all_kernels() {
            let got = case.outputs(&kernels, &pool, positions.clone(), queries);
            assert_close(&got, &want, tolerance(spec.dtype, spec.softcap), &format!("{spec:?} on {kernels:?}"));
        }
    }

    #[test]
    fn query_has_the_same_bits_in_any_chunk(
        spec in spec(), seed in 0u64..1000, chunk in 1usize..100, threads in 1usize..4,
    ) {
        let spec = Spec { positions: spec.positions.min(300), ..spec };
        let case = Case::new(spec, seed);
        let pools = [Pool::new(1).unwrap(), Pool::new(threads).unwrap()];
        for kernels in all_kernels() {
            let whole = case.outputs(&kernels, &pools[0], 0..spec.positions, spec.positions);
            let got = case.outputs(&kernels, &pools[1], 0..spec.positions, chunk);
            assert_same_bits(&got, &whole, &format!("{spec:?} chunk {chunk}, {threads} threads, {kernels:?}"));
        }
    }
}

#[test]
fn prefill_in_chunks_and_decode_have_the_same_bits() {
    let pools: Vec<Pool> = (1..=3).map(|threads| Pool::new(threads).unwrap()).collect();
    for spec in [
        PLAIN,
        Spec { window: Some(100), block_size: 64, ..PLAIN },
        Spec { window: Some(3), group: 1, head_dim: 20, dtype: KvDtype::F16, ..PLAIN },
        Spec { softcap: Some(30.0), group: 4, head_dim: 128, dtype: KvDtype::F32, ..PLAIN },
        Spec { dtype: KvDtype::Int8, ..PLAIN },
        Spec { window: Some(70), group: 3, head_dim: 20, dtype: KvDtype::Int8, ..PLAIN },
        Spec { dtype: KvDtype::Uint4, block_size: 32, ..PLAIN },
        Spec { softcap: Some(30.0), group: 1, head_dim: 80, dtype: KvDtype::Uint4, ..PLAIN },
    ] {
        let case = Case::new(spec, 3);
        for kernels in all_kernels() {
            let whole = case.outputs(&kernels, &pools[0], 0..600, 600);
            assert_close(
                &whole[540 * case.width()..],
                &case.reference(540..600),
                tolerance(spec.dtype, spec.softcap),
                "reference",
            );
            for (index, chunk) in [1, 7, 16, 64, 600].into_iter().enumerate() {
                let got = case.outputs(&kernels, &pools[index % 3], 0..600, chunk);
                assert_same_bits(&got, &whole, &format!("{spec:?} in chunks of {chunk} on {kernels:?}"));
            }
        }
    }
}

#[test]
fn attention_has_equal_bits_on_every_fused_isa() {
    let pool = Pool::new(2).unwrap();
    for dtype in KvDtype::ALL {
        for spec in [PLAIN, Spec { window: Some(100), softcap: Some(30.0), group: 16, head_dim: 72, ..PLAIN }]
        {
            let spec = Spec { dtype: *dtype, ..spec };
            let case = Case::new(spec, 6);
            for chunk in [1, 33] {
                let outputs: Vec<_> =
                    fused_kernels().map(|kernels| case.outputs(&kernels, &pool, 500..600, chunk)).collect();
                for other in &outputs {
                    assert_same_bits(other, &outputs[0], &format!("{spec:?} in chunks of {chunk}"));
                }
            }
        }
    }
}

#[test]
fn long_decode_has_the_same_bits_on_any_thread_count() {
    let case = Case::new(Spec { positions: 2000, ..PLAIN }, 4);
    let width = case.width();
    for kernels in all_kernels() {
        let one = case.outputs(&kernels, &Pool::new(1).unwrap(), 1999..2000, 1);
        assert_close(&one, &case.reference(1999..2000), 3e-6, "reference");
        for threads in 2..=4 {
            let pool = Pool::new(threads).unwrap();
            assert_same_bits(&case.outputs(&kernels, &pool, 1999..2000, 1), &one, "split over threads");
            // Without scratch it is computed in whole jobs.
            let mut none = [];
            assert_same_bits(
                &case.outputs_with(&kernels, &pool, 1999..2000, 1, &mut none),
                &one,
                "not split",
            );
            // Several queries at once, split too.
            let mut scratch = vec![0.0; attention_scratch(case.heads, case.layout.head_dim, 5 * 2000)];
            let five = case.outputs_with(&kernels, &pool, 1995..2000, 5, &mut scratch);
            assert_same_bits(&five[4 * width..], &one, "five queries");
        }
    }
}

#[test]
fn batched_queries_in_a_fused_buffer_have_the_same_bits() {
    let case = Case::new(Spec { positions: 300, ..PLAIN }, 5);
    let (width, n) = (case.width(), case.blocks.len());
    // The same sequence several times: prefills and decodes in one batch.
    let parts = [0..40, 299..300, 40..41, 100..117, 255..258];
    let mut first = 1;
    let mut rows = Vec::new();
    for part in &parts {
        rows.push(case.row(first, part.clone(), n * rows.len()..n * (rows.len() + 1)));
        first += part.len() + 1;
    }
    let table: Vec<u32> = parts.iter().flat_map(|_| case.blocks.iter().copied()).collect();
    let stride = width + 9;
    let mut q = vec![f32::NAN; first * stride];
    for (row, part) in rows.iter().zip(&parts) {
        for (i, position) in part.clone().enumerate() {
            let to = (row.first_query + i) * stride + 5;
            q[to..to + width].copy_from_slice(&case.q[position * width..][..width]);
        }
    }
    for kernels in all_kernels() {
        for threads in 1..=3 {
            let pool = Pool::new(threads).unwrap();
            let mut scratch = vec![0.0; attention_scratch(case.heads, case.layout.head_dim, 100_000)];
            let mut out = vec![-7.0; first * stride];
            kernels.attention(
                &pool,
                &case.layout,
                &case.cache,
                &rows,
                &table,
                Rows::columns(&q, stride, 5..5 + width),
                case.heads,
                case.params,
                &mut scratch,
                RowsMut::columns(&mut out, stride, 2..2 + width),
                None,
            );
            let mut touched = vec![false; out.len()];
            for (row, part) in rows.iter().zip(&parts) {
                let alone = case.outputs(&kernels, &pool, part.clone(), part.len());
                for (i, want) in alone.chunks_exact(width).enumerate() {
                    let at = (row.first_query + i) * stride + 2;
                    assert_same_bits(
                        &out[at..at + width],
                        want,
                        &format!("{part:?}, query {i}, {threads} threads"),
                    );
                    touched[at..at + width].fill(true);
                }
            }
            assert!(
                out.iter().zip(touched).all(|(v, touched)| touched || *v == -7.0),
                "a float outside the rows was written"
            );
        }
    }
}
