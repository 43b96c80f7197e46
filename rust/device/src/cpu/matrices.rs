//! Matrices of the CPU backend: packed into the arena, or copied there from a file.

use std::sync::{Mutex, PoisonError};

use penstock_kernels::{MatrixLayout, Pool};
use penstock_types::{Grid, WeightFormat};

use super::buffers::{MOST_PARTS, Weights, lend_some};
use super::{Cpu, CpuMatrix};
use crate::bfc::Placement;
use crate::error::DeviceError;
use crate::seam::MatrixPart;

/// Bytes of a mapped matrix that a thread copies at once.
const COPIED_AT_ONCE: usize = 1 << 20;
/// Bytes that all threads copy in one turn.
const COPIED_IN_TURN: usize = 1 << 24;

/// The layout of a part of a matrix.
pub(super) fn layout(part: &MatrixPart<'_>) -> MatrixLayout {
    MatrixLayout { rows: part.source.rows(), columns: part.source.columns(), format: part.format }
}

/// Packs a part of a matrix.
pub(super) fn pack_part(pool: &Pool, part: MatrixPart<'_>, out: &mut [u8]) {
    let source = part.source;
    match (part.format, source.format()) {
        (WeightFormat::Grid(to), WeightFormat::Grid(from))
            if (Grid { activations: from.activations, ..to }) == from =>
        {
            layout(&part).pack_grid(pool, out, |rows, out| source.read_grid(rows, out));
        }
        _ => layout(&part).pack(pool, out, |rows, out| source.read(rows, out)),
    }
}

impl Cpu {
    /// A matrix of parts with these layouts.
    pub(super) fn matrix(&self, columns: usize, parts: Vec<MatrixLayout>, weights: Weights) -> CpuMatrix {
        assert!((1..=MOST_PARTS).contains(&parts.len()), "{} parts; this is a bug", parts.len());
        let operand = self.kernels.operand_layout(parts.iter().map(|part| part.format), columns);
        let rows = parts.iter().map(|part| part.rows).sum();
        CpuMatrix { parts, rows, columns, operand, weights }
    }

    /// The same in the arena, with its bytes to be written.
    pub(super) fn arena_matrix(
        &mut self,
        columns: usize,
        parts: Vec<MatrixLayout>,
    ) -> Result<CpuMatrix, DeviceError> {
        let bytes = parts.iter().map(MatrixLayout::bytes).fold(0, usize::saturating_add);
        let region = self.region(bytes, 1, Placement::Low, "weights")?;
        let matrix = self.matrix(columns, parts, Weights::Arena(region));
        let [bytes] = lend_some(&mut self.arena, [matrix.weights.region()]);
        self.numa_memory.place_panels(bytes, matrix.panels(), |panel| matrix.panel_offset(panel));
        Ok(matrix)
    }

    /// A matrix in the arena, of these packed bytes.
    pub(super) fn copied_matrix(
        &mut self,
        columns: usize,
        parts: Vec<MatrixLayout>,
        bytes: &[u8],
    ) -> Result<CpuMatrix, DeviceError> {
        let matrix = self.arena_matrix(columns, parts)?;
        let [out] = lend_some(&mut self.arena, [matrix.weights.region()]);
        assert_eq!(out.len(), bytes.len(), "bytes of a mapped matrix; this is a bug");
        for (out, bytes) in out.chunks_mut(COPIED_IN_TURN).zip(bytes.chunks(COPIED_IN_TURN)) {
            let chunks = Mutex::new(out.chunks_mut(COPIED_AT_ONCE).zip(bytes.chunks(COPIED_AT_ONCE)));
            let next = || chunks.lock().unwrap_or_else(PoisonError::into_inner).next();
            let _turn = self.pool.turn();
            self.pool.share(&|_| {
                while let Some((out, bytes)) = next() {
                    out.copy_from_slice(bytes);
                }
            });
        }
        Ok(matrix)
    }
}
