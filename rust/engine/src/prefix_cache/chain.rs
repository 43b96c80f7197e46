//! The key of a sequence in the prefix cache: its namespace and the hashes of its full blocks.

use std::ops::Range;

use super::hash::BlockHasher;
use super::namespace::Namespace;

/// The tokens of a sequence, in two pieces.
#[derive(Clone, Copy)]
pub struct Tokens<'a> {
    /// The prompt of its request.
    pub prompt: &'a [u32],
    /// The generated tokens.
    pub generated: &'a [u32],
}

impl Tokens<'_> {
    pub(crate) fn len(&self) -> usize {
        self.prompt.len() + self.generated.len()
    }

    pub(crate) fn at(&self, position: usize) -> u32 {
        match position.checked_sub(self.prompt.len()) {
            None => self.prompt[position],
            Some(index) => self.generated[index],
        }
    }

    /// Appends the tokens at `positions` to `out`.
    pub fn copy(&self, positions: Range<usize>, out: &mut Vec<u32>) {
        let split = self.prompt.len();
        let Range { start, end } = positions;
        out.extend_from_slice(&self.prompt[start.min(split)..end.min(split)]);
        out.extend_from_slice(&self.generated[start.max(split) - split..end.max(split) - split]);
    }
}

/// The chained block hashes of one sequence. It lives as long as the sequence, so no block is hashed twice.
///
/// Invariant: `hashes` is empty, or it is the hash of the namespace followed by those of the first full blocks.
#[derive(Debug, Default)]
pub struct Chain {
    namespace: Namespace,
    hashes: Vec<u128>,
    max_blocks: usize,
    /// The number of hashes that memory is allocated for with the first.
    num_ahead: usize,
}

impl Chain {
    /// The key of a sequence that may share its first `max_blocks` blocks. The first hash allocates for `num_ahead` of
    /// them.
    pub fn new(namespace: Namespace, max_blocks: usize, num_ahead: usize) -> Self {
        Self { namespace, hashes: Vec::new(), max_blocks, num_ahead: 1 + num_ahead.min(max_blocks) }
    }

    /// The namespace in which it shares blocks.
    pub fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// The number of first blocks that it may share.
    pub fn max_blocks(&self) -> usize {
        self.max_blocks
    }

    /// The number of first blocks with hashes.
    pub(super) fn num_hashed(&self) -> usize {
        self.hashes.len().saturating_sub(1)
    }

    /// The hash after block `index`, whose tokens are `tokens`. To be called in order of blocks the first time.
    pub(super) fn hash(&mut self, index: usize, tokens: &[u32], hasher: &BlockHasher) -> u128 {
        if self.hashes.is_empty() {
            self.hashes.reserve(self.num_ahead);
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
