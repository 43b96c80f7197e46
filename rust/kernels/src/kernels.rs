//! The safe interface: the kernel table of one instruction set, with checked slices.
//!
//! Every method checks the shapes (a mismatch is a bug of the caller and panics with the numbers), divides the work
//! over the pool, and calls the table. The division does not affect the result: see the determinism contract in the
//! crate's documentation.

use std::fmt;
use std::mem::MaybeUninit;
use std::ops::Range;

use penstock_types::{Epilogue, WeightFormat};

use crate::arch::{self, Table};
use crate::generic::grid::{GridProduct, floats::GridFloatProduct};
use crate::generic::matmul::{Output, Product, block_tiles, share_tiles};
use crate::generic::row_ops::Activation;
use crate::generic::tile::RowTiles;
use crate::grid::{GridLayout, is_supported};
use crate::isa::{Isa, IsaError};
use crate::kv::KvLayout;
use crate::matrix::Matrix;
use crate::operand::{Operand, OperandLayout};
use crate::pool::{PanelClaims, Pool, SharedMut};
use crate::rows::{Rows, RowsMut};

/// The kernels of one instruction set. It has no state and is cheap to copy.
#[derive(Clone, Copy)]
pub struct Kernels {
    isa: Isa,
    pub(crate) table: &'static Table,
}

impl fmt::Debug for Kernels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Kernels({})", self.isa)
    }
}

/// The least number of floats per worker for which a row operation is divided; a smaller share costs less than a
/// barrier.
const ROW_SHARE: usize = 4096;

impl Kernels {
    /// The kernels of the preferred instruction set of this CPU.
    pub fn best() -> Kernels {
        Self::new_unchecked(Isa::best())
    }

    /// The kernels of `isa`, if this CPU has it.
    pub fn for_isa(isa: Isa) -> Option<Kernels> {
        isa.is_available().then(|| Self::new_unchecked(isa))
    }

    /// The kernels of the instruction set of this name ([`Isa::name`]); the best if it is empty.
    pub fn from_name(isa: &str) -> Result<Kernels, IsaError> {
        Isa::from_name(isa).map(Self::new_unchecked)
    }

    /// `isa` must be available.
    pub(crate) fn new_unchecked(isa: Isa) -> Kernels {
        Kernels { isa, table: arch::table(isa) }
    }

    /// The kernels of another table than that of `isa`.
    #[cfg(all(test, target_arch = "x86_64"))]
    pub(crate) fn with_table(isa: Isa, table: &'static Table) -> Kernels {
        Kernels { isa, table }
    }

    /// The instruction set of this table.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// The layout of the rows that a product with matrices of these formats reads; `None` if they are float32.
    ///
    /// # Panics
    /// If some formats read codes and some read floats.
    pub fn operand_layout(
        &self,
        formats: impl Iterator<Item = WeightFormat> + Clone,
        columns: usize,
    ) -> Option<OperandLayout> {
        let layout = OperandLayout::new(formats.clone(), columns, |grid| {
            self.table.grid_kernels.of(grid.bits).is_wide
        });
        assert!(
            layout.is_some() || !formats.clone().any(WeightFormat::reads_codes),
            "a matrix of codes beside one of floats; this is a bug"
        );
        layout
    }

    /// `out[t][r] = sum over k of x[t][k] * matrix[r][k]`, then the epilogue.
    ///
    /// `matrices` are the parts of one matrix, one below the other. `x` is `[tokens, columns]`, in the form of
    /// [`operand_layout`](Self::operand_layout); `out` is `[tokens, rows]`. The headers of the kernels say in which order
    /// each sum is computed.
    pub fn matmul(
        &self,
        pool: &Pool,
        x: Operand<'_>,
        tokens: usize,
        matrices: &[Matrix<'_>],
        epilogue: Epilogue<&[f32]>,
        out: &mut [f32],
    ) {
        let columns = matrices.first().expect("a matrix").layout.columns;
        let stride = matrices.iter().map(|matrix| matrix.layout.rows).sum();
        let operand = self.operand_layout(matrices.iter().map(|matrix| matrix.layout.format), columns);
        assert!(columns > 0, "{matrices:?} have no columns");
        match (x, operand) {
            (Operand::Floats(x), None) => assert_eq!(x.len(), tokens * columns, "x of {tokens} tokens"),
            (Operand::Codes(x), Some(operand)) => {
                assert_eq!(x.len(), tokens * operand.row_bytes, "codes of {tokens} tokens");
                assert!(x.as_ptr().cast::<u32>().is_aligned(), "codes are aligned to 4 bytes");
            }
            _ => panic!("the rows have another form than the matrices read; this is a bug"),
        }
        assert_eq!(out.len(), tokens * stride, "out of {tokens} tokens");
        if let Epilogue::Bias(bias) | Epilogue::AddBias(bias) = epilogue {
            assert_eq!(bias.len(), stride, "bias");
        }
        for matrix in matrices {
            if let WeightFormat::Grid(grid) = &matrix.layout.format {
                assert!(is_supported(grid), "{grid:?}");
            }
            assert_eq!(matrix.layout.columns, columns, "columns of the parts of a matrix");
            assert_eq!(matrix.bytes.len(), matrix.layout.bytes(), "bytes of {:?}", matrix.layout);
        }
        let shapes = if operand.is_some() { self.table.grid_tiles } else { self.table.tiles };
        let tiles = RowTiles::new(tokens, shapes.max_rows());
        // The unit of work is (token block, panel), panels fastest: the activations of a block stay in L2.
        let blocks = RowTiles::new(tiles.count, block_tiles(shapes));
        let panels: usize = matrices.iter().map(|matrix| matrix.layout.panels()).sum();
        let claims = PanelClaims::new(pool, blocks.count, panels);
        let unit = if tiles.count == 1 { shapes.panels_at_once(tokens) } else { 1 };
        let limit = share_tiles(shapes) / tiles.count.clamp(1, block_tiles(shapes));
        let out = SharedMut::new(out);
        let run = |matrix: &Matrix<'_>, first_row: usize, panels: Range<usize>, tile_range: Range<usize>| {
            let layout = matrix.layout;
            let rows = first_row..first_row + layout.rows;
            let output = Output {
                rows: layout.rows,
                stride,
                epilogue: epilogue.map(|bias| &bias[rows.clone()]),
                out: out.as_ptr().wrapping_add(first_row),
            };
            let weights = matrix.bytes.as_ptr();
            // SAFETY: the table's instruction set is available; the pointers come from slices of the right lengths, which
            // are borrowed here; every (block, panel) is claimed once; shares are within limits.
            unsafe {
                match (layout.format, x, operand) {
                    (WeightFormat::Float(dtype), Operand::Floats(x), _) => {
                        let product = Product { x: x.as_ptr(), columns, tokens: tiles, weights, output };
                        (self.table.matmul.of(dtype))(&product, panels, tile_range);
                    }
                    (WeightFormat::Grid(grid), Operand::Floats(x), _) => {
                        let layout = GridLayout::new(grid, columns);
                        let multiply = self.table.multiply_decoded;
                        let product = GridFloatProduct {
                            x: x.as_ptr(),
                            tokens: tiles,
                            weights,
                            layout,
                            multiply,
                            output,
                        };
                        (self.table.grid_float_matmul.of(grid.bits))(&product, panels, tile_range);
                    }
                    (WeightFormat::Grid(grid), Operand::Codes(x), Some(operand)) => {
                        let (layout, kernel) =
                            (GridLayout::new(grid, columns), self.table.grid_kernels.of(grid.bits));
                        let product = GridProduct {
                            x: x.as_ptr(),
                            operand,
                            tokens: tiles,
                            weights,
                            layout,
                            kernel,
                            output,
                        };
                        (self.table.grid_matmul)(&product, panels, tile_range);
                    }
                    _ => unreachable!("checked above"),
                }
            }
        };
        pool.share(&|worker| {
            claims.for_each(worker, unit, limit, |mut share| {
                while share.count > 0 {
                    // The part of the share in one matrix.
                    let (mut panel, mut row, mut index) = (share.panel, 0, 0);
                    while panel >= matrices[index].layout.panels() {
                        panel -= matrices[index].layout.panels();
                        row += matrices[index].layout.rows;
                        index += 1;
                    }
                    let count = share.count.min(matrices[index].layout.panels() - panel);
                    run(&matrices[index], row, panel..panel + count, blocks.rows(share.block));
                    share.panel += count;
                    share.count -= count;
                }
            });
        });
    }

    /// Writes the rows of `x` in the form of `layout`.
    pub fn quantise(&self, pool: &Pool, x: Rows<'_>, layout: &OperandLayout, out: &mut [u8]) {
        assert_eq!(x.width(), layout.columns, "width of x");
        assert_eq!(out.len(), x.count() * layout.row_bytes, "bytes of the rows");
        let out = SharedMut::new(out);
        share_rows(pool, x.count(), x.width(), &|range| {
            for row in range {
                // SAFETY: the table's instruction set is available; each row is visited once.
                unsafe {
                    let to = out.slice(row * layout.row_bytes, layout.row_bytes);
                    (self.table.quantise_row)(layout, x.row(row).as_ptr(), to.as_mut_ptr());
                }
            }
        });
    }

    /// Quantises rows that `compute` writes, one at a time, to a buffer of the worker.
    fn quantise_rows(
        &self,
        pool: &Pool,
        count: usize,
        layout: &OperandLayout,
        out: &mut [u8],
        compute: &(dyn Fn(usize, *mut f32) + Sync),
    ) {
        assert!(layout.columns <= OperandLayout::MOST_COLUMNS, "{layout:?} is too wide");
        assert_eq!(out.len(), count * layout.row_bytes, "bytes of the rows");
        let out = SharedMut::new(out);
        share_rows(pool, count, layout.columns, &|range| {
            let mut floats = MaybeUninit::<[f32; OperandLayout::MOST_COLUMNS]>::uninit();
            let floats = floats.as_mut_ptr().cast::<f32>();
            for row in range {
                compute(row, floats);
                // SAFETY: the table's instruction set is available; each row is visited once, and has been computed.
                unsafe {
                    let to = out.slice(row * layout.row_bytes, layout.row_bytes);
                    (self.table.quantise_row)(layout, floats, to.as_mut_ptr());
                }
            }
        });
    }

    /// Root-mean-square norm of each row: `out = x / sqrt(mean(x^2) + eps) * weight`.
    pub fn rms_norm(&self, pool: &Pool, x: Rows<'_>, weight: &[f32], eps: f32, mut out: RowsMut<'_>) {
        assert_eq!(x.width(), weight.len(), "width of x and weight");
        assert_eq!((out.width(), out.count()), (x.width(), x.count()), "width and rows of out and x");
        let (width, stride, count) = (out.width(), out.stride(), out.count());
        let target = out.shared();
        share_rows(pool, count, width, &|range| {
            for row in range {
                // SAFETY: the table's instruction set is available; each row is visited once.
                unsafe {
                    let to = target.slice(row * stride, width);
                    (self.table.rms_norm)(x.row(row).as_ptr(), width, weight, eps, to.as_mut_ptr());
                }
            }
        });
    }

    /// [`rms_norm`](Self::rms_norm) of each row, in the form of `layout`.
    pub fn rms_norm_codes(
        &self,
        pool: &Pool,
        x: Rows<'_>,
        weight: &[f32],
        eps: f32,
        layout: &OperandLayout,
        out: &mut [u8],
    ) {
        assert_eq!((x.width(), layout.columns), (weight.len(), weight.len()), "width of x, weight and out");
        self.quantise_rows(pool, x.count(), layout, out, &|row, to| {
            // SAFETY: the table's instruction set is available; `to` has a row.
            unsafe { (self.table.rms_norm)(x.row(row).as_ptr(), x.width(), weight, eps, to) }
        });
    }

    /// [`rms_norm`](Self::rms_norm) in place of each group of `weight.len()` floats: each head of a row is normalised
    /// separately.
    pub fn rms_norm_in_place(&self, pool: &Pool, mut x: RowsMut<'_>, weight: &[f32], eps: f32) {
        let (width, stride, count) = (x.width(), x.stride(), x.count());
        assert!(
            !weight.is_empty() && width.is_multiple_of(weight.len()),
            "heads of {} in {width}",
            weight.len()
        );
        let target = x.shared();
        share_rows(pool, count, width, &|range| {
            for row in range {
                // SAFETY: the table's instruction set is available; each row is visited once, and read and written
                // through one pointer.
                unsafe {
                    let at = target.slice(row * stride, width).as_mut_ptr();
                    (self.table.rms_norm)(at, width, weight, eps, at);
                }
            }
        });
    }

    /// `out = silu(gate) * up`, where a row of `gate_up` is the gate followed by up.
    pub fn silu_mul(&self, pool: &Pool, gate_up: Rows<'_>, out: RowsMut<'_>) {
        self.gated(pool, Activation::Silu, gate_up, out);
    }

    /// `out = gelu(gate) * up` with the tanh approximation of gelu, where a row of `gate_up` is the gate followed by
    /// up.
    pub fn gelu_tanh_mul(&self, pool: &Pool, gate_up: Rows<'_>, out: RowsMut<'_>) {
        self.gated(pool, Activation::GeluTanh, gate_up, out);
    }

    /// [`silu_mul`](Self::silu_mul), in the form of `layout`.
    pub fn silu_mul_codes(&self, pool: &Pool, gate_up: Rows<'_>, layout: &OperandLayout, out: &mut [u8]) {
        let width = layout.columns;
        assert_eq!(gate_up.width(), 2 * width, "width of gate_up and twice that of out");
        self.quantise_rows(pool, gate_up.count(), layout, out, &|row, to| {
            // SAFETY: the table's instruction set is available; `to` has a row.
            unsafe { (self.table.gated)(Activation::Silu, gate_up.row(row).as_ptr(), width, to) }
        });
    }

    fn gated(&self, pool: &Pool, activation: Activation, gate_up: Rows<'_>, mut out: RowsMut<'_>) {
        assert_eq!(gate_up.width(), 2 * out.width(), "width of gate_up and twice that of out");
        assert_eq!(gate_up.count(), out.count(), "rows of gate_up and out");
        let (width, stride, count) = (out.width(), out.stride(), out.count());
        let target = out.shared();
        share_rows(pool, count, width, &|range| {
            for row in range {
                // SAFETY: the table's instruction set is available; each row is visited once.
                unsafe {
                    let to = target.slice(row * stride, width);
                    (self.table.gated)(activation, gate_up.row(row).as_ptr(), width, to.as_mut_ptr());
                }
            }
        });
    }

    /// Rotary embedding in the half-rotated order of Hugging Face: in every head, float i is rotated with float i +
    /// r/2, for i below r/2, where r/2 is the width of `cos` and `sin` (one row for each row of `x`). The floats of a
    /// head from r on do not change.
    pub fn rope(&self, pool: &Pool, mut x: RowsMut<'_>, head_dim: usize, cos: Rows<'_>, sin: Rows<'_>) {
        let (width, stride, count) = (x.width(), x.stride(), x.count());
        assert!(head_dim > 0 && width.is_multiple_of(head_dim), "heads of {head_dim} in rows of {width}");
        assert!(2 * cos.width() <= head_dim, "{} angles for heads of {head_dim}", cos.width());
        assert_eq!(cos.width(), sin.width(), "width of cos and sin");
        assert_eq!((cos.count(), sin.count()), (count, count), "rows of cos, sin and x");
        let target = x.shared();
        share_rows(pool, count, width, &|range| {
            for row in range {
                // SAFETY: the table's instruction set is available; each row is visited once.
                unsafe {
                    let at = target.slice(row * stride, width).as_mut_ptr();
                    (self.table.rope)(at, width, head_dim, cos.row(row), sin.row(row));
                }
            }
        });
    }

    /// `out[i] = x[rows[i]]`.
    pub fn gather(&self, pool: &Pool, x: Rows<'_>, rows: &[u32], mut out: RowsMut<'_>) {
        assert_eq!((out.width(), out.count()), (x.width(), rows.len()), "width and rows of out");
        let (width, stride) = (out.width(), out.stride());
        let target = out.shared();
        share_rows(pool, rows.len(), width, &|range| {
            for row in range {
                // SAFETY: each row of `out` is visited once.
                let to = unsafe { target.slice(row * stride, width) };
                to.copy_from_slice(x.row(rows[row] as usize));
            }
        });
    }

    /// `out[i] = matrix[row_of(i)]` as f32, for every row of `out`.
    pub fn read_rows(
        &self,
        pool: &Pool,
        matrix: Matrix<'_>,
        row_of: &(dyn Fn(usize) -> usize + Sync),
        mut out: RowsMut<'_>,
    ) {
        let (width, stride, count) = (out.width(), out.stride(), out.count());
        let target = out.shared();
        share_rows(pool, count, width, &|range| {
            for row in range {
                // SAFETY: each row of `out` is visited once.
                matrix.read_row(row_of(row), unsafe { target.slice(row * stride, width) });
            }
        });
    }

    /// `x += y`.
    pub fn add(&self, x: &mut [f32], y: &[f32]) {
        assert_eq!(x.len(), y.len(), "lengths of x and y");
        // SAFETY: the table's instruction set is available.
        unsafe { (self.table.add)(x, y) }
    }

    /// `x[i] = -inf` where bit `i % 32` of word `i / 32` is not set or does not exist.
    pub fn mask(&self, x: &mut [f32], words: &[u32]) {
        // SAFETY: the table's instruction set is available.
        unsafe { (self.table.mask)(x, words) }
    }

    /// The largest element that is not NaN; -inf if there is none.
    pub fn max(&self, x: &[f32]) -> f32 {
        // SAFETY: the table's instruction set is available.
        unsafe { (self.table.max)(x) }
    }

    /// The lowest index of the largest element that is not NaN; 0 if there is none.
    pub fn argmax(&self, x: &[f32]) -> usize {
        // SAFETY: the table's instruction set is available.
        unsafe { (self.table.argmax)(x) }
    }

    /// The sum, accumulated in f32; for some hundreds of elements.
    pub fn sum(&self, x: &[f32]) -> f32 {
        // SAFETY: the table's instruction set is available.
        unsafe { (self.table.sum)(x) }
    }

    /// `out = exp((x - shift) * factor)`, for a positive `factor` and a finite `shift` that no element exceeds. A
    /// subnormal result is 0, and so is the result of a NaN. Returns the [`sum`](Self::sum) of `out`.
    pub fn exp_weights(&self, x: &[f32], shift: f32, factor: f32, out: &mut [f32]) -> f32 {
        assert_eq!(x.len(), out.len(), "lengths of x and out");
        // SAFETY: the table's instruction set is available.
        unsafe { (self.table.exp_weights)(x, shift, factor, out) }
    }

    /// The sum of the values that [`exp_weights`](Self::exp_weights) computes, for any length.
    pub fn sum_of_exp(&self, x: &[f32], shift: f32, factor: f32) -> f64 {
        // SAFETY: the table's instruction set is available.
        unsafe { (self.table.sum_of_exp)(x, shift, factor) }
    }

    /// Writes one token's keys and values, `[kv_heads * head_dim]` each, to position `offset` of block `block`. `cache`
    /// has all blocks of the layer. The bytes of other tokens do not change.
    pub fn write_kv(
        &self,
        layout: &KvLayout,
        cache: &mut [u8],
        block: u32,
        offset: usize,
        k: &[f32],
        v: &[f32],
    ) {
        layout.write(cache, block, offset, k, v);
    }
}

/// The number of workers among which a row operation on `count` rows of `width` floats is divided.
pub(crate) fn num_shares(pool: &Pool, count: usize, width: usize) -> usize {
    pool.threads().min(count * width / ROW_SHARE).max(1)
}

/// Runs `run` over `count` rows of `width` floats: divided among the workers, or on this thread if there are few.
fn share_rows(pool: &Pool, count: usize, width: usize, run: &(dyn Fn(Range<usize>) + Sync)) {
    let rows = RowTiles::new(count, count.div_ceil(num_shares(pool, count, width)).max(1));
    pool.for_each(rows.count, &|share| run(rows.rows(share)));
}
