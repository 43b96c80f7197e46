//! The division of a step's attention into work items.
//!
//! The queries of a sequence times the heads that share a key head are its packed rows, which are divided into parts. A
//! part of few rows has work items of `decode`, one for each split of its positions, which are computed at the same
//! time, and, if there are several, a work item of `combine`. One of many rows is a work item of `prefill`, which goes
//! through the splits one after the other. The results have the same bits, so the division may depend on anything.

use bytemuck::{Pod, Zeroable};
use penstock_types::{AttentionRow, HeadShape, KvDtype};

use crate::seam::StepSpec;

/// Positions of a split, as in `attention.cu`.
const SPLIT: usize = 256;
/// Packed rows of a warp: those of a work item of `decode`.
pub(super) const DECODE_ROWS: usize = 16;
/// Packed rows of a work item of `prefill`, and of that of `attention_warpgroup.cu`.
pub(super) const PREFILL_ROWS: usize = 64;
pub(super) const WARPGROUP_ROWS: usize = 128;
/// The largest heads of which the kernels of `attention.cu` have the queries in static shared memory: `LARGE` of
/// `attention.cuh`.
pub(super) const MOST_STATIC_HEAD_DIM: usize = 128;
/// Dynamic shared memory of a block of `decode_wide`, as in `attention.cu`.
pub(super) const WIDE_SHARED_BYTES: usize = 64 << 10;
/// Packed rows up to which a sequence is divided into work items of `decode`.
const MOST_DECODE_ROWS: usize = 64;
/// Bytes of partial results, and work items of `decode` that have them, beyond which sequences are work items of
/// `prefill`: there are enough work items then.
const MOST_PARTIAL_BYTES: usize = 256 << 20;
const MOST_SPLIT_WORK_ITEMS: usize = 1 << 16;
/// Blocks of a launch of `combine` that occupy a device. If its work items give fewer, several blocks share the rows of
/// a work item.
const ENOUGH_BLOCKS: usize = 256;
const BLOCKS_OF_A_WORK_ITEM: usize = 4;

/// A work item, as the kernels read it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub(super) struct WorkItem {
    /// The first query of the sequence, its position, and the first block of the sequence.
    pub first_row: u32,
    pub start: u32,
    pub first_block: u32,
    /// The first packed row, and their number. A work item without rows does nothing.
    pub first: u32,
    pub count: u32,
    /// The split, in work items of `decode`.
    pub split: u32,
    /// The first row of the part's partial results, if it has several splits.
    pub partial: u32,
    reserved: u32,
}

/// The work items of a step. Lists of `decode` and `combine` end with work items without rows, so that steps of similar
/// size have lists of equal length.
#[derive(Clone, Debug, Default)]
pub(super) struct WorkItems {
    pub decode: Vec<WorkItem>,
    pub combine: Vec<WorkItem>,
    pub prefill: Vec<WorkItem>,
}

impl WorkItems {
    /// The most work items of a step, all kinds together: one for a part, and those with one of `partial_rows` rows of
    /// partial results or more.
    pub fn most(tokens: usize, sequences: usize, heads: HeadShape, partial_rows: usize) -> usize {
        let group = heads.heads / heads.kv_heads.max(1);
        let parts = tokens.saturating_mul(group).div_ceil(DECODE_ROWS).saturating_add(sequences);
        let work_items = parts.saturating_add(partial_rows / rows_of_split(heads));
        work_items.saturating_add(work_items / 4).saturating_add(2)
    }

    /// Divides the sequences of a step. Partial results have at most `most_rows` rows, work items of prefill
    /// `prefill_rows`.
    pub fn divide(
        &mut self,
        sequences: &[AttentionRow],
        HeadShape { heads, kv_heads, .. }: HeadShape,
        most_rows: usize,
        prefill_rows: usize,
    ) {
        let group = heads / kv_heads;
        self.decode.clear();
        self.combine.clear();
        self.prefill.clear();
        let mut used = 0;
        for sequence in sequences {
            let packed = sequence.num_queries * group;
            // The number of splits of a part that ends before packed row `end`.
            let splits = |end: usize| (sequence.start + (end - 1) / group) / SPLIT + 1;
            let item = |first: usize, rows: usize| WorkItem {
                first_row: sequence.first_query as u32,
                start: sequence.start as u32,
                first_block: sequence.blocks.start as u32,
                first: first as u32,
                count: rows.min(packed - first) as u32,
                ..WorkItem::default()
            };
            let most_splits = if packed == 0 { 0 } else { splits(packed) };
            let needed = if most_splits > 1 { most_splits * kv_heads * packed } else { 0 };
            if packed > MOST_DECODE_ROWS || used + needed > most_rows {
                // The last ones take longest, and begin first.
                self.prefill
                    .extend((0..packed).step_by(prefill_rows).rev().map(|first| item(first, prefill_rows)));
                continue;
            }
            for first in (0..packed).step_by(DECODE_ROWS) {
                let item = WorkItem { partial: used as u32, ..item(first, DECODE_ROWS) };
                let (rows, splits) = (item.count as usize, splits(first + item.count as usize));
                self.decode.extend((0..splits).map(|split| WorkItem { split: split as u32, ..item }));
                if splits > 1 {
                    self.combine.push(item);
                    used += splits * kv_heads * rows;
                }
            }
        }
        for work_items in [&mut self.decode, &mut self.combine] {
            work_items.resize(padded(work_items.len()), WorkItem::default());
        }
    }
}

/// A number of work items or slightly more. There are 4 such numbers from a power of two to the next.
fn padded(work_items: usize) -> usize {
    work_items.next_multiple_of((work_items.next_power_of_two() / 8).max(1))
}

/// Whether `attention.cu` has `decode_wide` for heads of a cache: `HAS_WIDE`.
pub(super) fn has_wide_decode(head_dim: usize, dtype: KvDtype) -> bool {
    const WARPS: usize = 4;
    const WORD_BITS: usize = 128;
    let bits = match dtype {
        KvDtype::F32 => return false,
        KvDtype::F16 | KvDtype::Bf16 => 16,
        KvDtype::Int8 => 8,
        KvDtype::Uint4 => 4,
    };
    head_dim <= MOST_STATIC_HEAD_DIM && (head_dim * bits).div_ceil(WORD_BITS).is_multiple_of(WARPS)
}

/// Whether `attention_warpgroup.cu` has kernels for heads of a cache.
pub(super) fn has_warpgroups(head_dim: usize, dtype: KvDtype) -> bool {
    match dtype {
        KvDtype::F16 | KvDtype::Bf16 => matches!(head_dim, 64 | 128),
        KvDtype::Int8 => head_dim == 128,
        KvDtype::F32 | KvDtype::Uint4 => false,
    }
}

/// Dynamic shared memory of a block of `attention_warpgroup.cu`, from a multiple of 1024 bytes on.
pub(super) fn warpgroup_shared_bytes(head_dim: usize, dtype: KvDtype) -> usize {
    const ALIGNMENT: usize = 1024;
    const ROWS: usize = 3 * 2 * 64; // of two pairs of 64 tokens: keys, values and transposed values
    let operands = ROWS * head_dim * size_of::<half::f16>();
    let totals = WARPGROUP_ROWS * head_dim * size_of::<f32>();
    // With int8, stored keys and values together take the bytes of 16-bit values. The parameters of 16 tokens take 12
    // words, for four pairs.
    let parameters = if dtype == KvDtype::Int8 { 4 * 4 * 12 * 16 } else { 0 };
    ALIGNMENT + operands + totals + parameters
}

/// Whether `decode_wide` takes less time than `decode`: up to one block for each multiprocessor, or two if the cache is
/// quantised (measured on an H100).
pub(super) fn is_wide_faster(
    work_items: usize,
    kv_heads: usize,
    multiprocessors: usize,
    dtype: KvDtype,
) -> bool {
    let blocks = if matches!(dtype, KvDtype::Int8 | KvDtype::Uint4) { 2 } else { 1 };
    work_items * kv_heads <= blocks * multiprocessors
}

/// The blocks that share the rows of a work item of `combine`.
pub(super) fn combine_blocks(work_items: usize, kv_heads: usize) -> usize {
    if work_items * kv_heads < ENOUGH_BLOCKS { BLOCKS_OF_A_WORK_ITEM } else { 1 }
}

/// Rows of partial results of a split, for all key heads: at least as many, on average over the parts of a sequence.
fn rows_of_split(heads: HeadShape) -> usize {
    let group = heads.heads / heads.kv_heads.max(1);
    heads.kv_heads.saturating_mul(group.min(DECODE_ROWS / 2)).max(1)
}

/// Rows of partial results that a step needs if all its sequences are as long as the longest, up to a limit: for each
/// sequence, split, query and head. Sequences may have several queries, if drafts are verified: 4 on average.
pub(super) fn partial_rows(spec: &StepSpec) -> usize {
    let HeadShape { heads, head_dim, .. } = spec.heads;
    let most = MOST_PARTIAL_BYTES / partial_row_bytes(head_dim);
    let most = most.min(MOST_SPLIT_WORK_ITEMS.saturating_mul(rows_of_split(spec.heads)));
    let each = spec.positions.div_ceil(SPLIT).saturating_mul(heads).saturating_mul(4);
    spec.sequences.saturating_mul(each).clamp(1, most)
}

/// Bytes of a row of partial results: the values, the largest exponent and the sum.
pub(super) fn partial_row_bytes(head_dim: usize) -> usize {
    (head_dim + 2) * size_of::<f32>()
}

#[cfg(test)]
mod tests {
    use penstock_types::config_limits::{MAX_MODEL_LEN, MAX_NUM_BATCHED_TOKENS};

    use super::*;

    fn sequence(start: usize, num_queries: usize) -> AttentionRow {
        AttentionRow { first_query: 0, num_queries, start, blocks: 0..0 }
    }

    fn heads(group: usize, kv_heads: usize) -> HeadShape {
        HeadShape { heads: group * kv_heads, kv_heads, head_dim: 64 }
    }

    fn divided(sequences: &[AttentionRow], group: usize, most_rows: usize) -> WorkItems {
        let mut work_items = WorkItems::default();
        work_items.divide(sequences, heads(group, 2), most_rows, PREFILL_ROWS);
        work_items
    }

    /// First row, number of rows, split, and place of partial results.
    fn parts(work_items: &[WorkItem]) -> Vec<(u32, u32, u32, u32)> {
        work_items.iter().map(|item| (item.first, item.count, item.split, item.partial)).collect()
    }

    #[test]
    fn few_rows_are_decoded_and_many_are_not() {
        let work_items = divided(&[sequence(600, 1), sequence(0, 100), sequence(253, 7)], 4, 1000);
        // The first part of the last sequence ends at position 256, the second one at 259.
        let first = [(0, 4, 0, 0), (0, 4, 1, 0), (0, 4, 2, 0)];
        let last = [(0, 16, 0, 24), (0, 16, 1, 24), (16, 12, 0, 88), (16, 12, 1, 88)];
        assert_eq!(parts(&work_items.decode), [&first[..], &last].concat());
        assert_eq!(parts(&work_items.combine), [first[0], last[0], last[2]]);
        assert_eq!(parts(&work_items.prefill)[..2], [(384, 16, 0, 0), (320, 64, 0, 0)]);
        assert_eq!(work_items.prefill.len(), 400_usize.div_ceil(64));
        let mut work_items = WorkItems::default();
        work_items.divide(&[sequence(0, 100)], heads(4, 2), 1000, 128);
        assert_eq!(parts(&work_items.prefill)[..2], [(384, 16, 0, 0), (256, 128, 0, 0)]);
    }

    #[test]
    fn parts_with_one_split_are_not_combined() {
        let work_items = divided(&[sequence(255, 1), sequence(256, 1), sequence(0, 16)], 4, 1000);
        let four = |start| (0..4).map(move |part| (16 * part, 16, 0, start));
        let expected: Vec<_> =
            [(0, 4, 0, 0), (0, 4, 0, 0), (0, 4, 1, 0)].into_iter().chain(four(16)).collect();
        assert_eq!(parts(&work_items.decode), expected);
        assert_eq!(parts(&work_items.combine), [(0, 4, 0, 0)]);
    }

    #[test]
    fn partial_results_have_a_limit() {
        let sequences = [sequence(600, 1), sequence(600, 1)];
        let work_items = divided(&sequences, 4, 47);
        assert_eq!((work_items.decode.len(), work_items.combine.len(), work_items.prefill.len()), (3, 1, 1));
        assert_eq!(divided(&sequences, 4, 48).combine.len(), 2);
        assert_eq!(divided(&[sequence(0, 1)], 4, 0).decode.len(), 1);
    }

    #[test]
    fn lists_of_similar_length_are_equal() {
        let lengths: std::collections::BTreeSet<_> = (1..=1024).map(padded).collect();
        assert_eq!(lengths.len(), 8 + 4 * 7);
        assert!((0..2000).all(|count| (count..=count + count / 4).contains(&padded(count))));
        let work_items = divided(&vec![sequence(5000, 1); 9], 4, 1 << 20);
        assert_eq!((work_items.decode.len(), work_items.combine.len()), (192, 10));
        assert!(
            work_items.decode[180..]
                .iter()
                .chain(&work_items.combine[9..])
                .all(|item| *item == WorkItem::default())
        );
    }

    #[test]
    fn most_work_items_are_never_exceeded() {
        for (tokens, count) in [(1, 1), (512, 1), (512, 64), (512, 512), (1200, 100)] {
            for (start, group, kv_heads) in combinations(&[0, 255, 3000], &[1, 3, 8, 17, 32], &[1, 2, 8]) {
                let sequences: Vec<_> = (0..count).map(|_| sequence(start, tokens / count)).collect();
                let heads = HeadShape { heads: group * kv_heads, kv_heads, head_dim: 64 };
                for rows in [1, 100, 1 << 20] {
                    let mut work_items = WorkItems::default();
                    work_items.divide(&sequences, heads, rows, PREFILL_ROWS);
                    let number =
                        work_items.decode.len() + work_items.combine.len() + work_items.prefill.len();
                    assert!(
                        number <= WorkItems::most(tokens, count, heads, rows),
                        "{start} {heads:?} {rows}"
                    );
                    let last = work_items.combine.iter().rfind(|item| item.count > 0);
                    let end = last.map_or(0, |item| {
                        let is_same =
                            |other: &&WorkItem| (other.first, other.partial) == (item.first, item.partial);
                        let splits = work_items.decode.iter().filter(is_same).count();
                        item.partial as usize + splits * kv_heads * item.count as usize
                    });
                    assert!(end <= rows);
                }
            }
        }
    }

    #[test]
    fn heads_of_whole_words_have_wide_decode() {
        let dims =
            |dtype| -> Vec<_> { (32..=256).step_by(16).filter(|&dim| has_wide_decode(dim, dtype)).collect() };
        assert_eq!(dims(KvDtype::Bf16), [32, 64, 96, 128]);
        assert_eq!(dims(KvDtype::Int8), [64, 128]);
        assert_eq!(dims(KvDtype::Uint4), [112, 128]);
    }

    #[test]
    fn shared_memory_of_warpgroups_is_that_of_the_kernels() {
        let bytes = |dtype| [64, 128].map(|dim| warpgroup_shared_bytes(dim, dtype));
        assert_eq!(bytes(KvDtype::Bf16), [82_944, 164_864]);
        assert_eq!(bytes(KvDtype::Int8)[1], 167_936);
    }

    #[test]
    fn few_work_items_have_wide_decode() {
        let most = |dtype| (1..100).rfind(|&count| is_wide_faster(count, 8, 132, dtype));
        assert_eq!((most(KvDtype::Bf16), most(KvDtype::Int8)), (Some(16), Some(33)));
    }

    #[test]
    fn longest_sequences_have_few_work_items() {
        for (kv_heads, head_dim) in [(1, 2), (8, 128), (1, 128), (128, 256)] {
            let heads = HeadShape { heads: 128, kv_heads, head_dim };
            let (tokens, sequences) = (MAX_NUM_BATCHED_TOKENS, 4096);
            let (positions, block_size, vocabulary) = (MAX_MODEL_LEN, 16, 1000);
            let spec =
                StepSpec { tokens, sequences, logits_rows: 1, positions, block_size, heads, vocabulary };
            let rows = partial_rows(&spec);
            assert!(rows * partial_row_bytes(head_dim) <= MOST_PARTIAL_BYTES);
            let most = WorkItems::most(0, 0, heads, rows);
            assert!(most <= MOST_SPLIT_WORK_ITEMS / 4 * 5 + 2, "{heads:?}");
            assert!(
                i32::try_from(WorkItems::most(tokens, sequences, heads, rows)).is_ok(),
                "the limit of a launch"
            );
        }
    }

    fn combinations(a: &[usize], b: &[usize], c: &[usize]) -> Vec<(usize, usize, usize)> {
        let pairs = a.iter().flat_map(|a| b.iter().map(move |b| (*a, *b)));
        pairs.flat_map(|(a, b)| c.iter().map(move |c| (a, b, *c))).collect()
    }
}
