//! A sequence's place between steps: whose it is, what was generated, and all that choosing the next token depends on.
//! A seat makes all of it anew.

use std::sync::Arc;

use penstock_device::{DeviceError, SampleParams, TokenCounts};
use penstock_engine::request::Request;
use penstock_types::{LogprobsRequest, Sampling};

use crate::guard::guarded;
use crate::guide::Guide;

/// A place. Once it has a failure, no more tokens are chosen there until somebody else is seated; what is still computed
/// for it, because it was planned before that was known, is told to nobody.
#[derive(Default)]
pub(crate) struct Slot {
    /// What the sequence is generated for; `None` while nobody is here.
    request: Option<Arc<Request>>,
    /// Its tokens so far.
    generated: Vec<u32>,
    /// How often each token came, where the request has penalties.
    counts: TokenCounts,
    /// Where it stands in the request's grammar; `None` also while its mask is worked out, and when nothing follows.
    guide: Option<Box<Guide>>,
    /// Logits as the request's processors leave them; empty where it has none.
    processed: Vec<f32>,
    failure: Option<String>,
}

impl Slot {
    /// Forgets who was here.
    pub fn seat(&mut self, request: &Arc<Request>, generated: &[u32], vocabulary: usize) {
        // Field by field, so that none is overlooked.
        let Self { request: owner, generated: history, counts, guide, processed, failure } = self;
        *owner = Some(Arc::clone(request));
        history.clear();
        history.extend_from_slice(generated);
        counts.clear();
        if is_counted(request) {
            counts.push_prompt(&request.prompt);
            generated.iter().for_each(|token| counts.push(*token));
        }
        *processed = vec![0.0; if request.processors.is_empty() { 0 } else { vocabulary }];
        (*guide, *failure) = (None, None);
        if let Some(grammar) = &request.grammar {
            match Guide::new(grammar.as_ref(), generated, vocabulary) {
                Ok(guide) => self.guide = Some(guide),
                Err(failure) => self.fail(failure),
            }
        }
    }

    /// Nobody is here any more: nothing that belonged to somebody is kept, nor room for it.
    pub fn vacate(&mut self) {
        *self = Self::default();
    }

    /// Whose it is.
    pub fn request(&self) -> &Request {
        self.request.as_ref().expect("a row has a seat; this is a bug")
    }

    /// The token that came last; of the prompt, if none was generated because the request has failed.
    pub fn last_token(&self) -> u32 {
        let last = self.generated.last().or_else(|| self.request().prompt.last());
        *last.expect("prompts are not empty; this is a bug")
    }

    /// Why its request cannot go on.
    pub fn failure(&self) -> Option<&String> {
        self.failure.as_ref()
    }

    fn fail(&mut self, failure: String) {
        self.failure = Some(failure);
        self.guide = None;
    }

    /// Lends the guide out, if there is one.
    pub fn take_guide(&mut self) -> Option<Box<Guide>> {
        self.guide.take()
    }

    /// The guide is back from having its mask worked out.
    pub fn give_back_guide(&mut self, guide: Box<Guide>) {
        match guide.outcome() {
            Ok(()) => self.guide = Some(guide),
            Err(failure) => self.fail(failure.clone()),
        }
    }

    /// Has the request's processors, if it has some, change the next token's logits, which `read` reads.
    pub fn process(
        &mut self,
        read: impl FnOnce(&mut [f32]) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        if self.processed.is_empty() {
            return Ok(());
        }
        read(&mut self.processed)?;
        let request = self.request.as_ref().expect("a row has a seat; this is a bug");
        let (generated, logits) = (&self.generated, &mut self.processed);
        let mut processors = request.processors.iter();
        let outcome = guarded("logits processor", || {
            processors.try_for_each(|processor| processor.process(&request.prompt, generated, logits))
        });
        if let Err(failure) = outcome {
            self.fail(failure);
        }
        Ok(())
    }

    /// How a position of the prompt is told of, where `given` follows: nothing but the raw logits has a part in that, for
    /// nobody chose what is in a prompt.
    pub fn prompt_params(&self, row: usize, given: Option<u32>) -> SampleParams<'_> {
        let top = self.request().outputs.prompt_logprobs;
        let logprobs = top.map(|top| LogprobsRequest { top, processed: false });
        SampleParams { row: row as u32, given, logprobs, ..SampleParams::greedy() }
    }

    /// How the next token is chosen, the request's `index`-th.
    pub fn params(&self, row: usize, index: u32) -> SampleParams<'_> {
        let request = self.request();
        let outputs = &request.outputs;
        // Field by field, so that none is overlooked.
        let Sampling {
            temperature,
            top_k,
            top_p,
            min_p,
            typical_p,
            repetition_penalty,
            repetition_penalty_scope,
            presence_penalty,
            frequency_penalty,
            no_repeat_ngram_size,
            ref logit_bias,
            ref allowed_token_ids,
            ref bad_token_ids,
            ref bad_words,
            seed,
        } = request.sampling;
        SampleParams {
            row: row as u32,
            temperature,
            top_k,
            top_p,
            min_p,
            typical_p,
            repetition_penalty,
            repetition_penalty_scope,
            presence_penalty,
            frequency_penalty,
            counts: &self.counts,
            no_repeat_ngram_size,
            prompt: &request.prompt,
            generated: &self.generated,
            logit_bias,
            allowed: allowed_token_ids.as_deref(),
            banned: bad_token_ids,
            bad_words,
            suppressed: if (index as usize) < request.min_tokens { &request.stop_token_ids } else { &[] },
            mask: self.guide.as_ref().map(|guide| guide.mask()),
            processed: (!self.processed.is_empty()).then_some(&*self.processed),
            seed,
            index,
            given: None,
            logprobs: outputs
                .logprobs
                .map(|top| LogprobsRequest { top, processed: outputs.processed_logprobs }),
        }
    }

    /// A token was chosen. Nothing in the output follows one that ends it, so that concerns no grammar.
    pub fn accept(&mut self, token: u32) {
        self.generated.push(token);
        if is_counted(self.request()) {
            self.counts.push(token);
        }
        if self.is_ended_by(token) {
            self.guide = None;
        } else if let Some(guide) = &mut self.guide
            && let Err(failure) = guide.accept(token)
        {
            self.fail(failure);
        }
    }

    /// No token could be chosen, the request's `index`-th.
    pub fn exhaust(&mut self, index: u32) {
        let request = self.request();
        let sampling = &request.sampling;
        let causes = [
            (request.grammar.is_some(), "the answer's form"),
            (!request.processors.is_empty(), "logits_processors"),
            (sampling.no_repeat_ngram_size > 0, "no_repeat_ngram_size"),
            (!sampling.bad_words.is_empty(), "bad_words"),
            (!sampling.bad_token_ids.is_empty(), "bad_token_ids"),
            (sampling.allowed_token_ids.is_some(), "allowed_token_ids"),
            ((index as usize) < request.min_tokens, "min_tokens"),
            // Finite as these are, they may push a logit beyond what is.
            (!sampling.logit_bias.is_empty(), "logit_bias"),
            (sampling.repetition_penalty != 1.0, "repetition_penalty"),
            (sampling.presence_penalty != 0.0, "presence_penalty"),
            (sampling.frequency_penalty != 0.0, "frequency_penalty"),
        ];
        let causes: Vec<&str> = causes.iter().filter(|(is_on, _)| *is_on).map(|(_, name)| *name).collect();
        let verb = if causes.len() == 1 { "excludes" } else { "exclude" };
        let cause = match causes.is_empty() {
            true => "the model gives none of them a finite logit".into(),
            false => format!("{} {verb} all of them", causes.join(", ")),
        };
        self.fail(format!("no token is left to choose from: {cause}"));
    }

    /// Whether another token is chosen after this one, which has just been.
    pub fn goes_on_after(&self, token: u32) -> bool {
        self.failure.is_none() && !self.is_ended_by(token)
    }

    fn is_ended_by(&self, token: u32) -> bool {
        self.request().stop_token_ids.contains(&token)
    }

    /// Appends the tokens that the grammar leaves no choice about. From the first one that the model does not know on they
    /// are of no use.
    pub fn forced(&mut self, vocabulary: usize, tokens: &mut Vec<u32>) {
        let Some(guide) = &mut self.guide else { return };
        let start = tokens.len();
        match guide.forced(tokens) {
            Ok(()) => {
                let is_unknown = |token: &u32| *token as usize >= vocabulary;
                if let Some(unknown) = tokens[start..].iter().position(is_unknown) {
                    tokens.truncate(start + unknown);
                }
            }
            Err(failure) => self.fail(failure),
        }
    }
}

/// Whether it matters to a request how often each token came.
fn is_counted(request: &Request) -> bool {
    let sampling = &request.sampling;
    sampling.repetition_penalty != 1.0
        || sampling.presence_penalty != 0.0
        || sampling.frequency_penalty != 0.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_has_no_token_left_is_told_of_all_that_may_have_done_it_and_of_nothing_else() {
        let failure = |sampling: Sampling| {
            let mut slot = Slot::default();
            slot.seat(&Arc::new(Request::new(vec![1], 4, sampling)), &[], 8);
            slot.exhaust(0);
            slot.failure.expect("a failure")
        };
        assert_eq!(
            failure(Sampling::default()),
            "no token is left to choose from: the model gives none of them a finite logit"
        );
        assert_eq!(
            failure(Sampling { logit_bias: vec![(1, f32::MIN)], ..Sampling::default() }),
            "no token is left to choose from: logit_bias excludes all of them"
        );
        let penalties = Sampling { repetition_penalty: 2.0, presence_penalty: 1.0, ..Sampling::default() };
        assert_eq!(
            failure(penalties),
            "no token is left to choose from: repetition_penalty, presence_penalty exclude all of them"
        );
    }
}
