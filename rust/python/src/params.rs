//! `SamplingParams`: the Python class of the parameters of a request, with its logits processors.

use penstock_frontend::params::SamplingParams;
use penstock_types::FieldError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

use crate::classes::PySamplingParams;
use crate::errors::{Error, Problem};
use crate::fields::Field;
use crate::processors::Processors;
use crate::record;
use crate::value::{PyValue, request_error};

/// `params_class! { "doc"; field: kind "doc", ... }`: the class, with a property for each field.
macro_rules! params_class {
    ($doc:tt; $($field:ident: $kind:ident $field_doc:tt,)*) => {
        #[doc = $doc]
        #[pyo3::pyclass(frozen, eq, name = "SamplingParams", module = "penstock", from_py_object)]
        #[derive(Clone, Debug, Default, PartialEq)]
        pub struct PySamplingParams {
            pub params: penstock_frontend::params::SamplingParams,
            pub processors: $crate::processors::Processors,
        }

        #[pyo3::pymethods]
        impl PySamplingParams {
            #[new]
            #[pyo3(signature = (**fields), text_signature = None)]
            fn new(
                fields: Option<&pyo3::Bound<'_, pyo3::types::PyDict>>,
            ) -> Result<Self, $crate::errors::Error> {
                Self::default().with(fields)
            }

            /// Return a copy with some fields changed; `None` sets a field back to its default.
            #[pyo3(signature = (**changes))]
            fn replace(
                &self,
                changes: Option<&pyo3::Bound<'_, pyo3::types::PyDict>>,
            ) -> Result<Self, $crate::errors::Error> {
                self.clone().with(changes)
            }

            $(
                #[doc = $field_doc]
                #[getter]
                fn $field<'py>(
                    &self,
                    py: pyo3::Python<'py>,
                ) -> pyo3::PyResult<pyo3::Bound<'py, pyo3::PyAny>> {
                    $crate::params::property!($kind self py $field)
                }
            )*

            fn __getattr__(this: &pyo3::Bound<'_, Self>, name: &str) -> pyo3::PyResult<pyo3::Py<pyo3::PyAny>> {
                Err($crate::record::missing(this.as_any(), name))
            }

            fn __repr__(this: &pyo3::Bound<'_, Self>) -> pyo3::PyResult<String> {
                $crate::record::repr(this.as_any(), SamplingParams::FIELDS)
            }

            fn __hash__(this: &pyo3::Bound<'_, Self>) -> pyo3::PyResult<isize> {
                $crate::record::hash(this.as_any(), SamplingParams::FIELDS)
            }

            fn __getnewargs_ex__<'py>(
                this: &pyo3::Bound<'py, Self>,
            ) -> pyo3::PyResult<(pyo3::Bound<'py, pyo3::types::PyTuple>, pyo3::Bound<'py, pyo3::types::PyDict>)> {
                $crate::record::new_arguments(this.as_any(), SamplingParams::FIELDS)
            }
        }
    };
}
pub(crate) use params_class;

/// The value of a property: of the parameters, or of this crate.
macro_rules! property {
    (plain $self:ident $py:ident $field:ident) => {
        $crate::convert::ToPython::to_python(&$self.params.$field, $py)
    };
    (binding $self:ident $py:ident $field:ident) => {
        Ok(pyo3::IntoPyObject::into_pyobject(&$self.processors, $py)?.into_any())
    };
}
pub(crate) use property;

impl PySamplingParams {
    /// The parameters with the fields that `fields` has.
    pub fn with(mut self, fields: Option<&Bound<'_, PyDict>>) -> Result<Self, Error> {
        let Some(fields) = fields else { return Ok(self) };
        for (name, value) in fields {
            let name = name.cast::<PyString>().map_err(PyErr::from)?.to_string();
            let is_given = !value.is_none();
            let value = PyValue(value);
            if name == "logits_processors" {
                self.processors = match is_given {
                    true => Processors::read(Field::request("logits_processors"), &value.0)?,
                    false => Processors::default(),
                };
                self.params.logits_processors = self.processors.0.len();
            } else if !self.params.set(&name, is_given.then_some(&value)).map_err(request_error)? {
                let unknown = PyDict::new(fields.py());
                unknown.set_item(name, &value.0)?;
                return Err(record::unknown("SamplingParams", &unknown).into());
            }
        }
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
