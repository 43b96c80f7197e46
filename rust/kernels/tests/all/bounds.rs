//! No kernel of any instruction set accesses memory outside its slices: each slice is beside an inaccessible page.

use penstock_kernels::{
    Kernels, KvLayout, Matrix, MatrixLayout, Operand, Pool, RopeWriteKv, Rows, RowsMut, attention_scratch,
};
use penstock_types::{
    Activations, CodeBits, Dtype, Epilogue, Grid, HeadShape, KvDtype, Minimum, ScaleFormat, WeightFormat,
};
use proptest::prelude::*;

use crate::attention::case::{Case, PLAIN, Spec};
use crate::common::guarded::{Guarded, Side};
use crate::common::*;

const KV_DTYPES: [KvDtype; 5] = [KvDtype::F32, KvDtype::F16, KvDtype::Bf16, KvDtype::Int8, KvDtype::Uint4];

/// Every dtype, and every kind of kernel of grids.
fn formats() -> Vec<WeightFormat> {
    let mut formats: Vec<WeightFormat> = Dtype::ALL.iter().map(|dtype| (*dtype).into()).collect();
    for (bits, group, scales, minimum) in [
        (CodeBits::Four, Some(32), ScaleFormat::F16, Minimum::Stored),
        (CodeBits::Four, Some(64), ScaleFormat::Bf16, Minimum::ZeroPoint),
        (CodeBits::Five, Some(32), ScaleFormat::Nested, Minimum::Stored),
        (CodeBits::Six, Some(16), ScaleFormat::Nested, Minimum::Centred),
        (CodeBits::Eight, Some(128), ScaleFormat::F16, Minimum::Centred),
        (CodeBits::Eight, None, ScaleFormat::F32, Minimum::Stored),
    ] {
        for activations in [Activations::Int8, Activations::Float] {
            formats.push(WeightFormat::Grid(Grid { bits, group, scales, minimum, activations }));
        }
    }
    for group in [None, Some(32)] {
        let (scales, activations) = (ScaleFormat::F32, Activations::Float);
        let grid = Grid { bits: CodeBits::E4m3, group, scales, minimum: Minimum::Centred, activations };
        formats.push(WeightFormat::Grid(grid));
    }
    formats
}

/// For the kernels of each instruction set, and each side of the slices.
fn for_all_kernels(check: impl Fn(Kernels, Side)) {
    for kernels in all_kernels() {
        check(kernels, Side::Start);
        check(kernels, Side::End);
    }
}

fn check_product(pool: &Pool, format: WeightFormat, tokens: usize, rows: usize, columns: usize, seed: u64) {
    let layout = MatrixLayout { rows, columns, format };
    let weights = random_floats(seed, layout.bytes());
    let bytes: Vec<u8> = weights.iter().map(|x| (x * 128.0) as i8 as u8).collect();
    let (x, bias) = (random_floats(seed + 1, tokens * columns), random_floats(seed + 2, rows));
    for_all_kernels(|kernels, side| {
        let (x, bias) = (Guarded::new(&x, side), Guarded::new(&bias, side));
        let bytes = Guarded::new(&bytes, side);
        let mut out = Guarded::new(&vec![0.0; tokens * rows], side);
        let matrix = Matrix { layout, bytes: &bytes };
        let operand = kernels.operand_layout([format].into_iter(), columns);
        let mut codes = Guarded::new(&vec![0; operand.map_or(0, |layout| tokens * layout.row_bytes())], side);
        let x = match operand {
            None => Operand::Floats(&x),
            Some(layout) => {
                kernels.quantise(pool, Rows::dense(&x, columns), &layout, &mut codes);
                Operand::Codes(&codes)
            }
        };
        for epilogue in [Epilogue::Store, Epilogue::AddBias(&*bias)] {
            kernels.matmul(pool, x, tokens, &[matrix], epilogue, &mut out);
        }
    });
}

#[test]
fn large_products_stay_in_bounds() {
    let pool = Pool::new(2).unwrap();
    for format in formats() {
        check_product(&pool, format, 37, 33, 1100, 1);
        check_product(&pool, format, 1, 130, 1024, 2);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn products_stay_in_bounds(
        tokens in 1usize..20, rows in 1usize..50, columns in 1usize..300, seed in 0u64..1000,
    ) {
        let pool = Pool::new(1).unwrap();
        for format in formats() {
            check_product(&pool, format, tokens, rows, columns, seed);
        }
    }

    #[test]
    fn row_operations_stay_in_bounds(rows in 1usize..4, width in 1usize..130, seed in 0u64..1000) {
        let pool = Pool::new(1).unwrap();
        let x = random_floats(seed, rows * 2 * width);
        for_all_kernels(|kernels, side| {
            let mut x = Guarded::new(&x, side);
            let (weight, mut out) =
                (Guarded::new(&x[..width], side), Guarded::new(&vec![0.0; rows * width], side));
            kernels.silu_mul(&pool, Rows::dense(&x, 2 * width), RowsMut::dense(&mut out, width));
            kernels.gelu_tanh_mul(&pool, Rows::dense(&x, 2 * width), RowsMut::dense(&mut out, width));
            let right = Rows::columns(&x, 2 * width, width..2 * width);
            kernels.rms_norm(&pool, right, &weight, 1e-6, RowsMut::dense(&mut out, width));
            kernels.rms_norm_in_place(&pool, RowsMut::dense(&mut out, width), &weight, 1e-6);
            let (cos, sin) = (Guarded::new(&out, side), Guarded::new(&out, side));
            let (cos, sin) = (Rows::dense(&cos, width), Rows::dense(&sin, width));
            kernels.rope(&pool, RowsMut::dense(&mut x, 2 * width), 2 * width, cos, sin);
            let words = Guarded::new(&vec![0xaaaa_aaaa; width.div_ceil(32)], side);
            kernels.add(&mut out[..width], &weight);
            kernels.mask(&mut out[..width], &words);
            let largest = kernels.max(&weight);
            assert_eq!(weight[kernels.argmax(&weight)], largest);
            let mut weights = Guarded::new(&vec![0.0; width], side);
            let sum = kernels.exp_weights(&weight, largest, 1.0, &mut weights);
            assert!(sum > 0.0 && kernels.sum(&weights) > 0.0);
            assert!(kernels.sum_of_exp(&weight, largest, 1.0) > 0.0);
        });
    }

    #[test]
    fn writes_of_keys_and_values_stay_in_bounds(
        kv_heads in 1usize..4, group in 1usize..3, half in 1usize..40, dtype in 0..KV_DTYPES.len(),
        seed in 0u64..1000,
    ) {
        let heads = HeadShape { heads: kv_heads * group, kv_heads, head_dim: 2 * half };
        let layout = KvLayout { block_size: 16, kv_heads, head_dim: 2 * half, dtype: KV_DTYPES[dtype] };
        let (pool, rows) = (Pool::new(1).unwrap(), 5);
        let (qkv, rotation) =
            (random_floats(seed, rows * heads.qkv_width()), random_floats(seed + 1, rows * half));
        for_all_kernels(|kernels, side| {
            let mut qkv = Guarded::new(&qkv, side);
            let mut cache = Guarded::new(&vec![0; 2 * layout.block_bytes()], side);
            let (cos, sin) = (Guarded::new(&rotation, side), Guarded::new(&rotation, side));
            let norm = Guarded::new(&random_floats(seed + 2, 2 * half), side);
            let call = RopeWriteKv {
                heads,
                norms: Some((&norm, &norm, 1e-6)),
                cos: Rows::dense(&cos, half),
                sin: Rows::dense(&sin, half),
                query_scales: Some(&Guarded::new(&[1.5; 5], side)),
                layout: &layout,
                blocks: &Guarded::new(&[0, 1, 1, 0, 0], side),
                offsets: &Guarded::new(&[0, 15, 2, 1, 7], side),
            };
            kernels.rope_write_kv(&pool, &call, &mut qkv, &mut cache);
        });
    }

    #[test]
    fn attention_stays_in_bounds(
        positions in 1usize..300, head_dim in 1usize..70, kv_heads in 1usize..3, group in 1usize..8,
        dtype in 0..KV_DTYPES.len(), seed in 0u64..1000,
    ) {
        let spec = Spec { positions, head_dim, kv_heads, group, dtype: KV_DTYPES[dtype], ..PLAIN };
        let (case, pool) = (Case::new(spec, seed), Pool::new(1).unwrap());
        let first = positions.saturating_sub(9);
        let scratch = vec![0.0; attention_scratch(case.heads, head_dim, positions)];
        for_all_kernels(|kernels, side| {
            let (cache, blocks) = (Guarded::new(&case.cache, side), Guarded::new(&case.blocks, side));
            let q = Guarded::new(&case.q[first * case.width()..], side);
            let mut out = Guarded::new(&q, side);
            kernels.attention(
                &pool,
                &case.layout,
                &cache,
                &[case.row(0, first..positions, 0..blocks.len())],
                &blocks,
                Rows::dense(&q, case.width()),
                case.heads,
                case.params,
                &mut Guarded::new(&scratch, side),
                RowsMut::dense(&mut out, case.width()),
                None,
            );
            assert_same_bits(&out, &case.outputs(&kernels, &pool, first..positions, 9), "attention");
        });
    }
}
