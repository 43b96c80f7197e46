//! JSON that a user gives as Python values, kept as its text: frozen, comparable, and a fresh value each time it is
//! asked for. The order of an object's members is kept, for it may mean something (what a schema generates first).

use std::fmt::Write;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple};

use crate::errors::Error;
use crate::fields::Field;

/// Most bytes of a text; values that share parts may be far larger than the memory they take.
const MAX_BYTES: usize = 1 << 20;
/// Most arrays and objects within each other.
const MAX_DEPTH: usize = 64;

/// A JSON text.
#[derive(Clone, Debug, PartialEq)]
pub struct Json(pub String);

impl Json {
    /// The text of `value`, which is part of what was given for `field`.
    pub fn read(field: Field, value: &Bound<'_, PyAny>) -> Result<Self, Error> {
        let mut text = String::new();
        write(field, value, MAX_DEPTH, &mut text)?;
        Ok(Self(text))
    }
}

impl<'py> IntoPyObject<'py> for &Json {
    type Target = PyAny;
    type Output = Bound<'py, PyAny>;
    type Error = PyErr;

    fn into_pyobject(self, py: Python<'py>) -> Result<Self::Output, Self::Error> {
        py.import(intern!(py, "json"))?.call_method1(intern!(py, "loads"), (&self.0,))
    }
}

/// Appends the text of `value`, which may have `depth` more levels.
fn write(field: Field, value: &Bound<'_, PyAny>, depth: usize, text: &mut String) -> Result<(), Error> {
    if let Ok(string) = value.cast::<PyString>() {
        if string.len()? > MAX_BYTES {
            return Err(too_large(field, value));
        }
        write_string(&field.text(value)?, text);
    } else if let Ok(object) = value.cast::<PyDict>() {
        let depth = deeper(field, value, depth)?;
        text.push('{');
        if object.len() > MAX_BYTES {
            return Err(too_large(field, value));
        }
        // A list of its own, so that nothing hangs on whether the dict stays as it is meanwhile.
        let members: Vec<_> = object.iter().collect();
        for (index, (name, member)) in members.into_iter().enumerate() {
            text.push_str(if index == 0 { "" } else { "," });
            if !name.is_instance_of::<PyString>() {
                return Err(field.refuse(&name, "JSON, whose names are strings"));
            }
            write(field, &name, depth, text)?;
            text.push(':');
            write(field, &member, depth, text)?;
        }
        text.push('}');
    } else if let Ok(list) = value.cast::<PyList>() {
        write_array(field, value, list.iter(), depth, text)?;
    } else if let Ok(tuple) = value.cast::<PyTuple>() {
        write_array(field, value, tuple.iter(), depth, text)?;
    } else {
        write_plain(field, value, text)?;
    }
    if text.len() > MAX_BYTES { Err(too_large(field, value)) } else { Ok(()) }
}

/// The items of `value` where they lie, whatever its class makes of iterating.
fn write_array<'py>(
    field: Field,
    value: &Bound<'py, PyAny>,
    items: impl Iterator<Item = Bound<'py, PyAny>>,
    depth: usize,
    text: &mut String,
) -> Result<(), Error> {
    let depth = deeper(field, value, depth)?;
    text.push('[');
    for (index, item) in items.enumerate() {
        text.push_str(if index == 0 { "" } else { "," });
        write(field, &item, depth, text)?;
    }
    text.push(']');
    Ok(())
}

/// Numbers, `True`, `False` and `None`. No code of a class of the user's is called, which could change what is read.
fn write_plain(field: Field, value: &Bound<'_, PyAny>, text: &mut String) -> Result<(), Error> {
    let written = if value.is_none() {
        write!(text, "null")
    } else if let Ok(flag) = value.cast::<PyBool>() {
        write!(text, "{}", flag.is_true())
    } else if let Some(number) = value.cast::<PyInt>().ok().and_then(|number| number.extract::<i64>().ok()) {
        write!(text, "{number}")
    } else if let Some(number) = value.cast::<PyFloat>().ok().map(PyFloatMethods::value)
        && number.is_finite()
    {
        // As the shortest text that reads as the same number, and as one that is no integer.
        write!(text, "{number:?}")
    } else {
        return Err(field.refuse(value, "JSON: dicts, lists, strings, finite numbers, True, False and None"));
    };
    written.expect("a string takes any text; this is a bug");
    Ok(())
}

/// A string in quotes.
pub fn write_string(string: &str, text: &mut String) {
    text.push('"');
    for character in string.chars() {
        match character {
            '"' | '\\' => text.extend(['\\', character]),
            '\0'..='\x1f' => {
                write!(text, "\\u{:04x}", u32::from(character))
                    .expect("a string takes any text; this is a bug");
            }
            _ => text.push(character),
        }
    }
    text.push('"');
}

fn deeper(field: Field, value: &Bound<'_, PyAny>, depth: usize) -> Result<usize, Error> {
    depth.checked_sub(1).ok_or_else(|| {
        field.refuse(value, format!("JSON of at most {MAX_DEPTH} arrays and objects within each other"))
    })
}

fn too_large(field: Field, value: &Bound<'_, PyAny>) -> Error {
    field.refuse(value, format!("JSON of at most {MAX_BYTES} bytes in all"))
}
