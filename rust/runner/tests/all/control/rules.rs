//! Grammars and processors for tests: their results depend on all earlier tokens.

use std::sync::Arc;

use penstock_engine::{Grammar, GrammarState, LogitsProcessor, Request};
use penstock_types::{OutputScope, RequestedOutputs, Sampling};

use crate::common::{VOCABULARY, request};

/// The call that fails, and the number of tokens before it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fault {
    Never,
    Start,
    StartPanics,
    Mask(usize),
    MaskPanics(usize),
    /// No id is allowed.
    Nothing(usize),
    /// The call that accepts this token.
    Accept(usize),
    ForcedPanics(usize),
    /// No token is reported as forced, so there are no drafts.
    #[allow(dead_code, reason = "only the asynchronous tests use it")]
    NoneForced,
}

/// Allows a third of the ids, which depends on the sum of all tokens so far; every fourth token is forced.
#[derive(Debug)]
pub struct Thirds(pub Fault);

#[derive(Clone)]
struct Third {
    fault: Fault,
    count: usize,
    sum: u32,
}

impl Third {
    fn forced_id(&self) -> Option<u32> {
        (self.count % 4 == 3).then_some(self.sum * 7 % VOCABULARY as u32)
    }

    fn allows(&self, id: u32) -> bool {
        self.forced_id().map_or(id % 3 == self.sum % 3, |forced| id == forced)
    }
}

impl Grammar for Thirds {
    fn start(&self) -> Result<Box<dyn GrammarState>, String> {
        match self.0 {
            Fault::Start => Err("no start".into()),
            Fault::StartPanics => panic!("start panics"),
            fault => Ok(Box::new(Third { fault, count: 0, sum: 0 })),
        }
    }
}

impl GrammarState for Third {
    fn mask(&mut self, allowed: &mut [u32]) -> Result<(), String> {
        allowed.fill(0);
        match self.fault {
            Fault::Mask(count) if count == self.count => return Err("no mask".into()),
            Fault::MaskPanics(count) if count == self.count => panic!("mask panics"),
            Fault::Nothing(count) if count == self.count => return Ok(()),
            _ => {}
        }
        let ids = (0..VOCABULARY as u32).filter(|id| self.allows(*id));
        ids.for_each(|id| allowed[id as usize / 32] |= 1 << (id % 32));
        Ok(())
    }

    fn accept(&mut self, token: u32) -> Result<(), String> {
        assert!(self.allows(token), "{token} is not allowed after {} tokens", self.count);
        (self.count, self.sum) = (self.count + 1, self.sum + token);
        match self.fault {
            Fault::Accept(count) if count + 1 == self.count => Err("not accepted".into()),
            _ => Ok(()),
        }
    }

    fn forced(&mut self, tokens: &mut Vec<u32>) {
        match self.fault {
            Fault::NoneForced => return,
            Fault::ForcedPanics(count) if count == self.count => panic!("forced panics"),
            _ => {}
        }
        tokens.extend(self.forced_id());
    }

    fn fork(&self) -> Result<Box<dyn GrammarState>, String> {
        Ok(Box::new(self.clone()))
    }
}

/// Whether the grammar allows `ids`.
pub fn matches_thirds(ids: &[u32]) -> bool {
    let mut third = Third { fault: Fault::Never, count: 0, sum: 0 };
    ids.iter().all(|id| third.allows(*id) && third.accept(*id).is_ok())
}

/// Penalises ids by their distance from the sum of all tokens so far; fails or panics from some token on.
#[derive(Debug)]
pub struct PullToSum {
    pub strength: f32,
    pub fails_at: usize,
    pub panics_at: usize,
}

impl LogitsProcessor for PullToSum {
    fn process(&self, prompt: &[u32], generated: &[u32], logits: &mut [f32]) -> Result<(), String> {
        assert!(generated.len() < self.panics_at, "it panics");
        if generated.len() >= self.fails_at {
            return Err("it fails".into());
        }
        let sum: u32 = prompt.iter().chain(generated).sum();
        for (id, logit) in logits.iter_mut().enumerate() {
            *logit -= self.strength * (id as u32).abs_diff(sum % VOCABULARY as u32) as f32;
        }
        Ok(())
    }
}

pub fn pulled(strength: f32) -> Arc<dyn LogitsProcessor> {
    Arc::new(PullToSum { strength, fails_at: usize::MAX, panics_at: usize::MAX })
}

/// A request that sets every parameter but a grammar.
pub fn with_everything(number: usize, num_prompt: usize, max_tokens: usize) -> Request {
    let plain = request(number, num_prompt, max_tokens);
    let sampling = Sampling {
        temperature: 0.9,
        top_k: 60,
        min_p: 0.01,
        typical_p: 0.95,
        repetition_penalty: 1.3,
        presence_penalty: 0.4,
        frequency_penalty: 0.2,
        no_repeat_ngram_size: 3,
        logit_bias: vec![(7, 2.0), (8, -3.0)],
        allowed_token_ids: Some((0..VOCABULARY as u32).filter(|id| id % 11 != 5).collect()),
        bad_token_ids: vec![30, 31, 32],
        bad_token_sequences: vec![vec![40], vec![41, 42]],
        ..plain.sampling.clone()
    };
    let outputs = RequestedOutputs {
        logprobs: Some(3),
        prompt_logprobs: Some(2),
        processed_logprobs: number % 2 == 1,
        logits: Some(OutputScope::All),
        hidden_states: Some(OutputScope::All),
        embeddings: Some(OutputScope::All),
    };
    let processors = vec![pulled(0.01), pulled(0.02)];
    Request { sampling, outputs, processors, min_tokens: 2, stop_token_ids: vec![50], ..plain }
}
