//! The number of drafts that a sequence verifies per step.
//!
//! *Cost.* A step reads all weights once, however many rows it computes, and each row adds its arithmetic. In units of
//! a step of one row, a step of `n` rows takes about `1 + ROW_COST * (n - 1)`, and a draft is one more row. In
//! addition, the plans of a drafting sequence cannot be made in advance, which costs every sequence `WAIT_COST`.
//!
//! *Benefit.* If each draft is accepted with probability `p`, provided that those before it were, `d` drafts yield
//! `p + p^2 + ... + p^d` more tokens.
//!
//! *Optimum.* The `d` with the most tokens per time, over all `n` streams together:
//!
//! ```text
//!     (n + p + ... + p^d) / (1 + ROW_COST * (n - 1 + d) + WAIT_COST)        n / (1 + ROW_COST * (n - 1)) for none
//! ```
//!
//! A single stream gains from a draft that is accepted more often than 15 times of 100; with seven other streams only
//! above 70, because there the arithmetic is most of the step's cost. So drafting does not slow down the streams that
//! do not draft.
//!
//! `p` is an average over the latest predictions, whether or not they were drafted: each is compared with the next
//! token. So bad predictions cost almost nothing.

/// Measured on a CPU, where it matters most: steps of eight rows took 1.6 times as long as steps of one.
const ROW_COST: f32 = 0.1;
/// The engine's part of a step, when no other step hides it.
const WAIT_COST: f32 = 0.05;

/// The estimate before the first prediction.
const INITIAL_ESTIMATE: f32 = 0.4;
/// The weight of the latest prediction in the average.
const WEIGHT: f32 = 0.25;

/// The estimated acceptance rate of one sequence's drafts.
#[derive(Debug)]
pub(crate) struct AcceptanceRate {
    /// The probability that a draft is accepted, if those before it are.
    estimate: f32,
}

impl AcceptanceRate {
    /// A rate that has observed nothing and starts at the initial estimate.
    pub(crate) fn new() -> Self {
        Self { estimate: INITIAL_ESTIMATE }
    }

    /// The number of drafts, at most `most`, to verify while `num_rows` sequences run, this one included.
    pub(crate) fn num_drafts(&self, most: usize, num_rows: usize) -> usize {
        optimum(self.estimate, most, num_rows)
    }

    /// Updates the estimate: the predictions before this one were right.
    pub(crate) fn observe(&mut self, is_right: bool) {
        self.estimate += (f32::from(is_right) - self.estimate) * WEIGHT;
    }
}

/// The number of drafts that yields the most tokens per time; 0 if none is better than no drafts.
fn optimum(probability: f32, most: usize, num_rows: usize) -> usize {
    let num_rows = num_rows as f32;
    let cost = 1.0 + ROW_COST * (num_rows - 1.0);
    let (mut best, mut best_rate) = (0, num_rows / cost);
    let (mut tokens, mut all_accepted) = (num_rows, 1.0);
    for num_drafts in 1..=most {
        all_accepted *= probability;
        tokens += all_accepted;
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
    fn drafts_pay_only_above_the_break_even_rate() {
        for (num_rows, break_even) in [(1, 0.15), (8, 0.706)] {
            assert_eq!(optimum(break_even - 0.01, 1, num_rows), 0, "beside {num_rows} rows");
            assert_eq!(optimum(break_even + 0.01, 1, num_rows), 1, "beside {num_rows} rows");
        }
    }

    #[test]
    fn more_drafts_at_higher_rates_and_fewer_in_larger_batches() {
        for num_rows in 1..100 {
            let counts = (0..=20).map(|twentieths| optimum(twentieths as f32 / 20.0, 8, num_rows));
            let counts: Vec<_> = counts.collect();
            assert!(counts.is_sorted(), "{num_rows} rows: {counts:?}");
            assert_eq!((counts[0], counts[20]), (0, 8), "certain drafts are always worth their rows");
        }
        let counts: Vec<_> = (1..100).map(|num_rows| optimum(0.8, 8, num_rows)).collect();
        assert!(counts.is_sorted_by(|before, after| before >= after), "{counts:?}");
        assert_eq!((counts[0], counts[98]), (6, 0));
    }

    #[test]
    fn wrong_predictions_stop_drafting_and_a_right_one_resumes_it() {
        let mut acceptance = AcceptanceRate::new();
        let mut num_wasted = 0;
        while acceptance.num_drafts(8, 1) > 0 {
            num_wasted += acceptance.num_drafts(8, 1);
            acceptance.observe(false);
        }
        assert!((3..=6).contains(&num_wasted), "a try is short: {num_wasted}");
        (0..50).for_each(|_| acceptance.observe(false));
        acceptance.observe(true);
        assert!(acceptance.num_drafts(8, 1) > 0);
    }

    #[test]
    fn right_predictions_are_all_drafted_in_any_batch() {
        for (num_rows, max_predictions) in [(1, 8), (8, 16)] {
            let mut acceptance = AcceptanceRate::new();
            let num_predictions = (0..).find(|_| {
                acceptance.observe(true);
                acceptance.num_drafts(8, num_rows) == 8
            });
            assert!(num_predictions < Some(max_predictions), "{num_predictions:?} beside {num_rows} rows");
        }
    }

    #[test]
    fn initial_estimate_drafts_alone_but_not_in_a_batch() {
        assert!(AcceptanceRate::new().num_drafts(8, 1) > 0);
        assert_eq!(AcceptanceRate::new().num_drafts(8, 8), 0);
    }

    #[test]
    fn no_predictions_no_drafts() {
        assert_eq!(AcceptanceRate::new().num_drafts(0, 1), 0);
    }
}
