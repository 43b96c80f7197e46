//! What a sequence is known by in the prefix cache: where it may share, and the hashes of its full blocks.

use std::ops::Range;

use super::Namespace;
use super::hash::BlockHasher;

/// The tokens of a sequence, in two pieces.
#[derive(Clone, Copy)]
pub struct Tokens<'a> {
    /// What it came with.
    pub prompt: &'a [u32],
    /// What was added since.
    pub generated: &'a [u32],
}

impl Tokens<'_> {
    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.prompt.len() + self.generated.len()
    }

    /// The one at `position`.
    pub(crate) fn at(&self, position: usize) -> u32 {
        match position.checked_sub(self.prompt.len()) {
            None => self.prompt[position],
            Some(index) => self.generated[index],
        }
    }

    /// Appends those at `positions` to `out`.
    pub fn copy(&self, positions: Range<usize>, out: &mut Vec<u32>) {
        let split = self.prompt.len();
        let Range { start, end } = positions;
        out.extend_from_slice(&self.prompt[start.min(split)..end.min(split)]);
        out.extend_from_slice(&self.generated[start.max(split) - split..end.max(split) - split]);
    }
}

/// Belongs to one sequence for all its life, whatever places it has: no block is hashed twice.
///
/// Invariant: `hashes` is empty, or starts with the namespace's and goes on with one for each of the first full blocks.
#[derive(Debug, Default)]
pub struct Chain {
    namespace: Namespace,
    hashes: Vec<u128>,
    max_blocks: usize,
}

impl Chain {
    /// Of a sequence that may share its first `max_blocks` blocks, and so far has `num_ahead` in sight.
    pub fn new(namespace: Namespace, max_blocks: usize, num_ahead: usize) -> Self {
        let capacity = if max_blocks == 0 { 0 } else { 1 + num_ahead.min(max_blocks) };
        Self { namespace, hashes: Vec::with_capacity(capacity), max_blocks }
    }

    /// Where it may share.
    pub fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// How many of its first blocks it may share.
    pub fn max_blocks(&self) -> usize {
        self.max_blocks
    }

    /// The hash after block `index`, whose tokens are `tokens`; asked for in order, the first time.
    pub(super) fn hash(&mut self, index: usize, tokens: &[u32], hasher: &BlockHasher) -> u128 {
        if self.hashes.is_empty() {
            let salt = self.namespace.salt.as_deref().unwrap_or_default();
            let words: Vec<u32> = salt.bytes().map(u32::from).collect();
            self.hashes.push(hasher.hash(0, &words));
        }
        if self.hashes.len() == index + 1 {
            self.hashes.push(hasher.hash(self.hashes[index], tokens));
        }
        self.hashes[index + 1]
    }
}
