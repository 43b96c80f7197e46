//! The safe interface: the kernel table of one instruction set, with checked slices.
//!
//! Every method checks the shapes (a mismatch is a bug of the caller and panics with the numbers), divides the work
//! over the pool, and calls the table. The division does not affect the result: see the determinism contract in the
//! crate's documentation.

use std::fmt;
use std::mem::MaybeUninit;
use std::ops::Range;

use penstock_types::WeightFormat;

use crate::arch::{self, Table};
use crate::generic::row_ops::Activation;
use crate::generic::tile::RowTiles;
use crate::isa::{Isa, IsaError};
use crate::kv::KvLayout;
use crate::matrix::Matrix;
use crate::operand::OperandLayout;
use crate::pool::{Pool, SharedMut};
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

    /// Quantises rows that `compute` writes, one at a time, to `floats`, or to a buffer of the worker.
    fn quantise_rows(
        &self,
        pool: &Pool,
        count: usize,
        layout: &OperandLayout,
        floats: Option<&mut [f32]>,
        out: &mut [u8],
        compute: &(dyn Fn(usize, *mut f32) + Sync),
    ) {
        let columns = layout.columns;
        assert!(columns <= OperandLayout::MOST_COLUMNS, "{layout:?} is too wide");
        assert_eq!(out.len(), count * layout.row_bytes, "bytes of the rows");
        if let Some(floats) = &floats {
            assert_eq!(floats.len(), count * columns, "floats of the rows");
        }
        let (floats, out) = (floats.map(SharedMut::new), SharedMut::new(out));
        share_rows(pool, count, columns, &|range| {
            let mut buffer = MaybeUninit::<[f32; OperandLayout::MOST_COLUMNS]>::uninit();
            for row in range {
                // SAFETY: the table's instruction set is available; each row is visited once, and has been computed.
                unsafe {
                    let at = match &floats {
                        Some(floats) => floats.slice(row * columns, columns).as_mut_ptr(),
                        None => buffer.as_mut_ptr().cast(),
                    };
                    compute(row, at);
                    let to = out.slice(row * layout.row_bytes, layout.row_bytes);
                    (self.table.quantise_row)(layout, at, to.as_mut_ptr());
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

    /// [`rms_norm`](Self::rms_norm) of each row, in the form of `layout`, and as `floats` if given.
    #[expect(clippy::too_many_arguments, reason = "the operands of one operation")]
    pub fn rms_norm_codes(
        &self,
        pool: &Pool,
        x: Rows<'_>,
        weight: &[f32],
        eps: f32,
        layout: &OperandLayout,
        floats: Option<&mut [f32]>,
        out: &mut [u8],
    ) {
        assert_eq!((x.width(), layout.columns), (weight.len(), weight.len()), "width of x, weight and out");
        self.quantise_rows(pool, x.count(), layout, floats, out, &|row, to| {
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

    /// [`silu_mul`](Self::silu_mul), in the form of `layout`, and as `floats` if given.
    pub fn silu_mul_codes(
        &self,
        pool: &Pool,
        gate_up: Rows<'_>,
        layout: &OperandLayout,
        floats: Option<&mut [f32]>,
        out: &mut [u8],
    ) {
        let width = layout.columns;
        assert_eq!(gate_up.width(), 2 * width, "width of gate_up and twice that of out");
        self.quantise_rows(pool, gate_up.count(), layout, floats, out, &|row, to| {
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
