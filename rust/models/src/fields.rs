//! Typed access to a configuration. A missing or invalid value is an error that names the field.

use std::cell::RefCell;
use std::collections::BTreeSet;

use serde_json::Value;

use crate::error::ModelError;

/// The limit of position counts, far above any published model.
pub(crate) const MAX_POSITIONS: usize = 1 << 30;

/// A JSON object with typed getters.
#[derive(Clone, Copy)]
pub(crate) struct Fields<'a> {
    object: &'a Value,
    prefix: &'static str,
    /// The paths of the fields that were read, if they are recorded.
    record: Option<&'a RefCell<BTreeSet<String>>>,
}

impl<'a> Fields<'a> {
    pub(crate) fn new(object: &'a Value) -> Self {
        Self { object, prefix: "", record: None }
    }

    /// Fields that record which of them are read, with paths such as `rope_scaling.factor`.
    pub(crate) fn recording(object: &'a Value, record: &'a RefCell<BTreeSet<String>>) -> Self {
        Self { object, prefix: "", record: Some(record) }
    }

    /// A nested object; `None` if missing or null.
    pub(crate) fn nested(&self, name: &'static str) -> Result<Option<Fields<'a>>, ModelError> {
        match self.get(name) {
            None => Ok(None),
            Some(object @ Value::Object(_)) => Ok(Some(Fields { object, prefix: name, ..*self })),
            Some(other) => Err(self.error(name, other, "an object")),
        }
    }

    /// Whether the object has no fields.
    pub(crate) fn is_empty(&self) -> bool {
        self.object.as_object().is_none_or(serde_json::Map::is_empty)
    }

    /// The value; `None` if missing or null.
    pub(crate) fn get(&self, name: &str) -> Option<&'a Value> {
        self.value(name).filter(|value| !value.is_null())
    }

    /// Whether the field exists; its value may be null.
    pub(crate) fn contains(&self, name: &str) -> bool {
        self.value(name).is_some()
    }

    fn value(&self, name: &str) -> Option<&'a Value> {
        if let Some(record) = self.record {
            record.borrow_mut().insert(self.path(name));
        }
        self.object.get(name)
    }

    /// An integer from 1 to `limit`.
    pub(crate) fn count(&self, name: &str, limit: usize) -> Result<usize, ModelError> {
        match self.get(name) {
            None => Err(self.missing(name)),
            Some(value) => self.as_count(name, value, limit),
        }
    }

    /// An integer from 1 to `limit`, with a default.
    pub(crate) fn count_or(&self, name: &str, limit: usize, default: usize) -> Result<usize, ModelError> {
        self.get(name).map_or(Ok(default), |value| self.as_count(name, value, limit))
    }

    /// An integer from 1 to `limit`; `None` if missing or null.
    pub(crate) fn optional_count(&self, name: &str, limit: usize) -> Result<Option<usize>, ModelError> {
        self.get(name).map(|value| self.as_count(name, value, limit)).transpose()
    }

    /// A finite number above 0.
    pub(crate) fn positive(&self, name: &str) -> Result<f64, ModelError> {
        match self.get(name) {
            None => Err(self.missing(name)),
            Some(value) => self.as_positive(name, value),
        }
    }

    /// A finite number above 0, with a default.
    pub(crate) fn positive_or(&self, name: &str, default: f64) -> Result<f64, ModelError> {
        self.get(name).map_or(Ok(default), |value| self.as_positive(name, value))
    }

    /// A finite number above 0; `None` if missing or null.
    pub(crate) fn optional_positive(&self, name: &str) -> Result<Option<f64>, ModelError> {
        self.get(name).map(|value| self.as_positive(name, value)).transpose()
    }

    /// A boolean, with a default.
    pub(crate) fn flag_or(&self, name: &str, default: bool) -> Result<bool, ModelError> {
        match self.get(name) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => Err(self.error(name, other, "true or false")),
        }
    }

    /// A string; `None` if missing or null.
    pub(crate) fn optional_text(&self, name: &str) -> Result<Option<&'a str>, ModelError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.error(name, other, "a string")),
        }
    }

    /// A list; `None` if missing or null.
    pub(crate) fn optional_list(&self, name: &str) -> Result<Option<&'a [Value]>, ModelError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Array(list)) => Ok(Some(list)),
            Some(other) => Err(self.error(name, other, "a list")),
        }
    }

    /// An error that names the field, its value and the allowed values.
    pub(crate) fn error(&self, name: &str, value: &Value, limit: impl Into<String>) -> ModelError {
        let mut value = value.to_string();
        if let Some((end, _)) = value.char_indices().nth(80) {
            value.truncate(end);
            value.push('…');
        }
        ModelError::Field { field: self.path(name), value, limit: limit.into() }
    }

    fn missing(&self, name: &str) -> ModelError {
        ModelError::Missing { field: self.path(name) }
    }

    fn path(&self, name: &str) -> String {
        if self.prefix.is_empty() { name.to_owned() } else { format!("{}.{name}", self.prefix) }
    }

    fn as_count(&self, name: &str, value: &Value, limit: usize) -> Result<usize, ModelError> {
        value
            .as_u64()
            .and_then(|count| usize::try_from(count).ok())
            .filter(|count| (1..=limit).contains(count))
            .ok_or_else(|| self.error(name, value, format!("an integer from 1 to {limit}")))
    }

    fn as_positive(&self, name: &str, value: &Value) -> Result<f64, ModelError> {
        value
            .as_f64()
            .filter(|number| number.is_finite() && *number > 0.0)
            .ok_or_else(|| self.error(name, value, "a finite number above 0"))
    }
}
