//! The distinct tokens of a request and how often each occurs, for penalties.
//!
//! The size depends on the number of distinct tokens, not on the vocabulary. The hash of the map has a random key, so
//! tokens that collide are not known in advance. It is a fast one: a long prompt is counted whenever a sequence gets a
//! slot.

use std::collections::HashMap;

use foldhash::fast::RandomState;

/// One distinct token of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TokenCount {
    pub id: u32,
    pub in_prompt: bool,
    /// Number of times it was generated.
    pub generated: u32,
}

/// The distinct tokens of a request's prompt and output. A push is O(1), amortised.
#[derive(Debug, Default)]
pub(crate) struct TokenCounts {
    /// In the order of their first occurrence.
    counts: Vec<TokenCount>,
    /// The index of each id in `counts`.
    indices: HashMap<u32, usize, RandomState>,
}

impl TokenCounts {
    /// Adds tokens of the prompt.
    pub fn push_prompt(&mut self, ids: &[u32]) {
        for id in ids {
            self.count_of(*id).in_prompt = true;
        }
    }

    /// Adds a generated token.
    pub fn push(&mut self, id: u32) {
        let count = self.count_of(id);
        count.generated = count.generated.saturating_add(1);
    }

    /// The distinct tokens, in the order of their first occurrence.
    pub fn iter(&self) -> impl Iterator<Item = TokenCount> + '_ {
        self.counts.iter().copied()
    }

    fn count_of(&mut self, id: u32) -> &mut TokenCount {
        let counts = &mut self.counts;
        let index = *self.indices.entry(id).or_insert_with(|| {
            counts.push(TokenCount { id, in_prompt: false, generated: 0 });
            counts.len() - 1
        });
        &mut counts[index]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompt_and_generated_tokens_are_counted_apart() {
        let mut counts = TokenCounts::default();
        counts.push_prompt(&[7, 3, 7]);
        counts.push_prompt(&[]);
        counts.push(3);
        counts.push(u32::MAX);
        counts.push(3);
        let got: Vec<_> = counts.iter().map(|count| (count.id, count.in_prompt, count.generated)).collect();
        assert_eq!(got, [(7, true, 0), (3, true, 2), (u32::MAX, false, 1)]);
    }
}
