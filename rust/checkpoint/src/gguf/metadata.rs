//! GGUF metadata: typed access by key. A missing key is `None`; a value of another type is an error.

use std::collections::BTreeMap;
use std::path::Path;

use super::value::{MetadataValue, scalar_bytes, shortest};
use crate::error::{CheckpointError, shown};

/// All metadata of a file.
pub(super) struct Metadata<'a> {
    file: &'a Path,
    values: BTreeMap<&'a str, MetadataValue<'a>>,
}

impl<'a> Metadata<'a> {
    pub(super) fn new(file: &'a Path) -> Self {
        Metadata { file, values: BTreeMap::new() }
    }

    pub(super) fn file(&self) -> &'a Path {
        self.file
    }

    pub(super) fn insert(&mut self, key: &'a str, value: MetadataValue<'a>) -> Result<(), CheckpointError> {
        match self.values.insert(key, value) {
            None => Ok(()),
            Some(_) => Err(self.malformed(key, "the key occurs twice")),
        }
    }

    pub(super) fn malformed(&self, key: &str, problem: impl Into<String>) -> CheckpointError {
        CheckpointError::malformed(self.file, shown(key), problem)
    }

    pub(super) fn unsupported(
        &self,
        key: &str,
        found: impl Into<String>,
        supported: impl Into<String>,
    ) -> CheckpointError {
        CheckpointError::unsupported(self.file, shown(key), found, supported)
    }

    /// The keys with this prefix, without the prefix.
    pub(super) fn keys_with_prefix(&self, prefix: &'a str) -> impl Iterator<Item = &'a str> {
        self.values.keys().filter_map(move |key| key.strip_prefix(prefix))
    }

    fn typed<T>(
        &self,
        key: &str,
        expected: &str,
        convert: impl FnOnce(&MetadataValue<'a>) -> Option<T>,
    ) -> Result<Option<T>, CheckpointError> {
        let Some(value) = self.values.get(key) else { return Ok(None) };
        convert(value).map(Some).ok_or_else(|| {
            let found = match value {
                MetadataValue::Integer(number) => number.to_string(),
                MetadataValue::Single(number) => number.to_string(),
                MetadataValue::Double(number) => number.to_string(),
                MetadataValue::Bool(truth) => truth.to_string(),
                MetadataValue::Text(text) => format!("the string {}", shown(text)),
                MetadataValue::Array { count, .. } => format!("an array of {count}"),
            };
            self.malformed(key, format!("{found}; {expected} is expected"))
        })
    }

    /// A non-negative integer of any type.
    pub(super) fn integer(&self, key: &str) -> Result<Option<u64>, CheckpointError> {
        self.typed(key, "a non-negative integer", |value| match *value {
            MetadataValue::Integer(number) => number.try_into().ok(),
            _ => None,
        })
    }

    /// A finite number; see [`shortest`].
    pub(super) fn float(&self, key: &str) -> Result<Option<f64>, CheckpointError> {
        let number = self.typed(key, "a finite number", |value| match *value {
            MetadataValue::Single(number) => Some(shortest(number)),
            MetadataValue::Double(number) => Some(number),
            _ => None,
        })?;
        match number {
            Some(number) if !number.is_finite() => {
                Err(self.malformed(key, format!("{number}; a finite number is expected")))
            }
            number => Ok(number),
        }
    }

    pub(super) fn bool(&self, key: &str) -> Result<Option<bool>, CheckpointError> {
        self.typed(key, "true or false", |value| match *value {
            MetadataValue::Bool(truth) => Some(truth),
            _ => None,
        })
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<&'a str>, CheckpointError> {
        self.typed(key, "a string", |value| match *value {
            MetadataValue::Text(text) => Some(text),
            _ => None,
        })
    }

    /// The strings of an array. The error of invalid UTF-8 names the index.
    pub(super) fn texts(&self, key: &str) -> Result<Option<Vec<String>>, CheckpointError> {
        let array = self.typed(key, "an array of strings", |value| match *value {
            MetadataValue::Array { value_type: 8, count, bytes } => Some((count, bytes)),
            _ => None,
        })?;
        let Some((count, mut bytes)) = array else { return Ok(None) };
        // Each string takes at least the eight bytes of its length, so the file bounds the count.
        let mut texts = Vec::with_capacity(count);
        while let Some((length, rest)) = bytes.split_first_chunk::<8>() {
            let (text, rest) = rest.split_at(u64::from_le_bytes(*length) as usize);
            let text = std::str::from_utf8(text)
                .map_err(|error| self.malformed(key, format!("string {}: {error}", texts.len())))?;
            texts.push(text.to_owned());
            bytes = rest;
        }
        Ok(Some(texts))
    }

    pub(super) fn integers(&self, key: &str) -> Result<Option<Vec<i32>>, CheckpointError> {
        self.array(key, "an array of 32-bit integers", |value| match value {
            MetadataValue::Integer(number) => number.try_into().ok(),
            _ => None,
        })
    }

    /// The single-precision numbers of an array, finite or not.
    pub(super) fn floats(&self, key: &str) -> Result<Option<Vec<f32>>, CheckpointError> {
        self.array(key, "an array of single-precision numbers", |value| match value {
            MetadataValue::Single(number) => Some(number),
            _ => None,
        })
    }

    fn array<T>(
        &self,
        key: &str,
        expected: &str,
        convert: impl Fn(MetadataValue<'a>) -> Option<T>,
    ) -> Result<Option<Vec<T>>, CheckpointError> {
        self.typed(key, expected, |value| match *value {
            MetadataValue::Array { value_type, bytes, .. } => {
                let size = scalar_bytes(value_type)? as usize;
                bytes
                    .chunks_exact(size)
                    .map(|bytes| convert(MetadataValue::scalar(value_type, bytes)?))
                    .collect()
            }
            _ => None,
        })
    }
}
