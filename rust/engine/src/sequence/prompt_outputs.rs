//! The positions of its prompt that a request gets outputs of, and the number of delivered ones. These positions are
//! computed, never taken from the prefix cache.

use std::ops::Range;

use crate::request::{Request, RequestId};

/// Each position is delivered once, in ascending order, however often its sequence is preempted.
///
/// Invariant: `num_delivered <= num_planned <= end`; they differ only while rows with prompt outputs are in flight.
#[derive(Debug)]
pub(super) struct PromptOutputs {
    /// The number of positions with outputs: the whole prompt, except for the last position if the first token's
    /// details cover it; 0 if no outputs of the prompt are requested.
    end: usize,
    /// Positions below this are delivered, or rows in flight will output them.
    num_planned: usize,
    /// Positions below this are delivered.
    num_delivered: usize,
    /// Rows in flight with prompt outputs.
    num_rows: usize,
}

impl PromptOutputs {
    pub(super) fn new(request: &Request, choice: u32) -> Self {
        let end = request.prompt.len() - 1.min(request.max_tokens);
        let end = if request.choice_outputs(choice).has_prompt() { end } else { 0 };
        Self { end, num_planned: 0, num_delivered: 0, num_rows: 0 }
    }

    /// The positions that a row over `positions` outputs.
    pub(super) fn within(&self, positions: Range<usize>) -> Range<usize> {
        let start = positions.start.max(self.num_planned);
        start..positions.end.min(self.end).max(start)
    }

    /// Plans a row over `positions`. Returns the positions that it outputs.
    pub(super) fn plan(&mut self, positions: Range<usize>) -> Range<usize> {
        let outputs = self.within(positions);
        if !outputs.is_empty() {
            self.num_planned = outputs.end;
            self.num_rows += 1;
        }
        outputs
    }

    /// Notes that the oldest row in flight with prompt outputs has delivered them, up to `end`.
    pub(super) fn deliver(&mut self, end: usize) {
        self.num_delivered = end;
        self.num_rows -= 1;
    }

    /// Discards the rows in flight.
    pub(super) fn clear_in_flight(&mut self) {
        self.num_planned = self.num_delivered;
        self.num_rows = 0;
    }

    /// The number of first positions that need not be computed when the sequence is scheduled again. No rows are in
    /// flight.
    pub(super) fn num_reusable(&self) -> usize {
        if self.is_all_planned() { usize::MAX } else { self.num_planned }
    }

    /// Rows in flight with prompt outputs.
    pub(super) fn num_rows(&self) -> usize {
        self.num_rows
    }

    pub(super) fn is_all_planned(&self) -> bool {
        self.num_planned == self.end
    }

    pub(super) fn is_all_delivered(&self) -> bool {
        self.num_delivered == self.end
    }

    /// Panics unless the invariant holds, with at most `num_rows` rows in flight.
    pub(super) fn check_integrity(&self, id: RequestId, num_rows: usize) {
        let is_ascending = self.num_delivered <= self.num_planned && self.num_planned <= self.end;
        assert!(is_ascending, "{id} outputs positions out of order; this is a bug: {self:?}");
        assert!(self.num_rows <= num_rows, "{id}: more prompt outputs than rows; this is a bug");
        let is_in_flight = self.num_delivered < self.num_planned;
        assert_eq!(is_in_flight, self.num_rows > 0, "{id}: prompt outputs got lost; this is a bug");
    }
}
