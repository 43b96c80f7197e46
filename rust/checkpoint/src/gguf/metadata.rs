//! GGUF metadata: typed look-ups by key. A key that is absent is `None`; one of another type is an error.

use std::collections::BTreeMap;
use std::path::Path;

use super::header::scalar_bytes;
use crate::error::{CheckpointError, shown};

/// One value. Arrays stay in the file's bytes until asked for.
pub(super) enum Value<'a> {
    Integer(i128),
    Single(f32),
    Double(f64),
    Bool(bool),
    Text(&'a str),
    Array { kind: u32, count: usize, bytes: &'a [u8] },
}

impl<'a> Value<'a> {
    /// The scalar of a value type in exactly its bytes; `None` for a truth value that is neither.
    pub(super) fn scalar(kind: u32, bytes: &[u8]) -> Option<Value<'a>> {
        let mut wide = [0; 8];
        wide[..bytes.len()].copy_from_slice(bytes);
        let unsigned = u64::from_le_bytes(wide);
        let signed =
            |bits: u32| Value::Integer(i128::from((unsigned << (64 - bits)).cast_signed() >> (64 - bits)));
        Some(match kind {
            0 | 2 | 4 | 10 => Value::Integer(i128::from(unsigned)),
            1 => signed(8),
            3 => signed(16),
            5 => signed(32),
            11 => signed(64),
            6 => Value::Single(f32::from_bits(unsigned as u32)),
            12 => Value::Double(f64::from_bits(unsigned)),
            7 if unsigned <= 1 => Value::Bool(unsigned == 1),
            _ => return None,
        })
    }
}

/// The double that is written with the fewest digits among those that round to this single: 1e-5, as the model's makers
/// wrote it, and not 9.999999747378752e-6.
pub(super) fn shortest(single: f32) -> f64 {
    single.to_string().parse().unwrap_or_else(|_| f64::from(single))
}

/// All metadata of a file.
pub(super) struct Metadata<'a> {
    file: &'a Path,
    values: BTreeMap<&'a str, Value<'a>>,
}

impl<'a> Metadata<'a> {
    pub(super) fn new(file: &'a Path) -> Self {
        Metadata { file, values: BTreeMap::new() }
    }

    pub(super) fn insert(&mut self, key: &'a str, value: Value<'a>) -> Result<(), CheckpointError> {
        match self.values.insert(key, value) {
            None => Ok(()),
            Some(_) => Err(self.malformed(key, "there are two of this key")),
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

    /// The keys that begin with this prefix, without it.
    pub(super) fn keys_below(&self, prefix: &'a str) -> impl Iterator<Item = &'a str> {
        self.values.keys().filter_map(move |key| key.strip_prefix(prefix))
    }

    fn typed<T>(
        &self,
        key: &str,
        expected: &str,
        convert: impl FnOnce(&Value<'a>) -> Option<T>,
    ) -> Result<Option<T>, CheckpointError> {
        let Some(value) = self.values.get(key) else { return Ok(None) };
        convert(value).map(Some).ok_or_else(|| {
            let found = match value {
                Value::Integer(number) => number.to_string(),
                Value::Single(number) => number.to_string(),
                Value::Double(number) => number.to_string(),
                Value::Bool(truth) => truth.to_string(),
                Value::Text(text) => format!("the text {}", shown(text)),
                Value::Array { count, .. } => format!("an array of {count}"),
            };
            self.malformed(key, format!("{found}; {expected} is expected"))
        })
    }

    /// An integer of any width and sign that is not negative.
    pub(super) fn integer(&self, key: &str) -> Result<Option<u64>, CheckpointError> {
        self.typed(key, "a non-negative integer", |value| match *value {
            Value::Integer(number) => number.try_into().ok(),
            _ => None,
        })
    }

    /// A finite number; see [`shortest`].
    pub(super) fn float(&self, key: &str) -> Result<Option<f64>, CheckpointError> {
        let number = self.typed(key, "a finite number", |value| match *value {
            Value::Single(number) => Some(shortest(number)),
            Value::Double(number) => Some(number),
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
            Value::Bool(truth) => Some(truth),
            _ => None,
        })
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<&'a str>, CheckpointError> {
        self.typed(key, "a text", |value| match *value {
            Value::Text(text) => Some(text),
            _ => None,
        })
    }

    /// The texts of an array; the index of one that is not UTF-8 is named.
    pub(super) fn texts(&self, key: &str) -> Result<Option<Vec<String>>, CheckpointError> {
        let array = self.typed(key, "an array of texts", |value| match *value {
            Value::Array { kind: 8, count, bytes } => Some((count, bytes)),
            _ => None,
        })?;
        let Some((count, mut bytes)) = array else { return Ok(None) };
        // Each text took at least the eight bytes of its length, so the count is no more than the file can hold.
        let mut texts = Vec::with_capacity(count);
        while let Some((length, rest)) = bytes.split_first_chunk::<8>() {
            let (text, rest) = rest.split_at(u64::from_le_bytes(*length) as usize);
            let text = std::str::from_utf8(text)
                .map_err(|error| self.malformed(key, format!("text {}: {error}", texts.len())))?;
            texts.push(text.to_owned());
            bytes = rest;
        }
        Ok(Some(texts))
    }

    /// The integers of an array.
    pub(super) fn integers(&self, key: &str) -> Result<Option<Vec<i32>>, CheckpointError> {
        self.array(key, "an array of integers of 32 bits", |value| match value {
            Value::Integer(number) => number.try_into().ok(),
            _ => None,
        })
    }

    /// The single-precision numbers of an array; they need not be finite.
    pub(super) fn floats(&self, key: &str) -> Result<Option<Vec<f32>>, CheckpointError> {
        self.array(key, "an array of single-precision numbers", |value| match value {
            Value::Single(number) => Some(number),
            _ => None,
        })
    }

    fn array<T>(
        &self,
        key: &str,
        expected: &str,
        convert: impl Fn(Value<'a>) -> Option<T>,
    ) -> Result<Option<Vec<T>>, CheckpointError> {
        self.typed(key, expected, |value| match *value {
            Value::Array { kind, bytes, .. } => {
                let size = scalar_bytes(kind)? as usize;
                bytes.chunks_exact(size).map(|bytes| convert(Value::scalar(kind, bytes)?)).collect()
            }
            _ => None,
        })
    }
}
