//! The Python type that a `response_format` was given as. `Result.parsed` is the content as a value of it.

use std::sync::Arc;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// The type, if there is one. It does not take part in comparisons: its schema does.
#[derive(Clone, Debug, Default)]
pub struct ResponseType(Option<Arc<Py<PyAny>>>);

impl ResponseType {
    /// The type of a `response_format` that is one, and the mapping that stands for it; other values are themselves.
    pub fn read<'py>(given: Bound<'py, PyAny>) -> PyResult<(Self, Bound<'py, PyAny>)> {
        if given.is_instance_of::<PyDict>() {
            return Ok((Self::default(), given));
        }
        let schema = schemas(given.py())?.call_method1(intern!(given.py(), "format_of"), (&given,))?;
        let is_type = !schema.is(&given);
        Ok((Self(is_type.then(|| Arc::new(given.unbind()))), schema))
    }

    /// The content as a value of the type; `None` without one. Raises what the validation raises.
    pub fn parse<'py>(&self, py: Python<'py>, content: &str) -> PyResult<Bound<'py, PyAny>> {
        match &self.0 {
            Some(kind) => schemas(py)?.call_method1(intern!(py, "parse"), (kind.bind(py), content)),
            None => Ok(py.None().into_bound(py)),
        }
    }
}

impl PartialEq for ResponseType {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

/// `tools` with the definitions of Python functions in place of them.
pub fn read_tools<'py>(given: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    schemas(given.py())?.call_method1(intern!(given.py(), "tools_of"), (given,))
}

fn schemas(py: Python<'_>) -> PyResult<Bound<'_, PyModule>> {
    py.import(intern!(py, "penstock._schemas"))
}
