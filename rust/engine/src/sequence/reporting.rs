//! Which positions of its prompt a request is told of, and how far that is.

use std::ops::Range;

use crate::request::{Request, RequestId};

/// Positions are told of in ascending order, each once, whatever places their sequence has and loses meanwhile.
///
/// Invariant: `num_delivered <= num_planned <= end`; they differ only while rows that report are in flight.
#[derive(Debug)]
pub(super) struct Reporting {
    /// Positions below this are to be told of: all of the prompt, but for the last where the first token's details tell of
    /// it; none where nobody asked.
    end: usize,
    /// Those below this have been told of, or rows in flight will do it.
    num_planned: usize,
    /// Those below this have been told of.
    num_delivered: usize,
    /// Rows in flight that report.
    num_rows: usize,
}

impl Reporting {
    pub(super) fn new(request: &Request) -> Self {
        let end = request.prompt.len() - 1.min(request.max_tokens);
        let end = if request.outputs.has_prompt() { end } else { 0 };
        Self { end, num_planned: 0, num_delivered: 0, num_rows: 0 }
    }

    /// What a row over `positions` is to report.
    pub(super) fn within(&self, positions: Range<usize>) -> Range<usize> {
        let start = positions.start.max(self.num_planned);
        start..positions.end.min(self.end).max(start)
    }

    /// A row over `positions` is planned: what it outputs.
    pub(super) fn plan(&mut self, positions: Range<usize>) -> Range<usize> {
        let reported = self.within(positions);
        if !reported.is_empty() {
            self.num_planned = reported.end;
            self.num_rows += 1;
        }
        reported
    }

    /// The oldest row in flight that outputs has done so, up to `end`.
    pub(super) fn deliver(&mut self, end: usize) {
        self.num_delivered = end;
        self.num_rows -= 1;
    }

    /// What is in flight will not be counted on.
    pub(super) fn forget_flights(&mut self) {
        self.num_planned = self.num_delivered;
        self.num_rows = 0;
    }

    /// How many first positions need not be computed in a new place. Nothing is in flight.
    pub(super) fn num_reusable(&self) -> usize {
        if self.is_all_planned() { usize::MAX } else { self.num_planned }
    }

    /// Rows in flight that report.
    pub(super) fn num_rows(&self) -> usize {
        self.num_rows
    }

    pub(super) fn is_all_planned(&self) -> bool {
        self.num_planned == self.end
    }

    pub(super) fn is_all_delivered(&self) -> bool {
        self.num_delivered == self.end
    }

    /// Panics unless the invariant holds, with so many rows in flight at most.
    pub(super) fn check_integrity(&self, id: RequestId, num_rows: usize) {
        let is_ascending = self.num_delivered <= self.num_planned && self.num_planned <= self.end;
        assert!(is_ascending, "{id} is told of positions out of order; this is a bug: {self:?}");
        assert!(self.num_rows <= num_rows, "{id}: more outputs than rows; this is a bug");
        let is_flying = self.num_delivered < self.num_planned;
        assert_eq!(is_flying, self.num_rows > 0, "{id}: outputs got lost; this is a bug");
    }
}
