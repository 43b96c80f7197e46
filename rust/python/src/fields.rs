//! Reads one argument: checks its type and range, or returns an error with the field, the value and the limit.
//!
//! Values are untrusted: an iterator may be endless, a text may fill the memory. So nothing is copied before its size is
//! known to be within the limit, and nothing is read beyond the limit, not even for the error message.

use std::ops::RangeInclusive;

use pyo3::exceptions::{PyOverflowError, PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyByteArray, PyBytes, PyMapping, PyString};

use crate::errors::{Error, Problem};

/// Maximum length of a value's `repr` in an error message.
const MAX_QUOTED_CHARS: usize = 80;

/// A field of a configuration or of a request.
#[derive(Clone, Copy)]
pub struct Field {
    name: &'static str,
    /// The index of the item of a sequence, and of an item inside that item.
    positions: [Option<usize>; 2],
    wrap: fn(Problem) -> Error,
}

impl Field {
    /// A field whose errors are `ConfigError`.
    pub fn config(name: &'static str) -> Self {
        Self { name, positions: [None; 2], wrap: Error::Config }
    }

    /// A field whose errors are `InvalidRequestError`.
    pub fn request(name: &'static str) -> Self {
        Self { name, positions: [None; 2], wrap: Error::Request }
    }

    /// The error for `value`; `limit` completes the sentence "it must be ...".
    pub fn refuse(self, value: &Bound<'_, PyAny>, limit: impl Into<String>) -> Error {
        let limit = limit.into();
        let positions = self.positions.iter().flatten().map(|position| format!("[{position}]"));
        let place: String = [self.name.to_owned()].into_iter().chain(positions).collect();
        let message = format!("{place}={} is not allowed: it must be {limit}", quote(value));
        let value = Some(value.clone().unbind());
        (self.wrap)(Problem { message, field: self.name.to_owned(), value, limit: Some(limit) })
    }

    /// The item with this index.
    fn at(self, position: usize) -> Self {
        let positions = match self.positions {
            [None, _] => [Some(position), None],
            [outer, _] => [outer, Some(position)],
        };
        Self { positions, ..self }
    }

    /// An integer in `range`; `bool` is not one.
    pub fn integer(self, value: &Bound<'_, PyAny>, range: RangeInclusive<u64>) -> Result<u64, Error> {
        let number = read_number::<u64>(value)?;
        number.filter(|number| range.contains(number)).ok_or_else(|| {
            let (low, high) = (range.start(), range.end());
            self.refuse(value, format!("an integer from {low} to {high}"))
        })
    }

    /// An integer from 1, as a `usize`.
    pub fn count(self, value: &Bound<'_, PyAny>) -> Result<usize, Error> {
        self.integer(value, 1..=u64::from(u32::MAX)).map(|count| count as usize)
    }

    /// An integer from 0; `bool` is not one.
    pub fn unsigned(self, value: &Bound<'_, PyAny>) -> Result<u64, Error> {
        read_number(value)?.ok_or_else(|| self.refuse(value, "an integer from 0 to 2**64 - 1"))
    }

    /// An integer from 0, as a `usize`; `bool` is not one.
    pub fn size(self, value: &Bound<'_, PyAny>) -> Result<usize, Error> {
        self.unsigned(value).map(|size| usize::try_from(size).unwrap_or(usize::MAX))
    }

    /// A number; `bool` is not one.
    pub fn float(self, value: &Bound<'_, PyAny>) -> Result<f64, Error> {
        read_number(value)?.ok_or_else(|| self.refuse(value, "a number"))
    }

    /// A number that `allowed` accepts; `bool` and NaN are rejected.
    pub fn number(
        self,
        value: &Bound<'_, PyAny>,
        limit: &str,
        allowed: impl Fn(f64) -> bool,
    ) -> Result<f64, Error> {
        let number = read_number::<f64>(value)?;
        number.filter(|number| allowed(*number)).ok_or_else(|| self.refuse(value, limit))
    }

    /// `True` or `False`.
    pub fn boolean(self, value: &Bound<'_, PyAny>) -> Result<bool, Error> {
        value.cast::<PyBool>().map(|value| value.is_true()).map_err(|_| self.refuse(value, "True or False"))
    }

    /// Text that can be encoded as UTF-8.
    pub fn text(self, value: &Bound<'_, PyAny>) -> Result<String, Error> {
        let text = value.cast::<PyString>().map_err(|_| self.refuse(value, "a string"))?;
        text.to_str()
            .map(str::to_owned)
            .map_err(|_| self.refuse(value, "valid Unicode (it contains a lone surrogate)"))
    }

    /// Non-empty text of at most `most` characters.
    pub fn text_within(self, value: &Bound<'_, PyAny>, most: usize) -> Result<String, Error> {
        if let Ok(text) = value.cast::<PyString>()
            && !(1..=most).contains(&text.len()?)
        {
            return Err(self.refuse(value, format!("a string of 1 to {most} characters")));
        }
        self.text(value)
    }

    /// One of the given strings.
    pub fn choice(self, value: &Bound<'_, PyAny>, choices: &[&'static str]) -> Result<&'static str, Error> {
        let given = value.cast::<PyString>().ok().and_then(|text| text.to_str().ok());
        choices.iter().find(|choice| Some(**choice) == given).copied().ok_or_else(|| {
            let choices: Vec<_> = choices.iter().map(|choice| format!("'{choice}'")).collect();
            self.refuse(value, format!("one of {}", choices.join(", ")))
        })
    }

    /// Reads the items of any iterable except text, bytes and mappings with `read`, which gets the field with the item's
    /// index. There are at most `most`, called `noun` in errors; the error for another value says `expected`.
    pub fn items<'py, T>(
        self,
        value: &Bound<'py, PyAny>,
        most: usize,
        noun: &str,
        expected: &str,
        read: impl Fn(Self, &Bound<'py, PyAny>) -> Result<T, Error>,
    ) -> Result<Vec<T>, Error> {
        let is_other = value.is_instance_of::<PyString>()
            || value.is_instance_of::<PyBytes>()
            || value.is_instance_of::<PyByteArray>()
            || value.cast::<PyMapping>().is_ok();
        let items = if is_other { None } else { value.try_iter().ok() };
        let mut items = items.ok_or_else(|| self.refuse(value, expected))?;
        let numbered = items.by_ref().take(most).enumerate();
        let read = numbered.map(|(position, item)| read(self.at(position), &item?));
        let read = read.collect::<Result<_, Error>>()?;
        match items.next() {
            Some(_) => Err(self.refuse(value, format!("at most {most} {noun}"))),
            None => Ok(read),
        }
    }
}

/// Extracts a number. `None` for a `bool` or a value of another type; other exceptions of a conversion are returned.
pub fn read_number<'py, T>(value: &Bound<'py, PyAny>) -> PyResult<Option<T>>
where
    T: for<'a> FromPyObject<'a, 'py, Error = PyErr>,
{
    if value.is_instance_of::<PyBool>() {
        return Ok(None);
    }
    let py = value.py();
    match value.extract() {
        Ok(number) => Ok(Some(number)),
        Err(error) if error.is_instance_of::<PyTypeError>(py) => Ok(None),
        Err(error) if error.is_instance_of::<PyValueError>(py) => Ok(None),
        Err(error) if error.is_instance_of::<PyOverflowError>(py) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The value's `repr`, truncated to fit a message. Of a large value only that part is read.
pub fn quote(value: &Bound<'_, PyAny>) -> String {
    let Ok(text) = short_repr(value) else { return format!("<{}>", value.get_type()) };
    match text.char_indices().nth(MAX_QUOTED_CHARS) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

fn short_repr(value: &Bound<'_, PyAny>) -> PyResult<String> {
    let py = value.py();
    if value.is_instance_of::<PyBytes>() || value.is_instance_of::<PyByteArray>() {
        return Ok(format!("<{} bytes>", value.len()?));
    }
    let short = py.import(intern!(py, "reprlib"))?.call_method0(intern!(py, "Repr"))?;
    for limit in ["maxstring", "maxlong", "maxother"] {
        short.setattr(limit, MAX_QUOTED_CHARS)?;
    }
    Ok(short.call_method1(intern!(py, "repr"), (value,))?.str()?.to_string_lossy().into_owned())
}
