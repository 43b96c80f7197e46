//! The output of attention as codes. Different workers compute the heads of a row; the worker that completes the last
//! head quantises the row.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::arch::Table;
use crate::generic::attention::{AttentionJob, AttentionShape};
use crate::operand::OperandLayout;
use crate::pool::SharedMut;

/// The rows of codes that attention writes besides its floats.
#[derive(Debug)]
pub struct AttentionCodes<'a> {
    pub layout: &'a OperandLayout,
    /// A row of `layout` for each row of the floats.
    pub codes: &'a mut [u8],
    /// At least one for each row; overwritten.
    pub counters: &'a mut [u32],
}

/// The same, shared by the workers.
pub(crate) struct SharedCodes<'a> {
    layout: &'a OperandLayout,
    codes: SharedMut<'a, u8>,
    /// The completed heads of each row.
    heads_done: &'a [AtomicU32],
}

impl<'a> SharedCodes<'a> {
    /// # Panics
    /// If the sizes are not those of `rows` rows of `columns` floats.
    pub(crate) fn new(codes: AttentionCodes<'a>, rows: usize, columns: usize) -> Self {
        let AttentionCodes { layout, codes, counters } = codes;
        assert_eq!((layout.columns, codes.len()), (columns, rows * layout.row_bytes), "rows of codes");
        let counters = &mut counters[..rows];
        counters.fill(0);
        // SAFETY: both types have the same layout, and the borrow is exclusive.
        let heads_done = unsafe { std::slice::from_raw_parts(counters.as_mut_ptr().cast(), rows) };
        Self { layout, codes: SharedMut::new(codes), heads_done }
    }

    /// Counts the heads of a finished job, and quantises the rows that are complete.
    ///
    /// # Safety
    /// The table's instruction set is available; `shape` and `job` are as their types require; no job is counted twice.
    pub(crate) unsafe fn finish(&self, table: &Table, shape: &AttentionShape, job: &AttentionJob<'_>) {
        let heads = shape.group * shape.layout.kv_heads;
        let mut rows = job.rows.clone();
        while !rows.is_empty() {
            let query = rows.start / shape.group;
            let end = rows.end.min((query + 1) * shape.group);
            let (row, count) = (job.first_query + query, (end - rows.start) as u32);
            rows.start = end;
            // Release publishes the floats of this job, acquire those of the others.
            let done = self.heads_done[row].fetch_add(count, Ordering::AcqRel) + count;
            if done as usize == heads {
                // SAFETY: by contract the row is complete, and only this thread has seen the last of its heads.
                unsafe {
                    let to = self.codes.slice(row * self.layout.row_bytes, self.layout.row_bytes);
                    (table.quantise_row)(self.layout, shape.out.add(row * shape.out_stride), to.as_mut_ptr());
                }
            }
        }
    }
}
