//! `logits_processors`: the user's own functions between the model and the choice of a token.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::errors::Error;
use crate::fields::Field;

/// Most processors of a request.
const MAX_PROCESSORS: usize = 16;

/// Callables, called one after the other.
#[derive(Clone, Debug, Default)]
pub struct Processors(pub Vec<Arc<Py<PyAny>>>);

impl Processors {
    pub fn read(field: Field, value: &Bound<'_, PyAny>) -> Result<Self, Error> {
        let expected = "a sequence of callables";
        let callable = |item: &Bound<'_, PyAny>| {
            if item.is_callable() {
                Ok(Arc::new(item.clone().unbind()))
            } else {
                Err(field.refuse(item, expected))
            }
        };
        field.items(value, MAX_PROCESSORS, "processors", expected, callable).map(Self)
    }
}

impl PartialEq for Processors {
    /// As Python compares them: two bound methods of one object are equal.
    fn eq(&self, other: &Self) -> bool {
        let are_equal = |py: Python<'_>| {
            self.0.iter().zip(&other.0).all(|(one, other)| one.bind(py).eq(other.bind(py)).unwrap_or(false))
        };
        self.0.len() == other.0.len() && Python::attach(are_equal)
    }
}

impl<'py> IntoPyObject<'py> for &Processors {
    type Target = PyTuple;
    type Output = Bound<'py, PyTuple>;
    type Error = PyErr;

    fn into_pyobject(self, py: Python<'py>) -> Result<Self::Output, Self::Error> {
        PyTuple::new(py, self.0.iter().map(|processor| processor.bind(py)))
    }
}
