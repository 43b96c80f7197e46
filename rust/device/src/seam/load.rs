//! [`Load`]: the formats that a device has, and the way of weights, rope tables and adapters to it.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use penstock_types::{
    Dtype, FieldError, GridRows, HeadShape, KvDtype, LowRankShape, PackedAdapter, WeightFormat,
};

use super::memory::{CacheSpec, Memory};
use super::step::{AdapterSpec, StepSpec};
use crate::error::DeviceError;

/// A weight matrix before it is loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedMatrix {
    /// Columns of all parts.
    pub columns: usize,
    /// Rows and formats of its parts.
    pub parts: Vec<(usize, WeightFormat)>,
    /// Whether it is multiplied. Otherwise it is a table of embeddings alone.
    pub is_multiplied: bool,
}

/// The rows of a table, in order, as float32, wherever they are stored or computed.
pub trait RowSource: Sync {
    /// Number of rows (output features).
    fn rows(&self) -> usize;
    /// Values in a row (input features).
    fn columns(&self) -> usize;
    /// Writes rows `rows` into `out`, row after row. Called from several threads at once.
    fn read(&self, rows: Range<usize>, out: &mut [f32]);
}

/// The rows of a weight matrix, in the format they are stored in.
pub trait WeightSource: RowSource {
    /// The format that holds the values exactly.
    fn format(&self) -> WeightFormat {
        WeightFormat::Float(Dtype::F32)
    }
    /// Replaces `out` by rows `rows`. Called only if the format is a grid, from several threads at once.
    fn read_grid(&self, rows: Range<usize>, out: &mut GridRows) {
        let _ = out;
        unreachable!("rows {rows:?} of plain numbers; this is a bug")
    }
}

/// A part of a weight matrix: some of its rows.
#[derive(Clone, Copy)]
pub struct MatrixPart<'a> {
    /// The rows.
    pub source: &'a dyn WeightSource,
    /// The format in memory. A source of another format is rounded or quantised.
    pub format: WeightFormat,
}

/// The layout of packed matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedLayout {
    /// The name of the layout. Matrices with the same layout are exchangeable between machines.
    pub name: &'static str,
    /// Matrices of multiples of these rows can be packed one after the other to form a larger one.
    pub rows: usize,
}

/// The layout of adapters. Adapters are packed by any thread, while the device is in use.
pub trait AdapterLayout {
    /// Bytes of [`AdapterSpec::bytes`] that an adapter of `packed` bytes takes.
    fn adapter_bytes(packed: u64) -> u64;

    /// Bytes that [`pack`](Self::pack) writes for an update; a multiple of 64.
    fn update_bytes(shape: &LowRankShape) -> usize;

    /// Packs A, `[rank, columns]`, and B, `[rows, rank]`, of an update.
    fn pack(shape: &LowRankShape, a: &[f32], b: &[f32], out: &mut [u8]);
}

/// The loading of a model onto a device.
pub trait Load: Memory {
    /// A weight matrix `[rows, columns]`, in a layout of the backend's choice.
    type Matrix: Send;
    /// A short float32 weight (a norm, a bias).
    type Vector: Send;
    /// A table of rotary position embeddings, and the rotations of the current step.
    type Rope: Send;
    /// Low-rank updates of the matrices, of which each row of a step may have others.
    type Adapters: Send;
    /// The layout of the adapters that [`load_adapter`](Self::load_adapter) takes.
    type AdapterLayout: AdapterLayout;

    /// Returns an error if there are no operations for such a cache.
    fn check_cache(&self, heads: HeadShape, dtype: KvDtype) -> Result<(), FieldError>;

    /// Whether a matrix of this many columns can have this format.
    fn supports(&self, format: WeightFormat, columns: usize) -> bool;

    /// The type of the activations in a product with a matrix of this format.
    fn activations(&self, format: WeightFormat) -> &'static str;

    /// Prepares all operations of a model, before memory is [reserved](Memory::reserve): those with these matrices,
    /// with a cache, and with adapters.
    fn prepare(
        &mut self,
        matrices: &[PlannedMatrix],
        cache: &CacheSpec,
        has_adapters: bool,
    ) -> Result<(), DeviceError>;

    /// The layout of packed matrices, for files.
    fn packed_layout(&self) -> PackedLayout;

    /// Bytes that [`pack`](Self::pack) writes for this number of rows; a multiple of 64.
    fn packed_bytes(&self, columns: usize, rows: usize, format: WeightFormat) -> u64;

    /// Packs a part of a matrix into `out`. Reads the rows from several threads.
    fn pack(&self, part: MatrixPart<'_>, out: &mut [u8]);

    /// Packs the parts of a matrix, one below the other. Either all parts read codes or none does
    /// ([`WeightFormat::reads_codes`]). Reads the rows from several threads; leaves nothing behind on failure.
    fn load_matrix(&mut self, parts: &[MatrixPart<'_>]) -> Result<Self::Matrix, DeviceError>;

    /// Makes a matrix of the bytes of its packed parts, one after the other, without copying them unless
    /// [`copies_mapped`](Self::copies_mapped). The formats are supported, and the number of bytes is right.
    fn map_matrix(
        &mut self,
        columns: usize,
        parts: &[(usize, WeightFormat)],
        bytes: Bytes,
    ) -> Result<Self::Matrix, DeviceError>;

    /// Whether [`map_matrix`](Self::map_matrix) takes memory and copies the bytes.
    fn copies_mapped(&self) -> bool;

    /// Loads a vector.
    fn load_vector(&mut self, values: &[f32]) -> Result<Self::Vector, DeviceError>;

    /// Loads a rope table. A row of `table` is a position: the cosines of its `head_dim / 2` angles, then the sines.
    fn load_rope(&mut self, table: &dyn RowSource, step: &StepSpec) -> Result<Self::Rope, DeviceError>;

    /// Room for adapters, of which none is loaded.
    fn allocate_adapters(
        &mut self,
        adapters: &AdapterSpec,
        step: &StepSpec,
    ) -> Result<Self::Adapters, DeviceError>;

    /// Loads an adapter under a number below [`AdapterSpec::adapters`] that is free. It fits if the
    /// [`adapter_bytes`](AdapterLayout::adapter_bytes) of all loaded adapters do.
    fn load_adapter(
        &mut self,
        adapters: &mut Self::Adapters,
        number: u32,
        adapter: &Arc<PackedAdapter>,
    ) -> Result<(), DeviceError>;

    /// Frees an adapter and its number.
    fn unload_adapter(&mut self, adapters: &mut Self::Adapters, number: u32) -> Result<(), DeviceError>;
}
