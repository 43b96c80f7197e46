//! `to_dict`: values as Python objects that `json.dumps` writes: dicts, lists, strings, finite numbers, `None`.

use std::sync::Arc;

use penstock_frontend::output::{StopReason, ToolCall, ToolCallDelta};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::convert::ToPython;

/// A value of which Python gets a JSON form: classes as dicts, sequences as lists.
pub trait ToJson {
    fn to_json<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>>;
}

/// `to_json! { Value: field, method(), ... }`: a dict of these fields and of what these methods return.
macro_rules! to_json {
    ($value:ident: $($name:ident $(($($call:tt)*))?),*) => {
        impl $crate::to_dict::ToJson for $value {
            fn to_json<'py>(
                &self,
                py: pyo3::Python<'py>,
            ) -> pyo3::PyResult<pyo3::Bound<'py, pyo3::PyAny>> {
                let dict = pyo3::types::PyDict::new(py);
                $(
                    let value = $crate::to_dict::ToJson::to_json(&self.$name $(($($call)*))?, py)?;
                    pyo3::types::PyDictMethods::set_item(&dict, pyo3::intern!(py, stringify!($name)), value)?;
                )*
                Ok(dict.into_any())
            }
        }
    };
}
pub(crate) use to_json;

macro_rules! plain {
    ($($type:ty),*) => {
        $(
            impl ToJson for $type {
                fn to_json<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
                    self.to_python(py)
                }
            }
        )*
    };
}

plain!(bool, u32, u64, usize, String, str);

macro_rules! float {
    ($($type:ty),*) => {
        $(
            impl ToJson for $type {
                /// JSON has no infinity and no NaN: `None`.
                fn to_json<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
                    Some(*self).filter(|number| number.is_finite()).to_python(py)
                }
            }
        )*
    };
}

float!(f32, f64);

impl<T: ToJson> ToJson for Option<T> {
    fn to_json<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.as_ref().map_or_else(|| Ok(py.None().into_bound(py)), |value| value.to_json(py))
    }
}

impl<T: ToJson> ToJson for [T] {
    fn to_json<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let items = self.iter().map(|item| item.to_json(py)).collect::<PyResult<Vec<_>>>()?;
        Ok(PyList::new(py, items)?.into_any())
    }
}

impl<T: ToJson> ToJson for Vec<T> {
    fn to_json<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.as_slice().to_json(py)
    }
}

impl<A: ToJson, B: ToJson> ToJson for (A, B) {
    fn to_json<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        Ok(PyList::new(py, [self.0.to_json(py)?, self.1.to_json(py)?])?.into_any())
    }
}

impl<T: ToJson + ?Sized> ToJson for Arc<T> {
    fn to_json<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        (**self).to_json(py)
    }
}

impl ToJson for StopReason {
    fn to_json<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        match self {
            StopReason::Text(text) => text.to_json(py),
            StopReason::Token(id) => id.to_json(py),
            StopReason::Sequence(ids) => ids.to_json(py),
        }
    }
}

impl ToJson for ToolCall {
    fn to_json<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let call = PyDict::new(py);
        set_function(&call, Some(&self.id), Some(&self.name), &self.arguments)?;
        Ok(call.into_any())
    }
}

impl ToJson for ToolCallDelta {
    fn to_json<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let delta = PyDict::new(py);
        delta.set_item("index", self.index)?;
        set_function(&delta, self.id.as_deref(), self.name.as_deref(), &self.arguments)?;
        Ok(delta.into_any())
    }
}

/// Adds a call in the form of OpenAI's API. Later parts of a call have neither id nor name.
fn set_function(
    call: &Bound<'_, PyDict>,
    id: Option<&str>,
    name: Option<&str>,
    arguments: &str,
) -> PyResult<()> {
    let function = PyDict::new(call.py());
    if let Some(id) = id {
        call.set_item("id", id)?;
        call.set_item("type", "function")?;
    }
    if let Some(name) = name {
        function.set_item("name", name)?;
    }
    function.set_item("arguments", arguments)?;
    call.set_item("function", function)
}
