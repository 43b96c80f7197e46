//! `SamplingParams`: the Python class of the parameters of a request, with its logits processors.

use penstock_frontend::params::SamplingParams;
use penstock_types::FieldError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::class;
use crate::classes::PySamplingParams;
use crate::errors::{Error, Problem};
use crate::fields::Field;
use crate::processors::Processors;
use crate::value::{PyValue, request_error};

impl PySamplingParams {
    /// The parameters with the fields that `fields` has.
    pub fn with(mut self, fields: Option<&Bound<'_, PyDict>>) -> Result<Self, Error> {
        class::set_all("SamplingParams", fields, |name, value| {
            if name != "logits_processors" {
                return self.params.set(name, value.map(PyValue).as_ref()).map_err(request_error);
            }
            let read = |value| Processors::read(Field::request("logits_processors"), &value);
            self.processors = value.map(read).transpose()?.unwrap_or_default();
            self.params.logits_processors = self.processors.0.len();
            Ok(true)
        })?;
        self.params.check().map_err(|error| self.error(error))?;
        Ok(self)
    }

    /// The same processors with other parameters.
    pub fn with_params(&self, params: SamplingParams) -> Self {
        Self { params, processors: self.processors.clone() }
    }

    /// The error for a field; `limit` completes the sentence "it must be ...".
    pub fn refuse(&self, field: &'static str, limit: impl Into<String>) -> Error {
        self.error(self.params.refuse(field, limit))
    }

    /// A frontend's error with the field's value as a Python object.
    pub fn error(&self, error: FieldError) -> Error {
        Python::attach(|py| match Bound::new(py, self.clone()).and_then(|this| this.getattr(error.field)) {
            Ok(value) if value.is_none() => Error::Request(Problem {
                message: error.to_string(),
                field: error.field.to_owned(),
                value: None,
                limit: Some(error.limit.clone()),
            }),
            Ok(value) => Field::request(error.field).refuse(&value, error.limit.clone()),
            Err(raised) => Error::Python(raised),
        })
    }
}
