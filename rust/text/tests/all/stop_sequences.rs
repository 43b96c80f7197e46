//! Stop token sequences, compared with a naive search.

use penstock_text::StopSequences;
use proptest::collection::vec;
use proptest::prelude::*;

/// Length of the longest suffix of `ids` that is a prefix of a sequence.
fn naive(ids: &[u32], sequences: &[Vec<u32>]) -> usize {
    let longest = |sequence: &Vec<u32>| {
        let lengths = (1..=sequence.len()).rev();
        lengths.into_iter().find(|&length| ids.ends_with(&sequence[..length])).unwrap_or(0)
    };
    sequences.iter().map(longest).max().unwrap_or(0)
}

fn check(ids: &[u32], sequences: &[Vec<u32>]) {
    let mut stops = StopSequences::new(sequences);
    for length in 1..=ids.len() {
        let given = stops.push(ids[length - 1]);
        assert_eq!(given, naive(&ids[..length], sequences), "{:?} of {sequences:?}", &ids[..length]);
    }
}

#[test]
fn without_sequences_nothing_is_held_back() {
    check(&[1, 2, 3], &[]);
}

#[test]
fn sequences_that_overlap_themselves_are_followed() {
    check(&[1, 1, 1, 2, 1, 1, 2, 1, 1, 2], &[vec![1, 1, 2], vec![1, 1, 2, 1, 1, 2, 1, 1, 3]]);
    check(&[7; 9], &[vec![7; 4]]);
}

proptest! {
    #[test]
    fn every_push_matches_the_naive_search(
        ids in vec(0..3_u32, 0..60),
        sequences in vec(vec(0..3_u32, 1..8), 0..5),
    ) {
        check(&ids, &sequences);
    }
}
