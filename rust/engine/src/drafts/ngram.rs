//! Drafts by looking up: what followed the last few tokens when they came before, in prompt or output.
//!
//! There is no index to build, keep and pay memory for: a bounded stretch is searched for the last token, backwards, and
//! where it stands the tokens before it are compared. Eight thousand tokens take five microseconds, and twenty-five if
//! every third is the one looked for; and only a sequence that drafts does it.

use crate::prefix::Tokens;

/// Tokens that have to be the same: the longer suffix is looked for first, the shorter one last.
const LONGEST: usize = 4;
const SHORTEST: usize = 2;

/// The last token has to stand among so many before it.
const LOOK_BACK: usize = 8192;

/// Appends to `drafts` what is likely to follow `tokens`: what followed the longest of its suffixes that came before, the
/// last time it did. If that reaches to the end, it goes round. Either `num_drafts` tokens or, where nothing is found,
/// none.
pub(crate) fn look_up(tokens: Tokens<'_>, num_drafts: usize, drafts: &mut Vec<u32>) {
    let len = tokens.len();
    let Some(follower) = find(tokens) else { return };
    let first = drafts.len();
    for position in follower..follower + num_drafts {
        let draft = if position < len { tokens.at(position) } else { drafts[first + position - len] };
        drafts.push(draft);
    }
}

/// The position after the earlier occurrence of the suffix.
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

    /// Every suffix against every place, the longest first and the latest first.
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
        fn what_is_found_is_what_the_naive_search_finds(
            tokens in prop::collection::vec(0..4u32, 1..40),
            split in 0..40usize,
            num_drafts in 0..12usize,
        ) {
            check(&tokens, split.min(tokens.len()), num_drafts);
        }
    }

    #[test]
    fn the_longer_suffix_wins_over_the_later_one() {
        let tokens = [1, 2, 3, 4, 50, 9, 3, 4, 60, 1, 2, 3, 4];
        let mut drafts = vec![];
        look_up(Tokens { prompt: &tokens[..6], generated: &tokens[6..] }, 3, &mut drafts);
        assert_eq!(drafts, [50, 9, 3]);
    }

    #[test]
    fn what_repeats_itself_is_drafted_round_and_round() {
        let tokens = [7, 8, 9, 7, 8, 9, 7, 8];
        let mut drafts = vec![];
        look_up(Tokens { prompt: &tokens, generated: &[] }, 7, &mut drafts);
        assert_eq!(drafts, [9, 7, 8, 9, 7, 8, 9]);
    }

    #[test]
    fn one_token_in_common_says_nothing() {
        let mut drafts = vec![];
        look_up(Tokens { prompt: &[1, 2, 3], generated: &[5, 3] }, 4, &mut drafts);
        assert!(drafts.is_empty());
    }

    #[test]
    fn the_search_ends_where_it_would_take_too_long() {
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
