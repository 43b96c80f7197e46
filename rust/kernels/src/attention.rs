//! The safe interface of attention: checks a call, divides it into jobs and runs them on the pool.
//!
//! A job is a number of query rows of one sequence and one kv head. If there are too few jobs for the workers (one long
//! sequence that decodes), the fixed splits of the jobs are computed separately and then merged. Both ways take the
//! same steps in the same order and give the same bits.

use std::mem::MaybeUninit;
use std::ops::Range;

use penstock_types::{AttentionParams, AttentionRow};

use crate::arch::Table;
use crate::attention_codes::{AttentionCodes, SharedCodes};
use crate::generic::attention::{
    self as generic, AttentionJob, AttentionShape, JOB_FLOATS, JOB_ROWS, JobQueries, PARTIAL_FLOATS,
    partial_floats,
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
    /// Rows are written to `codes` as well; `rows` has all rows of `out` then.
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
        codes: Option<AttentionCodes<'_>>,
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

        if rows.is_empty() {
            return;
        }
        let codes = codes.map(|codes| SharedCodes::new(codes, out.count(), out.width()));
        let plan = JobPlan { shape: &shape, rows, block_table, codes: codes.as_ref() };
        let (jobs, splits, floats) = plan.size();
        if jobs < 4 * pool.threads() && splits > jobs && floats <= scratch.len() && pool.threads() > 1 {
            self.attend_by_split(pool, &plan, splits, jobs, scratch);
        } else {
            self.attend_by_job(pool, &plan, jobs);
        }
    }

    /// Computes whole jobs.
    fn attend_by_job(&self, pool: &Pool, plan: &JobPlan<'_>, jobs: usize) {
        let claims = Claims::new(jobs);
        pool.share(&|_| {
            let mut worker = Worker::new(self, plan.shape);
            let mut cursor = Cursor::new(plan, false);
            let mut total = MaybeUninit::<[f32; PARTIAL_FLOATS]>::uninit();
            let mut partial = MaybeUninit::<[f32; PARTIAL_FLOATS]>::uninit();
            let total = total.as_mut_ptr().cast::<f32>();
            let partial = partial.as_mut_ptr().cast::<f32>();
            while let Some(share) = claims.next_share(pool.threads(), 1, usize::MAX) {
                for index in share {
                    let job = cursor.seek(index).job;
                    let splits = job.splits(plan.shape);
                    // SAFETY: the table's instruction set is available, `check` has verified shapes and blocks, `total`
                    // and `partial` have room for any job, and each job is claimed once. A query sees its own position,
                    // so there is a split.
                    unsafe {
                        worker.copy_queries(&job);
                        worker.attend_split(&job, splits.start, total);
                        for split in splits.start + 1..splits.end {
                            worker.attend_split(&job, split, partial);
                            (self.table.attention_merge)(plan.shape, &job, split, partial, total);
                        }
                        (self.table.attention_finish)(plan.shape, &job, total);
                        plan.finish(self.table, &job);
                    }
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
        let head_floats = partial_floats(plan.shape.layout.head_dim);
        let results = SharedMut::new(partials);
        let claims = Claims::new(splits);
        pool.share(&|_| {
            let mut worker = Worker::new(self, plan.shape);
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
                        worker.copy_queries(&job);
                        worker.attend_split(&job, splits.start + split, result.as_mut_ptr());
                    }
                }
            }
        });
        let claims = Claims::new(jobs);
        pool.share(&|_| {
            let mut cursor = Cursor::new(plan, false);
            while let Some(index) = claims.next() {
                let WorkItem { job, partials, .. } = cursor.seek(index);
                let (splits, floats) = (job.splits(plan.shape), job.rows.len() * head_floats);
                // SAFETY: as above; the barrier between the two parts has published every split.
                unsafe {
                    let result = |split: usize| {
                        results.slice(partials + (split - splits.start) * floats, floats).as_mut_ptr()
                    };
                    let total = result(splits.start);
                    for split in splits.start + 1..splits.end {
                        (self.table.attention_merge)(plan.shape, &job, split, result(split), total);
                    }
                    (self.table.attention_finish)(plan.shape, &job, total);
                    plan.finish(self.table, &job);
                }
            }
        });
    }
}

/// Computes splits, and keeps the queries of the last job.
struct Worker<'a> {
    table: &'a Table,
    shape: &'a AttentionShape,
    queries: MaybeUninit<JobQueries>,
    /// The first query, the kv head and the first row of the job that the queries belong to.
    job: Option<[usize; 3]>,
}

impl<'a> Worker<'a> {
    fn new(kernels: &'a Kernels, shape: &'a AttentionShape) -> Self {
        Self { table: kernels.table, shape, queries: MaybeUninit::uninit(), job: None }
    }

    /// Copies the queries of `job`, unless they are the ones copied last.
    ///
    /// # Safety
    /// The table's instruction set is available; `job` is as its type requires.
    #[inline]
    unsafe fn copy_queries(&mut self, job: &AttentionJob<'_>) {
        let key = Some([job.first_query, job.kv_head, job.rows.start]);
        if std::mem::replace(&mut self.job, key) != key {
            let copy_queries = self.table.copy_queries.of(self.shape.layout.dtype);
            // SAFETY: by contract, and any job's queries fit.
            unsafe { copy_queries(self.shape, job, self.queries.as_mut_ptr().cast()) };
        }
    }

    /// # Safety
    /// As for [`generic::attend_split`]; the queries of `job` were copied last.
    #[inline]
    unsafe fn attend_split(&self, job: &AttentionJob<'_>, split: usize, partial: *mut f32) {
        let attend_split = self.table.attend_split.of(self.shape.layout.dtype);
        // SAFETY: by contract.
        unsafe { attend_split(self.shape, job, self.queries.as_ptr().cast(), split, partial) };
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
    codes: Option<&'a SharedCodes<'a>>,
}

impl JobPlan<'_> {
    /// Quantises the rows that `job` completes.
    ///
    /// # Safety
    /// As for [`SharedCodes::finish`].
    unsafe fn finish(&self, table: &Table, job: &AttentionJob<'_>) {
        if let Some(codes) = self.codes {
            // SAFETY: by contract.
            unsafe { codes.finish(table, self.shape, job) };
        }
    }

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
    /// The current sequence, its jobs of one kv head and its splits.
    sequence: usize,
    jobs: RowTiles,
    splits: usize,
    items: Range<usize>,
    floats_before: usize,
}

impl<'a> Cursor<'a> {
    /// `plan` has a sequence.
    fn new(plan: &'a JobPlan<'a>, by_split: bool) -> Self {
        let jobs = plan.jobs(&plan.rows[0]);
        let mut cursor = Self { plan, by_split, sequence: 0, jobs, splits: 0, items: 0..0, floats_before: 0 };
        cursor.enter();
        cursor
    }

    /// Sets the fields that depend on the sequence; its items follow those before.
    fn enter(&mut self) {
        let row = &self.plan.rows[self.sequence];
        (self.jobs, self.splits) = (self.plan.jobs(row), self.plan.splits(row));
        let splits = if self.by_split { self.splits } else { 1 };
        let items = self.jobs.count * self.plan.shape.layout.kv_heads * splits;
        self.items = self.items.end..self.items.end + items;
    }

    fn seek(&mut self, index: usize) -> WorkItem<'a> {
        let plan = self.plan;
        while index >= self.items.end {
            self.floats_before += plan.floats(&plan.rows[self.sequence]);
            self.sequence += 1;
            self.enter();
        }
        let row = &plan.rows[self.sequence];
        let item = index - self.items.start;
        let (job, split) = if self.by_split { (item / self.splits, item % self.splits) } else { (item, 0) };
        let (kv_head, rows) = (job / self.jobs.count, self.jobs.rows(job % self.jobs.count));
        let rows_before = kv_head * row.num_queries * plan.shape.group + rows.start;
        let partials =
            self.floats_before + rows_before * self.splits * partial_floats(plan.shape.layout.head_dim);
        let blocks = &plan.block_table[row.blocks.clone()];
        let job = AttentionJob { kv_head, rows, first_query: row.first_query, start: row.start, blocks };
        WorkItem { job, split, partials }
    }
}
