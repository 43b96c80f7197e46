//! The bytes of packed matrices, which files store.

use std::ops::Range;

use penstock_kernels::{Matrix, MatrixLayout, PACKED_LAYOUT, Pool, is_supported};
use penstock_types::{Activations, CodeBits, Dtype, Grid, GridRows, Minimum, ScaleFormat, WeightFormat};

/// FNV-1a.
fn hash(bytes: &[u8], mut state: u64) -> u64 {
    for byte in bytes {
        state = (state ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    }
    state
}

/// A small integer that every format holds exactly.
fn value(index: usize) -> f32 {
    (index * 7919 % 113) as f32
}

fn rows_of(grid: &Grid, rows: usize, columns: usize) -> GridRows {
    let mut new = GridRows::new(grid, rows, columns);
    let most = ((1 << grid.bits.count()) - 1) as u8;
    new.codes.iter_mut().enumerate().for_each(|(index, code)| *code = (index * 7919 % 251) as u8 & most);
    for (at, values) in [&mut new.scales, &mut new.minima, &mut new.outer_scales, &mut new.outer_minima]
        .into_iter()
        .enumerate()
    {
        values.iter_mut().enumerate().for_each(|(index, number)| *number = value(index + at));
    }
    new
}

/// All supported formats.
fn formats() -> Vec<WeightFormat> {
    let mut formats: Vec<WeightFormat> = Dtype::ALL.iter().map(|dtype| (*dtype).into()).collect();
    for bits in [CodeBits::Four, CodeBits::Five, CodeBits::Six, CodeBits::Eight, CodeBits::E4m3] {
        for group in [None, Some(16), Some(32), Some(128)] {
            for scales in [ScaleFormat::F32, ScaleFormat::F16, ScaleFormat::Bf16, ScaleFormat::Nested] {
                for minimum in [Minimum::Centred, Minimum::Stored, Minimum::ZeroPoint] {
                    let grid = Grid { bits, group, scales, minimum, activations: Activations::Float };
                    if is_supported(&grid) {
                        formats.push(WeightFormat::Grid(grid));
                    }
                }
            }
        }
    }
    formats
}

#[test]
fn changed_packed_bytes_change_the_layout_name() {
    let mut state = 0xcbf2_9ce4_8422_2325;
    for format in formats() {
        for (rows, columns) in [(16, 64), (21, 328)] {
            let layout = MatrixLayout { rows, columns, format };
            for panel in 0..layout.panels() {
                let lanes = layout.panel_rows(panel);
                let mut bytes = vec![0; layout.panel_bytes()];
                match format {
                    WeightFormat::Float(_) => {
                        let values: Vec<f32> = (0..lanes.len() * columns).map(value).collect();
                        layout.pack_panel(panel, &values, &mut bytes);
                    }
                    WeightFormat::Grid(grid) => {
                        layout.pack_grid_panel(panel, &rows_of(&grid, lanes.len(), columns), &mut bytes);
                    }
                }
                state = hash(&bytes, state);
            }
        }
    }
    let expected = ("panels16-1", 17_402_189_498_961_183_285_u64);
    assert_eq!(
        (PACKED_LAYOUT, state),
        expected,
        "if the bytes have changed, files of the previous layout must be refused: give PACKED_LAYOUT a new number"
    );
}

#[test]
fn rows_of_packed_codes_are_those_that_were_packed() {
    let (rows, columns) = (37, 328);
    for format in formats() {
        let WeightFormat::Grid(grid) = format else { continue };
        let layout = MatrixLayout { rows, columns, format };
        let mut all = rows_of(&grid, rows, columns);
        // Scales of a group with a NaN are NaN, and numbers of 8 bits have a sign.
        all.codes.iter_mut().for_each(|code| *code = if *code & 0x7f == 0x7f { 1 } else { *code });
        let mut bytes = vec![0; layout.bytes()];
        layout.pack_grid(&Pool::new(1).expect("threads"), &mut bytes, |range, out| {
            *out = slice(&all, &grid, columns, range)
        });
        let matrix = Matrix { layout, bytes: &bytes };
        for range in [0..rows, 5..6, 15..33] {
            let mut found = GridRows::default();
            matrix.read_grid(range.clone(), &mut found);
            assert_eq!(found, slice(&all, &grid, columns, range), "{grid:?}");
        }
    }
}

/// Some rows of a table of `columns` columns.
fn slice(rows: &GridRows, grid: &Grid, columns: usize, range: Range<usize>) -> GridRows {
    let (groups, outer) = (grid.groups(columns), grid.outer_groups(columns));
    let part = |values: &[f32], width: usize| {
        if values.is_empty() { Vec::new() } else { values[range.start * width..range.end * width].to_vec() }
    };
    GridRows {
        codes: rows.codes[range.start * columns..range.end * columns].to_vec(),
        scales: part(&rows.scales, groups),
        minima: part(&rows.minima, groups),
        outer_scales: part(&rows.outer_scales, outer),
        outer_minima: part(&rows.outer_minima, outer),
    }
}
