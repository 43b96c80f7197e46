//! How many drafts a sequence makes. Numbers in, a number out.
//!
//! *What drafts cost.* A step reads all weights once, however many rows it computes, and each row adds its arithmetic. In
//! units of a step of one row, a step of `n` rows takes about `1 + ROW_COST * (n - 1)`, and a draft is one row more. Besides,
//! plans of a sequence that drafts cannot be made in advance, which costs everybody `WAIT_COST`.
//!
//! *What they bring.* If each is confirmed with probability `p`, provided that those before it were, `d` drafts bring
//! `p + p^2 + ... + p^d` tokens more.
//!
//! *What is best* is the `d` with the most tokens per time, those of all `n` streams together:
//!
//! ```text
//!     (n + p + ... + p^d) / (1 + ROW_COST * (n - 1 + d) + WAIT_COST)        n / (1 + ROW_COST * (n - 1)) for none
//! ```
//!
//! A lone stream gains from a draft that comes true more often than 15 times of 100; one beside seven others only above
//! 70, for there the step's arithmetic is most of its cost already; so who drafts does not slow down who does not.
//!
//! `p` is an average over the latest guesses, those that were not drafted among them: the next token judges them all. So a try
//! costs nothing, and who does not know what follows, or guesses it wrong, is computed as if nobody guessed.

/// Measured on a CPU, where it matters most: steps of eight rows took 1.6 times as long as steps of one.
const ROW_COST: f32 = 0.1;
/// The engine's part of a step, when nothing hides it.
const WAIT_COST: f32 = 0.05;

/// What is thought of guesses before there were any.
const HOPE: f32 = 0.4;
/// Share of the latest guess in the average.
const WEIGHT: f32 = 0.25;

/// What one sequence expects of its guesses.
#[derive(Debug)]
pub(crate) struct Confidence {
    /// How probable it is that a guess is right, if those before it were.
    estimate: f32,
}

impl Confidence {
    /// Of a sequence that has not guessed yet.
    pub(crate) fn new() -> Self {
        Self { estimate: HOPE }
    }

    /// How many of `most` guesses to draft while `num_rows` sequences run, this one among them.
    pub(crate) fn num_drafts(&self, most: usize, num_rows: usize) -> usize {
        best(self.estimate, most, num_rows)
    }

    /// Those before it were right; was this one?
    pub(crate) fn guessed(&mut self, is_right: bool) {
        self.estimate += (f32::from(is_right) - self.estimate) * WEIGHT;
    }
}

/// How many drafts bring the most tokens per time; 0 if none bring more than none.
fn best(probability: f32, most: usize, num_rows: usize) -> usize {
    let num_rows = num_rows as f32;
    let cost = 1.0 + ROW_COST * (num_rows - 1.0);
    let (mut best, mut best_rate) = (0, num_rows / cost);
    let (mut tokens, mut all_confirmed) = (num_rows, 1.0);
    for num_drafts in 1..=most {
        all_confirmed *= probability;
        tokens += all_confirmed;
        let rate = tokens / (cost + ROW_COST * num_drafts as f32 + WAIT_COST);
        if rate > best_rate {
            (best, best_rate) = (num_drafts, rate);
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_draft_pays_below_the_break_even_and_one_does_above() {
        for (num_rows, break_even) in [(1, 0.15), (8, 0.706)] {
            assert_eq!(best(break_even - 0.01, 1, num_rows), 0, "beside {num_rows} rows");
            assert_eq!(best(break_even + 0.01, 1, num_rows), 1, "beside {num_rows} rows");
        }
    }

    #[test]
    fn the_surer_the_more_and_the_more_crowded_the_fewer() {
        for num_rows in 1..100 {
            let counts = (0..=20).map(|twentieths| best(twentieths as f32 / 20.0, 8, num_rows));
            let counts: Vec<_> = counts.collect();
            assert!(counts.is_sorted(), "{num_rows} rows: {counts:?}");
            assert_eq!((counts[0], counts[20]), (0, 8), "what is certain is always worth its row");
        }
        let counts: Vec<_> = (1..100).map(|num_rows| best(0.8, 8, num_rows)).collect();
        assert!(counts.is_sorted_by(|before, after| before >= after), "{counts:?}");
        assert_eq!((counts[0], counts[98]), (6, 0));
    }

    #[test]
    fn whose_guesses_are_wrong_soon_drafts_none_and_whose_are_right_again_does() {
        let mut confidence = Confidence::new();
        let mut num_wasted = 0;
        while confidence.num_drafts(8, 1) > 0 {
            num_wasted += confidence.num_drafts(8, 1);
            confidence.guessed(false);
        }
        assert!((3..=6).contains(&num_wasted), "a try is short: {num_wasted}");
        (0..50).for_each(|_| confidence.guessed(false));
        confidence.guessed(true);
        assert!(confidence.num_drafts(8, 1) > 0);
    }

    #[test]
    fn whose_guesses_are_right_drafts_all_of_them_and_in_company_too() {
        for (num_rows, most_guesses) in [(1, 8), (8, 16)] {
            let mut confidence = Confidence::new();
            let num_guesses = (0..).find(|_| {
                confidence.guessed(true);
                confidence.num_drafts(8, num_rows) == 8
            });
            assert!(num_guesses < Some(most_guesses), "{num_guesses:?} beside {num_rows} rows");
        }
    }

    #[test]
    fn a_crowd_is_not_slowed_down_by_what_nobody_has_tried() {
        assert!(Confidence::new().num_drafts(8, 1) > 0);
        assert_eq!(Confidence::new().num_drafts(8, 8), 0);
    }

    #[test]
    fn who_has_no_guesses_makes_no_drafts() {
        assert_eq!(Confidence::new().num_drafts(0, 1), 0);
    }
}
