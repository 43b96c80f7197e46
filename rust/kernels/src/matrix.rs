//! Weight matrices as panels of 16 output rows.
//!
//! ```text
//! matrix  [rows / 16] panels, the last one padded with zero rows
//! panel   16 lanes are output rows, `columns` steps; `panel` defines the order inside
//! ```
//!
//! Because lanes are output rows, products of one token and of a thousand tokens add in the same order, and a
//! matrix-vector product reads memory sequentially. A matrix is packed once, when it is loaded.

use std::ops::Range;

use penstock_types::{GridRows, WeightFormat};

use crate::grid::GridLayout;
use crate::panel::{LANES, panel_bytes, panel_index, read_float, write_floats};
use crate::pool::{Claims, Pool, SharedMut};
use crate::weight_quantiser::quantise;

/// The name of the layout of packed matrices, which is stored in files. A change of the bytes of any matrix changes it.
pub const PACKED_LAYOUT: &str = "panels16-1";
/// Rows of a panel. A matrix of a multiple of these rows followed by another matrix of the same format is the matrix of
/// all rows.
pub const PANEL_ROWS: usize = LANES;

/// The number of weights that are packed in one turn on a pool: some milliseconds, as a step of a model.
const WEIGHTS_OF_TURN: usize = 1 << 22;

/// The shape of a packed weight matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatrixLayout {
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub columns: usize,
    pub format: WeightFormat,
}

impl MatrixLayout {
    /// Panels of 16 rows; the last one may be partly empty.
    pub fn panels(&self) -> usize {
        self.rows.div_ceil(LANES)
    }

    /// Bytes of one panel; a multiple of 64.
    pub fn panel_bytes(&self) -> usize {
        match self.format {
            WeightFormat::Float(dtype) => panel_bytes(dtype, self.columns),
            WeightFormat::Grid(grid) => GridLayout::new(grid, self.columns).bytes,
        }
    }

    /// Bytes of the whole matrix.
    ///
    /// # Panics
    /// If that does not fit the address space.
    pub fn bytes(&self) -> usize {
        // More than the bytes of any format, so that those of a panel do not overflow.
        let most = self.columns.checked_mul(LANES * 16).and_then(|bytes| bytes.checked_add(1 << 20));
        most.and_then(|_| self.panel_bytes().checked_mul(self.panels()))
            .filter(|bytes| isize::try_from(*bytes).is_ok())
            .unwrap_or_else(|| panic!("{self:?} does not fit the address space"))
    }

    /// The rows that panel `panel` holds.
    pub fn panel_rows(&self, panel: usize) -> Range<usize> {
        panel * LANES..self.rows.min((panel + 1) * LANES)
    }

    /// Packs one panel, quantising the rows if the format is a grid: `rows` has its rows (16, fewer in the last panel)
    /// one after the other, `out` its [`panel_bytes`](Self::panel_bytes) bytes, all of which are written.
    pub fn pack_panel(&self, panel: usize, rows: &[f32], out: &mut [u8]) {
        assert!(panel < self.panels(), "panel {panel} of {self:?}");
        assert_eq!(
            rows.len(),
            self.panel_rows(panel).len() * self.columns,
            "rows of panel {panel} of {self:?}"
        );
        assert_eq!(out.len(), self.panel_bytes(), "bytes of panel {panel} of {self:?}");
        let lanes = self.panel_rows(panel).len();
        let dtype = match self.format {
            WeightFormat::Float(dtype) => dtype,
            WeightFormat::Grid(grid) => {
                let mut codes = GridRows::default();
                quantise(&grid, rows, self.columns, &mut codes);
                return self.pack_grid_panel(panel, &codes, out);
            }
        };
        out.fill(0);
        for k in 0..self.columns {
            write_floats(dtype, out, lanes, |dtype, lane| {
                (panel_index(dtype, k, lane), rows[lane * self.columns + k])
            });
        }
    }

    /// Packs one panel of a grid matrix: `rows` has its rows.
    pub fn pack_grid_panel(&self, panel: usize, rows: &GridRows, out: &mut [u8]) {
        let WeightFormat::Grid(grid) = self.format else { panic!("{self:?} is not a grid") };
        assert!(panel < self.panels(), "panel {panel} of {self:?}");
        assert_eq!(out.len(), self.panel_bytes(), "bytes of panel {panel} of {self:?}");
        out.fill(0);
        GridLayout::new(grid, self.columns).pack(rows, self.panel_rows(panel).len(), out);
    }

    /// Packs a whole matrix on `pool`, in turns with the other threads that use it; `read(rows, into)` writes the given
    /// rows as f32. For loading only: each worker allocates one panel.
    pub fn pack(&self, pool: &Pool, out: &mut [u8], read: impl Fn(Range<usize>, &mut [f32]) + Sync) {
        self.pack_panels(
            pool,
            out,
            || vec![0.0; LANES * self.columns],
            |rows, panel, range, bytes| {
                let rows = &mut rows[..range.len() * self.columns];
                read(range, rows);
                self.pack_panel(panel, rows, bytes);
            },
        );
    }

    /// Packs a whole grid matrix on `pool`; `read(rows, into)` writes the given rows. For loading only.
    pub fn pack_grid(&self, pool: &Pool, out: &mut [u8], read: impl Fn(Range<usize>, &mut GridRows) + Sync) {
        self.pack_panels(pool, out, GridRows::default, |rows, panel, range, bytes| {
            read(range, rows);
            self.pack_grid_panel(panel, rows, bytes);
        });
    }

    fn pack_panels<R>(
        &self,
        pool: &Pool,
        out: &mut [u8],
        buffer: impl Fn() -> R + Sync,
        pack: impl Fn(&mut R, usize, Range<usize>, &mut [u8]) + Sync,
    ) {
        assert_eq!(out.len(), self.bytes(), "bytes of {self:?}");
        let panel_bytes = self.panel_bytes();
        let out = SharedMut::new(out);
        let panels_of_turn = (WEIGHTS_OF_TURN / (LANES * self.columns.max(1))).max(pool.threads());
        for start in (0..self.panels()).step_by(panels_of_turn) {
            let _turn = pool.turn();
            let claims = Claims::new(panels_of_turn.min(self.panels() - start));
            pool.share(&|_| {
                let mut rows = buffer();
                while let Some(index) = claims.next() {
                    let panel = start + index;
                    // SAFETY: every panel is claimed once, and panels do not overlap.
                    let bytes = unsafe { out.slice(panel * panel_bytes, panel_bytes) };
                    pack(&mut rows, panel, self.panel_rows(panel), bytes);
                }
            });
        }
    }
}

/// A packed weight matrix. Alignment to 64 bytes is not required, but unaligned panels are slower to read.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    pub layout: MatrixLayout,
    /// The panels: [`MatrixLayout::bytes`] bytes.
    pub bytes: &'a [u8],
}

impl Matrix<'_> {
    /// Reads one row as f32; with tied embeddings the output head is also the embedding table.
    pub fn read_row(&self, row: usize, out: &mut [f32]) {
        let MatrixLayout { rows, columns, format } = self.layout;
        assert!(row < rows, "row {row} of {:?}", self.layout);
        assert_eq!(out.len(), columns, "a row of {:?}", self.layout);
        let panel_bytes = self.layout.panel_bytes();
        let panel = &self.bytes[row / LANES * panel_bytes..][..panel_bytes];
        match format {
            WeightFormat::Float(dtype) => {
                for (k, value) in out.iter_mut().enumerate() {
                    *value = read_float(dtype, panel, panel_index(dtype, k, row % LANES));
                }
            }
            WeightFormat::Grid(grid) => GridLayout::new(grid, columns).read_row(panel, row % LANES, out),
        }
    }

    /// Replaces `out` by rows `rows` of a grid matrix, as they were before they were packed.
    pub fn read_grid(&self, rows: Range<usize>, out: &mut GridRows) {
        let MatrixLayout { columns, format: WeightFormat::Grid(grid), .. } = self.layout else {
            panic!("{:?} is not a grid", self.layout)
        };
        assert!(rows.end <= self.layout.rows, "rows {rows:?} of {:?}", self.layout);
        let (layout, panel_bytes) = (GridLayout::new(grid, columns), self.layout.panel_bytes());
        out.resize(&grid, rows.len(), columns);
        for (index, row) in rows.enumerate() {
            let panel = &self.bytes[row / LANES * panel_bytes..][..panel_bytes];
            layout.unpack(panel, row % LANES, index, out);
        }
    }
}
