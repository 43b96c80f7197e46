//! The instruction sets of x86-64: a folder for each width of registers, a file for tiles.

pub(crate) mod amx;
pub(crate) mod avx2;
pub(crate) mod avx512;

#[cfg(test)]
mod tests {
    use penstock_types::{
        Activations, AttentionParams, AttentionRow, CodeBits, Epilogue, Grid, KvDtype, Minimum, ScaleFormat,
        WeightFormat,
    };

    use super::{amx, avx2};
    use crate::arch::Table;
    use crate::{Isa, Kernels, KvLayout, Matrix, MatrixLayout, Operand, Pool, Rows, RowsMut, is_supported};

    static AVX2: Table = avx2::TABLE.only_codes();
    static AVX_VNNI: Table = avx2::VNNI.only_codes();

    /// The kernels of AVX2, if this CPU has it.
    fn reference() -> Option<Kernels> {
        Isa::Avx2.is_available().then(|| Kernels::with_table(Isa::Avx2, &AVX2))
    }

    /// The kernels of AVX-VNNI, also on CPUs with VNNI of AVX-512: unit tests use its encoding of the same instruction.
    fn avx_vnni() -> Option<Kernels> {
        let is_available = Isa::AvxVnni.is_available() || Isa::Avx512Vnni.is_available();
        is_available.then(|| Kernels::with_table(Isa::AvxVnni, &AVX_VNNI))
    }

    /// `rows` products of `tokens` rows with a matrix of arbitrary bytes.
    fn product(kernels: &Kernels, grid: Grid, tokens: usize, rows: usize, columns: usize) -> Vec<u32> {
        let layout = MatrixLayout { rows, columns, format: WeightFormat::Grid(grid) };
        // Without the bit that makes a scale large or NaN.
        let bytes: Vec<u8> = (0..layout.bytes()).map(|i| ((i * i * 31 + i) >> 3) as u8 & 0xbf).collect();
        let x: Vec<f32> = (0..tokens * columns).map(|i| (i as f32 * 0.7).sin()).collect();
        let operand = kernels.operand_layout([layout.format].into_iter(), columns).expect("codes");
        let (mut codes, mut out) = (vec![0; tokens * operand.row_bytes()], vec![0.0; tokens * rows]);
        let pool = Pool::new(1).expect("a pool");
        kernels.quantise(&pool, Rows::dense(&x, columns), &operand, &mut codes);
        let matrix = Matrix { layout, bytes: &bytes };
        kernels.matmul(&pool, Operand::Codes(&codes), tokens, &[matrix], Epilogue::Store, &mut out);
        assert!(out.iter().all(|value| value.is_finite()), "{grid:?}");
        out.into_iter().map(f32::to_bits).collect()
    }

    /// Products of every kind of grid have the same bits.
    fn check(got: &Kernels, want: &Kernels, shapes: &[[usize; 3]]) {
        let grid = |bits, group, scales, minimum| Grid {
            bits,
            group: Some(group),
            scales,
            minimum,
            activations: Activations::Int8,
        };
        let mut grids = vec![grid(CodeBits::Six, 16, ScaleFormat::Nested, Minimum::Centred)];
        for bits in [CodeBits::Four, CodeBits::Five, CodeBits::Six, CodeBits::Eight] {
            for minimum in [Minimum::Centred, Minimum::Stored] {
                grids.extend([32, 128].map(|group| grid(bits, group, ScaleFormat::F16, minimum)));
            }
        }
        for grid in grids.into_iter().filter(is_supported) {
            for [tokens, rows, columns] in shapes.iter().copied() {
                let of = |kernels| product(kernels, grid, tokens, rows, columns);
                assert_eq!(of(got), of(want), "{grid:?} {tokens} {rows} {columns}");
            }
        }
    }

    #[test]
    fn avx_vnni_products_have_the_bits_of_avx2() {
        let (Some(vnni), Some(avx2)) = (avx_vnni(), reference()) else { return };
        check(&vnni, &avx2, &[[1, 40, 1100], [3, 17, 96], [6, 16, 32], [9, 70, 320]]);
    }

    /// Attention of the last `queries` of 40 positions.
    fn attention(kernels: &Kernels, dtype: KvDtype, queries: usize) -> Vec<u32> {
        const POSITIONS: usize = 40;
        let layout = KvLayout { block_size: 16, kv_heads: 2, head_dim: 40, dtype };
        let (width, heads) = (layout.kv_heads * layout.head_dim, 7 * layout.kv_heads);
        let floats = |count: usize| (0..count).map(|i| (i as f32 * 0.7).sin()).collect::<Vec<f32>>();
        let mut cache = vec![0; 3 * layout.block_bytes()];
        let kv = floats(2 * POSITIONS * width);
        for (position, kv) in kv.chunks_exact(2 * width).enumerate() {
            let (k, v) = kv.split_at(width);
            layout.write(&mut cache, (position / 16) as u32, position % 16, k, v);
        }
        let row =
            AttentionRow { first_query: 0, num_queries: queries, start: POSITIONS - queries, blocks: 0..3 };
        let q = floats(queries * heads * layout.head_dim);
        let mut out = vec![0.0; q.len()];
        kernels.attention(
            &Pool::new(1).expect("a pool"),
            &layout,
            &cache,
            &[row],
            &[0, 1, 2],
            Rows::dense(&q, heads * layout.head_dim),
            heads,
            AttentionParams { scale: 0.2, window: None, softcap: None },
            &mut [],
            RowsMut::dense(&mut out, heads * layout.head_dim),
            None,
        );
        assert!(out.iter().all(|value| value.is_finite()), "{dtype:?}");
        out.into_iter().map(f32::to_bits).collect()
    }

    #[test]
    fn avx_vnni_attention_has_the_bits_of_avx2() {
        let (Some(vnni), Some(avx2)) = (avx_vnni(), reference()) else { return };
        for dtype in [KvDtype::Int8, KvDtype::Uint4] {
            for queries in [1, 5] {
                assert_eq!(
                    attention(&vnni, dtype, queries),
                    attention(&avx2, dtype, queries),
                    "{dtype:?} {queries}"
                );
            }
        }
    }

    #[test]
    fn emulated_amx_products_have_the_bits_of_avx2() {
        let Some(avx2) = reference().filter(|_| Isa::Avx512Vnni.is_available()) else { return };
        let shapes = [[3, 20, 64], [7, 40, 1100], [16, 17, 96], [17, 16, 32], [40, 70, 2080]];
        check(&Kernels::with_table(Isa::Amx, &amx::EMULATED), &avx2, &shapes);
    }
}
