//! The bytes of packed matrices, which files store.

use penstock_kernels::{MatrixLayout, PACKED_LAYOUT, is_supported};
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

#[test]
fn changed_packed_bytes_change_the_layout_name() {
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
    let mut state = 0xcbf2_9ce4_8422_2325;
    for format in formats {
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
