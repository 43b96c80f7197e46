//! `SamplingParams`: how a request's tokens are chosen and when they end, checked field by field when built.

use penstock_checkpoint::Generation;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyString};

use crate::errors::Error;
use crate::fields::{Field, TOKEN_IDS};
use crate::record::{Tuple, options};

/// Most stop strings of a request.
const MAX_STOPS: usize = 64;
/// Most stop token ids of a request; each generated token is compared with them.
const MAX_STOP_IDS: usize = 256;
/// Most characters of a stop string.
const MAX_STOP_CHARS: usize = 1024;
/// Most characters of a cache salt.
const MAX_SALT_CHARS: usize = 1024;

options! {
    /// See `_core.pyi`. `None` means the model's own default.
    SamplingParams(Field::request, check_lengths) {
        max_tokens: Option<usize> = None, Field::count;
        min_tokens: usize = 0, |field: Field, value| read_u32(field, value).map(|tokens| tokens as usize);
        temperature: Option<f64> = None, read_temperature;
        top_k: Option<u32> = None, read_u32;
        top_p: Option<f64> = None, read_top_p;
        min_p: Option<f64> = None, read_min_p;
        seed: Option<u64> = None, |field: Field, value| field.integer(value, 0..=u64::MAX);
        stop: Tuple<String> = (), read_stops;
        stop_token_ids: Tuple<u32> = (), read_stop_ids;
        ignore_eos: bool = false, Field::boolean;
        logprobs: bool = false, Field::boolean;
        skip_special_tokens: bool = true, Field::boolean;
        priority: i32 = 0, read_priority;
        cache_salt: Option<String> = None, read_salt;
        use_prefix_cache: bool = true, Field::boolean;
    }
}

/// How long an answer must be is no more than how long it may be.
fn check_lengths(params: &SamplingParams) -> Result<(), Error> {
    let SamplingParams { min_tokens, max_tokens, .. } = *params;
    match max_tokens {
        Some(max) if min_tokens > max => Python::attach(|py| {
            let value = min_tokens.into_pyobject(py).map_err(PyErr::from)?;
            Err(Field::request("min_tokens").refuse(&value, format!("at most max_tokens, {max}")))
        }),
        _ => Ok(()),
    }
}

fn read_u32(field: Field, value: &Bound<'_, PyAny>) -> Result<u32, Error> {
    field.integer(value, 0..=u64::from(u32::MAX)).map(|number| number as u32)
}

// Ranges are those of the engine's own single precision: what rounds to 0 or to infinity there is refused here.

fn read_temperature(field: Field, value: &Bound<'_, PyAny>) -> Result<f64, Error> {
    let allowed = |number: f64| number >= 0.0 && (number as f32).is_finite();
    field.number(value, "a finite number, 0 (greedy) or more", allowed)
}

fn read_top_p(field: Field, value: &Bound<'_, PyAny>) -> Result<f64, Error> {
    let allowed = |number: f64| number as f32 > 0.0 && number <= 1.0;
    field.number(value, "a number above 0 and at most 1", allowed)
}

fn read_min_p(field: Field, value: &Bound<'_, PyAny>) -> Result<f64, Error> {
    field.number(value, "a number from 0 to 1", |number| (0.0..=1.0).contains(&number))
}

fn read_priority(field: Field, value: &Bound<'_, PyAny>) -> Result<i32, Error> {
    let number = if value.is_instance_of::<PyBool>() { None } else { value.extract::<i32>().ok() };
    number.ok_or_else(|| field.refuse(value, format!("an integer from {} to {}", i32::MIN, i32::MAX)))
}

fn read_salt(field: Field, value: &Bound<'_, PyAny>) -> Result<String, Error> {
    let text = field.text(value)?;
    if text.is_empty() || text.chars().count() > MAX_SALT_CHARS {
        return Err(field.refuse(value, format!("a string of 1 to {MAX_SALT_CHARS} characters")));
    }
    Ok(text)
}

fn read_stop_ids(field: Field, value: &Bound<'_, PyAny>) -> Result<Tuple<u32>, Error> {
    let ids = field.token_ids(value, TOKEN_IDS)?;
    if ids.len() > MAX_STOP_IDS {
        return Err(field.refuse(value, format!("at most {MAX_STOP_IDS} ids")));
    }
    Ok(Tuple(ids))
}

fn read_stops(field: Field, value: &Bound<'_, PyAny>) -> Result<Tuple<String>, Error> {
    if value.is_instance_of::<PyString>() {
        return Ok(Tuple(vec![read_stop(field, value)?]));
    }
    let items = value.try_iter().map_err(|_| field.refuse(value, "a string or a sequence of strings"))?;
    let stops = items.map(|item| read_stop(field, &item?)).collect::<Result<Vec<_>, Error>>()?;
    if stops.len() > MAX_STOPS {
        return Err(field.refuse(value, format!("at most {MAX_STOPS} strings")));
    }
    Ok(Tuple(stops))
}

fn read_stop(field: Field, value: &Bound<'_, PyAny>) -> Result<String, Error> {
    let text = field.text(value)?;
    if text.is_empty() || text.chars().count() > MAX_STOP_CHARS {
        return Err(field.refuse(value, format!("a string of 1 to {MAX_STOP_CHARS} characters")));
    }
    Ok(text)
}

impl SamplingParams {
    /// Every default filled in from the model's own, for a prompt of `prompt` in a model of `max_model_len` tokens;
    /// `max_tokens` never more than that leaves.
    pub fn resolve(&self, model: &Generation, prompt: usize, max_model_len: usize, seed: u64) -> Self {
        let or_model = |given: Option<f64>, model: Option<f32>, neutral| {
            // The shortest decimal that reads as this single: 0.9, where widening it would say 0.8999999761581421.
            given.or(model.and_then(|value| value.to_string().parse().ok())).unwrap_or(neutral)
        };
        let room = max_model_len.saturating_sub(prompt).max(1);
        // Who says how to sample wants to sample, whatever the model's makers do.
        let asks_to_sample = self.top_k.is_some() || self.top_p.is_some() || self.min_p.is_some();
        let is_greedy = model.do_sample == Some(false) && !asks_to_sample;
        Self {
            max_tokens: Some(self.max_tokens.map_or(room, |tokens| tokens.min(room))),
            temperature: Some(or_model(
                self.temperature,
                if is_greedy { Some(0.0) } else { model.temperature },
                1.0,
            )),
            top_k: Some(self.top_k.or(model.top_k).unwrap_or(0)),
            top_p: Some(or_model(self.top_p, model.top_p, 1.0)),
            min_p: Some(or_model(self.min_p, model.min_p, 0.0)),
            seed: Some(self.seed.unwrap_or(seed)),
            ..self.clone()
        }
    }
}
