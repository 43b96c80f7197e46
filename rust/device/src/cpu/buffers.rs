//! The buffers of the CPU backend: regions of one arena, which lends their bytes to an operation while it runs.

use std::ops::Range;

use bytemuck::cast_slice;
use bytes::Bytes;
use penstock_kernels::{Matrix, MatrixLayout, Operand, OperandLayout};

use super::PAGE;
use super::numa::NumaMemory;
use crate::arena::{Arena, ArenaError, HostSlab, Region, SlabError};
use crate::error::DeviceError;

/// A weight in panels: parts, one below the other.
pub struct CpuMatrix {
    pub(super) parts: Vec<MatrixLayout>,
    pub(super) rows: usize,
    pub(super) columns: usize,
    /// The form of the rows that it reads; `None` if they are floats.
    pub(super) operand: Option<OperandLayout>,
    pub(super) weights: Weights,
}

/// The bytes of a matrix.
pub(super) enum Weights {
    Arena(Region),
    /// A part of a file, or of memory of the caller.
    Mapped(Bytes),
}

impl Weights {
    /// The region of the arena, if there is one.
    pub(super) fn region(&self) -> Option<&Region> {
        match self {
            Self::Arena(region) => Some(region),
            Self::Mapped(_) => None,
        }
    }
}

/// The most parts of a matrix: query, key and value.
pub(super) const MOST_PARTS: usize = 3;

impl CpuMatrix {
    pub(super) fn panels(&self) -> usize {
        self.parts.iter().map(MatrixLayout::panels).sum()
    }

    /// The first byte of a panel, or the number of bytes for [`panels`](Self::panels).
    pub(super) fn panel_offset(&self, mut panel: usize) -> usize {
        let mut offset = 0;
        for part in &self.parts {
            let count = panel.min(part.panels());
            offset += count * part.panel_bytes();
            panel -= count;
        }
        offset
    }

    /// Some rows of an operand; `bytes` are those of [`CpuOperand::read_by`].
    pub(super) fn operand_rows<'a>(&self, bytes: &'a [u8], rows: Range<usize>) -> Operand<'a> {
        match &self.operand {
            None => Operand::Floats(&cast_slice(bytes)[rows.start * self.columns..rows.end * self.columns]),
            Some(layout) => {
                Operand::Codes(&bytes[rows.start * layout.row_bytes()..rows.end * layout.row_bytes()])
            }
        }
    }

    /// The parts with their bytes; those from `parts.len()` on are unspecified. `lent` has the bytes of the region.
    pub(super) fn matrices<'a>(&'a self, lent: &'a [u8]) -> [Matrix<'a>; MOST_PARTS] {
        let mut rest = match &self.weights {
            Weights::Arena(_) => lent,
            Weights::Mapped(bytes) => bytes,
        };
        std::array::from_fn(|index| {
            let layout = self.parts[index.min(self.parts.len() - 1)];
            let bytes = rest.split_off(..layout.bytes()).unwrap_or_default();
            Matrix { layout, bytes }
        })
    }
}

/// The rows that a matrix reads: one of both, as the matrix requires.
pub struct CpuOperand {
    pub(super) floats: Region,
    pub(super) codes: Region,
}

impl CpuOperand {
    /// The form that `matrix` reads.
    pub(super) fn read_by(&self, matrix: &CpuMatrix) -> &Region {
        if matrix.operand.is_some() { &self.codes } else { &self.floats }
    }
}

/// Float32 values.
pub struct CpuBuffer(pub(super) Region);

/// Memory that operations need while they run.
pub struct CpuScratch {
    /// Partial results of attention.
    pub(super) attention: Region,
    /// Counters of attention, one for each row.
    pub(super) counters: Region,
    /// A sampling workspace for each thread.
    pub(super) sampling: Region,
}

/// An empty arena of `bytes`.
pub(super) fn arena(bytes: usize, numa_memory: &NumaMemory) -> Result<Arena<HostSlab>, DeviceError> {
    let refused = |reason: String| DeviceError::OutOfMemory {
        what: "the model with its KV cache",
        bytes: bytes as u64,
        reason,
    };
    let mut slab = HostSlab::reserve(bytes).map_err(|SlabError { reason, .. }| refused(reason))?;
    numa_memory.place(slab.as_mut());
    Arena::new(slab, bytes, PAGE).map_err(|error: ArenaError| refused(error.to_string()))
}

/// The bytes of buffers. All are of this arena, because only it makes them, and all are different, because some are
/// borrowed for writing.
pub(super) fn lend<'a, const N: usize>(
    arena: &'a mut Arena<HostSlab>,
    regions: [&Region; N],
) -> [&'a mut [u8]; N] {
    lend_some(arena, regions.map(Some))
}

/// The same, with no bytes for `None`.
pub(super) fn lend_some<'a, const N: usize>(
    arena: &'a mut Arena<HostSlab>,
    regions: [Option<&Region>; N],
) -> [&'a mut [u8]; N] {
    arena.split_mut(regions).expect("a buffer of another backend; this is a bug")
}
