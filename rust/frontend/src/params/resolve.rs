//! From the parameters of a request and the defaults of the model to the values that the engine and the output side
//! use.

use std::sync::Arc;

use penstock_engine::request::Request;
use penstock_types::config_limits::DEFAULT_MAX_LOGPROBS;
use penstock_types::{
    FieldError, GenerationConfig, LogprobsMode, OutputScope, RequestedOutputs, Sampling, Unread,
};

use super::SamplingParams;

/// Maximum size of the logits and hidden states of a request in bytes.
const MAX_REQUEST_BYTES: usize = 1 << 30;

/// The properties of a model and its engine that parameters depend on.
#[derive(Clone, Copy)]
pub struct ModelLimits<'a> {
    pub generation: &'a GenerationConfig,
    pub max_model_len: usize,
    pub vocabulary_size: usize,
    pub hidden_size: usize,
    /// Maximum number of most likely tokens at a position.
    pub max_logprobs: u32,
    /// The most bytes that the outputs of all requests of the engine may take.
    pub max_output_bytes: usize,
}

impl<'a> ModelLimits<'a> {
    /// The model's end tokens. Some published files name ids outside the vocabulary, which are never generated.
    pub fn end_ids(&self) -> impl Iterator<Item = u32> + use<'a> {
        let vocabulary_size = self.vocabulary_size;
        let is_known = move |id: &u32| (*id as usize) < vocabulary_size;
        self.generation.eos_token_ids.iter().copied().filter(is_known)
    }
}

/// The parameters of a request with every default in place.
#[derive(Clone, Debug, PartialEq)]
pub struct ResolvedParams {
    /// Number of choices that are generated.
    pub num_choices: usize,
    pub max_tokens: usize,
    pub min_tokens: usize,
    /// Stop token ids, the model's end tokens included; ascending.
    pub stop_token_ids: Vec<u32>,
    pub stop_token_sequences: Vec<Vec<u32>>,
    /// The sampling parameters without bad words, which depend on the tokenizer.
    pub sampling: Sampling,
    pub outputs: RequestedOutputs,
    pub priority: i32,
    pub prefix_cache: bool,
    pub cache_salt: Option<Arc<str>>,
    pub unread: Unread,
    /// The most bytes that logits, hidden states and long lists of logprobs take.
    pub output_bytes: usize,
}

impl ResolvedParams {
    /// The engine's request for a prompt, without grammar and processors.
    pub fn request(&self, prompt: Arc<[u32]>) -> Request {
        Request {
            min_tokens: self.min_tokens,
            stop_token_ids: self.stop_token_ids.clone(),
            stop_token_sequences: self.stop_token_sequences.clone(),
            outputs: self.outputs,
            priority: self.priority,
            prefix_cache: self.prefix_cache,
            cache_salt: self.cache_salt.clone(),
            unread: self.unread,
            output_bytes: self.output_bytes,
            ..Request::new(prompt, self.max_tokens, self.sampling.clone())
        }
    }
}

impl SamplingParams {
    /// Checks the conflicts between parameters.
    pub fn check(&self) -> Result<(), FieldError> {
        self.find_conflict().map_or(Ok(()), |(field, limit)| Err(self.refuse(field, limit)))
    }

    /// The error for a field; `limit` completes the sentence "it must be ...".
    pub fn refuse(&self, field: &'static str, limit: impl Into<String>) -> FieldError {
        FieldError::new(field, self.quote(field), limit)
    }

    /// Resolves the defaults for a prompt of `num_prompt` tokens. `max_tokens` is limited to what the model's length
    /// leaves; `seed` is used if none was given.
    pub fn resolve(
        &self,
        model: &ModelLimits<'_>,
        num_prompt: usize,
        seed: u64,
    ) -> Result<ResolvedParams, FieldError> {
        let mut stop_token_ids = self.stop_token_ids.clone();
        match &self.eos_token_ids {
            _ if self.ignore_eos => {}
            None => stop_token_ids.extend(model.end_ids()),
            Some(ids) if ids.iter().all(|id| (*id as usize) < model.vocabulary_size) => {
                stop_token_ids.extend(ids);
            }
            Some(_) => {
                let limit = format!("ids below the vocabulary's {}", model.vocabulary_size);
                return Err(self.refuse("eos_token_ids", limit));
            }
        }
        stop_token_ids.sort_unstable();
        stop_token_ids.dedup();
        // A request that sets a filter samples, even if the model's default is greedy decoding.
        let is_greedy = model.generation.do_sample == Some(false) && !self.has_filter();
        let temperature = if is_greedy { Some(0.0) } else { model.generation.temperature };
        let defaults = GenerationConfig { temperature, ..model.generation.clone() };
        let mut resolved = ResolvedParams {
            num_choices: self.n,
            max_tokens: self.max_new_tokens(model, num_prompt)?,
            min_tokens: self.min_tokens,
            stop_token_ids,
            stop_token_sequences: self.stop_token_sequences.clone(),
            sampling: self.sampling(&defaults, seed),
            outputs: self.outputs(),
            priority: self.priority,
            prefix_cache: self.use_prefix_cache,
            cache_salt: self.cache_salt.as_deref().map(Arc::from),
            unread: self.unread,
            output_bytes: 0,
        };
        self.check_num_logprobs(model)?;
        resolved.output_bytes = self.output_size(model, num_prompt, &resolved)?;
        Ok(resolved)
    }

    /// The same parameters with every default filled in.
    pub fn filled(&self, resolved: &ResolvedParams) -> Self {
        Self { max_tokens: Some(resolved.max_tokens), ..self.with_defaults(&resolved.sampling) }
    }

    /// The number of tokens that can be generated: that of the request, else the model's, else the rest of its length.
    fn max_new_tokens(&self, model: &ModelLimits<'_>, num_prompt: usize) -> Result<usize, FieldError> {
        let widened = |number: Option<u32>| number.map(|number| number as usize);
        let GenerationConfig { max_new_tokens, max_length, .. } = *model.generation;
        let (max_tokens, max_length) = match (self.max_tokens, self.max_length) {
            // As in transformers, max_new_tokens takes precedence.
            (None, None) => {
                (widened(max_new_tokens), widened(max_length.filter(|_| max_new_tokens.is_none())))
            }
            given => given,
        };
        let mut room = model.max_model_len.saturating_sub(num_prompt).max(1);
        if let Some(max_length) = max_length {
            let left = max_length.checked_sub(num_prompt).filter(|left| *left > 0).ok_or_else(|| {
                let params = Self { max_length: Some(max_length), ..self.clone() };
                params.refuse("max_length", format!("more than the {num_prompt} tokens of the prompt"))
            })?;
            room = room.min(left);
        }
        Ok(max_tokens.map_or(room, |tokens| tokens.min(room)))
    }

    fn check_num_logprobs(&self, model: &ModelLimits<'_>) -> Result<(), FieldError> {
        let counts = [("top_logprobs", self.top_logprobs), ("prompt_logprobs", self.prompt_logprobs)];
        match counts.into_iter().find(|(_, count)| count.is_some_and(|count| count > model.max_logprobs)) {
            Some((field, _)) => {
                let limit = format!("at most max_logprobs={}, an option of the engine", model.max_logprobs);
                Err(self.refuse(field, limit))
            }
            None => Ok(()),
        }
    }

    /// The size of logits, hidden states and long lists of logprobs in bytes. It is limited, because they are kept
    /// until they are read.
    fn output_size(
        &self,
        model: &ModelLimits<'_>,
        num_prompt: usize,
        resolved: &ResolvedParams,
    ) -> Result<usize, FieldError> {
        let generated = resolved.max_tokens.saturating_mul(self.n.max(self.num_beams));
        let values = |scope: Option<OutputScope>, width: usize| {
            let positions = match scope {
                Some(OutputScope::Prompt) => num_prompt,
                Some(OutputScope::Generation) => generated,
                Some(OutputScope::All) => num_prompt.saturating_mul(self.n).saturating_add(generated),
                None => 0,
            };
            positions.saturating_mul(width)
        };
        // A token and its log probability. Short lists are not counted.
        let listed = |count: Option<u32>, positions: usize| {
            let count = count.unwrap_or(0).saturating_sub(DEFAULT_MAX_LOGPROBS as u32);
            positions.saturating_mul(2 * count as usize)
        };
        let sizes = [
            ("output_logits", values(self.output_logits, model.vocabulary_size)),
            ("output_hidden_states", values(self.output_hidden_states, model.hidden_size)),
            ("output_embeddings", values(self.output_embeddings, model.hidden_size)),
            ("top_logprobs", listed(self.top_logprobs, generated)),
            ("prompt_logprobs", listed(self.prompt_logprobs, num_prompt)),
        ];
        let total = sizes.iter().fold(0_usize, |total, (_, size)| total.saturating_add(*size));
        let bytes = total.saturating_mul(size_of::<f32>());
        let most = MAX_REQUEST_BYTES.min(model.max_output_bytes);
        let largest = sizes.into_iter().rev().max_by_key(|(_, size)| *size);
        match largest {
            Some((field, _)) if bytes > most => {
                let limit = format!(
                    "left out, or of fewer positions (max_tokens): tensors and logprobs would take \
                     {bytes} bytes, the maximum is {most}"
                );
                Err(self.refuse(field, limit))
            }
            _ => Ok(bytes),
        }
    }

    /// The parameters for scoring the prompt: nothing is generated.
    pub fn for_scoring(&self) -> Self {
        Self { max_tokens: Some(0), prompt_logprobs: self.prompt_logprobs.or(Some(0)), ..self.clone() }
    }

    /// The parameters for a step of a beam search: one token, and the most likely tokens after all bans.
    pub fn for_beams(&self) -> Self {
        Self {
            n: 1,
            num_beams: 1,
            length_penalty: 1.0,
            max_tokens: Some(1),
            max_length: None,
            min_tokens: 0,
            temperature: Some(0.0),
            stop: Vec::new(),
            stop_token_sequences: Vec::new(),
            logprobs: true,
            top_logprobs: None,
            logprobs_mode: LogprobsMode::Processed,
            ..self.clone()
        }
    }

    fn outputs(&self) -> RequestedOutputs {
        RequestedOutputs {
            logprobs: self.logprobs.then(|| self.top_logprobs.unwrap_or(0)),
            prompt_logprobs: self.prompt_logprobs,
            processed_logprobs: self.logprobs_mode == LogprobsMode::Processed,
            logits: self.output_logits,
            hidden_states: self.output_hidden_states,
            embeddings: self.output_embeddings,
        }
    }

    /// The ids of `allowed_token_ids`, ascending.
    pub(super) fn allowed_ids(&self) -> Option<Vec<u32>> {
        self.allowed_token_ids.clone().map(|mut ids| {
            ids.sort_unstable();
            ids.dedup();
            ids
        })
    }

    pub(super) fn biases(&self) -> Vec<(u32, f32)> {
        let biases = self.logit_bias.iter().flat_map(|bias| &bias.0);
        biases.map(|(id, bias)| (*id, *bias as f32)).collect()
    }
}
