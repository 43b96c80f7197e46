//! JSON files of bounded size, and typed looks into their objects.
//!
//! A limit is far above any real file's size and bounds what parsing can allocate. Nesting is bounded by the parser.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::error::{CheckpointError, shown};

pub(crate) const CONFIG_LIMIT: u64 = 4 << 20;

/// The whole of a file if there is one. Refuses more than `limit` bytes, and anything but a regular file.
pub(crate) fn read(path: &Path, limit: u64) -> Result<Option<Vec<u8>>, CheckpointError> {
    let io = |source| CheckpointError::io(path, source);
    let metadata = match path.metadata() {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(io(error)),
    };
    if !metadata.is_file() {
        return Err(CheckpointError::not_a_model(path, "is no regular file"));
    }
    let mut bytes = Vec::new();
    File::open(path).map_err(io)?.take(limit + 1).read_to_end(&mut bytes).map_err(io)?;
    if bytes.len() as u64 > limit {
        return Err(CheckpointError::malformed(
            path,
            "size",
            format!("{} bytes; the limit is {limit}", metadata.len()),
        ));
    }
    Ok(Some(bytes))
}

/// The text of a file, if there is one.
pub(crate) fn read_text(path: &Path, limit: u64) -> Result<Option<String>, CheckpointError> {
    let Some(bytes) = read(path, limit)? else { return Ok(None) };
    let text = String::from_utf8(bytes)
        .map_err(|error| CheckpointError::malformed(path, "text", error.to_string()))?;
    Ok(Some(text))
}

/// A file that holds one object, if there is one.
pub(crate) fn read_object(path: &Path) -> Result<Option<Object>, CheckpointError> {
    let Some(bytes) = read(path, CONFIG_LIMIT)? else { return Ok(None) };
    let fields = serde_json::from_slice(&bytes)
        .map_err(|error| CheckpointError::malformed(path, "JSON object", shown(&error.to_string())))?;
    Ok(Some(Object { path: path.to_owned(), fields }))
}

/// An object and the file it came from. A field that is missing or `null` is `None`; one of another type is an error.
#[derive(Debug)]
pub(crate) struct Object {
    pub(crate) path: PathBuf,
    pub(crate) fields: Map<String, Value>,
}

impl Object {
    pub(crate) fn get(&self, field: &str) -> Option<&Value> {
        self.fields.get(field).filter(|value| !value.is_null())
    }

    pub(crate) fn bool(&self, field: &str) -> Result<Option<bool>, CheckpointError> {
        self.typed(field, "true or false", Value::as_bool)
    }

    pub(crate) fn u32(&self, field: &str) -> Result<Option<u32>, CheckpointError> {
        self.typed(field, "a non-negative integer of 32 bits", |value| value.as_u64()?.try_into().ok())
    }

    pub(crate) fn f32(&self, field: &str) -> Result<Option<f32>, CheckpointError> {
        self.typed(field, "a number that fits 32 bits", |value| {
            Some(value.as_f64()? as f32).filter(|number| number.is_finite())
        })
    }

    /// The ids of one token or a list of them. Negative ids are how some files write "none".
    pub(crate) fn token_ids(&self, field: &str) -> Result<Option<Vec<u32>>, CheckpointError> {
        self.typed(field, "a token id or a list of them", |value| {
            let ids = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
            let ids = ids.iter().map(Value::as_i64).collect::<Option<Vec<_>>>()?;
            ids.into_iter().filter(|&id| id >= 0).map(|id| id.try_into().ok()).collect()
        })
    }

    pub(crate) fn typed<'a, T>(
        &'a self,
        field: &str,
        expected: &str,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, CheckpointError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        convert(value).map(Some).ok_or_else(|| {
            let found = match value {
                Value::Array(_) => "a list".to_owned(),
                Value::Object(_) => "an object".to_owned(),
                value => shown(&value.to_string()),
            };
            CheckpointError::malformed(&self.path, field, format!("{found}; {expected} is expected"))
        })
    }
}
