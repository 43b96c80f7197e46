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
//! `p` is an average over the latest drafts. A look-up that finds nothing lowers it a little. Once nothing is to be gained,
//! the sequence rests: it makes no drafts for some tokens, then tries again, full of hope; after each vain try it rests for
//! longer.

/// Measured on a CPU, where it matters most: steps of eight rows took 1.6 times as long as steps of one.
const ROW_COST: f32 = 0.1;
/// The engine's part of a step, when nothing hides it.
const WAIT_COST: f32 = 0.05;

/// What is thought of drafts that nobody has made yet.
const HOPE: f32 = 0.6;
/// Share of the latest draft in the average.
const DRAFT_WEIGHT: f32 = 0.25;
/// Share of a look-up that found nothing.
const MISS_WEIGHT: f32 = 0.0625;

/// Tokens generated before the next try; after each vain one twice as many, up to the longest.
const FIRST_REST: u32 = 8;
const LONGEST_REST: u32 = 256;

/// What one sequence expects of its drafts.
#[derive(Debug)]
pub(crate) struct Confidence {
    /// Most drafts it may make; 0 if none.
    most: usize,
    /// How probable it is that a draft is confirmed, if those before it were.
    estimate: f32,
    /// Tokens until it tries again; 0 if it does not rest.
    rest: u32,
    next_rest: u32,
}

impl Confidence {
    /// Of a sequence that may make so many drafts at once.
    pub(crate) fn new(most: usize) -> Self {
        Self { most, estimate: HOPE, rest: 0, next_rest: FIRST_REST }
    }

    /// How many drafts to make while `num_rows` sequences run, this one among them.
    pub(crate) fn num_drafts(&self, num_rows: usize) -> usize {
        if self.rest > 0 { 0 } else { best(self.estimate, self.most, num_rows) }
    }

    /// Of `num_drafts`, the first `num_confirmed` were confirmed. Those after the first mistake say nothing.
    pub(crate) fn verified(&mut self, num_drafts: usize, num_confirmed: usize, num_rows: usize) {
        for _ in 0..num_confirmed {
            self.estimate += (1.0 - self.estimate) * DRAFT_WEIGHT;
        }
        if num_confirmed == num_drafts {
            self.next_rest = FIRST_REST;
        } else {
            self.estimate -= self.estimate * DRAFT_WEIGHT;
        }
        self.rest_if_vain(num_rows);
    }

    /// There was nothing to draft.
    pub(crate) fn missed(&mut self, num_rows: usize) {
        self.estimate -= self.estimate * MISS_WEIGHT;
        self.rest_if_vain(num_rows);
    }

    fn rest_if_vain(&mut self, num_rows: usize) {
        if best(self.estimate, self.most, num_rows) == 0 {
            self.rest = self.next_rest;
            self.next_rest = (2 * self.next_rest).min(LONGEST_REST);
            self.estimate = HOPE;
        }
    }

    /// A token was generated.
    pub(crate) fn token_came(&mut self) {
        self.rest = self.rest.saturating_sub(1);
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
    fn whose_drafts_are_wrong_rests_for_longer_and_longer() {
        let mut confidence = Confidence::new(8);
        for rest in [8, 16, 32, 64, 128, 256, 256] {
            let mut num_wasted = 0;
            while confidence.num_drafts(1) > 0 {
                num_wasted += confidence.num_drafts(1);
                confidence.verified(confidence.num_drafts(1), 0, 1);
            }
            assert!((5..=12).contains(&num_wasted), "a try is short: {num_wasted}");
            for _ in 0..rest {
                assert_eq!(confidence.num_drafts(1), 0);
                confidence.token_came();
            }
            assert!(confidence.num_drafts(1) > 0);
        }
        confidence.verified(2, 2, 1);
        assert_eq!(confidence.next_rest, FIRST_REST, "a good try makes up for the vain ones");
    }

    #[test]
    fn whose_drafts_are_right_makes_all_it_may() {
        let mut confidence = Confidence::new(8);
        for _ in 0..4 {
            let num_drafts = confidence.num_drafts(2);
            confidence.verified(num_drafts, num_drafts, 2);
        }
        assert_eq!(confidence.num_drafts(2), 8);
    }

    #[test]
    fn who_finds_nothing_to_draft_rests_in_the_end() {
        let mut confidence = Confidence::new(8);
        let is_trying = |confidence: &Confidence| confidence.num_drafts(1) > 0;
        let num_misses = (1..100).find(|_| {
            confidence.missed(1);
            !is_trying(&confidence)
        });
        assert_eq!(num_misses, Some(22));
    }

    #[test]
    fn who_may_make_no_drafts_makes_none() {
        assert_eq!(Confidence::new(0).num_drafts(1), 0);
    }
}
