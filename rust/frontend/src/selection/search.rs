//! The beam search algorithm: an approximate search for the outputs with the highest probability.
//!
//! Each step takes the most likely next tokens of every running beam and keeps the best continuations. [`Search`] does no
//! I/O: its caller computes the next tokens of the running beams and passes them to [`Search::advance`].
//!
//! It is the search of Hugging Face's `generate` with `early_stopping=False`, with the same scores:
//!
//! - The score of a beam is the sum of its tokens' log probabilities divided by `length ** length_penalty`. The length is
//!   the number of generated tokens. The token that ends a beam counts in the sum and in the length.
//! - Continuations are ranked by their sums. Ended continuations among the best `num_beams` become closed beams, other
//!   ended continuations are dropped, and the best `num_beams` of the rest become the running beams.
//! - The best `num_beams` closed beams by score are kept. The search ends when there are `num_beams` of them and the
//!   current score of the best running beam is not above the worst of theirs.
//!
//! Sums are in double precision. Among equal values the first one found wins, so the result is deterministic.

use std::cmp::Ordering;
use std::sync::Arc;

use crate::output::{Ending, TopLogprobs};

/// The stop conditions of one beam; a clone follows a continuation of it.
pub trait BeamStops: Clone {
    /// Advances by the last token of `generated`. Returns the ending if the token ends the beam.
    fn push(&mut self, generated: &[u32]) -> Option<Ending>;
}

/// An output: its tokens, their log probabilities, and the alternatives at each position.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Beam {
    pub token_ids: Vec<u32>,
    pub logprobs: Vec<f32>,
    pub tops: Vec<Arc<TopLogprobs>>,
    /// The sum of the log probabilities.
    pub total: f64,
}

/// A finished output.
#[derive(Clone, Debug, PartialEq)]
pub struct ClosedBeam {
    pub beam: Beam,
    pub score: f64,
    pub ending: Ending,
}

/// A beam search in progress.
pub struct Search<S> {
    num_beams: usize,
    length_penalty: f64,
    running: Vec<(Beam, S)>,
    closed: Vec<ClosedBeam>,
}

impl Beam {
    /// The score, comparable between beams of different lengths; 0 for an empty beam.
    fn score(&self, length_penalty: f64) -> f64 {
        self.total / (self.token_ids.len().max(1) as f64).powf(length_penalty)
    }

    fn with(&self, token: u32, logprob: f32, top: &Arc<TopLogprobs>, total: f64) -> Self {
        let mut beam = self.clone();
        beam.token_ids.push(token);
        beam.logprobs.push(logprob);
        beam.tops.push(Arc::clone(top));
        Self { total, ..beam }
    }
}

impl<S: BeamStops> Search<S> {
    /// A search with one running beam, which is empty. `stops` must end every beam at some length.
    pub fn new(num_beams: usize, length_penalty: f64, stops: S) -> Self {
        Self { num_beams, length_penalty, running: vec![(Beam::default(), stops)], closed: Vec::new() }
    }

    /// The beams whose next tokens the next step needs, best first; empty when the search has ended.
    pub fn running(&self) -> impl ExactSizeIterator<Item = &Beam> {
        self.running.iter().map(|(beam, _)| beam)
    }

    /// The finished outputs, best first: at most `num_beams`, and after an interruption all that were running as well.
    pub fn closed(&self) -> &[ClosedBeam] {
        &self.closed
    }

    /// Takes the most likely next tokens of each running beam, in descending order. `2 * num_beams` of them are enough to
    /// continue `num_beams` beams if the others end.
    pub fn advance(&mut self, tops: Vec<TopLogprobs>) {
        debug_assert_eq!(tops.len(), self.running.len());
        let tops: Vec<_> = tops.into_iter().map(Arc::new).collect();
        let parents = std::mem::take(&mut self.running);
        let mut continuations = Vec::new();
        for (parent, top) in parents.iter().zip(&tops) {
            let likely = top.iter().filter(|(_, logprob)| *logprob > f32::NEG_INFINITY);
            continuations.extend(likely.map(|(token, logprob)| {
                (parent.0.total + f64::from(*logprob), parent, *token, *logprob, top)
            }));
        }
        continuations.sort_by(|one, other| descending(one.0, other.0));
        for (rank, (total, (parent, stops), token, logprob, top)) in continuations.into_iter().enumerate() {
            let beam = parent.with(token, logprob, top, total);
            let mut stops = stops.clone();
            match stops.push(&beam.token_ids) {
                None => self.running.push((beam, stops)),
                Some(ending) if rank < self.num_beams => self.close(beam, ending),
                Some(_) => {}
            }
            if self.running.len() == self.num_beams {
                break;
            }
        }
        self.sort_closed();
        self.closed.truncate(self.num_beams);
        if self.closed.len() == self.num_beams
            && let (Some((best, _)), Some(worst)) = (self.running.first(), self.closed.last())
            && best.score(self.length_penalty) <= worst.score
        {
            self.running.clear();
        }
    }

    /// Ends the search because a step was cancelled or interrupted: all running beams end with `finish_reason`.
    pub fn interrupt(&mut self, finish_reason: &'static str) {
        for (beam, _) in std::mem::take(&mut self.running) {
            self.close(beam, Ending::without_stop(finish_reason));
        }
        self.sort_closed();
    }

    fn close(&mut self, beam: Beam, ending: Ending) {
        let score = beam.score(self.length_penalty);
        self.closed.push(ClosedBeam { beam, score, ending });
    }

    fn sort_closed(&mut self) {
        self.closed.sort_by(|one, other| descending(one.score, other.score));
    }
}

/// The order of a stable sort in descending order. Zeros are equal whatever their sign.
pub(super) fn descending(one: f64, other: f64) -> Ordering {
    other.partial_cmp(&one).unwrap_or(Ordering::Equal)
}

#[cfg(test)]
#[path = "search_tests.rs"]
mod tests;
