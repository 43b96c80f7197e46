//! [`Bits`]: sets of small integers.

use super::TranslationError;
use super::steps::Steps;

/// Steps for a word of memory.
const STEPS_OF_A_WORD: usize = 8;

/// A set of small integers.
#[derive(Clone, Default)]
pub(super) struct Bits {
    words: Vec<u64>,
}

impl Bits {
    /// Sets of integers below `size`.
    pub(super) fn table(count: usize, size: usize, steps: &mut Steps) -> Result<Vec<Self>, TranslationError> {
        let words = size.div_ceil(64);
        steps.take(count.saturating_mul(words).saturating_mul(STEPS_OF_A_WORD))?;
        Ok(vec![Self { words: vec![0; words] }; count])
    }

    /// Returns whether it was not in the set.
    pub(super) fn insert(&mut self, index: usize) -> bool {
        let (word, bit) = (&mut self.words[index / 64], 1 << (index % 64));
        let is_new = *word & bit == 0;
        *word |= bit;
        is_new
    }

    /// Removes all members.
    pub(super) fn clear(&mut self) {
        self.words.fill(0);
    }

    /// Adds the members of another set. Returns whether there were new ones.
    pub(super) fn extend(&mut self, other: &Self) -> bool {
        let mut changed = false;
        for (word, &other) in self.words.iter_mut().zip(&other.words) {
            changed |= other & !*word != 0;
            *word |= other;
        }
        changed
    }

    /// The members that are not in another set.
    pub(super) fn without(&self, other: &Self) -> Self {
        Self { words: self.words.iter().zip(&other.words).map(|(word, other)| word & !other).collect() }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = usize> {
        self.words.iter().enumerate().flat_map(|(index, &word)| {
            let without_lowest = |rest: &u64| Some(rest & (rest - 1)).filter(|&rest| rest != 0);
            std::iter::successors(Some(word).filter(|&word| word != 0), without_lowest)
                .map(move |rest| index * 64 + rest.trailing_zeros() as usize)
        })
    }

    pub(super) fn num_words(&self) -> usize {
        self.words.len()
    }
}
