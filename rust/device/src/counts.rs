//! Which tokens a request has so far, and how often: what penalties ask.
//!
//! As large as there are distinct tokens, whatever the vocabulary. The map hashes with a key of its own, so nobody can
//! choose a prompt whose tokens collide.

use std::collections::HashMap;
use std::sync::LazyLock;

/// One distinct token of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenCount {
    /// Its id.
    pub id: u32,
    /// Whether the prompt has it.
    pub in_prompt: bool,
    /// How often it was generated.
    pub generated: u32,
}

/// The distinct tokens of a request's prompt and output. A push is O(1), amortised; memory is kept from one request to the
/// next.
#[derive(Debug, Default)]
pub struct TokenCounts {
    /// In the order of their first appearance.
    counts: Vec<TokenCount>,
    /// Where each id is in `counts`.
    places: HashMap<u32, usize>,
}

impl TokenCounts {
    /// Of no tokens.
    pub fn new() -> Self {
        Self::default()
    }

    /// Of no tokens, for whoever has nothing to count.
    pub(crate) fn none() -> &'static Self {
        static NONE: LazyLock<TokenCounts> = LazyLock::new(TokenCounts::new);
        &NONE
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.counts.clear();
        self.places.clear();
    }

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

    /// The distinct tokens, in the order of their first appearance.
    pub fn iter(&self) -> impl Iterator<Item = TokenCount> + '_ {
        self.counts.iter().copied()
    }

    fn count_of(&mut self, id: u32) -> &mut TokenCount {
        let counts = &mut self.counts;
        let place = *self.places.entry(id).or_insert_with(|| {
            counts.push(TokenCount { id, in_prompt: false, generated: 0 });
            counts.len() - 1
        });
        &mut counts[place]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_counted_once_each_and_prompt_and_output_apart() {
        let mut counts = TokenCounts::new();
        for _ in 0..2 {
            counts.push_prompt(&[7, 3, 7]);
            counts.push_prompt(&[]);
            counts.push(3);
            counts.push(u32::MAX);
            counts.push(3);
            let got: Vec<_> = counts.iter().map(|seen| (seen.id, seen.in_prompt, seen.generated)).collect();
            assert_eq!(got, [(7, true, 0), (3, true, 2), (u32::MAX, false, 1)]);
            counts.clear();
            assert_eq!(counts.iter().count(), 0);
        }
    }

    #[test]
    fn memory_is_kept_for_the_next_request() {
        let mut counts = TokenCounts::new();
        counts.push_prompt(&(0..1000).collect::<Vec<u32>>());
        let before = (counts.counts.capacity(), counts.places.capacity());
        counts.clear();
        assert_eq!((counts.counts.capacity(), counts.places.capacity()), before);
    }
}
