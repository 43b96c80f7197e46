//! From what a user asks to what the engine is told: the model's own defaults where nothing is said, and plain data.

use std::sync::Arc;

use penstock_checkpoint::GenerationConfig;
use penstock_engine::request::Request;
use penstock_frontend::output::without_prompt;
use penstock_types::{OutputScope, PenaltyScope, RequestedOutputs, Sampling};

use crate::contradictions::refuse;
use crate::errors::Error;
use crate::params::SamplingParams;
use crate::record::Tuple;

/// Most bytes of logits and hidden states that a request is given.
const MAX_OUTPUT_BYTES: usize = 1 << 30;

/// What is known of the model that a request is for.
pub struct Target<'a> {
    pub generation: &'a GenerationConfig,
    pub max_model_len: usize,
    pub vocabulary_size: usize,
    pub hidden_size: usize,
}

impl Target<'_> {
    /// The model's own end tokens. An id beyond the vocabulary, which some published files name, is never generated.
    pub fn end_ids(&self) -> impl Iterator<Item = u32> {
        let known = |id: &u32| (*id as usize) < self.vocabulary_size;
        self.generation.eos_token_ids.iter().copied().filter(known)
    }
}

impl SamplingParams {
    /// Every default filled in from the model's own, for a prompt of `prompt` tokens; `max_tokens` never more than is
    /// left. A `seed` is drawn where none is given.
    pub fn resolve(&self, target: &Target<'_>, prompt: usize, seed: u64) -> Result<Self, Error> {
        let model = target.generation;
        let or_model = |given: Option<f64>, model: Option<f32>, neutral| {
            // The shortest decimal that reads as this single: 0.9, where widening it would say 0.8999999761581421.
            given.or(model.and_then(|value| value.to_string().parse().ok())).unwrap_or(neutral)
        };
        // Who says how to sample wants to sample, whatever the model's makers do.
        let filters = [self.top_p, self.min_p, self.typical_p];
        let asks_to_sample = self.top_k.is_some() || filters.iter().any(Option::is_some);
        let is_greedy = model.do_sample == Some(false) && !asks_to_sample;
        let own_temperature = if is_greedy { Some(0.0) } else { model.temperature };
        let resolved = Self {
            max_tokens: Some(self.room(target, prompt)?),
            temperature: Some(or_model(self.temperature, own_temperature, 1.0)),
            top_k: Some(self.top_k.or(model.top_k).unwrap_or(0)),
            top_p: Some(or_model(self.top_p, model.top_p, 1.0)),
            min_p: Some(or_model(self.min_p, model.min_p, 0.0)),
            typical_p: Some(or_model(self.typical_p, model.typical_p, 1.0)),
            repetition_penalty: Some(or_model(self.repetition_penalty, model.repetition_penalty, 1.0)),
            no_repeat_ngram_size: Some(self.no_repeat_ngram_size.or(model.no_repeat_ngram_size).unwrap_or(0)),
            seed: Some(self.seed.unwrap_or(seed)),
            ..self.clone()
        };
        resolved.check_outputs(target, prompt)?;
        Ok(resolved)
    }

    /// How many tokens may be generated: what is asked for, else what the model's makers say, else what is left.
    fn room(&self, target: &Target<'_>, prompt: usize) -> Result<usize, Error> {
        let widened = |number: Option<u32>| number.map(|number| number as usize);
        let (max_tokens, max_length) = match (self.max_tokens, self.max_length) {
            (None, None) => (
                widened(target.generation.max_new_tokens),
                // As the model's makers do: the number of new tokens is the one that counts.
                widened(target.generation.max_length.filter(|_| target.generation.max_new_tokens.is_none())),
            ),
            given => given,
        };
        let mut room = target.max_model_len.saturating_sub(prompt).max(1);
        if let Some(max_length) = max_length {
            let left = max_length.checked_sub(prompt).filter(|left| *left > 0).ok_or_else(|| {
                let params = Self { max_length: Some(max_length), ..self.clone() };
                refuse(&params, "max_length", format!("more than the {prompt} tokens of the prompt"))
            })?;
            room = room.min(left);
        }
        Ok(max_tokens.map_or(room, |tokens| tokens.min(room)))
    }

    /// Logits and hidden states are large, and kept until somebody takes them.
    fn check_outputs(&self, target: &Target<'_>, prompt: usize) -> Result<(), Error> {
        let generated = self.max_tokens.unwrap_or(0).saturating_mul(self.n);
        let values = |extent: &Option<String>, width: usize| {
            let positions = match extent.as_deref().map(extent_of) {
                Some(OutputScope::Prompt) => prompt,
                Some(OutputScope::Generation) => generated,
                Some(OutputScope::All) => prompt.saturating_mul(self.n).saturating_add(generated),
                None => 0,
            };
            positions.saturating_mul(width)
        };
        let logits = values(&self.output_logits, target.vocabulary_size);
        let hidden_states = values(&self.output_hidden_states, target.hidden_size);
        let bytes = logits.saturating_add(hidden_states).saturating_mul(size_of::<f32>());
        if bytes <= MAX_OUTPUT_BYTES {
            return Ok(());
        }
        let field = if logits >= hidden_states { "output_logits" } else { "output_hidden_states" };
        let limit = format!(
            "left out, or of fewer positions (max_tokens): logits and hidden states would take {bytes} bytes, and \
             {MAX_OUTPUT_BYTES} is the most"
        );
        Err(refuse(self, field, limit))
    }

    /// That nothing is generated, but how likely the prompt is is told.
    pub fn for_scoring(&self) -> Self {
        let prompt_logprobs = self.prompt_logprobs.or(Some(0));
        Self { max_tokens: Some(0), prompt_logprobs, ..self.clone() }
    }

    /// That one token is asked for, and what the likeliest of all that is not banned are worth.
    pub fn for_beams(&self) -> Self {
        Self {
            n: 1,
            num_beams: 1,
            length_penalty: 1.0,
            max_tokens: Some(1),
            max_length: None,
            min_tokens: 0,
            temperature: Some(0.0),
            stop: Tuple::default(),
            stop_token_sequences: Tuple::default(),
            logprobs: true,
            top_logprobs: None,
            logprobs_mode: "processed".to_owned(),
            ..self.clone()
        }
    }

    /// The request, all of it that is plain data, for a prompt and params that are resolved.
    pub fn request(&self, prompt: Arc<[u32]>, target: &Target<'_>) -> Request {
        let mut stop_token_ids = self.stop_token_ids.0.clone();
        if !self.ignore_eos {
            stop_token_ids.extend(target.end_ids());
        }
        stop_token_ids.sort_unstable();
        stop_token_ids.dedup();
        let max_tokens = self.max_tokens.expect("resolved; this is a bug");
        Request {
            min_tokens: self.min_tokens,
            stop_token_ids,
            stop_token_sequences: self.stop_sequences(),
            outputs: self.reports(),
            priority: self.priority,
            prefix_cache: self.use_prefix_cache,
            cache_salt: self.cache_salt.as_deref().map(Arc::from),
            ..Request::new(prompt, max_tokens, self.sampling())
        }
    }

    /// As plain data.
    pub fn stop_sequences(&self) -> Vec<Vec<u32>> {
        self.stop_token_sequences.0.iter().map(|sequence| sequence.0.clone()).collect()
    }

    fn sampling(&self) -> Sampling {
        let allowed_token_ids = self.allowed_token_ids.as_ref().map(|allowed| {
            let mut ids = allowed.0.clone();
            ids.sort_unstable();
            ids.dedup();
            ids
        });
        let biases = self.logit_bias.iter().flat_map(|biases| &biases.0);
        Sampling {
            temperature: self.temperature.expect("resolved; this is a bug") as f32,
            top_k: self.top_k.expect("resolved; this is a bug"),
            top_p: self.top_p.expect("resolved; this is a bug") as f32,
            min_p: self.min_p.expect("resolved; this is a bug") as f32,
            typical_p: self.typical_p.expect("resolved; this is a bug") as f32,
            repetition_penalty: self.repetition_penalty.expect("resolved; this is a bug") as f32,
            repetition_penalty_scope: match self.repetition_penalty_scope.as_str() {
                "output" => PenaltyScope::Output,
                _ => PenaltyScope::All,
            },
            presence_penalty: self.presence_penalty as f32,
            frequency_penalty: self.frequency_penalty as f32,
            no_repeat_ngram_size: self.no_repeat_ngram_size.expect("resolved; this is a bug"),
            logit_bias: biases.map(|(id, bias)| (*id, *bias as f32)).collect(),
            allowed_token_ids,
            bad_token_ids: self.bad_token_ids.0.clone(),
            bad_words: Vec::new(),
            seed: self.seed.expect("resolved; this is a bug"),
        }
    }

    fn reports(&self) -> RequestedOutputs {
        RequestedOutputs {
            logprobs: self.logprobs.then(|| self.top_logprobs.unwrap_or(0)),
            prompt_logprobs: self.prompt_logprobs,
            processed_logprobs: self.logprobs_mode == "processed",
            logits: self.output_logits.as_deref().map(extent_of),
            hidden_states: self.output_hidden_states.as_deref().map(extent_of),
        }
    }
}

/// Number `index` of several answers to one prompt: its seed is so much larger than the first one's, and the prompt is
/// reported on once.
pub fn choice(first: &Request, index: usize) -> Request {
    let mut request = first.clone();
    if index > 0 {
        request.sampling.seed = first.sampling.seed.wrapping_add(index as u64);
        request.outputs = without_prompt(first.outputs);
    }
    request
}

/// The positions of a word of `output_logits`.
fn extent_of(word: &str) -> OutputScope {
    match word {
        "prompt" => OutputScope::Prompt,
        "generation" => OutputScope::Generation,
        _ => OutputScope::All,
    }
}
