//! Python classes of plain values: frozen, with keyword arguments only, compared and hashed by value. Their `repr` is the
//! call of the constructor.

use std::sync::Arc;

use penstock_frontend::output::Choice;
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;

/// `value_class! { Class = Value, "Name", "doc"; field: "doc", ...; methods }`: the class `Name` of the struct `Value`,
/// whose constructor requires every field. The generated `classes.rs` uses it.
macro_rules! value_class {
    ($class:ident = $value:ident, $name:tt, $doc:tt; $($field:ident: $field_doc:tt,)*; $($methods:tt)*) => {
        #[doc = $doc]
        #[pyo3::pyclass(frozen, eq, name = $name, module = "penstock", from_py_object)]
        #[derive(Clone, Debug, PartialEq)]
        pub struct $class(pub std::sync::Arc<$value>);

        #[pyo3::pymethods]
        impl $class {
            #[new]
            #[pyo3(signature = (**fields), text_signature = None)]
            fn new(fields: Option<&pyo3::Bound<'_, pyo3::types::PyDict>>) -> pyo3::PyResult<Self> {
                let mut fields = $crate::convert::Keywords::new($name, fields);
                let value = $value { $($field: fields.take(stringify!($field))?),* };
                fields.finish()?;
                Ok(Self(value.into()))
            }

            $(
                #[doc = $field_doc]
                #[getter]
                fn $field<'py>(
                    &self,
                    py: pyo3::Python<'py>,
                ) -> pyo3::PyResult<pyo3::Bound<'py, pyo3::PyAny>> {
                    $crate::convert::ToPython::to_python(&self.0.$field, py)
                }
            )*

            $($methods)*

            fn __getattr__(this: &pyo3::Bound<'_, Self>, name: &str) -> pyo3::PyResult<pyo3::Py<pyo3::PyAny>> {
                Err($crate::record::missing(this.as_any(), name))
            }

            fn __repr__(this: &pyo3::Bound<'_, Self>) -> pyo3::PyResult<String> {
                $crate::record::repr(this.as_any(), &[$(stringify!($field)),*])
            }

            fn __hash__(this: &pyo3::Bound<'_, Self>) -> pyo3::PyResult<isize> {
                $crate::record::hash(this.as_any(), &[$(stringify!($field)),*])
            }

            fn __getnewargs_ex__<'py>(
                this: &pyo3::Bound<'py, Self>,
            ) -> pyo3::PyResult<(pyo3::Bound<'py, pyo3::types::PyTuple>, pyo3::Bound<'py, pyo3::types::PyDict>)> {
                $crate::record::new_arguments(this.as_any(), &[$(stringify!($field)),*])
            }
        }

        impl $crate::convert::ToPython for $value {
            fn to_python<'py>(
                &self,
                py: pyo3::Python<'py>,
            ) -> pyo3::PyResult<pyo3::Bound<'py, pyo3::PyAny>> {
                Ok(pyo3::Bound::new(py, $class(self.clone().into()))?.into_any())
            }

            fn shared_to_python<'py>(
                this: &std::sync::Arc<Self>,
                py: pyo3::Python<'py>,
            ) -> pyo3::PyResult<pyo3::Bound<'py, pyo3::PyAny>> {
                Ok(pyo3::Bound::new(py, $class(std::sync::Arc::clone(this)))?.into_any())
            }
        }

        impl $crate::convert::FromPython for $value {
            fn from_python(object: &pyo3::Bound<'_, pyo3::PyAny>) -> pyo3::PyResult<Self> {
                Ok((*object.cast::<$class>()?.get().0).clone())
            }

            fn shared_from_python(
                object: &pyo3::Bound<'_, pyo3::PyAny>,
            ) -> pyo3::PyResult<std::sync::Arc<Self>> {
                Ok(std::sync::Arc::clone(&object.cast::<$class>()?.get().0))
            }
        }
    };
}
pub(crate) use value_class;

/// The first choice of a result.
pub fn first(choices: &[Arc<Choice>]) -> PyResult<&Choice> {
    let first = choices.first().map(|choice| &**choice);
    first.ok_or_else(|| PyIndexError::new_err("this result has no choices"))
}
