//! `SamplingParams`: the Python class of the parameters of a request, with its logits processors and the type of its
//! response.

use penstock_frontend::field::Field;
use penstock_frontend::params::SamplingParams;
use penstock_types::FieldError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::class;
use crate::classes::PySamplingParams;
use crate::errors::{Error, Problem};
use crate::processors::Processors;
use crate::response_type::{ResponseType, read_tools};
use crate::value::{PyValue, request_error};

impl PySamplingParams {
    /// The parameters with the fields that `fields` has.
    pub fn with(mut self, fields: Option<&Bound<'_, PyDict>>) -> Result<Self, Error> {
        class::set_all("SamplingParams", fields, |name, value| {
            let value = match name {
                "response_format" => {
                    let (kind, schema) = value.map(ResponseType::read).transpose()?.unzip();
                    self.response_type = kind.unwrap_or_default();
                    schema
                }
                "tools" => value.as_ref().map(read_tools).transpose()?,
                _ => value,
            };
            let value = value.map(PyValue);
            if name != "logits_processors" {
                return self.params.set(name, value.as_ref()).map_err(request_error);
            }
            let processors = value.as_ref().map(Processors::read).transpose().map_err(request_error)?;
            self.processors = processors.unwrap_or_default();
            self.params.logits_processors = self.processors.len();
            Ok(true)
        })?;
        self.params.check().map_err(|error| self.error(error))?;
        Ok(self)
    }

    /// The same processors and type of the response with other parameters.
    pub fn with_params(&self, params: SamplingParams) -> Self {
        Self { params, ..self.clone() }
    }

    /// A frontend's error with the field's value as a Python object.
    pub fn error(&self, error: FieldError) -> Error {
        Python::attach(|py| match Bound::new(py, self.clone()).and_then(|this| this.getattr(error.field)) {
            Ok(value) if value.is_none() => Error::Request(error.into()),
            Ok(value) => request_error(Field::new(error.field).refuse(&PyValue(value), error.limit)),
            Err(raised) => Error::Python(raised),
        })
    }

    /// The error of a schema that is not supported, with the field's value.
    pub fn schema_error(&self, field: &'static str, message: String) -> Error {
        Python::attach(|py| match Bound::new(py, self.clone()).and_then(|this| this.getattr(field)) {
            Ok(value) => Error::Request(Problem::of_schema(field, message, Some(value.unbind()))),
            Err(raised) => Error::Python(raised),
        })
    }
}
