//! The division of a step's attention into works.
//!
//! A work is some queries of a sequence times the heads that share a key head: its packed rows. Few rows are a work of
//! `decode`, which computes the splits of a sequence at the same time; many are works of `prefill`, which goes through them one
//! after the other. The results have the same bits, so the division is free.

use bytemuck::{Pod, Zeroable};
use penstock_types::AttentionRow;

/// Positions of a split, as in `attention.cu`.
const SPLIT: usize = 256;
/// Packed rows of a work of `decode`, and of `prefill`.
const DECODE_ROWS: usize = 16;
const PREFILL_ROWS: usize = 64;
/// Packed rows up to which a sequence is divided into works of `decode`.
const MOST_DECODE_ROWS: usize = 64;
/// Bytes of partial results beyond which sequences are works of `prefill`: there are enough of them then.
const MOST_PARTIAL_BYTES: usize = 256 << 20;

/// A sequence, as the kernels read it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub(super) struct Sequence {
    pub first_row: u32,
    pub num_queries: u32,
    pub start: u32,
    pub first_block: u32,
}

impl From<&AttentionRow> for Sequence {
    fn from(row: &AttentionRow) -> Self {
        Self {
            first_row: row.first_query as u32,
            num_queries: row.num_queries as u32,
            start: row.start as u32,
            first_block: row.blocks.start as u32,
        }
    }
}

/// A work, as the kernels read it.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub(super) struct Work {
    pub sequence: u32,
    /// The first packed row.
    pub first: u32,
    /// The first row of its partial results.
    pub partial: u32,
}

/// The works of a step.
#[derive(Clone, Debug, Default)]
pub(super) struct Works {
    pub decode: Vec<Work>,
    pub prefill: Vec<Work>,
    /// Splits of the work of `decode` that has most.
    pub most_splits: usize,
}

impl Works {
    /// The most works of a step.
    pub fn most(tokens: usize, sequences: usize, group: usize) -> usize {
        tokens.saturating_mul(group).div_ceil(DECODE_ROWS).saturating_add(sequences)
    }

    /// Divides the sequences of a step, with `group` query heads for each of `kv_heads` key heads. Partial results have at
    /// most `most_rows` rows.
    pub fn divide(&mut self, sequences: &[AttentionRow], group: usize, kv_heads: usize, most_rows: usize) {
        self.decode.clear();
        self.prefill.clear();
        self.most_splits = 0;
        let mut used = 0;
        for (index, sequence) in sequences.iter().enumerate() {
            let packed = sequence.num_queries * group;
            let splits = (sequence.start + sequence.num_queries).div_ceil(SPLIT);
            let needed = splits * kv_heads * packed;
            let is_decode = packed <= MOST_DECODE_ROWS && used + needed <= most_rows;
            let (works, rows) = match is_decode {
                true => (&mut self.decode, DECODE_ROWS),
                false => (&mut self.prefill, PREFILL_ROWS),
            };
            for first in (0..packed).step_by(rows) {
                works.push(Work { sequence: index as u32, first: first as u32, partial: used as u32 });
                if is_decode {
                    used += splits * kv_heads * rows.min(packed - first);
                }
            }
            if is_decode {
                self.most_splits = self.most_splits.max(splits);
            }
        }
    }
}

/// Rows of partial results that a step needs if all its sequences are as long as the longest, up to a limit.
pub(super) fn partial_rows(sequences: usize, positions: usize, heads: usize, head_dim: usize) -> usize {
    let most = MOST_PARTIAL_BYTES / partial_row_bytes(head_dim);
    // Sequences may have several queries, if drafts are verified.
    let each = positions.div_ceil(SPLIT).saturating_mul(heads).saturating_mul(4);
    sequences.saturating_mul(each).clamp(1, most)
}

/// Bytes of a row of partial results: the values, the largest exponent and the sum.
pub(super) fn partial_row_bytes(head_dim: usize) -> usize {
    (head_dim + 2) * size_of::<f32>()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sequence(start: usize, num_queries: usize) -> AttentionRow {
        AttentionRow { first_query: 0, num_queries, start, blocks: 0..0 }
    }

    fn divided(sequences: &[AttentionRow], group: usize, most_rows: usize) -> Works {
        let mut works = Works::default();
        works.divide(sequences, group, 2, most_rows);
        works
    }

    #[test]
    fn few_rows_are_decoded_and_many_are_not() {
        let works = divided(&[sequence(600, 1), sequence(0, 100), sequence(10, 7)], 4, 1000);
        let work = |sequence, first, partial| Work { sequence, first, partial };
        assert_eq!(works.decode, [work(0, 0, 0), work(2, 0, 24), work(2, 16, 24 + 32)]);
        assert_eq!(works.prefill.len(), 400_usize.div_ceil(64));
        assert_eq!(works.most_splits, 3);
    }

    #[test]
    fn partial_results_have_a_limit() {
        let sequences = [sequence(600, 1), sequence(600, 1)];
        let works = divided(&sequences, 4, 47);
        assert_eq!((works.decode.len(), works.prefill.len()), (1, 1));
        assert_eq!(divided(&sequences, 4, 48).decode.len(), 2);
    }

    #[test]
    fn most_works_are_never_exceeded() {
        for (tokens, count) in [(1, 1), (512, 1), (512, 64), (512, 512)] {
            let sequences: Vec<_> = (0..count).map(|_| sequence(0, tokens / count)).collect();
            for group in [1, 3, 8, 16] {
                let works = divided(&sequences, group, usize::MAX / 2);
                assert!(works.decode.len() + works.prefill.len() <= Works::most(tokens, count, group));
            }
        }
    }
}
