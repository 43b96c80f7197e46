//! The safe front of attention: checks a call, cuts it into jobs and gives them to the pool.
//!
//! A job is some query rows of one sequence and one kv head. When there are too few of them to keep the workers
//! busy (one long sequence decoding), the fixed splits of the jobs are computed apart and merged afterwards; that
//! takes the same steps in the same order, so it gives the same bits.

use std::mem::MaybeUninit;

use penstock_types::{AttentionParams, AttentionRow};

use crate::generic::attention::{
    self as generic, JOB_FLOATS, JOB_ROWS, Job, PARTIAL_FLOATS, Shape, partial_floats,
};
use crate::generic::tile::Tiles;
use crate::kernels::Kernels;
use crate::kv::KvLayout;
use crate::panel::LANES;
use crate::pool::{Claims, Pool, SharedMut};
use crate::rows::{Rows, RowsMut};

/// Positions of a split: part of the law, not a tuning knob.
pub const SPLIT: usize = generic::SPLIT;

/// Floats of scratch that let the splits of one token each of sequences of `positions` positions altogether be computed apart.
/// Too little scratch costs speed when few sequences decode, nothing else.
pub fn attention_scratch(heads: usize, head_dim: usize, positions: usize) -> usize {
    positions.div_ceil(SPLIT) * heads * partial_floats(head_dim)
}

impl Kernels {
    /// Attention of `rows` over a layer's paged cache, into the same rows of `out`; rows of `out` that belong to no
    /// query stay as they are. Keys and values of the queries' own positions are in the cache already.
    ///
    /// `q` and `out` have `heads * head_dim` columns; `rows` are in ascending order of `first_query` and do not
    /// overlap. A query's result depends on nothing but itself and the keys and values it sees, bit by bit.
    #[allow(clippy::too_many_arguments)]
    pub fn attention(
        &self,
        pool: &Pool,
        layout: &KvLayout,
        cache: &[u8],
        rows: &[AttentionRow],
        block_table: &[u32],
        q: Rows<'_>,
        heads: usize,
        params: AttentionParams,
        scratch: &mut [f32],
        mut out: RowsMut<'_>,
    ) {
        let shape = Shape {
            layout: *layout,
            block_bytes: layout.block_bytes(),
            cache: cache.as_ptr(),
            q: q.as_ptr(),
            q_stride: q.stride(),
            out: out.as_mut_ptr(),
            out_stride: out.stride(),
            group: heads / layout.kv_heads,
            scale: params.scale,
            window: params.window.unwrap_or(usize::MAX),
            softcap: params.softcap.unwrap_or(0.0),
        };
        assert_eq!(heads % layout.kv_heads, 0, "{heads} heads of {} kv heads", layout.kv_heads);
        assert!(
            layout.head_dim <= JOB_FLOATS,
            "heads of {} dimensions; at most {JOB_FLOATS}",
            layout.head_dim
        );
        assert_eq!(
            (q.width(), out.width()),
            (heads * layout.head_dim, heads * layout.head_dim),
            "width of q, out"
        );
        assert!(shape.window > 0, "a window of 0 leaves a query nothing to see");
        check(&shape, cache.len(), rows, block_table, q.count().min(out.count()));

        let plan = Plan { shape: &shape, rows, block_table };
        let (jobs, splits, floats) = plan.size();
        if jobs < 4 * pool.threads() && splits > jobs && floats <= scratch.len() && pool.threads() > 1 {
            self.attend_spread(pool, &plan, splits, jobs, scratch);
        } else {
            self.attend_whole(pool, &plan, jobs);
        }
    }

    /// Job by job.
    fn attend_whole(&self, pool: &Pool, plan: &Plan<'_>, jobs: usize) {
        let attend_split = self.table.attend_split.of(plan.shape.layout.dtype);
        let claims = Claims::new(jobs);
        pool.share(&|_| {
            let mut cursor = Cursor::new(plan, false);
            let mut partial = MaybeUninit::<[f32; PARTIAL_FLOATS]>::uninit();
            let partial = partial.as_mut_ptr().cast::<f32>();
            while let Some(index) = claims.next() {
                let job = cursor.seek(index).job;
                // SAFETY: the table's instruction set is available, `check` looked at shapes and blocks, `partial`
                // has room for any job, and each job is claimed once.
                unsafe {
                    self.merge_splits(plan.shape, &job, |split| {
                        attend_split(plan.shape, &job, split, partial);
                        partial
                    });
                }
            }
        });
    }

    /// Split by split into `partials`, then merged job by job.
    fn attend_spread(&self, pool: &Pool, plan: &Plan<'_>, splits: usize, jobs: usize, partials: &mut [f32]) {
        let attend_split = self.table.attend_split.of(plan.shape.layout.dtype);
        let head_floats = partial_floats(plan.shape.layout.head_dim);
        let places = SharedMut::new(partials);
        let claims = Claims::new(splits);
        pool.share(&|_| {
            let mut cursor = Cursor::new(plan, true);
            // Neighbouring splits in one go: each prefetches the next.
            while let Some(share) = claims.next_share(pool.threads(), 1, usize::MAX) {
                for index in share {
                    let Place { job, split, partials } = cursor.seek(index);
                    let splits = job.splits(plan.shape);
                    if split >= splits.len() {
                        continue;
                    }
                    let floats = job.rows.len() * head_floats;
                    // SAFETY: the table's instruction set is available, `check` looked at shapes and blocks, and
                    // every split of every job has a place of its own.
                    unsafe {
                        let place = places.slice(partials + split * floats, floats);
                        attend_split(plan.shape, &job, splits.start + split, place.as_mut_ptr());
                    }
                }
            }
        });
        let claims = Claims::new(jobs);
        pool.share(&|_| {
            let mut cursor = Cursor::new(plan, false);
            while let Some(index) = claims.next() {
                let Place { job, partials, .. } = cursor.seek(index);
                let (first, floats) = (job.splits(plan.shape).start, job.rows.len() * head_floats);
                // SAFETY: as above; the barrier between the two parts has published every split.
                unsafe {
                    self.merge_splits(plan.shape, &job, |split| {
                        places.slice(partials + (split - first) * floats, floats).as_ptr()
                    });
                }
            }
        });
    }

    /// Merges the splits of a job in ascending order, each where `partial` says, and writes the job's output.
    ///
    /// # Safety
    /// The table's instruction set is available; `shape` and `job` are as their types say; `partial` leads to the
    /// results of `attend_split`; nobody else touches the job's output.
    unsafe fn merge_splits(
        &self,
        shape: &Shape,
        job: &Job<'_>,
        mut partial: impl FnMut(usize) -> *const f32,
    ) {
        let mut total = MaybeUninit::<[f32; PARTIAL_FLOATS]>::uninit();
        let total = total.as_mut_ptr().cast::<f32>();
        // SAFETY: by contract, and `total` has room for any job.
        unsafe {
            (self.table.attention_clear)(shape, job, total);
            for split in job.splits(shape) {
                (self.table.attention_merge)(shape, job, split, partial(split), total);
            }
            (self.table.attention_finish)(shape, job, total);
        }
    }
}

/// Panics unless `rows` are in order, inside q and out, and see only blocks of the cache.
fn check(shape: &Shape, cache_bytes: usize, rows: &[AttentionRow], block_table: &[u32], queries: usize) {
    let block_size = shape.layout.block_size;
    let blocks_in_cache = cache_bytes / shape.block_bytes;
    let mut next_query = 0;
    for row in rows {
        let end = row.start + row.num_queries;
        assert!(row.first_query >= next_query, "{row:?} overlaps a row before it");
        next_query = row.first_query + row.num_queries;
        assert!(next_query <= queries, "{row:?} ends past the {queries} rows of q and out");
        let blocks = &block_table[row.blocks.clone()];
        assert!(blocks.len() * block_size >= end, "{row:?} has too few blocks of {block_size}");
        let first_seen = shape.visible(row.start, 0).start;
        for block in &blocks[first_seen / block_size..end.div_ceil(block_size)] {
            assert!((*block as usize) < blocks_in_cache, "block {block} of {blocks_in_cache} in {row:?}");
        }
    }
}

/// The jobs of one call. Sequence by sequence, kv head by kv head, then the query rows in groups as equal as can be.
struct Plan<'a> {
    shape: &'a Shape,
    rows: &'a [AttentionRow],
    block_table: &'a [u32],
}

impl Plan<'_> {
    /// Jobs, splits of jobs, and floats for the partial results of all splits.
    fn size(&self) -> (usize, usize, usize) {
        self.rows.iter().fold((0, 0, 0), |(jobs, splits, floats), row| {
            let own = self.jobs(row).count * self.shape.layout.kv_heads;
            (jobs + own, splits + own * self.splits(row), floats + self.floats(row))
        })
    }

    /// How the query rows of one kv head are grouped.
    fn jobs(&self, row: &AttentionRow) -> Tiles {
        let padded = self.shape.layout.head_dim.next_multiple_of(LANES);
        Tiles::new(row.num_queries * self.shape.group, JOB_ROWS.min(JOB_FLOATS / padded))
    }

    /// Splits that some query of a sequence sees into; a job may see into fewer.
    fn splits(&self, row: &AttentionRow) -> usize {
        let first = self.shape.visible(row.start, 0).start / SPLIT;
        (row.start + row.num_queries).div_ceil(SPLIT) - first
    }

    fn floats(&self, row: &AttentionRow) -> usize {
        let query_rows = row.num_queries * self.shape.group * self.shape.layout.kv_heads;
        query_rows * self.splits(row) * partial_floats(self.shape.layout.head_dim)
    }
}

/// A job, one of its splits, and where the first of its partial results lies.
struct Place<'a> {
    job: Job<'a>,
    split: usize,
    partials: usize,
}

/// Finds the job behind an index, for indices that only grow.
struct Cursor<'a> {
    plan: &'a Plan<'a>,
    by_split: bool,
    sequence: usize,
    items_before: usize,
    floats_before: usize,
}

impl<'a> Cursor<'a> {
    fn new(plan: &'a Plan<'a>, by_split: bool) -> Self {
        Self { plan, by_split, sequence: 0, items_before: 0, floats_before: 0 }
    }

    fn seek(&mut self, index: usize) -> Place<'a> {
        let (plan, kv_heads) = (self.plan, self.plan.shape.layout.kv_heads);
        loop {
            let row = &plan.rows[self.sequence];
            let (jobs, all_splits) = (plan.jobs(row), plan.splits(row));
            let splits = if self.by_split { all_splits } else { 1 };
            let items = jobs.count * kv_heads * splits;
            if index >= self.items_before + items {
                self.items_before += items;
                self.floats_before += plan.floats(row);
                self.sequence += 1;
                continue;
            }
            let (job, split) = ((index - self.items_before) / splits, (index - self.items_before) % splits);
            let (kv_head, rows) = (job / jobs.count, jobs.rows(job % jobs.count));
            let rows_before = kv_head * row.num_queries * plan.shape.group + rows.start;
            let partials =
                self.floats_before + rows_before * all_splits * partial_floats(plan.shape.layout.head_dim);
            let blocks = &plan.block_table[row.blocks.clone()];
            let job = Job { kv_head, rows, first_query: row.first_query, start: row.start, blocks };
            return Place { job, split, partials };
        }
    }
}
