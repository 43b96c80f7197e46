//! Plain Rust values as Python objects, and back.

use std::sync::Arc;

use penstock_frontend::output::{FloatArray, StopReason};
use penstock_frontend::params::{LogitBias, ResponseFormat, ToolChoice, Tools};
use penstock_types::{
    Auto, Device, Json, KvEvents, LogprobsMode, Named, OutputScope, PenaltyScope, PreemptionMode,
    PreemptionVictim, Quantization, Speculation, Unread, WeightScheme,
};
use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::tensor::Tensor;

/// A value that Python sees as a new object: lists as tuples, so that a frozen object stays frozen.
pub trait ToPython {
    fn to_python<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>>;

    /// The same for a shared value; classes share it instead of copying it.
    fn shared_to_python<'py>(this: &Arc<Self>, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        (**this).to_python(py)
    }
}

/// A value that a Python object is converted to. Raises `TypeError` for other types.
pub trait FromPython: Sized {
    fn from_python(object: &Bound<'_, PyAny>) -> PyResult<Self>;

    /// The same for a shared value.
    fn shared_from_python(object: &Bound<'_, PyAny>) -> PyResult<Arc<Self>> {
        Self::from_python(object).map(Arc::new)
    }
}

macro_rules! plain {
    ($($type:ty),*) => {
        $(
            impl ToPython for $type {
                fn to_python<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
                    Ok(self.into_pyobject(py)?.to_owned().into_any())
                }
            }

            impl FromPython for $type {
                fn from_python(object: &Bound<'_, PyAny>) -> PyResult<Self> {
                    object.extract()
                }
            }
        )*
    };
}

plain!(bool, i32, i64, u32, u64, usize, f32, f64, String);

macro_rules! named {
    ($($type:ty),*) => {
        $(
            impl ToPython for $type {
                fn to_python<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
                    self.name().to_python(py)
                }
            }
        )*
    };
}

named!(LogprobsMode, OutputScope, PenaltyScope, PreemptionMode, PreemptionVictim, Speculation, Unread);

impl ToPython for Bound<'_, PyAny> {
    fn to_python<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        Ok(self.clone().unbind().into_bound(py))
    }
}

impl ToPython for Device {
    fn to_python<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.to_string().to_python(py)
    }
}

impl<T: Named> ToPython for Auto<T> {
    fn to_python<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.name().to_python(py)
    }
}

/// The name of the type, or a dict if there is more to say.
impl ToPython for WeightScheme {
    fn to_python<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        if self.group_size.is_none() && self.symmetric.is_none() {
            return self.weight_type.to_python(py);
        }
        Ok(scheme_dict(self, py)?.into_any())
    }
}

impl ToPython for Quantization {
    fn to_python<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let Self { default, embedding, head, layers } = self;
        if embedding.is_none() && head.is_none() && layers.is_empty() {
            return default.to_python(py);
        }
        let dict = scheme_dict(default, py)?;
        for (key, scheme) in [("embedding", embedding), ("head", head)] {
            if let Some(scheme) = scheme {
                dict.set_item(key, scheme.to_python(py)?)?;
            }
        }
        if !layers.is_empty() {
            let patterns = PyDict::new(py);
            for (pattern, scheme) in layers {
                patterns.set_item(pattern, scheme.to_python(py)?)?;
            }
            dict.set_item("layers", patterns)?;
        }
        Ok(dict.into_any())
    }
}

fn scheme_dict<'py>(scheme: &WeightScheme, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("type", scheme.weight_type.to_python(py)?)?;
    if let Some(group_size) = scheme.group_size {
        dict.set_item("group_size", group_size)?;
    }
    if let Some(symmetric) = scheme.symmetric {
        dict.set_item("symmetric", symmetric)?;
    }
    Ok(dict)
}

impl ToPython for Json {
    fn to_python<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        py.import(intern!(py, "json"))?.call_method1(intern!(py, "loads"), (&self.0,))
    }
}

/// A dict with every key of the option.
impl ToPython for KvEvents {
    fn to_python<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let dict = PyDict::new(py);
        dict.set_item("endpoint", &self.endpoint)?;
        dict.set_item("replay_endpoint", &self.replay_endpoint)?;
        dict.set_item("topic", &self.topic)?;
        dict.set_item("hash_key", &self.hash_key)?;
        dict.set_item("format", self.format.name())?;
        dict.set_item("rank", self.rank)?;
        Ok(dict.into_any())
    }
}

impl ToPython for ResponseFormat {
    fn to_python<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.json.to_python(py)
    }
}

impl ToPython for Tools {
    fn to_python<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.json.to_python(py)
    }
}

impl ToPython for ToolChoice {
    fn to_python<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        match self {
            ToolChoice::None => "none".to_python(py),
            ToolChoice::Auto => "auto".to_python(py),
            ToolChoice::Required => "required".to_python(py),
            ToolChoice::Function { json, .. } => json.to_python(py),
        }
    }
}

impl ToPython for LogitBias {
    fn to_python<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let biases = PyDict::new(py);
        self.0.iter().try_for_each(|(id, bias)| biases.set_item(id, bias))?;
        Ok(biases.into_any())
    }
}

impl ToPython for str {
    fn to_python<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        Ok(self.into_pyobject(py)?.into_any())
    }
}

impl<T: ToPython> ToPython for Option<T> {
    fn to_python<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.as_ref().map_or_else(|| Ok(py.None().into_bound(py)), |value| value.to_python(py))
    }
}

impl<T: FromPython> FromPython for Option<T> {
    fn from_python(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        if object.is_none() { Ok(None) } else { T::from_python(object).map(Some) }
    }
}

impl<T: ToPython> ToPython for [T] {
    fn to_python<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let items = self.iter().map(|item| item.to_python(py)).collect::<PyResult<Vec<_>>>()?;
        Ok(PyTuple::new(py, items)?.into_any())
    }
}

impl<T: ToPython> ToPython for Vec<T> {
    fn to_python<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.as_slice().to_python(py)
    }
}

impl<T: FromPython> FromPython for Vec<T> {
    fn from_python(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        object.try_iter()?.map(|item| T::from_python(&item?)).collect()
    }
}

impl<A: ToPython, B: ToPython> ToPython for (A, B) {
    fn to_python<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        Ok(PyTuple::new(py, [self.0.to_python(py)?, self.1.to_python(py)?])?.into_any())
    }
}

impl<A: FromPython, B: FromPython> FromPython for (A, B) {
    fn from_python(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let (first, second) = object.extract::<(Bound<'_, PyAny>, Bound<'_, PyAny>)>()?;
        Ok((A::from_python(&first)?, B::from_python(&second)?))
    }
}

impl<T: ToPython + ?Sized> ToPython for Arc<T> {
    fn to_python<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        T::shared_to_python(self, py)
    }
}

impl<T: FromPython> FromPython for Arc<T> {
    fn from_python(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        T::shared_from_python(object)
    }
}

impl FromPython for Arc<str> {
    fn from_python(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        String::from_python(object).map(Into::into)
    }
}

impl FromPython for Arc<[u32]> {
    fn from_python(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        Vec::from_python(object).map(Into::into)
    }
}

impl ToPython for FloatArray {
    fn to_python<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let copy = Tensor::new(self.shape().to_vec(), self.values());
        Ok(Bound::new(py, copy)?.into_any())
    }

    fn shared_to_python<'py>(this: &Arc<Self>, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        Ok(Bound::new(py, Tensor::read_only(Arc::clone(this)))?.into_any())
    }
}

impl FromPython for Arc<FloatArray> {
    fn from_python(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        Ok(object.extract::<Tensor>()?.into_array())
    }
}

impl ToPython for StopReason {
    fn to_python<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        match self {
            StopReason::Text(text) => text.to_python(py),
            StopReason::Token(id) => id.to_python(py),
            StopReason::Sequence(ids) => ids.to_python(py),
        }
    }
}

impl FromPython for StopReason {
    fn from_python(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let text = object.extract().map(StopReason::Text);
        text.or_else(|_| object.extract().map(StopReason::Token))
            .or_else(|_| Vec::from_python(object).map(StopReason::Sequence))
    }
}

/// The keyword arguments of a constructor.
pub struct Keywords<'a, 'py> {
    class: &'static str,
    given: Option<&'a Bound<'py, PyDict>>,
    num_taken: usize,
}

impl<'a, 'py> Keywords<'a, 'py> {
    pub fn new(class: &'static str, given: Option<&'a Bound<'py, PyDict>>) -> Self {
        Self { class, given, num_taken: 0 }
    }

    pub fn take<T: FromPython>(&mut self, name: &str) -> PyResult<T> {
        self.take_or(name, |keywords| {
            let class = keywords.class;
            Err(PyTypeError::new_err(format!("{class}() requires the keyword argument '{name}'")))
        })
    }

    /// The argument of this name; without one what `default` returns, which can take others.
    pub fn take_or<T: FromPython>(
        &mut self,
        name: &str,
        default: impl FnOnce(&mut Self) -> PyResult<T>,
    ) -> PyResult<T> {
        match self.given.map(|given| given.get_item(name)).transpose()?.flatten() {
            Some(object) => {
                self.num_taken += 1;
                T::from_python(&object)
            }
            None => default(self),
        }
    }

    /// Raises `TypeError` if there are other arguments than those taken.
    pub fn finish(self) -> PyResult<()> {
        match self.given {
            Some(given) if given.len() > self.num_taken => {
                Err(PyTypeError::new_err(format!("{}() got an unexpected keyword argument", self.class)))
            }
            _ => Ok(()),
        }
    }
}
