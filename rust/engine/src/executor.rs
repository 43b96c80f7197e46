//! The interface between the engine and the executor of its steps.

use crate::step::{StepOutput, StepPlan};

/// A step that the executor has ended, with its buffers.
#[derive(Debug)]
pub struct StepDone {
    /// The plan, unchanged.
    pub plan: Box<StepPlan>,
    /// The output, complete if `result` is `Ok`.
    pub output: Box<StepOutput>,
    /// If it is an error, copies of this plan and of later plans count as not made unless `output.copies_done` is set.
    /// If the plan changes adapters, the device counts as lost unless `output.adapters_changed` is set.
    pub result: Result<(), StepError>,
}

/// The reason why a step failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StepError {
    /// The requests of the step end with this message; the engine continues.
    #[error("{0}")]
    Failed(String),
    /// The device is gone: every open request ends with this message, and the engine stops.
    #[error("{0}")]
    DeviceLost(String),
}

/// Runs steps, in order, on a thread of its own.
pub trait Executor: Send {
    /// Takes a plan and an empty output, and returns at once. At most [`DEPTH`](crate::step::DEPTH) steps are in
    /// flight. Every step, a failed one too, is returned by [`Completions::send`](crate::mailbox::Completions::send),
    /// in order.
    fn submit(&mut self, plan: Box<StepPlan>, output: Box<StepOutput>);
}
