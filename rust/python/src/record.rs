//! What every value class shares: frozen, built from keywords only, compared and hashed by value, and printed so that
//! the printed text builds an equal object. [`record!`] writes a class of values that we make, [`options!`] one of
//! values that users choose; both from one line a field.

use pyo3::prelude::*;
use pyo3::types::PyDict;

/// A new object of the same class, through its constructor: the fields of `object`, with `changes` over them.
pub fn replace<'py>(
    object: &Bound<'py, PyAny>,
    fields: &[&str],
    changes: Option<&Bound<'py, PyDict>>,
) -> PyResult<Bound<'py, PyAny>> {
    let (_, values) = crate::class::new_arguments(object, fields)?;
    if let Some(changes) = changes {
        values.update(changes.as_mapping())?;
    }
    object.get_type().call((), Some(&values))
}

/// The class itself; `methods` is its constructor and what else it has of its own.
macro_rules! class {
    ($(#[$meta:meta])* $name:ident { $($(#[$doc:meta])* $field:ident: $type:ty),* } $($methods:tt)*) => {
        $(#[$meta])*
        #[pyo3::pyclass(frozen, eq, get_all, module = "penstock", from_py_object)]
        #[derive(Clone, Debug, PartialEq)]
        pub struct $name {
            $($(#[$doc])* pub $field: $type),*
        }

        #[pyo3::pymethods]
        impl $name {
            $($methods)*

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

        impl<'py> pyo3::IntoPyObject<'py> for &$name {
            type Target = $name;
            type Output = pyo3::Bound<'py, $name>;
            type Error = pyo3::PyErr;

            fn into_pyobject(self, py: pyo3::Python<'py>) -> pyo3::PyResult<Self::Output> {
                pyo3::Bound::new(py, self.clone())
            }
        }
    };
}
pub(crate) use class;

/// A class whose every field must be given, as the type it has: `Name { field: type, ... }`, and methods after it.
macro_rules! record {
    ($(#[$meta:meta])* $name:ident { $($(#[$doc:meta])* $field:ident: $type:ty),* $(,)? } $($methods:tt)*) => {
        $crate::record::class! {
            $(#[$meta])*
            $name { $($(#[$doc])* $field: $type),* }

            #[new]
            #[pyo3(signature = (*, $($field),*))]
            #[allow(clippy::too_many_arguments, reason = "keyword-only, one a field")]
            fn new($($field: $type),*) -> Self {
                Self { $($field),* }
            }

            $($methods)*
        }
    };
}
pub(crate) use record;

/// A class whose every field may be left out, or be `None`, which is the same; what is given is checked.
///
/// `Name(wrap) { field: type = default, read; ... }`: `wrap` makes the [`Field`](crate::fields::Field) that errors
/// name, `read` gets it and the value. A default is a number, `true`, `false`, `None`, `()` or a word, which stands for
/// a string. `Name(wrap, check)` has `check` look at how the fields go together.
macro_rules! options {
    ($(#[$meta:meta])* $name:ident ($wrap:expr $(, $check:expr)?) {
        $($(#[$doc:meta])* $field:ident: $type:ty = $default:tt, $read:expr;)*
    }) => {
        $crate::record::class! {
            // The first lines are the signature as `inspect` wants it.
            #[doc = concat!(
                stringify!($name), "(*",
                $(", ", stringify!($field), "=", $crate::record::default!(text $default)),*,
                ")\n--\n"
            )]
            $(#[$meta])*
            $name { $($(#[$doc])* $field: $type),* }

            #[new]
            #[pyo3(signature = (*, $($field = None),*, **unknown), text_signature = None)]
            #[allow(clippy::too_many_arguments, reason = "keyword-only, one a field")]
            fn new(
                $($field: Option<&pyo3::Bound<'_, pyo3::PyAny>>,)*
                unknown: Option<&pyo3::Bound<'_, pyo3::types::PyDict>>,
            ) -> Result<Self, $crate::errors::Error> {
                if let Some(unknown) = unknown {
                    return Err($crate::class::first_unknown(stringify!($name), unknown).into());
                }
                let options = Self {
                    $($field: match $field {
                        Some(value) => ($read)($wrap(stringify!($field)), value)?.into(),
                        None => $crate::record::default!(value $default),
                    }),*
                };
                $($check(&options)?;)?
                Ok(options)
            }

            /// A copy with some fields changed.
            #[pyo3(signature = (**changes))]
            fn replace<'py>(
                this: &pyo3::Bound<'py, Self>,
                changes: Option<&pyo3::Bound<'py, pyo3::types::PyDict>>,
            ) -> pyo3::PyResult<pyo3::Bound<'py, pyo3::PyAny>> {
                $crate::record::replace(this.as_any(), &[$(stringify!($field)),*], changes)
            }
        }
    };
}
pub(crate) use options;

/// A default of [`options!`], as a value and as Python writes it.
macro_rules! default {
    (value None) => {
        None
    };
    (value ()) => {
        Default::default()
    };
    (value true) => {
        true
    };
    (value false) => {
        false
    };
    (value $word:ident) => {
        stringify!($word).to_owned()
    };
    (value $number:literal) => {
        $number
    };
    (text true) => {
        "True"
    };
    (text false) => {
        "False"
    };
    (text None) => {
        "None"
    };
    (text $word:ident) => {
        concat!("'", stringify!($word), "'")
    };
    (text $other:tt) => {
        stringify!($other)
    };
}
pub(crate) use default;
