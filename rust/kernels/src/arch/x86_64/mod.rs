//! The instruction sets of x86-64: a folder for each width of registers, a file for tiles.

pub(crate) mod amx;
pub(crate) mod avx2;
pub(crate) mod avx512;

#[cfg(test)]
mod tests {
    use penstock_types::{Activations, CodeBits, Epilogue, Grid, Minimum, ScaleFormat, WeightFormat};

    use super::amx;
    use crate::{Isa, Kernels, Matrix, MatrixLayout, Operand, Pool, Rows, is_supported};

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

    /// Runs on CPUs with VNNI of AVX-512, too: unit tests use its encoding of the same instruction there.
    #[test]
    fn avx_vnni_products_have_the_bits_of_avx2() {
        let has_instruction = Isa::AvxVnni.is_available() || Isa::Avx512Vnni.is_available();
        let Some(avx2) = Kernels::for_isa(Isa::Avx2).filter(|_| has_instruction) else { return };
        let shapes = [[1, 40, 1100], [3, 17, 96], [6, 16, 32], [9, 70, 320]];
        check(&Kernels::new_unchecked(Isa::AvxVnni), &avx2, &shapes);
    }

    #[test]
    fn emulated_amx_products_have_the_bits_of_vnni() {
        let Some(vnni) = Kernels::for_isa(Isa::Avx512Vnni) else { return };
        let shapes = [[3, 20, 64], [7, 40, 1100], [16, 17, 96], [17, 16, 32], [40, 70, 2080]];
        check(&Kernels::with_table(Isa::Amx, &amx::EMULATED), &vnni, &shapes);
    }
}
