//! Numbers and short texts of Python objects.

use pyo3::exceptions::{PyOverflowError, PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyByteArray, PyBytes};

/// Maximum length of a value's `repr` in an error message.
const MAX_QUOTED_CHARS: usize = 80;

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
