//! `SamplingParams`: what a request asks for, checked field by field when built, and for how the fields go together.

use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyString};

use crate::contradictions::check;
use crate::errors::Error;
use crate::fields::{Field, TOKEN_IDS, read_number};
use crate::processors::Processors;
use crate::record::{Tuple, options};
use crate::structure::{ResponseFormat, ToolChoice, Tools};

/// Most answers to one prompt, and most that the best are chosen from.
const MAX_CHOICES: u64 = 128;
/// Most beams of a beam search.
const MAX_BEAMS: u64 = 32;
/// The length of any answer to this power, or to its inverse, is a number.
const MAX_LENGTH_PENALTY: f64 = 32.0;
/// Most of the likeliest tokens that are told of a position.
const MAX_TOP_LOGPROBS: u64 = 20;
/// Most ids with a bias.
const MAX_BIASES: usize = 1024;
/// Most token ids of a list of those that may or may not be chosen; more than any vocabulary has.
const MAX_LISTED_IDS: usize = 1 << 20;
/// Most words that may not come about, and most characters of each.
const MAX_BAD_WORDS: usize = 128;
const MAX_BAD_WORD_CHARS: usize = 256;
/// Most stop strings of a request, and most stop sequences.
const MAX_STOPS: usize = 64;
/// Most stop token ids of a request; each generated token is compared with them.
const MAX_STOP_IDS: usize = 256;
/// Most token ids of a stop sequence.
const MAX_STOP_SEQUENCE: usize = 64;
/// Most characters of a stop string.
const MAX_STOP_CHARS: usize = 1024;
/// Most texts to choose from.
const MAX_TEXTS: usize = 1024;
/// Most characters of a regular expression, of a grammar, of all texts to choose from.
const MAX_SOURCE_CHARS: usize = 1 << 20;
/// Most characters of a cache salt.
const MAX_SALT_CHARS: usize = 1024;

options! {
    /// See `_core.pyi`. `None` means the model's own default.
    SamplingParams(Field::request, check) {
        n: usize = 1, |field: Field, value| field.integer(value, 1..=MAX_CHOICES).map(|n| n as usize);
        best_of: Option<usize> = None, |field: Field, value| field.integer(value, 1..=MAX_CHOICES).map(|n| n as usize);
        num_beams: usize = 1, |field: Field, value| field.integer(value, 1..=MAX_BEAMS).map(|n| n as usize);
        length_penalty: f64 = 1.0, |field, value| read_range(field, value, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY);
        max_tokens: Option<usize> = None, Field::count;
        max_length: Option<usize> = None, Field::count;
        min_tokens: usize = 0, |field: Field, value| read_u32(field, value).map(|tokens| tokens as usize);
        temperature: Option<f64> = None, |field, value| read_range(field, value, 0.0, 2.0);
        top_k: Option<u32> = None, read_top_k;
        top_p: Option<f64> = None, read_share;
        min_p: Option<f64> = None, |field, value| read_range(field, value, 0.0, 1.0);
        typical_p: Option<f64> = None, read_share;
        repetition_penalty: Option<f64> = None, read_factor;
        presence_penalty: f64 = 0.0, |field, value| read_range(field, value, -2.0, 2.0);
        frequency_penalty: f64 = 0.0, |field, value| read_range(field, value, -2.0, 2.0);
        no_repeat_ngram_size: Option<u32> = None, read_u32;
        repetition_penalty_scope: String = all, |field: Field, value| field.choice(value, &["all", "output"]);
        logit_bias: Option<Biases> = None, Biases::read;
        allowed_token_ids: Option<Tuple<u32>> = None, read_allowed;
        bad_words: Tuple<String> = (), |field, value| read_texts(field, value, MAX_BAD_WORDS, MAX_BAD_WORD_CHARS);
        bad_token_ids: Tuple<u32> = (), |field: Field, value| field.token_ids(value, MAX_LISTED_IDS, TOKEN_IDS).map(Tuple);
        stop: Tuple<String> = (), read_stops;
        stop_token_ids: Tuple<u32> = (), |field: Field, value| field.token_ids(value, MAX_STOP_IDS, TOKEN_IDS).map(Tuple);
        stop_token_sequences: Tuple<Tuple<u32>> = (), read_stop_sequences;
        include_stop_str_in_output: bool = false, Field::boolean;
        ignore_eos: bool = false, Field::boolean;
        seed: Option<u64> = None, |field: Field, value| field.integer(value, 0..=u64::MAX);
        logprobs: bool = false, read_logprobs;
        top_logprobs: Option<u32> = None, read_num_logprobs;
        prompt_logprobs: Option<u32> = None, read_num_logprobs;
        logprobs_mode: String = raw, |field: Field, value| field.choice(value, &["raw", "processed"]);
        echo: bool = false, Field::boolean;
        skip_special_tokens: bool = true, Field::boolean;
        spaces_between_special_tokens: bool = false, Field::boolean;
        output_logits: Option<String> = None, read_extent;
        output_hidden_states: Option<String> = None, read_extent;
        logits_processors: Processors = (), Processors::read;
        response_format: Option<ResponseFormat> = None, ResponseFormat::read;
        regex: Option<String> = None, read_source;
        choice: Option<Tuple<String>> = None, read_choice;
        grammar: Option<String> = None, read_source;
        tools: Option<Tools> = None, Tools::read;
        tool_choice: Option<ToolChoice> = None, ToolChoice::read;
        parallel_tool_calls: bool = true, Field::boolean;
        priority: i32 = 0, read_priority;
        cache_salt: Option<String> = None, |field: Field, value| field.text_within(value, MAX_SALT_CHARS);
        use_prefix_cache: bool = true, Field::boolean;
    }
}

/// What is added to the logits of some ids, in their order. Zeros are positive, so that equal ones look the same.
#[derive(Clone, Debug, PartialEq)]
pub struct Biases(pub Vec<(u32, f64)>);

impl Biases {
    fn read(field: Field, value: &Bound<'_, PyAny>) -> Result<Self, Error> {
        let limit = "a dict of token ids (integers from 0) and numbers from -100 to 100";
        let biases = value.cast::<PyDict>().map_err(|_| field.refuse(value, limit))?;
        if biases.len() > MAX_BIASES {
            return Err(field.refuse(value, format!("at most {MAX_BIASES} ids")));
        }
        let pair = |(id, bias): (Bound<'_, PyAny>, Bound<'_, PyAny>)| {
            let token =
                read_u32(field, &id).map_err(|_| field.refuse(&id, "token ids (integers from 0) as keys"))?;
            let limit = format!("a number from -100 to 100, the bias of token {token}");
            Ok((token, field.number(&bias, &limit, |bias| (-100.0..=100.0).contains(&bias))? + 0.0))
        };
        // A list of its own, for numbers may be of classes whose conversion changes the dict.
        let pairs: Vec<_> = biases.iter().collect();
        let mut biases = pairs.into_iter().map(pair).collect::<Result<Vec<_>, Error>>()?;
        biases.sort_unstable_by_key(|(id, _)| *id);
        Ok(Self(biases))
    }
}

impl<'py> IntoPyObject<'py> for &Biases {
    type Target = PyDict;
    type Output = Bound<'py, PyDict>;
    type Error = PyErr;

    fn into_pyobject(self, py: Python<'py>) -> Result<Self::Output, Self::Error> {
        let biases = PyDict::new(py);
        self.0.iter().try_for_each(|(id, bias)| biases.set_item(id, bias))?;
        Ok(biases)
    }
}

fn read_u32(field: Field, value: &Bound<'_, PyAny>) -> Result<u32, Error> {
    field.integer(value, 0..=u64::from(u32::MAX)).map(|number| number as u32)
}

/// -1 is the other way to say all.
fn read_top_k(field: Field, value: &Bound<'_, PyAny>) -> Result<u32, Error> {
    match read_number::<i64>(value)? {
        Some(-1) => Ok(0),
        Some(number) if u32::try_from(number).is_ok() => Ok(number as u32),
        _ => Err(field.refuse(value, format!("an integer from -1 to {}; -1 and 0 are all", u32::MAX))),
    }
}

/// Other interfaces have a number here.
fn read_logprobs(field: Field, value: &Bound<'_, PyAny>) -> Result<bool, Error> {
    let limit = "True or False; how many of the likeliest tokens are told of is top_logprobs";
    value.cast::<PyBool>().map(|value| value.is_true()).map_err(|_| field.refuse(value, limit))
}

fn read_num_logprobs(field: Field, value: &Bound<'_, PyAny>) -> Result<u32, Error> {
    field.integer(value, 0..=MAX_TOP_LOGPROBS).map(|number| number as u32)
}

fn read_range(field: Field, value: &Bound<'_, PyAny>, low: f64, high: f64) -> Result<f64, Error> {
    field.number(value, &format!("a number from {low} to {high}"), |number| (low..=high).contains(&number))
}

// Where 0 or infinity is out of range, so is what rounds to it in the engine's single precision.

fn read_share(field: Field, value: &Bound<'_, PyAny>) -> Result<f64, Error> {
    let allowed = |number: f64| number as f32 > 0.0 && number <= 1.0;
    field.number(value, "a number above 0 and at most 1", allowed)
}

fn read_factor(field: Field, value: &Bound<'_, PyAny>) -> Result<f64, Error> {
    let allowed = |number: f64| number as f32 > 0.0 && (number as f32).is_finite();
    field.number(value, "a finite number above 0", allowed)
}

fn read_priority(field: Field, value: &Bound<'_, PyAny>) -> Result<i32, Error> {
    let number = read_number::<i32>(value)?;
    number.ok_or_else(|| field.refuse(value, format!("an integer from {} to {}", i32::MIN, i32::MAX)))
}

fn read_extent(field: Field, value: &Bound<'_, PyAny>) -> Result<String, Error> {
    field.choice(value, &["prompt", "generation", "all"]).map(str::to_owned)
}

fn read_source(field: Field, value: &Bound<'_, PyAny>) -> Result<String, Error> {
    field.text_within(value, MAX_SOURCE_CHARS)
}

fn read_allowed(field: Field, value: &Bound<'_, PyAny>) -> Result<Tuple<u32>, Error> {
    let ids = field.token_ids(value, MAX_LISTED_IDS, TOKEN_IDS)?;
    if ids.is_empty() { Err(field.refuse(value, "left out, or at least one id")) } else { Ok(Tuple(ids)) }
}

fn read_choice(field: Field, value: &Bound<'_, PyAny>) -> Result<Tuple<String>, Error> {
    let Tuple(texts) = read_texts(field, value, MAX_TEXTS, MAX_SOURCE_CHARS)?;
    let num_chars: usize = texts.iter().map(|text| text.chars().count()).sum();
    match num_chars {
        0 => Err(field.refuse(value, "left out, or at least one string")),
        1..=MAX_SOURCE_CHARS => Ok(Tuple(texts)),
        _ => Err(field.refuse(value, format!("strings of at most {MAX_SOURCE_CHARS} characters in all"))),
    }
}

fn read_stops(field: Field, value: &Bound<'_, PyAny>) -> Result<Tuple<String>, Error> {
    if value.is_instance_of::<PyString>() {
        return Ok(Tuple(vec![field.text_within(value, MAX_STOP_CHARS)?]));
    }
    let read = |field: Field, text: &Bound<'_, PyAny>| field.text_within(text, MAX_STOP_CHARS);
    field.items(value, MAX_STOPS, "strings", "a string or a sequence of strings", read).map(Tuple)
}

fn read_texts(
    field: Field,
    value: &Bound<'_, PyAny>,
    most: usize,
    most_chars: usize,
) -> Result<Tuple<String>, Error> {
    let read = |field: Field, text: &Bound<'_, PyAny>| field.text_within(text, most_chars);
    field.items(value, most, "strings", "a sequence of strings", read).map(Tuple)
}

fn read_stop_sequences(field: Field, value: &Bound<'_, PyAny>) -> Result<Tuple<Tuple<u32>>, Error> {
    let expected = "a sequence of sequences of token ids (integers from 0)";
    let read =
        |field: Field, item: &Bound<'_, PyAny>| match field.token_ids(item, MAX_STOP_SEQUENCE, expected)? {
            ids if ids.is_empty() => Err(field.refuse(value, "sequences of at least one id each")),
            ids => Ok(Tuple(ids)),
        };
    field.items(value, MAX_STOPS, "sequences", expected, read).map(Tuple)
}
