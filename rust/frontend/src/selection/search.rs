//! The beam search algorithm: an approximate search for the outputs with the highest probability.
//!
//! Each step takes the most likely next tokens of every running beam and keeps the best continuations. [`Search`] does
//! no I/O: its caller computes the next tokens of the running beams and passes them to [`Search::advance`].
//!
//! It is the search of Hugging Face's `generate` with `early_stopping=False`, with the same scores:
//!
//! - The score of a beam is the sum of its tokens' log probabilities divided by `length ** length_penalty`. The length
//!   is the number of generated tokens. The token that ends a beam counts in the sum and in the length.
//! - Continuations are ranked by their sums. Ended continuations among the best `num_beams` become closed beams, other
//!   ended continuations are dropped, and the best `num_beams` of the rest become the running beams.
//! - The best `num_beams` closed beams by score are kept. The search ends when there are `num_beams` of them and the
//!   current score of the best running beam is not above the worst of theirs.
//!
//! Sums are in double precision. Among equal values the first one found wins, so the result is deterministic.

use std::cmp::Ordering;
use std::iter;
use std::sync::Arc;

use crate::output::{Ending, TopLogprobs};

/// The stop conditions of one beam; a clone follows a continuation of it.
pub trait BeamStops: Clone {
    /// Advances by the last token of `generated`. Returns the ending if the token ends the beam.
    fn push(&mut self, generated: &[u32]) -> Option<Ending>;
}

/// An output: its tokens, their log probabilities, and the alternatives at each position. A continuation shares the
/// last two with the beam that it continues, so a step does not copy them.
#[derive(Clone, Debug, Default)]
pub struct Beam {
    pub token_ids: Vec<u32>,
    /// The sum of the log probabilities.
    pub total: f64,
    last: Option<Arc<Position>>,
}

/// The log probability of a token, the alternatives, and the position before it.
#[derive(Debug)]
struct Position {
    logprob: f32,
    top: Arc<TopLogprobs>,
    previous: Option<Arc<Position>>,
}

/// A finished output.
#[derive(Clone, Debug)]
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
        let mut token_ids = Vec::with_capacity(self.token_ids.len() + 1);
        token_ids.extend_from_slice(&self.token_ids);
        token_ids.push(token);
        let last = Position { logprob, top: Arc::clone(top), previous: self.last.clone() };
        Self { token_ids, total, last: Some(Arc::new(last)) }
    }

    /// The log probability of each token.
    pub fn logprobs(&self) -> Vec<f32> {
        self.in_order(|position| position.logprob)
    }

    /// The most likely tokens at each position.
    pub fn tops(&self) -> Vec<Arc<TopLogprobs>> {
        self.in_order(|position| Arc::clone(&position.top))
    }

    fn in_order<T>(&self, value: impl Fn(&Position) -> T) -> Vec<T> {
        let positions = iter::successors(self.last.as_deref(), |position| position.previous.as_deref());
        let mut values: Vec<T> = positions.map(value).collect();
        values.reverse();
        values
    }
}

impl Drop for Position {
    /// Drops the positions before it in a loop: they may be too many for a recursion.
    fn drop(&mut self) {
        let mut previous = self.previous.take();
        while let Some(mut position) = previous.and_then(Arc::into_inner) {
            previous = position.previous.take();
        }
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

    /// Takes the most likely next tokens of each running beam, in descending order. `2 * num_beams` of them are enough
    /// to continue `num_beams` beams if the others end.
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
