//! Typed access to the settings of a quantisation method. Errors name the file and the full name of a field.

use std::path::Path;

use serde_json::Value;

use super::Fields;
use crate::error::{CheckpointError, shown};

/// An object of settings. A missing or `null` field is `None`; a field of another type is an error.
#[derive(Clone)]
pub(super) struct Settings<'a> {
    file: &'a Path,
    /// The name of the object in the file; empty for the file itself.
    name: String,
    fields: &'a Fields,
}

impl<'a> Settings<'a> {
    pub(super) fn new(file: &'a Path, name: impl Into<String>, fields: &'a Fields) -> Self {
        Settings { file, name: name.into(), fields }
    }

    fn full_name(&self, field: &str) -> String {
        let field = shown(field);
        if self.name.is_empty() { field } else { format!("{}.{field}", self.name) }
    }

    pub(super) fn malformed(&self, field: &str, problem: impl Into<String>) -> CheckpointError {
        CheckpointError::malformed(self.file, self.full_name(field), problem)
    }

    pub(super) fn unsupported(&self, field: &str, found: &str, supported: &str) -> CheckpointError {
        CheckpointError::unsupported(self.file, self.full_name(field), shown(found), supported)
    }

    pub(super) fn get(&self, field: &str) -> Option<&'a Value> {
        self.fields.get(field).filter(|value| !value.is_null())
    }

    fn typed<T>(
        &self,
        field: &str,
        expected: &str,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, CheckpointError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        convert(value).map(Some).ok_or_else(|| {
            self.malformed(field, format!("{}; {expected} is expected", shown(&value.to_string())))
        })
    }

    pub(super) fn text(&self, field: &str) -> Result<Option<&'a str>, CheckpointError> {
        self.typed(field, "a string", Value::as_str)
    }

    pub(super) fn bool(&self, field: &str) -> Result<Option<bool>, CheckpointError> {
        self.typed(field, "true or false", Value::as_bool)
    }

    pub(super) fn integer(&self, field: &str) -> Result<Option<i64>, CheckpointError> {
        self.typed(field, "an integer", Value::as_i64)
    }

    pub(super) fn object(&self, field: &str) -> Result<Option<Settings<'a>>, CheckpointError> {
        let object = self.typed(field, "an object", Value::as_object)?;
        Ok(object.map(|fields| Settings::new(self.file, self.full_name(field), fields)))
    }

    /// The objects of an object of objects.
    pub(super) fn objects(&self) -> Result<Vec<Settings<'a>>, CheckpointError> {
        let mut objects = Vec::new();
        for name in self.fields.keys() {
            objects.extend(self.object(name)?);
        }
        Ok(objects)
    }

    /// The columns of a group: `None` for -1, a group for each row.
    pub(super) fn group_size(&self) -> Result<Option<Option<usize>>, CheckpointError> {
        match self.integer("group_size")? {
            None => Ok(None),
            Some(-1) => Ok(Some(None)),
            Some(size @ 1..) => Ok(Some(Some(size as usize))),
            Some(size) => {
                Err(self.malformed("group_size", format!("{size}; -1 or a positive number is expected")))
            }
        }
    }

    /// Rows and columns of a block: a list, or a text such as "128x128".
    pub(super) fn block(&self, field: &str) -> Result<Option<(usize, usize)>, CheckpointError> {
        self.typed(field, "a list of two positive numbers", |value| {
            let (rows, columns) = match value {
                Value::String(text) => {
                    let (rows, columns) = text.split_once('x')?;
                    (rows.parse().ok()?, columns.parse().ok()?)
                }
                value => {
                    let [rows, columns] = value.as_array()?.as_slice() else { return None };
                    (rows.as_u64()?.try_into().ok()?, columns.as_u64()?.try_into().ok()?)
                }
            };
            Some((rows, columns)).filter(|&(rows, columns): &(usize, usize)| rows > 0 && columns > 0)
        })
    }

    /// Rejects a field that is set: neither missing, `null`, `false` nor empty.
    pub(super) fn reject(&self, field: &str) -> Result<(), CheckpointError> {
        match self.get(field) {
            None | Some(Value::Bool(false)) => Ok(()),
            Some(Value::Object(fields)) if fields.is_empty() => Ok(()),
            Some(Value::Array(list)) if list.is_empty() => Ok(()),
            Some(Value::String(text)) if text.is_empty() => Ok(()),
            Some(value) => Err(self.unsupported(field, &value.to_string(), "null")),
        }
    }
}
