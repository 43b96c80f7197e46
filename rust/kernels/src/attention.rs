//! The safe interface of attention: checks a call, divides it into jobs and runs them on the pool.
//!
//! A job is a number of query rows of one sequence and one kv head. If there are too few jobs for the workers (one long
//! sequence that decodes), the fixed splits of the jobs are computed separately and then merged. Both ways take the
//! same steps in the same order and give the same bits.

use std::mem::MaybeUninit;

use penstock_types::{AttentionParams, AttentionRow};

use crate::generic::attention::{
    self as generic, AttentionJob, AttentionShape, JOB_FLOATS, JOB_ROWS, PARTIAL_FLOATS, partial_floats,
};
use crate::generic::tile::RowTiles;
use crate::kernels::Kernels;
use crate::kv::KvLayout;
use crate::panel::LANES;
use crate::pool::{Claims, Pool, SharedMut};
use crate::rows::{Rows, RowsMut};

/// Positions of a split. It is part of the determinism contract and cannot be tuned.
pub const SPLIT: usize = generic::SPLIT;

/// Floats of scratch with which the splits of decoding sequences of `positions` positions in total are computed
/// separately. With less scratch a batch of few sequences decodes slower.
pub fn attention_scratch(heads: usize, head_dim: usize, positions: usize) -> usize {
    positions.div_ceil(SPLIT) * heads * partial_floats(head_dim)
}

impl Kernels {
    /// Attention of `rows` over a layer's paged cache, into the same rows of `out`; rows of `out` without a query do
    /// not change. The cache already has the keys and values of the queries' own positions.
    ///
    /// `q` and `out` have `heads * head_dim` columns; `rows` are in ascending order of `first_query` and do not
    /// overlap. The bits of a query's result depend only on the query and on the keys and values that it sees.
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
        let shape = AttentionShape {
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
        assert!(shape.window > 0, "a window of 0 positions");
        check(&shape, cache.len(), rows, block_table, q.count().min(out.count()));

        let plan = JobPlan { shape: &shape, rows, block_table };
        let (jobs, splits, floats) = plan.size();
        if jobs < 4 * pool.threads() && splits > jobs && floats <= scratch.len() && pool.threads() > 1 {
            self.attend_by_split(pool, &plan, splits, jobs, scratch);
        } else {
            self.attend_by_job(pool, &plan, jobs);
        }
    }

    /// Computes whole jobs.
    fn attend_by_job(&self, pool: &Pool, plan: &JobPlan<'_>, jobs: usize) {
        let attend_split = self.table.attend_split.of(plan.shape.layout.dtype);
        let claims = Claims::new(jobs);
        pool.share(&|_| {
            let mut cursor = Cursor::new(plan, false);
            let mut partial = MaybeUninit::<[f32; PARTIAL_FLOATS]>::uninit();
            let partial = partial.as_mut_ptr().cast::<f32>();
            while let Some(index) = claims.next() {
                let job = cursor.seek(index).job;
                // SAFETY: the table's instruction set is available, `check` has verified shapes and blocks, `partial`
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

    /// Computes every split of every job into `partials`, then merges the splits of each job.
    fn attend_by_split(
        &self,
        pool: &Pool,
        plan: &JobPlan<'_>,
        splits: usize,
        jobs: usize,
        partials: &mut [f32],
    ) {
        let attend_split = self.table.attend_split.of(plan.shape.layout.dtype);
        let head_floats = partial_floats(plan.shape.layout.head_dim);
        let results = SharedMut::new(partials);
        let claims = Claims::new(splits);
        pool.share(&|_| {
            let mut cursor = Cursor::new(plan, true);
            // A share has consecutive splits, because each prefetches the next.
            while let Some(share) = claims.next_share(pool.threads(), 1, usize::MAX) {
                for index in share {
                    let WorkItem { job, split, partials } = cursor.seek(index);
                    let splits = job.splits(plan.shape);
                    if split >= splits.len() {
                        continue;
                    }
                    let floats = job.rows.len() * head_floats;
                    // SAFETY: the table's instruction set is available, `check` has verified shapes and blocks, and
                    // every split of every job has its own part of `results`.
                    unsafe {
                        let result = results.slice(partials + split * floats, floats);
                        attend_split(plan.shape, &job, splits.start + split, result.as_mut_ptr());
                    }
                }
            }
        });
        let claims = Claims::new(jobs);
        pool.share(&|_| {
            let mut cursor = Cursor::new(plan, false);
            while let Some(index) = claims.next() {
                let WorkItem { job, partials, .. } = cursor.seek(index);
                let (first, floats) = (job.splits(plan.shape).start, job.rows.len() * head_floats);
                // SAFETY: as above; the barrier between the two parts has published every split.
                unsafe {
                    self.merge_splits(plan.shape, &job, |split| {
                        results.slice(partials + (split - first) * floats, floats).as_ptr()
                    });
                }
            }
        });
    }

    /// Merges the splits of a job in ascending order, `partial(split)` being the result of a split, and writes the
    /// job's output.
    ///
    /// # Safety
    /// The table's instruction set is available; `shape` and `job` are as their types require; `partial` returns
    /// results of `attend_split`; no other thread accesses the job's output.
    unsafe fn merge_splits(
        &self,
        shape: &AttentionShape,
        job: &AttentionJob<'_>,
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

/// Panics unless `rows` are in order, inside q and out, and their visible blocks inside the cache.
fn check(
    shape: &AttentionShape,
    cache_bytes: usize,
    rows: &[AttentionRow],
    block_table: &[u32],
    queries: usize,
) {
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

/// The jobs of one call: by sequence, then by kv head, then by groups of query rows of nearly equal size.
struct JobPlan<'a> {
    shape: &'a AttentionShape,
    rows: &'a [AttentionRow],
    block_table: &'a [u32],
}

impl JobPlan<'_> {
    /// The number of jobs, of splits of jobs, and of floats for the partial results of all splits.
    fn size(&self) -> (usize, usize, usize) {
        self.rows.iter().fold((0, 0, 0), |(jobs, splits, floats), row| {
            let own = self.jobs(row).count * self.shape.layout.kv_heads;
            (jobs + own, splits + own * self.splits(row), floats + self.floats(row))
        })
    }

    /// The groups of query rows of one kv head.
    fn jobs(&self, row: &AttentionRow) -> RowTiles {
        let padded = self.shape.layout.head_dim.next_multiple_of(LANES);
        RowTiles::new(row.num_queries * self.shape.group, JOB_ROWS.min(JOB_FLOATS / padded))
    }

    /// The number of splits that are visible to a sequence's queries; fewer may be visible to one job.
    fn splits(&self, row: &AttentionRow) -> usize {
        let first = self.shape.visible(row.start, 0).start / SPLIT;
        (row.start + row.num_queries).div_ceil(SPLIT) - first
    }

    fn floats(&self, row: &AttentionRow) -> usize {
        let query_rows = row.num_queries * self.shape.group * self.shape.layout.kv_heads;
        query_rows * self.splits(row) * partial_floats(self.shape.layout.head_dim)
    }
}

/// A job, one of its splits, and the offset of its first partial result.
struct WorkItem<'a> {
    job: AttentionJob<'a>,
    split: usize,
    partials: usize,
}

/// Finds the job of an index; the indices must ascend.
struct Cursor<'a> {
    plan: &'a JobPlan<'a>,
    by_split: bool,
    sequence: usize,
    items_before: usize,
    floats_before: usize,
}

impl<'a> Cursor<'a> {
    fn new(plan: &'a JobPlan<'a>, by_split: bool) -> Self {
        Self { plan, by_split, sequence: 0, items_before: 0, floats_before: 0 }
    }

    fn seek(&mut self, index: usize) -> WorkItem<'a> {
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
            let job = AttentionJob { kv_head, rows, first_query: row.first_query, start: row.start, blocks };
            return WorkItem { job, split, partials };
        }
    }
}
