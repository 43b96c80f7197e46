//! Drafts by n-gram lookup: the tokens that followed an earlier occurrence of the last few tokens, in prompt or output.
//!
//! No index: the last tokens are searched backwards for the last one, and the tokens before each match are compared.
//! Eight thousand tokens take five microseconds, and twenty-five if every third is a match.

use crate::prefix_cache::Tokens;

/// The lengths of the suffixes that are looked for, the longest first.
const LONGEST: usize = 4;
const SHORTEST: usize = 2;

/// The number of tokens before the last one that are searched.
const LOOK_BACK: usize = 8192;

/// Appends to `drafts` the tokens that are likely to follow `tokens`: those after the latest earlier occurrence of the
/// longest suffix that has one, repeated if they reach the end of `tokens`. Either `num_drafts` tokens or none.
pub(crate) fn look_up(tokens: Tokens<'_>, num_drafts: usize, drafts: &mut Vec<u32>) {
    let len = tokens.len();
    let Some(follower) = find(tokens) else { return };
    let first = drafts.len();
    for position in follower..follower + num_drafts {
        let draft = if position < len { tokens.at(position) } else { drafts[first + position - len] };
        drafts.push(draft);
    }
}

/// The position after the latest earlier occurrence of the longest suffix.
fn find(tokens: Tokens<'_>) -> Option<usize> {
    let last = tokens.len().checked_sub(1)?;
    let (lowest, split) = (last.saturating_sub(LOOK_BACK), tokens.prompt.len());
    let (mut longest, mut follower) = (SHORTEST - 1, None);
    let prompt = tokens.prompt[lowest.min(split)..last.min(split)].iter().rev();
    let generated = tokens.generated[lowest.max(split) - split..last.max(split) - split].iter().rev();
    let token = tokens.at(last);
    for (distance, _) in (1..).zip(generated.chain(prompt)).filter(|(_, other)| **other == token) {
        let is_same = |back: &usize| tokens.at(last - back) == tokens.at(last - distance - back);
        let num_before = (LONGEST - 1).min(last - distance);
        let len = 1 + (1..=num_before).take_while(is_same).count();
        if len > longest {
            (longest, follower) = (len, Some(last - distance + 1));
        }
        if len == LONGEST {
            break;
        }
    }
    follower
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Every suffix at every position, the longest first and the latest first.
    fn naive(tokens: &[u32], num_drafts: usize) -> Vec<u32> {
        let mut known = tokens.to_vec();
        for len in (SHORTEST..=LONGEST.min(tokens.len())).rev() {
            let (before, suffix) = tokens.split_at(tokens.len() - len);
            for start in (0..before.len()).rev() {
                if tokens[start..start + len] == *suffix && before.len() - start <= LOOK_BACK {
                    (0..num_drafts).for_each(|index| known.push(known[start + len + index]));
                    return known.split_off(tokens.len());
                }
            }
        }
        vec![]
    }

    fn check(tokens: &[u32], split: usize, num_drafts: usize) {
        let mut drafts = vec![77];
        let (prompt, generated) = tokens.split_at(split);
        look_up(Tokens { prompt, generated }, num_drafts, &mut drafts);
        assert_eq!(drafts[1..], naive(tokens, num_drafts), "{tokens:?} split at {split}");
    }

    proptest! {
        #[test]
        fn lookup_agrees_with_the_naive_search(
            tokens in prop::collection::vec(0..4u32, 1..40),
            split in 0..40usize,
            num_drafts in 0..12usize,
        ) {
            check(&tokens, split.min(tokens.len()), num_drafts);
        }
    }

    #[test]
    fn a_longer_suffix_wins_over_a_later_one() {
        let tokens = [1, 2, 3, 4, 50, 9, 3, 4, 60, 1, 2, 3, 4];
        let mut drafts = vec![];
        look_up(Tokens { prompt: &tokens[..6], generated: &tokens[6..] }, 3, &mut drafts);
        assert_eq!(drafts, [50, 9, 3]);
    }

    #[test]
    fn a_repetition_is_drafted_repeatedly() {
        let tokens = [7, 8, 9, 7, 8, 9, 7, 8];
        let mut drafts = vec![];
        look_up(Tokens { prompt: &tokens, generated: &[] }, 7, &mut drafts);
        assert_eq!(drafts, [9, 7, 8, 9, 7, 8, 9]);
    }

    #[test]
    fn one_common_token_gives_no_drafts() {
        let mut drafts = vec![];
        look_up(Tokens { prompt: &[1, 2, 3], generated: &[5, 3] }, 4, &mut drafts);
        assert!(drafts.is_empty());
    }

    #[test]
    fn the_search_is_bounded() {
        for distance in [LOOK_BACK, LOOK_BACK + 1] {
            let between = 10..10 + distance as u32 - 3;
            let tokens: Vec<u32> = [1, 2, 3].into_iter().chain(between).chain([1, 2]).collect();
            let mut drafts = vec![];
            look_up(Tokens { prompt: &[], generated: &tokens }, 1, &mut drafts);
            assert_eq!(drafts.len(), usize::from(distance == LOOK_BACK), "{distance}");
            check(&tokens, 5, 3);
        }
    }
}
