//! Python classes: frozen, with keyword arguments only, compared and hashed by value. Their `repr` is the call of the
//! constructor. The generated `classes.rs` uses the macros.

use std::sync::Arc;

use penstock_frontend::output::Choice;
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString, PyTuple};

use crate::errors::Error;

/// The methods of every class: `methods`, those of the protocol, and a property for each of the `fields`.
macro_rules! methods {
    ($class:ident, [$($field:ident: $field_doc:tt = |$this:ident| $value:expr;)*], $($methods:tt)*) => {
        #[pyo3::pymethods]
        impl $class {
            $($methods)*

            $(
                #[doc = $field_doc]
                #[getter]
                fn $field<'py>(
                    &self,
                    py: pyo3::Python<'py>,
                ) -> pyo3::PyResult<pyo3::Bound<'py, pyo3::PyAny>> {
                    let $this = self;
                    $crate::convert::ToPython::to_python(&$value, py)
                }
            )*

            fn __getattr__(this: &pyo3::Bound<'_, Self>, name: &str) -> pyo3::PyResult<pyo3::Py<pyo3::PyAny>> {
                Err($crate::class::missing(this.as_any(), name))
            }

            fn __repr__(this: &pyo3::Bound<'_, Self>) -> pyo3::PyResult<String> {
                $crate::class::repr(this.as_any(), &[$(stringify!($field)),*])
            }

            fn __hash__(this: &pyo3::Bound<'_, Self>) -> pyo3::PyResult<isize> {
                $crate::class::hash(this.as_any(), &[$(stringify!($field)),*])
            }

            fn __getnewargs_ex__<'py>(
                this: &pyo3::Bound<'py, Self>,
            ) -> pyo3::PyResult<(pyo3::Bound<'py, pyo3::types::PyTuple>, pyo3::Bound<'py, pyo3::types::PyDict>)> {
                $crate::class::new_arguments(this.as_any(), &[$(stringify!($field)),*])
            }
        }
    };
}
pub(crate) use methods;

/// The value of a field, with or without a default.
macro_rules! take {
    ($keywords:ident, $field:ident) => {
        $keywords.take(stringify!($field))
    };
    ($keywords:ident, $field:ident, $default:expr) => {
        $keywords.take_or(stringify!($field), $default)
    };
}
pub(crate) use take;

/// `value_class! { Class = Value + Extra, "Name", "doc"; field: "doc" = default, ...; methods }`: the class `Name` of
/// the struct `Value`, beside which an object has the default of `Extra`, if there is one. The constructor requires
/// each field that has no default.
macro_rules! value_class {
    ($class:ident = $value:ident $(+ $extra:ty)?, $name:tt, $doc:tt; $($field:ident: $field_doc:tt $(= $default:expr)?,)*; $($methods:tt)*) => {
        #[doc = $doc]
        #[pyo3::pyclass(frozen, eq, name = $name, module = "penstock", from_py_object)]
        #[derive(Clone, Debug, PartialEq)]
        pub struct $class(pub std::sync::Arc<$value> $(, pub $extra)?);

        $crate::class::methods! {
            $class,
            [$($field: $field_doc = |this| this.0.$field;)*],

            #[new]
            #[pyo3(signature = (**fields), text_signature = None)]
            fn new(fields: Option<&pyo3::Bound<'_, pyo3::types::PyDict>>) -> pyo3::PyResult<Self> {
                let mut fields = $crate::convert::Keywords::new($name, fields);
                let value = Self::take(&mut fields)?;
                fields.finish()?;
                Ok(Self(value.into() $(, <$extra>::default())?))
            }

            $($methods)*
        }

        impl $class {
            /// The value of the keywords that are fields.
            fn take(keywords: &mut $crate::convert::Keywords<'_, '_>) -> pyo3::PyResult<$value> {
                $(let $field = $crate::class::take!(keywords, $field $(, $default)?)?;)*
                Ok($value { $($field),* })
            }
        }

        impl $crate::convert::ToPython for $value {
            fn to_python<'py>(
                &self,
                py: pyo3::Python<'py>,
            ) -> pyo3::PyResult<pyo3::Bound<'py, pyo3::PyAny>> {
                Ok(pyo3::Bound::new(py, $class(self.clone().into() $(, <$extra>::default())?))?.into_any())
            }

            fn shared_to_python<'py>(
                this: &std::sync::Arc<Self>,
                py: pyo3::Python<'py>,
            ) -> pyo3::PyResult<pyo3::Bound<'py, pyo3::PyAny>> {
                Ok(pyo3::Bound::new(py, $class(std::sync::Arc::clone(this) $(, <$extra>::default())?))?.into_any())
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

/// `option_class! { Class, "Name", { part: Type, ... }, "doc"; field: path, "doc"; ...; methods }`: the class `Name` of the options
/// in the parts. Every field may be left out. `Class::with`, which is not generated, reads the keywords.
macro_rules! option_class {
    (
        $class:ident, $name:tt, { $($part:ident: $type:ty),* }, $doc:tt;
        $($field:ident: $($path:ident).+, $field_doc:tt;)*;
        $($methods:tt)*
    ) => {
        #[doc = $doc]
        #[pyo3::pyclass(frozen, eq, name = $name, module = "penstock", from_py_object)]
        #[derive(Clone, Debug, Default, PartialEq)]
        pub struct $class {
            $(pub $part: $type),*
        }

        $crate::class::methods! {
            $class,
            [$($field: $field_doc = |this| this.$($path).+;)*],

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

            $($methods)*
        }
    };
}
pub(crate) use option_class;

/// Calls `set` with each keyword and its value, `None` for the default. `set` returns false for an unknown keyword.
pub fn set_all<'py>(
    class: &str,
    fields: Option<&Bound<'py, PyDict>>,
    mut set: impl FnMut(&str, Option<Bound<'py, PyAny>>) -> Result<bool, Error>,
) -> Result<(), Error> {
    let Some(fields) = fields else { return Ok(()) };
    for (name, value) in fields {
        let name = name.cast::<PyString>().map_err(PyErr::from)?.to_str()?;
        if !set(name, Some(value).filter(|value| !value.is_none()))? {
            return Err(unknown(fields.py(), class, name).into());
        }
    }
    Ok(())
}

/// `Name(field=value, ...)`, with the `repr` of every value.
pub fn repr(object: &Bound<'_, PyAny>, fields: &[&str]) -> PyResult<String> {
    let values = fields
        .iter()
        .map(|field| Ok(format!("{field}={}", object.getattr(*field)?.repr()?)))
        .collect::<PyResult<Vec<_>>>()?;
    Ok(format!("{}({})", object.get_type().name()?, values.join(", ")))
}

/// The hash of the tuple of all values. A dict or a list has no hash, so its `repr` is hashed: equal objects have equal
/// ones, because the dicts and lists are made anew from the same text or numbers each time.
pub fn hash(object: &Bound<'_, PyAny>, fields: &[&str]) -> PyResult<isize> {
    let hashable = |value: Bound<'_, PyAny>| -> PyResult<_> {
        let is_mutable = value.is_instance_of::<PyDict>() || value.is_instance_of::<PyList>();
        if is_mutable { Ok(value.repr()?.into_any().unbind()) } else { Ok(value.unbind()) }
    };
    let values =
        fields.iter().map(|field| hashable(object.getattr(*field)?)).collect::<PyResult<Vec<_>>>()?;
    PyTuple::new(object.py(), values)?.hash()
}

/// The arguments from which `copy` and `pickle` build an equal object: no positional ones, all fields as keywords.
pub fn new_arguments<'py>(
    object: &Bound<'py, PyAny>,
    fields: &[&str],
) -> PyResult<(Bound<'py, PyTuple>, Bound<'py, PyDict>)> {
    let values = PyDict::new(object.py());
    for field in fields {
        values.set_item(field, object.getattr(*field)?)?;
    }
    Ok((PyTuple::empty(object.py()), values))
}

/// The error for an attribute that the object does not have; Python adds a hint.
pub fn missing(object: &Bound<'_, PyAny>, name: &str) -> PyErr {
    let module = object.py().import("penstock._attributes");
    let error = module.and_then(|module| module.call_method1("missing_field", (object, name)));
    error.map_or_else(|error| error, PyErr::from_value)
}

/// The error for a keyword that a class does not have; Python adds a hint.
fn unknown(py: Python<'_>, class: &str, keyword: &str) -> PyErr {
    let module = py.import("penstock._keywords");
    let error = module.and_then(|module| module.call_method1("unknown", (class, keyword)));
    error.map_or_else(|error| error, PyErr::from_value)
}

/// The first choice of a result.
pub fn first(choices: &[Arc<Choice>]) -> PyResult<&Choice> {
    let first = choices.first().map(|choice| &**choice);
    first.ok_or_else(|| PyIndexError::new_err("this result has no choices"))
}
