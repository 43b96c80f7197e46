//! Activations as 8-bit codes.
//!
//! The scale of a span is its largest absolute value / 127, and a code is `round(x * (127 / largest))`. A span with a
//! value that is not finite has a scale of NaN, so that its products are NaN, as those of floats would be.

use crate::generic::row_ops::load;
use crate::grid::BLOCK;
use crate::operand::{OperandLayout, Span};
use crate::panel::LANES;
use crate::simd::Simd;

/// Largest absolute values below it give codes and a scale of 0: `127 / largest` would overflow.
const SMALLEST: f32 = 1e-30;

/// Quantises one row.
///
/// # Safety
/// `layout.columns` floats are readable at `x` and `layout.row_bytes()` bytes writable at `row`, which is aligned to 4.
#[inline(always)]
pub(crate) unsafe fn quantise_row<S: Simd>(s: S, layout: &OperandLayout, x: *const f32, row: *mut u8) {
    let mut row_largest = (0.0, 0.0);
    if layout.per_row {
        // SAFETY: the whole row.
        row_largest = unsafe { largest(s, x, layout.columns) };
    }
    let mut start = 0;
    for span in 0..layout.spans() {
        let width = layout.span.min(layout.columns - start);
        // SAFETY: the columns of the span are in the row, and so are its codes, padded to 32.
        unsafe {
            let (largest, poison) =
                if layout.per_row { row_largest } else { largest(s, x.add(start), width) };
            let factor = if largest < SMALLEST { 0.0 } else { 127.0 / largest };
            let scale = if largest < SMALLEST { 0.0 } else { largest / 127.0 } + poison;
            let halves = codes(s, layout, x, start..start + width, factor, row);
            let sum = halves[0] + halves[1];
            let scaled_sum = scale * sum as f32;
            let at = row.add(layout.spans_at + span * size_of::<Span>());
            at.cast::<Span>().write_unaligned(Span { scale, scaled_sum, sum, halves });
        }
        start += width;
    }
}

/// The largest absolute value, and 0 if all values are finite, else NaN.
#[inline(always)]
unsafe fn largest<S: Simd>(s: S, x: *const f32, count: usize) -> (f32, f32) {
    let (mut largest, mut poison) = (s.splat(0.0), s.splat(0.0));
    let mut i = 0;
    while i < count {
        // SAFETY: inside the row.
        let v = unsafe { load(s, x.add(i), LANES.min(count - i)) };
        largest = s.max(s.max(v, s.sub(s.splat(0.0), v)), largest);
        poison = s.mul_add(v, s.splat(0.0), poison);
        i += LANES;
    }
    (s.largest(largest), s.sum(poison))
}

/// Writes the codes of `columns` and of their padding to a multiple of 32. Returns the sums of the first and the second
/// half of the span, if it is a single block; else the sum and 0.
#[inline(always)]
unsafe fn codes<S: Simd>(
    s: S,
    layout: &OperandLayout,
    x: *const f32,
    columns: std::ops::Range<usize>,
    factor: f32,
    row: *mut u8,
) -> [i32; 2] {
    let factor = s.splat(factor);
    // Lane i is the sum of columns i, i + 16, ... of the first or second halves of the blocks.
    let mut sums = [[0; LANES]; 2];
    let mut k = columns.start;
    while k < columns.end {
        // SAFETY: at least one column is inside the row; the codes are padded to whole blocks.
        unsafe {
            half_block(s, layout, x, k..columns.end, factor, row, &mut sums[0]);
            half_block(s, layout, x, k + LANES..columns.end, factor, row, &mut sums[1]);
        }
        k += BLOCK;
    }
    let [first, second] = sums.map(|lanes| lanes.iter().sum::<i32>());
    if layout.span == BLOCK { [first, second] } else { [first + second, 0] }
}

/// Writes 16 codes, of the first of `columns` and then of zeros, and adds them to `sums`.
///
/// # Safety
/// The columns are in the row; the codes of 16 columns from the first on are writable.
#[inline(always)]
unsafe fn half_block<S: Simd>(
    s: S,
    layout: &OperandLayout,
    x: *const f32,
    columns: std::ops::Range<usize>,
    factor: S::V,
    row: *mut u8,
    sums: &mut [i32; LANES],
) {
    let k = columns.start;
    let mut codes = [0_i16; LANES];
    if !columns.is_empty() {
        // SAFETY: inside the row; 16 integers.
        unsafe {
            let v = load(s, x.add(k), LANES.min(columns.len()));
            s.store_i16(codes.as_mut_ptr(), s.round(s.mul(v, factor)));
        }
    }
    for (code, sum) in codes.iter_mut().zip(sums) {
        // The code of a NaN is unspecified until here.
        *code = (*code).clamp(-127, 127);
        *sum += i32::from(*code);
    }
    // SAFETY: the codes of these columns.
    unsafe {
        if layout.narrow {
            let to = row.add(k).cast::<[i8; LANES]>();
            let mut bytes = [0; LANES];
            for i in 0..LANES {
                bytes[i] = codes[i] as i8;
            }
            to.write_unaligned(bytes);
        }
        if layout.wide {
            let to = row.add(layout.wide_at + 2 * k).cast::<[i16; LANES]>();
            let mut wide = [0; LANES];
            for quad in 0..LANES / 4 {
                for (i, from) in [0, 2, 1, 3].into_iter().enumerate() {
                    wide[4 * quad + i] = codes[4 * quad + from];
                }
            }
            to.write_unaligned(wide);
        }
    }
}
