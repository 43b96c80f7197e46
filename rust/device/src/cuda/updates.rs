//! The layout of low-rank updates in the memory of adapters.
//!
//! ```text
//! update      [rank][columns] of A, then [rows][rank, rounded up to 4] of B
//! ```

use bytemuck::{Pod, Zeroable};
use penstock_types::{LowRankShape, LowRankUpdate};

use super::kernels::float_type;
use super::matrix::write_as;
use crate::bfc::DEFAULT_ALIGNMENT;
use crate::seam::{AdapterLayout, AdapterSpec};

/// Updates of a matrix, as in `lora.cu`.
pub(super) const MAX_UPDATES: usize = 3;
/// Ranks of a block of the first product.
pub(super) const SHRINK_RANKS: usize = 16;
/// Values to which a row of B is filled up.
const B_UNIT: usize = 4;
/// Alignment of A and of B.
pub(super) const ALIGNMENT: usize = 64;

/// An update, as the kernels read it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub(super) struct Update {
    a: u64,
    b: u32,
    dtype: i32,
    scale: f32,
    /// 0 if there is none.
    rank: i32,
    first_column: i32,
    num_columns: i32,
}

impl Update {
    /// An update of an adapter that begins at `offset` in the memory of all of them.
    pub fn new(update: &LowRankUpdate, offset: usize) -> Self {
        let LowRankUpdate { first_row, shape, scale, .. } = *update;
        Self {
            a: (offset + update.offset) as u64,
            b: a_bytes(&shape) as u32,
            dtype: float_type(shape.dtype),
            scale,
            rank: shape.rank as i32,
            first_column: first_row as i32,
            num_columns: shape.rows as i32,
        }
    }
}

/// Bytes of A.
fn a_bytes(shape: &LowRankShape) -> usize {
    shape.rank.saturating_mul(shape.columns).saturating_mul(shape.dtype.bytes()).next_multiple_of(ALIGNMENT)
}

/// Values of a row of B.
fn b_pitch(shape: &LowRankShape) -> usize {
    shape.rank.next_multiple_of(B_UNIT)
}

/// The layout of adapters on the device.
pub enum CudaAdapterLayout {}

impl AdapterLayout for CudaAdapterLayout {
    fn adapter_bytes(packed: u64) -> u64 {
        packed.max(1).checked_next_multiple_of(DEFAULT_ALIGNMENT as u64).unwrap_or(u64::MAX)
    }

    fn update_bytes(shape: &LowRankShape) -> usize {
        let b = shape.rows.saturating_mul(b_pitch(shape)).saturating_mul(shape.dtype.bytes());
        a_bytes(shape).saturating_add(b.next_multiple_of(ALIGNMENT))
    }

    fn pack(shape: &LowRankShape, a: &[f32], b: &[f32], out: &mut [u8]) {
        let &LowRankShape { rank, dtype, .. } = shape;
        out.fill(0);
        let (of_a, of_b) = out.split_at_mut(a_bytes(shape));
        write_as(a, dtype, &mut of_a[..a.len() * dtype.bytes()]);
        let rows = of_b.chunks_exact_mut(b_pitch(shape) * dtype.bytes());
        for (row, out) in b.chunks_exact(rank).zip(rows) {
            write_as(row, dtype, &mut out[..rank * dtype.bytes()]);
        }
    }
}

/// Values of the first product of a row and an update.
pub(super) fn hidden_pitch(adapters: &AdapterSpec) -> usize {
    adapters.rank.next_multiple_of(SHRINK_RANKS)
}

#[cfg(test)]
mod tests {
    use penstock_types::Dtype;

    use super::*;

    #[test]
    fn adapters_take_whole_units() {
        assert_eq!([0, 1, 256, 257].map(CudaAdapterLayout::adapter_bytes), [256, 256, 256, 512]);
        assert_eq!(CudaAdapterLayout::adapter_bytes(u64::MAX), u64::MAX);
    }

    #[test]
    fn rows_of_b_are_filled_up_with_zeros() {
        let shape = LowRankShape { rows: 2, columns: 3, rank: 5, dtype: Dtype::F32 };
        assert_eq!(CudaAdapterLayout::update_bytes(&shape), 64 + 64);
        let a: Vec<f32> = (0..15_u8).map(f32::from).collect();
        let b: Vec<f32> = (100..110_u8).map(f32::from).collect();
        let mut values = [f32::NAN; 32];
        CudaAdapterLayout::pack(&shape, &a, &b, bytemuck::cast_slice_mut(&mut values));
        assert_eq!((&values[..15], values[15]), (&a[..], 0.0));
        let rows = [[100., 101., 102., 103., 104., 0., 0., 0.], [105., 106., 107., 108., 109., 0., 0., 0.]];
        assert_eq!(values[16..], rows.concat());
    }

    #[test]
    fn half_precision_takes_half_the_memory() {
        let shape = |dtype| LowRankShape { rows: 64, columns: 128, rank: 8, dtype };
        let [float, half] =
            [Dtype::F32, Dtype::Bf16].map(|dtype| CudaAdapterLayout::update_bytes(&shape(dtype)));
        assert_eq!((float, half), (4 * 8 * 192, 2 * 8 * 192));
        let mut values = [0_u16; 8 * 192];
        CudaAdapterLayout::pack(
            &shape(Dtype::Bf16),
            &[1.5; 8 * 128],
            &[-2.0; 8 * 64],
            bytemuck::cast_slice_mut(&mut values),
        );
        assert_eq!((values[0], values[8 * 128 - 1], values[8 * 128]), (0x3fc0, 0x3fc0, 0xc000));
    }
}
