//! `SamplingParams`: how a request's tokens are chosen and when they end, checked field by field when built.

use penstock_checkpoint::Generation;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

use crate::errors::Error;
use crate::fields::Field;
use crate::record::{self, Tuple};

/// Most stop strings of a request.
const MAX_STOPS: usize = 64;
/// Most stop token ids of a request; each generated token is compared with them.
const MAX_STOP_IDS: usize = 256;
/// Most characters of a stop string.
const MAX_STOP_CHARS: usize = 1024;

const FIELDS: &[&str] = &[
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "logprobs",
    "skip_special_tokens",
];

/// See `_core.pyi`. `None` means the model's own default.
#[pyclass(frozen, eq, get_all, module = "penstock", skip_from_py_object)]
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    pub max_tokens: Option<usize>,
    pub min_tokens: usize,
    pub temperature: Option<f64>,
    pub top_k: Option<u32>,
    pub top_p: Option<f64>,
    pub min_p: Option<f64>,
    pub seed: Option<u64>,
    pub stop: Tuple<String>,
    pub stop_token_ids: Tuple<u32>,
    pub ignore_eos: bool,
    pub logprobs: bool,
    pub skip_special_tokens: bool,
}

#[pymethods]
impl SamplingParams {
    #[new]
    #[pyo3(signature = (
        *,
        max_tokens = None,
        min_tokens = None,
        temperature = None,
        top_k = None,
        top_p = None,
        min_p = None,
        seed = None,
        stop = None,
        stop_token_ids = None,
        ignore_eos = None,
        logprobs = None,
        skip_special_tokens = None,
    ), text_signature = "(*, max_tokens=None, min_tokens=0, temperature=None, top_k=None, top_p=None, min_p=None, seed=None, stop=(), stop_token_ids=(), ignore_eos=False, logprobs=False, skip_special_tokens=True)")]
    #[expect(clippy::too_many_arguments, reason = "keyword-only, one a field")]
    fn new(
        max_tokens: Option<&Bound<'_, PyAny>>,
        min_tokens: Option<&Bound<'_, PyAny>>,
        temperature: Option<&Bound<'_, PyAny>>,
        top_k: Option<&Bound<'_, PyAny>>,
        top_p: Option<&Bound<'_, PyAny>>,
        min_p: Option<&Bound<'_, PyAny>>,
        seed: Option<&Bound<'_, PyAny>>,
        stop: Option<&Bound<'_, PyAny>>,
        stop_token_ids: Option<&Bound<'_, PyAny>>,
        ignore_eos: Option<&Bound<'_, PyAny>>,
        logprobs: Option<&Bound<'_, PyAny>>,
        skip_special_tokens: Option<&Bound<'_, PyAny>>,
    ) -> Result<Self, Error> {
        let boolean = |name, value: Option<&Bound<'_, PyAny>>, default| {
            value.map_or(Ok(default), |value| Field::request(name).boolean(value))
        };
        let any_u32 = 0..=u64::from(u32::MAX);
        // Ranges are those of the engine's own single precision: what rounds to 0 or to infinity there is refused here.
        let params = Self {
            max_tokens: max_tokens.map(|value| Field::request("max_tokens").count(value)).transpose()?,
            min_tokens: min_tokens
                .map_or(Ok(0), |value| Field::request("min_tokens").integer(value, any_u32.clone()))?
                as usize,
            temperature: temperature
                .map(|value| {
                    let allowed = |number: f64| number >= 0.0 && (number as f32).is_finite();
                    Field::request("temperature").number(
                        value,
                        "a finite number, 0 (greedy) or more",
                        allowed,
                    )
                })
                .transpose()?,
            top_k: top_k
                .map(|value| Field::request("top_k").integer(value, any_u32.clone()).map(|k| k as u32))
                .transpose()?,
            top_p: top_p
                .map(|value| {
                    let allowed = |number: f64| number as f32 > 0.0 && number <= 1.0;
                    Field::request("top_p").number(value, "a number above 0 and at most 1", allowed)
                })
                .transpose()?,
            min_p: min_p
                .map(|value| {
                    let allowed = |number: f64| (0.0..=1.0).contains(&number);
                    Field::request("min_p").number(value, "a number from 0 to 1", allowed)
                })
                .transpose()?,
            seed: seed.map(|value| Field::request("seed").integer(value, 0..=u64::MAX)).transpose()?,
            stop: Tuple(stop.map_or(Ok(Vec::new()), stop_strings)?),
            stop_token_ids: Tuple(stop_token_ids.map_or(Ok(Vec::new()), stop_ids)?),
            ignore_eos: boolean("ignore_eos", ignore_eos, false)?,
            logprobs: boolean("logprobs", logprobs, false)?,
            skip_special_tokens: boolean("skip_special_tokens", skip_special_tokens, true)?,
        };
        if let (Some(max), Some(value)) = (params.max_tokens, min_tokens)
            && params.min_tokens > max
        {
            return Err(Field::request("min_tokens").refuse(value, format!("at most max_tokens, {max}")));
        }
        Ok(params)
    }

    /// A copy with some fields changed.
    #[pyo3(signature = (**changes))]
    fn replace<'py>(
        this: &Bound<'py, Self>,
        changes: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        record::replace(this.as_any(), FIELDS, changes)
    }

    fn __repr__(this: &Bound<'_, Self>) -> PyResult<String> {
        record::repr(this.as_any(), FIELDS)
    }

    fn __hash__(this: &Bound<'_, Self>) -> PyResult<isize> {
        record::hash(this.as_any(), FIELDS)
    }
}

fn stop_ids(value: &Bound<'_, PyAny>) -> Result<Vec<u32>, Error> {
    let field = Field::request("stop_token_ids");
    let ids = field.token_ids(value)?;
    if ids.len() > MAX_STOP_IDS {
        return Err(field.refuse(value, format!("at most {MAX_STOP_IDS} ids")));
    }
    Ok(ids)
}

fn stop_strings(value: &Bound<'_, PyAny>) -> Result<Vec<String>, Error> {
    let field = Field::request("stop");
    if value.is_instance_of::<PyString>() {
        return Ok(vec![stop_string(value)?]);
    }
    let items = value.try_iter().map_err(|_| field.refuse(value, "a string or a sequence of strings"))?;
    let stops = items.map(|item| stop_string(&item?)).collect::<Result<Vec<_>, Error>>()?;
    if stops.len() > MAX_STOPS {
        return Err(field.refuse(value, format!("at most {MAX_STOPS} strings")));
    }
    Ok(stops)
}

fn stop_string(value: &Bound<'_, PyAny>) -> Result<String, Error> {
    let field = Field::request("stop");
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
