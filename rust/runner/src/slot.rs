//! The host's state of each slot: the request, its grammar and processors, and why it failed. All other state that
//! sampling depends on is in the backend's slots.
//!
//! A slot is rebuilt when a sequence is admitted to it. A grammar that accepts the tokens of a preempted sequence again
//! reaches the same state.

use std::mem;
use std::sync::{Arc, Weak};
use std::time::Duration;

use penstock_device::{DeviceError, SamplingBatch, SlotParams};
use penstock_engine::NewSequence;
use penstock_engine::request::Request;
use penstock_types::{LogprobsRequest, RequestedOutputs};

use crate::grammar::{FailingPosition, KeptGrammars, SequenceGrammar};
use crate::user_code::catch_user_code;

/// A slot. After a failure no more tokens are sampled until a new sequence is admitted.
#[derive(Default)]
pub(crate) struct HostSlot {
    /// `None` while the slot is free.
    request: Option<Arc<Request>>,
    lifetime: Weak<()>,
    /// The outputs of the sequence.
    outputs: RequestedOutputs,
    /// Counts the sequences of the slot, so that rows of an earlier one are recognised.
    generation: u64,
    /// The token that came last, if one did since the sequence was admitted.
    last_token: Option<u32>,
    grammar: SlotGrammar,
    /// Its last row that samples was deferred, so there is no sample to follow.
    is_deferred: bool,
    /// The generated tokens, if the request has processors. While a step is prepared, its drafts follow.
    history: Vec<u32>,
    num_generated: usize,
    /// The first position of this step that cannot be sampled.
    failing_position: Option<FailingPosition>,
    failure: Option<String>,
}

/// The state of a slot's sequence in its grammar.
#[derive(Default)]
enum SlotGrammar {
    /// There is no grammar, or it is not needed any more: a token ended the request, or it has failed.
    #[default]
    None,
    Here(Box<SequenceGrammar>),
    /// A mask thread has the grammar and computes its masks.
    Away,
}

/// The host's inputs to the sampling of one position, as indices in the batch.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct HostInputs {
    pub mask: Option<u32>,
    pub processed: Option<u32>,
}

impl HostSlot {
    /// Replaces all state by that of a sequence that has generated these tokens. `is_away` says that the masks of its
    /// grammar are computed.
    pub fn admit(
        &mut self,
        sequence: &NewSequence,
        generated: &[u32],
        vocabulary: usize,
        kept: &mut KeptGrammars,
        is_away: bool,
    ) {
        let NewSequence { request, choice, lifetime, .. } = sequence;
        *self = Self {
            request: Some(Arc::clone(request)),
            lifetime: Weak::clone(lifetime),
            outputs: request.choice_outputs(*choice),
            generation: self.generation + 1,
            num_generated: generated.len(),
            ..Self::default()
        };
        if !request.processors.is_empty() {
            self.history.extend_from_slice(generated);
        }
        if is_away {
            self.grammar = SlotGrammar::Away;
        } else if let Some(grammar) = &request.grammar {
            self.return_grammar(kept.resume(lifetime, grammar, generated, vocabulary));
        }
    }

    /// Drops all state but the grammar, which is kept for a sequence that goes on.
    pub fn free(&mut self, kept: &mut KeptGrammars) {
        if let SlotGrammar::Here(grammar) = mem::take(&mut self.grammar) {
            kept.keep(grammar);
        }
        *self = Self { generation: self.generation + 1, ..Self::default() };
    }

    /// The number of the sequence among those that the slot has had.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// The request of a slot that is not free.
    pub fn request(&self) -> &Arc<Request> {
        self.request.as_ref().expect("a row has an admitted slot; this is a bug")
    }

    /// The outputs that the sequence reports besides its tokens.
    pub fn outputs(&self) -> &RequestedOutputs {
        &self.outputs
    }

    /// The token that came last, if one did since the sequence was admitted.
    #[cfg(feature = "testing")]
    pub fn last_token(&self) -> Option<u32> {
        self.last_token
    }

    /// Whether sampling depends on the host: on a grammar's mask or on processors.
    pub fn needs_host(&self) -> bool {
        self.request().grammar.is_some() || self.has_processors()
    }

    /// Whether the request has processors.
    pub fn has_processors(&self) -> bool {
        !self.request().processors.is_empty()
    }

    /// The reason why the request failed.
    pub fn failure(&self) -> Option<&String> {
        self.failure.as_ref()
    }

    /// Ends the request with the next row.
    pub fn fail(&mut self, failure: String) {
        self.failure = Some(failure);
        self.grammar = SlotGrammar::None;
    }

    /// The CPU time that its grammar is expected to take for a token.
    pub fn grammar_cost(&self) -> Option<Duration> {
        match &self.grammar {
            SlotGrammar::Here(grammar) => Some(grammar.expected_cost()),
            _ => None,
        }
    }

    /// Whether a mask thread has the grammar and computes its masks.
    pub fn awaits_masks(&self) -> bool {
        matches!(self.grammar, SlotGrammar::Away)
    }

    /// Takes the grammar to compute the masks of a row with these drafts, unless there is none, or it has them.
    /// `follows_sample` says that the row follows a sample.
    pub fn take_grammar(
        &mut self,
        follows_sample: bool,
        drafts: impl Iterator<Item = u32> + Clone,
    ) -> Option<Box<SequenceGrammar>> {
        if self.is_deferred && follows_sample || self.has_masks(drafts.clone()) {
            return None;
        }
        let SlotGrammar::Here(mut grammar) = mem::replace(&mut self.grammar, SlotGrammar::Away) else {
            return None; // it is away
        };
        grammar.set_drafts(drafts.take_while(|draft| !self.is_ended_by(*draft)));
        Some(grammar)
    }

    /// Whether no mask is to be computed for a row with these drafts.
    fn has_masks(&self, drafts: impl Iterator<Item = u32>) -> bool {
        match &self.grammar {
            SlotGrammar::None => true,
            SlotGrammar::Here(grammar) => {
                grammar.has_masks(drafts.take_while(|draft| !self.is_ended_by(*draft)))
            }
            SlotGrammar::Away => false,
        }
    }

    /// Whether the slot waits for this grammar.
    pub fn waits_for(&self, grammar: &SequenceGrammar) -> bool {
        self.awaits_masks() && grammar.is_of(&self.lifetime)
    }

    /// Returns the grammar with its masks.
    pub fn return_grammar(&mut self, mut grammar: Box<SequenceGrammar>) {
        let failure = grammar.take_failure();
        self.grammar = SlotGrammar::Here(grammar);
        if let Some(failure) = failure {
            self.fail_at(failure);
        }
    }

    /// Defers a row that samples if its masks are late, or if it follows the sample of a row that was deferred. Returns
    /// whether it does.
    pub fn defer(&mut self, follows_sample: bool, drafts: impl Iterator<Item = u32>) -> bool {
        self.is_deferred = self.is_deferred && follows_sample || !self.has_masks(drafts);
        self.is_deferred
    }

    fn fail_at(&mut self, failing: FailingPosition) {
        match failing.position {
            0 => self.fail(failing.failure),
            _ => self.failing_position = Some(failing),
        }
    }

    /// Adds what the host contributes to a position of the step to `batch`; `read` reads the position's logits. `None`
    /// if the position is not sampled. Called once for each position, in order.
    pub fn prepare(
        &mut self,
        position: usize,
        draft: Option<u32>,
        vocabulary: usize,
        batch: &mut SamplingBatch,
        read: impl FnOnce(&mut [f32]) -> Result<(), DeviceError>,
    ) -> Result<Option<HostInputs>, DeviceError> {
        let fails = self.failing_position.as_ref().is_some_and(|failing| failing.position <= position);
        if self.failure.is_some() || fails {
            return Ok(None);
        }
        let mut inputs = HostInputs::default();
        if let SlotGrammar::Here(grammar) = &self.grammar {
            if position >= grammar.num_masks() {
                return Ok(None);
            }
            inputs.mask = Some(batch.push_mask(grammar.mask(position)));
        }
        if self.has_processors() {
            self.history.truncate(self.num_generated + position.saturating_sub(1));
            self.history.extend(draft);
            let mut read_error = None;
            let processed = batch.push_processed(vocabulary, |logits| match read(logits) {
                Ok(()) => self.process(logits),
                Err(error) => {
                    read_error = Some(error);
                    Err(String::new())
                }
            });
            if let Some(error) = read_error {
                return Err(error);
            }
            match processed {
                Ok(processed) => inputs.processed = Some(processed),
                Err(failure) => {
                    self.fail_at(FailingPosition { position, draft, failure });
                    return Ok(None);
                }
            }
        }
        Ok(Some(inputs))
    }

    /// Calls the request's processors with the logits of the position after `history`.
    pub fn process(&self, logits: &mut [f32]) -> Result<(), String> {
        let request = self.request();
        catch_user_code("logits processor", || {
            let mut processors = request.processors.iter();
            processors.try_for_each(|processor| processor.process(&request.prompt, &self.history, logits))
        })
    }

    /// Advances by the tokens of a step, of which all but the last are drafts. A token that ends the request does not
    /// concern its grammar, which accepts the others `at_once` or when its next masks are computed.
    pub fn accept(&mut self, tokens: &[u32], at_once: bool) {
        let Some(&last) = tokens.last() else { return };
        debug_assert!(!self.awaits_masks(), "tokens were sampled without masks; this is a bug");
        let failing = self.failing_position.take();
        self.last_token = Some(last);
        if self.has_processors() {
            self.history.truncate(self.num_generated);
            self.history.extend_from_slice(tokens);
        }
        self.num_generated += tokens.len();
        if self.is_ended_by(last) {
            self.grammar = SlotGrammar::None;
        } else if let Some(failing) = failing
            && (tokens.len(), Some(last)) == (failing.position, failing.draft)
        {
            self.fail(failing.failure);
        } else if let SlotGrammar::Here(grammar) = &mut self.grammar
            && let Err(failure) = grammar.accept(tokens, at_once)
        {
            self.fail(failure);
        }
    }

    /// Fails the request because its `index`-th token has no candidates.
    pub fn mark_no_candidates(&mut self, index: u32) {
        let failure = no_candidates(self.request(), index);
        self.fail(failure);
    }

    fn is_ended_by(&self, token: u32) -> bool {
        self.request().stop_token_ids.contains(&token)
    }

    /// Appends the only tokens that the grammar allows next, up to the first that is not in the vocabulary.
    pub fn forced(&mut self, vocabulary: usize, tokens: &mut Vec<u32>) {
        let SlotGrammar::Here(grammar) = &mut self.grammar else { return };
        let start = tokens.len();
        match grammar.forced(tokens) {
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

/// The error of a request whose `index`-th token has no candidates.
pub(crate) fn no_candidates(request: &Request, index: u32) -> String {
    let sampling = &request.sampling;
    let causes = [
        (request.grammar.is_some(), "the grammar"),
        (!request.processors.is_empty(), "logits_processors"),
        (sampling.no_repeat_ngram_size > 0, "no_repeat_ngram_size"),
        (!sampling.bad_token_sequences.is_empty(), "bad_words or bad_token_sequences"),
        (!sampling.bad_token_ids.is_empty(), "bad_token_ids"),
        (sampling.allowed_token_ids.is_some(), "allowed_token_ids"),
        ((index as usize) < request.min_tokens, "min_tokens"),
        // Finite values can still push a logit beyond the range of float32.
        (!sampling.logit_bias.is_empty(), "logit_bias"),
        (sampling.repetition_penalty != 1.0, "repetition_penalty"),
        (sampling.presence_penalty != 0.0, "presence_penalty"),
        (sampling.frequency_penalty != 0.0, "frequency_penalty"),
    ];
    let causes: Vec<&str> = causes.iter().filter(|(is_on, _)| *is_on).map(|(_, name)| *name).collect();
    let verb = if causes.len() == 1 { "excludes" } else { "exclude" };
    let cause = match causes.is_empty() {
        true => "the model returned no finite logit".into(),
        false => format!("{} {verb} every token", causes.join(", ")),
    };
    format!("no token is left to sample: {cause}")
}

/// The parameters of the backend's slot for a choice of a request that has generated these tokens.
pub(crate) fn slot_params<'a>(request: &'a Request, choice: u32, generated: &'a [u32]) -> SlotParams<'a> {
    let outputs = request.choice_outputs(choice);
    let logprobs = outputs.logprobs.map(|top| LogprobsRequest { top, processed: outputs.processed_logprobs });
    SlotParams {
        sampling: &request.sampling,
        seed: request.choice_seed(choice),
        prompt: &request.prompt,
        generated,
        min_tokens: request.min_tokens,
        stop_token_ids: &request.stop_token_ids,
        logprobs,
        prompt_logprobs: outputs.prompt_logprobs,
    }
}

#[cfg(test)]
mod tests {
    use penstock_types::Sampling;

    use super::*;

    #[test]
    fn no_candidates_error_lists_every_filter_in_use() {
        let failure = |sampling: Sampling| {
            let mut slot = HostSlot::default();
            let request = Arc::new(Request::new(vec![1], 4, sampling));
            let sequence =
                NewSequence { slot: 0, request, choice: 0, generated: 0..0, lifetime: Weak::new() };
            slot.admit(&sequence, &[], 8, &mut KeptGrammars::default(), false);
            slot.mark_no_candidates(0);
            slot.failure.expect("a failure")
        };
        assert_eq!(
            failure(Sampling::default()),
            "no token is left to sample: the model returned no finite logit"
        );
        assert_eq!(
            failure(Sampling { logit_bias: vec![(1, f32::MIN)], ..Sampling::default() }),
            "no token is left to sample: logit_bias excludes every token"
        );
        let penalties = Sampling { repetition_penalty: 2.0, presence_penalty: 1.0, ..Sampling::default() };
        assert_eq!(
            failure(penalties),
            "no token is left to sample: repetition_penalty, presence_penalty exclude every token"
        );
    }
}
