//! Products of grid matrices: against dequantised weights, and deterministic.

use penstock_kernels::{Kernels, Matrix, MatrixLayout, Operand, Pool, Rows, reference};
use penstock_types::{
    Activations, CodeBits, Dtype, Epilogue, Grid, GridRows, Minimum, ScaleFormat, WeightFormat,
};
use proptest::prelude::*;

use crate::common::*;

/// Every kind of grid: the formats of GGUF files, of AWQ and GPTQ, and our own.
fn grids() -> Vec<Grid> {
    use CodeBits::{Eight, Five, Four, Six};
    use Minimum::{Centred, Stored, ZeroPoint};
    use ScaleFormat::{Bf16, F16, F32, Nested};
    let grid =
        |bits, group, scales, minimum| Grid { bits, group, scales, minimum, activations: Activations::Int8 };
    vec![
        grid(Four, Some(32), F16, Centred),
        grid(Four, Some(32), F16, Stored),
        grid(Four, Some(32), Nested, Stored),
        grid(Four, Some(64), Bf16, Centred),
        grid(Four, Some(128), F16, ZeroPoint),
        grid(Four, Some(32), F32, ZeroPoint),
        grid(Four, None, F32, Centred),
        grid(Five, Some(32), F16, Centred),
        grid(Five, Some(32), Nested, Stored),
        grid(Six, Some(16), Nested, Centred),
        grid(Eight, Some(32), F16, Centred),
        grid(Eight, Some(128), Bf16, Centred),
        grid(Eight, Some(256), F16, ZeroPoint),
        grid(Eight, None, F32, Centred),
        grid(Eight, None, Bf16, Stored),
    ]
}

/// Floating-point codes, which have no products of integers.
fn float_grids() -> Vec<Grid> {
    let grid = |group, scales| Grid {
        bits: CodeBits::E4m3,
        group,
        scales,
        minimum: Minimum::Centred,
        activations: Activations::Float,
    };
    vec![
        grid(None, ScaleFormat::F32),
        grid(Some(128), ScaleFormat::F32),
        grid(Some(32), ScaleFormat::Bf16),
        grid(Some(64), ScaleFormat::F16),
    ]
}

fn with_floats(grid: Grid) -> Grid {
    Grid { activations: Activations::Float, ..grid }
}

/// Rows of random codes, with scales that the grid stores exactly.
fn random_rows(grid: &Grid, rows: usize, columns: usize, seed: u64) -> GridRows {
    let mut source = GridRows::new(grid, rows, columns);
    let levels = (1 << grid.bits.count()) as f32;
    for (code, random) in source.codes.iter_mut().zip(random_floats(seed, rows * columns)) {
        *code = ((random + 1.0) / 2.0 * levels) as u8;
        if grid.bits == CodeBits::E4m3 && *code & 0x7f == 0x7f {
            *code ^= 1; // not NaN
        }
    }
    let fill = |numbers: &mut Vec<f32>, seed, round: &dyn Fn(f32) -> f32| {
        let random = random_floats(seed, numbers.len());
        numbers.iter_mut().zip(random).for_each(|(number, random)| *number = round(random));
    };
    let scale: &dyn Fn(f32) -> f32 = match grid.scales {
        ScaleFormat::F32 => &|x| x,
        ScaleFormat::F16 => &|x| Dtype::F16.round(x),
        ScaleFormat::Bf16 => &|x| Dtype::Bf16.round(x),
        ScaleFormat::Nested => &|x| (x * 127.0).round() + 0.0,
    };
    fill(&mut source.scales, seed + 1, scale);
    match grid.minimum {
        Minimum::ZeroPoint => fill(&mut source.minima, seed + 2, &|x| ((x + 1.0) / 2.0 * levels).floor()),
        _ => fill(&mut source.minima, seed + 2, scale),
    }
    fill(&mut source.outer_scales, seed + 3, &|x| Dtype::F16.round(x / 127.0));
    fill(&mut source.outer_minima, seed + 4, &|x| Dtype::F16.round(x / 127.0));
    source
}

/// Packed random rows and their weights.
struct Case {
    layout: MatrixLayout,
    bytes: Vec<u8>,
    weights: Vec<f32>,
}

impl Case {
    fn new(grid: Grid, rows: usize, columns: usize, seed: u64) -> Self {
        let source = random_rows(&grid, rows, columns, seed);
        Self::from_rows(grid, rows, columns, &source)
    }

    fn from_rows(grid: Grid, rows: usize, columns: usize, source: &GridRows) -> Self {
        let layout = MatrixLayout { rows, columns, format: WeightFormat::Grid(grid) };
        let mut bytes = vec![0xff; layout.bytes()];
        for (panel, out) in bytes.chunks_exact_mut(layout.panel_bytes()).enumerate() {
            let range = layout.panel_rows(panel);
            let part = |numbers: &[f32], width: usize| {
                if numbers.is_empty() {
                    vec![]
                } else {
                    numbers[range.start * width..range.end * width].to_vec()
                }
            };
            let (groups, outer) = (grid.groups(columns), grid.outer_groups(columns));
            let rows = GridRows {
                codes: source.codes[range.start * columns..range.end * columns].to_vec(),
                scales: part(&source.scales, groups),
                minima: part(&source.minima, groups),
                outer_scales: part(&source.outer_scales, outer),
                outer_minima: part(&source.outer_minima, outer),
            };
            layout.pack_grid_panel(panel, &rows, out);
        }
        let width = grid.group.map_or(columns, usize::from);
        let mut weights = Vec::new();
        for row in 0..rows {
            for k in 0..columns {
                let (scale, minimum) = source.scale_and_minimum(&grid, columns, row, k / width);
                let code = grid.bits.value(source.codes[row * columns + k]);
                weights.push(match grid.minimum {
                    Minimum::Stored => scale * code + minimum,
                    Minimum::Centred => scale * (code - grid.bits.centre() as f32),
                    Minimum::ZeroPoint => {
                        scale * (code - source.minima[row * grid.groups(columns) + k / width])
                    }
                });
            }
        }
        Self { layout, bytes, weights }
    }

    fn matrix(&self) -> Matrix<'_> {
        Matrix { layout: self.layout, bytes: &self.bytes }
    }

    fn product(&self, kernels: &Kernels, pool: &Pool, x: &[f32]) -> Vec<f32> {
        let MatrixLayout { rows, columns, format } = self.layout;
        let tokens = x.len() / columns;
        let mut out = vec![f32::NAN; tokens * rows];
        let mut codes = Vec::new();
        let x = match kernels.operand_layout([format].into_iter(), columns) {
            None => Operand::Floats(x),
            Some(layout) => {
                codes.resize(tokens * layout.row_bytes(), 0xff);
                kernels.quantise(pool, Rows::dense(x, columns), &layout, &mut codes);
                Operand::Codes(&codes)
            }
        };
        kernels.matmul(pool, x, tokens, &[self.matrix()], Epilogue::Store, &mut out);
        out
    }
}

/// The activations as the product rounds them.
fn rounded(grid: &Grid, x: &[f32], columns: usize) -> Vec<f32> {
    let width = grid.group.map_or(columns, |group| usize::from(group).max(32));
    x.chunks(columns)
        .flat_map(|row| row.chunks(width))
        .flat_map(|span| {
            let largest = span.iter().fold(0.0_f32, |largest, x| largest.max(x.abs()));
            let (factor, scale) =
                if largest < 1e-30 { (0.0, 0.0) } else { (127.0 / largest, largest / 127.0) };
            span.iter().map(move |x| (x * factor).round_ties_even() * scale).collect::<Vec<_>>()
        })
        .collect()
}

#[test]
fn stored_row_reads_back_as_its_values() {
    for grid in grids().into_iter().chain(float_grids()) {
        for (rows, columns) in [(5, 256), (37, 512), (16, 768)] {
            let case = Case::new(grid, rows, columns, 3);
            let mut row = vec![f32::NAN; columns];
            for (index, want) in case.weights.chunks_exact(columns).enumerate() {
                case.matrix().read_row(index, &mut row);
                assert_same_bits(&row, want, &format!("{grid:?}"));
            }
        }
    }
}

fn check(grid: Grid, tokens: usize, rows: usize, columns: usize, seed: u64) {
    let pool = Pool::new(2).unwrap();
    let x = random_floats(seed + 9, tokens * columns);
    let case = Case::new(grid, rows, columns, seed);
    let exact = reference::matmul(&x, &case.weights, columns);
    let floats = Case {
        layout: MatrixLayout { format: WeightFormat::Grid(with_floats(grid)), ..case.layout },
        ..Case::new(grid, rows, columns, seed)
    };
    let f32_layout = MatrixLayout { format: Dtype::F32.into(), ..case.layout };
    let f32_bytes = pack(f32_layout, &case.weights);
    // Weights are below 32 (448 in floating-point codes), sums of n of them below sqrt(n) times that.
    let largest = if grid.bits == CodeBits::E4m3 { 448.0 } else { 32.0 };
    let tolerance = 1e-6 * largest * (columns as f32).max(8.0);
    for kernels in all_kernels() {
        let what = format!("{tokens} x {rows} x {columns} {grid:?} on {kernels:?}");
        if grid.activations == Activations::Int8 {
            let want = reference::matmul(&rounded(&grid, &x, columns), &case.weights, columns);
            assert_close(&case.product(&kernels, &pool, &x), &want, tolerance, &what);
        }
        let got = floats.product(&kernels, &pool, &x);
        assert_close(&got, &exact, tolerance, &what);
        let mut want = vec![0.0; tokens * rows];
        let matrix = Matrix { layout: f32_layout, bytes: &f32_bytes };
        kernels.matmul(&pool, Operand::Floats(&x), tokens, &[matrix], Epilogue::Store, &mut want);
        assert_same_bits(&got, &want, &format!("as float32: {what}"));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn product_matches_the_dequantised_weights(
        tokens in 1usize..20, rows in 1usize..70, columns in 1usize..600,
        grid in prop::sample::select([grids(), float_grids()].concat()), seed in 0u64..1000,
    ) {
        check(grid, tokens, rows, columns, seed);
    }
}

#[test]
fn large_products_match_the_dequantised_weights() {
    for grid in [grids(), float_grids()].concat() {
        check(grid, 3, 40, 2500, 1);
        check(grid, 1, 300, 1056, 2);
        check(grid, 103, 33, 1025, 3);
        // Groups and blocks that the end of the row cuts short.
        check(grid, 7, 17, 48, 4);
        check(grid, 2, 17, 1072, 5);
    }
}

#[test]
fn token_has_the_same_bits_in_any_batch_and_thread_count() {
    let pools: Vec<Pool> = (1..=3).map(|threads| Pool::new(threads).unwrap()).collect();
    let both = grids().into_iter().flat_map(|grid| [grid, with_floats(grid)]);
    for grid in both.chain(float_grids()) {
        let (rows, columns) = (75, 1184);
        let case = Case::new(grid, rows, columns, 7);
        let x = random_floats(8, 40 * columns);
        for kernels in all_kernels() {
            let alone: Vec<f32> =
                x.chunks_exact(columns).flat_map(|x| case.product(&kernels, &pools[0], x)).collect();
            for tokens in (1..=14).chain([29, 40]) {
                for first in [0, 40 - tokens] {
                    let x = &x[first * columns..(first + tokens) * columns];
                    let got = case.product(&kernels, &pools[tokens % 3], x);
                    let what = format!("{tokens} tokens from {first}, {grid:?}, {kernels:?}");
                    assert_same_bits(&got, &alone[first * rows..(first + tokens) * rows], &what);
                }
            }
        }
    }
}

#[test]
fn division_between_nodes_does_not_change_bits() {
    let cpus = penstock_kernels::allowed_cpus().unwrap_or_else(|_| vec![0]);
    let ends = [cpus[0], cpus[cpus.len() - 1]].map(|cpu| vec![cpu]);
    let whole = Pool::new(1).unwrap();
    let divided = [(2, 2), (4, 2), (3, 3)].map(|(threads, nodes)| {
        Pool::on_nodes(threads, (0..nodes).map(|node| ends[node % 2].clone()).collect()).unwrap()
    });
    let kernels = Kernels::best();
    let (rows, columns) = (313, 256);
    let x = random_floats(8, 64 * columns);
    let mut cases: Vec<_> = grids()
        .into_iter()
        .flat_map(|grid| [grid, with_floats(grid)])
        .chain(float_grids())
        .map(|grid| Case::new(grid, rows, columns, 7))
        .collect();
    for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
        let layout = MatrixLayout { rows, columns, format: dtype.into() };
        let weights = random_stored(3, rows * columns, dtype);
        cases.push(Case { layout, bytes: pack(layout, &weights), weights });
    }
    for case in &cases {
        for tokens in 1..=64 {
            let x = &x[..tokens * columns];
            let want = case.product(&kernels, &whole, x);
            let got = case.product(&kernels, &divided[tokens % 3], x);
            assert_same_bits(&got, &want, &format!("{tokens} tokens, {:?}", case.layout));
        }
    }
}

#[test]
fn integer_products_have_equal_bits_on_every_fused_isa() {
    let pool = Pool::new(2).unwrap();
    for grid in grids() {
        let case = Case::new(grid, 50, 1184, 5);
        let x = random_floats(6, 7 * 1184);
        let mut results = all_kernels().filter(is_fused).map(|kernels| case.product(&kernels, &pool, &x));
        if let Some(first) = results.next() {
            results.for_each(|result| assert_same_bits(&result, &first, &format!("{grid:?}")));
        }
    }
}

#[test]
fn largest_codes_and_activations_do_not_overflow() {
    let pool = Pool::new(1).unwrap();
    for grid in grids() {
        let (rows, columns) = (16, 2048);
        let mut source = GridRows::new(&grid, rows, columns);
        source.codes.fill(((1 << grid.bits.count()) - 1) as u8);
        source.scales.fill(1.0);
        source.outer_scales.fill(1.0);
        let case = Case::from_rows(grid, rows, columns, &source);
        for sign in [1.0, -1.0] {
            let x = vec![sign; 6 * columns];
            let want = sign * columns as f32 * case.weights[0];
            for kernels in all_kernels() {
                let got = case.product(&kernels, &pool, &x);
                assert_close(&got, &vec![want; 6 * rows], 1e-5, &format!("{grid:?} {kernels:?}"));
            }
        }
    }
}

#[test]
fn value_that_is_not_finite_makes_its_token_nan_and_no_other() {
    let pool = Pool::new(1).unwrap();
    for grid in grids() {
        let case = Case::new(grid, 5, 96, 1);
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = random_floats(2, 3 * 96);
            x[96 + 40] = value;
            for kernels in all_kernels() {
                let out = case.product(&kernels, &pool, &x);
                assert!(out[..5].iter().chain(&out[10..]).all(|v| v.is_finite()), "{grid:?} {out:?}");
                assert!(out[5..10].iter().all(|v| v.is_nan()), "{grid:?} {kernels:?} {out:?}");
            }
        }
    }
}

#[test]
fn tiny_and_zero_activations_give_zeros() {
    let pool = Pool::new(1).unwrap();
    for grid in grids() {
        let case = Case::new(grid, 5, 96, 1);
        for value in [0.0, -0.0, 1e-42, f32::MIN_POSITIVE] {
            for kernels in all_kernels() {
                let out = case.product(&kernels, &pool, &[value; 96]);
                assert!(out.iter().all(|v| *v == 0.0), "{value} {grid:?} {out:?}");
            }
        }
    }
}

#[test]
fn parts_of_a_matrix_are_one_below_the_other() {
    let pool = Pool::new(2).unwrap();
    let nested = |bits, group, minimum| Grid {
        bits,
        group: Some(group),
        scales: ScaleFormat::Nested,
        minimum,
        activations: Activations::Int8,
    };
    // As in a file that has the values in a larger format.
    let formats = [
        nested(CodeBits::Four, 32, Minimum::Stored),
        nested(CodeBits::Six, 16, Minimum::Centred),
        Grid { scales: ScaleFormat::F16, ..nested(CodeBits::Eight, 32, Minimum::Centred) },
    ];
    let columns = 512;
    let cases = [(40, 1), (9, 2), (33, 3)].map(|(rows, seed)| (rows, seed));
    let cases: Vec<Case> =
        formats.iter().zip(cases).map(|(grid, (rows, seed))| Case::new(*grid, rows, columns, seed)).collect();
    let matrices: Vec<Matrix<'_>> = cases.iter().map(Case::matrix).collect();
    for tokens in [1, 5, 40] {
        let x = random_floats(4, tokens * columns);
        for kernels in all_kernels() {
            let layout = kernels.operand_layout(matrices.iter().map(|m| m.layout.format), columns).unwrap();
            let mut codes = vec![0; tokens * layout.row_bytes()];
            kernels.quantise(&pool, Rows::dense(&x, columns), &layout, &mut codes);
            let (bias, mut out) = (random_floats(5, 82), vec![f32::NAN; tokens * 82]);
            kernels.matmul(&pool, Operand::Codes(&codes), tokens, &matrices, Epilogue::Bias(&bias), &mut out);
            for (token, (out, x)) in out.chunks_exact(82).zip(x.chunks_exact(columns)).enumerate() {
                let want = cases.iter().flat_map(|case| case.product(&kernels, &pool, x)).zip(&bias);
                let want: Vec<f32> = want.map(|(value, bias)| value + bias).collect();
                assert_same_bits(out, &want, &format!("token {token} of {tokens} on {kernels:?}"));
            }
        }
    }
}

#[test]
fn weight_that_is_not_finite_makes_its_group_nan() {
    for (bits, minimum) in [(CodeBits::Eight, Minimum::Centred), (CodeBits::Four, Minimum::Stored)] {
        let (scales, activations) = (ScaleFormat::Bf16, Activations::Int8);
        let grid = Grid { bits, group: Some(32), scales, minimum, activations };
        let layout = MatrixLayout { rows: 1, columns: 64, format: WeightFormat::Grid(grid) };
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut weights = random_floats(1, 64);
            weights[5] = value;
            let mut row = vec![0.0; 64];
            Matrix { layout, bytes: &pack(layout, &weights) }.read_row(0, &mut row);
            assert!(row[..32].iter().all(|weight| weight.is_nan()), "{value}: {row:?}");
            assert!(row[32..].iter().all(|weight| weight.is_finite()), "{value}: {row:?}");
        }
    }
}

#[test]
fn nan_code_makes_the_products_of_its_row_nan() {
    let pool = Pool::new(1).unwrap();
    for grid in float_grids() {
        for code in [0x7f, 0xff] {
            let mut source = random_rows(&grid, 3, 150, 1);
            source.codes[150 + 140] = code;
            let case = Case::from_rows(grid, 3, 150, &source);
            for kernels in all_kernels() {
                for tokens in [1, 40] {
                    let out = case.product(&kernels, &pool, &random_floats(2, tokens * 150));
                    for out in out.chunks_exact(3) {
                        assert!(out[0].is_finite() && out[1].is_nan() && out[2].is_finite(), "{out:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn floating_point_codes_keep_three_bits_of_mantissa() {
    for grid in float_grids() {
        let layout = MatrixLayout { rows: 9, columns: 200, format: WeightFormat::Grid(grid) };
        let mut weights = random_floats(3, 9 * 200);
        weights[..200].fill(0.0);
        weights[200 + 7] = 1e9;
        weights[400 + 7] = f32::NAN;
        let bytes = pack(layout, &weights);
        let mut row = vec![0.0; 200];
        for (index, want) in weights.chunks_exact(200).enumerate() {
            Matrix { layout, bytes: &bytes }.read_row(index, &mut row);
            for (k, (got, want)) in row.iter().zip(want).enumerate() {
                match index {
                    0 => assert_eq!(*got, 0.0),
                    1 | 2 if k == 7 => assert!(got.is_nan(), "{got}"),
                    1 | 2 => {}
                    // Half a step, and the rounding of the scale.
                    _ => assert!((got - want).abs() <= want.abs() / 14.0 + 1e-5, "{grid:?} {got} {want}"),
                }
            }
        }
    }
}

#[test]
fn quantised_weights_are_within_half_a_step() {
    for grid in [
        Grid {
            bits: CodeBits::Eight,
            group: None,
            scales: ScaleFormat::F32,
            minimum: Minimum::Centred,
            activations: Activations::Int8,
        },
        Grid {
            bits: CodeBits::Eight,
            group: Some(128),
            scales: ScaleFormat::Bf16,
            minimum: Minimum::Centred,
            activations: Activations::Int8,
        },
        Grid {
            bits: CodeBits::Four,
            group: Some(32),
            scales: ScaleFormat::Bf16,
            minimum: Minimum::Centred,
            activations: Activations::Int8,
        },
        Grid {
            bits: CodeBits::Four,
            group: Some(64),
            scales: ScaleFormat::F16,
            minimum: Minimum::Stored,
            activations: Activations::Int8,
        },
    ] {
        let (rows, columns) = (20, 256);
        let layout = MatrixLayout { rows, columns, format: WeightFormat::Grid(grid) };
        let mut weights = random_floats(3, rows * columns);
        weights[..columns].fill(0.0);
        let bytes = pack(layout, &weights);
        let mut row = vec![0.0; columns];
        let step = if grid.bits == CodeBits::Eight { 1.0 / 127.0 } else { 1.0 / 7.5 };
        for (index, want) in weights.chunks_exact(columns).enumerate() {
            Matrix { layout, bytes: &bytes }.read_row(index, &mut row);
            let squares: f32 = row.iter().zip(want).map(|(a, b)| (a - b).powi(2)).sum();
            let error = (squares / columns as f32).sqrt();
            // Uniform rounding has a root mean square of step / sqrt(12).
            assert!(error <= step / 12.0_f32.sqrt() * 1.1, "{grid:?} row {index}: {error}");
            assert!(index > 0 || error == 0.0, "zeros are exact");
        }
    }
}
