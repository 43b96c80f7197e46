//! Reads one field of a configuration: checks its type, or returns an error with the field, the value and the limit.

use pyo3::exceptions::{PyOverflowError, PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyByteArray, PyBytes, PyString};

use crate::errors::{Error, Problem};

/// Maximum length of a value's `repr` in an error message.
const MAX_QUOTED_CHARS: usize = 80;

/// A field of a configuration.
#[derive(Clone, Copy)]
pub struct Field(&'static str);

impl Field {
    /// A field whose errors are `ConfigError`.
    pub fn config(name: &'static str) -> Self {
        Self(name)
    }

    /// The error for `value`; `limit` completes the sentence "it must be ...".
    pub fn refuse(self, value: &Bound<'_, PyAny>, limit: impl Into<String>) -> Error {
        Error::Config(Problem::new(self.0, self.0, value, limit.into()))
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

    /// One of the given strings.
    pub fn choice(self, value: &Bound<'_, PyAny>, choices: &[&'static str]) -> Result<&'static str, Error> {
        let given = value.cast::<PyString>().ok().and_then(|text| text.to_str().ok());
        choices.iter().find(|choice| Some(**choice) == given).copied().ok_or_else(|| {
            let choices: Vec<_> = choices.iter().map(|choice| format!("'{choice}'")).collect();
            self.refuse(value, format!("one of {}", choices.join(", ")))
        })
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
