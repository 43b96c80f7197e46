//! The stop rules on token ids and on the number of tokens. The front end adds stop strings to them.

use crate::request::{FinishReason, Request};

impl Request {
    /// Whether `token` ends the output as its token number `index`, counted from 0: it is a stop token, and
    /// `min_tokens` tokens precede it.
    pub fn is_stopped_by(&self, token: u32, index: usize) -> bool {
        index >= self.min_tokens && self.stop_token_ids.contains(&token)
    }

    /// The reason for which an output of at most `max_tokens` tokens ends with the last token of `generated`, if it
    /// does. No shorter output has ended. A stop sequence counts its own tokens towards `min_tokens`, a stop token does
    /// not.
    pub fn finish_reason(&self, generated: &[u32], max_tokens: usize) -> Option<FinishReason> {
        let last = *generated.last()?;
        if self.is_stopped_by(last, generated.len() - 1) {
            return Some(FinishReason::Stop(last));
        }
        if generated.len() >= self.min_tokens {
            let ends_with = |sequence: &Vec<u32>| generated.ends_with(sequence);
            if let Some(index) = self.stop_token_sequences.iter().position(ends_with) {
                return Some(FinishReason::StopSequence(index));
            }
        }
        (generated.len() == max_tokens).then_some(FinishReason::Length)
    }
}

#[cfg(test)]
mod tests {
    use penstock_types::Sampling;

    use super::*;

    fn request(min_tokens: usize, stop_token_ids: &[u32], sequences: &[&[u32]]) -> Request {
        Request {
            min_tokens,
            stop_token_ids: stop_token_ids.to_vec(),
            stop_token_sequences: sequences.iter().map(|sequence| sequence.to_vec()).collect(),
            ..Request::new([1], 9, Sampling::default())
        }
    }

    #[test]
    fn a_stop_token_ends_the_output_after_min_tokens_other_tokens() {
        let request = request(2, &[7], &[]);
        assert_eq!(request.finish_reason(&[7], 9), None);
        assert_eq!(request.finish_reason(&[5, 7], 9), None);
        assert_eq!(request.finish_reason(&[5, 6, 7], 9), Some(FinishReason::Stop(7)));
    }

    #[test]
    fn a_stop_sequence_counts_its_tokens_towards_min_tokens() {
        let request = request(3, &[], &[&[6, 7], &[7]]);
        assert_eq!(request.finish_reason(&[6, 7], 9), None);
        assert_eq!(request.finish_reason(&[5, 6, 7], 9), Some(FinishReason::StopSequence(0)));
        assert_eq!(request.finish_reason(&[5, 5, 7], 9), Some(FinishReason::StopSequence(1)));
    }

    #[test]
    fn stop_token_precedes_stop_sequence_and_both_precede_length() {
        let request = request(0, &[7], &[&[6, 7], &[6, 8]]);
        assert_eq!(request.finish_reason(&[6, 7], 2), Some(FinishReason::Stop(7)));
        assert_eq!(request.finish_reason(&[6, 8], 2), Some(FinishReason::StopSequence(1)));
        assert_eq!(request.finish_reason(&[6, 9], 2), Some(FinishReason::Length));
        assert_eq!(request.finish_reason(&[], 0), None);
    }
}
