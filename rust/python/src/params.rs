//! Readers of the fields of `SamplingParams` that have a form of their own.

use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyString};

use crate::errors::Error;
use crate::fields::{Field, TOKEN_IDS, read_number};
use crate::record::Tuple;
pub use crate::sampling_params::SamplingParams;

/// Most ids with a bias.
const MAX_BIASES: usize = 1024;
/// What is added to the logits of some ids, in their order. Zeros are positive, so that equal ones look the same.
#[derive(Clone, Debug, PartialEq)]
pub struct Biases(pub Vec<(u32, f64)>);

impl Biases {
    pub fn read(field: Field, value: &Bound<'_, PyAny>) -> Result<Self, Error> {
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

pub fn read_u32(field: Field, value: &Bound<'_, PyAny>) -> Result<u32, Error> {
    field.integer(value, 0..=u64::from(u32::MAX)).map(|number| number as u32)
}

/// -1 is the other way to say all.
pub fn read_top_k(field: Field, value: &Bound<'_, PyAny>) -> Result<u32, Error> {
    match read_number::<i64>(value)? {
        Some(-1) => Ok(0),
        Some(number) if u32::try_from(number).is_ok() => Ok(number as u32),
        _ => Err(field.refuse(value, format!("an integer from -1 to {}; -1 and 0 are all", u32::MAX))),
    }
}

/// Other interfaces have a number here.
pub fn read_logprobs(field: Field, value: &Bound<'_, PyAny>) -> Result<bool, Error> {
    let limit = "True or False; how many of the likeliest tokens are told of is top_logprobs";
    value.cast::<PyBool>().map(|value| value.is_true()).map_err(|_| field.refuse(value, limit))
}

pub fn read_range(field: Field, value: &Bound<'_, PyAny>, low: f64, high: f64) -> Result<f64, Error> {
    field.number(value, &format!("a number from {low} to {high}"), |number| (low..=high).contains(&number))
}

// Where 0 or infinity is out of range, so is what rounds to it in the engine's single precision.

/// Above `low`, and at most `high`.
pub fn read_above(field: Field, value: &Bound<'_, PyAny>, low: f64, high: f64) -> Result<f64, Error> {
    let allowed = |number: f64| number as f32 > low as f32 && number <= high;
    field.number(value, &format!("a number above {low} and at most {high}"), allowed)
}

pub fn read_factor(field: Field, value: &Bound<'_, PyAny>) -> Result<f64, Error> {
    let allowed = |number: f64| number as f32 > 0.0 && (number as f32).is_finite();
    field.number(value, "a finite number above 0", allowed)
}

pub fn read_priority(field: Field, value: &Bound<'_, PyAny>) -> Result<i32, Error> {
    let number = read_number::<i32>(value)?;
    number.ok_or_else(|| field.refuse(value, format!("an integer from {} to {}", i32::MIN, i32::MAX)))
}

pub fn read_allowed(field: Field, value: &Bound<'_, PyAny>, most: usize) -> Result<Tuple<u32>, Error> {
    let Tuple(ids) = read_token_ids(field, value, most)?;
    if ids.is_empty() { Err(field.refuse(value, "left out, or at least one id")) } else { Ok(Tuple(ids)) }
}

/// `most_chars` is the limit of all strings together, too.
pub fn read_choice(
    field: Field,
    value: &Bound<'_, PyAny>,
    most: usize,
    most_chars: usize,
) -> Result<Tuple<String>, Error> {
    let Tuple(texts) = read_texts(field, value, most, most_chars)?;
    let num_chars: usize = texts.iter().map(|text| text.chars().count()).sum();
    if num_chars == 0 {
        Err(field.refuse(value, "left out, or at least one string"))
    } else if num_chars > most_chars {
        Err(field.refuse(value, format!("strings of at most {most_chars} characters in all")))
    } else {
        Ok(Tuple(texts))
    }
}

pub fn read_stops(
    field: Field,
    value: &Bound<'_, PyAny>,
    most: usize,
    most_chars: usize,
) -> Result<Tuple<String>, Error> {
    if value.is_instance_of::<PyString>() {
        return Ok(Tuple(vec![field.text_within(value, most_chars)?]));
    }
    let read = |field: Field, text: &Bound<'_, PyAny>| field.text_within(text, most_chars);
    field.items(value, most, "strings", "a string or a sequence of strings", read).map(Tuple)
}

pub fn read_texts(
    field: Field,
    value: &Bound<'_, PyAny>,
    most: usize,
    most_chars: usize,
) -> Result<Tuple<String>, Error> {
    let read = |field: Field, text: &Bound<'_, PyAny>| field.text_within(text, most_chars);
    field.items(value, most, "strings", "a sequence of strings", read).map(Tuple)
}

pub fn read_token_ids(field: Field, value: &Bound<'_, PyAny>, most: usize) -> Result<Tuple<u32>, Error> {
    field.token_ids(value, most, TOKEN_IDS).map(Tuple)
}

pub fn read_stop_sequences(
    field: Field,
    value: &Bound<'_, PyAny>,
    most: usize,
    most_ids: usize,
) -> Result<Tuple<Tuple<u32>>, Error> {
    let expected = "a sequence of sequences of token ids (integers from 0)";
    let read = |field: Field, item: &Bound<'_, PyAny>| match field.token_ids(item, most_ids, expected)? {
        ids if ids.is_empty() => Err(field.refuse(value, "sequences of at least one id each")),
        ids => Ok(Tuple(ids)),
    };
    field.items(value, most, "sequences", expected, read).map(Tuple)
}
