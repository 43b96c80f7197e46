//! Python objects as the values of fields.

use std::path::PathBuf;

use penstock_frontend::field::{Problem, ReadError};
use penstock_frontend::value::{Kind, Value};
use pyo3::exceptions::{PyMemoryError, PyUnicodeEncodeError};
use pyo3::prelude::*;
use pyo3::types::{
    PyBool, PyByteArray, PyBytes, PyDict, PyFloat, PyInt, PyList, PyMapping, PyString, PyTuple,
};

use crate::errors::Error;
use crate::fields::{quote, read_number};

/// A Python object that a caller passed for a field.
#[derive(Clone)]
pub struct PyValue<'py>(pub Bound<'py, PyAny>);

impl<'py> Value for PyValue<'py> {
    type Raised = PyErr;

    fn kind(&self) -> Kind {
        let object = &self.0;
        if object.is_none() {
            Kind::Null
        } else if let Ok(flag) = object.cast::<PyBool>() {
            Kind::Bool(flag.is_true())
        } else if object.is_instance_of::<PyString>() {
            Kind::Text
        } else if object.is_instance_of::<PyDict>() {
            Kind::Map
        } else if object.is_instance_of::<PyList>() || object.is_instance_of::<PyTuple>() {
            Kind::Array
        } else if let Ok(number) = object.cast::<PyInt>() {
            number.extract().map_or(Kind::Other, Kind::Integer)
        } else if let Ok(number) = object.cast::<PyFloat>() {
            Kind::Float(number.value())
        } else if object.cast::<PyMapping>().is_ok() {
            Kind::Map
        } else {
            Kind::Other
        }
    }

    fn integer(&self) -> PyResult<Option<i128>> {
        match read_number::<i64>(&self.0)? {
            Some(number) => Ok(Some(number.into())),
            None => Ok(read_number::<u64>(&self.0)?.map(i128::from)),
        }
    }

    fn number(&self) -> PyResult<Option<f64>> {
        read_number(&self.0)
    }

    fn text_len(&self) -> PyResult<usize> {
        self.0.cast::<PyString>()?.len()
    }

    fn text(&self) -> PyResult<Option<String>> {
        let text = match self.0.cast::<PyString>()?.to_str() {
            Ok(text) => text,
            Err(error) if error.is_instance_of::<PyUnicodeEncodeError>(self.0.py()) => return Ok(None),
            Err(error) => return Err(error),
        };
        let mut copy = String::new();
        copy.try_reserve_exact(text.len()).map_err(|error| PyMemoryError::new_err(error.to_string()))?;
        copy.push_str(text);
        Ok(Some(copy))
    }

    fn path(&self) -> PyResult<Option<PathBuf>> {
        Ok(self.0.extract().ok())
    }

    fn items(&self) -> PyResult<Option<impl Iterator<Item = PyResult<Self>>>> {
        let object = &self.0;
        let is_other = object.is_instance_of::<PyString>()
            || object.is_instance_of::<PyBytes>()
            || object.is_instance_of::<PyByteArray>()
            || object.cast::<PyMapping>().is_ok();
        let items = if is_other { None } else { object.try_iter().ok() };
        Ok(items.map(|items| items.map(|item| item.map(PyValue))))
    }

    fn array(&self) -> impl Iterator<Item = Self> {
        let list = self.0.cast::<PyList>().ok().cloned();
        let tuple = self.0.cast::<PyTuple>().ok().cloned();
        list.into_iter().flatten().chain(tuple.into_iter().flatten()).map(PyValue)
    }

    fn map_len(&self) -> PyResult<usize> {
        self.0.len()
    }

    fn entries(&self) -> PyResult<Vec<(Self, Self)>> {
        let pair = |(key, value)| (PyValue(key), PyValue(value));
        if let Ok(dict) = self.0.cast::<PyDict>() {
            // A list of its own, because later conversions may change the dict.
            return Ok(dict.iter().map(pair).collect());
        }
        let keys = self.0.try_iter()?.take(self.0.len()?);
        keys.map(|key| key.and_then(|key| Ok(pair((key.clone(), self.0.get_item(key)?))))).collect()
    }

    fn get(&self, key: &str) -> PyResult<Option<Self>> {
        match self.0.cast::<PyDict>() {
            Ok(dict) => Ok(dict.get_item(key)?.map(PyValue)),
            Err(_) if self.0.contains(key)? => Ok(Some(PyValue(self.0.get_item(key)?))),
            Err(_) => Ok(None),
        }
    }

    fn quote(&self) -> String {
        quote(&self.0)
    }
}

/// The error for a field of a configuration that cannot be read.
pub fn config_error(error: ReadError<PyValue<'_>>) -> Error {
    field_error(error, Error::Config)
}

/// The error for a field of a request that cannot be read.
pub fn request_error(error: ReadError<PyValue<'_>>) -> Error {
    field_error(error, Error::Request)
}

fn field_error(error: ReadError<PyValue<'_>>, wrap: fn(crate::errors::Problem) -> Error) -> Error {
    match error {
        ReadError::Field(Problem { field, place, value, limit }) => {
            wrap(crate::errors::Problem::new(field, &place, &value.0, limit))
        }
        ReadError::Raised(error) => Error::Python(error),
    }
}
