//! Paged attention: correct (against the reference) and deterministic (same bits for every chunking, batch and division).

#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use penstock_kernels::{Kernels, KvLayout, Pool, Rows, RowsMut, attention_scratch, reference};
use penstock_types::{AttentionParams, AttentionRow, KvDtype};
use proptest::prelude::*;

/// A sequence and its cache. All bytes of the cache that are not the sequence's are NaN.
struct Case {
    layout: KvLayout,
    heads: usize,
    params: AttentionParams,
    positions: usize,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    cache: Vec<u8>,
    blocks: Vec<u32>,
}

#[derive(Clone, Copy, Debug)]
struct Spec {
    positions: usize,
    head_dim: usize,
    kv_heads: usize,
    group: usize,
    block_size: usize,
    dtype: KvDtype,
    window: Option<usize>,
    softcap: Option<f32>,
}

const PLAIN: Spec = Spec {
    positions: 600,
    head_dim: 64,
    kv_heads: 2,
    group: 7,
    block_size: 16,
    dtype: KvDtype::Bf16,
    window: None,
    softcap: None,
};

impl Case {
    fn new(spec: Spec, seed: u64) -> Case {
        let Spec { positions, head_dim, kv_heads, group, block_size, dtype, window, softcap } = spec;
        let layout = KvLayout { block_size, kv_heads, head_dim, dtype };
        let heads = kv_heads * group;
        let used = positions.div_ceil(block_size);
        // Every other block of the cache, in descending order.
        let blocks: Vec<u32> = (0..used).map(|i| 2 * (used - i) as u32 - 1).collect();
        let mut case = Case {
            layout,
            heads,
            params: AttentionParams { scale: (head_dim as f32).sqrt().recip(), window, softcap },
            positions,
            q: random_floats(seed, positions * heads * head_dim).into_iter().map(|x| 3.0 * x).collect(),
            k: random_floats(seed + 1, positions * kv_heads * head_dim),
            v: random_floats(seed + 2, positions * kv_heads * head_dim),
            cache: vec![0xff; 2 * used * layout.block_bytes()],
            blocks,
        };
        case.fill_cache();
        case
    }

    /// Writes all keys and values to the cache, and replaces them by the stored values.
    fn fill_cache(&mut self) {
        let layout = self.layout;
        let width = layout.kv_heads * layout.head_dim;
        let tokens = self.k.chunks_exact_mut(width).zip(self.v.chunks_exact_mut(width));
        for (position, (k, v)) in tokens.enumerate() {
            let block = self.blocks[position / layout.block_size];
            let offset = position % layout.block_size;
            Kernels::best().write_kv(&layout, &mut self.cache, block, offset, k, v);
            let read = layout.read(&self.cache, block, offset);
            k.copy_from_slice(&read.0);
            v.copy_from_slice(&read.1);
        }
    }

    fn width(&self) -> usize {
        self.heads * self.layout.head_dim
    }

    fn row(
        &self,
        first_query: usize,
        positions: std::ops::Range<usize>,
        blocks: std::ops::Range<usize>,
    ) -> AttentionRow {
        AttentionRow { first_query, num_queries: positions.len(), start: positions.start, blocks }
    }

    /// The outputs of `positions`, computed `chunk` at a time.
    fn outputs(
        &self,
        kernels: &Kernels,
        pool: &Pool,
        positions: std::ops::Range<usize>,
        chunk: usize,
    ) -> Vec<f32> {
        let mut scratch = vec![0.0; attention_scratch(self.heads, self.layout.head_dim, self.positions)];
        self.outputs_with(kernels, pool, positions, chunk, &mut scratch)
    }

    fn outputs_with(
        &self,
        kernels: &Kernels,
        pool: &Pool,
        positions: std::ops::Range<usize>,
        chunk: usize,
        scratch: &mut [f32],
    ) -> Vec<f32> {
        let width = self.width();
        let mut all = Vec::new();
        for start in positions.clone().step_by(chunk) {
            let end = positions.end.min(start + chunk);
            let mut out = vec![f32::NAN; (end - start) * width];
            let row = self.row(0, start..end, 0..self.blocks.len());
            let q = Rows::dense(&self.q[start * width..end * width], width);
            kernels.attention(
                pool,
                &self.layout,
                &self.cache,
                &[row],
                &self.blocks,
                q,
                self.heads,
                self.params,
                scratch,
                RowsMut::dense(&mut out, width),
            );
            all.extend(out);
        }
        all
    }

    fn reference(&self, positions: std::ops::Range<usize>) -> Vec<f32> {
        let Self { layout: KvLayout { kv_heads, head_dim, .. }, heads, params, .. } = *self;
        let mut out = Vec::new();
        for position in positions {
            let first = params.window.map_or(0, |window| (position + 1).saturating_sub(window));
            for head in 0..heads {
                let part = |x: &[f32]| -> Vec<f32> {
                    let kv_head = head / (heads / kv_heads);
                    let seen = x.chunks_exact(head_dim).skip(kv_head).step_by(kv_heads);
                    seen.skip(first).take(position + 1 - first).flatten().copied().collect()
                };
                let q = &self.q[(position * heads + head) * head_dim..][..head_dim];
                out.extend(reference::attention(
                    q,
                    &part(&self.k),
                    &part(&self.v),
                    params.scale,
                    params.softcap,
                ));
            }
        }
        out
    }
}

/// The tolerance of attention against the reference over the same keys and values.
fn tolerance(dtype: KvDtype, softcap: Option<f32>) -> f32 {
    let sums = match dtype {
        KvDtype::F32 | KvDtype::F16 | KvDtype::Bf16 => 3e-6,
        // The query and the weights have 16 bits: each of 16 lanes of a split may be off by half a step of 2^-15.
        KvDtype::Int8 | KvDtype::Uint4 => 3e-4,
    };
    // The cap multiplies the rounding error of tanh, and a weight is the exponential of the product.
    sums + softcap.unwrap_or(0.0) * f32::EPSILON
}

fn spec() -> impl Strategy<Value = Spec> {
    (
        (1usize..600, prop::sample::select(vec![1usize, 20, 32, 64, 80, 96, 128]), 1usize..3, 1usize..9),
        prop::sample::select(vec![16usize, 32, 48, 64, 128]),
        prop::sample::select(KvDtype::ALL),
        prop::option::of(1usize..400),
        prop::option::of(5.0f32..50.0),
    )
        .prop_map(|((positions, head_dim, kv_heads, group), block_size, dtype, window, softcap)| Spec {
            positions,
            head_dim,
            kv_heads,
            group,
            block_size,
            dtype,
            window,
            softcap,
        })
}

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

#[test]
fn later_positions_and_stale_bytes_do_not_affect_a_query() {
    let pool = Pool::new(2).unwrap();
    for window in [None, Some(37)] {
        for dtype in KvDtype::ALL {
            let mut case = Case::new(Spec { positions: 280, window, dtype: *dtype, ..PLAIN }, 6);
            let width = case.layout.kv_heads * case.layout.head_dim;
            for kernels in all_kernels() {
                let clean = case.outputs(&kernels, &pool, 0..280, 280);
                // Later positions and those before the window are overwritten with garbage.
                let mut cache = case.cache.clone();
                let (nan, inf) = (vec![f32::NAN; width], vec![f32::INFINITY; width]);
                for position in (200..280).rev() {
                    let (block, offset) = (case.blocks[position / 16], position % 16);
                    kernels.write_kv(&case.layout, &mut cache, block, offset, &nan, &inf);
                }
                for position in 0..window.map_or(0, |window| 190 + 1 - window) {
                    let (block, offset) = (case.blocks[position / 16], position % 16);
                    kernels.write_kv(&case.layout, &mut cache, block, offset, &inf, &nan);
                }
                std::mem::swap(&mut case.cache, &mut cache);
                // All in one chunk: garbage is visible to the later queries but not to the earlier ones.
                let got = case.outputs(&kernels, &pool, 190..280, 90);
                let own = 10 * case.width();
                assert_same_bits(
                    &got[..own],
                    &clean[190 * case.width()..][..own],
                    &format!("{dtype:?} {kernels:?}"),
                );
                std::mem::swap(&mut case.cache, &mut cache);
            }
        }
    }
}

#[test]
fn blocks_before_the_window_are_not_read() {
    let mut case = Case::new(Spec { positions: 500, window: Some(50), ..PLAIN }, 7);
    let pool = Pool::new(2).unwrap();
    for kernels in all_kernels() {
        let want = case.outputs(&kernels, &pool, 495..500, 5);
        let blocks = case.blocks.clone();
        case.blocks[..(495 + 1 - 50) / 16].fill(u32::MAX);
        assert_same_bits(&case.outputs(&kernels, &pool, 495..500, 5), &want, "freed blocks");
        case.blocks = blocks;
    }
}

#[test]
#[should_panic(expected = "block 4000000000 of")]
fn block_outside_the_cache_panics() {
    let mut case = Case::new(PLAIN, 8);
    case.blocks[3] = 4_000_000_000;
    case.outputs(&Kernels::best(), &Pool::new(1).unwrap(), 599..600, 1);
}

#[test]
#[should_panic(expected = "too few blocks")]
fn missing_block_panics() {
    let mut case = Case::new(PLAIN, 9);
    case.blocks.pop();
    case.outputs(&Kernels::best(), &Pool::new(1).unwrap(), 599..600, 1);
}

#[test]
fn many_heads_of_one_kv_head_are_several_jobs() {
    let case = Case::new(Spec { positions: 90, head_dim: 32, kv_heads: 1, group: 71, ..PLAIN }, 10);
    let pool = Pool::new(3).unwrap();
    for kernels in all_kernels() {
        assert_close(&case.outputs(&kernels, &pool, 0..90, 90), &case.reference(0..90), 3e-6, "71 heads");
    }
}

#[test]
fn non_finite_query_or_key_affects_only_rows_that_see_it() {
    let pool = Pool::new(2).unwrap();
    for dtype in KvDtype::ALL {
        let mut case = Case::new(Spec { positions: 300, dtype: *dtype, ..PLAIN }, 11);
        let (width, head_dim) = (case.width(), case.layout.head_dim);
        for kernels in all_kernels() {
            let clean = case.outputs(&kernels, &pool, 0..300, 300);
            // Head 3 at position 100.
            let bad = 100 * width + 3 * head_dim..100 * width + 4 * head_dim;
            for value in [f32::NAN, f32::INFINITY] {
                let kept = std::mem::replace(&mut case.q[bad.start + 5], value);
                let got = case.outputs(&kernels, &pool, 0..300, 300);
                assert!(got[bad.clone()].iter().all(|x| x.is_nan()), "{dtype:?} {value}");
                assert_same_bits(&got[..bad.start], &clean[..bad.start], "before the bad query");
                assert_same_bits(&got[bad.end..], &clean[bad.end..], "after the bad query");
                case.q[bad.start + 5] = kept;
            }
            // The keys and values of position 200.
            let kept = case.cache.clone();
            let nan = vec![f32::NAN; case.layout.kv_heads * head_dim];
            kernels.write_kv(&case.layout, &mut case.cache, case.blocks[200 / 16], 200 % 16, &nan, &nan);
            let got = case.outputs(&kernels, &pool, 0..300, 300);
            assert_same_bits(&got[..200 * width], &clean[..200 * width], "before the bad key");
            assert!(got[200 * width..].iter().all(|x| x.is_nan()), "{dtype:?}");
            case.cache = kept;
        }
    }
}

#[test]
fn many_small_weights_beside_a_large_one_are_kept() {
    let pool = Pool::new(1).unwrap();
    for dtype in [KvDtype::Int8, KvDtype::Uint4] {
        let spec = Spec { positions: 256, head_dim: 16, kv_heads: 1, group: 1, dtype, ..PLAIN };
        let mut case = Case::new(spec, 12);
        // Position 0 has weight 1, each other e^-11.5: less than half of a 16-bit step, and 0.26 % in total.
        case.q[255 * 16..].fill(0.0);
        case.q[255 * 16] = 11.5 * 4.0;
        case.k.fill(0.0);
        case.v.fill(0.0);
        case.k[0] = 1.0;
        for (position, v) in case.v.chunks_exact_mut(16).enumerate() {
            v[usize::from(position > 0)] = 1.0;
        }
        case.fill_cache();
        let want = case.reference(255..256);
        assert!(want[1] > 2e-3, "{want:?}");
        for kernels in all_kernels() {
            let got = case.outputs(&kernels, &pool, 255..256, 1);
            assert_close(&got, &want, tolerance(dtype, None), &format!("{dtype:?}"));
        }
    }
}

#[test]
fn sums_of_the_largest_quantised_values_do_not_overflow() {
    let pool = Pool::new(1).unwrap();
    for dtype in [KvDtype::Int8, KvDtype::Uint4] {
        for head_dim in [256, 512] {
            let spec = Spec { positions: 256, head_dim, kv_heads: 1, group: 1, dtype, ..PLAIN };
            let mut case = Case::new(spec, 13);
            case.q.fill(1.0);
            case.params.scale = 1.0 / (head_dim as f32 * 255.0);
            // Every quantised value is the largest, except one per row in every second key.
            case.k.fill(255.0);
            case.v.fill(255.0);
            for (position, (k, v)) in
                case.k.chunks_exact_mut(head_dim).zip(case.v.chunks_exact_mut(head_dim)).enumerate()
            {
                (k[0], v[0]) = (0.0, 0.0);
                if position % 2 == 0 {
                    k[1..].fill(0.0);
                    k[0] = 255.0;
                    v[2] = 50.0;
                }
            }
            case.fill_cache();
            let want = case.reference(255..256);
            for kernels in all_kernels() {
                let got = case.outputs(&kernels, &pool, 255..256, 1);
                assert_close(&got, &want, tolerance(dtype, None), &format!("{dtype:?} x {head_dim}"));
            }
        }
    }
}
