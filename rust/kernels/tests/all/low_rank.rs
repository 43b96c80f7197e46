//! Low-rank updates: correct (against the reference) and deterministic (same bits in every batch).

use penstock_kernels::{
    Kernels, LowRank, LowRankRows, Matrix, MatrixLayout, Operand, Pool, Rows, low_rank_bytes, pack_low_rank,
    reference,
};
use penstock_types::{
    Activations, CodeBits, Dtype, Epilogue, Grid, LowRankShape, LowRankUpdate, Minimum, PackedAdapter,
    ScaleFormat, WeightFormat,
};
use proptest::prelude::*;
use std::ops::Range;
use std::sync::Arc;

use crate::common::*;

/// An adapter of one product: its updates, and their matrices A and B.
struct Adapter {
    updates: Vec<LowRankUpdate>,
    matrices: Vec<(Vec<f32>, Vec<f32>)>,
}

/// Updates of random ranks, of output columns with gaps between them.
fn adapter(seed: u64, columns: usize, parts: &[usize], dtype: Dtype) -> Adapter {
    let (mut updates, mut matrices, mut first) = (Vec::new(), Vec::new(), 0);
    for (index, rows) in parts.iter().copied().enumerate() {
        let seed = seed * 31 + index as u64;
        if !seed.is_multiple_of(4) {
            let rank = 1 + (seed * 7 % 37) as usize;
            let shape = LowRankShape { rows, columns, rank, dtype };
            let scale = 0.25 + seed as f32 / 3.0;
            updates.push(LowRankUpdate { matrix: 0, first_row: first, shape, scale, offset: 0 });
            let (a, b) =
                (random_stored(seed, rank * columns, dtype), random_stored(seed + 1, rows * rank, dtype));
            matrices.push((a, b));
        }
        first += rows;
    }
    Adapter { updates, matrices }
}

/// The operands of the updates of groups of rows.
#[derive(Default)]
struct Operands {
    adapters: Vec<Option<Arc<PackedAdapter>>>,
    rows: Vec<LowRankRows>,
    hidden: Vec<f32>,
}

impl Operands {
    fn new(groups: &[(Range<usize>, &Adapter)]) -> Self {
        let mut all = Self::default();
        for (range, adapter) in groups {
            let size = adapter.updates.iter().map(|update| low_rank_bytes(&update.shape)).sum();
            let mut packed = PackedAdapter::new(adapter.updates.clone(), size).unwrap();
            packed.bytes_mut().fill(0xff);
            let mut offset = 0;
            for (index, (a, b)) in adapter.matrices.iter().enumerate() {
                let shape = packed.updates[index].shape;
                packed.updates[index].offset = offset;
                let end = offset + low_rank_bytes(&shape);
                pack_low_rank(&shape, a, b, &mut packed.bytes_mut()[offset..end]);
                offset = end;
                all.hidden.resize(all.hidden.len() + shape.rank * range.len(), f32::NAN);
            }
            let (adapter, updates) = (all.adapters.len() + 1, 0..packed.updates.len());
            all.adapters.extend([None, Some(Arc::new(packed))]);
            all.rows.push(LowRankRows { rows: range.clone(), adapter, updates });
        }
        all
    }

    fn of<'a>(&'a mut self, x: &'a [f32], columns: usize) -> LowRank<'a> {
        let Self { adapters, rows, hidden } = self;
        LowRank { x: Rows::dense(x, columns), groups: rows, adapters, hidden }
    }
}

/// Adds the adapter of each group of rows to `out`.
fn add(
    kernels: &Kernels,
    pool: &Pool,
    x: &[f32],
    columns: usize,
    groups: &[(Range<usize>, &Adapter)],
    out: &mut [f32],
    width: usize,
) {
    kernels.add_low_rank(pool, Operands::new(groups).of(x, columns), width, out);
}

/// The reference, in f64 from A to B.
fn expected(x: &[f32], columns: usize, adapter: &Adapter, out: &mut [f32], width: usize) {
    for (LowRankUpdate { first_row, shape, scale, .. }, (a, b)) in
        adapter.updates.iter().zip(&adapter.matrices)
    {
        let updates = reference::low_rank(x, a, b, shape.rank, columns, *scale);
        for (out, update) in out.chunks_exact_mut(width).zip(updates.chunks_exact(shape.rows)) {
            out[*first_row..][..shape.rows].iter_mut().zip(update).for_each(|(out, update)| *out += update);
        }
    }
}

fn check_against_reference(tokens: usize, parts: &[usize], columns: usize, dtype: Dtype, seed: u64) {
    let width: usize = parts.iter().sum();
    let (x, old) = (random_floats(seed, tokens * columns), random_floats(seed + 1, tokens * width));
    let adapter = adapter(seed + 1, columns, parts, dtype);
    let mut want = old.clone();
    expected(&x, columns, &adapter, &mut want, width);
    let pool = Pool::new(2).unwrap();
    for kernels in all_kernels() {
        let mut got = old.clone();
        add(&kernels, &pool, &x, columns, &[(0..tokens, &adapter)], &mut got, width);
        let what = format!("{tokens} x {parts:?} x {columns} {dtype:?} on {kernels:?}");
        let scale = adapter.updates.iter().fold(1.0, |most, update| update.scale.max(most));
        assert_close(&got, &want, 1e-6 * scale * (columns as f32 * 40.0).sqrt(), &what);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn update_matches_the_reference(
        tokens in 1usize..50, parts in prop::collection::vec(1usize..70, 1..4), columns in 1usize..90,
        dtype in prop::sample::select(Dtype::ALL), seed in 0u64..1000,
    ) {
        check_against_reference(tokens, &parts, columns, dtype, seed);
    }
}

#[test]
fn large_updates_match_the_reference() {
    for dtype in Dtype::ALL {
        check_against_reference(1, &[900, 130, 130], 897, *dtype, 1);
        check_against_reference(200, &[300, 300], 1030, *dtype, 2);
    }
}

#[test]
fn row_has_the_same_bits_alone_and_beside_others() {
    let (columns, parts, width) = (83, [48, 17, 30], 95);
    let sizes = [3, 1, 40, 2, 1, 7];
    let tokens: usize = sizes.iter().sum();
    let (x, old) = (random_floats(1, tokens * columns), random_floats(2, tokens * width));
    for dtype in Dtype::ALL {
        let adapters: Vec<_> = (0..6).map(|seed| adapter(seed, columns, &parts, *dtype)).collect();
        for kernels in all_kernels() {
            let pools = [1, 2, 5].map(|threads| Pool::new(threads).unwrap());
            let mut groups = Vec::new();
            let mut start = 0;
            for (index, size) in sizes.iter().enumerate() {
                // The rows of group 3 have no adapter.
                if index != 3 {
                    groups.push((start..start + size, &adapters[index]));
                }
                start += size;
            }
            let mut alone = old.clone();
            for (range, adapter) in &groups {
                for row in range.clone() {
                    let x = &x[row * columns..][..columns];
                    let out = &mut alone[row * width..][..width];
                    add(&kernels, &pools[0], x, columns, &[(0..1, adapter)], out, width);
                }
            }
            for pool in &pools {
                let mut together = old.clone();
                add(&kernels, pool, &x, columns, &groups, &mut together, width);
                assert_same_bits(&together, &alone, &format!("{dtype:?} on {kernels:?}"));
            }
        }
    }
}

/// The product of `tokens` rows with matrices of `parts` rows and their adapters, and the two operations one after the
/// other.
fn check_together(tokens: usize, parts: &[usize], columns: usize, format: WeightFormat, aligned: bool) {
    let width: usize = parts.iter().sum();
    let x = random_floats(1, tokens * columns);
    let (old, bias) = (random_floats(2, tokens * width), random_floats(3, width));
    // Unaligned updates begin in the middle of a panel.
    let of_adapter = if aligned { parts.to_vec() } else { vec![7, width - 7] };
    let adapters: Vec<_> = (0..3).map(|seed| adapter(seed, columns, &of_adapter, Dtype::Bf16)).collect();
    let split = tokens.div_ceil(3);
    let groups: Vec<_> =
        [(0..split, 0), (split..tokens.min(2 * split), 1), (tokens.min(2 * split + 1)..tokens, 2)]
            .into_iter()
            .filter(|(rows, _)| !rows.is_empty())
            .map(|(rows, index)| (rows, &adapters[index]))
            .collect();
    let packed = parts.iter().map(|rows| {
        let layout = MatrixLayout { rows: *rows, columns, format };
        (layout, pack(layout, &random_floats(*rows as u64, rows * columns)))
    });
    let packed: Vec<_> = packed.collect();
    let matrices: Vec<_> = packed.iter().map(|(layout, bytes)| Matrix { layout: *layout, bytes }).collect();
    for kernels in all_kernels() {
        let layout = kernels.operand_layout(std::iter::once(format), columns);
        for threads in [1, 2, 5] {
            let pool = Pool::new(threads).unwrap();
            let mut codes = vec![0; tokens * layout.map_or(0, |layout| layout.row_bytes())];
            let operand = match &layout {
                None => Operand::Floats(&x),
                Some(layout) => {
                    kernels.quantise(&pool, Rows::dense(&x, columns), layout, &mut codes);
                    Operand::Codes(&codes)
                }
            };
            let epilogue = Epilogue::AddBias(&*bias);
            let (mut together, mut apart) = (old.clone(), old.clone());
            let mut operands = Operands::new(&groups);
            let updates = operands.of(&x, columns);
            kernels.matmul_low_rank(&pool, operand, tokens, &matrices, epilogue, updates, &mut together);
            kernels.matmul(&pool, operand, tokens, &matrices, epilogue, &mut apart);
            let before = apart.clone();
            add(&kernels, &pool, &x, columns, &groups, &mut apart, width);
            assert!(groups.is_empty() || apart != before, "the updates change the product");
            assert_same_bits(&together, &apart, &format!("{tokens} x {parts:?} {format:?} on {kernels:?}"));
        }
    }
}

#[test]
fn product_with_updates_has_the_bits_of_both_operations() {
    let int8 = Grid {
        bits: CodeBits::Eight,
        group: None,
        scales: ScaleFormat::F32,
        minimum: Minimum::Centred,
        activations: Activations::Int8,
    };
    for format in [Dtype::Bf16.into(), WeightFormat::Grid(int8)] {
        for aligned in [true, false] {
            check_together(1, &[48, 16, 90], 70, format, aligned);
            check_together(13, &[48, 17, 30], 70, format, aligned);
            check_together(230, &[64, 300], 96, format, aligned);
        }
    }
}

#[test]
fn size_grows_with_the_rank_alone() {
    let bytes = |rank| low_rank_bytes(&LowRankShape { rows: 896, columns: 896, rank, dtype: Dtype::F32 });
    assert_eq!([2, 8, 64].map(|rank| bytes(rank) / rank), [2 * 896 * 4; 3]);
}

#[test]
#[should_panic(expected = "columns of")]
fn update_of_another_width_panics() {
    let adapter = adapter(1, 32, &[16], Dtype::F32);
    let mut out = [0.0; 16];
    add(&Kernels::best(), &Pool::new(1).unwrap(), &[0.0; 33], 33, &[(0..1, &adapter)], &mut out, 16);
}
