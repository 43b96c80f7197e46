//! `StopChecker`: when an output ends, and which of its last tokens have no text.
//!
//! Token ids and the length are checked by the rules of the engine (`stop.rs` there), which ends its own sequences.
//! Stop strings are found in the text, on this side. If the same token completes a stop string and is a stop token, the
//! string is reported.

use std::sync::Arc;

use penstock_engine::request::{FinishReason, Request};

use super::StopReason;
use super::choice_output::ChoiceEnd;

/// The end of an output: the finish reason of the Python API, and for `stop` the stop condition.
#[derive(Clone, Debug, PartialEq)]
pub struct Ending {
    pub finish_reason: &'static str,
    pub stop_reason: Option<StopReason>,
}

/// The stop conditions of one output.
#[derive(Clone)]
pub struct StopChecker {
    request: Arc<Request>,
    /// Whether stop strings, tokens and sequences are part of the text.
    includes_stops: bool,
}

impl Ending {
    /// An end that nothing in the output caused.
    pub fn without_stop(finish_reason: &'static str) -> Self {
        Self { finish_reason, stop_reason: None }
    }

    fn stop(reason: StopReason) -> Self {
        Self { finish_reason: "stop", stop_reason: Some(reason) }
    }
}

impl StopChecker {
    pub fn new(request: Arc<Request>, includes_stops: bool) -> Self {
        Self { request, includes_stops }
    }

    /// Whether the output's token number `index`, counted from 0, adds text: a stop token only if it is included.
    pub fn adds_text(&self, token: u32, index: usize) -> bool {
        self.includes_stops || !self.request.is_stopped_by(token, index)
    }

    /// The end of an output with the last token of `generated`, if it ends; `stop` is the stop string that the token
    /// completes. No shorter output has ended.
    pub fn check(&self, generated: &[u32], stop: Option<&str>) -> Option<Ending> {
        if let Some(stop) = stop {
            return Some(Ending::stop(StopReason::Text(stop.to_owned())));
        }
        let reason = self.request.finish_reason(generated, self.request.max_tokens)?;
        self.ending(&reason, None).ok()
    }

    /// The end of an output that the engine finished for `reason`; `stop` is the stop string that ended its text
    /// before.
    pub fn ending(&self, reason: &FinishReason, stop: Option<String>) -> Result<Ending, ChoiceEnd> {
        if let Some(stop) = stop {
            return Ok(Ending::stop(StopReason::Text(stop)));
        }
        match reason {
            FinishReason::Stop(token) => Ok(Ending::stop(StopReason::Token(*token))),
            FinishReason::StopSequence(index) => {
                let sequence = self.request.stop_token_sequences[*index].clone();
                Ok(Ending::stop(StopReason::Sequence(sequence)))
            }
            FinishReason::Length => Ok(Ending::without_stop("length")),
            FinishReason::Interrupted => Ok(Ending::without_stop("interrupted")),
            FinishReason::Cancelled => Ok(Ending::without_stop("cancelled")),
            FinishReason::Failed(reason) => Err(ChoiceEnd::Failed(reason.clone())),
            FinishReason::EngineStopped(cause) => Err(ChoiceEnd::Stopped(cause.clone())),
        }
    }

    /// The number of last tokens that are not part of the text: a stop token or the tokens of a stop sequence, unless
    /// they are included.
    pub fn num_excluded(&self, stop_reason: Option<&StopReason>) -> usize {
        match stop_reason {
            _ if self.includes_stops => 0,
            Some(StopReason::Token(_)) => 1,
            Some(StopReason::Sequence(ids)) => ids.len(),
            Some(StopReason::Text(_)) | None => 0,
        }
    }
}
