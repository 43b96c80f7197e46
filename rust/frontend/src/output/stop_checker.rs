//! `StopChecker`: when an output ends, and which of its last tokens have no text.
//!
//! Token ids and the length are checked by the rules of the engine (`stop.rs` there), which ends its own sequences.
//! Stop strings are found in the text, on this side. If the same token completes a stop string and is a stop token, the
//! string is reported. The outputs of requests and the beams of a beam search share these rules.

use std::sync::Arc;

use penstock_engine::request::{Finish, FinishReason, Rejection, Request, StopCause};

use super::StopReason;

/// The end of an output: the finish reason of the Python API, and for `stop` the stop condition.
#[derive(Clone, Debug, PartialEq)]
pub struct Ending {
    pub finish_reason: &'static str,
    pub stop_reason: Option<StopReason>,
}

/// The end of a choice.
#[derive(Clone, Debug)]
pub enum ChoiceEnd {
    /// The engine rejected the request.
    Rejected(Rejection),
    /// It ended normally, was cancelled, interrupted or not read.
    Finished(Ending, Finish),
    /// A step failed, or an output could not be stored.
    Failed(String),
    /// The engine stopped.
    Stopped(StopCause),
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

    /// The end of an output that has complete tool calls.
    pub fn with_tool_calls(self) -> Self {
        match self.finish_reason {
            "stop" => Self { finish_reason: "tool_calls", ..self },
            _ => self,
        }
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
    pub fn ending(&self, reason: &FinishReason, stop: Option<String>) -> Result<Ending, Box<ChoiceEnd>> {
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
            FinishReason::Unread => Ok(Ending::without_stop("unread")),
            // A consumer that cancels for a stop string knows it: see `stopped_by`.
            FinishReason::Cancelled | FinishReason::StopString => Ok(Ending::without_stop("cancelled")),
            FinishReason::Failed(reason) => Err(ChoiceEnd::Failed(reason.clone()).into()),
            FinishReason::EngineStopped(cause) => Err(ChoiceEnd::Stopped(cause.clone()).into()),
        }
    }

    /// The stop sequence that ended an output and is not part of its text. Text held back for it is dropped.
    pub fn excluded_sequence(&self, reason: &FinishReason) -> Option<&[u32]> {
        match reason {
            FinishReason::StopSequence(index) if !self.includes_stops => {
                Some(&self.request.stop_token_sequences[*index])
            }
            _ => None,
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

#[cfg(test)]
mod tests {
    use penstock_engine::request::StopCause;
    use penstock_types::Sampling;

    use super::*;

    fn checker(includes_stops: bool) -> StopChecker {
        let request = Request {
            min_tokens: 1,
            stop_token_ids: vec![7],
            stop_token_sequences: vec![vec![8, 9]],
            ..Request::new([1], 3, Sampling::default())
        };
        StopChecker::new(Arc::new(request), includes_stops)
    }

    fn token() -> Ending {
        Ending::stop(StopReason::Token(7))
    }

    fn sequence() -> Ending {
        Ending::stop(StopReason::Sequence(vec![8, 9]))
    }

    #[test]
    fn stop_strings_come_before_tokens_sequences_and_the_length() {
        let checker = checker(false);
        let text = |text: &str| Ending::stop(StopReason::Text(text.to_owned()));
        assert_eq!(checker.check(&[5, 6], None), None);
        assert_eq!(checker.check(&[5, 6], Some("x")), Some(text("x")));
        assert_eq!(checker.check(&[5, 7], Some("x")), Some(text("x")));
        assert_eq!(checker.check(&[5, 7], None), Some(token()));
        assert_eq!(checker.check(&[5, 8, 9], None), Some(sequence()));
        assert_eq!(checker.check(&[5, 5, 5], None), Some(Ending::without_stop("length")));
        assert_eq!(checker.check(&[5, 5, 5], Some("x")), Some(text("x")));
        assert_eq!(checker.check(&[7], None), None);
    }

    #[test]
    fn only_an_included_stop_token_adds_text() {
        assert!(checker(false).adds_text(6, 1));
        assert!(!checker(false).adds_text(7, 1));
        assert!(checker(false).adds_text(7, 0), "it does not end the output before min_tokens");
        assert!(checker(true).adds_text(7, 1));
    }

    #[test]
    fn tokens_of_an_excluded_stop_are_not_part_of_the_text() {
        let reasons = [None, token().stop_reason, sequence().stop_reason, Some(StopReason::Text("x".into()))];
        let excluded = reasons.each_ref().map(|reason| checker(false).num_excluded(reason.as_ref()));
        assert_eq!(excluded, [0, 1, 2, 0]);
        assert!(reasons.iter().all(|reason| checker(true).num_excluded(reason.as_ref()) == 0));
    }

    #[test]
    fn endings_of_the_engine_have_the_finish_reasons_of_the_api() {
        let ending = |reason| checker(false).ending(&reason, None).map_err(drop);
        assert_eq!(ending(FinishReason::Stop(7)), Ok(token()));
        assert_eq!(ending(FinishReason::StopSequence(0)), Ok(sequence()));
        assert_eq!(ending(FinishReason::Length), Ok(Ending::without_stop("length")));
        assert_eq!(ending(FinishReason::Cancelled), Ok(Ending::without_stop("cancelled")));
        assert_eq!(ending(FinishReason::Interrupted), Ok(Ending::without_stop("interrupted")));
        assert_eq!(ending(FinishReason::Unread), Ok(Ending::without_stop("unread")));
        assert_eq!(ending(FinishReason::Failed("x".to_owned())), Err(()));
        assert_eq!(ending(FinishReason::EngineStopped(StopCause::Crashed)), Err(()));
        // The engine was asked to cancel when the stop string was found.
        let cancelled = checker(false).ending(&FinishReason::Cancelled, Some("x".to_owned()));
        assert_eq!(cancelled.map_err(drop), Ok(Ending::stop(StopReason::Text("x".to_owned()))));
    }
}
