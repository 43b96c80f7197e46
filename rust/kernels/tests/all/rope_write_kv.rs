//! The fused norm, rotation and write of keys and values, and the copies of rows: the same bits as one after the other.

use penstock_kernels::{Kernels, KvLayout, Matrix, MatrixLayout, Pool, RopeWriteKv, Rows, RowsMut};
use penstock_types::{Dtype, HeadShape, KvDtype};
use proptest::prelude::*;

use crate::common::*;

const BLOCK: usize = 16;
const BLOCKS: u32 = 7;
const TYPES: [KvDtype; 5] = [KvDtype::F32, KvDtype::F16, KvDtype::Bf16, KvDtype::Int8, KvDtype::Uint4];

/// The operations of [`Kernels::rope_write_kv`] on one thread, one after the other.
fn separately(kernels: Kernels, call: &RopeWriteKv<'_>, qkv: &mut [f32], cache: &mut [u8]) {
    let pool = Pool::new(1).unwrap();
    let (stride, head_dim) = (call.heads.qkv_width(), call.heads.head_dim);
    let (query, kv) = (call.heads.query_width(), call.heads.kv_width());
    if let Some((query_norm, key_norm, epsilon)) = call.norms {
        kernels.rms_norm_in_place(&pool, RowsMut::columns(qkv, stride, 0..query), query_norm, epsilon);
        kernels.rms_norm_in_place(&pool, RowsMut::columns(qkv, stride, query..query + kv), key_norm, epsilon);
    }
    kernels.rope(&pool, RowsMut::columns(qkv, stride, 0..query + kv), head_dim, call.cos, call.sin);
    for (row, scale) in qkv.chunks_exact_mut(stride).zip(call.query_scales.into_iter().flatten()) {
        row[..query].iter_mut().for_each(|value| *value *= scale);
    }
    for (row, (block, offset)) in qkv.chunks_exact(stride).zip(call.blocks.iter().zip(call.offsets)) {
        let (k, v) = row[query..].split_at(kv);
        kernels.write_kv(call.layout, cache, *block, *offset as usize, k, v);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Several rows write the same position, as in the warm-up: the last one is kept.
    #[test]
    fn fused_rope_and_write_have_the_bits_of_separate_ones(
        rows in 0usize..200, kv_heads in 1usize..4, group in 1usize..3, half in 1usize..20, rest in 0usize..5,
        has_norms: bool, has_scales: bool, threads in 1usize..5, dtype in 0..TYPES.len(), seed in 0u64..1000,
    ) {
        let heads = HeadShape { heads: kv_heads * group, kv_heads, head_dim: 2 * half + rest };
        let layout = KvLayout { block_size: BLOCK, kv_heads, head_dim: heads.head_dim, dtype: TYPES[dtype] };
        let (rotation, norms) = (random_floats(seed, rows * 2 * half), random_floats(seed + 1, 2 * heads.head_dim));
        let (query_norm, key_norm) = norms.split_at(heads.head_dim);
        let place = |value: f32, count: u32| ((value + 1.0) / 2.0 * count as f32) as u32 % count;
        let places = random_floats(seed + 2, 2 * rows);
        let blocks: Vec<_> = places[..rows].iter().map(|value| place(*value, BLOCKS)).collect();
        let offsets: Vec<_> = places[rows..].iter().map(|value| place(*value, BLOCK as u32)).collect();
        let scales = random_floats(seed + 4, rows);
        let call = RopeWriteKv {
            heads,
            norms: has_norms.then_some((query_norm, key_norm, 1e-6)),
            cos: Rows::columns(&rotation, 2 * half, 0..half),
            sin: Rows::columns(&rotation, 2 * half, half..2 * half),
            query_scales: has_scales.then_some(&scales),
            layout: &layout,
            blocks: &blocks,
            offsets: &offsets,
        };
        let x = random_floats(seed + 3, rows * heads.qkv_width());
        let pool = Pool::new(threads).unwrap();
        for kernels in all_kernels() {
            let cache = vec![0xa5; BLOCKS as usize * layout.block_bytes()];
            let (mut want, mut want_cache) = (x.clone(), cache.clone());
            separately(kernels, &call, &mut want, &mut want_cache);
            let (mut got, mut got_cache) = (x.clone(), cache);
            kernels.rope_write_kv(&pool, &call, &mut got, &mut got_cache);
            assert_same_bits(&got, &want, "qkv");
            prop_assert!(got_cache == want_cache, "cache");
        }
    }

    #[test]
    fn rows_are_copied_by_index(count in 0usize..80, width in 1usize..300, threads in 1usize..4, seed in 0u64..1000) {
        const ROWS: usize = 37;
        let pool = Pool::new(threads).unwrap();
        let x = random_floats(seed, ROWS * width);
        let layout = MatrixLayout { rows: ROWS, columns: width, format: Dtype::F32.into() };
        let bytes = pack(layout, &x);
        let rows: Vec<_> = (0..count as u32).map(|i| (i * 23 + seed as u32) % ROWS as u32).collect();
        let want: Vec<_> = rows.iter().flat_map(|row| &x[*row as usize * width..][..width]).copied().collect();
        let kernels = Kernels::best();
        let mut out = vec![f32::NAN; count * width];
        kernels.gather(&pool, Rows::dense(&x, width), &rows, RowsMut::dense(&mut out, width));
        assert_same_bits(&out, &want, "gather");
        out.fill(f32::NAN);
        let row_of = |i: usize| rows[i] as usize;
        let matrix = Matrix { layout, bytes: &bytes };
        kernels.read_rows(&pool, matrix, &row_of, RowsMut::dense(&mut out, width));
        assert_same_bits(&out, &want, "rows of a matrix");
    }
}

#[test]
#[should_panic(expected = "part outside the slice")]
fn write_to_a_block_outside_the_cache_panics() {
    let heads = HeadShape { heads: 1, kv_heads: 1, head_dim: 2 };
    let layout = KvLayout { block_size: BLOCK, kv_heads: 1, head_dim: 2, dtype: KvDtype::F32 };
    let mut cache = vec![0; 2 * layout.block_bytes()];
    let (cos, sin) = (Rows::dense(&[1.0], 1), Rows::dense(&[0.0], 1));
    let call = RopeWriteKv {
        heads,
        norms: None,
        cos,
        sin,
        query_scales: None,
        layout: &layout,
        blocks: &[2],
        offsets: &[0],
    };
    Kernels::best().rope_write_kv(&Pool::new(1).unwrap(), &call, &mut [0.0; 6], &mut cache);
}
