//! The check of a request against the limits, on the caller's thread. An invalid request costs the engine nothing.

use std::collections::HashSet;

use penstock_types::{FieldError, RequestedOutputs, Sampling};

use super::limits::Limits;
use crate::request::Request;

/// The most sequences in `stop_token_sequences`, and the most ids in one: each is compared with the output's end at
/// every token.
const MAX_STOP_SEQUENCES: usize = 64;

/// The most entries of the lists that are applied at every token: stop ids, biases, and the ids of all bad words.
const MAX_LISTED: usize = 1024;

/// A request that the engine can never run.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum InvalidRequest {
    /// The prompt has no tokens.
    #[error("prompt is empty; it needs at least one token")]
    EmptyPrompt,
    /// A token id outside the vocabulary.
    #[error(
        "prompt contains token id {token} at position {position}; the vocabulary has {vocabulary_size} ids"
    )]
    UnknownToken { token: u32, position: usize, vocabulary_size: usize },
    /// The prompt leaves no room for a token, or exceeds the model's length if none is generated.
    #[error(
        "prompt of {prompt} tokens exceeds the limit of {limit} (max_model_len {max_model_len}{})",
        if limit < max_model_len { " less one token of output" } else { "" }
    )]
    PromptTooLong {
        /// The number of prompt tokens.
        prompt: usize,
        /// The most prompt tokens that are allowed.
        limit: usize,
        /// The engine's `max_model_len`.
        max_model_len: usize,
    },
    /// The sequence does not fit the KV cache.
    #[error(
        "prompt of {prompt} tokens and max_tokens={max_tokens} need {needed} KV blocks; the cache has {available}"
    )]
    NeverFits {
        /// The number of prompt tokens.
        prompt: usize,
        /// The `max_tokens` of the request.
        max_tokens: usize,
        /// The blocks needed at full length.
        needed: usize,
        /// The blocks of the KV cache.
        available: usize,
    },
    /// A field with a value that is not allowed.
    #[error(transparent)]
    Field(#[from] FieldError),
}

impl Limits {
    /// Checks whether the engine can run `num_choices` choices of `request`.
    pub fn check_choices(&self, request: &Request, num_choices: u32) -> Result<(), InvalidRequest> {
        if request.max_tokens == 0 && num_choices > 1 {
            let limit = "at least 1 with several choices, since only the first has outputs of the prompt";
            return Err(not_allowed("max_tokens", request.max_tokens, limit));
        }
        self.check(request)
    }

    /// Checks whether the engine can run `request`.
    ///
    /// The memory of logits and hidden states is not limited here: the engine does not know their widths.
    pub fn check(&self, request: &Request) -> Result<(), InvalidRequest> {
        self.check_prompt(request)?;
        if request.max_tokens == 0 && !request.outputs.has_prompt() {
            let limit = "at least 1, since no outputs of the prompt are requested";
            return Err(not_allowed("max_tokens", request.max_tokens, limit));
        }
        if request.min_tokens > request.max_tokens {
            let limit = format!("at most max_tokens={}", request.max_tokens);
            return Err(not_allowed("min_tokens", request.min_tokens, limit));
        }
        check_count("stop_token_ids", request.stop_token_ids.len(), MAX_LISTED)?;
        self.check_ids("stop_token_ids", &request.stop_token_ids)?;
        self.check_stop_sequences(&request.stop_token_sequences)?;
        check_numbers(&request.sampling)?;
        self.check_vocabulary(&request.sampling)?;
        self.check_reports(&request.outputs)?;
        let needed = self.blocks_needed(request);
        if needed > self.num_blocks {
            return Err(InvalidRequest::NeverFits {
                prompt: request.prompt.len(),
                max_tokens: request.max_tokens,
                needed,
                available: self.num_blocks,
            });
        }
        Ok(())
    }

    fn check_prompt(&self, Request { prompt, max_tokens, .. }: &Request) -> Result<(), InvalidRequest> {
        if prompt.is_empty() {
            return Err(InvalidRequest::EmptyPrompt);
        }
        let limit = self.max_model_len - 1.min(*max_tokens);
        if prompt.len() > limit {
            let (prompt, max_model_len) = (prompt.len(), self.max_model_len);
            return Err(InvalidRequest::PromptTooLong { prompt, limit, max_model_len });
        }
        match prompt.iter().position(|token| *token as usize >= self.vocabulary_size) {
            Some(position) => Err(InvalidRequest::UnknownToken {
                token: prompt[position],
                position,
                vocabulary_size: self.vocabulary_size,
            }),
            None => Ok(()),
        }
    }

    fn check_ids<'a>(
        &self,
        field: &'static str,
        ids: impl IntoIterator<Item = &'a u32>,
    ) -> Result<(), InvalidRequest> {
        match ids.into_iter().find(|id| **id as usize >= self.vocabulary_size) {
            Some(id) => {
                Err(not_allowed(field, id, format!("below the vocabulary's {} ids", self.vocabulary_size)))
            }
            None => Ok(()),
        }
    }

    fn check_stop_sequences(&self, sequences: &[Vec<u32>]) -> Result<(), InvalidRequest> {
        let field = "stop_token_sequences";
        if sequences.len() > MAX_STOP_SEQUENCES {
            let value = format!("{} sequences", sequences.len());
            return Err(not_allowed(field, value, format!("at most {MAX_STOP_SEQUENCES}")));
        }
        let range = 1..=MAX_STOP_SEQUENCES;
        if let Some(sequence) = sequences.iter().find(|sequence| !range.contains(&sequence.len())) {
            let value = format!("a sequence of {} ids", sequence.len());
            return Err(not_allowed(field, value, format!("from 1 to {MAX_STOP_SEQUENCES} ids each")));
        }
        self.check_ids(field, sequences.iter().flatten())
    }

    fn check_vocabulary(&self, sampling: &Sampling) -> Result<(), InvalidRequest> {
        check_count("logit_bias", sampling.logit_bias.len(), MAX_LISTED)?;
        self.check_ids("logit_bias", sampling.logit_bias.iter().map(|(id, _)| id))?;
        let mut biased = HashSet::new();
        if let Some((id, _)) = sampling.logit_bias.iter().find(|(id, _)| !biased.insert(*id)) {
            return Err(not_allowed("logit_bias", format!("{id} twice"), "a map with each id once"));
        }
        if let Some(allowed) = &sampling.allowed_token_ids {
            if allowed.is_empty() {
                return Err(not_allowed("allowed_token_ids", "[]", "at least one id"));
            }
            self.check_ids("allowed_token_ids", allowed)?;
            if let Some(pair) = allowed.windows(2).find(|pair| pair[0] >= pair[1]) {
                let value = format!("{} before {}", pair[0], pair[1]);
                return Err(not_allowed("allowed_token_ids", value, "ascending, each once"));
            }
        }
        check_count("bad_token_ids", sampling.bad_token_ids.len(), self.vocabulary_size)?;
        self.check_ids("bad_token_ids", &sampling.bad_token_ids)?;
        check_count(
            "bad_token_sequences",
            sampling.bad_token_sequences.iter().map(Vec::len).sum(),
            MAX_LISTED,
        )?;
        if sampling.bad_token_sequences.iter().any(Vec::is_empty) {
            return Err(not_allowed("bad_token_sequences", "[]", "at least one id each"));
        }
        self.check_ids("bad_token_sequences", sampling.bad_token_sequences.iter().flatten())
    }

    fn check_reports(&self, outputs: &RequestedOutputs) -> Result<(), InvalidRequest> {
        let counts = [("top_logprobs", outputs.logprobs), ("prompt_logprobs", outputs.prompt_logprobs)];
        for (field, count) in counts {
            if let Some(count) = count.filter(|count| *count as usize > self.vocabulary_size) {
                let limit = format!("at most the vocabulary's {} ids", self.vocabulary_size);
                return Err(not_allowed(field, count, limit));
            }
        }
        Ok(())
    }
}

/// The ranges that depend neither on the model nor on the engine.
fn check_numbers(sampling: &Sampling) -> Result<(), InvalidRequest> {
    sampling.check()?;
    match sampling.logit_bias.iter().find(|(_, bias)| !bias.is_finite()) {
        Some((id, bias)) => Err(not_allowed("logit_bias", format!("{bias} for id {id}"), "finite")),
        None => Ok(()),
    }
}

fn check_count(field: &'static str, count: usize, most: usize) -> Result<(), InvalidRequest> {
    match count > most {
        true => Err(not_allowed(field, format!("{count} entries"), format!("at most {most}"))),
        false => Ok(()),
    }
}

fn not_allowed(field: &'static str, value: impl ToString, limit: impl Into<String>) -> InvalidRequest {
    FieldError::new(field, value, limit).into()
}

#[cfg(test)]
mod tests {
    use super::super::test_support::{limits, request};
    use super::*;
    use penstock_types::OutputScope;

    /// `change` makes a valid request invalid, with this error.
    #[track_caller]
    fn check(change: impl FnOnce(&mut Request), message: &str) {
        let mut request = request(8, 8);
        assert_eq!(limits().check(&request), Ok(()));
        change(&mut request);
        assert_eq!(limits().check(&request).unwrap_err().to_string(), message);
    }

    #[test]
    fn length_errors_name_value_and_limit() {
        check(|r| r.prompt = [].into(), "prompt is empty; it needs at least one token");
        check(
            |r| r.prompt = [1; 64].into(),
            "prompt of 64 tokens exceeds the limit of 63 (max_model_len 64 less one token of output)",
        );
        check(
            |r| r.prompt = [1, 1, 1, 100].into(),
            "prompt contains token id 100 at position 3; the vocabulary has 100 ids",
        );
        check(
            |r| r.max_tokens = 0,
            "max_tokens=0 is not allowed: it must be at least 1, since no outputs of the prompt are requested",
        );
        check(|r| r.min_tokens = 9, "min_tokens=9 is not allowed: it must be at most max_tokens=8");
        check(
            |r| r.max_tokens = 1_000,
            "prompt of 8 tokens and max_tokens=1000 need 4 KV blocks; the cache has 3",
        );
    }

    #[test]
    fn number_errors_name_value_and_limit() {
        check(
            |r| r.sampling.temperature = f32::NAN,
            "temperature=NaN is not allowed: it must be finite and at least 0",
        );
        check(
            |r| r.sampling.temperature = -0.5,
            "temperature=-0.5 is not allowed: it must be finite and at least 0",
        );
        check(|r| r.sampling.top_p = 0.0, "top_p=0 is not allowed: it must be above 0 and at most 1");
        check(|r| r.sampling.top_p = f32::NAN, "top_p=NaN is not allowed: it must be above 0 and at most 1");
        check(|r| r.sampling.min_p = 1.5, "min_p=1.5 is not allowed: it must be from 0 to 1");
        check(|r| r.sampling.typical_p = 0.0, "typical_p=0 is not allowed: it must be above 0 and at most 1");
        check(
            |r| r.sampling.repetition_penalty = f32::INFINITY,
            "repetition_penalty=inf is not allowed: it must be finite and above 0",
        );
        check(
            |r| r.sampling.presence_penalty = f32::NAN,
            "presence_penalty=NaN is not allowed: it must be finite",
        );
        check(
            |r| r.sampling.frequency_penalty = f32::NEG_INFINITY,
            "frequency_penalty=-inf is not allowed: it must be finite",
        );
        check(
            |r| r.sampling.no_repeat_ngram_size = 1025,
            "no_repeat_ngram_size=1025 is not allowed: it must be at most 1024",
        );
        check(
            |r| r.sampling.logit_bias = vec![(1, 0.5), (2, f32::NAN)],
            "logit_bias=NaN for id 2 is not allowed: it must be finite",
        );
    }

    #[test]
    fn ids_outside_the_vocabulary_are_rejected_in_every_field() {
        check(
            |r| r.stop_token_ids = vec![2, 100],
            "stop_token_ids=100 is not allowed: it must be below the vocabulary's 100 ids",
        );
        check(
            |r| r.stop_token_sequences = vec![vec![1], vec![99, 100]],
            "stop_token_sequences=100 is not allowed: it must be below the vocabulary's 100 ids",
        );
        check(
            |r| r.sampling.logit_bias = vec![(100, 1.0)],
            "logit_bias=100 is not allowed: it must be below the vocabulary's 100 ids",
        );
        check(
            |r| r.sampling.allowed_token_ids = Some(vec![5, 100]),
            "allowed_token_ids=100 is not allowed: it must be below the vocabulary's 100 ids",
        );
        check(
            |r| r.sampling.bad_token_ids = vec![u32::MAX],
            "bad_token_ids=4294967295 is not allowed: it must be below the vocabulary's 100 ids",
        );
        check(
            |r| r.sampling.bad_token_sequences = vec![vec![1, 100]],
            "bad_token_sequences=100 is not allowed: it must be below the vocabulary's 100 ids",
        );
    }

    #[test]
    fn meaningless_lists_are_rejected() {
        check(
            |r| r.stop_token_sequences = vec![vec![1], vec![]],
            "stop_token_sequences=a sequence of 0 ids is not allowed: it must be from 1 to 64 ids each",
        );
        check(
            |r| r.stop_token_sequences = vec![vec![1; 65]],
            "stop_token_sequences=a sequence of 65 ids is not allowed: it must be from 1 to 64 ids each",
        );
        check(
            |r| r.stop_token_sequences = vec![vec![1]; 65],
            "stop_token_sequences=65 sequences is not allowed: it must be at most 64",
        );
        check(
            |r| r.sampling.allowed_token_ids = Some(vec![]),
            "allowed_token_ids=[] is not allowed: it must be at least one id",
        );
        check(
            |r| r.sampling.allowed_token_ids = Some(vec![2, 5, 5]),
            "allowed_token_ids=5 before 5 is not allowed: it must be ascending, each once",
        );
        check(
            |r| r.sampling.bad_token_sequences = vec![vec![]],
            "bad_token_sequences=[] is not allowed: it must be at least one id each",
        );
    }

    #[test]
    fn lists_applied_at_every_token_are_limited() {
        check(
            |r| r.stop_token_ids = vec![2; 1025],
            "stop_token_ids=1025 entries is not allowed: it must be at most 1024",
        );
        check(
            |r| r.sampling.logit_bias = vec![(2, 1.0); 1025],
            "logit_bias=1025 entries is not allowed: it must be at most 1024",
        );
        check(
            |r| r.sampling.logit_bias = vec![(2, 1.0), (3, 1.0), (2, 0.5)],
            "logit_bias=2 twice is not allowed: it must be a map with each id once",
        );
        check(
            |r| r.sampling.bad_token_ids = vec![2; 101],
            "bad_token_ids=101 entries is not allowed: it must be at most 100",
        );
        check(
            |r| r.sampling.bad_token_sequences = vec![vec![2; 5]; 205],
            "bad_token_sequences=1025 entries is not allowed: it must be at most 1024",
        );
    }

    #[test]
    fn top_logprobs_are_limited_by_the_vocabulary() {
        check(
            |r| r.outputs.logprobs = Some(101),
            "top_logprobs=101 is not allowed: it must be at most the vocabulary's 100 ids",
        );
        check(
            |r| r.outputs.prompt_logprobs = Some(101),
            "prompt_logprobs=101 is not allowed: it must be at most the vocabulary's 100 ids",
        );
    }

    #[test]
    fn a_scored_prompt_may_have_the_model_length() {
        let outputs =
            RequestedOutputs { hidden_states: Some(OutputScope::Prompt), ..RequestedOutputs::default() };
        let limits = Limits { num_blocks: 4, ..limits() };
        assert_eq!(limits.check(&Request { outputs, ..request(64, 0) }), Ok(()));
        let error = limits.check(&Request { outputs, ..request(65, 0) }).unwrap_err();
        assert_eq!(error.to_string(), "prompt of 65 tokens exceeds the limit of 64 (max_model_len 64)");
        assert!(limits.check(&Request { outputs, ..request(64, 1) }).is_err(), "a token has no room");
        let error = limits.check_choices(&Request { outputs, ..request(64, 0) }, 2).unwrap_err();
        let message =
            "max_tokens=0 is not allowed: it must be at least 1 with several choices, since only the first";
        assert!(error.to_string().starts_with(message), "{error}");
    }
}
