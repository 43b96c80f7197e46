//! The rope table, and the rotations of the current step, which every layer reads in row order.

use std::sync::{Mutex, PoisonError};

use penstock_kernels::{Pool, Rows};

use crate::arena::Region;
use crate::seam::RowSource;
use crate::seam::{EXTRA, StepInputs};

/// Positions that a thread computes at once.
const CHUNK: usize = 64;

/// A rope table and the rotations of a step: rows of `width` values, the cosines and then the sines.
pub struct CpuRope {
    pub(super) table: Region,
    pub(super) step: Region,
    pub(super) positions: usize,
    pub(super) width: usize,
}

/// Fills a table from its source.
pub(super) fn fill(pool: &Pool, source: &dyn RowSource, table: &mut [f32]) {
    let chunks = Mutex::new(table.chunks_mut(CHUNK * source.columns().max(1)).enumerate());
    let next = || chunks.lock().unwrap_or_else(PoisonError::into_inner).next();
    let _turn = pool.turn();
    pool.share(&|_| {
        while let Some((index, chunk)) = next() {
            let first = index * CHUNK;
            source.read(first..first + chunk.len() / source.columns(), chunk);
        }
    });
}

/// Copies the rotation of each row of a step.
pub(super) fn gather(inputs: &StepInputs, table: &[f32], step: &mut [f32], width: usize) {
    if width == 0 {
        return;
    }
    for (position, rotation) in inputs.positions.iter().zip(step.chunks_exact_mut(width)) {
        let (source, row) = match position & EXTRA {
            0 => (table, *position),
            _ => (&*inputs.extra_rotations, position ^ EXTRA),
        };
        rotation.copy_from_slice(&source[row as usize * width..][..width]);
    }
}

/// The cosines and the sines of the first `rows` rows.
pub(super) fn split(step: &[f32], rows: usize, width: usize) -> [Rows<'_>; 2] {
    let step = &step[..rows * width];
    [0..width / 2, width / 2..width].map(|columns| Rows::columns(step, width, columns))
}
