//! What every value class shares: frozen, built from keywords only, compared and hashed by value, and printed so that
//! the printed text builds an equal object. [`record!`] writes such a class from its list of fields; classes that
//! check their fields write their own constructor and call [`repr`] and [`hash`].

use pyo3::conversion::IntoPyObject;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

/// `Name(field=value, ...)`, every value by its own `repr`.
pub fn repr(object: &Bound<'_, PyAny>, fields: &[&str]) -> PyResult<String> {
    let values = fields
        .iter()
        .map(|field| Ok(format!("{field}={}", object.getattr(*field)?.repr()?)))
        .collect::<PyResult<Vec<_>>>()?;
    Ok(format!("{}({})", object.get_type().name()?, values.join(", ")))
}

/// The hash of the tuple of all values.
pub fn hash(object: &Bound<'_, PyAny>, fields: &[&str]) -> PyResult<isize> {
    let values = fields.iter().map(|field| object.getattr(*field)).collect::<PyResult<Vec<_>>>()?;
    PyTuple::new(object.py(), values)?.hash()
}

/// A new object of the same class, through its constructor: the fields of `object`, with `changes` over them.
pub fn replace<'py>(
    object: &Bound<'py, PyAny>,
    fields: &[&str],
    changes: Option<&Bound<'py, PyDict>>,
) -> PyResult<Bound<'py, PyAny>> {
    let values = PyDict::new(object.py());
    for field in fields {
        values.set_item(field, object.getattr(*field)?)?;
    }
    if let Some(changes) = changes {
        values.update(changes.as_mapping())?;
    }
    object.get_type().call((), Some(&values))
}

/// A sequence that Python sees as a tuple, so that a frozen object stays frozen.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tuple<T>(pub Vec<T>);

impl<'py, T> IntoPyObject<'py> for &Tuple<T>
where
    for<'a> &'a T: IntoPyObject<'py>,
{
    type Target = PyTuple;
    type Output = Bound<'py, PyTuple>;
    type Error = PyErr;

    fn into_pyobject(self, py: Python<'py>) -> Result<Self::Output, Self::Error> {
        PyTuple::new(py, &self.0)
    }
}

impl<'py, T: FromPyObjectOwned<'py>> FromPyObject<'_, 'py> for Tuple<T> {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let items = object.try_iter()?.map(|item| item?.extract().map_err(Into::into));
        items.collect::<PyResult<Vec<_>>>().map(Tuple)
    }
}

macro_rules! record {
    ($(#[$meta:meta])* $name:ident { $($(#[$field_meta:meta])* $field:ident: $type:ty),* $(,)? }) => {
        $(#[$meta])*
        #[pyo3::pyclass(frozen, eq, get_all, module = "penstock", from_py_object)]
        #[derive(Clone, Debug, PartialEq)]
        pub struct $name {
            $($(#[$field_meta])* pub $field: $type),*
        }

        #[pyo3::pymethods]
        impl $name {
            #[new]
            #[pyo3(signature = (*, $($field),*))]
            #[allow(clippy::too_many_arguments, reason = "keyword-only, one a field")]
            fn new($($field: $type),*) -> Self {
                Self { $($field),* }
            }

            fn __repr__(this: &pyo3::Bound<'_, Self>) -> pyo3::PyResult<String> {
                $crate::record::repr(this.as_any(), &[$(stringify!($field)),*])
            }

            fn __hash__(this: &pyo3::Bound<'_, Self>) -> pyo3::PyResult<isize> {
                $crate::record::hash(this.as_any(), &[$(stringify!($field)),*])
            }
        }
    };
}
pub(crate) use record;
