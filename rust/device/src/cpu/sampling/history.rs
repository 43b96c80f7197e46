//! The tokens of a request so far, and the search for repeated n-grams in them.

/// The tokens of a request so far.
#[derive(Clone, Copy, Debug)]
pub(super) struct History<'a> {
    pub prompt: &'a [u32],
    pub generated: &'a [u32],
}

impl<'a> History<'a> {
    fn len(&self) -> usize {
        self.prompt.len() + self.generated.len()
    }

    fn iter(&self) -> impl DoubleEndedIterator<Item = &'a u32> {
        self.prompt.iter().chain(self.generated)
    }

    fn get(&self, index: usize) -> u32 {
        let in_prompt = self.prompt.get(index);
        *in_prompt.unwrap_or_else(|| &self.generated[index - self.prompt.len()])
    }

    pub fn ends_with(&self, ids: &[u32]) -> bool {
        let end = self.len();
        ids.iter().rev().enumerate().all(|(back, id)| back < end && self.get(end - 1 - back) == *id)
    }

    /// Calls `each` with every token that followed an earlier occurrence of the last `count` tokens.
    pub fn for_each_following(&self, count: usize, each: impl FnMut(u32)) {
        let Some(start) = self.len().checked_sub(count) else { return };
        let run: Vec<u32> = (start..self.len()).map(|index| self.get(index)).collect();
        for_each_after(&run, self.iter().copied(), each);
    }
}

/// Calls `each` with every element of `all` that comes right after `run`. This is the search of Knuth, Morris and
/// Pratt: a few comparisons for each element, however long the run is and however it overlaps itself.
fn for_each_after<T: Copy + PartialEq>(run: &[T], all: impl Iterator<Item = T>, mut each: impl FnMut(T)) {
    if run.is_empty() {
        return all.for_each(each);
    }
    // For each prefix of the run, the length of its longest proper suffix that is a prefix of the run.
    let mut overlaps = vec![0; run.len() + 1];
    let extend = |overlaps: &[usize], mut matched: usize, next: T| {
        while matched > 0 && run[matched] != next {
            matched = overlaps[matched];
        }
        matched + usize::from(run[matched] == next)
    };
    for end in 1..run.len() {
        overlaps[end + 1] = extend(&overlaps, overlaps[end], run[end]);
    }
    let mut matched = 0;
    for next in all {
        if matched == run.len() {
            each(next);
            matched = overlaps[matched];
        }
        matched = extend(&overlaps, matched, next);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    thread_local! {
        static NUM_COMPARISONS: Cell<usize> = const { Cell::new(0) };
    }

    /// Counts its comparisons.
    #[derive(Clone, Copy)]
    struct Counted(u32);

    impl PartialEq for Counted {
        fn eq(&self, other: &Self) -> bool {
            NUM_COMPARISONS.set(NUM_COMPARISONS.get() + 1);
            self.0 == other.0
        }
    }

    /// The tokens that follow earlier occurrences of the last `count` tokens of `all`.
    fn after(all: &[u32], count: usize) -> Vec<u32> {
        let all: Vec<Counted> = all.iter().copied().map(Counted).collect();
        let mut found = vec![];
        for_each_after(&all[all.len() - count..], all.iter().copied(), |next| found.push(next.0));
        found
    }

    #[test]
    fn overlapping_runs_are_all_found() {
        // All sequences of ten of two tokens.
        for bits in 0..1_u32 << 10 {
            let all: Vec<u32> = (0..10).map(|bit| bits >> bit & 1).collect();
            for count in 0..=10 {
                let run = &all[10 - count..];
                let naive: Vec<u32> =
                    (count..10).filter(|end| all[..*end].ends_with(run)).map(|end| all[end]).collect();
                assert_eq!(after(&all, count), naive, "{all:?}, {count}");
            }
        }
    }

    #[test]
    fn long_run_takes_no_more_comparisons_than_short_one() {
        let mut almost = vec![7; 4000];
        almost[1999] = 8;
        for all in [vec![7; 4000], almost] {
            for count in [1, 2, 1000, 2000] {
                NUM_COMPARISONS.set(0);
                after(&all, count);
                assert!(NUM_COMPARISONS.get() <= 4 * all.len(), "{count}: {}", NUM_COMPARISONS.get());
            }
        }
    }
}
